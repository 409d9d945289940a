"""Trained models in Python: as a module of PyTorch, and as a model of `transformers`."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.api.inputs import require_text
from muster.api.torch_import import import_torch_module
from muster.config.load_config import load_run_config
from muster.spec.errors import ConfigError, MusterError
from muster.spec.plan import Precision

if TYPE_CHECKING:
    from muster.model.decoder import Decoder


def load_model(path: str | Path, *, precision: Precision = "fp32") -> "Decoder":
    """Return a trained model as an `nn.Module` that maps token ids (B, S) to logits (B, S, V), on the CPU.

    `path` is a run, a checkpoint, a Hugging Face directory or another directory of weights that `muster checkpoint`
    reads. `state_dict()` has the whole model's parameters under Muster's names. Raises ConfigError where there is no
    model, MusterError where it is damaged.
    """
    place = _existing(path)
    torch = import_torch_module("torch")
    from muster.checkpoint.initial_weights import load_initial_weights
    from muster.checkpoint.local_shard import LocalShard
    from muster.checkpoint.model_directory import model_weights, open_directory
    from muster.parallel.inference import build_inference_decoder

    directory = open_directory(place)
    model_weights(directory)
    assert directory.model is not None
    model, layouts = build_inference_decoder(directory.model, precision, torch.device("cpu"), None)
    pieces = [LocalShard(f"model/{name}", layouts[name], parameter) for name, parameter in model.named_parameters()]
    load_initial_weights(place, directory.model, pieces)
    return model.requires_grad_(True)


def to_transformers(path: str | Path) -> tuple[Any, Any]:
    """Return a trained model and its tokenizer as `transformers` has them; the tokenizer is None where there is none.

    The model is written to a temporary directory on the way, as `muster checkpoint convert --to hf` does. Raises
    ConfigError where there is no model, InfeasibleError where no family of `transformers` has all of it.
    """
    place = _existing(path)
    conversion = import_torch_module("muster.checkpoint.convert")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError:
        raise MusterError(
            "to_transformers needs transformers, which is not installed: pip install 'muster-llm[hf]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="muster-export-") as folder:
        target = Path(folder) / "model"
        options = conversion.ConversionOptions(target_format="hf")
        found = conversion.convert(place, target, options, lambda _: None, lambda _: None)
        tokenizer = None if found.tokenizer is None else AutoTokenizer.from_pretrained(target)
        return AutoModelForCausalLM.from_pretrained(target, dtype="auto"), tokenizer


def _existing(path: str | Path) -> Path:
    """Return the directory, with the plugins of a run loaded. Raises ConfigError where there is none."""
    require_text("path", path, "the path of a run or of another directory of weights")
    from muster.checkpoint.checkpoint_dir import named_checkpoint, split_average

    place = named_checkpoint(split_average(Path(path))[0])
    if not place.is_dir():
        raise ConfigError(f"there is no directory {place}: expected a run, or another directory of weights")
    for run in (place, place.resolve().parent.parent):
        if (run / "config.yaml").exists():
            load_run_config(None, run / "config.yaml", [])
            break
    return Path(path)
