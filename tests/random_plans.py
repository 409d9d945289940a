"""Random models, most with large vocabularies, and plans of every kind of schedule for them."""

from random import Random

from muster.spec.errors import InfeasibleError
from muster.spec.layer_strategy import LayerStrategy
from muster.spec.model import ModelSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan import Plan
from muster.spec.schedules import SCHEDULES
from muster.spec.workload import Workload

VOCABULARIES = (257, 32_000, 50_257, 128_256, 151_936, 256_000)


def random_case(
    seed: int, wide: bool = False, schedules: tuple[str, ...] = (), vocab_parallel: bool = False
) -> tuple[ModelSpec, Plan, Workload]:
    """A model of at most 16 layers, a plan that can run it, and a few micro-batches a pipeline rank.

    `wide`: with a hidden width of 4,096. `schedules`: the only ones wanted. `vocab_parallel`: only such plans.
    """
    draw = Random(seed)
    while True:
        model = _wide_model(draw) if wide else _random_model(draw)
        plan = _random_plan(draw)
        if (schedules and plan.schedule not in schedules) or (vocab_parallel and not plan.vocab_parallel):
            continue
        model = model.model_copy(update={"num_layers": plan.num_stages * draw.choice((1, 2))})
        count = plan.pp * draw.choice((1, 2))
        batch = plan.mesh(0).dp_size * plan.micro_batch_size * count
        workload = Workload(seq_len=draw.choice((128, 512, 1024, 2048)), global_batch_size=batch)
        try:
            require_runnable(plan, model, workload, plan.world_size)
        except InfeasibleError:
            continue
        return model, plan, workload


def _random_model(draw: Random) -> ModelSpec:
    heads = draw.choice((4, 8, 16))
    hidden = heads * draw.choice((32, 64))
    learned = draw.random() < 0.25
    return ModelSpec(
        vocab_size=draw.choice(VOCABULARIES),
        hidden_size=hidden,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=heads if learned else draw.choice((heads, 2)),
        intermediate_size=draw.choice((2, 3, 4)) * hidden,
        tied_embeddings=draw.random() < 0.5,
        **({"norm": "layer", "position": "learned", "max_positions": 2048} if learned else {}),
    )


def _wide_model(draw: Random) -> ModelSpec:
    model = _random_model(draw)
    return model.model_copy(
        update={
            "hidden_size": 4096,
            "num_heads": 32,
            "num_kv_heads": draw.choice((8, 32)) if model.norm != "layer" else 32,
            "intermediate_size": draw.choice((8192, 11008, 14336)),
            "vocab_size": draw.choice(VOCABULARIES[1:]),
        }
    )


def _random_plan(draw: Random) -> Plan:
    pp, tp = draw.choice((1, 2, 4)), draw.choice((1, 1, 2))
    schedule = draw.choice(("1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")) if pp > 1 else "1f1b"
    vocab_parallel = pp > 1 and draw.random() < 0.2
    strategy = LayerStrategy(
        zero=draw.choice(("z1", "z1", "z2")) if vocab_parallel else draw.choice(("z1", "z1", "z2", "z3")),
        recompute=draw.choice(("none", "elementwise", "full")),
        sp=tp > 1 and draw.random() < 0.5,
    )
    return Plan(
        dp_shard=draw.choice((1, 2, 4)),
        dp_replicate=draw.choice((1, 1, 1, 2)),
        tp=1 if vocab_parallel else tp,
        pp=pp,
        vpp=SCHEDULES[schedule].default_chunks,
        schedule=schedule,
        vocab_parallel=vocab_parallel,
        micro_batch_size=draw.choice((1, 2)),
        precision=draw.choice(("bf16", "bf16", "fp32")),
        bucket_layers=draw.choice((1, 1, 2, 3)),
        default_strategy=strategy,
    )
