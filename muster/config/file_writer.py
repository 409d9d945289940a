"""Writing of small files: whole or not at all, and durably where a crash may follow."""

import os
from pathlib import Path

from muster.spec.errors import MusterError


def write_output(path: Path, text: str, what: str) -> None:
    """Write a file that a person asked for, whole or not at all; `what` names it, as in "the report".

    A letter that UTF-8 can't encode, as in a file's name of another encoding, is written as `?`. Raises MusterError
    where the file can't be written.
    """
    try:
        write_atomically(path, text.encode("utf-8", errors="replace").decode("utf-8"))
    except OSError as error:
        raise MusterError(f"{what} can't be written to {path}: {error.strerror}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that at every moment either the old or the new one is complete on disk. Raises OSError.

    A symbolic link keeps pointing to its file, which is replaced. A device or a pipe takes the text as it is.
    """
    _replace(path, text, durably=False)


def write_durably(path: Path, text: str) -> None:
    """Write a small file atomically and durably: afterwards it has all of `text` or, if that fails, stays as it was."""
    _replace(path, text, durably=True)


def _replace(path: Path, text: str, durably: bool) -> None:
    """Write a draft beside the file and rename it; a draft that fails is removed."""
    content = text.encode("utf-8")
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, "wb") as file:
            file.write(content)
            if durably:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def fsync_directory(folder: Path) -> None:
    """Flush the names within a directory to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
