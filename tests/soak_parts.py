"""Parts of `make soak`, each of at most ten minutes on two cores, and the soak tests that belong to each."""

from muster.spec.schedules import SCHEDULES


def _walk_from(first: int, count: int) -> tuple[str, ...]:
    """Return the tests of some of the 24 pieces of the walk through all pairs of plans with context parallelism."""
    name = "test_resume.py::test_each_word_of_context_parallelism_goes_on_under_each_other_one"
    return tuple(f"{name}[{piece}]" for piece in range(first, first + count))


def _public(ranks: int, *counts: int) -> tuple[str, ...]:
    """Return the tests of `auto` against public schedules of so many ranks and of each number of micro-batches."""
    name = "test_auto.py::test_never_behind_public_schedulers_on_more_ranks"
    return tuple(f"{name}[{ranks}-{count}-{third}]" for count in counts for third in range(3))


def _instances(test: str, *first: int) -> tuple[str, ...]:
    """Return the pieces of a test of 200 random instances of planning that begin with these."""
    return tuple(f"{test}_in_200_instances[{instance}]" for instance in first)


_SIMPLEST = "test_plan_claims.py::test_the_simplest_plan_is_what_looking_at_everything_finds"
_SEARCH = "test_planner.py::test_the_search_finds_what_simulating_everything_finds"
_LOSSES = "test_parity.py::test_losses_of_every_plan_equal_one_process"
_SYNCHRONOUS = tuple(name for name, entry in SCHEDULES.items() if not entry.is_asynchronous)


