"""How Sphinx builds the documentation; `make docs` runs it with warnings as errors."""

import re
from importlib.metadata import version as version_of
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

from fivefold import errors

OUR_EXCEPTION = re.compile(rf":raises ({'|'.join(errors.__all__)}):")

project = "Fivefold"
copyright = "the Fivefold contributors"
author = "the Fivefold contributors"
release = version_of("fivefold")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Fivefold {release}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Links into the source tree (a module, the licence) are meant for readers of the repository.
suppress_warnings = ["myst.xref_missing"]

# `name` in a docstring is code, as in these pages.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Types are written as they are imported: torch, numpy and the standard library have their own
# manuals, which an offline build cannot look into.
nitpicky = True
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(torch|numpy|np|nn|collections|pathlib|contextlib|typing|types|os|enum|rich)(\..*)?",
    ),
    (
        r"py:.*",
        r"(Tensor|Module|ProcessGroup|DeviceMesh|Path|Callable|Iterator|Iterable|Mapping|Any)",
    ),
    # Types that a signature shows but nobody outside the room uses.
    (
        r"py:.*",
        r"fivefold\.(mesh\.agreement\.Agreement|parallel\.pipeline\.net\.PipelinedNet|parallel\.program\.program\.Program|parallel\.memory\.(budget\.Budgeted|table\.StepChoices)|sections\.\w+|data\.source\.(Samples|Source)|recipes\.recipe\.Images|train\.progress\.Progress|train\.shown\._T|parallel\.graph\.marked\._F|checkpoint\.checkpointer\._Batch)",
    ),
    (r"py:.*", r"Images|Transform|Trace"),
    (r"py:.*", r"dict\[str"),  # half of `dict[str, Any]` in a docstring
    (
        r"py:.*",
        r"(Sequence|Generator|Literal|Self|ArrayLike|Optimizer|Dataset|GradScaler|device|dtype)",
    ),
]


def read_sections(app: Sphinx, what: str, *about: Any) -> None:
    """Let Sphinx understand `Args:` and `Raises:`, and link our own exceptions.

    The extension napoleon would do as much, but it takes a colon in the description of an attribute
    for the end of a type.
    """
    name, obj, options, lines = about
    if what not in {"attribute", "data", "property"}:
        parsed = GoogleDocstring(lines, Config(), app, what, name, obj, options).lines()
        lines[:] = [OUR_EXCEPTION.sub(r":raises ~fivefold.errors.\1:", line) for line in parsed]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_sections)
