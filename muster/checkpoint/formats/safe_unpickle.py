"""What a foreign pickle says, without letting it do anything.

A pickle names functions and classes and has them called. Here every name stands for an inert record of that name, so
that nothing is imported and nothing but records is made; the names that a format needs are listed, and a pickle with
any other one is refused.
"""

import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from muster.spec.errors import MusterError


class InertRecord:
    """An object of a foreign class: what it was made with, and its fields."""

    def __new__(cls, *args: object, **fields: object) -> "InertRecord":
        self = super().__new__(cls)
        self.__dict__.update(fields, args=args)
        return self

    args: tuple[object, ...]
    state: Any = None

    def __init__(self, *args: object, **fields: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class RefusedPickle(MusterError):
    """A pickle holds something that is not on the list."""


class _Reader(pickle.Unpickler):
    def __init__(
        self, data: bytes, names: Mapping[tuple[str, str], Any], load_persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(BytesIO(data))
        self._names, self._load_persistent = names, load_persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            raise RefusedPickle(f"it names {module}.{name}, which is not needed to describe tensors")
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._load_persistent is None:
            raise RefusedPickle("it refers to data outside of itself")
        return self._load_persistent(pid)


def read_pickle(
    data: bytes, names: Mapping[tuple[str, str], Any], load_persistent: Callable[[Any], Any] | None = None
) -> Any:
    """What a pickle holds, where it names nothing but `names`: (module, name) → what is taken for it.

    The values must be harmless to call with anything: `Record`s, plain containers, functions that only look at their
    arguments. Raises Refused where another name comes up, MusterError where it is damaged.
    """
    try:
        return _Reader(data, names, load_persistent).load()
    except MusterError:
        raise
    except Exception as error:  # a damaged pickle ends in whatever its last byte asks for
        raise MusterError(f"it is damaged ({type(error).__name__})") from error
