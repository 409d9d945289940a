"""Uncertainty of predictions, from the errors on measured configurations."""

import json
from pathlib import Path

import pytest

from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost import uncertainty
from muster.cost.uncertainty import COVERAGE, MeasuredErrors, measured_errors, step_time_interval
from muster.spec.machine_rates import MachineRates
from muster.spec.plan_name import parse_plan_name
from muster.validate.error_table import write_error_table
from muster.validate.summary import summarize
from tests.test_validate import scored

DENSE, EXPERTS = load_model("llama3-8b"), load_model("mixtral-8x7b")


def replace_errors(monkeypatch, *rows: MeasuredErrors) -> None:
    monkeypatch.setattr(uncertainty, "measured_errors", lambda: rows)


def measured(device: str, errors: list[float], source: str = "one", **others) -> MeasuredErrors:
    fields = {"fp8": False, "experts": False, "most_devices": 64, "uncalibrated": errors, **others}
    return MeasuredErrors(source=source, device=device, errors=errors, **fields)


def test_sources_weigh_alike(monkeypatch):
    """Errors of 25 % in 20 configurations of one source, of −20 % in 80 of another: each is half of all."""
    replace_errors(monkeypatch, measured("h100-sxm", [0.25] * 20), measured("h100-sxm", [-0.2] * 80, "other"))
    found = step_time_interval(DENSE, parse_plan_name("dp8"), load_cluster("8xh100"))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1 / 1.25, 1 / 0.8))
    assert "100 16-bit dense configurations of h100-sxm, of 2 sources" in found.source


def test_a_device_measured_too_little_is_as_sure_as_others_without_calibration(monkeypatch):
    rows = measured("h200", [0.5] * 19), measured("a100-80-sxm", [0.0] * 40, "other", uncalibrated=[0.1] * 40)
    replace_errors(monkeypatch, *rows)
    found = step_time_interval(DENSE, parse_plan_name("dp8"), load_cluster("8xh200"))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1 / 1.5, 1 / 1.1))
    assert "59 16-bit dense configurations of all devices" in found.source
    assert "19 of 16-bit dense configurations of h200" in found.source
    experts = step_time_interval(EXPERTS, parse_plan_name("dp8"), load_cluster("8xh200"))
    assert experts is not None
    assert "all devices, precisions and models" in experts.source


def test_a_precision_that_nobody_measured_is_as_sure_as_all_others_and_says_so(monkeypatch):
    replace_errors(monkeypatch, measured("h100-sxm", [0.0] * 40, uncalibrated=[0.1] * 40))
    for precision in ("fp32", "tf32"):
        found = step_time_interval(DENSE, parse_plan_name(f"dp8-{precision}"), load_cluster("8xh100"))
        assert found is not None
        assert found.low == pytest.approx(1 / 1.1)
        assert f"of all devices and precisions without their calibration (none in {precision})" in found.source


def test_more_devices_than_were_measured_widen_the_interval(monkeypatch):
    replace_errors(monkeypatch, measured("h100-sxm", [0.0] * 20, most_devices=16))
    found = step_time_interval(DENSE, parse_plan_name("dp64"), load_cluster("64xh100"))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1 - 2 * 0.005, 1 + 2 * 0.015))
    assert found.source.endswith("more than the 16 devices measured")


def test_devices_that_differ_are_as_unsure_as_the_least_sure(monkeypatch):
    replace_errors(monkeypatch, measured("h100-sxm", [-0.2] * 20), measured("a100-80-sxm", [0.25] * 20, "other"))
    found = step_time_interval(DENSE, parse_plan_name("dp16"), load_cluster("8xh100+8xa100"))
    assert found is not None
    assert (found.low, found.high) == pytest.approx((1 / 1.25, 1 / 0.8))


def test_an_unmeasured_cpu_has_no_interval_and_a_profiled_one_has():
    cluster = load_cluster("2xcpu")
    assert step_time_interval(DENSE, parse_plan_name("dp2"), cluster) is None
    device = cluster.device.model_copy(update={"rates": MachineRates.model_construct()})
    profiled = cluster.model_copy(update={"groups": (cluster.groups[0].model_copy(update={"device": device}),)})
    found = step_time_interval(DENSE, parse_plan_name("dp2"), profiled)
    assert found is not None
    assert found.low < 1 < found.high


def test_an_interval_holds_for_sources_that_it_was_not_taken_from(monkeypatch):
    """Leave out one source after the other: about 9 of 10 of its configurations lie in the intervals of the rest."""
    rows = measured_errors()
    inside = total = 0
    for source in dict.fromkeys(row.source for row in rows):
        replace_errors(monkeypatch, *(row for row in rows if row.source != source))
        for row in (row for row in rows if row.source == source):
            model = EXPERTS if row.experts else DENSE
            plan = parse_plan_name(f"dp{row.most_devices}{'-fp8' if row.fp8 else ''}")
            found = step_time_interval(model, plan, load_cluster(f"8x{row.device}"))
            assert found is not None
            inside += sum(found.low <= 1 / (1 + error) <= found.high for error in row.errors)
            total += len(row.errors)
    assert total > 700
    assert COVERAGE - 0.05 <= inside / total <= COVERAGE + 0.05


def test_errors_are_written_by_class(tmp_path: Path):
    rows = [{}, {"tp": "4", "dp": "2"}, {"gpu": "A100-80GB SXM", "value": "8"}]
    write_error_table(tmp_path / "errors.json", summarize(scored(*rows)))
    found = json.loads((tmp_path / "errors.json").read_text())["errors"]
    assert {row["device"]: len(row["errors"]) for row in found} == {"a100-80-sxm": 1, "h100-sxm": 2}
    assert all(row["errors"] == row["uncalibrated"] and not row["experts"] for row in found)
