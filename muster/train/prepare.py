"""Preparation of a run: checks the request, builds the data and writes the run directory. Torch is imported late.

Torch takes seconds to import, so a request that is refused, or a run that is finished, is reported before.
"""

from datetime import timedelta
from pathlib import Path

from muster.config.attempt_files import write_plans_for_losses
from muster.config.grouped_matmul_file import keep_grouped_rates
from muster.config.load_config import ResolvedConfig, write_attempt_files
from muster.launch.recovery import Elasticity
from muster.layout.mesh import state_numbers
from muster.planner.auto import ChosenPlan
from muster.planner.plans_for_losses import plans_for_losses
from muster.spec.plan import Plan
from muster.train.memory_preflight import has_memory
from muster.train.preflight import TrainOptions, preflight
from muster.train.resume_point import record_in_memory_identity
from muster.train.run_directory import explain_write_errors, remove_last_exit, remove_previous_results
from muster.train.run_tokenizer import keep_tokenizer

WORKER = "muster.train.worker"
"""Module of a rank that trains."""
PREPARE_TIMEOUT = timedelta(days=1)
"""Longest wait of the other ranks or nodes while rank 0 prepares the run, which may include tokenizing the data."""


def prepare(resolved: ResolvedConfig, chosen: ChosenPlan, options: TrainOptions) -> bool:
    """Check the request, build the data and write the run directory; False when the run is finished already.

    Changes nothing in the run directory before all checks have passed.
    """
    passed = preflight(resolved, chosen, options)
    if passed.is_finished:
        return False
    assert passed.dataset is not None
    run_dir, config = options.run_dir, passed.resolved.config
    if passed.remote is not None and options.fresh:
        passed.remote.delete_all()
    resumes = passed.resume_point is not None
    with explain_write_errors(run_dir):
        remove_last_exit(run_dir)
        if not resumes:
            remove_previous_results(run_dir, everything=options.fresh)
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        kept = keep_tokenizer(passed.resolved, run_dir, passed.initial_model, passed.dataset, resumes)
        keep_grouped_rates(config.model, run_dir, resumes)
        write_attempt_files(kept, passed.plan, run_dir, resumes)
        record_in_memory_identity(run_dir, config, passed.dataset, resumes)
    return True


def prepare_for_losses(resolved: ResolvedConfig, plan: Plan, run_dir: Path, num_nodes: int = 1) -> Elasticity:
    """Write the plans with which fewer ranks would go on; return how the job goes on. There are no such plans where
    spares wait for whatever may be lost at once: one node's spares don't replace another node."""
    train = resolved.config.train
    plans = {} if train.spares and num_nodes == 1 else plans_for_losses(resolved, plan)
    if train.memory_limit_bytes is not None and num_nodes == 1:  # which ranks are held to
        plans = {size: fewer for size, fewer in plans.items() if has_memory(resolved.config, fewer)}
    with explain_write_errors(run_dir):
        write_plans_for_losses(run_dir, plans)
    without_copies = {**plans, plan.world_size: plan} if train.recovery == "checkfree" else {}
    states = {size: state_numbers(one) for size, one in without_copies.items()}
    return Elasticity(train.spares, tuple(plans), states)
