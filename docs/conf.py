"""How Sphinx builds the documentation; `make docs` runs it with warnings as errors."""

from importlib.metadata import version as version_of

project = "Fivefold"
copyright = "the Fivefold contributors"
author = "the Fivefold contributors"
release = version_of("fivefold")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Fivefold {release}"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
# Links into the source tree (a module, the licence) are meant for readers of the repository.
suppress_warnings = ["myst.xref_missing"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Types are written as they are imported: torch, numpy and the standard library have their own
# manuals, which an offline build cannot look into.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|nn|collections|pathlib|contextlib|typing|types|os|enum)(\..*)?"),
    (
        r"py:.*",
        r"(Tensor|Module|ProcessGroup|DeviceMesh|Path|Callable|Iterator|Iterable|Mapping|Any)",
    ),
    (r"py:.*", r"dict\[str"),  # half of `dict[str, Any]` in a docstring
    (
        r"py:.*",
        r"(Sequence|Generator|Literal|Self|ArrayLike|Optimizer|Dataset|GradScaler|device|dtype)",
    ),
]
