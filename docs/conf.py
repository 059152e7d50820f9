"""Sphinx configuration: furo, Markdown by MyST, the API page from docstrings."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # the documented package is the one beside these pages

import aiodist  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
release = version = aiodist.__version__
author = PROJECT["authors"][0]["name"]
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "examples"]
myst_heading_anchors = 3

default_role = "py:obj"  # what docstrings put in single backquotes is a name: a link, where it stands on the page

html_theme = "furo"
html_title = f"aiodist {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}  # one that stands here overrides a page's own
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # fields are documented once, in their class


def show_public_bases(_app, _name, _obj, _options, bases):
    """Show in place of a base class that is none of a user's the first of its own bases that is."""
    found = dict.fromkeys(map(public_base, bases))
    bases[:] = [base for base in found if base is not object] or [object]


def public_base(base):
    kind = getattr(base, "__origin__", base)
    return next(each for each in kind.__mro__ if is_public(each)) if not is_public(kind) else base


def is_public(kind):
    return not kind.__module__.startswith("aiodist.")


def skip_numbered_fields(_app, _what, _name, obj, _skip, _options):
    """Leave out the fields of named tuples, of which the class tells."""
    return type(obj).__name__ == "_tuplegetter" or None


def setup(app):
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-skip-member", skip_numbered_fields)
