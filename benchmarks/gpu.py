"""Everything to know on a lent GPU, in one command: correctness, speed, memory, predictions, recovery.

Each part runs in a process of its own and leaves its result in `--out`; the same command goes on where it was cut off,
leaves out what is there, and tries again what failed. Without a GPU it runs at toy size on the CPU, which shows only
that it works.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_step import StepCase
from benchmarks.other_models import OTHERS
from muster.config.local_machine import catalog_device_name

PART_LIMIT_S = 540
"""Longest time of a part."""
HAS_GPU = torch.cuda.is_available()
SPEED_BAR, MFU_BAR = 1.1, 0.5
"""Ratio to the plain compiled loop, and compiled MFU, that Muster should reach."""


def step_cases(out: Path) -> list[StepCase]:
    """Return the steps to measure, the most telling first."""
    profile = str(out / "machine.yaml")
    if not HAS_GPU:
        toy = StepCase("toy", "tiny", "dp1-mb2-fp32", 64, 2, profile=profile)
        plain = replace(toy, name="toy, plain", program="plain", profile="")
        packed = replace(toy, name="toy, packed", mean_document=16)
        others = [replace(plain, name=f"toy, {program}", program=program) for program in OTHERS]
        return [toy, plain, *others, packed, replace(toy, name="toy, fp8", plan="dp1-mb2-fp8")]
    small = StepCase("1B", "llama3.2-1b", "dp1-mb1-bf16", 8192, 4, profile=profile)
    large = StepCase("8B, 8 layers", "llama3-8b", "dp1-mb1-bf16", 8192, 4, layers=8, profile=profile)
    found = []
    for case in (small, large):
        found += [
            replace(case, name=f"{case.name}, compiled", compile=True),
            replace(case, name=f"{case.name}, plain compiled", compile=True, program="plain", profile=""),
            *(
                replace(case, name=f"{case.name}, {program} compiled", compile=True, program=program, profile="")
                for program in OTHERS
            ),
            replace(case, name=f"{case.name}, eager"),
        ]
    recomputed = StepCase("3B, recomputed", "llama3.2-3b", "dp1-mb1-bf16-relem", 8192, 4, profile=profile)
    long = replace(small, name="1B, full recompute, 32k", plan="dp1-mb1-bf16-rfull", seq_len=32_768, micro_batches=1)
    offloaded = replace(small, name="1B, offloaded", plan="dp1-mb1-bf16-oact")
    packed = replace(small, name="1B, packed, compiled", compile=True, mean_document=256)
    float8 = replace(large, name="8B, 8 layers, fp8, compiled", plan="dp1-mb1-fp8", compile=True)
    return [*found, packed, float8, recomputed, long, offloaded]


@dataclass(frozen=True)
class Part:
    """A part of the benchmark; `run` returns its result as plain data."""

    name: str
    run: Callable[[Path], Any]


def parts(out: Path) -> list[Part]:
    """Return all parts in their order."""
    found = [Part("doctor", _doctor), Part("verify", _verify), Part("profile", _profile)]
    found += [Part(f"step {case.name}", lambda out, case=case: _step(out, case)) for case in step_cases(out)]
    found += [Part("kill and resume", _kill_and_resume), Part("out of memory", _out_of_memory)]
    if HAS_GPU and torch.cuda.device_count() < MANY:
        return found
    return [
        *found,
        Part("verify on many", _verify_many),
        *(Part(f"run {plan}", lambda out, plan=plan: _run_many(out, plan)) for plan in many_plans()),
    ]


MANY = 8 if HAS_GPU else 2
"""Devices of the parts on many."""


def many_plans() -> list[str]:
    """Return the plans of whole runs on many devices: all that a plan can do, once."""
    if not HAS_GPU:
        return ["dp2-mb2-z1-fp32"]
    return [f"{plan}-mb1-bf16" for plan in ("dp8-z1", "dp8-z3", "dp2-tp4-sp", "tp8-sp", "pp8", "dp2-tp2-sp-pp2")]


def _folder_of_many(out: Path) -> Path:
    """Return a folder without the machine's profile, which is of one device."""
    folder = out / "many"
    folder.mkdir(exist_ok=True)
    return folder


def _verify_many(out: Path) -> Any:
    """Compare plans on many devices with one process."""
    plans = ("dp8-z1", "dp8-z3", "tp8-sp", "pp8", "dp2-pp4-szbh1", "dp2-tp2-sp-pp2")
    plans = plans if HAS_GPU else ("dp2-z3", "pp2")
    against = [word for plan in plans for word in ("--against", f"{plan}-fp32")]
    ended = _muster("verify", "--preset", "tiny", *against, "--json", cwd=_folder_of_many(out), check=False)
    rows = json.loads(ended.stdout)["plans"] if ended.stdout else []
    agree = {row["plan"]: row["agrees"] for row in rows}
    return {"fp32": {"exit_code": ended.returncode, "agree": agree, "says": ended.stderr.strip()[-1000:]}}


