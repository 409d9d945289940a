"""`muster import-config`: another trainer's configuration as a run file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from muster.cli.parser import Parser, positive_int
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
    add("-o", "--output", type=Path, metavar="RUN.yaml", help="run file to write (default: print it)")
    add(
        "--nproc",
        type=positive_int,
        metavar="N",
        help="number of processes, if FILE leaves it to the launcher",
    )
    add("--model", metavar="M", help="model's name or file: for torchtitan's other names, and for DeepSpeed")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse(arguments)
    from muster.config.import_config import import_config
    from muster.spec.errors import MusterError

    found = import_config(args.file, args.nproc, args.model)
    if args.output is not None:
        try:
            args.output.write_text(found.yaml(), encoding="utf-8")
        except OSError as error:
            raise MusterError(f"the run file can't be written to {args.output}: {error.strerror}") from None
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _show(found, args.output)
    return 0


def _show(found: "ImportedConfig", output: Path | None) -> None:
    """Print the run file and the options that it lacks."""
    if output is None:
        print(found.yaml())
    carried = found.conversion
    print(
        f"{carried.program}: {pluralize(len(carried.values), 'value')} carried over,"
        f" {pluralize(len(carried.dropped), 'option')} left out"
    )
    for one in carried.dropped:
        value = "" if one.value is True or one.value is None else f" {one.value}"
        print(f"not carried over: {one.option}{value}: {one.reason}")
    for key in found.missing:
        print(f"still to be set: {key}")
    for reason in found.refused:
        print(f"can't be run as is: {reason}")
    if output is not None:
        print(f"run file: {output}")
