"""Plans for the GPU in name only: every schedule with each other kind of plan, alone and combined at random."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from muster.schedule.build import build_program
from muster.schedule.resolve import resolve_schedule
from muster.spec.errors import InfeasibleError
from muster.spec.legality import plan_violations
from muster.spec.plan import Plan
from muster.spec.plan_name import parse_plan_name
from muster.spec.schedules import SCHEDULES, find_schedule
from muster.spec.supported import unsupported_features
from tests.parity import small_run

Case = dict[str, Any]
"""Words of a plan and settings of the run, as in the tests of parity."""
KINDS: dict[str, Case] = {
    "bf16": {},
    "fp16": {"precision": "fp16"},
    "fp8": {"precision": "fp8"},
    "z1": {"words": ("dp2", "z1")},
    "z2": {"words": ("dp2", "z2")},
    "z3": {"words": ("dp2", "z3")},
    "tp-sp": {"words": ("tp2", "sp")},
    "spread vocabulary": {"words": ("vocab",), "tied": True},
    "offload": {"words": ("oact",)},
    "packed": {"packing": "document_mask"},
    "window": {"family": "qwen3"},
    "compile": {"changes": {"compile": True}},
}
"""Kinds of plans by name: what each adds to a schedule."""
SYNCHRONOUS = tuple(name for name, entry in SCHEDULES.items() if not entry.is_asynchronous)
"""Schedules with one step in a program."""
ALTERNATIVES = (
    ("z1", "z2", "z3", "tp-sp"),
    ("bf16", "fp16", "fp8"),
    ("spread vocabulary", "offload", "compile"),
    ("packed",),
)


def case_of(schedule: str, kinds: Sequence[str]) -> Case | None:
    """Return the case of a schedule with all of these kinds; None where no such plan is legal or can be run."""
    # Where pipelines are short, few schedules keep activations long enough to offload them.
    degrees = (4,) if find_schedule(schedule).swaps_end_stages else (2, 4) if "offload" in kinds else (2,)
    cases = (_case(schedule, kinds, pp) for pp in degrees)
    return next(filter(is_runnable, cases), None)


def _case(schedule: str, kinds: Sequence[str], pp: int) -> Case:
    entry = find_schedule(schedule)
    chunks = "" if entry.default_chunks == 1 else f"v{entry.default_chunks}"
    added = [KINDS[kind] for kind in kinds]
    words = [word for one in added for word in one.get("words", ())]
    options = {key: value for one in added for key, value in one.items() if key != "words"}
    ends = ["l0.2.2.0"] if entry.swaps_end_stages else []
    name = "-".join([*words[:1], f"pp{pp}{chunks}", f"s{schedule.replace('-', '')}", *ends, *words[1:]])
    batch = (2 * pp) * (2 if {"z1", "z2", "z3"} & set(kinds) else 1)
    return {"plan": name, "layers": pp * entry.default_chunks // entry.default_replicas, "batch": batch, **options}


def is_runnable(case: Case) -> bool:
    """Return True if the plan of a case is legal and can be run."""
    plan = plan_of(case)
    config = small_run(layers=case["layers"], family=case.get("family", "llama"), tied=case.get("tied", False))
    workload = config.workload.model_copy(update={"global_batch_size": case["batch"]})
    if plan_violations(plan, config.model, workload, plan.world_size) or unsupported_features(plan, config.model):
        return False
    if plan.default_strategy.offload == "none":
        return True
    try:
        build_program(resolve_schedule(plan, config.model, workload), config.model, workload)
    except InfeasibleError:  # nothing is saved for long enough
        return False
    return True


def plan_of(case: Case) -> Plan:
    """Return the plan of a case."""
    base = Plan(precision=case.get("precision", "bf16"), micro_batch_size=1)
    return Plan.model_validate(parse_plan_name(case["plan"], base).model_dump() | case.get("changes", {}))


def random_cases(seed: int) -> Iterator[Case]:
    """Yield cases of random schedules with several kinds."""
    random_number = random.Random(seed)
    schedules = [name for name in SYNCHRONOUS if not SCHEDULES[name].slow]
    while True:
        kinds = [random_number.choice(names) for names in ALTERNATIVES if random_number.random() < 0.7]
        if (case := case_of(random_number.choice(schedules), kinds)) is not None:
            yield case


def num_ranks(case: Case) -> int:
    """Return the number of ranks of a case."""
    return plan_of(case).world_size
