"""The table of attentions: its cases, and that what is known isn't measured again."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import attention
from benchmarks.attention import WORDS, Case


def test_each_kind_has_the_attentions_that_it_can_compute() -> None:
    found = list(attention.cases(4, (64,)))
    assert {case.plan for case in found} == {"dp1", *(f"cp4{word}" for word in WORDS)}
    assert {case.attention for case in found if case.plan == "cp4z"} == {"linear_attn", "simple_gla", "gla"}
    assert {case.mask for case in found if case.plan == "cp4b"} == {"causal", "documents"}
    assert {case.plan for case in attention.cases(1, (64,))} == {"dp1"}


def test_what_is_known_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, failed = Case("softmax", "causal", "dp1", 64), Case("gla", "causal", "dp1", 64)
    lines = (asdict(done) | {"forward_s": 0.001, "backward_s": 0.003}, asdict(failed) | {"error": "no memory"})
    out = tmp_path / "cpu.jsonl"
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    launched: list[list[Case]] = []
    monkeypatch.setattr(attention.torch.multiprocessing, "spawn", lambda run, given, nprocs: launched.append(given[0]))
    attention.run_missing([done, failed], out, 1, "cpu")
    assert launched == [[failed]]
    rows = attention.table(attention.read(out)).splitlines()
    assert rows[2].startswith("| softmax | causal | `dp1` | 64 | 1.0 ms | 3.0 ms | 0.8 |")
    assert rows[3].startswith("| gla | causal | `dp1` | 64 | no memory |")