def _gpu_steps_of(schedules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tests of steps of some schedules with each kind of plan, on a GPU in name only."""
    name = "test_fake_gpu.py::test_steps_of_every_schedule_with_each_kind_of_plan_wait_once_and_all_ranks_meet"
    return tuple(f"{name}[{schedule}-" for schedule in schedules)


_RANDOM_FAULTS = "test_random_faults.py::test_runs_under_random_faults_have_every_loss_of_an_undisturbed_one"
FAULT_PLANS = ("dp4-z1", "dp4-z3", "tp2-dp2", "pp2-dp2-z1", "tp2-pp2", "pp4", "cp2-dp2")
"""Plans of one node under which ranks are lost at random, with and without spares."""

PARTS: dict[str, tuple[str, ...]] = {
    "schedules": ("test_auto.py", "test_executed_schedules.py"),
    "public-16": _public(16, 16, 32, 49, 64),
    "public-32": _public(32, 32, 64),
    "public-97": _public(32, 97),
    "public-128": _public(32, 128),
    "claims": ("test_schedules.py", "test_plan_homes.py"),  # 80 s of one core
    **{f"planner-{part + 1}": _instances(_SEARCH, 50 * part, 50 * part + 25) for part in range(4)},
    "planning": (
        *("test_planner.py", "test_plan_answers.py", "test_search_budget.py", "test_tiers.py", "test_plan_islands.py"),
        *("test_plan_auto.py", "test_heterogeneous.py", "test_plan_offload.py", "test_plan.py", "test_config.py"),
    ),
    "recipes": ("test_recipes.py", "test_validate.py", "test_comm_volume.py"),
    "simplest-1": _instances(_SIMPLEST, 0, 50),
    "simplest-2": _instances(_SIMPLEST, 100, 150),
    "answers": ("test_plan_claims.py",),
    "memory": ("test_memory_forecast.py", "test_conversion_memory.py"),
    "random-memory": (
        "test_memory_forecast.py::test_forecast_of_random_plans_is_what_pytorch_counts",
        "test_memory_forecast.py::test_forecast_of_random_split_backwards_of_wide_models_is_what_pytorch_counts",
        "test_memory_forecast.py::test_forecast_of_random_vocabulary_shards_of_wide_models_is_what_pytorch_counts",
    ),
    "context": (
        "test_context_parallel.py",
        "test_context_memory.py",
        "test_context_overlap.py",
        "test_dynamic_groups.py",
        "test_tiling.py",
    ),
    "attention": ("test_linear_attention.py", "test_latent_attention.py", "test_sequence_slices.py"),
    "experts": (
        *("test_experts.py", "test_expert_moves.py", "test_multi_token_prediction.py", "test_pass_pairs.py"),
        *("test_lsh_rows.py", "test_row_casts.py"),
    ),
    "parity": ("test_parity.py", "test_grad_reduce.py", "test_dropout.py", "test_precision.py"),
    "parity-2": (f"{_LOSSES}[2]", f"{_LOSSES}[8]"),
    "parity-4": (f"{_LOSSES}[4]",),
    "parity-compiled": (
        "test_parity.py::test_more_compiled_blocks_equal_one_process",
        "test_parity.py::test_host_updates_of_more_plans_leave_the_same_bits",
    ),
    "overlap": (
        "test_domino.py",
        "test_ladder.py",
        "test_kraken.py",
        "test_eager_reduction.py",
        "test_bucket_steps.py",
        "test_shard_levels.py",
        "test_overlap_benchmark.py",
    ),
    "paths": ("test_skippipe.py", "test_active_stages.py"),
    "versions": ("test_versions.py", "test_post_validation.py", "test_shared_updates.py"),
    "verify": ("test_verify.py", "test_extend.py"),
    "adapters": (
        *("test_adapters.py", "test_four_bit.py", "test_hd_pissa.py", "test_low_rank.py"),
        *("test_small_states.py", "test_mezo.py"),
    ),
    "gpu": ("test_fake_gpu.py",),
    "gpu-4": ("test_fake_gpu.py::test_steps_of_all_plans_of_four_ranks_wait_once_and_all_ranks_meet",),
    "gpu-traits": ("test_framework_traits.py",),
    "gpu-order": (
        *("test_executed_order.py", "test_cuda_graphs.py", "test_symmetric_memory.py"),
        "test_replica_reductions.py",
    ),
    "gpu-benchmark": ("test_gpu_benchmark.py",),
    **{f"gpu-schedules-{part + 1}": _gpu_steps_of(_SYNCHRONOUS[3 * part : 3 * part + 3]) for part in range(8)},
    "gpu-kinds": (
        "test_fake_gpu.py::test_steps_of_schedules_with_several_kinds_of_plans_wait_once_and_all_ranks_meet",
    ),
    "data": ("test_packing.py", "test_eval.py", "test_tracking.py", "test_fine_tuning.py", "test_older_files.py"),
    "resume": ("test_resume.py", "test_changed_resume.py", "test_delayed_update.py", "test_backward_updates.py"),
    **{f"context-resume-{part + 1}": _walk_from(2 * part, 2) for part in range(12)},
    "kills": ("test_async_saver.py", "test_train.py", "test_remote_checkpoints.py", "test_in_memory_checkpoints.py"),
    "tiers": ("test_tier_faults.py", "test_train_faults.py"),
    "peers": ("test_peers.py", "test_peer_runs.py", "test_swarm.py"),
    "lost-ranks": ("test_elastic.py", "test_checkfree.py", "test_checkfree_plus.py"),
    # `PYTEST_ARGS="--faults 5 --fault-seed 2"` for five others of each run
    **{
        f"random-faults-{plan}": tuple(f"{_RANDOM_FAULTS}[{plan}-{spares}]" for spares in (0, 2))
        for plan in FAULT_PLANS
    },
    "random-faults-on-two-nodes": ("test_random_faults.py",),
    "lost-nodes": ("test_elastic_nodes.py",),
    "gradient-checks": ("test_gradient_check.py", "test_stragglers.py"),
    "hangs": ("test_hang.py", "test_doctor.py"),
    "nodes": ("test_nodes.py", "test_profile_nodes.py", "test_ring_order.py"),
    "preflight": ("test_preflight.py", "test_islands.py", "test_memory_limit.py"),
    "docs": ("test_docs.py",),
    "site": ("test_site.py", "test_report_page.py", "test_report.py"),
    "walk": ("test_docs.py::test_the_walk_through_planning_prints_what_it_shows",),
}
"""Name of each part, in the order in which `make soak` runs them, to the files or the tests (`file.py::test`) in it."""


def part_of(test_id: str) -> str | None:
    """Return the name of the part whose prefix of a test id (`test_hang.py::test_x[case]`) is the longest, or None."""
    matching = [
        (len(prefix), name) for name, prefixes in PARTS.items() for prefix in prefixes if _has_prefix(test_id, prefix)
    ]
    return max(matching)[1] if matching else None


def find_part(text: str) -> str:
    """Return the part that a name or a number from 1 says. Raises ValueError with the choices."""
    names = list(PARTS)
    if text in names:
        return text
    if text.isdecimal() and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    choices = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    raise ValueError(f"no soak part '{text}': expected a number or a name of {choices}")


def _has_prefix(test_id: str, prefix: str) -> bool:
    """Return True for a test in a file, a test or, where the prefix ends within its brackets, some cases of it."""
    return test_id == prefix or test_id.startswith((prefix + "::", prefix + "[", *([prefix] if "[" in prefix else [])))
