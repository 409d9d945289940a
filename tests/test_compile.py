"""Errors of compilation."""

from unittest.mock import patch

import pytest
import torch
from torch._inductor import config

from muster.model.decoder import Decoder
from muster.parallel.compile import compile_blocks
from muster.spec.errors import MusterError
from tests.test_model import SMALL


def test_without_a_compiler_one_sentence_says_so():
    module = Decoder(SMALL, range(1), first=True, last=True)
    with patch.object(config.cpp, "cxx", ("no-such-compiler",)), pytest.raises(MusterError, match="needs a C.. compil"):
        compile_blocks(module, torch.device("cpu"))
