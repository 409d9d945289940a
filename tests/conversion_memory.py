"""How much memory a conversion takes, in a process of its own: SRC, DST, kind, largest shard in bytes, dtype or "".

Prints the bytes of the peak above what was resident after the imports, as the kernel counts them. The kind `hold` reads
all weights and keeps them.
"""

import sys
from pathlib import Path

import muster.checkpoint.formats.dcp_write  # noqa: F401  # what a conversion may import, before it is counted
from muster.checkpoint.convert import ConversionOptions, convert
from tests.weights import read_weights


def status_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def main(source: str, target: str, kind: str, max_shard_bytes: str, dtype: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    if kind == "hold":
        kept = read_weights(Path(source))
        print(status_bytes("VmHWM") - before, file=sys.stdout if kept else sys.stderr)
        return
    how = ConversionOptions(target_format=kind, dtype=dtype or None, max_shard_bytes=int(max_shard_bytes))  # type: ignore[arg-type]
    convert(Path(source), Path(target), how, lambda _: None, lambda _: None)
    print(status_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
