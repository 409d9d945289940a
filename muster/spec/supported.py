"""Plans and models that can be planned and predicted, but that the runtime can't train yet."""

from collections.abc import Callable
from math import gcd

from muster.spec.asynchronous_rules import ASYNCHRONOUS_MODEL_RULES, ASYNCHRONOUS_RUNTIME_RULES
from muster.spec.compilation import AGAINST_COMPILE
from muster.spec.cuda_graphs import AGAINST_CUDA_GRAPHS, against_cuda_graphs
from muster.spec.device_update_rules import DEVICE_UPDATE_RULES
from muster.spec.errors import InfeasibleError
from muster.spec.expert_kinds import DISPATCHERS
from muster.spec.four_bit_rules import four_bit_rules_of
from muster.spec.gather_rules import GATHER_RUNTIME_RULES, gather_rules_of
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.mesh import Mesh
from muster.spec.mesh_axes import MESH_AXIS_TABLE, SUPPORTED_AXES, MeshAxis
from muster.spec.model import ModelSpec
from muster.spec.param_offload_rules import PARAM_OFFLOAD_RULES, param_offload_rules_of
from muster.spec.plan import PREDICTED_PRECISIONS, Plan
from muster.spec.rules import Rule, as_by_default, broken_rules, in_every_layer, setting
from muster.spec.shard_level_rules import SHARD_LEVEL_RUNTIME_RULES
from muster.spec.skip_rules import SKIP_RUNTIME_RULES, skip_rules_of
from muster.spec.stream_rules import stream_rules_of
from muster.spec.tp_overlap_rules import TP_OVERLAP_RULES, tp_overlap_rules_of

__all__ = [
    "EXPERT_RULES",
    "LINEAR_ATTENTION_RULES",
    "RUNTIME_RULES",
    "SUPPORTED_AXES",
    "SUPPORTED_PRECISIONS",
    "SUPPORTED_RECOMPUTE",
    "not_run_yet",
    "require_supported_model",
    "runtime_rules",
    "unsupported_features",
    "unsupported_parts",
]

SUPPORTED_PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
SUPPORTED_RECOMPUTE = ("none", "elementwise", "full")


def _axis_rule(axis: MeshAxis) -> Rule:
    return Rule(
        lambda plan: plan.uses_axis(axis.name),
        f"{axis.title} ({axis.name} > 1)",
        setting(**{axis.name: 1}),
    )


def _with_supported_recompute(strategy: LayerStrategy) -> LayerStrategy:
    if strategy.recompute in SUPPORTED_RECOMPUTE:
        return strategy
    return strategy.model_copy(update={"recompute": "elementwise"})


def _optimizer_offload_rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(
        lambda plan: any(s.offload_optimizer != "none" for s in plan.strategies) and has(plan),
        f"offload of the optimizer's state with {what}",
        in_every_layer(lambda s: s.model_copy(update={"offload_optimizer": "none", "device_update_ratio": 0.0})),
    )


def _compile_rule(has: Callable[[Plan], bool], sentence: str) -> Rule:
    return Rule(lambda plan: plan.compile is True and has(plan), sentence, setting(compile=False))


def _graphs_rule(has: Callable[[Plan], bool], sentence: str) -> Rule:
    return Rule(lambda plan: plan.cuda_graphs and has(plan), sentence, setting(cuda_graphs=False))


def _fp8_rule(has: Callable[[Plan], bool], what: str) -> Rule:
    return Rule(lambda plan: plan.precision == "fp8" and has(plan), f"fp8 with {what}", setting(precision="bf16"))


def _dynamic_rule(has: Callable[[Plan], bool], sentence: str) -> Rule:
    return Rule(
        lambda plan: plan.dynamic_context_parallel and has(plan), sentence, setting(dynamic_context_parallel=False)
    )


