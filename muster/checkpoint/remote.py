"""Copies of a run's checkpoints below an fsspec URL, such as `s3://bucket/run`; free of torch.

    python -m muster.checkpoint.remote FILE STEP URL

copies one file; a process of its own does so for each rank's, beside the training. A store of objects can't rename a
folder, so there a checkpoint is whole when its manifest is there: that is written last and removed first.
"""

import os
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from muster.checkpoint.checkpoint_dir import RetentionPolicy, checkpoint_path, find_file_damage, publish, step_of
from muster.checkpoint.manifest import MANIFEST, read_manifest
from muster.spec.errors import ConfigError, MusterError

INSTALL_HINT = "pip install 'muster-llm[remote]'"


class RemoteCheckpoints:
    """The checkpoints below one URL. Raises ConfigError for a URL that can't be used, MusterError when the store fails,
    with its own words."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol, mark, _ = self.url.partition("://")
        if not mark:
            raise ConfigError(
                f"train.remote_checkpoint_dir {url} is no URL: expected such as s3://bucket/run or file:///disk/run"
            )
        if protocol == "memory":
            raise ConfigError(
                f"train.remote_checkpoint_dir {url} would lie in the memory of one process: expected such as s3://bucket/run"
            )
        self._filesystem = _filesystem(protocol)

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, rising."""
        self._filesystem.invalidate_cache()
        found = self._call(lambda: self._filesystem.glob(f"{self.url}/step-*/{MANIFEST}"))
        return sorted(int(path.split("/")[-2].removeprefix("step-")) for path in found)

    def begin_upload(self, step: int) -> None:
        """Makes way for the files of a checkpoint."""
        if step in self.steps():
            self._remove(step)
        self._call(lambda: self._filesystem.makedirs(self._checkpoint_url(step), exist_ok=True))

    def commit(self, folder: Path, retention: RetentionPolicy) -> None:
        """Makes the checkpoint whole, of which all tensor files have been copied; removes those before it that `keep`
        doesn't keep. Later ones, which a run that went back has left, are not counted."""
        own = step_of(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != MANIFEST and path.suffix != ".safetensors":
                self.upload(path, own)
        self.upload(folder / MANIFEST, own)
        counted = [step for step in self.steps() if step <= own and not retention.is_permanent(step)]
        for step in counted[: -retention.last] if retention.last else []:
            self._remove(step)

    def upload(self, path: Path, step: int) -> None:
        """Copies one file of a checkpoint."""
        self._call(lambda: self._filesystem.put_file(str(path), f"{self._checkpoint_url(step)}/{path.name}"))

    def download(self, step: int, root: Path) -> Path:
        """Brings a checkpoint into the folder `root`, where it appears as a whole or not at all."""
        folder = checkpoint_path(root, step)
        beside = folder.with_name(folder.name + ".tmp")
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        self._call(
            lambda: self._filesystem.get_file(f"{self._checkpoint_url(step)}/{MANIFEST}", str(beside / MANIFEST))
        )
        for name, nbytes in read_manifest(beside).files.items():
            self._call(
                lambda name=name: self._filesystem.get_file(f"{self._checkpoint_url(step)}/{name}", str(beside / name))
            )
            if problem := find_file_damage(beside / name, nbytes):
                raise MusterError(f"the copy of step {step} at {self.url} is damaged: {problem}")
        publish(beside, folder)
        return folder

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file beside the checkpoints."""
        self._call(lambda: self._filesystem.makedirs(self.url, exist_ok=True))
        self._call(lambda: self._filesystem.pipe_file(f"{self.url}/{name}", text.encode()))

    def read_text(self, name: str) -> str | None:
        """What `note` has written; None where there is nothing."""
        self._filesystem.invalidate_cache()
        place = f"{self.url}/{name}"
        try:
            return self._filesystem.cat_file(place).decode(errors="replace")
        except FileNotFoundError:
            return None
        except Exception as error:  # each store has errors of its own kind
            raise self._to_error(error) from error

    def delete_file(self, name: str) -> None:
        """Removes what `note` has written."""
        self._call(lambda: self._filesystem.rm_file(f"{self.url}/{name}"))

    def delete_all(self) -> None:
        """Removes all checkpoints."""
        for step in self.steps():
            self._remove(step)

    def _remove(self, step: int) -> None:
        self._call(lambda: self._filesystem.rm_file(f"{self._checkpoint_url(step)}/{MANIFEST}"))
        self._call(lambda: self._filesystem.rm(self._checkpoint_url(step), recursive=True))

    def _checkpoint_url(self, step: int) -> str:
        return f"{self.url}/step-{step:08}"

    def _call(self, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # each store has errors of its own kind
            raise self._to_error(error) from error

    def _to_error(self, error: Exception) -> MusterError:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return MusterError(f"{self.url} doesn't answer as it should: {words}")


def upload_in_subprocess(path: Path, step: int, url: str) -> None:
    """Copies a file of a checkpoint by a process of its own, which ends with this one. Raises MusterError."""
    command = [sys.executable, "-m", "muster.checkpoint.remote", str(path), str(step), url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stdin is not None
    with process.stdin, process.stderr:
        said = process.stderr.read().strip().splitlines()
        if code := process.wait():
            raise MusterError(said[-1] if said else f"the process that copies {path} ended with {code}")


@cache
def _filesystem(protocol: str) -> Any:
    """fsspec's file system for URLs that begin so; credentials are found in that store's own ways."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{protocol}:// needs fsspec: {INSTALL_HINT}") from None
    try:
        return fsspec.filesystem(protocol)
    except ValueError:
        raise ConfigError(f"fsspec knows no {protocol}:// URLs: expected such as s3://, gs:// or file://") from None
    except ImportError as error:
        raise ConfigError(f"{protocol}:// needs another package: {error}") from None


def main() -> None:
    """Copies one file; ends when the rank does."""
    path, step, url = sys.argv[1:]

    def listen() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        RemoteCheckpoints(url).upload(Path(path), int(step))
    except MusterError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
