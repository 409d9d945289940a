"""Optimizer settings: learning rates, combinations, and values that the Step Law derives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.config.load_config import load_run_config, write_run_files
from muster.config.optim_config import OptimConfig
from muster.config.step_law import batch_tokens_for_steps, derived_value_line, non_embedding_parameters, step_law
from muster.config.step_law import step_law_values as derive
from muster.optim.lr import learning_rate, lr_at_step
from muster.planner.auto import choose_plan, resolve_plan
from muster.spec.errors import ConfigError, InfeasibleError
from muster.train.prepare import TrainOptions, prepare
from muster.train.resume_check import config_changes
from tests.optim_ranks import SPEC

# --- learning rates ---


schedules = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["cosine", "linear", "wsd"]),
        "decay_fraction": st.floats(0.01, 1),
        "decay_shape": st.sampled_from(["linear", "cosine", "sqrt"]),
    }
)


@given(st.integers(0, 50), st.integers(1, 300), st.floats(0, 1), schedules)
def test_a_learning_rate_rises_to_the_peak_and_falls_to_the_minimum(warmup, rest, min_ratio, options):
    total = warmup + rest
    options = {**options, "peak": 2.0, "warmup_steps": warmup, "total_steps": total, "min_ratio": min_ratio}
    rates = [learning_rate(step, **options) for step in range(total + 5)]
    assert all(a < b for a, b in zip(rates[:warmup], rates[1:warmup], strict=False))
    assert all(a >= b for a, b in zip(rates[max(0, warmup - 1) :], rates[max(1, warmup) :], strict=False))
    assert rates[0] > 0 or (total == 1 and min_ratio == 0)
    assert max(rates) <= 2.0
    if warmup:
        assert rates[warmup - 1] == pytest.approx(2.0)
    assert rates[total - 1 :] == pytest.approx([2.0 * min_ratio] * 6)


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"schedule": "cosine"}, {4: 0.5, 9: 1.0, 34: 0.8828427, 59: 0.6, 109: 0.2}),
        ({"schedule": "linear"}, {4: 0.5, 9: 1.0, 34: 0.8, 59: 0.6, 109: 0.2}),
        ({"schedule": "wsd"}, {4: 0.5, 9: 1.0, 59: 1.0, 87: 1.0, 98: 0.6, 109: 0.2}),
        ({"schedule": "wsd", "decay_fraction": 0.4, "decay_shape": "sqrt"}, {65: 1.0, 76: 0.6, 109: 0.2}),
        ({"schedule": "wsd", "decay_fraction": 1.0, "decay_shape": "cosine"}, {9: 1.0, 59: 0.6, 200: 0.2}),
    ],
)
def test_learning_rates_on_the_way(options, rates):
    options = {"peak": 1.0, "warmup_steps": 10, "total_steps": 110, "min_ratio": 0.2, **options}
    assert {step: learning_rate(step, **options) for step in rates} == pytest.approx(rates)
    optim = OptimConfig(
        lr=1.0, warmup_steps=10, min_lr_ratio=0.2, **{key: options[key] for key in options if key in CONFIGURED}
    )
    assert {step: lr_at_step(optim, step, 110) for step in rates} == pytest.approx(rates)


CONFIGURED = ("schedule", "decay_fraction", "decay_shape")


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match=r"'wds'; did you mean 'wsd'\? \(there are cosine, linear, wsd\)"):
        learning_rate(0, peak=1.0, warmup_steps=0, total_steps=9, min_ratio=0.0, schedule="wds")


# --- configuration ---


def test_optimizers_have_defaults_of_their_own(tmp_path):
    found = {}
    for name in ("adamw", "sgd", "muon", "lion"):
        resolved = load_run_config("tiny", None, [("optim.name", name)])
        optim = resolved.config.optim
        found[name] = (optim.beta2, optim.momentum, optim.nesterov)
        plan = resolve_plan(resolved, None)
        write_run_files(resolved, plan, tmp_path / name)
        assert load_run_config(None, tmp_path / name / "config.yaml", []).config.optim == optim
    own = {"sgd": (0.95, 0.9, False), "muon": (0.95, 0.95, True), "lion": (0.99, 0.0, False)}
    assert found == {"adamw": (0.95, 0.0, False), **own}
    assert OptimConfig(name="lion", lr=1.0, beta2=0.9).beta2 == 0.9


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"name": "moun"}, "optim.name: there is no optimizer 'moun'; did you mean 'muon'? (there are adamw, "),
        ({"schedule": "wds"}, "optim.schedule: expected one of cosine, linear, wsd, got 'wds'; did you mean 'wsd'?"),
        ({"momentum": "0.9"}, "optim: momentum 0.9 is for sgd and muon, but adamw is chosen; leave it out"),
        (
            {"name": "sgd", "beta1": "0.8"},
            "optim: beta1 0.8 is for adamw, muon, lion, galore, natural_galore, apollo, apollo_mini, adafactor and",
        ),
        (
            {"name": "lion", "eps": "1e-6"},
            "optim: eps 1e-06 is for adamw, muon, galore, natural_galore, apollo, apollo_mini, adafactor and",
        ),
        ({"muon_precision": "bf16"}, "optim: muon_precision bf16 is for muon, but adamw is chosen"),
        ({"decay_shape": "sqrt"}, "optim: decay_shape sqrt is for wsd, but cosine is chosen"),
        ({"decay_fraction": "0"}, "optim.decay_fraction: expected a number > 0 and <= 1, got 0.0"),
        ({"name": "sgd", "momentum": "0", "nesterov": "true"}, "optim: nesterov needs momentum"),
    ],
)
def test_values_that_do_not_go_together_are_refused(overrides, sentence):
    with pytest.raises(ConfigError) as caught:
        load_run_config("tiny", None, [(f"optim.{key}", value) for key, value in overrides.items()])
    assert sentence in str(caught.value)


# --- the Step Law ---


@pytest.mark.parametrize(
    ("num_params", "num_tokens", "lr", "batch_tokens"),
    [(1e8, 2e9, 2.54e-3, 1.19e5), (1e9, 1e11, 1.63e-3, 1.11e6), (7e9, 1e12, 8.3e-4, 4.13e6)],
)
def test_the_step_law(num_params, num_tokens, lr, batch_tokens):
    assert step_law(num_params, num_tokens) == pytest.approx((lr, batch_tokens), rel=5e-3)


@given(st.integers(1, 10**7))
def test_the_batch_for_a_number_of_steps_is_the_one_for_their_tokens(steps):
    batch = batch_tokens_for_steps(steps)
    assert step_law(1e9, steps * batch).batch_tokens == pytest.approx(batch)


GIVEN = {f"model.{key}": value for key, value in SPEC.model_dump().items()} | {
    "train.steps": 50_000,
    "train.seq_len": 1024,
}


def test_values_left_out_of_a_run_file_are_derived():
    derived = derive(GIVEN)
    assert set(derived) == {"train.global_batch_size", "optim.lr"}
    batch, _ = derived["train.global_batch_size"]
    assert batch == 512  # the power of two nearest to 504,000 tokens
    lr, origin = derived["optim.lr"]
    num_params = non_embedding_parameters(SPEC)
    assert num_params == 2 * (6 * 6 + 2 * 2 * 6 + 6 * 6 + 3 * 6 * 5 + 2 * 6) + 6
    assert lr == pytest.approx(step_law(num_params, 50_000 * 512 * 1024).lr, rel=1e-2)
    assert derived_value_line("optim.lr", lr, origin) == (
        f"optim.lr {lr:g}, derived (Step Law, arXiv:2503.04715: for {num_params} parameters outside embedding and head"
        " and 26.2B tokens; an extrapolation, fitted to 60M to 1B parameters)"
    )


def test_values_of_a_run_file_are_not_derived():
    assert set(derive({**GIVEN, "train.global_batch_size": 8})) == {"optim.lr"}
    assert set(derive({**GIVEN, "optim.lr": 1e-3})) == {"train.global_batch_size"}
    assert derive({**GIVEN, "train.global_batch_size": 8, "optim.lr": 1e-3}) == {}
    assert set(derive({**GIVEN, "optim.name": "muon"})) == {"train.global_batch_size", "optim.lr"}
    for other in ({"optim.name": "lion"}, {"optim.name": "muon", "optim.muon_scale": "original"}):
        assert set(derive({**GIVEN, **other})) == {"train.global_batch_size"}


@pytest.mark.parametrize("wrong", [{"train.steps": "x"}, {"train.seq_len": None}, {"model.num_heads": 0}])
def test_nothing_is_derived_from_wrong_values(wrong):
    assert derive({**GIVEN, **wrong}) == {}


def test_derived_values_are_printed_before_training_with_warnings(tmp_path, capsys):
    (tmp_path / "text.md").write_text("What is read. " * 300)
    keys = {"model": "tiny", "data.source": str(tmp_path / "text.md"), "train.steps": "3", "train.seq_len": "64"}
    resolved = load_run_config(None, None, list(keys.items()))
    prepare(resolved, choose_plan(resolved, 1), TrainOptions(tmp_path / "run"))
    told = capsys.readouterr().out
    assert "\ntrain.global_batch_size 1, derived (Step Law, arXiv:2503.04715: " in told
    assert f"\noptim.lr {resolved.config.optim.lr:g}, derived (Step Law, arXiv:2503.04715: for 394k param" in told
    with pytest.raises(InfeasibleError, match=r"is not a multiple of 2 .*; train.global_batch_size 1, derived \(Step"):
        resolve_plan(load_run_config(None, None, [*keys.items(), ("parallel", "dp2-mb1-fp32")]), None)


def test_what_only_follows_from_another_optimizer_is_no_change_of_its_own() -> None:
    adamw, muon, ahead = (
        load_run_config("tiny", None, list({"optim.lr": 0.01, **keys}.items())).config
        for keys in ({}, {"optim.name": "muon"}, {"optim.nesterov": True})
    )
    assert config_changes(adamw, muon) == ["optim.name was adamw, now muon"]
    assert config_changes(muon, adamw) == ["optim.name was muon, now adamw"]
    assert config_changes(adamw, ahead) == ["optim.nesterov was False, now True"]
    assert "optim.nesterov was True, now False" not in config_changes(ahead, muon)
