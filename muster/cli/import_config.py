"""`muster import-config`: another trainer's configuration as a run file."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from muster.cli.parser import Parser, output_file, positive_int
from muster.spec.units import pluralize

if TYPE_CHECKING:
    from muster.config.import_config import ImportedConfig


def run(arguments: list[str]) -> int:
    """Convert the file, and write or print the run file. Returns the exit code."""
    parser = Parser(
        "import-config",
        "Turn a configuration of Megatron-LM (a script or a file of arguments), torchtitan (.toml), nanotron (.yaml) or"
        " DeepSpeed (.json) into a run file, and list what was not carried over.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE")
    add("-o", "--output", type=output_file, metavar="RUN.yaml", help="run file to write (default: print it)")
    add(
        "--nproc",
        type=positive_int,
        metavar="N",
        help="number of processes, if FILE leaves it to the launcher",
    )
    add("--model", metavar="M", help="model's name or file: for torchtitan's other names, and for DeepSpeed")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    from muster.config.file_writer import write_output
    from muster.config.import_config import import_config

    found = import_config(args.file, args.nproc, args.model)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        if args.output is None:
            print(found.yaml(), end="")
        _show_notes(found, sys.stderr if args.output is None else sys.stdout)
    if args.output is not None:
        write_output(args.output, found.yaml(), "the run file")
        if not args.json:
            print(f"run file: {args.output}")
    return 0


def _show_notes(found: "ImportedConfig", stream: TextIO) -> None:
    """Print the options that the run file lacks: to stderr where the run file itself goes to stdout."""
    carried = found.conversion
    lines = [
        f"{carried.program}: {pluralize(len(carried.values), 'value')} carried over,"
        f" {pluralize(len(carried.dropped), 'option')} left out"
    ]
    for one in carried.dropped:
        value = "" if one.value is True or one.value is None else f" {one.value}"
        lines.append(f"not carried over: {one.option}{value}: {one.reason}")
    lines += [f"still to be set: {key}" for key in found.missing]
    lines += [f"can't be run as is: {reason}" for reason in found.refused]
    print("\n".join(lines), file=stream)
