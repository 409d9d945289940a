"""Plans: short names, legality, the nearest legal ones, what `auto` chooses."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.config.load_config import load_plan
from muster.schedule.build import build_program
from muster.schedule.check import check
from muster.schedule.registry import make_schedule
from muster.schedule.schedule_spec import ScheduleSpec
from muster.spec.errors import ConfigError, InfeasibleError
from muster.spec.layer_strategy import LayerOverride, LayerStrategy
from muster.spec.legality import LEGAL_RULES, plan_violations
from muster.spec.mesh import Mesh
from muster.spec.model import ModelSpec
from muster.spec.model_components import LinearAttentionSpec, MoeSpec
from muster.spec.nearest_plans import nearest_plans, require_runnable
from muster.spec.plan import Plan, StageSpec
from muster.spec.plan_name import format_plan_name, parse_plan_name, settings_beyond_name
from muster.spec.rules import repaired
from muster.spec.schedules import SCHEDULES, stage_placement
from muster.spec.supported import SUPPORTED_RECOMPUTE, unsupported_features
from muster.spec.workload import Workload

MODEL = ModelSpec(vocab_size=256, hidden_size=64, num_layers=8, num_heads=4, num_kv_heads=2, intermediate_size=192)
WORKLOAD = Workload(seq_len=64, global_batch_size=24)

degrees = st.sampled_from([1, 2]) | st.integers(1, 64)
sayable_plans = st.builds(
    Plan,
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch_size"), degrees),
    schedule=st.sampled_from(list(SCHEDULES)),
    precision=st.sampled_from(["fp64", "fp32", "bf16", "fp16", "fp8"]),
    default_strategy=st.builds(
        LayerStrategy,
        zero=st.sampled_from(["z1", "z2", "z3"]),
        sp=st.booleans(),
        recompute=st.sampled_from(["none", "elementwise", "core_attention", "every_second_matmul", "full"]),
    ),
    stages=st.lists(st.builds(StageSpec, layers=st.integers(0, 99)), max_size=5).map(tuple),
    uneven_micro_batches=st.lists(st.integers(1, 5), max_size=4).map(tuple),
)


def _stages_of(*layers: int) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(layers=count) for count in layers)


# --- names ---


@settings(deadline=None)
@given(sayable_plans, sayable_plans)
def test_a_name_says_the_whole_plan_whatever_the_base(plan, base):
    name = format_plan_name(plan)
    assert "+" not in name
    assert parse_plan_name(name, base) == plan


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99)), min_size=1, max_size=5))
def test_runs_of_stages_may_be_counted_in_a_name(runs):
    counted = ".".join(f"{layers}x{count}" for layers, count in runs)
    spelled = ".".join(str(layers) for layers, count in runs for _ in range(count))
    assert parse_plan_name(f"pp4-l{counted}") == parse_plan_name(f"pp4-l{spelled}")


PRINTED_NAME = re.compile(r"(?<![\w/.-])(?:[a-z]+\d+\w*-)(?:[a-z0-9_.]+-)*mb\d+(?:-[a-z0-9_.]+)*(?![\w+…-]|\.…)")


def test_every_name_on_a_page_or_in_a_recipe_is_a_plans():
    root = Path(__file__).resolve().parents[1]
    pages = [*root.glob("docs/*.md"), root / "README.md", *root.glob("muster/catalog/recipes/*.yaml")]
    names = {name for page in pages for name in PRINTED_NAME.findall(page.read_text(encoding="utf-8"))}
    assert len(names) > 50
    assert "dp64-tp8-sp-pp16v8-mb1-z1-sinterleaved-relem-bf16-l0.1x126.0" in names
    for name in names - {"pp2-mb4-seager1f1b"}:  # a schedule of the plugin on its page
        plan = parse_plan_name(name.rstrip("."))
        assert parse_plan_name(format_plan_name(plan)) == plan


@settings(deadline=None)
@given(sayable_plans, sayable_plans)
def test_different_plans_have_different_names(one, other):
    assert (format_plan_name(one) == format_plan_name(other)) == (one == other)


OFFLOADED = LayerStrategy(offload="activations", offload_optimizer="host")


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("dp1", Plan()),
        ("dp4", Plan(dp_shard=4)),
        ("dp2x8", Plan(dp_replicate=2, dp_shard=8)),
        ("dp2x1", Plan(dp_replicate=2)),
        ("pp4v2-szbv", Plan(pp=4, vpp=2, schedule="zb-v")),
        ("sgpipe-pp2", Plan(pp=2, schedule="gpipe")),
        ("tp4-sp", Plan(tp=4, default_strategy=LayerStrategy(sp=True))),
        ("dp2-z1-rfull", Plan(dp_shard=2, default_strategy=LayerStrategy(zero="z1", recompute="full"))),
        ("dp4-z1-uneven3.1", Plan(dp_shard=4, uneven_micro_batches=(3, 1), default_strategy=LayerStrategy(zero="z1"))),
        ("dp4-uneven6.6.2.2", Plan(dp_shard=4, uneven_micro_batches=(3, 1))),
        ("dp4-uneven7.7", Plan(dp_shard=4)),
        ("pp2-oacth-oopth", Plan(pp=2, default_strategy=OFFLOADED)),
        (
            "dp2-oopt0.25d",
            Plan(
                dp_shard=2,
                default_strategy=LayerStrategy(offload_optimizer="disk", offload_optimizer_ratio=0.25),
            ),
        ),
        ("pp4-l3.5.4.4", Plan(pp=4, stages=tuple(StageSpec(layers=n) for n in (3, 5, 4, 4)))),
        ("pp4-l3.5.4x2", Plan(pp=4, stages=tuple(StageSpec(layers=n) for n in (3, 5, 4, 4)))),
        ("pp2v2-sinterleaved-l0.1x2.0", Plan(pp=2, vpp=2, schedule="interleaved", stages=_stages_of(0, 1, 1, 0))),
        (
            "dp2x8-tp4-sp-pp4v2-cp2-ep8-etp2-mb1-z3-szbv-relem-bf16",
            Plan(
                dp_replicate=2,
                dp_shard=8,
                tp=4,
                pp=4,
                vpp=2,
                cp=2,
                ep=8,
                etp=2,
                schedule="zb-v",
                default_strategy=LayerStrategy(sp=True, recompute="elementwise"),
            ),
        ),
    ],
)
def test_names_mean_what_they_say(name, plan):
    assert parse_plan_name(name) == plan


@pytest.mark.parametrize(
    "name",
    [
        "dp2x8-tp4-sp-pp4v2-cp2-ep8-etp2-mb1-z1-szbv-relem-bf16-l3.5.4.4",
        "dp2-mb4-sgpipe-rfull-fp32",
        "dp4-pp2-mb4-uneven2.1-z1-fp32",
        "tp1-sp-mb1-fp8",
        "dp1-mb2-z2-fp16",
        "pp1v2-mb1-sinterleaved-fp64",
        "pp4-mb1-relem-oact-bf16",
    ],
)
def test_names_are_written_in_one_order(name):
    assert format_plan_name(parse_plan_name("-".join(reversed(name.split("-"))))) == name


def test_fields_left_out_of_a_name_are_defaults():
    base = Plan(micro_batch_size=4, precision="fp32", dp_shard=8, schedule="gpipe")
    assert parse_plan_name("pp2", base) == Plan(pp=2, micro_batch_size=4, precision="fp32")
    assert parse_plan_name("pp2-mb1-bf16", base) == Plan(pp=2)


def test_a_single_process_is_dp1():
    assert format_plan_name(Plan(precision="fp32")) == "dp1-mb1-fp32"


@pytest.mark.parametrize(
    "plan",
    [
        Plan(compile=True),
        Plan(axis_order=("dp_replicate", "dp_shard", "pp", "cp", "tp")),
        Plan(default_strategy=LayerStrategy(attention="unfused")),
        Plan(overrides=(LayerOverride(start=0, count=2, strategy=LayerStrategy(zero="z1")),)),
        Plan(pp=2, stages=(StageSpec(layers=4, ranks=(0,)), StageSpec(layers=4, ranks=(1,)))),
        Plan(pp=2, dp_shard=2, uneven_micro_batches=(1234567890, 1)),
    ],
)
def test_a_plan_beyond_names_ends_in_its_hash(plan):
    name = format_plan_name(plan)
    assert name.endswith("+" + plan.hash)
    with pytest.raises(ConfigError, match=r"no name expresses all of that plan; give its plan\.yaml"):
        parse_plan_name(name)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pq4", "unknown part 'pq4'; did you mean '"),
        ("dp2-szbb", "unknown part 'szbb'; did you mean 'szbv'"),
        ("bf32", "did you mean 'fp32'"),
        ("dp2-z1-stepgathr", "unknown part 'stepgathr'; did you mean 'stepgather'"),
        ("dp2-z1-gbf6", "did you mean 'gbf16'"),
        ("dp4-buckt4", "unknown part 'buckt4'; did you mean 'bucket4'"),
        ("ddp4.5", "did you mean 'dp4'"),
        ("dp2-z1-oparm0.5d", "did you mean 'oparam0.5d'"),
        ("pp4-skipR", "expected skipR, skipRmV, skipRw, with a number for each capital"),
        ("pp2-inflight2.1234567", "expected inflightN"),
        ("", "unknown part ''"),
        ("dp2--pp2", "unknown part ''"),
        ("DP2", "unknown part 'DP2'"),
        ("dp2-dp3", "'dp3' sets again what 'dp2' sets; leave one of them out"),
        ("z1-z2", "'z2' sets again what 'z1' sets"),
        ("dp0", "'dp0' is 0"),
        ("dp2x0", "'dp2x0' is 0"),
        ("mb0", "'mb0' is 0"),
        ("dp" + "9" * 5000, "more than 9 digits"),
        ("pp4-spipedream-flush300", "'flush300' flushes too rarely: expected at most flush256"),
        ("pp4-skip0.1234567", "'skip0.1234567' has a number of more than 6 decimals"),
    ],
)
def test_invalid_names_are_refused(name, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_plan_name(name)
    assert sentence in str(caught.value)


@settings(deadline=None)
@given(st.text(alphabet="dptcevmbzsrfl0123456789x-.+ ", max_size=20))
def test_any_text_is_a_plan_or_a_sentence(text):
    try:
        plan = parse_plan_name(text)
    except ConfigError:
        return
    assert parse_plan_name(format_plan_name(plan)) == plan


RUNNABLE_SCHEDULES = [name for name, entry in SCHEDULES.items() if not entry.searched]


@pytest.mark.parametrize("name", RUNNABLE_SCHEDULES)
def test_a_plan_knows_where_each_schedule_puts_its_stages(name):
    entry = SCHEDULES[name]
    schedule = make_schedule(name, ScheduleSpec(4, 8, entry.default_chunks, replicas=entry.default_replicas))
    assert schedule.replicas == entry.default_replicas
    assert schedule.placement == stage_placement(entry, 4, entry.default_chunks)
    assert entry.split_backward == any(action.kind == "W" for order in schedule.ranks for action in order)


@pytest.mark.parametrize("name", RUNNABLE_SCHEDULES)
def test_the_nearest_plans_can_be_made_into_programs(name):
    for vpp in (1, 3, 4):
        for near in nearest_plans(Plan(pp=2, vpp=vpp, schedule=name), MODEL, WORKLOAD, 4, limit=9):
            build_program(near, MODEL, WORKLOAD)


def test_a_schedule_in_waves_wants_an_even_number_of_stages():
    plan = Plan(pp=2, vpp=3, schedule="hanayo")
    assert plan_violations(plan, MODEL, WORKLOAD, 2) == [
        "schedule hanayo runs 2 stages for each wave on each pipeline rank; that is pp2v2, not vpp 3"
    ]


def test_a_plan_names_a_schedule_that_exists(tmp_path):
    (tmp_path / "plan.yaml").write_text("schedule: gpip\n")
    with pytest.raises(ConfigError, match="schedule: there is no schedule 'gpip'; did you mean 'gpipe'"):
        load_plan(tmp_path / "plan.yaml")


# --- legality ---


@pytest.mark.parametrize(
    ("name", "world_size", "sentence"),
    [
        ("dp2-pp2", 3, "it needs 4 processes (pp 2 × dp_shard 2), but there are 3"),
        ("dp1", 2, "it needs 1 process, but there are 2"),
        ("dp2", 1, "it needs 2 processes (dp_shard 2), but there is 1"),
        ("dp5", 5, "global_batch_size 24 is not a multiple of 5"),
        ("dp2-mb5", 2, "global_batch_size 24 is not a multiple of 10"),
        ("dp32", 32, "global_batch_size 24 is not a multiple of 32"),
        ("pp9", 9, "it has 9 stages, but the model has only 8 layers"),
        ("pp4v3", 4, "it has 12 stages"),
        ("pp4-l3.5", 4, "it lists layers for 2 stages, but pp 4 × vpp 1 is 4"),
        ("pp2-l3.4", 2, "its stages hold 7 layers (3.4), but the model has 8"),
        ("pp3-l4.0.4", 3, "stage 1 has no layers"),
        ("tp3", 3, "tp 3 doesn't divide the model's 4 heads and 2 key/value heads: legal are 1, 2, 4"),
        ("tp8", 8, "tp 8 doesn't divide the model's 4 heads and 2 key/value heads: legal are 1, 2, 4"),
        ("cp3", 3, "seq_len 64 is not a multiple of 6 (two for each rank of cp 3), as 60 or 66 would be"),
        ("dp2-sp", 2, "sp shards sequences over the tp ranks, but tp is 1"),
        ("dp2-ep2", 2, "the model has none"),
        ("dp2-z1-uneven3.2", 2, "24 is not a multiple of 5 (sum of uneven_micro_batches 5 × micro_batch_size 1)"),
        ("dp4-z1-uneven3.2.1", 4, "uneven_micro_batches has 3 numbers, which don't divide 4 data-parallel ranks"),
        ("dp2-uneven3.1", 2, "uneven_micro_batches need z1: z3 reduces gradients in every backward"),
        ("dp2-pp2-z1-uneven3.1-sauto", 4, "but schedule auto finds one"),
        ("pp2v2", 2, "schedule 1f1b runs 1 stage on each pipeline rank; vpp 2 needs schedule interleaved"),
        ("pp1v2-sinterleaved", 1, "with pp 1 there is nothing to overlap"),
        ("tp3-sp", 3, "seq_len 64 is not a multiple of tp 3 × cp 1, over which sp shards it"),
    ],
)
def test_problems_explain_themselves(name, world_size, sentence):
    plan = parse_plan_name(name)
    assert any(sentence in problem for problem in plan_violations(plan, MODEL, WORKLOAD, world_size))


def stages(*meshes: Mesh) -> tuple[StageSpec, ...]:
    return tuple(StageSpec(layers=8 // len(meshes), mesh=mesh) for mesh in meshes)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(pp=2, dp_shard=4, stages=stages(Mesh(tp=2), Mesh())), "dp_shard 4 has no effect: leave it out"),
        (Plan(pp=2, stages=stages(Mesh(tp=2), Mesh())), None),
        (Plan(pp=2, stages=stages(Mesh(dp_shard=2), Mesh(tp=2))), None),
        (Plan(pp=2, vpp=2, schedule="interleaved", stages=stages(*[Mesh(tp=2), Mesh()] * 2)), None),
        (Plan(pp=2, stages=stages(Mesh(tp=3), Mesh())), "tp 3 doesn't divide"),
        (Plan(pp=2, stages=stages(Mesh(), Mesh(dp_shard=2))), "stage 1 has 2 data-parallel ranks, which don't divide"),
        (
            Plan(pp=2, axis_order=("tp", "pp", "cp", "dp_shard", "dp_replicate"), stages=stages(Mesh(tp=2), Mesh())),
            "pp",
        ),
        (
            Plan(pp=2, vpp=2, schedule="interleaved", stages=stages(Mesh(tp=2), Mesh(), Mesh(), Mesh())),
            "stage 2 has a different mesh from stage 0",
        ),
    ],
)
def test_unequal_stages(plan, sentence):
    found = plan_violations(plan, MODEL, WORKLOAD, plan.world_size)
    assert [sentence in one for one in found] == [True] if sentence else not found + unsupported_features(plan)
    if sentence is None:
        check(build_program(plan, MODEL.model_copy(update={"tied_embeddings": True}), WORKLOAD))


def test_fields_left_out_of_an_override_are_those_of_the_default_strategy(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(
        "default_strategy: {zero: z1, recompute: full}\n"
        "overrides:\n- {start: 0, count: 2, strategy: {recompute: none}}\n- {start: 5, count: 1, strategy: {}}\n"
    )
    plan = load_plan(path)
    assert [plan.strategy(layer).recompute for layer in (0, 1, 2, 5)] == ["none", "none", "full", "full"]
    assert {plan.strategy(layer).zero for layer in range(8)} == {"z1"}
    require_runnable(plan, MODEL, WORKLOAD, 1)
    path.write_text("default_strategy: {zero: z1}\noverrides:\n- {start: 0, count: 2, strategy: {recomput: full}}\n")
    with pytest.raises(ConfigError, match=r"strategy.recomput: unknown key; did you mean 'recompute'"):
        load_plan(path)


MOE = MODEL.model_copy(update={"moe": MoeSpec(num_experts=16, top_k=2, expert_size=24)})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "dp8-ep16",
            "ep 16 doesn't divide the 8 ranks of a copy of a layer's experts (dp_shard 8): legal are ep 1, 2, 4, 8",
        ),
        (
            "dp2x4-ep8",
            "ep 8 doesn't divide the 4 ranks of a copy of a layer's experts (dp_shard 4): legal are ep 1, 2, 4",
        ),
        (
            "dp2-tp2-ep4-etp2",
            "ep 4 × etp 2 doesn't divide the 4 ranks of a copy of a layer's experts (dp_shard 2 × tp 2)",
        ),
        ("dp3-ep2", "ep 2 doesn't divide the 3 ranks"),
        ("dp4-etp5", "etp 5 doesn't divide the 4 ranks of a copy of a layer's experts (dp_shard 4): legal is etp 1"),
        ("ep2", "the 1 rank of a copy of a layer's experts (tp 1): legal are ep 1"),
        ("dp32-ep32", "ep 32 doesn't divide the model's 16 experts"),
        ("dp16-etp16", "etp 16 doesn't divide the experts' inner width 24"),
    ],
)
def test_experts_need_a_home(name, sentence):
    plan = parse_plan_name(name)
    assert any(sentence in problem for problem in plan_violations(plan, MOE, WORKLOAD, plan.world_size))


@pytest.mark.parametrize("name", ["dp8-ep8", "dp8-ep4-etp2", "dp2x4-ep4", "dp2-cp2-tp2-ep8", "dp3-tp2-ep2", "dp8-etp8"])
def test_experts_may_lie_on_all_ranks_of_a_replica(name):
    plan = parse_plan_name(name)
    assert not plan_violations(plan, MOE, WORKLOAD, plan.world_size)


def test_the_repair_of_homeless_experts_keeps_what_it_can():
    assert repaired(LEGAL_RULES, parse_plan_name("dp8-ep16")) == parse_plan_name("dp8-ep8")
    assert repaired(LEGAL_RULES, parse_plan_name("dp4-ep4-etp2")) == parse_plan_name("dp4-ep2-etp2")
    unequal = Plan(pp=2, stages=stages(Mesh(dp_shard=4, ep=8), Mesh(dp_shard=2, ep=2)))
    assert [stage.mesh and stage.mesh.ep for stage in repaired(LEGAL_RULES, unequal).stages] == [4, 2]


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (((0, 1), None), "stage 1 lists no ranks, but stage 0 does"),
        (((0, 1), (2,)), "stage 1 lists 1 rank, but its mesh has 2"),
        (((0, 1), (1, 2)), "must have each of 0 to 3 once"),
    ],
)
def test_listed_ranks_are_each_rank_once(ranks, sentence):
    plan = Plan(pp=2, dp_shard=2, stages=tuple(StageSpec(layers=4, ranks=own) for own in ranks))
    assert any(sentence in problem for problem in plan_violations(plan, MODEL, WORKLOAD, 4))


def test_stages_of_one_pipeline_rank_list_the_same_ranks():
    ranks = ((0,), (1,), (1,), (0,))
    plan = Plan(pp=2, vpp=2, schedule="interleaved", stages=tuple(StageSpec(layers=2, ranks=own) for own in ranks))
    assert "stage 2 lists other ranks than stage 0, but shares its pipeline rank" in plan_violations(
        plan, MODEL, WORKLOAD, 2
    )


def test_sequence_parallelism_of_some_layers_needs_what_that_of_all_needs():
    sp = LayerOverride(start=0, count=1, strategy=LayerStrategy(sp=True))
    assert "sp shards sequences over the tp ranks, but tp is 1" in plan_violations(
        Plan(overrides=(sp,)), MODEL, WORKLOAD, 1
    )
    short = Workload(seq_len=63, global_batch_size=24)
    assert "over which sp shards it" in plan_violations(Plan(tp=2, overrides=(sp,)), MODEL, short, 2)[0]


def test_linear_attention_has_heads_of_its_own():
    linear = LinearAttentionSpec(layers=(0,), num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8)
    model = MODEL.model_copy(update={"linear_attention": linear})
    assert not plan_violations(Plan(tp=2), model, WORKLOAD, 2)
    assert plan_violations(Plan(tp=4), model, WORKLOAD, 4) == [
        "tp 4 doesn't divide the 2 key heads and 4 value heads of linear attention"
    ]


def test_an_override_past_the_last_layer_is_a_problem():
    plan = Plan(overrides=(LayerOverride(start=6, count=3, strategy=LayerStrategy()),))
    assert plan_violations(plan, MODEL, WORKLOAD, 1) == ["an override covers layers 6 to 8, but the model's last is 7"]


def test_chunked_overlap_wants_sp():
    plan = Plan(tp=2, default_strategy=LayerStrategy(tp_overlap="async_tp"))
    assert plan_violations(plan, MODEL, WORKLOAD, 2) == [
        "tp_overlap async_tp sends chunks of the sequence, which only sp shards: add sp or leave it at none"
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tp2-domino-mb1", "cuts the sequences of a micro-batch into two slices, but a micro-batch of stage 0 has 1"),
        ("dp2-domino-mb2", "tp_overlap domino hides collectives of the tp ranks, but tp is 1"),
        ("tp2-tppairs-mb1", "which schedule 1f1b has nowhere: take dualpipe or dualpipe-v, or leave pairs out"),
        ("pp2v2-tppairs-sdualpipev-mb1", "tp_overlap pairs hides collectives of the tp ranks, but tp is 1"),
    ],
)
def test_what_overlaps_of_tp_collectives_want_is_said(name, sentence):
    plan = parse_plan_name(name)
    (found,) = plan_violations(plan, MODEL, WORKLOAD, 2)
    assert sentence in found
    assert all(one.default_strategy.tp_overlap == "none" for one in nearest_plans(plan, MODEL, WORKLOAD, 2)[:1])


def test_words_of_overlapped_collectives_are_in_names():
    for name in ("tp2-sp-asynctp-mb1-bf16", "tp2-domino-mb2-bf16", "tp4-sp-domino-mb4-z1-bf16", "tp2-tppairs-mb1-bf16"):
        assert format_plan_name(parse_plan_name(name)) == name


def test_a_vocabulary_and_an_inner_width_that_tp_does_not_divide_are_legal():
    model = MODEL.model_copy(update={"vocab_size": 257, "intermediate_size": 171})
    assert plan_violations(Plan(tp=4), model, WORKLOAD, 4) == []


@pytest.mark.parametrize(
    "name", ["dp1", "dp8", "dp2x4-mb3", "pp8", "pp4-l0.4.4.0", "tp2-sp", "cp2-tp2-pp4v2-sinterleaved", "pp2-sgpipe-dp3"]
)
def test_legal_plans_have_no_problems(name):
    plan = parse_plan_name(name)
    assert plan_violations(plan, MODEL, WORKLOAD, plan.world_size) == []


@settings(deadline=None)
@given(sayable_plans, st.integers(1, 64))
def test_a_plan_without_problems_covers_ranks_batch_and_layers(plan, world_size):
    if plan_violations(plan, MODEL, WORKLOAD, world_size):
        return
    assert plan.pp * plan.dp_replicate * plan.dp_shard * plan.cp * plan.tp == world_size
    per_rank = plan.num_micro_batches(WORKLOAD) * plan.micro_batch_size
    assert per_rank * plan.dp_replicate * plan.dp_shard == WORKLOAD.global_batch_size
    held = [layer for stage in range(plan.num_stages) for layer in plan.layers(stage, MODEL.num_layers)]
    assert held == list(range(MODEL.num_layers))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(cp=2, compile=True), "compile with context parallelism"),
        (Plan(cp=2, pp=2, post_validation=True), "post_validation with context parallelism"),
        (
            Plan(pp=2, stages=tuple(StageSpec(layers=4, mesh=mesh) for mesh in (Mesh(cp=2), Mesh(dp_shard=2)))),
            "stages with different cp",
        ),
        (
            Plan(pp=2, post_validation=True, default_strategy=LayerStrategy(offload_optimizer="host")),
            "offload of the optimizer's state with post_validation",
        ),
        (
            Plan(overrides=(LayerOverride(start=0, count=1, strategy=LayerStrategy(zero="z1")),)),
            "another ZeRO level for some layers",
        ),
        (
            Plan(tp=2, overrides=(LayerOverride(start=0, count=1, strategy=LayerStrategy(sp=True)),)),
            "another sp or tp_overlap for some layers",
        ),
        (Plan(pp=2, stages=tuple(StageSpec(layers=4, ranks=(n,)) for n in (1, 0))), "a list of its own ranks"),
        (Plan(pp=2, schedule="zb-h1", compile=True), "compile with a schedule whose backward is split"),
        (Plan(precision="fp8", tp=2), "fp8 with tensor parallelism"),
        (parse_plan_name("tp2-domino-mb2-oact"), "tp_overlap domino with offload of activations or parameters"),
        (
            parse_plan_name("tp2-sp-tppairs-pp2v2-sdualpipev"),
            "tp_overlap pairs with sp (the norms before its all-gathers",
        ),
        (parse_plan_name("tp2-tppairs-pp2v2-sdualpipev-vocab"), "tp_overlap pairs with vocab_parallel"),
        (Plan(default_strategy=LayerStrategy(recompute="core_attention")), "recompute of attention alone"),
        (Plan(default_strategy=LayerStrategy(attention="unfused")), "unfused attention"),
        (
            Plan(compile=True, default_strategy=LayerStrategy(recompute="elementwise")),
            "elementwise recompute with compile",
        ),
    ],
)
def test_unsupported_plans_are_refused_with_a_sentence(plan, sentence):
    assert [said for said in unsupported_features(plan) if sentence in said]
    with pytest.raises(InfeasibleError, match="nearest"):
        require_runnable(plan, MODEL, WORKLOAD, plan.world_size)


@pytest.mark.parametrize(
    "name",
    [
        *("dp2x2-pp2-z1", "pp2-l3.5-sgpipe", "dp1-fp64", "dp4-z2-mb6-bf16", "tp4-sp-dp2-rfull"),
        "dp2-pp2v2-sinterleaved",
    ],
)
def test_supported_plans(name):
    plan = parse_plan_name(name)
    assert unsupported_features(plan) == []
    require_runnable(plan, MODEL, WORKLOAD, plan.world_size)


# --- the nearest ---


@settings(deadline=None, max_examples=40)
@given(sayable_plans, st.integers(1, 32))
def test_the_nearest_can_run_and_come_in_order(plan, world_size):
    check_nearest(plan, world_size)


@pytest.mark.soak
@settings(deadline=None, max_examples=200)
@given(sayable_plans, st.integers(1, 32))
def test_the_nearest_of_more_plans_can_run_and_come_in_order(plan, world_size):
    check_nearest(plan, world_size)


def check_nearest(plan, world_size):
    near = nearest_plans(plan, MODEL, WORKLOAD, world_size, limit=100)
    for candidate in near:
        assert candidate.world_size == world_size
        require_runnable(candidate, MODEL, WORKLOAD, world_size)
        assert candidate.default_strategy.zero == plan.default_strategy.zero
        asked = plan.default_strategy.recompute
        assert candidate.default_strategy.recompute == (asked if asked in SUPPORTED_RECOMPUTE else "elementwise")
    assert len({format_plan_name(candidate) for candidate in near}) == len(near)
    assert nearest_plans(plan, MODEL, WORKLOAD, world_size) == near[:3]


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3])
)
def test_a_plan_that_can_run_is_the_nearest_to_itself(shard, replicate, pp, micro_batch):
    plan = Plan(dp_shard=shard, dp_replicate=replicate, pp=pp, micro_batch_size=micro_batch)
    if not plan_violations(plan, MODEL, WORKLOAD, plan.world_size):
        assert nearest_plans(plan, MODEL, WORKLOAD, plan.world_size)[0] == plan


@pytest.mark.parametrize(
    ("name", "world_size", "nearest"),
    [
        ("dp3-pp2", 4, ["dp2-pp2-mb1-bf16", "dp4-mb1-bf16", "dp2x1-pp2-mb1-bf16"]),
        ("dp4-mb5", 4, ["dp4-mb6-bf16", "dp2-pp2-mb6-bf16", "dp2x2-mb6-bf16"]),
        ("dp5", 5, ["pp5-mb1-bf16"]),
        ("pp2-l3.6-sgpipe-z1", 2, ["pp2-mb1-z1-sgpipe-bf16", "dp2-mb1-z1-sgpipe-bf16", "dp2x1-mb1-z1-sgpipe-bf16"]),
        ("dp11", 11, []),
        ("pp2-mb24", 4, ["pp4-mb24-bf16", "dp2-pp2-mb12-bf16", "dp2x1-pp2-mb12-bf16"]),
        ("pp2-l3.5-rcore", 2, ["pp2-mb1-relem-bf16-l3.5", "dp2-mb1-relem-bf16", "dp2x1-mb1-relem-bf16"]),
    ],
)
def test_the_nearest_by_example(name, world_size, nearest):
    found = nearest_plans(parse_plan_name(name), MODEL, WORKLOAD, world_size)
    assert [format_plan_name(plan) for plan in found] == nearest


def test_the_nearest_keep_compile_where_it_can_be():
    (near, *_) = nearest_plans(Plan(dp_shard=5, compile=True), MODEL, WORKLOAD, 4)
    assert near.compile
    selective = Plan(compile=True, default_strategy=LayerStrategy(recompute="elementwise"))
    (near, *_) = nearest_plans(selective, MODEL, WORKLOAD, 1)
    assert (near.compile, near.default_strategy.recompute) == (False, "elementwise")


def test_the_nearest_keep_recompute_by_layer():
    run = LayerOverride(start=2, count=3, strategy=LayerStrategy(recompute="full"))
    near = nearest_plans(Plan(dp_shard=5, overrides=(run,)), MODEL, WORKLOAD, 4)
    assert near
    assert all(plan.overrides == (run,) for plan in near)
    assert all(format_plan_name(plan).endswith(f"+{plan.hash}") for plan in near)


def test_the_refusal_names_the_problem_and_the_nearest():
    with pytest.raises(InfeasibleError) as caught:
        require_runnable(parse_plan_name("dp2-pp2"), MODEL, WORKLOAD, 3)
    assert str(caught.value) == (
        "plan dp2-pp2-mb1-bf16 can't run: it needs 4 processes (pp 2 × dp_shard 2), but there are 3;"
        " nearest: dp3-mb1-bf16, pp3-mb1-bf16, dp3x1-mb1-bf16"
    )
    assert caught.value.exit_code == 3


def test_nearest_plans_use_fewer_processes_if_none_uses_all():
    with pytest.raises(InfeasibleError, match="nearest with 10 processes: dp2-pp5-mb1-bf16"):
        require_runnable(parse_plan_name("dp11"), MODEL, WORKLOAD, 11)


# --- programs ---


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["dp1", "dp4-z1", "pp4-mb2", "dp2-pp2-z1", "dp2x2-pp2-z2-sgpipe", "pp2-l3.5"])
def test_the_program_of_a_plan_can_run(name, train):
    plan = parse_plan_name(name)
    program = build_program(plan, MODEL.model_copy(update={"tied_embeddings": True}), WORKLOAD, train)
    check(program)
    kinds = {step.action.kind for lanes in program.ranks for lane in lanes.values() for step in lane}
    assert program.num_micro_batches == plan.num_micro_batches(WORKLOAD)
    assert ("STEP" in kinds) == train
    assert ("ALL_REDUCE_TIED" in kinds) == (train and plan.pp > 1)
    assert ("UNSHARD" in kinds) == (plan.dp_shard > 1 and plan.default_strategy.zero != "z3")


def test_plans_of_before_data_shares_are_read():
    stages = [{"layers": 2, "ranks": None, "micro_batch_share": None, "mesh": None}] * 2
    assert Plan.model_validate({"pp": 2, "stages": stages}) == Plan(pp=2, stages=(StageSpec(layers=2),) * 2)


def test_each_copy_of_the_model_needs_a_micro_batch():
    name = "pp2v2-mb4-sdualpipe"
    (problem,) = plan_violations(parse_plan_name(name), MODEL, Workload(seq_len=8, global_batch_size=4), 2)
    assert "2 replicas of the model, each of which needs a micro-batch" in problem
    assert plan_violations(parse_plan_name(name), MODEL, Workload(seq_len=8, global_batch_size=8), 2) == []


def test_settings_beyond_a_name_are_listed():
    assert settings_beyond_name(parse_plan_name("dp2-tp2-pp4v2-mb2-z1-szbv-relem-bf16-l3.1.1.1.1.1.1.1")) == []
    full = LayerStrategy(recompute="full")
    runs = (LayerOverride(start=0, count=3, strategy=full), LayerOverride(start=5, count=1, strategy=full))
    axes = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
    plan = Plan(dp_shard=2, pp=2, axis_order=axes, overrides=runs)
    assert settings_beyond_name(plan) == ["axes, outermost first: dp_shard, pp", "recompute full in layers 0–2, 5"]
    assert settings_beyond_name(Plan(dp_shard=2, overrides=runs[1:])) == ["recompute full in layer 5"]
    for changes in ({"compile": True}, {"prefetch_buckets": 2}, {"overrides": runs}, {"axis_order": axes}):
        changed = Plan(dp_shard=2, pp=2, **changes)
        assert "+" in format_plan_name(changed)
        assert settings_beyond_name(changed)


def test_a_step_of_very_many_micro_batches_is_refused_at_once():
    """Its program would take minutes and gigabytes."""
    for plan, most in ((Plan(), 262_144), (Plan(pp=2), 131_072)):
        fits = Workload(seq_len=8, global_batch_size=most)
        assert plan_violations(plan, MODEL, fits, plan.world_size) == []
        (problem,) = plan_violations(plan, MODEL, Workload(seq_len=8, global_batch_size=1_000_000_000), plan.world_size)
        assert "gives each data-parallel rank 1,000,000,000 micro-batches of 1; with pp" in problem
        assert problem.endswith(f"a step has at most {most:,}")


def test_a_plan_that_leaves_compile_out_keeps_the_hash_that_it_had_before_it_could():
    assert Plan().hash == Plan(compile=False).hash != Plan(compile=True).hash
    assert Plan(dp_shard=2).hash == "4f60c18406eb"
