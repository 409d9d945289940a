"""Check of a resumed run: which keys may differ from the run's beginning; other changes are shown and refused."""

import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from muster.config.load_config import load_run_config
from muster.config.optim_config import OptimConfig
from muster.config.optimizers import OPTIMIZERS
from muster.config.run_config import RunConfig
from muster.config.run_paths import CONTENT_KEYS, with_absolute_paths, without_data_locations
from muster.config.swarm_config import SwarmConfig
from muster.data.dataset import SampleStream
from muster.plugins.loader import PluginFile
from muster.spec.errors import ConfigError, MusterError
from muster.spec.model import ModelSpec, parameter_shapes
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES
from muster.spec.units import pluralize
from muster.train.data import run_tokenizer

CHANGEABLE_KEYS = (
    "train.steps",
    "train.tokens",
    "train.epochs",
    "train.log_every",
    "train.save_every",
    "train.keep_last",
    "train.keep_every",
    "train.keep_best",
    "train.early_stopping_patience",
    "train.early_stopping_min_delta",
    "train.ephemeral_every",
    "train.remote_checkpoint_dir",
    "train.in_memory_checkpoint_every",
    "train.in_memory_checkpoint_dir",
    "train.async_save",
    "eval.every",
    "eval.batches",
    "tracking.tensorboard",
    "tracking.wandb",
    "tracking.wandb_project",
    "tracking.wandb_mode",
    "train.max_minutes",
    "train.callbacks",
    "train.sample_tokens",
    "train.max_consecutive_skips",
    "train.spike_sigmas",
    "train.spike_window",
    "train.hang_timeout_s",
    "train.restarts",
    "train.memory_limit_bytes",
    "train.elastic",
    "train.spares",
    "train.recovery",
    "train.checkfree_weights",
    "train.checkfree_lr_scale",
    "train.rebalance_experts_every",
    "train.straggler_check_every",
    "train.straggler_action",
    "train.gradient_check_every",
    "data.cache",
    "outer.coordinator",
    "outer.secret_file",
    "outer.announce",
    "outer.connections",
    "swarm",
    *(f"swarm.{key}" for key in SwarmConfig.model_fields),
)
"""Keys that may change on resuming: they affect neither the model, the sample stream nor the optimization."""

RESUME_HINT = "use the same, another --run, --fresh to start anew, or --allow-changes to resume all the same"


def check_config_unchanged(run_dir: Path, config: RunConfig, steps_done: int, allow: bool = False) -> None:
    """Check that a run resumes with the configuration that it began with, except for `CHANGEABLE_KEYS` and the plan.

    `steps_done` are the steps completed before. Another number of steps is allowed, with a note; with `allow` so are
    all other changes. Raises ConfigError.
    """
    before = load_run_config(None, run_dir / "config.yaml", []).config
    _require_same_adapters(run_dir, before, config)
    changed = config_changes(before, config)
    if allow and (fixed := [change for change in changed if change.startswith(("outer.", "section outer"))]):
        raise ConfigError(
            f"{run_dir} has states of exchanges between islands, which go on as they began ({'; '.join(fixed)}): give"
            f" the same section outer, or another --run with --init-from {run_dir}"
        )
    if changed and not allow:
        raise ConfigError(f"{run_dir} holds a run with another configuration ({'; '.join(changed)}): {RESUME_HINT}")
    _require_same_shapes(run_dir, before.model, config.model)
    for change in changed:
        print(f"allowed: {change}")
    steps = config.train.num_steps
    if steps < steps_done:
        raise ConfigError(
            f"{run_dir} has done {steps_done} steps already: expected train.steps of {steps_done} or more, got {steps}"
            " (another --run or --fresh starts anew)"
        )
    if steps not in (steps_done, before.train.num_steps):
        print(
            f"train.steps was {before.train.num_steps}, now {steps}: from step {steps_done + 1} on, the learning"
            f" rate is that"
            f" of {steps} steps, so the result is not that of {steps} steps from the start"
        )


def check_data_unchanged(run_dir: Path, dataset: SampleStream, counters: dict, allow: bool = False) -> None:
    """Check that a run resumes with the same tokens, unless `allow`. Raises ConfigError."""
    if counters.get("data") == dataset.fingerprint:
        return
    change = f"({counters.get('data')}, now {dataset.fingerprint})"
    if not allow:
        raise ConfigError(f"the text of data.source is not what {run_dir} began with {change}: {RESUME_HINT}")
    print(f"allowed: another text {change}, from sample {counters['samples_consumed']} of its stream on")


def require_same_islands(run_dir: Path, before: int, now: int) -> None:
    """Raise ConfigError where a run would resume on another number of islands, each of which has its own states."""
    if before != now:
        raise ConfigError(
            f"{run_dir} was trained on {pluralize(before, 'island')}, each with an optimizer state of its own,"
            f" and the plan has {now}: give a plan with as many, or another --run with --init-from {run_dir}"
        )


_DELAY_FIELDS = ("schedule", "flush_every", "pp", "micro_batch_size", "dp_replicate")
"""Fields of a plan that the delays of gradients in an asynchronous pipeline follow from, for one batch."""


def changed_delays_note(before: Mapping[str, Any], plan: Plan, steps_done: int) -> str | None:
    """Return a sentence where gradients come late by another number of steps than under the plan `before`, some of
    whose fields may be missing; None where they don't, or are never late."""
    now = plan.model_dump(include=set(_DELAY_FIELDS))
    keys = [key for key in _DELAY_FIELDS if key != "flush_every" or plan.schedule_entry.is_asynchronous]
    changed = [(key, before[key]) for key in keys if key in before and before[key] != now[key]]
    schedules = {plan.schedule, before.get("schedule", plan.schedule)}
    if not changed or not any(SCHEDULES[one].is_asynchronous for one in schedules if one in SCHEDULES):
        return None
    told = ", ".join(f"{key} was {old}, now {now[key]}" for key, old in changed)
    return (
        f"{told}: from step {steps_done + 1} on, gradients are late by another number of steps, so the result is that"
        " of neither plan from the start"
    )


