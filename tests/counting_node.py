"""`muster train` as one of several launchers, with ranks that only count steps (`RANK` of test_elastic.py):
`python -m tests.counting_node … train …`."""

import sys
from collections.abc import Callable
from pathlib import Path

from muster.cli.main import main


def count_steps(module: str, folder: Path, world_size: int) -> Callable[[int, str], list[str]]:
    """`launcher.rank_command`, for ranks that only count steps."""
    return lambda rank, store: [sys.executable, str(folder.parent / "rank.py"), str(folder), str(world_size), str(rank)]


if __name__ == "__main__":
    from muster.launch import launcher

    launcher.rank_command = count_steps
    sys.exit(main(sys.argv[sys.argv.index("train") :]))
