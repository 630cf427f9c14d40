"""The leaderboard's HTML page in a real browser: sorted by a click, and readable on a phone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
PAGE = Path(__file__).resolve().parents[2] / "docs" / "leaderboard" / "report.html"
PHONE = {"width": 390, "height": 844}


def opened(watch: Callable[..., Any], **options: Any) -> Any:
    one = watch(PAGE.as_uri(), **options)
    one.page.goto(PAGE.as_uri())
    return one


def test_a_click_sorts_numbers_by_their_size_and_another_turns_the_order(watch: Callable[..., Any]) -> None:
    page = opened(watch).page
    table = page.locator("table.sortable").first
    shown = "(table, column) => [...table.tBodies[0].rows].map((row) => Number(row.cells[column].dataset.value))"
    for name in ("accuracy", "bytes up", "time"):
        column = table.locator("th button").all_text_contents().index(name)
        heading = table.locator("th").nth(column)
        heading.locator("button").click()
        down = table.evaluate(shown, column)
        assert heading.get_attribute("aria-sort") == "descending" and down == sorted(down, reverse=True)
        heading.locator("button").click()
        assert table.evaluate(shown, column) == sorted(down)


def test_on_a_phone_the_method_stays_in_sight_and_pictures_can_be_read(watch: Callable[..., Any]) -> None:
    one = opened(watch, viewport=PHONE, color_scheme="dark")
    assert one.overflow() <= 0
    one.page.locator(".wide").first.evaluate("(box) => { box.scrollLeft = 400; }")
    method = one.page.locator("table.sortable td").first
    assert method.bounding_box()["x"] >= 0
    ground = "(cell) => getComputedStyle(cell).backgroundColor"
    assert method.evaluate(ground) == one.page.locator("body").evaluate(ground), "or numbers would shine through"
    for label in one.page.locator("svg.pareto text").all()[:5]:
        assert label.bounding_box()["height"] > 10  # 12 units of the picture, in pixels of the screen