def _run_many(out: Path, plan: str) -> Any:
    """Predict a run on many devices by the catalogue, then run it; what NCCL says of its first step lies beside it."""
    model, seq_len, batch = ("llama3-8b", 8192, 32) if HAS_GPU else ("tiny", 64, 8)
    device = catalog_device_name(torch.cuda.get_device_name(0)) if HAS_GPU else None
    predicted: dict[str, Any] = {}
    if device is not None:
        size = ("--seq-len", seq_len, "--global-batch", batch)
        flags = ("--model", model, "--cluster", f"{MANY}x{device}", "--plan", plan, *size)
        ended = _muster("predict", *flags, "--json", cwd=_folder_of_many(out))
        predicted = {"step_s": json.loads(ended.stdout)["step_time_s"]}
    run = _folder_of_many(out) / f"run-{plan}"
    flags = ("--preset", "tiny", "--model", model, "--parallel", plan, "--nproc", MANY, "--run", run, "--fresh")
    size = ("--train.seq_len", seq_len, "--train.global_batch_size", batch, "--train.steps", 12)
    os.environ["NCCL_DEBUG"] = "INFO"
    ended = _muster("train", *flags, *size, "--train.sample_tokens", 0, cwd=run.parent)
    del os.environ["NCCL_DEBUG"]
    run.with_suffix(".log").write_text(ended.stdout + ended.stderr)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [row["time/step"] for row in rows][4:]
    return {"predicted": predicted, "measured": {"step_s": median(times)}, "losses": _losses(run)[-1]}


def _muster(*words: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "muster", *map(str, words)]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PART_LIMIT_S, check=False
    )
    if check and ended.returncode:
        raise RuntimeError((ended.stderr or ended.stdout).strip()[-1500:])
    return ended


def _doctor(out: Path) -> Any:
    ended = _muster("doctor", "--ranks", "1", "--json", cwd=out, check=False)
    return json.loads(ended.stdout)["findings"]


def _verify(out: Path) -> Any:
    found = {}
    for precision in ("fp32", "bf16"):
        plans = [f"dp1-mb2-rfull-{precision}", f"dp1-mb4-relem-{precision}"]
        against = [word for plan in plans for word in ("--against", plan)]
        ended = _muster("verify", "--preset", "tiny", *against, "--json", cwd=out, check=False)
        rows = json.loads(ended.stdout)["plans"] if ended.stdout else []
        agree = {row["plan"]: row["agrees"] for row in rows}
        found[precision] = {"exit_code": ended.returncode, "agree": agree, "says": ended.stderr.strip()[-1000:]}
    return found


def _profile(out: Path) -> Any:
    begin_s = time.perf_counter()
    quick = () if HAS_GPU else ("--quick",)
    ended = _muster("profile", "--ranks", "1", *quick, "-o", out / "machine.yaml", cwd=out)
    return {"seconds": time.perf_counter() - begin_s, "says": ended.stdout.splitlines()[-12:]}


def _step(out: Path, case: StepCase) -> Any:
    request = out / "case.json"
    request.write_text(json.dumps(asdict(case)))
    command = [sys.executable, "-m", "benchmarks.gpu_step", str(request)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PART_LIMIT_S, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip()[-1500:])
    return json.loads(ended.stdout.splitlines()[-1])


