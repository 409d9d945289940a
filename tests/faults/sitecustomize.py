"""Lets one scratch file of a rank fail: the one with FAULT_CONTENT, at the first transfer once FAULT_AFTER is there.

FAULT: `kill` ends the process halfway through the write, `full` lets the file be one of a full disk, `lost` an empty
one, `changed` changes a byte of what was written. The content `checkpoint` is a copy for a checkpoint, which `kill`
interrupts.

Python imports a module of this name by itself, in every process on whose path it lies.
"""

import fcntl
import os
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FAULT, CONTENT = os.environ.get("FAULT", ""), os.environ.get("FAULT_CONTENT", "")
MODULE = "muster.checkpoint.staging" if CONTENT == "checkpoint" else "muster.parallel.file_store"


def is_due() -> bool:
    return os.path.exists(os.environ["FAULT_AFTER"])


def fail_in_transfers(module: ModuleType) -> None:
    transfer = module.FileStore.transfer

    def failing(store, views, start, writes):
        if store.content == CONTENT and is_due() and not getattr(store, "has_failed", False):
            if FAULT in ("full", "lost"):
                os.dup2(os.open("/dev/full" if FAULT == "full" else "/dev/null", os.O_RDWR), store._fd)
                store.has_failed = True
            elif writes:
                store.has_failed = True
                if FAULT == "kill":
                    view = views[-1]
                    fcntl.fcntl(store._fd, fcntl.F_SETFL, 0)  # no direct I/O, which takes whole blocks alone
                    os.pwrite(store._fd, view[: len(view) // 2], start)
                    os.kill(os.getpid(), signal.SIGKILL)
                found = transfer(store, views, start, writes)
                fcntl.fcntl(store._fd, fcntl.F_SETFL, 0)
                os.pwrite(store._fd, bytes([views[0][0] ^ 1]), start)
                return found
        return transfer(store, views, start, writes)

    module.FileStore.transfer = failing


def fail_in_copies(module: ModuleType) -> None:
    copy_from = module.StagingBuffer.copy_from

    def failing(staging, tensors, *more):
        if is_due():
            first = dict(list(tensors.items())[: len(tensors) // 2])
            copy_from(staging, first, *more)
            os.kill(os.getpid(), signal.SIGKILL)
        copy_from(staging, tensors, *more)

    module.StagingBuffer.copy_from = failing


class Finder:
    """Changes the module as it is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            run(module)
            (fail_in_copies if CONTENT == "checkpoint" else fail_in_transfers)(module)

        spec.loader.exec_module = changed
        return spec


if FAULT:
    sys.meta_path.insert(0, Finder)
