"""Registration of plugin components: functions and classes from files outside the package, under names for run files
and plans.

A name consists of lower-case letters, digits and hyphens, and belongs to one file. Nothing here imports torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from muster.api.torch_import import import_torch_module
from muster.catalog import names
from muster.config.optimizer_state import PluginOptimizer
from muster.config.optimizers import OPTIMIZERS
from muster.plugins.registry import component_names, register_component, require_callable, require_component_name
from muster.schedule.plugin_schedule import RankFunction, plugin_schedule_function
from muster.spec.errors import ConfigError
from muster.spec.model import ModelSpec
from muster.spec.plugin_model import LayerTrace, NamedShape, PluginModel
from muster.spec.schedules import SCHEDULES, ScheduleEntry

T = TypeVar("T")


def register_schedule(
    name: str,
    *,
    chunks: int = 1,
    v_shaped: bool = False,
    split_backward: bool = False,
    explanation: str = "",
    turns: bool = False,
    splits: bool = False,
) -> Callable[[RankFunction], RankFunction]:
    """Register a pipeline schedule: `order(rank, spec)` yields the passes of one pipeline rank, as `2F0` or Actions.

    `spec` has num_ranks, num_micro_batches, chunks, times and more (`muster.schedule.schedule_spec`). Each rank has
    `chunks` stages, which are placed round-robin over the ranks, or there and back if the schedule is `v_shaped`. A
    backward is one pass, B, or with `split_backward` two: I for the inputs and later W for the weights. `turns` and
    `splits` are the former names of these two, which plugins written for version 0.1 use. In a plan's name the schedule
    is `sNAME` without hyphens. Raises ConfigError if the name is taken.
    """
    require_component_name("schedule", name)
    if chunks < 1:
        raise ConfigError(f"register_schedule: expected chunks >= 1 for '{name}', got {chunks}")

    def register(order: RankFunction) -> RankFunction:
        require_callable("schedule", name, order)
        word = name.replace("-", "")
        if same := [other for other in SCHEDULES if other != name and other.replace("-", "") == word]:
            raise ConfigError(
                f"register_schedule: in a plan's name s{word} already stands for {same[0]}; choose another name"
            )
        register_component("schedule", name, order, SCHEDULES.keys() - component_names("schedule"))
        make = plugin_schedule_function(name, order, lambda: SCHEDULES[name])
        line = explanation or (order.__doc__ or "a plugin's").strip().split("\n")[0]
        SCHEDULES[name] = ScheduleEntry(
            make, line, chunks, v_shaped=v_shaped or turns, split_backward=split_backward or splits
        )
        return order

    return register


def register_model(
    name: str, *, like: str | None = None, tensor_parallel: bool = False, documents: bool = False, **values: Any
) -> Callable[[T], T]:
    """Register a model: a decoder whose layers are of the decorated class, an `nn.Module` built from (ModelSpec, layer
    index).

    The module takes and returns a hidden state as `muster.DecoderLayer` does, its usual base. Its `ModelSpec` is that
    of the model `like` with `values` over it; a run file may change them. All layers have the same parameters and no
    buffers. Pipelines, sharding, full recompute and checkpoints need nothing more. Tensor parallelism needs
    `tensor_parallel`: matrices named o or down are sharded by columns, parameters whose module ends in norm are whole,
    all others are sharded by rows; layers sharded by rows are called through `project_in`, those sharded by columns
    through `project_out`, and widths follow from the weights. `documents` declares that the layer keeps packed
    documents apart, as Muster's attention does. Raises ConfigError if the name is taken.
    """
    require_component_name("model", name)

    def register(layer: T) -> T:
        require_callable("model", name, layer)
        said = values if like is None else {"like": like, **values}
        own = PluginModel(name, layer, said, tensor_parallel, documents, _shapes, _facts)
        register_component("model", name, own, names("models"))
        return layer

    return register


def _shapes(own: PluginModel, spec: ModelSpec) -> tuple[NamedShape, ...]:
    return import_torch_module("muster.model.plugin_layer").parameter_shapes(own, spec)


def _facts(own: PluginModel, spec: ModelSpec, seq_len: int, tp: int, precision: str) -> LayerTrace:
    return import_torch_module("muster.model.plugin_layer").trace_layer(own, spec, seq_len, tp, precision)


def register_optimizer(name: str, factory: Callable[..., Any] | None = None) -> Any:
    """Register an optimizer: a subclass of `torch.optim.Optimizer`, or a function that builds one from (params, lr).

    Keyword arguments come from `optim.options`, the learning rate from Muster's schedule, and weight decay, decoupled,
    from `optim.weight_decay`. The update must be elementwise (each element depends on its own history alone), since
    ranks hold shards of matrices; another one is refused when the run is resolved. May be used as a decorator or called
    with the class. Raises ConfigError if the name is taken.
    """
    require_component_name("optimizer", name)
    if factory is None:
        return lambda found: register_optimizer(name, found)
    require_callable("optimizer", name, factory)
    register_component("optimizer", name, PluginOptimizer(name, factory, _probe), OPTIMIZERS)
    return factory


def _probe(optimizer: PluginOptimizer, options: Mapping[str, Any]) -> tuple[str, ...]:
    from muster.optim.plugin_optimizer import probe_state

    return probe_state(optimizer, options)


def register_dataset(name: str) -> Callable[[T], T]:
    """Register a data set, for `data.source`: a function without arguments that yields documents, in the same order
    each time.

    A document is a text, or a row as in JSON lines, with `text`, `prompt` and `completion`, or `messages`. The data set
    is read once into a token store, and again when its file has changed. Raises ConfigError if the name is taken.
    """
    return _decorator("dataset", name)


def register_loss(name: str) -> Callable[[T], T]:
    """Register a loss, for `train.loss`: `loss(logits_NV, labels_N)` returns the sum over the labels other than −100,
    as a scalar that can be differentiated; Muster divides by their number in the global batch.

    Raises ConfigError if the name is taken.
    """
    return _decorator("loss", name)


def register_step(name: str) -> Callable[[T], T]:
    """Register a training step, for `train.training_step`: `step(context)` is called on every rank when the gradients
    of a global batch are complete, in place of clipping and the optimizer step
    (`muster.train.custom_step.StepContext`).

    Raises ConfigError if the name is taken.
    """
    return _decorator("step", name)


def register_callback(name: str) -> Callable[[T], T]:
    """Register a callback, for `train.callbacks`: a class, or a function without arguments that makes an object, with
    some of the methods `on_step`, `on_eval` and `on_save`, which get a `muster.train.callbacks.CallbackContext`.

    Raises ConfigError if the name is taken.
    """
    return _decorator("callback", name)


def _decorator(kind: Any, name: str) -> Callable[[T], T]:
    require_component_name(kind, name)

    def register(what: T) -> T:
        require_callable(kind, name, what)
        register_component(kind, name, what)
        return what

    return register
