"""A real browser for tests of pages: one Chromium for a module, a fresh profile for every page.

A page must not log an error, must not throw, and must not ask anybody for anything but its own server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fivefold.introspect.page import html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

__all__ = [
    "SCREENSHOTS",
    "Open",
    "Tab",
    "chromium",
    "column",
    "drag",
    "on_screen",
    "picture",
    "written",
    "zoomed",
]

Open = Callable[..., "Page"]
SCREENSHOTS = os.environ.get("FIVEFOLD_SCREENSHOTS", "")
"""folder for the pictures of the documentation; none are taken without"""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Generator[Browser]:
    """The system's Chromium; the test is skipped where there is none."""
    api: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed: apt-get install chromium")
    with api.sync_playwright() as playwright:
        # Without its sandbox, which root may not use; the pages are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            # Processes of the browser's own that start with the first page are no test's leftovers.
            browser.new_page().close()
            yield browser
        finally:
            browser.close()


class Tab:
    """One page, and what it did."""

    def __init__(self, browser: Browser, *, width: int = 1280, dark: bool = False) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 844 if width < 500 else 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
            has_touch=width < 500,
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def open(self, where: Path | str) -> Page:
        """Go there, and wait until the page says that it is ready."""
        self.page.goto(where.as_uri() if isinstance(where, Path) else where)
        self.page.locator("body[data-ready]").wait_for()
        return self.page

    def close(self) -> None:
        """Raises `AssertionError` for anything that was not quiet."""
        own = self.page.url.partition("?")[0].rpartition("/")[0]
        self.context.close()
        assert not self.complaints, self.complaints
        strangers = [url for url in self.asked if not url.startswith((own, "data:"))]
        assert not strangers, strangers


def picture(page: Page, name: str, height: int | None = None) -> None:
    """Into the documentation's folder, when `FIVEFOLD_SCREENSHOTS` names one: small, with few colours."""
    if not SCREENSHOTS:
        return
    import io

    from PIL import Image

    Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
    width = page.viewport_size["width"] if page.viewport_size else 1280
    clip: Any = {"x": 0, "y": 0, "width": width, "height": height} if height else None
    taken = page.screenshot(full_page=bool(height), **({"clip": clip} if clip else {}))
    image = Image.open(io.BytesIO(taken)).convert("RGB").quantize(128)
    image.save(Path(SCREENSHOTS) / f"{name}.png", optimize=True)


def written(path: Path, document: dict[str, Any]) -> Path:
    """The page of a document, in a file."""
    path.write_text(html(document), encoding="utf-8")
    return path


def column(page: Page, label: str, number: int) -> list[str]:
    """What the cells of a table's column say."""
    rows = page.locator(f"[aria-label='{label}'] tbody tr")
    return [row.locator("th, td").nth(number).inner_text() for row in rows.all()]


def on_screen(place: Locator) -> bool:
    """Whether the reader sees it without scrolling."""
    box = place.bounding_box()
    return box is not None and -5 < box["y"] < 850


def zoomed(page: Page) -> list[float]:
    """First and last step in sight of the timeline; empty where all are."""
    told = page.locator("#s-timeline .chart").get_attribute("data-zoomed") or ""
    return [float(word) for word in told.split()]


def drag(page: Page, begin: float, end: float) -> None:
    """Brush over the timeline, from a share of its width to another."""
    plane = page.locator("#s-timeline .u-over")
    plane.scroll_into_view_if_needed()
    for _ in range(100):  # a live page may just be drawing another one
        if box := plane.bounding_box():
            break
        page.wait_for_timeout(50)
    else:
        raise AssertionError("the timeline has no size")
    page.mouse.move(box["x"] + begin * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 90, steps=5)
    page.mouse.up()
