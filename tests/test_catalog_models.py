"""Every model of the catalogue has as many parameters as its makers say."""

import pytest

from muster.catalog import names, read
from muster.config.named_model import load_model
from muster.interop.hf_config import hf_config_from_spec
from muster.spec.errors import InfeasibleError

EXACT = {
    # The sums over the tensors of the released weights ("Model size" on their pages at huggingface.co).
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "pythia-160m": 162_322_944,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
OWN = {
    "demo": 2_460_480,
    "tiny": 427_200,
    "tiny-deepseek": 876_600,
    "tiny-gpt-oss": 936_736,
    "tiny-linear": 461_280,
    "tiny-moe": 1_204_928,
    "gla-1.3b-hybrid": 1_365_210_112,
}
ROUNDED = {
    "gpt3-175b": 174.6,  # arXiv:2005.14165, table D.1
    # arXiv:2104.04473, table 1
    "megatron-1.7b": 1.7,
    "megatron-3.6b": 3.6,
    "megatron-7.5b": 7.5,
    "megatron-18b": 18.4,
    "megatron-39b": 39.1,
    "megatron-76b": 76.1,
    "megatron-145b": 145.6,
    "megatron-310b": 310.1,
    "megatron-530b": 529.6,
    "megatron-1t": 1008.0,
    "megatron-22b": 22,  # arXiv:2205.05198, table 3
    "megatron-175b": 175,
    "deepseek-v3-main": 671,
    "deepseek-v3": 671,  # arXiv:2412.19437, abstract: without its head for the token after
    "gemma-3-4b": 3.9,  # arXiv:2503.19786, table 1
    "gemma-3-12b": 11.8,
    "gemma-3-27b": 27.0,
    "gpt-oss-20b": 20.91,  # arXiv:2508.10925, table 1
    "gpt-oss-120b": 116.83,
}
"""In billions, where no exact number was published."""
ACTIVE = {
    "mixtral-8x7b": 12.9,  # arXiv:2401.04088, "13B", and mistral.ai's announcement
    "mixtral-8x22b": 39,  # mistral.ai's announcement
    "qwen3-30b-a3b": 3.3,  # its page at huggingface.co
    "qwen3-235b-a22b": 22,
    "deepseek-v3-main": 37,
    "deepseek-v3": 37,  # arXiv:2412.19437, abstract
}
"""In billions."""


@pytest.mark.parametrize("name", names("models"))
def test_a_model_has_its_published_size(name):
    spec = load_model(name)
    if name in EXACT | OWN:
        assert spec.num_parameters == (EXACT | OWN)[name]
    else:
        main = spec.model_copy(update={"mtp_layers": 0})
        digits = len(str(ROUNDED[name]).partition(".")[2])
        assert round(main.num_parameters / 1e9, digits) == ROUNDED[name]
    if name not in OWN:
        assert f"{spec.num_parameters:,} parameters" in read("models", name), "its file says so too"


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_as_many_parameters_as_published(name):
    digits = len(str(ACTIVE[name]).partition(".")[2])
    found = load_model(name).num_active_parameters / 1e9
    assert abs(found - ACTIVE[name]) <= 0.6 * 10**-digits


@pytest.mark.parametrize("name", EXACT)
def test_a_released_model_has_a_configuration(name):
    assert hf_config_from_spec(load_model(name))["architectures"]


def test_a_model_without_a_family_says_so():
    with pytest.raises(InfeasibleError, match="nearest is"):
        hf_config_from_spec(load_model("gla-1.3b-hybrid"))
