"""Safe reader of foreign pickles, which runs none of their code.

A pickle names functions and classes and has them called. Here a format lists the names it needs, and what to use in
their place: inert records, containers, dtypes. Nothing is imported, and a pickle with any other name is refused.
"""

import pickle
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from muster.spec.errors import MusterError


class InertRecord:
    """Stand-in for an object of a foreign class: its constructor's arguments and its fields."""

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
    """A pickle names something that is not listed."""


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
    """Load a pickle that uses no names but `names`: (module, name) → object to use in its place.

    These objects must be harmless to call with any arguments: `InertRecord`s, plain containers, functions that only
    inspect their arguments. Raises RefusedPickle for any other name, MusterError for a damaged pickle.
    """
    try:
        return _Reader(data, names, load_persistent).load()
    except MusterError:
        raise
    except Exception as error:  # a damaged pickle can raise any exception
        raise MusterError(f"it is damaged ({type(error).__name__})") from error
