"""The dashboard in a real browser, on a real server, with a real run that trains meanwhile."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everfed.store.run import EVENTS
from tests.browser.conftest import EVERYWHERE
from tests.reports.folders import create, evaluation, finished, log, long_run, phase, start
from tests.reports.serving import served, until
from tests.support.child import Child

pytestmark = pytest.mark.browser
pytest.importorskip("fastapi", reason="the dashboard needs everfed[ui]")
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """For a test that adds runs or changes them."""
    return made(tmp_path / "runs")


def made(folder: Path) -> Path:
    for seed in (0, 1):
        finished(folder / f"fedavg-{seed}", "fedavg", seed, matrix=[[0.7, None], [0.5 - 0.1 * seed, 0.6]])
        finished(folder / f"der-{seed}", "der", seed, matrix=[[0.8, None], [0.7 + 0.1 * seed, 0.8]])
    failed = create(folder / "broken", "fedprox")
    log(
        failed,
        [start("fedprox"), phase(0, trained=1), {"event": "fault", "message": "Diverged: the loss is not finite"}],
    )
    return folder


@pytest.fixture
def home(runs: Path) -> Iterator[str]:
    """The dashboard of `runs`."""
    with served(runs) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The dashboard of the same runs for tests that only look at them: one server for all."""
    with served(made(tmp_path_factory.mktemp("still") / "runs"), every=0.5) as port:
        yield f"http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def tab(still: str, watch_all: Callable[..., Any]) -> Any:
    return watch_all(still).page


@pytest.fixture
def still_page(still: str, tab: Any) -> Any:
    """The page of `still` as it opens, in a tab that tests share; the address holds all that is chosen on it."""
    tab.goto("about:blank")
    return drawn(tab, still)


def opened(watch: Callable[..., Any], home: str, rows: int = 5, **options: Any) -> Any:
    """A page in a window of its own."""
    return drawn(watch(home, **options).page, home, rows)


def drawn(page: Any, home: str, rows: int = 5) -> Any:
    """The page, once it shows that many runs and has drawn them."""
    page.goto(home)
    page.locator(f"#table tbody tr:nth-child({rows})").wait_for()
    page.locator("#chart polyline").first.wait_for()
    return page


def ids(page: Any) -> list[str]:
    return page.locator("#table tbody tr .name").all_inner_texts()


def lines(page: Any) -> list[str]:
    return page.locator("#chart .legend button[data-line]").all_inner_texts()


def wait(page: Any, condition: str) -> None:
    """Until the page says so. Asked from outside: the page's own rules forbid it to evaluate text."""
    until(lambda: page.evaluate(condition))


@pytest.mark.parametrize(("theme", "device"), EVERYWHERE)
def test_it_opens_everywhere(
    still: str, watch: Callable[..., Any], picture: Callable[..., None], theme: str, device: str
) -> None:
    page = opened(watch, still, color_scheme=theme, **(PHONE if device == "phone" else {}))
    assert page.locator("#live").inner_text() == "live"
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    boxes = {name: page.locator(name).bounding_box() for name in ("#chart svg[data-frame] >> nth=0", "#what", "#table")}
    chart, tools, table = boxes.values()
    assert chart["y"] < table["y"] and (device == "desk" or chart["y"] < tools["y"])  # on a phone the plot comes first
    page.get_by_role("button", name="der-1", exact=True).click()
    page.locator("#sections figure").nth(5).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    detail, table = page.locator("#detail").bounding_box(), page.locator("#table").bounding_box()
    if device == "desk":  # beside the table
        assert detail["x"] >= table["x"] and detail["y"] < table["y"] + table["height"]
    else:
        assert detail["y"] > table["y"]
    assert page.locator("#detail-score").inner_text() == "Acc 80.00 % · forgetting 0.00 %"
    assert page.evaluate(OVERLAPS) == []
    picture(page, f"{theme}-{device}")


# texts that lie on each other, within a drawing and between its title and the drawing
OVERLAPS = """() => {
  const kinds = '.save, .y-name, .y-ticks span, .x-ticks span, .x-name, .mark-names span';
  const texts = (box) => [...box.querySelectorAll(kinds)]
    .map((one) => [one.textContent, one.getBoundingClientRect()]).filter(([text, box]) => text && box.width);
  return [...document.querySelectorAll('figure.chart')].flatMap((figure) => {
    const all = texts(figure);
    return all.flatMap(([a, one], i) => all.slice(i + 1).filter(([, other]) =>
      Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
      Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 1).map(([b]) => `${a} on ${b}`));
  });
}"""


