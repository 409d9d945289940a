"""Speed of training on packed documents, and under a sliding window: variable-length attention against other ways.

    python -m benchmarks.documents [--rounds 12]

One thread, forward and backward of whole models, in turns; time of the processor. Documents have lengths of an
exponential distribution, cut where a sample ends; each round takes other ones. `documents apart` calls attention on
one document after another, `a mask` hides what a window doesn't reach, `as one text` has neither documents nor
windows, and more scores.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.compare import Comparison, interleave, machine, print_comparison
from benchmarks.train_step import SIZES
from muster.model.attention import Attention
from muster.model.decoder import Decoder
from muster.model.documents import Documents
from muster.model.init import init_stage
from muster.model.loss import loss_sums
from muster.spec.model import ModelSpec

TOKENS = 2048
CPU = torch.device("cpu")
CASES: tuple[tuple[str, int, float | None, int | None], ...] = (
    ("2m", 512, 64, None),
    ("2m", 2048, 256, None),
    ("30m", 2048, 256, None),
    ("2m", 2048, None, 128),
    ("2m", 2048, None, 512),
    ("30m", 2048, None, 256),
)
"""Model, sequence length, mean length of documents and sliding window."""


def random_documents(samples: int, seq_len: int, mean: float, seed: int) -> Documents:
    """Fill samples with documents."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(samples):
        row: list[int] = []
        while len(row) < seq_len:
            row += range(max(1, round(float(torch.empty(1).exponential_(1 / mean, generator=generator)))))
        rows.append(row[:seq_len])
    made = Documents.from_positions(torch.tensor(rows), CPU)
    assert made is not None
    return made


def contest(size: str, seq_len: int, mean: float | None, window: int | None, rounds: int) -> Comparison:
    """Tokens per second of each way."""
    spec = SIZES[size].model.model_copy(update={"sliding_window": window})
    samples = TOKENS // seq_len
    tokens_BS = torch.randint(0, spec.vocab_size, (samples, seq_len), generator=torch.Generator().manual_seed(0))
    model, plain, whole = (
        make_model(spec),
        make_model(spec),
        make_model(spec.model_copy(update={"sliding_window": None})),
    )
    plain.position_state.knows_attention = False
    for part in plain.modules():
        if isinstance(part, Attention):
            part.varlen_attention = lambda *_: None
    names = {"varlen": model, "documents apart" if mean else "a mask": plain, "as one text": whole}
    turn = dict.fromkeys(names, 0)

    def contestant(name: str) -> Callable[[], float]:
        def run() -> float:
            turn[name] += 1
            documents = random_documents(samples, seq_len, mean, turn[name]) if mean and name != "as one text" else None
            seconds = pass_s(names[name], tokens_BS, documents)
            return TOKENS / seconds

        return run

    contestants = {name: contestant(name) for name in names}
    interleave(contestants, 1)  # caches and allocations
    said = f"documents of {mean:g} tokens on average" if mean else ""
    limits = " and ".join(filter(None, (said, f"a window of {window}" if window else "")))
    title = f"{spec.num_parameters / 1e6:.1f} M parameters, {samples} × {seq_len} tokens, {limits}"
    return Comparison(title, "tokens/s", "varlen", interleave(contestants, rounds), {})


def make_model(spec: ModelSpec) -> Decoder:
    model = Decoder(spec, range(spec.num_layers), first=True, last=True)
    init_stage(model, spec, 1)
    return model


def pass_s(model: Decoder, tokens_BS: Tensor, documents: Documents | None) -> float:
    """Return the processor's seconds of forward and backward."""
    model.position_state.documents = documents
    model.zero_grad()
    begin = time.process_time()
    loss_sums(model(tokens_BS), tokens_BS, 0.0, None).total.backward()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())
    for case in CASES:
        print_comparison(contest(*case, rounds))


if __name__ == "__main__":
    main()
