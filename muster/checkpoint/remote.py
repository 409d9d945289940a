"""Remote checkpoint directory: copies of a run's checkpoints below an fsspec URL, such as `s3://bucket/run`.

    python -m muster.checkpoint.remote FILE STEP URL

uploads one file; each rank does so in a separate process, while it trains. Object stores can't rename a folder, so a
remote checkpoint counts as complete if its manifest exists: that is written last and removed first. Free of torch.
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
    """Checkpoints below one URL.

    Raises ConfigError for a URL that can't be used, MusterError with the store's own message if it fails.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol, mark, _ = self.url.partition("://")
        if not mark:
            raise ConfigError(
                f"train.remote_checkpoint_dir {url} is not a URL: expected something like s3://bucket/run or"
                " file:///disk/run"
            )
        if protocol == "memory":
            raise ConfigError(
                f"train.remote_checkpoint_dir {url} would be in the memory of one process: expected something like"
                " s3://bucket/run"
            )
        self._filesystem = _filesystem(protocol)

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, rising."""
        self._filesystem.invalidate_cache()
        found = self._call(lambda: self._filesystem.glob(f"{self.url}/step-*/{MANIFEST}"))
        return sorted(int(path.split("/")[-2].removeprefix("step-")) for path in found)

    def begin_upload(self, step: int) -> None:
        """Prepare the folder for a checkpoint's files, removing an older checkpoint of the same step."""
        if step in self.steps():
            self._remove(step)
        self._call(lambda: self._filesystem.makedirs(self._checkpoint_url(step), exist_ok=True))

    def commit(self, folder: Path, retention: RetentionPolicy) -> None:
        """Complete the checkpoint whose tensor files have been uploaded, and remove earlier ones as `retention` says.

        Later checkpoints, which a run that was rolled back has left, are not counted.
        """
        current = step_of(folder)
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != MANIFEST and path.suffix != ".safetensors":
                self.upload(path, current)
        self.upload(folder / MANIFEST, current)
        candidates = [step for step in self.steps() if step <= current and not retention.is_permanent(step)]
        for step in candidates[: -retention.last] if retention.last else []:
            self._remove(step)

    def upload(self, path: Path, step: int) -> None:
        """Upload one file of a checkpoint."""
        self._call(lambda: self._filesystem.put_file(str(path), f"{self._checkpoint_url(step)}/{path.name}"))

    def download(self, step: int, root: Path) -> Path:
        """Download a checkpoint into the directory `root`, where it appears as a whole or not at all."""
        folder = checkpoint_path(root, step)
        tmp_dir = folder.with_name(folder.name + ".tmp")
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(tmp_dir, ignore_errors=True)
        tmp_dir.mkdir()
        self._call(
            lambda: self._filesystem.get_file(f"{self._checkpoint_url(step)}/{MANIFEST}", str(tmp_dir / MANIFEST))
        )
        for name, nbytes in read_manifest(tmp_dir).files.items():
            self._call(
                lambda name=name: self._filesystem.get_file(f"{self._checkpoint_url(step)}/{name}", str(tmp_dir / name))
            )
            if problem := find_file_damage(tmp_dir / name, nbytes):
                raise MusterError(f"the copy of step {step} at {self.url} is damaged: {problem}")
        publish(tmp_dir, folder)
        return folder

    def write_text(self, name: str, text: str) -> None:
        """Write a small file beside the checkpoints."""
        self._call(lambda: self._filesystem.makedirs(self.url, exist_ok=True))
        self._call(lambda: self._filesystem.pipe_file(f"{self.url}/{name}", text.encode()))

    def read_text(self, name: str) -> str | None:
        """Return the content of a small file; None if there is none."""
        self._filesystem.invalidate_cache()
        place = f"{self.url}/{name}"
        try:
            return self._filesystem.cat_file(place).decode(errors="replace")
        except FileNotFoundError:
            return None
        except Exception as error:  # each store has its own exceptions
            raise self._to_error(error) from error

    def delete_file(self, name: str) -> None:
        """Remove a small file."""
        self._call(lambda: self._filesystem.rm_file(f"{self.url}/{name}"))

    def delete_all(self) -> None:
        """Remove all checkpoints."""
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
        except Exception as error:  # each store has its own exceptions
            raise self._to_error(error) from error

    def _to_error(self, error: Exception) -> MusterError:
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return MusterError(f"could not access {self.url}: {words}")


def upload_in_subprocess(path: Path, step: int, url: str) -> None:
    """Upload a file of a checkpoint in a subprocess, which ends with this process. Raises MusterError."""
    command = [sys.executable, "-m", "muster.checkpoint.remote", str(path), str(step), url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stdin is not None
    with process.stdin, process.stderr:
        messages = process.stderr.read().strip().splitlines()
        if code := process.wait():
            raise MusterError(messages[-1] if messages else f"the process that uploads {path} ended with {code}")


@cache
def _filesystem(protocol: str) -> Any:
    """Return fsspec's file system for a protocol; it finds credentials by the store's own conventions."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{protocol}:// needs fsspec: {INSTALL_HINT}") from None
    try:
        return fsspec.filesystem(protocol)
    except ValueError:
        raise ConfigError(f"fsspec doesn't know {protocol}:// URLs: expected s3://, gs://, file:// or others") from None
    except ImportError as error:
        raise ConfigError(f"{protocol}:// needs another package: {error}") from None


def main() -> None:
    """Upload one file; end when the rank does."""
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