RUNTIME_RULES: tuple[Rule, ...] = (
    *(_axis_rule(axis) for axis in MESH_AXIS_TABLE if not axis.supported),
    _optimizer_offload_rule(
        lambda plan: plan.post_validation, "post_validation (a step that is rolled back updates on the device)"
    ),
    _optimizer_offload_rule(lambda plan: plan.sequence_slices > 1, "sequence_slices (not tested yet)"),
    _optimizer_offload_rule(lambda plan: plan.pipeline_replicas > 1, "two replicas (not tested yet)"),
    *DEVICE_UPDATE_RULES,
    *PARAM_OFFLOAD_RULES,
    *TP_OVERLAP_RULES,
    *SHARD_LEVEL_RUNTIME_RULES,
    *GATHER_RUNTIME_RULES,
    Rule(
        lambda plan: any(s.recompute not in SUPPORTED_RECOMPUTE for s in plan.strategies),
        "recompute of attention alone or of every second matmul (the runtime knows none, elementwise and full)",
        in_every_layer(_with_supported_recompute),
    ),
    Rule(
        lambda plan: any(s.attention != "flash" for s in plan.strategies),
        "unfused attention (the runtime's scores stay within one kernel)",
        in_every_layer(lambda strategy: strategy.model_copy(update={"attention": "flash"})),
    ),
    Rule(
        lambda plan: len({s.zero for s in plan.strategies}) > 1,
        "another ZeRO level for some layers (a stage is gathered and reduced as a whole)",
        as_by_default("zero"),
    ),
    Rule(
        lambda plan: len({(s.sp, s.tp_overlap) for s in plan.strategies}) > 1,
        "another sp or tp_overlap for some layers (all layers of a stage hand on the same part of the sequence)",
        as_by_default("sp", "tp_overlap"),
    ),
    Rule(
        lambda plan: any(stage.ranks is not None for stage in plan.stages),
        "a stage with a list of its own ranks",
        lambda plan: plan.model_copy(
            update={"stages": tuple(stage.model_copy(update={"ranks": None}) for stage in plan.stages)}
        ),
    ),
    Rule(
        lambda plan: len({mesh.cp for mesh in plan.distinct_meshes}) > 1,
        "stages with different cp (neighbouring stages keep the same positions of a sequence)",
        lambda plan: plan.model_copy(update={"stages": ()}),
    ),
    _dynamic_rule(
        lambda plan: plan.pp > 1,
        "cpdyn with pipeline ranks (the number of micro-batches changes from step to step)",
    ),
    _dynamic_rule(
        lambda plan: any(mesh.dp_size > 1 for mesh in plan.distinct_meshes),
        "cpdyn beside data-parallel ranks (its groups are parts of all ranks: cp8-cpdyn stands for dp2-cp4-cpdyn)",
    ),
    _dynamic_rule(
        lambda plan: plan.cp_comm_type != "p2p" or plan.cp_window_size > 1,
        "cpdyn with another kind of context parallelism than a single ring (p2p)",
    ),
    _dynamic_rule(
        lambda plan: any(strategy.sp for strategy in plan.strategies),
        "cpdyn with sp (a group's positions needn't divide by tp)",
    ),
    _dynamic_rule(lambda plan: plan.sequence_tiles > 1, "cpdyn with sequence_tiles (not tested yet)"),
    Rule(
        lambda plan: plan.post_validation and plan.uses_axis("cp"),
        "post_validation with context parallelism (not tested yet)",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.sequence_tiles > 1 and plan.split_backward,
        "sequence_tiles with a schedule whose backward is split (W would keep the logits of all tiles)",
        setting(sequence_tiles=1),
    ),
    Rule(
        lambda plan: plan.sequence_tiles > 1 and plan.vocab_parallel,
        "sequence_tiles with vocab_parallel (its passes over a part of the vocabulary aren't tiled)",
        setting(sequence_tiles=1),
    ),
    Rule(
        lambda plan: plan.fp8_recipe != "tensorwise" and plan.precision != "fp8",
        lambda plan: f"fp8_recipe {plan.fp8_recipe} in {plan.precision} (it is for precision fp8)",
        setting(fp8_recipe="tensorwise"),
    ),
    Rule(
        lambda plan: plan.precision in PREDICTED_PRECISIONS,
        lambda plan: f"{plan.precision} (it is predicted for other programs alone)",
        setting(precision="bf16"),
    ),
    Rule(
        lambda plan: plan.fp8_recipe in ("delayed", "blockwise"),
        lambda plan: f"fp8_recipe {plan.fp8_recipe} (it is predicted for other programs alone)",
        setting(fp8_recipe="tensorwise"),
    ),
    _fp8_rule(lambda plan: plan.uses_axis("tp"), "tensor parallelism (its matmuls of sharded weights are in bf16)"),
    _fp8_rule(lambda plan: plan.split_backward, "a schedule whose backward is split (W's matmuls are in bf16)"),
    _fp8_rule(lambda plan: plan.uses_axis("cp"), "context parallelism (not tested yet)"),
    _fp8_rule(lambda plan: plan.sequence_tiles > 1, "sequence_tiles (not tested yet)"),
    _fp8_rule(lambda plan: plan.sequence_slices > 1, "sequence_slices (not tested yet)"),
    Rule(
        lambda plan: plan.sequence_slices > 1 and plan.uses_axis("cp"),
        "sequence_slices with context parallelism (its ranks keep an early and a late part of every sequence)",
        setting(sequence_slices=1),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1 and plan.vocab_parallel,
        "sequence_slices with vocab_parallel (the vocabulary's passes take whole micro-batches)",
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1 and plan.post_validation,
        "sequence_slices with post_validation (not tested yet)",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1 and any(s.offload == "activations_on_disk" for s in plan.strategies),
        "sequence_slices with activations on disk (not tested yet; oact keeps them in host memory)",
        in_every_layer(lambda strategy: strategy.model_copy(update={"offload": "none"})),
    ),
    Rule(
        lambda plan: plan.vocab_parallel and plan.uses_axis("tp"),
        "vocab_parallel with tensor parallelism (the vocabulary is sharded over the pipeline ranks alone)",
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: plan.vocab_parallel and not plan.is_uniform,
        "vocab_parallel with unequal stages (each vocabulary row has one holder on every pipeline rank)",
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: plan.vocab_parallel and plan.mesh(0).grad_sum_size > 1 and plan.default_strategy.zero == "z3",
        "vocab_parallel under z3 (each rank's vocabulary shard would be gathered for every single pass over it)",
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: plan.post_validation and plan.precision == "fp16",
        "post_validation with fp16 (a step's loss scale follows from the norm of the one before)",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.post_validation and plan.vocab_parallel,
        "post_validation with vocab_parallel (all ranks look up embeddings together when a step begins)",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.post_validation and bool(plan.uneven_micro_batches),
        "post_validation with uneven_micro_batches (not tested yet)",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.islands > 1 and plan.post_validation,
        "islands with post_validation (a step that is rolled back may have been exchanged)",
        setting(post_validation=False),
    ),
    Rule(
        lambda plan: plan.islands > 1 and plan.dynamic_context_parallel,
        "islands with cpdyn (not tested yet)",
        setting(dynamic_context_parallel=False),
    ),
    Rule(
        lambda plan: plan.islands > 1 and plan.pipeline_replicas > 1,
        "islands with two replicas in one pipeline (not tested yet)",
        setting(islands=1),
    ),
    Rule(
        lambda plan: plan.islands > 1 and any(stage.mesh is not None for stage in plan.stages),
        "islands with stages that have degrees of their own (not tested yet)",
        setting(islands=1),
    ),
    _optimizer_offload_rule(lambda plan: plan.islands > 1, "islands (not tested yet)"),
    *ASYNCHRONOUS_RUNTIME_RULES,
    *SKIP_RUNTIME_RULES,
    *(_compile_rule(*one) for one in AGAINST_COMPILE),
    *(_graphs_rule(*one) for one in AGAINST_CUDA_GRAPHS),
)
"""Things that the runtime can't do: a row goes when the work behind it is done."""


