"""The pages of docs/ as a site: what they take from the code, and their completeness."""

import contextlib
import io
import os
import re
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from muster.catalog import names
from muster.cli import checkpoint, data
from muster.cli.main import VERBS, main
from muster.config.run_config import RunConfig
from muster.spec.cluster import ClusterSpec, NetworkTier, NodeGroup
from muster.spec.config_errors import ConfigSchema
from muster.spec.device import DeviceSpec, LinkSpec
from tests.chromium import Browser
from tests.page_audit import audit

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page.stem for page in DOCS.glob("*.md"))
SAMPLE = ("concepts", "first-run", "run-file-keys")
"""Pages with pictures, with commands, with wide tables."""
PHONE, DESKTOP = 390, 1280
WINDOWS = [(PHONE, "light"), (PHONE, "dark"), (DESKTOP, "light"), (DESKTOP, "dark")]

PAGE_OF = {"program": "programs", "schedule": "schedules", "memory-check": "memory", "checkpoint": "convert"}
"""Pages of verbs that have another name."""
OWN_VERBS = {"data": tuple(data.VERBS), "checkpoint": tuple(checkpoint.VERBS)}

EVERYWHERE = ("--help", "--section", "--plugins")


def script(name: str) -> ModuleType:
    """Load a script of docs/, which is no package."""
    spec = spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------------------------
# The site


def skip_without_the_extra() -> None:
    if missing := [package for package in ("sphinx", "myst_parser", "furo") if find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} can't be imported: the extra docs is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_the_extra()
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--nitpicky", "-b", "html"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    built = subprocess.run([*command, str(DOCS), str(folder)], env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def complaints(browser: Browser, site: Path, page: str, windows: list[tuple[int, str]]) -> list[str]:
    found = []
    for width, scheme in windows:
        opened = browser.open(site / f"{page}.html", width, dark=scheme == "dark")
        found += [f"{page} at {width} px, {scheme}: {fault}" for fault in audit(opened, pictures=0, site=site)]
        if opened.evaluate("[...document.images].some(image => !image.complete || image.naturalWidth === 0)"):
            found.append(f"{page}: a picture is missing")
    return found


def test_the_menu_leads_to_every_page(site: Path) -> None:
    first = (site / "index.html").read_text()
    menu = first[first.index('class="sidebar-tree"') : first.index('<div class="main">')]
    assert [page for page in PAGES if page != "README" and f'href="{page}.html"' not in menu] == []


@pytest.mark.parametrize("page", SAMPLE)
def test_nothing_to_complain_about_in_a_page(browser: Browser, site: Path, page: str) -> None:
    assert complaints(browser, site, page, [WINDOWS[0], WINDOWS[3]]) == []


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES)
def test_nothing_to_complain_about_in_any_page(browser: Browser, site: Path, page: str) -> None:
    assert complaints(browser, site, page, WINDOWS) == []


def test_a_page_that_is_broken_is_noticed(browser: Browser, site: Path) -> None:
    text = (site / "eval.html").read_text()
    broken = text.replace("<h1>", '<p style="font-size:7px">words</p><img src="http://127.0.0.1:9/x"><h1>')
    (site / "broken.html").write_text(broken)
    found = "\n".join(complaints(browser, site, "broken", WINDOWS[:1]))
    assert "'words' is 7 px small" in found
    assert "request: http://127.0.0.1:9/x" in found
    assert "a picture is missing" in found


# ----------------------------------------------------------------------------------------------------------------------
# Pictures


PICTURES = script("pictures").PICTURES
PREDICTED = ("memory", "step", "search")
"""Pictures with figures of the cost model, which only the soak draws anew."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in PREDICTED else []) for name in PICTURES]
)
def test_a_picture_is_what_the_code_draws(name: str) -> None:
    drawn = (DOCS / f"pictures/{name}.svg").read_text()
    assert drawn == PICTURES[name]() + "\n", "another picture is drawn now: python docs/pictures.py"


def test_the_pictures_are_legible(browser: Browser, tmp_path: Path) -> None:
    """Pictures are checked on light and dark background, in the size in which pages show them."""
    inline = "".join(f"<div>{(DOCS / f'pictures/{name}.svg').read_text()}</div>" for name in PICTURES)
    style = "<style>body{background:#fff}@media(prefers-color-scheme:dark){body{background:#14161a}}</style>"
    (tmp_path / "all.html").write_text(f"<!doctype html><meta charset=utf-8>{style}<body>{inline}")
    for dark in (False, True):
        assert audit(browser.open(tmp_path / "all.html", dark=dark), pictures=len(PICTURES)) == []


# ----------------------------------------------------------------------------------------------------------------------
# Completeness


@pytest.mark.parametrize("page", PAGES)
def test_tables_of_keys_are_those_of_the_code(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    assert text == script("tables").filled(text), "the keys are others now: python docs/tables.py"


def test_every_key_of_a_run_file_is_explained() -> None:
    text = (DOCS / "run-file-keys.md").read_text()
    version = RunConfig.model_fields["version"].default
    assert f"\n| `version` | {version} | `{version}` |" in text
    shape = ConfigSchema(RunConfig)
    parts = [name for name in shape.root["$defs"] for name in shape.root["$defs"][name].get("properties", {})]
    keys = {path.rpartition(".")[2] for path in shape.paths()} | set(parts)
    assert sorted(key for key in keys if not re.search(rf"`(?:[\w.]+\.)?{key}`", text)) == []


def test_every_key_of_a_cluster_file_is_explained() -> None:
    text = (DOCS / "cluster-files.md").read_text()
    kinds = (ClusterSpec, NodeGroup, NetworkTier, LinkSpec, DeviceSpec)
    assert [key for kind in kinds for key in kind.model_fields if f"`{key}`" not in text] == []


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_a_verb_names_every_flag(verb: str) -> None:
    text = (DOCS / f"{PAGE_OF.get(verb, verb)}.md").read_text()
    assert f"$ muster {verb}" in text, f"the page of muster {verb} shows no use of it"
    for words in [(verb, own) for own in OWN_VERBS[verb]] if verb in OWN_VERBS else [(verb,)]:
        flags = flags_of(*words)
        unnamed = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", text)]
        assert unnamed == [], f"of muster {' '.join(words)}"


def flags_of(*words: str) -> list[str]:
    """Return the flags in a verb's help without those common to many; --section.key stands for keys of a run file."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main([*words, "--help"]) == 0
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", said.getvalue())) - {*EVERYWHERE, "--train", "--optim"}
    assert flags, f"muster {' '.join(words)} --help names no flag"
    return sorted(flags)


def test_the_pages_of_verbs_are_those_of_the_menu() -> None:
    index = (DOCS / "README.md").read_text()
    commands = index[index.index("## Commands") : index.index("## Files")]
    assert [verb for verb in VERBS if f"({PAGE_OF.get(verb, verb)}.md" not in commands] == []


def test_presets_and_common_flags_are_named() -> None:
    text = (DOCS / "train.md").read_text()
    assert [flag for flag in EVERYWHERE[1:] if flag not in text] == []
    assert [name for name in names("presets") if f"--preset {name}" not in text] == []


def test_without_the_extra_the_site_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "find_spec", lambda name, real=find_spec: None if name == "furo" else real(name))
    with pytest.raises(pytest.skip.Exception, match="furo can't be imported: the extra docs is not installed"):
        skip_without_the_extra()
