"""Data: how fast samples are read, texts become tokens, and how long a demo's steps wait for them.

    .venv/bin/python -m benchmarks.data [--megabytes 64] [--rounds 5] [--run runs/demo]

One core, warm page cache; seconds are those of the process on the core, so that others on the machine don't count. What
is compared takes turns.
"""

import argparse
import json
import os
import sysconfig
import tempfile
from pathlib import Path
from time import process_time as clock
from typing import Any

from benchmarks.compare import interleave, spread
from muster.data.dataset import Dataset, Packing
from muster.data.prepare import PrepareOptions, prepare
from muster.data.store import TokenStore
from muster.data.tokenizer import ByteTokenizer, JsonTokenizer

SEQ_LEN, ROWS, BATCHES = 2048, 64, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--run", type=Path, help="a finished run, whose steps' waiting is shown")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder, args.megabytes * 1_000_000)
        store = prepare(PrepareOptions(str(text), ByteTokenizer()), folder / "read")
        show(
            "reading samples of 2,048 tokens (bar: 50 M tokens/s, documents)",
            "M tokens/s",
            read_speeds(store, args.rounds),
        )
        show("preparing with bytes (bar: 100 MB/s)", "MB/s", prepare_speeds(folder, text, args.rounds))
        tokenizer_speeds(folder, text, args.rounds)
    if args.run is not None:
        show_data_wait(args.run)


def write_text(folder: Path, size_bytes: int) -> Path:
    """JSON lines with the standard library's sources, again and again, in documents of up to 4,000 characters."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [path.read_text(errors="replace") for path in paths]
    path, written = folder / "text.jsonl", 0
    with path.open("w") as file:
        while written < size_bytes:
            for source in sources:
                for at in range(0, len(source), 4_000):
                    written += file.write(json.dumps({"text": source[at : at + 4_000]}) + "\n")
    return path


def read_speeds(store: TokenStore, rounds: int) -> dict[str, list[float]]:
    """Measure millions of tokens per second; each batch is elsewhere in the stream."""

    def reader(packing: Packing) -> Any:
        dataset = Dataset(store, SEQ_LEN, packing=packing)
        first = 0

        def run() -> float:
            nonlocal first
            start_s = clock()
            for _ in range(BATCHES):
                dataset.train_batch(first, ROWS)
                first += ROWS
            return BATCHES * ROWS * SEQ_LEN / (clock() - start_s) / 1e6

        run()
        return run

    packings: tuple[Packing, ...] = ("concatenate", "document_mask", "next_fit")
    return interleave({packing: reader(packing) for packing in packings}, rounds)


def prepare_speeds(folder: Path, rows: Path, rounds: int) -> dict[str, list[float]]:
    """Measure megabytes of input per second with one process: a text, and rows of JSON."""
    text = folder / "text.txt"
    text.write_text("".join(json.loads(line)["text"] for line in rows.open()))
    made = 0

    def run(source: Path) -> float:
        nonlocal made
        made += 1
        start_s = clock()
        prepare(PrepareOptions(str(source), ByteTokenizer()), folder / f"store-{made}")
        return source.stat().st_size / (clock() - start_s) / 1e6

    return interleave({"text": lambda: run(text), "rows": lambda: run(rows)}, rounds)


def tokenizer_speeds(folder: Path, rows: Path, rounds: int) -> None:
    """Preparing with a tokenizer.json beside the library's own call on the same texts, in turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [json.loads(line)["text"] for line, _ in zip(rows.open(), range(2_000), strict=False)]
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator(texts, trainer)
    own.save(str(folder / "tokenizer.json"))
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    part = folder / "part.jsonl"
    part.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    size, made = sum(map(len, texts)), 0

    def ours() -> float:
        nonlocal made
        made += 1
        start_s = clock()
        prepare(PrepareOptions(str(part), tokenizer), folder / f"json-{made}")
        return size / (clock() - start_s) / 1e6

    def theirs(call: Any) -> float:
        start_s = clock()
        for at in range(0, len(texts), 256):
            call(texts[at : at + 256], add_special_tokens=False)
        return size / (clock() - start_s) / 1e6

    contest = {
        "muster data prepare": ours,
        "encode_batch": lambda: theirs(own.encode_batch),
        "encode_batch_fast": lambda: theirs(own.encode_batch_fast),
    }
    samples = interleave(contest, rounds)
    show("a tokenizer.json of 8,000 words (bar: 0.9 of the library)", "MB/s", samples)
    for name in ("encode_batch", "encode_batch_fast"):
        ratio = spread([a / b for a, b in zip(samples["muster data prepare"], samples[name], strict=True)])
        print(f"  to {name}: {ratio.median:.2f} ({ratio.min:.2f} … {ratio.max:.2f})")


def show_data_wait(run: Path) -> None:
    """Print the share of a run's steps spent waiting for data."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    part = sum(row["time/data"] for row in rows) / sum(row["time/step"] for row in rows)
    print(f"{run}: {part:.2%} of {len(rows)} steps was waiting for data (bar: 1 %)")


def show(title: str, unit: str, samples: dict[str, list[float]]) -> None:
    print(title)
    for name, values in samples.items():
        of = spread(values)
        print(f"  {name:<20} {of.median:8.1f} {unit} ({of.min:.1f} … {of.max:.1f})")


if __name__ == "__main__":
    main()
