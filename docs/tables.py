"""Tables that pages take from the code: each stands between `<!-- keys TYPE … -->`, or `<!-- devices -->`, and
`<!-- end -->`.

TYPE is a dotted name such as `muster.config.run_config.TrainConfig`; a second word is a prefix of each key. The meaning
of a key is the docstring below it. `python docs/tables.py` writes the pages anew.
"""

import ast
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from muster.catalog import names
from muster.config.cluster_files import load_device
from muster.spec.config_errors import ConfigSchema, describe_schema

FOLDER = Path(__file__).parent
_DEVICES = re.compile(r"(<!-- devices -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- keys (\S+)(.*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return the text of a page with up-to-date tables."""
    page = _DEVICES.sub(lambda found: f"{found[1]}\n{devices_table()}\n{found[2]}", page)
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(found[2], *found[3].split())}\n{found[4]}", page)


def devices_table() -> str:
    """Return a row for each device of the catalogue: rates, memory, links, power and price."""
    head = ("device", "bf16 peak", "sustained", "memory", "bandwidth", "in its node", "between nodes", "W", "$/h")
    rows = [head, ("---",) * len(head)]
    for name in names("devices"):
        device = load_device(name)
        peak = device.peak_flops_per_s.get("bf16")
        if peak is None or device.memory_bytes is None or device.memory_bandwidth_bytes_per_s is None:
            continue
        shape, price = device.node, device.price
        rows.append(
            (
                f"`{name}`",
                f"{peak / 1e12:,.0f} TFLOP/s",
                f"{device.matmul_efficiency['bf16']:.0%}",
                f"{device.memory_bytes / 2**30:.0f} GiB",
                f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s",
                f"{shape.devices} × {shape.intra.name}" if shape else "",
                f"{shape.nics.count} × {shape.nics.link.name}" if shape and shape.nics else "",
                f"{device.watts:g}" if device.watts else "",
                f"{price.usd_per_hour:g} ({price.date})" if price else "",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def table(name: str, prefix: str = "") -> str:
    """Return a row for each key of a type: expected value, default, meaning."""
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
    """Return the default of a key as YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel) or value in ((), {}, ""):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def docstrings(type_: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each key in the class's source, on one line."""
    found: dict[str, str] = {}
    body = ast.parse(textwrap.dedent(inspect.getsource(type_))).body[0]
    assert isinstance(body, ast.ClassDef)
    for line, below in zip(body.body, body.body[1:], strict=False):
        match line, below:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                found[key] = " ".join(text.split()).replace("None:", "default:")
    return found


def main() -> None:
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"written: {page.name}")


if __name__ == "__main__":
    main()
