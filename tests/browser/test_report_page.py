"""The report in a real browser: both themes, a phone, offline, readable by pointer and keyboard."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from everfed.reports.html import write
from tests.browser.conftest import EVERYWHERE
from tests.reports.folders import evaluation, finished, log, long_run, phase

pytestmark = pytest.mark.browser
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("report")
    finished(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 1, matrix=[[0.7, None, None], [0.5, 0.6, None], [0.3, 0.5, 0.8]])
    folder = finished(tmp_path / "c", "fedgp+der", 0, matrix=[[0.9, None, None], [0.9, 0.9, None], [0.8, 0.9, 0.9]])
    log(folder, [{"event": "fault", "message": "OSError: disk full"}])
    return write([tmp_path], tmp_path / "out", figures=False)


@pytest.fixture(scope="module")
def page(report: Path, watch_all: Callable[..., Any]) -> Any:
    """The report, for tests that leave it as they found it."""
    opened = watch_all(report.as_uri(), color_scheme="light").page
    opened.goto(report.as_uri())
    return opened


@pytest.mark.parametrize(("theme", "device"), EVERYWHERE)
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
    assert one.page.locator("figure.chart").count() == 17
    picture(one.page, f"{theme}-{device}")


def test_the_theme_can_be_turned(page: Any) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) == "rgb(21, 24, 29)"
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_values_are_read_by_pointer_and_by_keyboard(page: Any) -> None:
    chart = page.locator("[data-figure=acc_t]")
    drawing = chart.locator("svg[data-frame]")
    drawing.hover(position={"x": 2, "y": 60})
    # task 1: fedavg (0.8 + 0.7) / 2, fedgp+der 0.9
    assert chart.locator(".reading").inner_text().split("\n") == ["Task 1", "fedgp+der", "90 %", "fedavg", "75 %"]
    page.locator("h1").hover()
    assert chart.locator(".reading").inner_text() == ""
    drawing.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    # task 2: fedavg (0.65 + 0.55) / 2
    assert chart.locator(".reading").inner_text().split("\n") == ["Task 2", "fedgp+der", "90 %", "fedavg", "60 %"]
    page.keyboard.press("Escape")
    assert chart.locator(".reading").inner_text() == ""


def test_lines_can_be_hidden(page: Any) -> None:
    chart = page.locator("[data-figure=acc_t]")
    assert chart.locator("polyline:visible").count() == 2
    button = chart.get_by_role("button", name="fedavg (2 seeds)")
    button.click()
    assert chart.locator("polyline:visible").count() == 1 and button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert chart.locator("polyline:visible").count() == 2


def test_bands_can_be_switched_off_and_a_line_stands_out(page: Any) -> None:
    chart = page.locator("[data-figure=acc_t]")
    button = chart.get_by_role("button", name="bands")
    assert chart.locator(".band:visible").count() == 1  # fedavg has two seeds
    button.click()
    assert chart.locator(".band:visible").count() == 0 and button.get_attribute("aria-pressed") == "false"
    button.click()
    assert chart.locator(".band:visible").count() == 1
    chart.get_by_role("button", name="fedgp+der").hover()
    assert chart.locator("g[data-line]").evaluate_all("all => all.map((one) => getComputedStyle(one).opacity)") == [
        *("1", "0.15"),
    ]
    assert chart.locator(".band:visible").count() == 0
    page.locator("h1").hover()
    assert chart.locator(".band:visible").count() == 1


@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_a_plot_is_saved(page: Any, tmp_path: Path, kind: str) -> None:
    chart = page.locator("[data-figure=acc_t]")
    with page.expect_download() as waiting:
        chart.get_by_role("button", name=kind).click()
    assert waiting.value.suggested_filename == f"Accuracy_over_the_tasks_learned.{kind.lower()}"
    waiting.value.save_as(tmp_path / "plot")
    found = (tmp_path / "plot").read_bytes()
    if kind == "PNG":
        box = chart.bounding_box()
        width, height = struct.unpack(">II", found[16:24])
        assert abs(width - 2 * box["width"] - 48) < 2 and abs(height - 2 * box["height"] - 48) < 2
        return
    drawing = ElementTree.fromstring(found)
    texts = [one.text for one in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Accuracy over the tasks learned", "fedavg (2 seeds)", "fedgp+der", "Task", "Accuracy, %"} <= set(texts)
    lines = [one for one in drawing.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 2 and all(one.get("stroke").startswith("rgb(") for one in lines)


def test_a_run_in_the_table_leads_to_its_part(page: Any) -> None:
    row = page.locator("#table-runs tbody tr").filter(has=page.get_by_role("link", name="b", exact=True))
    assert "46.67" in row.inner_text() or "53.33" in row.inner_text()
    row.get_by_role("link").click()
    part = page.locator("details:target")
    assert part.locator("summary").first.inner_text() == "b" and part.get_attribute("open") is not None


def test_a_wide_table_shows_on_a_phone_that_it_scrolls(report: Path, watch: Callable[..., Any]) -> None:
    one = watch(report.as_uri(), **PHONE)
    one.page.goto(report.as_uri())
    window = one.page.locator("#table-comparison .scroll")
    assert window.evaluate("box => box.scrollWidth > box.clientWidth")
    first, second = (window.locator("tbody tr").first.locator(cell) for cell in ("th", "td >> nth=1"))
    before = first.bounding_box()["x"]
    assert second.bounding_box()["x"] < 390  # the score can be seen before anything is moved
    window.evaluate("box => box.scrollLeft = 9999")
    assert first.bounding_box()["x"] == before and second.bounding_box()["x"] < before  # the methods' names stay
    assert one.page.evaluate(f"{TALLEST}") < 150  # no column of single letters


TALLEST = "Math.max(...[...document.querySelectorAll('.data th')].map((cell) => cell.getBoundingClientRect().height))"


def test_it_is_complete_without_scripts(report: Path, watch: Callable[..., Any]) -> None:
    one = watch(report.as_uri(), java_script_enabled=False)
    one.page.goto(report.as_uri())
    assert one.page.locator("polyline:visible").count() == 6


def test_ten_thousand_rounds(tmp_path: Path, watch: Callable[..., Any], picture: Callable[..., None]) -> None:
    page = write([long_run(tmp_path / "long", 10_000).path], tmp_path / "out", figures=False)
    one = watch(page.as_uri())
    one.page.goto(page.as_uri())
    assert one.page.locator("[data-figure=loss] polyline").is_visible()
    picture(one.page, "long")


def matrix(tasks: int) -> list[list[float | None]]:
    """Every score from 0 to 1 that a shade can have."""
    return [[(t * tasks + i) % 101 / 100 if i <= t else None for i in range(tasks)] for t in range(tasks)]


def test_numbers_can_be_read_on_every_shade(tmp_path: Path, watch: Callable[..., Any]) -> None:
    """WCAG 2 AA asks for 4.5; measured on what the browser computed."""
    finished(tmp_path / "a", matrix=matrix(20))
    page = write([tmp_path], tmp_path / "out", figures=False)
    one = watch(page.as_uri())
    one.page.goto(page.as_uri())
    for theme in ("light", "dark"):
        one.page.emulate_media(color_scheme=theme)
        found = one.page.evaluate(CONTRASTS)
        assert len(found) > 200 and min(found) >= 4.5, theme


# the browser paints each colour on a canvas, which gives it as bytes
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const luminance = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return [...document.querySelectorAll('.matrix tbody td:not(.empty)')].map((cell) => {
    const style = getComputedStyle(cell);
    const [high, low] = [luminance(style.color), luminance(style.backgroundColor)].sort((a, b) => b - a);
    return (high + 0.05) / (low + 0.05);
  });
}"""

