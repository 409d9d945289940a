"""Hugging Face model families: one file and one line each. A family holds its configuration and its weight map."""

from muster.interop.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DOTS1, KIMI_K2
from muster.interop.families.family import ModelFamily
from muster.interop.families.gemma import GEMMA2, GEMMA3
from muster.interop.families.gpt2 import GPT2
from muster.interop.families.gpt_neox import GPT_NEOX
from muster.interop.families.gpt_oss import GPT_OSS
from muster.interop.families.llama import LLAMA, MINISTRAL, MISTRAL, QWEN2, QWEN3, SEED_OSS
from muster.interop.families.mixtral import MIXTRAL
from muster.interop.families.olmo2 import OLMO2
from muster.interop.families.phi3 import PHI3
from muster.interop.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from muster.interop.families.smollm3 import SMOLLM3

FAMILIES: dict[str, ModelFamily] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt2": GPT2,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "seed_oss": SEED_OSS,
    "ministral": MINISTRAL,
    "phi3": PHI3,
    "gpt_oss": GPT_OSS,
    "qwen2_moe": QWEN2_MOE,
    "deepseek_v2": DEEPSEEK_V2,
    "kimi_k2": KIMI_K2,
    "dots1": DOTS1,
    "smollm3": SMOLLM3,
    "olmo2": OLMO2,
    "gpt_neox": GPT_NEOX,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
}
"""Families by the `model_type` of a config.json. A ModelSpec is written as the family that it came from, or the
first that has all of it."""
