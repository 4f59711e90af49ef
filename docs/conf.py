"""Settings of the documentation site: ``make docs`` builds it into ``site/``, without network.

Sphinx is run over the root of the checkout with this folder's settings, so that the README and the
pages below ``docs/`` are one site and their links to each other work as they do on a code host.
"""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/learn/*.md",
         "benchmarks/RESULTS.md", "tests/README.md", "ppocli/builtin/README.md"]

project = "ppocli"
author = "the ppocli authors"
project_copyright = author
html_title = "ppocli"

# MathJax comes with the pages
extensions = ["myst_parser", "sphinx.ext.mathjax", "sphinx-mathjax-offline"]
myst_enable_extensions = ["dollarmath"]
root_doc = "docs/index"
source_suffix = {".md": "markdown"}
include_patterns = PAGES
# whatever else lies in a checkout (environments, runs, models) is not even walked through
exclude_patterns = sorted(path.name for path in ROOT.iterdir() if path.is_dir()
                          and path.name not in ("docs", "benchmarks", "ppocli", "tests"))
nitpicky = True
# anchors as code hosts make them, down to the headings that are linked to
myst_heading_anchors = 4

html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # a browser may not fetch one for pages opened as files

FRONT_DOOR = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>ppocli</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"></head>
<body><a href="docs/index.html">ppocli</a></body></html>
"""


def _open_the_front_door(app: Any, error: Exception | None) -> None:
    """``site/index.html`` leads to the first page, which lies in ``site/docs/`` as its source."""
    if error is None and app.builder.format == "html":
        Path(app.outdir, "index.html").write_text(FRONT_DOOR, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls when it has read this file."""
    app.connect("build-finished", _open_the_front_door)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
