"""`muster eval`: the loss and the perplexity of a trained model."""

import json
from pathlib import Path

from muster.api.runtime import runtime
from muster.cli.data import in_flags
from muster.cli.parser import Parser, whole_number
from muster.spec.errors import ConfigError


def run(arguments: list[str]) -> int:
    """Evaluates and prints. Returns the exit code."""
    parser = Parser("eval", "Say what loss and perplexity a trained model has on held-out or other data.")
    parser.add_argument("place", type=Path, metavar="RUN|DIR", help="a run, a checkpoint, or a Hugging Face directory")
    parser.add_argument("--source", metavar="SOURCE", help="other data than what the run holds out")
    parser.add_argument("--tokenizer", metavar="T", help="another tokenizer than the run's or the directory's own")
    parser.add_argument("--seq-len", type=whole_number, metavar="N", help="tokens of each sample (default: the run's)")
    parser.add_argument("--samples", type=whole_number, default=256, metavar="N", help="of each source (default: 256)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    wanted = runtime("muster.train.evaluate")
    options = wanted.EvalOptions(args.place, args.source, args.tokenizer, args.seq_len, args.samples)
    try:
        found = wanted.evaluate(options)
    except ConfigError as error:
        raise (ConfigError(in_flags(str(error), source="--source")) if args.source else error) from None
    if args.json:
        print(json.dumps({"version": 1, "place": str(args.place), "sources": found}))
    else:
        for name, of in found.items():
            print(f"{name:<12} loss {of['loss']:.4f}  perplexity {of['perplexity']:.4g}  {of['tokens']:,} tokens")
    return 0