def _kill_and_resume(out: Path) -> Any:
    """Kill a run with SIGKILL in the middle, resume it, and compare its losses with those of a whole one."""
    flags = ["--preset", "tiny", "--nproc", "1", "--train.sample_tokens", "0", "--train.save_every", "5"]
    whole, killed = out / "whole", out / "killed"
    _muster("train", *flags, "--run", whole, "--fresh", cwd=out)
    command = [sys.executable, "-m", "muster", "train", *flags, "--run", str(killed), "--fresh"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + PART_LIMIT_S
        while _steps_of(killed) < 8 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    at_kill = _steps_of(killed)
    _muster("train", *flags, "--run", killed, cwd=out)
    losses = [_losses(run) for run in (whole, killed)]
    return {"killed_after_step": at_kill, "largest_difference": max(abs(a - b) for a, b in zip(*losses, strict=True))}


def _steps_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _losses(run: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def _out_of_memory(out: Path) -> Any:
    """Run what can't fit: the sentences of the refusal and of the failure."""
    model = "llama3-70b" if HAS_GPU else "gpt3-175b"
    flags = ["--preset", "tiny", "--model", model, "--parallel", "dp1-mb1-bf16", "--nproc", "1", "--dry-run"]
    ended = _muster("train", *flags, cwd=out, check=False)
    return {"exit_code": ended.returncode, "says": ended.stderr.strip()[-600:]}


# ----------------------------------------------------------------------------------------------------------------------
# Running and telling


def run_parts(out: Path, limit_s: float, again: bool) -> dict[str, Any]:
    """Run the parts that have no result yet, until the time is over; returns all results by name."""
    begin_s, found = time.monotonic(), {}
    for part in parts(out):
        path = out / f"{part.name.replace(' ', '-').replace(',', '')}.json"
        known = json.loads(path.read_text()) if path.exists() and not again else {"error": "not run"}
        if not any(word in known for word in ("error", "skipped")):
            found[part.name] = known
            continue
        if time.monotonic() - begin_s > limit_s:
            print(f"{part.name}: no time left; the same command goes on here", flush=True)
            continue
        print(f"{part.name} …", flush=True)
        try:
            result = part.run(out)
        except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
            result = {"error": str(error)[-1500:]}
        path.write_text(json.dumps(result, indent=1))
        found[part.name] = result
    return found


def table(found: dict[str, Any]) -> str:
    """Return the steps as a table in Markdown: measured, predicted, MFU, memory, ratio to the plain loop."""
    steps = {name.removeprefix("step "): row for name, row in found.items() if name.startswith("step ")}
    heads = ("step", "measured", "tokens/s", "MFU", "catalogue", "profile", "reserved", "forecast", "÷ plain")
    rows = [heads, ("---",) * len(heads)]
    for name, row in steps.items():
        if "skipped" in row:
            rows.append((name, f"skipped: {row['skipped'][:90]}", *[""] * (len(heads) - 2)))
            continue
        if "error" in row:
            rows.append((name, f"failed: {row['error'].splitlines()[-1][:90]}", *[""] * (len(heads) - 2)))
            continue
        plain = steps.get(f"{name.partition(',')[0]}, plain compiled") or steps.get(f"{name}, plain")
        measured, said = row["measured"], row["predicted"]
        rows.append(
            (
                name,
                f"{1e3 * measured['step_s']:.1f} ms",
                f"{row['tokens_per_s']:,.0f}",
                _percent(row.get("mfu")),
                _predicted(said.get("catalogue"), measured),
                _predicted(said.get("profile"), measured),
                _gib(measured.get("reserved_bytes")),
                _gib((said.get("catalogue") or {}).get("memory_bytes")),
                "–" if not plain or "measured" not in plain else f"{row['tokens_per_s'] / plain['tokens_per_s']:.2f}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def summary(found: dict[str, Any]) -> list[str]:
    """Return a line for each part that is no step."""
    lines = []
    for name, row in found.items():
        if name.startswith("step "):
            continue
        if isinstance(row, dict) and "error" in row:
            lines.append(f"{name}: failed: {row['error'].splitlines()[-1][:200]}")
        else:
            tell = _tell_run if name.startswith("run ") else _TELL.get(name, lambda row: json.dumps(row)[:200])
            lines.append(f"{name}: {tell(row)}")
    return lines


def _tell_doctor(findings: list[dict[str, str]]) -> str:
    problems = [one["sentence"] for one in findings if one["level"] != "ok"]
    return f"{len(findings)} checks, " + ("all well" if not problems else "; ".join(problems))


def _tell_verify(by_precision: dict[str, dict[str, Any]]) -> str:
    told = []
    for precision, found in by_precision.items():
        wrong = [plan for plan, agrees in found["agree"].items() if not agrees]
        ran = f"{len(found['agree'])} plans agree with the reference"
        told.append(f"{precision}: {found['says'][-200:] if not found['agree'] else ', '.join(wrong) or ran}")
    return "; ".join(told)


def _tell_run(row: dict[str, Any]) -> str:
    measured = row["measured"]
    return f"{1e3 * measured['step_s']:.1f} ms a step, predicted {_predicted(row['predicted'], measured)}"


_TELL: dict[str, Callable[[Any], str]] = {
    "doctor": _tell_doctor,
    "verify": _tell_verify,
    "verify on many": _tell_verify,
    "profile": lambda row: (
        f"{row['seconds']:.0f} s; " + "; ".join(" ".join(line.split()) for line in row["says"][-4:-1])
    ),
    "kill and resume": lambda row: (
        f"killed after step {row['killed_after_step']}; losses differ from a whole run's by at most"
        f" {row['largest_difference']:.2g}"
    ),
    "out of memory": lambda row: f"exit code {row['exit_code']}; {row['says'].partition(' (')[0]}",
}


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _gib(value: float | None) -> str:
    return "–" if value is None else f"{value / 2**30:.1f} GiB"


def _predicted(said: dict[str, Any] | None, measured: dict[str, Any]) -> str:
    """Return a predicted time beside its error; a dash without a prediction."""
    if not said or "error" in said:
        return "–"
    return f"{1e3 * said['step_s']:.1f} ms ({said['step_s'] / measured['step_s'] - 1:+.0%})"


def main() -> None:
    """Run what is left, print the results and write them beside their parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="directory of the results")
    parser.add_argument("--minutes", type=float, default=40.0, help="no part begins later than this")
    parser.add_argument("--again", action="store_true", help="measure what has a result, too")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = run_parts(args.out.resolve(), 60 * args.minutes, args.again)
    device = torch.cuda.get_device_name(0) if HAS_GPU else "no GPU: toy sizes on the CPU, which say nothing of a GPU"
    told = "\n".join(f"* {line}" for line in summary(found))
    text = f"{device}; torch {torch.__version__}; {date.today().isoformat()}\n\n{table(found)}\n\n{told}\n"
    (args.out / "results.md").write_text(text)
    print(f"\n{text}\nwritten to {args.out / 'results.md'}, each part in full beside it")


if __name__ == "__main__":
    main()
