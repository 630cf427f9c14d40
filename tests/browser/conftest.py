"""A real headless Chromium, driven by Playwright; tests skip where either is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import HANG

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


# themes and devices: each once, all four with the slow tests
EVERYWHERE = [
    *(("light", "desk"), ("dark", "phone")),
    *(pytest.param(*both, marks=pytest.mark.slow) for both in (("dark", "desk"), ("light", "phone"))),
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser: pip install playwright"
    )
    found = os.environ.get("EVERFED_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no browser: install chromium, or name one in EVERFED_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=list(FLAGS), timeout=1000 * HANG)
        yield opened
        opened.close()


class Watch:
    """A page, and everything that must not happen on it: console errors, exceptions, requests to elsewhere."""

    def __init__(self, browser: Any, home: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * HANG)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(f"exception: {error}"))
        self.page.on("request", lambda request: self._asked(request.url, home))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.wrong.append(f"{kind}: {text}")

    def _asked(self, url: str, home: str) -> None:
        self.requests.append(url)
        if not url.startswith((home, "data:", "blob:")):
            self.wrong.append(f"request: {url}")

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - innerWidth")


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[..., Watch]]:
    """Makes watched pages; at the end nothing may have gone wrong on any of them."""
    yield from _watched(browser)


@pytest.fixture(scope="module")
def watch_all(browser: Any) -> Iterator[Callable[..., Watch]]:
    """The same for pages that several tests look at."""
    yield from _watched(browser)


def _watched(browser: Any) -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def make(home: str, **options: Any) -> Watch:
        made.append(Watch(browser, home, **options))
        return made[-1]

    yield make
    for one in made:
        one.context.close()
    assert [text for one in made for text in one.wrong] == []


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Callable[[Any, str], None]:
    """Takes a screenshot of the whole page into the folder that EVERFED_SCREENSHOTS names, if it does."""
    named = os.environ.get("EVERFED_SCREENSHOTS")
    if not named:
        return lambda page, name: None
    folder = Path(named)
    folder.mkdir(parents=True, exist_ok=True)
    test = f"{request.node.path.stem}-{request.node.name.partition('[')[0]}"
    return lambda page, name: page.screenshot(path=folder / f"{test}-{name}.png", full_page=True)