def _with_expert_slices(plan: Plan) -> Plan:
    """Return the plan whose tensor-parallel ranks share each expert."""
    stages = tuple(
        stage if stage.mesh is None else stage.model_copy(update={"mesh": _sliced(stage.mesh)}) for stage in plan.stages
    )
    default = _sliced(plan.model_copy(update={"stages": ()}).mesh(0))
    return plan.model_copy(update={"stages": stages, "etp": default.etp, "ep": default.ep})


def _sliced(mesh: Mesh) -> Mesh:
    return mesh.model_copy(update={"etp": mesh.tp, "ep": gcd(mesh.ep, mesh.state_shards)})


def _has_placed_slices(mesh: Mesh) -> bool:
    """Return True where experts are sliced as attention is, or whole ones lie on different tensor-parallel ranks."""
    return mesh.etp == mesh.tp or (mesh.etp == 1 and mesh.ep % mesh.tp == 0)


def _misplaced_slices(plan: Plan) -> str:
    mesh = next(mesh for mesh in plan.distinct_meshes if not _has_placed_slices(mesh))
    if mesh.etp > 1:
        return f"experts in {mesh.etp} slices under tp {mesh.tp} (they are sliced as attention is, or not at all)"
    return (
        f"whole experts (etp 1) under tp {mesh.tp} with ep {mesh.ep} (tensor-parallel ranks have slices of the same"
        f" experts, etp {mesh.tp}, or different experts, ep a multiple of {mesh.tp})"
    )


