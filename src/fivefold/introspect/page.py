"""The report as a page: one HTML file that holds everything and asks for nothing.

    assets/page.html      the frame, with places for the following
           page.css       (uplot.css) how it looks, light and dark
           *.js           (uplot.js) what draws it, put together in the order of `SCRIPTS`
           uplot.LICENSE  its licence, before the scripts
    the document          as JSON in a <script type="application/json">

A Content-Security-Policy within the page allows these scripts and styles, by their hashes, and no connection
but, where a server watches a run, to that server. The scripts set what traces say as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import html as escaping
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["SCRIPTS", "STYLES", "html", "policy"]

SCRIPTS = (
    "uplot.js", "base.js", "table.js", "chart.js", "heat.js", "summary.js", "timeline.js", "ranks.js",
    "operations.js", "bandwidth.js", "series.js", "helpers.js", "configuration.js", "compare.js", "main.js",
)  # fmt: skip
STYLES = ("uplot.css", "page.css")


def html(document: Mapping[str, Any], live: bool = False) -> str:
    """The page of a `Document` or a `Comparison` (see `shape`), complete.

    With `live`, it asks the server that it came from for what has changed. Raises `ValueError` for a document
    that is not plain JSON data, nan included.
    """
    data = json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    # JSON has `<` in strings only. Without it, nothing in a trace can end the script that holds it.
    data = data.replace("<", "\\u003c")
    title, verdict = _title(document), document["verdict"]["text"]
    parts = {
        "policy": policy(live),
        "title": escaping.escape(title),
        "verdict": escaping.escape(verdict),
        "live": "true" if live else "false",
        "style": _style(),
        "script": _script(),
        "data": data,
    }
    pieces = _asset("page.html").split("@@")
    # Pieces at odd places are names; what is put in is not looked through again.
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def policy(live: bool = False) -> str:
    """What the page may do, as browsers are told it."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash(_script()),
        "style-src": _hash(_style()),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if live:
        rules["connect-src"] = "'self'"
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _title(document: Mapping[str, Any]) -> str:
    if document["kind"] == "comparison":
        return f"{document['a']['title']} and {document['b']['title']} - Fivefold"
    return f"{document['run']['title']} - Fivefold"


@cache
def _script() -> str:
    licence = f"/*! uPlot:\n{_asset('uplot.LICENSE')}*/"  # which every copy of it has to carry
    return "\n".join((licence, *(_asset(name) for name in SCRIPTS)))


@cache
def _style() -> str:
    return "\n".join(_asset(name) for name in STYLES)


def _asset(name: str) -> str:
    return (files("fivefold.introspect") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
