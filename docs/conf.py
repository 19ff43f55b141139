"""How Sphinx builds the manual; ``ci/docs`` runs it, with every warning as an error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import memfix  # noqa: E402

project, author, copyright, release = "memfix", "memfix", "memfix", memfix.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "memfix"
html_static_path = ["_static"]
html_css_files = ["memfix.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"undoc-members": True}
autodoc_preserve_defaults = True


def undocumented(_app: Any, what: str, name: str, value: Any, _options: Any, lines: list[str]) -> None:
    """Warn, and so fail, where a public name has no docstring of its own."""
    if not any(lines) and not name.rpartition(".")[2].startswith("_"):
        from sphinx.util import logging

        logging.getLogger(__name__).warning("public name %s has no docstring", name)


def missing_from_the_reference(app: Any, _exception: Exception | None) -> None:
    """Fail where a name of ``memfix.__all__`` stands on no page."""
    documented = app.env.domaindata["py"]["objects"]
    missing = [name for name in memfix.__all__ if f"memfix.{name}" not in documented]
    if missing:
        raise SystemExit(f"docs/api.md does not have {', '.join(missing)} of memfix.__all__")


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", undocumented)
    app.connect("build-finished", missing_from_the_reference)
