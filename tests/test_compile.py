"""Compilation where a machine lacks what it needs."""

from unittest.mock import patch

import pytest
import torch
from torch._inductor import config

from muster.model.decoder import Decoder
from muster.parallel import compile as compiling
from muster.parallel.compile import compile_blocks, eager_note
from muster.spec.errors import MusterError
from muster.spec.plan import Plan
from tests.test_model import SMALL

GPU = torch.device("cuda")


def test_without_a_compiler_one_sentence_says_so() -> None:
    module = Decoder(SMALL, range(1), first=True, last=True)
    with patch.object(config.cpp, "cxx", ("no-such-compiler",)), pytest.raises(MusterError, match="needs a C.. compil"):
        compile_blocks(module, torch.device("cpu"))


def test_blocks_that_run_eagerly_for_want_of_triton_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    assert "needs Triton" in (eager_note(Plan(), SMALL, GPU) or "")
    for plan, device in ((Plan(compile=False), GPU), (Plan(), torch.device("cpu"))):
        assert eager_note(plan, SMALL, device) is None, "nothing would be compiled anyway"
    with pytest.raises(MusterError, match="needs Triton"):
        compile_blocks(Decoder(SMALL, range(1), first=True, last=True), GPU)
    monkeypatch.setattr(compiling, "has_triton", lambda: True)
    assert eager_note(Plan(), SMALL, GPU) is None
