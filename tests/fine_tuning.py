"""Tiny models with the kinds of tokenizer that Llama 3 and Mistral have, as `transformers` saves them."""

import json
from pathlib import Path
from typing import Any

TEXT = ["the quick brown fox jumps over the lazy dog, and says hello to the world of words"] * 4
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL_SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 128, "tie_word_embeddings": False}


def write_llama3_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE with a post-processor that adds <|begin_of_text|>; returns its number of ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=LLAMA3_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(TEXT, trainer)
    own.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _begin_with(own, LLAMA3_SPECIAL[0])]
    )
    _save(own, folder, LLAMA3_TEMPLATE, {"bos_token": LLAMA3_SPECIAL[0], "eos_token": "<|eot_id|>"})
    return own.get_vocab_size()


def write_mistral_tokenizer(folder: Path) -> int:
    """Write a BPE as SentencePiece has it (▁ for a space, bytes as a fallback) that adds <s>."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    own = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=MISTRAL_SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
    )
    own.train_from_iterator([text.replace(" ", "▁") for text in TEXT], trainer)
    own.post_processor = _begin_with(own, "<s>")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    _save(own, folder, MISTRAL_TEMPLATE, special)
    return own.get_vocab_size()


def _begin_with(own: Any, token: str) -> Any:
    from tokenizers import processors

    pair = f"{token} $A {token} $B"
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=pair, special_tokens=[(token, own.token_to_id(token))]
    )


def _save(own: Any, folder: Path, template: str, special: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    own.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **special, "chat_template": template}))


def write_base_model(kind: str, folder: Path, **sizes: int) -> None:
    """Write a random model of `kind` with its tokenizer, as a Hugging Face directory; `sizes`: others than `SIZES`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if kind == "llama":
        size = write_llama3_tokenizer(folder)
        ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 4, "pad_token_id": None}
        stops = {**ids, "eos_token_id": [1, 4]}
    else:
        size = write_mistral_tokenizer(folder)
        stops = ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(5)
    config = AutoConfig.for_model(**SIZES | sizes, model_type=kind, vocab_size=size, **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that its texts have more than one word
    model.save_pretrained(folder)
    GenerationConfig(**stops, temperature=0.6, do_sample=True).save_pretrained(folder)


def write_dialogues(path: Path, count: int = 40) -> None:
    """Write a list of dialogues in JSON."""
    words = TEXT[0].split()
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {words[i % len(words)]}"},
                {"role": "assistant", "content": f"hello {words[i % len(words)]} " * (1 + i % 3)},
            ]
        }
        for i in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1))
