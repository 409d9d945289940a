"""Tables of keys that pages take from the code: each stands between `<!-- keys TYPE … -->` and `<!-- end -->`.

TYPE is a dotted name such as `muster.config.run_config.TrainConfig`; a second word goes before each key. What a key
means is the
docstring below it. `python docs/tables.py` writes the pages anew.
"""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from muster.spec.config_errors import ConfigSchema, describe_schema

FOLDER = Path(__file__).parent
_TABLE = re.compile(r"(<!-- keys (\S+)(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with its tables as they should be."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(found[2], *found[3].split())}\n{found[4]}", page)


def table(name: str, prefix: str = "") -> str:
    """A row for each key of a type: what may stand there, what does if it is left out, what it means."""
    module, _, class_name = name.rpartition(".")
    type_ = getattr(import_module(module), class_name)
    shape, meanings = ConfigSchema(type_), docstrings(type_)
    rows = ["| key | expected | default | meaning |", "|---|---|---|---|"]
    for key, field in type_.model_fields.items():
        schema = shape.schema_at(key) or {}
        derived = field.default == 0 == schema.get("exclusiveMinimum")
        stands = "" if derived else default(field)
        cells = (f"`{prefix}{key}`", describe_schema(schema).removesuffix(" or null"), stands, meanings.get(key, ""))
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def default(field: FieldInfo) -> str:
    """What stands for a key that is left out, as YAML would say it."""
    if field.is_required():
        return "must be said"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel) or value in ((), {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def docstrings(type_: type[BaseModel]) -> dict[str, str]:
    """By key: the string below it in the class's source, on one line."""
    found: dict[str, str] = {}
    body = ast.parse(textwrap.dedent(inspect.getsource(type_))).body[0]
    assert isinstance(body, ast.ClassDef)
    for line, below in zip(body.body, body.body[1:], strict=False):
        match line, below:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                found[key] = " ".join(text.split()).replace("None:", "left out:")
    return found


def main() -> None:
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"written: {page.name}")


if __name__ == "__main__":
    main()
