"""The glossary has every word of plans, programs, flags and run files; retired names are gone from the package."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import muster
from muster.config.migrations import FLAGS, INSTRUCTIONS, KEYS
from muster.config.run_config import RunConfig
from muster.schedule.action import KINDS
from muster.spec.config_errors import ConfigSchema
from muster.spec.plan_name import name_parts

PACKAGE = Path(muster.__file__).parent
DOCS = PACKAGE.parent / "docs"

_MODULES = (
    "agree agreement ahead bookkeeping books by_length collector company compact_memory copies cores critical diagnosis"
    " drift ending feed feeding flights follow footprint found gone greeting held_out holdings judge keep_busy known"
    " lean likely linked matrices meet mixed nearest nominal outcome own_layer own_memory own_model own_rows own_step"
    " own_storage owners partners peers piece pipe places plain predicted reach reads recall relief room route runnable"
    " saves setting shape sizes software spent spread_words stores team tilts timed trade_offs traffic trips unequal"
    " usual verdict walk watcher whereabouts wire words"
)
RETIRED_MODULES = frozenset(_MODULES.split())
"""Modules' names until 0.1 that say something else, or nothing, to an engineer of this field."""
_TYPES = (
    "Accounting Arranged Asked Begun Dealt Doorstep Elsewhere Feeder HeldOut Judge Judged Lacking Leftover Look Noise"
    " Opened Recalled Reception Relief Saves Scores Sighting Skips Spent Standing Survey Tilt Trained Verdict Way"
    " Whereabouts Words Woven"
)
RETIRED_TYPES = frozenset(_TYPES.split())
"""The same of types."""


def glossary_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("muster_docs_glossary", DOCS / "glossary.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="page", scope="module")
def _page() -> str:
    return (DOCS / "glossary.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_code_says(page):
    assert page == glossary_script().page(), "meanings or names changed: python docs/glossary.py"


def test_every_plan_word_instruction_flag_and_key_is_in_it(page):
    script = glossary_script()
    keys = [key for key in ConfigSchema(RunConfig).paths() if key not in ("parallel.overrides", "parallel.stages")]
    keys = [key for key in keys if not key.startswith("model.adapter.")]  # which a file gives as its section `adapter`
    flags = script.flags()
    assert len(flags) > 60
    assert len(keys) > 100
    terms = [*name_parts(), *KINDS, *flags, *keys]
    missing = [term for term in terms if f"| `{term}` |" not in page and f"| `{term}." not in page]
    assert missing == []


def test_former_words_are_not_in_it(page):
    former = {old for renames in FLAGS.values() for old in renames}
    former |= {row.old for row in KEYS["run"]} | set(INSTRUCTIONS)
    today = {new for renames in FLAGS.values() for new in renames.values()}
    today |= {row.new for row in KEYS["run"]} | set(INSTRUCTIONS.values())
    assert [word for word in sorted(former - today) if f"| `{word}` |" in page] == []


def public_names() -> Iterator[tuple[Path, str]]:
    """Yield each public function and type of the package with its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^(?:class|def) (?!_)(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield path, name


def test_no_retired_name_is_left():
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem in RETIRED_MODULES]
    assert modules == []
    public = list(public_names())
    assert len(public) > 1000
    assert [(path, name) for path, name in public if name in RETIRED_TYPES] == []
    own = [(path, name) for path, name in public if re.match(r"own_|Own[A-Z]", name)]
    assert own == [], "native, plugin or local?"
