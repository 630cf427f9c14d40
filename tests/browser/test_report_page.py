"""The report in a real browser: both themes, a phone, offline, readable by pointer and keyboard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everfed.report import write
from tests.report.folders import finished, log, long_run

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    finished(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 1, matrix=[[0.7, None, None], [0.5, 0.6, None], [0.3, 0.5, 0.8]])
    folder = finished(tmp_path / "c", "fedgp+der", 0, matrix=[[0.9, None, None], [0.9, 0.9, None], [0.8, 0.9, 0.9]])
    log(folder, [{"event": "fault", "message": "OSError: disk full"}])
    return write([tmp_path], tmp_path / "out", figures=False)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desk", "phone"])
def test_it_opens_everywhere(
    report: Path, watch: Callable[..., Any], picture: Callable[..., None], theme: str, device: str
) -> None:
    one = watch(report.as_uri(), color_scheme=theme, **(PHONE if device == "phone" else {}))
    one.page.goto(report.as_uri())
    one.page.evaluate("document.querySelectorAll('details').forEach((part) => part.open = true)")
    assert one.requests == [report.as_uri()]
    assert one.overflow() <= 0
    dark = one.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 29)"
    assert dark == (theme == "dark")
    assert one.page.locator("figure.chart").count() == 18
    picture(one.page, f"{theme}-{device}")


def test_the_theme_can_be_turned(report: Path, watch: Callable[..., Any]) -> None:
    page = watch(report.as_uri(), color_scheme="light").page
    page.goto(report.as_uri())
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) == "rgb(21, 24, 29)"
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_values_are_read_by_pointer_and_by_keyboard(report: Path, watch: Callable[..., Any]) -> None:
    page = watch(report.as_uri()).page
    page.goto(report.as_uri())
    chart = page.locator("#figure-acc_t")
    drawing = chart.locator("svg[data-frame]")
    drawing.hover(position={"x": 2, "y": 60})
    # task 1: fedavg (0.8 + 0.7) / 2, fedgp+der 0.9
    assert chart.locator(".reading").inner_text().split("\n") == ["Task 1", "fedavg", "75 %", "fedgp+der", "90 %"]
    page.locator("h1").hover()
    assert chart.locator(".reading").inner_text() == ""
    drawing.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    # task 2: fedavg (0.65 + 0.55) / 2
    assert chart.locator(".reading").inner_text().split("\n") == ["Task 2", "fedavg", "60 %", "fedgp+der", "90 %"]
    page.keyboard.press("Escape")
    assert chart.locator(".reading").inner_text() == ""


def test_lines_can_be_hidden(report: Path, watch: Callable[..., Any]) -> None:
    page = watch(report.as_uri()).page
    page.goto(report.as_uri())
    chart = page.locator("#figure-acc_t")
    assert chart.locator("polyline:visible").count() == 2
    button = chart.get_by_role("button", name="fedavg (2 seeds)")
    button.click()
    assert chart.locator("polyline:visible").count() == 1 and button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert chart.locator("polyline:visible").count() == 2


def test_it_is_complete_without_scripts(report: Path, watch: Callable[..., Any]) -> None:
    one = watch(report.as_uri(), java_script_enabled=False)
    one.page.goto(report.as_uri())
    assert one.page.locator("polyline:visible").count() == 8


def test_ten_thousand_rounds(tmp_path: Path, watch: Callable[..., Any], picture: Callable[..., None]) -> None:
    page = write([long_run(tmp_path / "long", 10_000).path], tmp_path / "out", figures=False)
    one = watch(page.as_uri())
    one.page.goto(page.as_uri())
    assert one.page.locator("#figure-loss polyline").is_visible()
    picture(one.page, "long")
