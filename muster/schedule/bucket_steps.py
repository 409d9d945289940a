"""Optimizer step bucket by bucket, with the gather of each updated bucket beside the updates of those behind it
(Holmes's overlapped optimizer, arXiv:2312.03549; Megatron-LM's overlap_param_gather_with_optimizer_step).

A bucket is what is gathered as one: embedding and head, or the layers of a bucket. The passes of the next step need
them in this order, so that its first forward begins once the first two have arrived. Clipping needs the norm of all
gradients, which therefore are reduced before. Example, of one stage:

    compute     … CLIP  0STEP_BUCKET  0STEP_BUCKET.1    0STEP_BUCKET.2    STEP │ 0F0 …
    collective                        0UNSHARD_BUCKET   0UNSHARD_BUCKET.1      │ 0UNSHARD_BUCKET.2
"""

from typing import TYPE_CHECKING

from muster.schedule.action import Action, Kind
from muster.schedule.program import Wait

if TYPE_CHECKING:
    from muster.schedule.lower import LoweringOptions, ProgramDraft


def add_bucket_steps(draft: "ProgramDraft", rank: int, options: "LoweringOptions", norm: Wait) -> list[Wait]:
    """Add the updates of a rank's buckets and their gathers; return the waits for the updates.

    Stages come in the order in which the next step's passes use them. Nothing in this step waits for a gather: UNSHARD
    of the next one does.
    """
    compute = draft.ranks[rank]["compute"]
    stages = list(dict.fromkeys(item.action.stage for item in compute if item.action.kind == Kind.F))
    done = [draft.add(rank, Action(Kind.CLIP), [norm])]
    for stage in stages:
        for bucket in range(options.update_buckets[stage]):
            done.append(draft.add(rank, Action(Kind.STEP_BUCKET, stage, slice=bucket), done[:1]))
            if options.is_sharded(stage):
                draft.add(rank, Action(Kind.UNSHARD_BUCKET, stage, slice=bucket), done[-1:])
    return done
