"""Writing of small files: whole or not at all, and durably where a crash may follow."""

import errno
import os
import stat
import sys
import tempfile
from pathlib import Path

from muster.spec.errors import MusterError


def write_output(path: Path, text: str, what: str) -> None:
    """Write a file that a person asked for; `what` names it, as in "the report".

    It is written whole or not at all, keeps its permissions, and stays where a link leads to it. Devices, pipes, and
    files in a folder that takes no new ones are written in place. A letter that UTF-8 can't encode, as in a file's
    name of another encoding, becomes `?`. Raises MusterError where the file can't be written.
    """
    try:
        _write_output(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise MusterError(f"{what} can't be written to {path}: {error.strerror}") from None


def _write_output(path: Path, content: bytes) -> None:
    place = Path(os.path.realpath(path))
    found = path.stat() if path.exists() else None
    if found is not None and _is_stdout(found):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.flush()
        return
    if found is not None and not stat.S_ISREG(found.st_mode):
        path.write_bytes(content)
        return
    draft = None
    try:
        number, draft = tempfile.mkstemp(dir=place.parent, prefix=".muster-")
        with open(number, "wb") as file:
            file.write(content)
        os.chmod(draft, 0o666 & ~_umask() if found is None else stat.S_IMODE(found.st_mode))
        os.replace(draft, place)
    except OSError as error:
        if draft is not None:
            os.unlink(draft)
        if found is None or error.errno not in _NO_NEW_FILES:
            raise
        place.write_bytes(content)


_NO_NEW_FILES = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of a folder that takes no new files, or of a file that is mounted by itself, as in a container."""


def _is_stdout(found: os.stat_result) -> bool:
    """Return True for what stdout goes to, as /dev/stdout names it: replaced, a file would lose what is printed."""
    try:
        return os.path.samestat(found, os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # a stdout without a file
        return False


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that at every moment either the old or the new one is complete on disk. Raises OSError."""
    _replace(path, text, durably=False)


def write_durably(path: Path, text: str) -> None:
    """Write a small file atomically and durably: afterwards it has all of `text` or, if that fails, stays as it was."""
    _replace(path, text, durably=True)


def _replace(path: Path, text: str, durably: bool) -> None:
    """Write a draft beside the file and rename it; a draft that fails is removed."""
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
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