def test_bytes_and_titles_lie_on_nothing(tmp_path: Path, watch: Callable[..., Any]) -> None:
    """Long ticks ("300.0 MB") have room beside the name of the axis, and titles above the first tick."""
    folder = create(tmp_path / "runs" / "a")
    sizes = {"bytes_up": 50_000_000, "bytes_down": 50_000_000, "seconds": 4000.0}
    log(
        folder,
        [
            start(),
            *(event for i in range(6) for event in (phase(i, i // 2, **sizes), evaluation(i, i // 2, [0.5 + i / 20]))),
        ],
    )
    with served(tmp_path / "runs") as port:
        home = f"http://127.0.0.1:{port}/"
        for width in (1440, 390):
            page = drawn(watch(home, viewport={"width": width, "height": 900}).page, f"{home}#what=panels", 1)
            assert "600.0 MB" in page.locator("[data-figure=bytes]").inner_text()
            assert page.evaluate(OVERLAPS) == []
            page.context.close()


def test_it_says_that_it_is_loading(still: str, watch: Callable[..., Any]) -> None:
    page = watch(still, java_script_enabled=False).page  # what the page shows before its script has anything
    page.goto(still)
    assert (
        page.locator("#chart").inner_text() == "Loading …" and page.locator("#empty").inner_text() == "Loading runs …"
    )


def test_cards_on_a_phone_are_small(still: str, watch: Callable[..., Any]) -> None:
    """Name, score, status and progress on two lines; faults, where there are some, on a third."""
    page = opened(watch, still, **PHONE)
    cards = page.locator("#table tbody tr")
    assert max(card.bounding_box()["height"] for card in cards.all()) < 90
    assert "80.00 %" in cards.filter(has_text="der-1").inner_text()
    assert "diverged" in cards.filter(has_text="broken").inner_text()


def test_a_sweep_is_drawn_by_its_options(tmp_path: Path, watch: Callable[..., Any]) -> None:
    for size in (10, 20, 30):
        score = [[0.5, None], [size / 100, 0.5]]
        finished(tmp_path / "runs" / str(size), "der", parts={"memory": {"size": size}}, matrix=score)
    with served(tmp_path / "runs") as port:
        page = watch(f"http://127.0.0.1:{port}/").page
        page.goto(f"http://127.0.0.1:{port}/#what=options")
        page.locator("[data-figure=options] polyline").nth(2).wait_for(state="attached")
        assert page.locator("[data-figure=options] .axes").inner_text().split() == ["memory.size", "Accuracy"]
        assert "100 %" in page.locator("[data-figure=importance]").inner_text()
        page.context.close()


def test_the_log_of_a_run_can_be_read(still_page: Any) -> None:
    still_page.get_by_role("button", name="broken", exact=True).click()
    part = still_page.locator("[data-section=log]")
    part.locator("summary").click()
    lines = part.locator("pre").inner_text().splitlines()
    assert "phase round 1, task 1, phase train" in lines[1] and "Diverged: the loss" in lines[-1]


REAL_RUN = """
import sys, time, everfed
from pathlib import Path
from everfed.recipe import settled

def pause(event):
    while (event["event"], event.get("round")) in PAUSES and not Path(sys.argv[2], str(event["round"])).exists():
        time.sleep(0.01)

PAUSES = [("phase", 2), ("phase", 7)]
sets = ["train.rounds_per_task=8", "stream.tasks=2", "stream.clients=4", "eval.every=1", "stream.max_train=200"]
sets += ["stream.max_test=50", "engine.kind=eager"]
recipe = settled(everfed.read_recipe("demo", method="fedavg", seed=7, sets=sets))
everfed.run(recipe, sys.argv[1], observers=[pause])
"""


def test_a_run_that_starts_now_appears_and_moves(
    runs: Path, home: str, watch: Callable[..., Any], picture: Callable[..., None], tmp_path: Path
) -> None:
    """It goes on after rounds 2 and 7 when the page has shown where it is, however slow the page is."""
    page = opened(watch, home)
    (tmp_path / "real_run.py").write_text(REAL_RUN)
    process = Child(tmp_path, str(runs / "fresh"), str(tmp_path), module="real_run")
    try:
        row = page.locator('#table tbody tr[data-id="fresh"]')
        row.wait_for()
        page.get_by_label("compare fresh").check()
        progress = row.locator("td[data-name=Progress]")
        for index in (2, 7):
            until(lambda: progress.inner_text() == f"{index + 1}/16" or not process.alive())  # noqa: B023
            (tmp_path / str(index)).touch()
        until(lambda: progress.inner_text() == "16/16" or process.process.exitcode not in (None, 0))
        page.locator("#what").select_option("acc")
        wait(page, "document.querySelector('tr[data-id=fresh] td[data-name=Status]').textContent === 'finished'")
        wait(page, "document.querySelector('#chart polyline').getAttribute('points').split(' ').length === 16")
        picture(page, "finished")
    finally:
        process.kill()
        process.wait()


def test_runs_are_compared_on_one_plot(still_page: Any) -> None:
    page = still_page
    assert "All runs below" in page.locator("#chosen").inner_text()
    page.get_by_label("compare fedavg-0").check()
    page.get_by_label("compare fedavg-1").check()
    page.get_by_label("compare der-0").check()
    wait(page, "document.querySelector('#chosen').textContent === '3 ticked runs.'")
    page.locator("#what").select_option("acc")
    wait(page, "document.querySelectorAll('#chart polyline').length === 2")
    assert sorted(lines(page)) == ["der", "fedavg (2 seeds)"]
    page.locator("#by").select_option("run")
    wait(page, "document.querySelectorAll('#chart polyline').length === 3")
    page.locator("#what").select_option("forgetting")
    wait(page, "document.querySelector('#chart h3')?.textContent === 'Forgetting'")
    page.locator("#what").select_option("loss")
    page.locator("#first").fill("2")
    page.locator("#last").fill("3")
    wait(page, "document.querySelector('#chart svg[data-frame]')?.dataset.frame.startsWith('2 3 ')")
    # the address holds all that was chosen
    page.reload()
    wait(page, "document.querySelectorAll('#chart polyline').length === 3")
    assert page.get_by_label("compare der-0").is_checked() and not page.get_by_label("compare der-1").is_checked()
    page.get_by_role("button", name="Untick all").click()
    wait(page, "document.querySelector('#chosen').textContent.startsWith('All runs below')")


def test_runs_are_filtered_and_sorted(still_page: Any) -> None:
    page = still_page
    page.get_by_role("button", name="Score").click()
    assert ids(page) == ["der-1", "der-0", "fedavg-0", "fedavg-1", "broken"]
    page.get_by_role("button", name="Score").click()
    assert ids(page) == ["fedavg-1", "fedavg-0", "der-0", "der-1", "broken"]
    assert page.locator("th[aria-sort=ascending]").inner_text() == "Score"
    page.locator("#filter").fill("der seed 1")
    assert ids(page) == ["der-1"] and page.locator("#count").inner_text() == "1 of 5 runs"
    page.locator("#filter").fill("nothing like this")
    assert ids(page) == [] and page.locator("#empty").inner_text() == "No run matches."
    page.locator("#filter").fill("")
    page.locator("#status").select_option("diverged")
    assert ids(page) == ["broken"]
    page.locator("#status").select_option("")
    page.locator("#method").select_option("fedavg")
    assert sorted(ids(page)) == ["fedavg-0", "fedavg-1"]


def test_faults_and_skipped_clients_are_visible(still_page: Any) -> None:
    page = still_page
    row = page.locator('tr[data-id="broken"]')
    assert [row.locator(f"td[data-name={name}]").inner_text() for name in ("Status", "Faults", "Skipped")] == [
        *("diverged", "1", "3"),
    ]
    page.get_by_role("button", name="broken", exact=True).click()
    said = page.locator("[data-section=happenings]")
    said.get_by_text("Diverged: the loss is not finite").wait_for()
    assert "3 times a participant did not train" in said.inner_text()


def test_a_report_is_downloaded_and_opens_offline(
    still: str, watch: Callable[..., Any], tmp_path: Path, picture: Callable[..., None]
) -> None:
    page = opened(watch, still)
    page.get_by_label("compare fedavg-0").check()
    page.get_by_label("compare der-0").check()
    wait(page, "document.querySelector('#chosen').textContent === '2 ticked runs.'")
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download report").click()
    file = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(file)
    assert file.name == "everfed-report.html"
    other = watch(file.as_uri(), offline=True)
    other.page.goto(file.as_uri())
    assert other.requests == [file.as_uri()]
    assert other.page.locator("h1").inner_text() in ("fedavg and der on digits", "der and fedavg on digits")
    picture(other.page, "downloaded")


def test_everything_can_be_done_by_keyboard(still_page: Any) -> None:
    page = still_page
    page.keyboard.press("/")
    page.keyboard.type("der-")
    assert sorted(ids(page)) == ["der-0", "der-1"]
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    second = ids(page)[1]
    page.keyboard.press("Space")
    assert page.get_by_label(f"compare {second}").is_checked()
    page.keyboard.press("Enter")
    page.locator("#sections figure").first.wait_for()
    assert page.locator("#detail-title").inner_text() == second
    page.keyboard.press("Escape")
    assert page.locator("#detail").is_hidden()
    assert page.evaluate("document.activeElement.textContent") == second


def test_a_deleted_and_a_damaged_run_are_reported(runs: Path, home: str, watch: Callable[..., Any]) -> None:
    one = watch(home)
    page = one.page
    page.goto(home)
    page.get_by_role("button", name="der-0", exact=True).click()
    page.locator("#sections figure").first.wait_for()
    shutil.rmtree(runs / "der-0")
    page.get_by_text("there is no run der-0, or not any more").wait_for()
    wait(page, "document.querySelector('tr[data-id=\"der-0\"]') === null")
    (runs / "der-1" / "result.json").write_text("{")
    wait(page, "document.querySelector('tr[data-id=\"der-1\"] td[data-name=Status]').textContent === 'unreadable'")
    page.get_by_role("button", name="der-1", exact=True).click()
    page.get_by_text("This run cannot be read").wait_for()
    # the browser itself reports the answer 404 on the console; nothing else went wrong
    assert all("404" in text for text in one.wrong)
    one.wrong.clear()


def test_three_runs_write_at_once(runs: Path, home: str, watch: Callable[..., Any]) -> None:
    """Half lines, thousands of events, and the page goes on answering."""
    page = opened(watch, home)
    folders = [create(runs / f"busy-{i}", "fedavg", 10 + i) for i in range(3)]
    writers = [threading.Thread(target=write_in_pieces, args=(folder.path / EVENTS, 300)) for folder in folders]
    for writer in writers:
        writer.start()
    page.locator("#filter").fill("busy")
    wait(page, "document.querySelectorAll('#table tbody tr').length === 3")
    page.locator("#what").select_option("loss")
    for writer in writers:
        writer.join()
    wait(
        page,
        "[...document.querySelectorAll('#table td[data-name=Progress]')].every((td) => td.textContent === '300/300')",
    )
    wait(page, "document.querySelector('#chart .legend')?.textContent.includes('(3 seeds)')")


def write_in_pieces(path: Path, rounds: int) -> None:
    """Every line in two pieces, as a reader may see it."""
    with open(path, "w", buffering=1) as file:
        for event in (
            start(rounds=rounds),
            *(phase(i, loss=1 / (i + 1)) for i in range(rounds)),
            evaluation(0, 0, [0.5]),
        ):
            text = json.dumps({"time": 1.0, **event}) + "\n"
            file.write(text[:40])
            file.flush()
            file.write(text[40:])
            file.flush()


@pytest.mark.slow
def test_five_hundred_runs_and_a_long_one(tmp_path: Path, watch: Callable[..., Any]) -> None:
    long_run(tmp_path / "long", 10_000)
    methods = ("fedavg", "der", "fedgp+der")
    for i in range(500):
        finished(tmp_path / f"run-{i:03}", methods[i % 3], i // 3)
    with served(tmp_path, every=1.0) as port:
        page = opened(watch, f"http://127.0.0.1:{port}/", 501)
        page.locator("#filter").fill("long")
        assert ids(page) == ["long"]
        page.locator("#what").select_option("loss")
        wait(page, "document.querySelector('#chart .note:last-child')?.textContent.includes('10,000 points')")
        page.get_by_role("button", name="long", exact=True).click()
        page.locator("#sections figure").nth(5).wait_for()
        page.locator("#filter").fill("run-12")
        assert sorted(ids(page)) == [f"run-12{i}" for i in range(10)]
        page.context.close()  # before the server goes


def test_the_token_is_asked_for(runs: Path, watch: Callable[..., Any]) -> None:
    with served(runs, "secret") as port:
        home = f"http://127.0.0.1:{port}/"
        one = watch(home)
        one.page.goto(home)
        one.page.get_by_label("Token").fill("secret")
        one.page.get_by_role("button", name="Open").click()
        one.page.locator("#table tbody tr:nth-child(5)").wait_for()
        assert one.page.url.startswith(home) and "token" not in one.page.url
        one.context.close()  # before the server goes
        assert all("401" in text for text in one.wrong)
        one.wrong.clear()


def colours(page: Any) -> dict[str, str]:
    """{method: colour} of the lines that are drawn."""
    found = page.evaluate(
        "[...document.querySelectorAll('#chart g[data-line]')].map((g) => [g.dataset.line.split(' ')[0], "
        "getComputedStyle(g.querySelector('.line')).stroke])"
    )
    assert len({tuple(pair) for pair in found}) == len({method for method, _ in found})
    return dict(found)


def test_colours_stay_whatever_is_filtered(runs: Path, home: str, watch: Callable[..., Any]) -> None:
    page = opened(watch, home)
    all_of_them = colours(page)
    assert {"fedavg", "der"} <= set(all_of_them)
    page.locator("#filter").fill("der")
    wait(page, "document.querySelector('#chart .legend').textContent === 'der (2 seeds)bands'")
    assert colours(page) == {"der": all_of_them["der"]}
    for i, method in enumerate(("agem", "er", "fedavg", "der")):  # runs that come later, on other data, too
        stream = {"dataset": "mnist", "scenario": "domain-incremental", "tasks": 3, "clients": 4}
        finished(runs / f"later-{method}", method, 5 + i, **({"stream": stream} if i > 1 else {}))
    page.locator("#filter").fill("")
    wait(page, "document.querySelector('#chart').textContent.includes('agem')")
    assert all_of_them.items() <= colours(page).items()


def test_data_sets_are_drawn_apart_and_named(runs: Path, home: str, watch: Callable[..., Any]) -> None:
    stream = {"dataset": "mnist", "scenario": "domain-incremental", "tasks": 3, "clients": 4}
    finished(runs / "other", "fedavg", stream=stream)
    page = opened(watch, home, 6)
    wait(page, "document.querySelectorAll('#chart .data-set').length === 2")
    assert sorted(page.locator(".data-name").all_inner_texts()) == [
        "digits, domain-incremental",
        "mnist, domain-incremental",
    ]
    assert page.locator(".data-set").first.locator("figure").count() == 5
    page.locator("#together").select_option("true")
    wait(page, "document.querySelectorAll('#chart .data-set').length === 1")
    assert "fedavg (mnist)" in lines(page) and "fedavg (digits) (2 seeds)" in lines(page)


def test_panels_are_smoothed_logarithmic_and_across_bytes(still_page: Any) -> None:
    page = still_page
    assert page.locator("#chart figure h3").all_inner_texts() == [
        *("Accuracy", "Forgetting", "Training loss", "Bytes sent", "Time")
    ]
    page.get_by_role("button", name="der (2 seeds)").click()  # hides the line in every panel
    assert page.locator("#chart g[data-line=der]:not(.off)").count() == 0
    page.locator("#x").select_option("bytes")
    wait(page, "[...document.querySelectorAll('#chart .x-name')].every((name) => name.textContent === 'Bytes sent')")
    page.locator("#log").check()
    wait(page, "document.querySelector('#chart [data-figure=loss] svg[data-log]') !== null")
    curve = page.locator("[data-figure=loss] g[data-line=fedavg] polyline")
    before = curve.get_attribute("points")
    page.locator("#smooth").fill("0.8")
    until(lambda: curve.get_attribute("points") != before)
    page.reload()
    wait(page, "document.querySelector('#chart [data-figure=loss] svg[data-log]') !== null")
    assert page.locator("#smooth").input_value() == "0.8" and page.locator("#x").input_value() == "bytes"


def test_runs_are_grouped_named_tagged_and_hidden(runs: Path, home: str, watch: Callable[..., Any]) -> None:
    for size in (5, 6):
        finished(runs / "sweep" / f"s{size}", "der", 9, parts={"memory": {"size": size}})
    page = opened(watch, home, 7)
    page.locator("#group").select_option("folder")
    assert sorted(page.locator("tr.group th").all_inner_texts()) == [". (5)", "sweep (2)"]
    page.get_by_label("compare all of sweep").check()
    wait(page, "document.querySelector('#chosen').textContent === '2 ticked runs.'")
    wait(page, "document.querySelector('#chart .legend')?.textContent.includes('memory.size=5')")
    page.locator("#columns summary").click()
    page.locator("#columns").get_by_label("memory.size").check()
    assert page.locator('tr[data-id="sweep/s5"] td.option').inner_text() == "5"
    page.get_by_role("button", name="sweep/s5", exact=True).click()
    page.locator("#note-name").fill("small memory")
    page.locator("#note-name").press("Enter")
    page.get_by_role("button", name="small memory", exact=True).wait_for()
    page.locator("#note-tags").fill("good, draft")
    page.locator("#note-tags").press("Tab")
    until(lambda: page.locator('tr[data-id="sweep/s5"] .tag').all_inner_texts() == ["good", "draft"])
    page.locator("#note-hidden").check()
    wait(page, "document.querySelector('tr[data-id=\"sweep/s5\"]') === null")
    page.reload()
    page.locator("#table tbody tr:nth-child(7)").wait_for()
    assert "small memory" not in page.locator("#table").inner_text()
    page.locator("#hidden").check()
    page.get_by_role("button", name="small memory", exact=True).wait_for()
