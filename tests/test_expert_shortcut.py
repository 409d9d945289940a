"""Routed experts that read the layer's input (ScMoE): what is computed, when tokens travel, and what that saves."""

import re
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from muster.api.verbs import predict
from muster.config.cluster_files import load_cluster
from muster.config.named_model import load_model
from muster.cost.time.plan_times import place_plan
from muster.cost.time.stage_times import StageTimes
from muster.interop.hf_config import hf_config_from_spec
from muster.model.decoder import Decoder
from muster.model.experts import MoeMlp
from muster.parallel.axis import ExpertAxis, PendingTensor
from muster.parallel.ep_all_to_all import AllToAll
from muster.spec.errors import InfeasibleError
from muster.spec.expert_kinds import ExpertDispatch
from muster.spec.frameworks import MUSTER
from muster.spec.model import ModelSpec
from muster.spec.model_components import MoeSpec
from muster.spec.nearest_plans import require_runnable
from muster.spec.plan_name import parse_plan_name
from muster.spec.workload import Workload

MOE = MoeSpec(num_experts=4, top_k=2, expert_size=12, shared_size=8, shortcut=True)
SPEC = ModelSpec(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, intermediate_size=8, moe=MOE)


def one_layer() -> Any:
    torch.manual_seed(0)
    return Decoder(SPEC, range(1), first=True, last=True).double().layers["0"]


def test_routed_experts_read_the_layer_s_input() -> None:
    layer, x_BSD = one_layer(), torch.randn(2, 6, 16, dtype=torch.float64)
    mlp = cast(MoeMlp, layer.mlp)
    after_BSD = x_BSD + layer.attn(x_BSD, layer.attn_norm, None, None, None)
    routed_BSD = layer.shortcut_norm(x_BSD)
    routed_BSD = mlp.dispatch(mlp.experts, routed_BSD, mlp.router(routed_BSD))
    shared_BSD = mlp._shared(layer.mlp_norm(after_BSD))
    torch.testing.assert_close(layer(x_BSD, None, None, None), after_BSD + routed_BSD + shared_BSD)


class Told(torch.autograd.Function):
    """The tensor itself; its forward and its backward are told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        LoggedAxis.events.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        LoggedAxis.events.append(ctx.name)
        return grads[0], None


class LoggedTensor(PendingTensor):
    def wait(self) -> Tensor:
        LoggedAxis.events.append("wait")
        return super().wait()


class LoggedAxis(ExpertAxis):
    """A rank alone, whose exchanges of rows say when they start and when they are waited for."""

    events: ClassVar[list[str]] = []

    def start_all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        if x.dtype == torch.int64:
            return PendingTensor([], x.clone)
        self.events.append("start")
        return LoggedTensor([], x.clone)


def test_rows_travel_beside_attention_and_shared_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and in the backward, as the cost model assumes; and the results are those of an exchange that is
    waited for at once."""
    layer, x_BSD = one_layer(), torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layer(x_BSD, None, None, None).square().sum(), x_BSD)
    axis = LoggedAxis(cast(dist.ProcessGroup, None), 1, 0)
    layer.mlp.dispatch = AllToAll(axis, ExpertDispatch())
    attend = layer.attn.forward
    own = layer.mlp._shared
    monkeypatch.setattr(layer.attn, "forward", lambda x, *rest: Told.apply(attend(x, *rest), "attention"))
    monkeypatch.setattr(layer.mlp, "_shared", lambda x: Told.apply(own(x), "shared experts"))
    axis.events.clear()
    y_BSD = layer(x_BSD, None, None, None)
    travelling = ["start", "attention", "wait", "start", "shared experts", "wait"]
    assert axis.events == travelling
    axis.events.clear()
    found = torch.autograd.grad(y_BSD.square().sum(), x_BSD)
    assert axis.events == [{"start": "wait", "wait": "start"}.get(event, event) for event in reversed(travelling)]
    torch.testing.assert_close(found, expected)


def test_the_exchange_is_hidden_in_predictions() -> None:
    """Qwen3-30B-A3B with a shared expert, its experts over four nodes: with a shortcut it waits for less, and with any
    dispatcher but the plain one for as long as without."""
    spec = load_model("qwen3-30b-a3b")
    assert spec.moe is not None
    plain, short = (
        spec.model_copy(update={"moe": spec.moe.model_copy(update={"shared_size": 768, "shortcut": shortcut})})
        for shortcut in (False, True)
    )
    assert short.num_parameters - plain.num_parameters == 48 * 2048, "a norm more in each layer"
    waits_s = {}
    for word in ("", "g"):
        plan = parse_plan_name(f"dp32-ep32{word}-mb1-rfull-bf16")
        for model in (plain, short):
            workload = Workload(seq_len=4096, global_batch_size=32)
            stage = StageTimes(place_plan(model, plan, workload, load_cluster("32xh100"), MUSTER), 0)
            waits_s[word, model is short] = sum(stage.exposed_s[kind]["ep"] for kind in ("F", "B"))
    assert waits_s["", True] < 0.75 * waits_s["", False]
    assert waits_s["g", True] == pytest.approx(waits_s["g", False], rel=1e-6)
    seconds = [predict(one, "32xh100", "dp32-ep32-mb1-rfull", global_batch=32).step_time_s for one in (plain, short)]
    assert seconds[1] < seconds[0]


def test_what_does_not_run_is_refused() -> None:
    with pytest.raises(ValidationError, match="moe.shortcut lets tokens travel beside shared experts"):
        MoeSpec(num_experts=4, top_k=2, expert_size=12, shortcut=True)
    with pytest.raises(ValidationError, match="moe.shortcut needs norm_placement pre"):
        ModelSpec.model_validate(SPEC.model_dump() | {"norm_placement": "post"})
    plan = parse_plan_name("tp2-etp2")
    with pytest.raises(InfeasibleError, match=re.escape("the layer's input (moe.shortcut) can't be run yet")):
        require_runnable(plan, SPEC, Workload(seq_len=16, global_batch_size=2), 2)
    with pytest.raises(InfeasibleError, match="can't express its moe"):
        hf_config_from_spec(SPEC)
