"""Interoperability: Hugging Face configurations and weights; configurations of Megatron-LM, torchtitan, nanotron and
DeepSpeed."""
