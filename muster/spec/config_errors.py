"""Plain sentences about wrong values in a file or on a command line."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from muster.spec.errors import ConfigError
from muster.spec.other_names import other_name_hint
from muster.spec.suggest import did_you_mean

Schema = dict[str, Any]


@cache
def _json_schema(type_: type[BaseModel]) -> Schema:
    return type_.model_json_schema()


class ConfigSchema:
    """Keys of a type and their possible values: a view of its JSON schema."""

    def __init__(self, type_: type[BaseModel]) -> None:
        self.root: Schema = _json_schema(type_)

    def schema_at(self, path: str) -> Schema | None:
        """Return the schema of the value under a dotted path; None where the path leads nowhere."""
        schema: Schema | None = self.root
        for key in path.split(".") if path else ():
            if schema is None:
                return None
            schema = self._resolve(self._child(schema, key))
        return schema

    def _child(self, schema: Schema, key: str) -> Schema | None:
        """Return the schema under a key of a mapping, or at an index of a list, nullable ones included."""
        if key in (known := self.keys_of(schema)):
            return known[key]
        for option in schema.get("anyOf", [schema]):
            option = self._resolve(option) or {}
            if key.isdigit() and option.get("type") == "array":
                places = option.get("prefixItems", [])
                return places[int(key)] if int(key) < len(places) else option.get("items")
            if isinstance(option.get("additionalProperties"), dict):
                return option["additionalProperties"]
        return None

    def keys_of(self, schema: Schema) -> dict[str, Schema]:
        """Return the keys of a mapping, nullable ones included."""
        options = [self._resolve(option) or {} for option in schema.get("anyOf", [schema])]
        return {key: child for option in options for key, child in option.get("properties", {}).items()}

    def paths(self, schema: Schema | None = None, prefix: str = "") -> list[str]:
        """Return every dotted path to a value."""
        found = []
        for key, child in self.keys_of(schema or self.root).items():
            child = self._resolve(child) or {}
            found += self.paths(child, f"{prefix}{key}.") if self.keys_of(child) else [prefix + key]
        return found

    def types_at(self, path: str) -> set[str]:
        """Return the JSON types allowed under a path."""
        schema = self.schema_at(path) or {}
        return {option["type"] for option in schema.get("anyOf", [schema]) if "type" in option}

    def _resolve(self, schema: Schema | None) -> Schema | None:
        if schema is not None and "$ref" in schema:
            return self.root["$defs"][schema["$ref"].rpartition("/")[2]]
        return schema


def describe_schema(schema: Schema) -> str:
    """Return the expected value in words: `a whole number >= 1`."""
    if "anyOf" in schema:
        return " or ".join(describe_schema(option) for option in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "required" in schema:
        return f"a mapping with at least {', '.join(schema['required'])}"
    name = _KINDS.get(schema.get("type", ""), "a mapping")
    bounds = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
    if schema.get("type") == "integer" and "exclusiveMinimum" in schema:
        bounds = [f">= {schema['exclusiveMinimum'] + 1}"]
    return " and ".join([f"{name} {bounds[0]}", *bounds[1:]]) if bounds else name


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "null": "null",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def config_error(
    error: ValidationError, shape: ConfigSchema, origins: Mapping[str, str], prefix: str = ""
) -> ConfigError:
    """Return an error with one sentence, on a line of its own, for each wrong value.

    `origins` gives the origin of the value under each path; `prefix` is the path at which validation began.
    """
    return ConfigError("\n".join(error_sentence(one, shape, origins, prefix) for one in error.errors()))


def error_sentence(error: Mapping[str, Any], shape: ConfigSchema, origins: Mapping[str, str], prefix: str = "") -> str:
    """Return the sentence for one of a ValidationError's errors: key, expectation, and value."""
    path = ".".join([*filter(None, [prefix]), *map(str, error["loc"])])
    schema = shape.schema_at(path) or {}
    origin = _origin(path, origins)
    where = f" (from {origin})" if origin else ""
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key{_known_key(path, shape)}{where}"
    if error["type"] == "missing":
        return f"{path}: missing, expected {describe_schema(schema)}"
    if error["type"] == "value_error":  # a check of several values together, with a sentence of its own
        return (f"{path}: " if path else "") + str(error["ctx"]["error"])
    hint = did_you_mean(str(error["input"]), map(str, schema.get("enum", ())))
    return f"{path}: expected {describe_schema(schema)}, got {_shown(error['input'])}{hint}{where}"


def _known_key(path: str, shape: ConfigSchema) -> str:
    """Return a suggestion of the intended key: that of another trainer's key, one of the same section, or one of
    another section with the same last part."""
    section, _, key = path.rpartition(".")
    siblings = shape.keys_of(shape.schema_at(section) or {})
    if hint := other_name_hint(path):
        return hint
    if suggestion := did_you_mean(key, siblings):
        return suggestion
    elsewhere = {full.rpartition(".")[2]: full for full in shape.paths()}
    if key in elsewhere:
        return f"; did you mean '{elsewhere[key]}'?"
    return f", expected one of {', '.join(siblings)}"


def _origin(path: str, origins: Mapping[str, str]) -> str | None:
    """Return the origin of the value itself, of a section around it, or of its first part."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if found := origins.get(".".join(parts[:length])):
            return found
    return next((origin for key, origin in origins.items() if key.startswith(path + ".")), None) if path else None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