EXPERT_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: not all(map(_has_placed_slices, plan.distinct_meshes)),
        _misplaced_slices,
        _with_expert_slices,
    ),
    Rule(
        lambda plan: plan.uses_axis("ep") and bool(plan.uneven_micro_batches),
        "expert parallelism with uneven_micro_batches (each micro-batch meets those of all other ranks)",
        setting(uneven_micro_batches=()),
    ),
    Rule(
        lambda plan: plan.ep_redundant_experts > 0 and plan.split_backward,
        "redundant experts with split backwards (gradients of copies go home in the backward of their inputs)",
        setting(ep_redundant_experts=0),
    ),
    Rule(
        lambda plan: plan.ep_redundant_experts > 0 and plan.ep_chunks > 1,
        "redundant experts with ep_chunks (copies travel once for all tokens)",
        setting(ep_chunks=1),
    ),
    Rule(
        lambda plan: plan.ep_redundant_experts > 0 and DISPATCHERS[plan.ep_dispatcher].shares_tokens,
        "redundant experts where ranks have the same tokens (ep_dispatcher slicing)",
        setting(ep_dispatcher="all_to_all"),
    ),
    Rule(
        lambda plan: plan.dynamic_context_parallel,
        "cpdyn in a model with experts (their load is balanced over whole sequences)",
        setting(dynamic_context_parallel=False),
    ),
    Rule(
        lambda plan: plan.sequence_tiles > 1,
        "tiles of experts (their rows are sorted over all positions)",
        setting(sequence_tiles=1),
    ),
    Rule(
        lambda plan: plan.precision == "fp8",
        "fp8 with experts (their grouped matmuls are in bf16)",
        setting(precision="bf16"),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1,
        "sequence_slices of a model with experts (their load is balanced within whole sequences)",
        setting(sequence_slices=1),
    ),
    Rule(
        lambda plan: plan.compile,
        "compile of experts (the rows of each change from batch to batch)",
        setting(compile=False),
    ),
    Rule(
        lambda plan: any(strategy.offload != "none" for strategy in plan.strategies),
        "offload of the activations of experts (their sizes change from batch to batch)",
        in_every_layer(lambda strategy: strategy.model_copy(update={"offload": "none"})),
    ),
    Rule(
        lambda plan: plan.post_validation,
        "post_validation in a model with experts (not tested yet)",
        setting(post_validation=False),
    ),
)
"""Things that the runtime can't do for a model with experts."""

SHORTCUT_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.uses_axis("tp"),
        "tensor parallelism of experts that read the layer's input (moe.shortcut)",
        setting(tp=1, etp=1),
    ),
)
"""Things that the runtime can't do where tokens travel to experts beside attention."""

LINEAR_ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.compile,
        "compile of linear attention (not tested yet)",
        setting(compile=False),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1,
        "sequence_slices with linear attention (no state is handed from slice to slice)",
        setting(sequence_slices=1),
    ),
)
"""Things that the runtime can't do for a model with linear attention."""

LATENT_ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.precision == "fp8",
        "fp8 with latent attention (not tested yet)",
        setting(precision="bf16"),
    ),
)
"""Things that the runtime can't do for a model with latent attention."""

SINK_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.compile,
        "compile of attention with sinks (not tested yet)",
        setting(compile=False),
    ),
)
"""Things that the runtime can't do for a model with attention sinks."""

ATTENTION_DROPOUT_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.uses_axis("cp"),
        "attention_dropout with context parallelism (whose kernels for blocks of a sequence drop nothing)",
        setting(cp=1),
    ),
)
"""Things that the runtime can't do for a model with dropout of attention's probabilities."""

GROUP_DROPOUT_RULES: tuple[Rule, ...] = (
    _dynamic_rule(lambda plan: True, "cpdyn in a model with dropout (whose keys are of whole samples)"),
    Rule(
        lambda plan: plan.sequence_slices > 1,
        "sequence_slices with dropout (not tested yet)",
        setting(sequence_slices=1),
    ),
)
"""Things that the runtime can't do for a model with dropout."""


