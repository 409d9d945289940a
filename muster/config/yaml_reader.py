"""YAML as people write it: no key given twice, and whole numbers such as 96e9."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from muster.spec.errors import ConfigError

Checked = TypeVar("Checked", bound=BaseModel)
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _KeyGivenTwice(yaml.MarkedYAMLError):
    """A key that a mapping has twice; plain YAML would take the last."""


class _UniqueKeyLoader(YAML_LOADER):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve merge keys, once the keys that stand here are known to differ."""
        if id(node) not in self._checked:
            self._checked.add(id(node))
            _require_unique([key for key, _ in node.value if key.tag != _MERGE_TAG])
        super().flatten_mapping(node)


def _require_unique(keys: Sequence[yaml.Node]) -> None:
    lines: dict[str, int] = {}
    for key in keys:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            problem = f"{name} is given twice, first in line {lines[name]}"
            raise _KeyGivenTwice(problem=problem, problem_mark=key.start_mark)
        lines[name] = line


def read_yaml(text: str, where: str) -> Any:
    """Return the content of YAML text. Raises ConfigError, with the line in `where`, for invalid YAML and for a key
    that is given twice."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        place = f"{where}:{error.problem_mark.line + 1}" if error.problem_mark else where
        given_twice = isinstance(error, _KeyGivenTwice)
        raise ConfigError(f"{place}{':' if given_twice else ' is not valid YAML:'} {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an impossible date, a mapping that contains itself
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def validate_values(kind: type[Checked], data: Any) -> Checked:
    """Return data as a type, with whole numbers such as `96e9`, which YAML reads as text. Raises ValidationError."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        data = deepcopy(data)
        numbers = [_convert(data, one["loc"]) for one in error.errors() if one["type"] == "int_parsing"]
        if not any(numbers):
            raise
    return kind.model_validate(data)


def _convert(data: Any, location: Sequence[int | str]) -> bool:
    """Replace a text by the whole number that it says. Returns False where it says none."""
    *path, last = location
    try:
        for key in path:
            data = data[key]
        number = float(data[last])
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    if not number.is_integer():
        return False
    data[last] = int(number)
    return True
