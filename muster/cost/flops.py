"""Floating-point operations of a decoder."""

from muster.spec.model import ModelSpec, parameters


def forward_flops_per_token(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of the forward pass for one token of a sequence of `seq_len`: matrix products only.

    2 per weight that multiplies (all but the norms and the embedding's look-up, with a tied head counted as the head),
    and 4 · seq_len · heads · head_dim per layer for scores and weighted values. As in PaLM (arXiv:2204.02311,
    appendix B) and Megatron-LM (arXiv:2104.04473, appendix) the causal mask is not discounted: all scores count.
    """
    looked_up = ("embed.weight", "positions.weight")
    matrices = sum(shape[0] * shape[1] for name, shape in parameters(spec) if len(shape) == 2 and name not in looked_up)
    head = spec.vocab_size * spec.hidden_size if spec.tied_embeddings else 0
    attention = 4 * seq_len * spec.num_heads * spec.head_dim * spec.num_layers
    return 2 * (matrices + head) + attention


def train_flops_per_token(spec: ModelSpec, seq_len: int) -> int:
    """FLOPs of forward and backward for one token: each matrix product of the forward has two in the backward.

    Nothing that is computed again (recompute, flash attention's backward) counts: the model FLOPs of MFU.
    """
    return 3 * forward_flops_per_token(spec, seq_len)