def _narrow_rules(what: str) -> tuple[Rule, ...]:
    return (
        _fp8_rule(lambda plan: True, f"{what} (whose matrices are too narrow to gain from it)"),
        _compile_rule(lambda plan: True, f"compile with {what} (not tested yet)"),
        _graphs_rule(lambda plan: True, f"cuda_graphs with {what} (not tested yet)"),
        Rule(
            lambda plan: any(strategy.tp_overlap == "async_tp" for strategy in plan.strategies),
            f"tp_overlap async_tp with {what} (whose partial results are multiplied before the sum over the ranks)",
            in_every_layer(lambda strategy: strategy.model_copy(update={"tp_overlap": "none"})),
        ),
    )


ADAPTER_RULES, LOW_RANK_RULES = _narrow_rules("adapters"), _narrow_rules("low-rank layers")
"""Things that the runtime can't do for a model with adapters, and for one with low-rank layers."""

ADAPTER_DROPOUT_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.split_backward,
        "a schedule whose backward is split with lora_dropout (W would keep another copy of the inputs of A)",
        setting(schedule="1f1b", vpp=1, pinned_schedule=None),
    ),
    Rule(
        lambda plan: plan.sequence_tiles > 1,
        "sequence_tiles with lora_dropout (not tested yet)",
        setting(sequence_tiles=1),
    ),
)
"""Things that the runtime can't do for adapters with dropout."""

MTP_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.vocab_parallel,
        "vocab_parallel with multi-token prediction (whose layers need embedding and head within one pass)",
        setting(vocab_parallel=False),
    ),
    Rule(
        lambda plan: plan.sequence_slices > 1,
        "sequence_slices with multi-token prediction (not tested yet)",
        setting(sequence_slices=1),
    ),
    _dynamic_rule(lambda plan: True, "cpdyn with multi-token prediction (not tested yet)"),
    Rule(
        lambda plan: plan.precision == "fp8",
        "fp8 with multi-token prediction (not tested yet)",
        setting(precision="bf16"),
    ),
    Rule(
        lambda plan: plan.compile is True,
        "compile with multi-token prediction (not tested yet)",
        setting(compile=False),
    ),
    Rule(
        lambda plan: any(strategy.offload != "none" for strategy in plan.strategies),
        "offload of activations with multi-token prediction (not tested yet)",
        in_every_layer(lambda strategy: strategy.model_copy(update={"offload": "none"})),
    ),
)
"""Things that the runtime can't do for a model with multi-token prediction."""

DORA_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.uses_axis("tp"),
        "dora of o or down with tensor parallelism (which cuts the rows whose lengths it trains)",
        setting(tp=1),
    ),
)
"""Things that the runtime can't do for DoRA of linear layers whose columns tensor parallelism cuts."""

HD_PISSA_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.uses_axis("tp"),
        "hd_pissa with tensor parallelism (parts of the batch belong to data-parallel ranks)",
        setting(tp=1),
    ),
    Rule(
        lambda plan: plan.split_backward,
        "hd_pissa with a backward in two passes (whose gradients are made with those of the inputs)",
        setting(schedule="1f1b", vpp=1),
    ),
    _dynamic_rule(lambda plan: True, "cpdyn with hd_pissa (whose parts are of whole batches)"),
    _optimizer_offload_rule(lambda plan: True, "hd_pissa (which changes weights that aren't the optimizer's)"),
    Rule(
        lambda plan: plan.post_validation,
        "post_validation with hd_pissa (not tested yet)",
        setting(post_validation=False),
    ),
)
"""Things that the runtime can't do for HD-PiSSA."""

CAPACITY_RULES: tuple[Rule, ...] = (
    Rule(
        lambda plan: plan.uses_axis("cp"),
        "a capacity of experts with context parallelism (it counts the positions of whole sequences)",
        setting(cp=1, cp_comm_type="p2p", cp_ulysses_degree=1, cp_window_size=1),
    ),
    Rule(
        lambda plan: any(map(plan.routes_own_tokens, plan.distinct_meshes)),
        "a capacity of experts where tensor-parallel ranks route parts of a sequence (it counts whole ones: etp as tp)",
        _with_expert_slices,
    ),
    Rule(
        lambda plan: plan.ep_chunks > 1,
        "chunks of tokens on their way to experts that have a capacity (it counts the positions of whole sequences)",
        setting(ep_chunks=1),
    ),
)
"""Things that the runtime can't do where an expert takes no more than so many positions of a sequence."""

