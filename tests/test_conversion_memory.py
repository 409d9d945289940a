"""A conversion takes at most 1.2 times its largest shard in memory, above what is resident after the imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.interop.hf_config import spec_from_hf_config
from muster.spec.model import ModelSpec
from muster.spec.plan import Plan
from tests.train_runs import ROOT
from tests.weights import save_weights

SHARD_BYTES = 25_000_000
LLAMA = ModelSpec(
    vocab_size=8000, hidden_size=512, num_layers=6, num_heads=8, intermediate_size=1536, max_positions=128
)
# Its matrices lie transposed in a Hugging Face directory.
GPT2 = spec_from_hf_config({"model_type": "gpt2", "vocab_size": 8000, "n_embd": 512, "n_layer": 6, "n_head": 8}, "gpt2")
STEPS = (
    ("checkpoint", "hf", ""),
    ("checkpoint", "hf", "bfloat16"),
    ("checkpoint", "dcp", ""),
    ("checkpoint", "muster", ""),
    ("to-hf", "muster", ""),
    ("to-hf", "hf", "float16"),
    ("to-dcp", "hf", "bfloat16"),
)


def peak_bytes(source: Path, target: Path, kind: str, dtype: str) -> int:
    command = [sys.executable, "-m", "tests.conversion_memory", source, target, kind, str(SHARD_BYTES), dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.soak
@pytest.mark.parametrize(("spec", "plan"), [(LLAMA, Plan(dp_shard=2)), (GPT2, Plan(tp=2, dp_shard=2))])
def test_a_conversion_holds_no_more_than_a_shard(spec: ModelSpec, plan: Plan, tmp_path: Path) -> None:
    assert spec.num_parameters * 4 > 90e6
    places = {"checkpoint": save_weights(tmp_path, spec, plan)}
    peaks = {}
    for source, kind, dtype in STEPS:
        target = tmp_path / f"from-{source}-to-{kind}{dtype}"
        peaks[target.name] = peak_bytes(places[source], target, kind, dtype)
        if not dtype:
            places.setdefault(f"to-{kind}", target)
        if kind == "hf":
            sizes = [path.stat().st_size for path in target.glob("*.safetensors")]
            assert 0.8 * SHARD_BYTES < max(sizes) < 1.01 * SHARD_BYTES
    print({name: f"{peak / SHARD_BYTES:.2f}" for name, peak in peaks.items()})
    assert all(peak <= 1.2 * SHARD_BYTES for peak in peaks.values()), peaks
    assert peak_bytes(places["checkpoint"], tmp_path / "none", "hold", "") > 3 * SHARD_BYTES, "this measures nothing"