OVERLAPS = """() => {
  const found = [];
  const rows = '.mark-names, .x-ticks, .y-ticks, .legend, .contents ol, figure.chart, .plot';
  for (const names of document.querySelectorAll(rows)) {
    const all = [...names.children].map((one) => [one.textContent, one.getBoundingClientRect()]);
    const boxes = all.filter(([, box]) => box.width);
    boxes.forEach(([a, one], i) => boxes.slice(i + 1).forEach(([b, other]) => {
      const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      if (across > 0.5 && down > 0.5) found.push(`${names.className}: ${a} and ${b}`);
    }));
  }
  return found;
}"""


@pytest.mark.parametrize(
    ("tasks", "device"),
    [
        *((10, "desk"), (23, "desk"), (23, "phone")),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((5, "desk"), (5, "phone"), (10, "phone"))),
    ],
)
def test_labels_do_not_collide(tmp_path: Path, watch: Callable[..., Any], tasks: int, device: str) -> None:
    folder = finished(tmp_path / "a", matrix=matrix(tasks))
    log(folder, [evaluation(0, 0, [0.5], end=False)])
    finished(tmp_path / "b", "fedgp+der", matrix=matrix(tasks))
    page = write([tmp_path], tmp_path / "out", figures=False)
    one = watch(page.as_uri(), **(PHONE if device == "phone" else {"viewport": {"width": 1440, "height": 900}}))
    one.page.goto(page.as_uri())
    assert one.page.locator(".mark-names span").count() > 5
    assert one.page.evaluate(OVERLAPS) == []
    assert one.overflow() <= 0


