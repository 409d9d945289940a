"""Python forms of the verbs for trained models: `muster eval`, `generate`, `verify` and `checkpoint convert`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from muster.api.defaults import DEFAULT_SAMPLES
from muster.api.inputs import require_positive_int, require_text, resolve_model
from muster.api.torch_import import import_torch_module
from muster.report.parity import ParityResult
from muster.spec.dotted_keys import flatten
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from muster.spec.suggest import did_you_mean
from muster.spec.supported import SUPPORTED_PRECISIONS
from muster.spec.units import parse_bytes

if TYPE_CHECKING:
    from muster.train.text_generation import GenerationRequest


def evaluate(
    place: str | Path,
    *,
    source: str | None = None,
    tokenizer: str | None = None,
    on_invalid_row: Literal["stop", "skip"] | None = None,
    seq_len: int | None = None,
    samples: int = DEFAULT_SAMPLES,
    precision: str | None = None,
    plan: str = "dp1",
    path: int | None = None,
    reroute_every: int | None = None,
) -> dict[str, dict[str, float]]:
    """Return loss, perplexity and number of tokens of a trained model by source, `all` among them; the arguments are
    the flags of `muster eval`.

    `place` is a run, a checkpoint or a Hugging Face directory. Raises ConfigError, InfeasibleError, MusterError.
    """
    require_text("place", place, "a run, a checkpoint or a Hugging Face directory")
    require_positive_int("seq_len", seq_len)
    require_positive_int("samples", samples)
    require_positive_int("reroute_every", reroute_every)
    if precision is not None and precision not in SUPPORTED_PRECISIONS:
        raise ConfigError(
            f"precision {precision!r}: expected one of {', '.join(SUPPORTED_PRECISIONS)}"
            f"{did_you_mean(precision, SUPPORTED_PRECISIONS)}"
        )
    verb = import_torch_module("muster.train.evaluate")
    return verb.evaluate(
        verb.EvalOptions(
            model_path=Path(place),
            source=source,
            tokenizer=tokenizer,
            seq_len=seq_len,
            samples=samples,
            on_invalid_row=on_invalid_row,
            precision=precision,
            plan=plan,
            path=path,
            reroute_every=reroute_every,
        )
    )


@dataclass(frozen=True)
class Generation:
    """Texts of a trained model."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    """The continuation of each prompt."""
    checkpoint: Path
    step: int
    plan: Plan


def generate(
    run: str | Path,
    prompts: str | Sequence[str],
    *,
    tokens: int = 200,
    temperature: float = 0.7,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    chat: bool = False,
    system: str | None = None,
    plan: str = "dp1",
    window: int | None = None,
    memory_limit: int | str | None = None,
    path: int | None = None,
    reroute_every: int | None = None,
) -> Generation:
    """Let a trained model continue prompts, or with `chat` answer them; the arguments are the flags of `muster
    generate`.

    `run` is a run directory, a checkpoint or a converted directory. Raises ConfigError, InfeasibleError, MusterError.
    """
    texts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    drawing, memory = (temperature, top_k, top_p, seed), (window, memory_limit)
    paths = path, reroute_every
    request = _generation_request(run, texts, tokens, drawing, stop, chat, system, plan, memory, paths)
    found = import_torch_module("muster.train.generate").run_generation(request)
    model = request.trained_model
    return Generation(texts, tuple(found), model.checkpoint, model.step, request.plan)


def converse(
    run: str | Path,
    lines: Iterable[str],
    *,
    tokens: int = 200,
    temperature: float = 0.7,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    system: str | None = None,
    plan: str = "dp1",
    window: int | None = None,
    memory_limit: int | str | None = None,
    path: int | None = None,
) -> Iterator[str]:
    """Yield a trained model's answer to each line, the user's next message of one dialogue; otherwise as `generate`."""
    drawing, memory = (temperature, top_k, top_p, seed), (window, memory_limit)
    request = _generation_request(run, (), tokens, drawing, stop, True, system, plan, memory, (path, None))
    if path is None and request.trained_model.paths.num_paths > 1:
        raise ConfigError("a dialogue keeps to one of the model's paths: expected --path with its number, such as 0")
    if request.plan.world_size > 1:
        raise ConfigError(f"a dialogue runs in one process: expected a plan without tp, got {plan}")
    verb = import_torch_module("muster.train.text_generation")
    device = import_torch_module("muster.parallel.world").pick_device(0, 1)
    with import_torch_module("muster.train.generation_memory").limit_of_request(request, device):
        generator = verb.TextGenerator(request, device, path=path or 0)
        messages = [] if system is None else [{"role": "system", "content": system}]
        for line in lines:
            messages.append({"role": "user", "content": line})
            (answer,) = generator.texts([verb.encode_dialogue(messages, generator.tokenizer)])
            yield answer
            messages.append({"role": "assistant", "content": answer})


def _generation_request(
    run: str | Path,
    prompts: tuple[str, ...],
    tokens: int,
    drawing: tuple[float, int, float, int],
    stop: str | Sequence[str],
    chat: bool,
    system: str | None,
    plan: str,
    memory: tuple[int | None, int | str | None],
    paths: tuple[int | None, int | None],
) -> "GenerationRequest":
    """Return the request for texts; `drawing` is (temperature, top_k, top_p, seed), `memory` (window, limit),
    `paths` (path, positions after which it is chosen anew). Raises ConfigError, InfeasibleError."""
    from muster.spec.inference_plans import require_generation_supported
    from muster.spec.plan_name import parse_plan_name
    from muster.spec.text_generation import SamplingParams

    require_text("run", run, "a run directory, a checkpoint or a converted directory")
    require_positive_int("tokens", tokens)
    window, limit = memory
    require_positive_int("window", window)
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if "" in stops:
        raise ConfigError("stop: expected a text before which the new one ends, got an empty one")
    if system is not None and not chat:
        raise ConfigError("system is the message before a dialogue: expected chat with it")
    temperature, top_k, top_p, seed = drawing
    try:
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"{problem['loc'][0]} {problem['input']}: {problem['msg'].lower()}") from None
    verb = import_torch_module("muster.train.text_generation")
    model = verb.find_trained_model(Path(run))
    spread = parse_plan_name(plan, Plan(precision=model.plan.precision))
    require_generation_supported(spread, model.model)
    path, reroute_every = paths
    require_positive_int("reroute_every", reroute_every)
    if path is not None:
        model.require_path(path)
    model.require_rerouting(reroute_every, path)
    if window is not None and spread.default_strategy.offload_param == "none":
        raise ConfigError(
            f"window {window} is the number of layers on the device of those in host memory or on disk: expected a plan"
            f" with oparam or oparamd, got {plan}"
        )
    return verb.GenerationRequest(
        trained_model=model,
        plan=spread,
        prompts=prompts,
        max_new_tokens=tokens,
        sampling=sampling,
        stop=stops,
        chat=chat,
        system=system,
        **({} if window is None else {"window": window}),
        memory_limit_bytes=None if limit is None else parse_bytes(str(limit), "--memory-limit"),
        path=path,
        reroute_every=reroute_every,
    )


def verify(
    file: str | Path | None = None,
    *,
    preset: str | None = None,
    against: str | Sequence[str] = (),
    steps: int = 3,
    tolerance: float | None = None,
    precision: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **keys: Any,
) -> list[ParityResult]:
    """Compare a few steps of a run, under its own plan and under those `against` it, with plain PyTorch on one process;
    `.agrees` of each result says whether it is the same within the tolerance.

    `file` is a run file or a run directory, `keys` are other values for some of its keys, as in `muster.load`;
    `progress` receives a sentence for each plan. Raises ConfigError, InfeasibleError, MusterError.
    """
    from muster.config.load_config import load_run_config
    from muster.planner.auto import resolve_plan

    if file is None and preset is None:
        raise ConfigError("nothing to verify: expected a run file or a preset, such as tiny")
    require_positive_int("steps", steps)
    path = None if file is None else Path(file)
    path = path / "config.yaml" if path is not None and path.is_dir() else path
    others = (against,) if isinstance(against, str) else tuple(against)
    tree = list(flatten(keys))
    common = [("parallel.precision", precision)] if precision else []
    layers = [[*tree, *choice, *common] for choice in ([], *([("parallel", plan)] for plan in others))]
    contenders = [load_run_config(preset, path, layer) for layer in layers]
    plans = [resolve_plan(contender, None) for contender in contenders]
    compare = import_torch_module("muster.train.verify.run").verify
    return compare(contenders[0].config, plans, _run_dir(path, preset), steps, tolerance, progress)


def _run_dir(file: Path | None, preset: str | None) -> Path:
    """Return the directory of the run, existing or not, so that its token store is found again."""
    if file is None:
        return Path("runs") / str(preset)
    return file.parent if (file.parent / "plan.yaml").exists() else Path("runs") / file.stem


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Literal["muster", "hf", "dcp", "peft"],
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | Path | None = None,
    model: str | Path | ModelSpec | None = None,
    residual: Literal["standard", "ladder"] | None = None,
    set_total: Callable[[int], None] = lambda _: None,
    progress: Callable[[int], None] = lambda _: None,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Write a directory of weights in another format to `target`, which must not exist, and return its facts; the
    arguments are those of `muster checkpoint convert`.

    `set_total` receives the bytes to write, `progress` those of each part as it is written, `report` a sentence for
    each damaged checkpoint before which an older one of a run is taken. Raises ConfigError, InfeasibleError,
    MusterError.
    """
    require_text("source", source, "a directory of weights")
    require_text("target", target, "a directory to write")
    if to not in ("muster", "hf", "dcp", "peft"):
        raise ConfigError(f"to: expected muster, hf or dcp, got {to!r}")
    verb = import_torch_module("muster.checkpoint.convert")
    options = verb.ConversionOptions(
        target_format=to,
        dtype=dtype,
        max_shard_bytes=parse_bytes(str(max_shard_size), "--max-shard-size"),
        tokenizer=None if tokenizer is None else Path(tokenizer),
        model=None if model is None else resolve_model(model),
        residual=residual,
    )
    done = verb.convert(Path(source), Path(target), options, set_total, progress, report)
    return {
        "version": 1,
        "source": {"path": str(done.source.folder), "format": done.source.format, "step": done.source.step},
        "target": {"path": str(target), "format": to},
        "tensors": done.tensors,
        "parameters": done.parameters,
        "bytes": done.nbytes,
        "dtype": done.dtype,
        "files": list(done.files),
        "tokenizer": done.tokenizer,
        "note": done.note,
    }
