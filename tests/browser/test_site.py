"""The documentation as it is built, in a real browser: typeset equations, and nothing that runs out of the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
PAGES = ("index", "installation", "clusters", "metrics", "protocol", "methods/fedgp", "methods/ewc", "methods/matching")


@pytest.mark.parametrize("width", [390, pytest.param(1440, marks=pytest.mark.slow)])
def test_pages_fit_and_equations_are_typeset(site: Path, watch: Callable[..., Any], width: int) -> None:
    one = watch("file://", viewport={"width": width, "height": 844})
    for name in PAGES:
        one.page.goto((site / f"{name}.html").as_uri())
        formulas = one.page.locator(".arithmatex").count()
        assert one.page.locator(".arithmatex .katex").count() >= formulas, name
        assert one.page.locator(".katex-error").count() == 0, name
        assert one.overflow() <= 0, name
        assert one.page.evaluate(RUNNING_OUT) == [], name
    assert formulas >= 3  # of the last page


RUNNING_OUT = """[...document.querySelectorAll('.md-typeset pre')]
  .filter((block) => block.scrollWidth > block.clientWidth + 1).map((block) => block.textContent.slice(0, 60))"""