def _require_same_adapters(run_dir: Path, before: RunConfig, after: RunConfig) -> None:
    """Raise ConfigError where a checkpoint's adapters would be lost or not fit, which nothing can allow."""
    old, new = (
        adapter
        and f"{adapter.kind} of rank {adapter.width} at {', '.join(adapter.target_modules)}"
        f"{' beside weights in 4 bits' if adapter.load_in_4bit else ''}"
        for adapter in (before.model.adapter, after.model.adapter)
    )
    if old is not None and old != new:
        raise ConfigError(
            f"{run_dir} has trained adapters ({old}), which don't go on under the section adapter of now"
            f" ({new or 'none'}): give the same section, or --init-from {run_dir} with another --run, which merges them"
            " into the model"
        )


def _require_same_shapes(run_dir: Path, before: ModelSpec, after: ModelSpec) -> None:
    """Raise ConfigError where a checkpoint's parameters have no place in the model, which nothing can allow."""
    shapes = dict(parameter_shapes(after))
    for name, shape in parameter_shapes(before):
        if shapes.get(name) != shape:
            now = f"{list(shapes[name])} now" if name in shapes else "not there now"
            raise ConfigError(
                f"{run_dir} has trained another model ({name} was {list(shape)}, {now}): give the same section model or"
                " another --run"
            )


def config_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the former and the present value of each key that has changed and may not.

    The plan always may, and so may the places of data and tokenizer: what they hold is compared.
    """
    places = (with_absolute_paths(without_data_locations(config)) for config in (before, after))
    old, new = (config.model_dump(mode="json", exclude={"plugins"}) for config in places)
    said_old, said_new = (
        _flatten({"data": with_absolute_paths(one).data.model_dump(mode="json")}) for one in (before, after)
    )
    sections = [key for key in old if {type(old[key]), type(new[key])} == {dict, type(None)}]
    changed = [
        f"section {key} {'is new' if old[key] is None else 'is left out'}"
        for key in sections
        if key not in CHANGEABLE_KEYS
    ]
    old, new = (_flatten({key: tree[key] for key in tree if key not in sections}) for tree in (old, new))
    changed += [
        f"{key} was {(said_old if key in CONTENT_KEYS else old).get(key)},"
        f" now {(said_new if key in CONTENT_KEYS else new).get(key)}"
        for key in sorted(old | new)
        if old.get(key) != new.get(key) and key not in CHANGEABLE_KEYS and not key.startswith("parallel")
        if not _belongs_to_one_optimizer(key, before, after)
    ]
    return _plugin_changes(before, after) + (changed or _tokenizer_change(before, after))


def _belongs_to_one_optimizer(key: str, before: RunConfig, after: RunConfig) -> bool:
    """Return True for a key that the optimizer before or the one after doesn't read, and for one that has the default
    of the run's own optimizer both times: with the optimizer its values change, given or not."""
    own = key.removeprefix("optim.")
    users = [name for name, entry in OPTIMIZERS.items() if own in entry.keys]
    both = before.optim, after.optim
    if not key.startswith("optim.") or not users:
        return False
    if not {one.name for one in both} <= set(users):
        return True
    default = OptimConfig.model_fields[own].default
    by_default = [getattr(one, own) == OPTIMIZERS[one.name].defaults.get(own, default) for one in both]
    return before.optim.name != after.optim.name and all(by_default)


def _tokenizer_change(before: RunConfig, after: RunConfig) -> list[str]:
    """Return a change of the tokenizer; nothing where the former one is gone: then its tokens are compared."""
    with suppress(MusterError):
        old, new = (run_tokenizer(config.data).fingerprint for config in (before, after))
        if old != new:
            return [f"data.tokenizer was {before.data.tokenizer} ({old}), now {after.data.tokenizer} ({new})"]
    return []


def settings_digest(config: RunConfig, dataset: SampleStream) -> str:
    """Return a digest that is equal for configurations without `config_changes` and the same data."""
    return sha256(json.dumps([kept_settings(config), dataset.fingerprint]).encode()).hexdigest()[:16]


def kept_settings(config: RunConfig) -> dict[str, object]:
    """Return the keys that may not change within a run, with their values as JSON has them."""
    flat = _flatten(with_absolute_paths(without_data_locations(config)).model_dump(mode="json"))
    flat["plugins"] = sorted((Path(one.file).name, one.sha256) for one in config.plugins)
    return {key: flat[key] for key in sorted(flat) if key not in CHANGEABLE_KEYS and not key.startswith("parallel")}


def _plugin_changes(before: RunConfig, after: RunConfig) -> list[str]:
    """Return the plugins whose content has changed, wherever their files lie."""
    old, new = ({Path(one.file).name: one for one in config.plugins} for config in (before, after))
    changed = [
        name for name in old | new if getattr(old.get(name), "sha256", "") != getattr(new.get(name), "sha256", "")
    ]
    return [f"plugin {name} {_change(old.get(name), new.get(name))}" for name in changed]


def _change(old: PluginFile | None, new: PluginFile | None) -> str:
    if old is None or new is None:
        return "was not there" if old is None else "is left out"
    return f"has changed (sha256 was {old.sha256}…, now {new.sha256}…)"


def _flatten(tree: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else key)
    return flat
