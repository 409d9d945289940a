"""Configuration of the site that `make docs` builds from this folder in build/docs.

Each page is plain Markdown that can be read in the repository, too. README.md is the first page: each of its sections
is a group of the site's menu, with the pages that the section lists, in its order. Nothing is read from the network.
"""

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

from muster.version import __version__

project = "Muster"
release = __version__
language = "en"
extensions = ["myst_parser"]
root_doc = "README"
exclude_patterns = ["_static"]
myst_heading_anchors = 4
# Pages show broken files on purpose: a JSON line without an end.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "Muster"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_use_index = False

_OUTSIDE = re.compile(r"\]\((\.\./[^)]*\.md)")
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def menu(index: str) -> str:
    """Return the toctrees of the first page's sections: each page where it is listed first."""
    seen: set[str] = set()
    trees = []
    for heading, section in _SECTION.findall(index):
        pages = [page for page in dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", section)) if page not in seen]
        seen.update(pages)
        if pages:
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```"]))
    return "\n\n".join(trees)


def prepare(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page its menu; repository pages outside the site are handed out as files."""
    text = _OUTSIDE.sub(r"](path:\1", source[0])
    source[0] = f"{text}\n\n{menu(text)}\n" if page == root_doc else text


def name_first_page(app: Sphinx, error: Exception | None) -> None:
    """Write index.html, which web servers look for."""
    if error is None and app.builder.name == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", prepare)
    app.connect("build-finished", name_first_page)