def test_one_colour_means_one_thing(tmp_path: Path, watch: Callable[..., Any]) -> None:
    """Lines, chips and pieces by what they stand for: a method, a task, a part, a phase."""
    stream = {"dataset": "mnist", "scenario": "domain-incremental", "tasks": 3, "clients": 4}
    for method in ("fedavg", "der", "fedgp+der"):
        folder = finished(tmp_path / method, method)
        log(folder, [phase(0, 0, "reference"), {"event": "buffer", "round": 3, "task": 1, "by_task": [30, 10, 5]}])
        finished(tmp_path / f"{method}-mnist", method, stream=stream, matrix=matrix(3))
    page = write([tmp_path], tmp_path / "out", figures=False)
    one = watch(page.as_uri())
    one.page.goto(page.as_uri())
    for theme in ("light", "dark"):
        one.page.emulate_media(color_scheme=theme)
        meanings: dict[str, set[str]] = {}
        for colour, meaning in one.page.evaluate(MEANINGS):
            meanings.setdefault(colour, set()).add(meaning)
        assert {"fedavg", "der", "task 1", "train", "reference"} <= set.union(*meanings.values())
        assert {colour: found for colour, found in meanings.items() if len(found) > 1} == {}, theme


MEANINGS = """() => {
  const found = [];
  const add = (one, property, meaning) => found.push([getComputedStyle(one)[property], meaning
    .replace(/ \\(\\d+ seeds\\)$/, '').replace(/ [↑↓] (up|down)$/, '')]);
  for (const line of document.querySelectorAll('g[data-line]')) {
    add(line.querySelector('.line'), 'stroke', line.dataset.line);
  }
  for (const swatch of document.querySelectorAll('.legend .swatch path')) {
    add(swatch, 'stroke', swatch.closest('li').textContent);
  }
  for (const chip of document.querySelectorAll('.chip')) add(chip, 'backgroundColor', chip.parentElement.textContent);
  for (const row of document.querySelectorAll('.bars tbody tr')) {
    const single = row.closest('table').previousElementSibling?.className !== 'legend';
    for (const piece of row.querySelectorAll('.piece')) {
      add(piece, 'backgroundColor', single ? row.cells[0].textContent : piece.title.split(':')[0]);
    }
  }
  return found;
}"""
