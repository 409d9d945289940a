"""Plan, predict, train, and resume under another plan, in Python, with the plugins of the other examples."""

import sys
from pathlib import Path

import muster

HERE = Path(__file__).parent
PARTS = [HERE / f"my_{part}.py" for part in ("model", "schedule", "optimizer", "dataset", "loss", "step")]


def run(steps: int, plan: str) -> muster.Run:
    return muster.Run(
        extends="tiny",
        model={"preset": "tiny-mixer", "num_layers": 4},
        plugins=PARTS,
        data={"source": "sums", "max_bytes": 20_000},
        train={"steps": steps, "loss": "smoothed", "training_step": "sam", "sample_tokens": 0},
        eval={"batches": 1},
        optim={"name": "sign-momentum", "options": {"momentum": 0.8}, "lr": 1e-3},
        parallel=plan,
    )


def main(directory: str) -> None:
    found = muster.plan("llama3-8b", "8xh100", top=1)
    print(found.best.hash, f"{found.predictions[0].step_time_s:.2f} s")
    print(muster.predict("llama3-8b", "8xh100", found.best).to_json()["mfu"])
    first = run(2, "pp2-mb4-sshallow1f1b").train(directory)
    then = run(4, "dp1-mb4").train(directory)
    print(first.finished, then.finished, [row["step"] for row in then.metrics], then.report.name)


if __name__ == "__main__":
    main(sys.argv[1])