_UNSUPPORTED_MODELS: tuple[tuple[str, Callable[[ModelSpec], bool]], ...] = (
    (
        "biases of shared experts (mlp_bias)",
        lambda model: model.moe is not None and model.moe.shared_size > 0 and model.mlp_bias,
    ),
    (
        "experts beside attention (parallel_residual)",
        lambda model: model.moe is not None and model.parallel_residual,
    ),
    (
        "the gated delta rule (linear_attention.kind gated_deltanet; linear_attn, simple_gla and gla run)",
        lambda model: model.linear_attention is not None and model.linear_attention.kind == "gated_deltanet",
    ),
    (
        "multi-token prediction (mtp_layers, which 0 leaves out) with adapters, linear attention or a plugin's layers",
        lambda model: (
            model.mtp_layers > 0
            and any(part is not None for part in (model.adapter, model.linear_attention, model.architecture))
        ),
    ),
)
"""Parts of a model that the runtime can't do; such a model can be planned and predicted."""


def _mixes_steps(model: ModelSpec) -> bool:
    """Return True where stages of a model exchange or count more than the passes' own inputs and gradients."""
    return any((model.moe, model.adapter, model.tied_embeddings, model.mtp_layers, model.architecture))


def runtime_rules(model: ModelSpec | None) -> tuple[Rule, ...]:
    """Return the rules that plans for a model keep; None: those of every model."""
    if model is None:
        return RUNTIME_RULES
    moe = model.moe
    return (
        *RUNTIME_RULES,
        *(EXPERT_RULES if moe is not None else ()),
        *(ASYNCHRONOUS_MODEL_RULES if _mixes_steps(model) else ()),
        *(SHORTCUT_RULES if moe is not None and moe.shortcut else ()),
        *(CAPACITY_RULES if moe is not None and moe.needs_whole_sequences else ()),
        *(LINEAR_ATTENTION_RULES if model.linear_attention is not None else ()),
        *(LATENT_ATTENTION_RULES if model.mla is not None else ()),
        *(SINK_RULES if model.attention_sinks else ()),
        *(MTP_RULES if model.mtp_layers else ()),
        *(ATTENTION_DROPOUT_RULES if model.attention_dropout else ()),
        *(GROUP_DROPOUT_RULES if model.has_dropout else ()),
        *(_graphs_rule(lambda plan: True, sentence) for sentence in against_cuda_graphs(model)),
        *param_offload_rules_of(model),
        *tp_overlap_rules_of(model),
        *(*stream_rules_of(model), *skip_rules_of(model), *gather_rules_of(model)),
        *four_bit_rules_of(model),
        *(LOW_RANK_RULES if model.low_rank is not None else ()),
        *(ADAPTER_RULES if model.adapter is not None else ()),
        *(ADAPTER_DROPOUT_RULES if model.adapter is not None and model.adapter.lora_dropout else ()),
        *(DORA_RULES if model.adapter is not None and model.adapter.needs_whole_rows else ()),
        *(HD_PISSA_RULES if model.adapter is not None and model.adapter.changes_weights else ()),
    )


def unsupported_features(plan: Plan, model: ModelSpec | None = None) -> list[str]:
    """Return one sentence for each thing in the plan that the runtime can't do yet, for this model or for any."""
    return [f"{feature} can't be run yet" for feature in broken_rules(runtime_rules(model), plan)]


def unsupported_parts(model: ModelSpec) -> list[str]:
    """Return the parts of a model that the runtime can't do yet."""
    return [part for part, has in _UNSUPPORTED_MODELS if has(model)]


def not_run_yet(model: ModelSpec, plan: Plan) -> list[str]:
    """Return one sentence for each part of the model and thing in the plan that the runtime can't do yet."""
    return [f"{part} can't be run yet" for part in unsupported_parts(model)] + unsupported_features(plan, model)


def require_supported_model(model: ModelSpec) -> None:
    """Raise InfeasibleError where the runtime can't do something that the model has."""
    if found := unsupported_parts(model):
        raise InfeasibleError(
            f"model {model.name} can be planned and predicted, but not run yet: it has {' and '.join(found)}"
        )
