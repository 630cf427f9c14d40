"""The report: one file that asks for nothing, shows every figure, and lets nothing in a run become markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from everfed.reports import html
from everfed.reports.charts import matrix as shaded_matrix
from everfed.reports.html import POLICY, render
from everfed.reports.read import read_run, read_runs
from tests.reports.folders import create, evaluation, finished, log, long_run, phase, result, start


class Tags(HTMLParser):
    """Every tag with its attributes, and a check that they close in order."""

    VOID = frozenset({"meta", "br", "input", "link", "hr", "img", "col"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture
def page(tmp_path: Path) -> str:
    finished(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 1)
    finished(tmp_path / "c", "der", 0)
    return render(read_runs([tmp_path]))


def test_nothing_is_asked_for_from_anywhere(page: str) -> None:
    assert "://" not in page
    for tag, attributes in Tags(page).found:
        assert not {"src", "srcset", "data", "action", "poster"} & set(attributes), tag
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        assert attributes.get("href", "#").startswith("#")
    assert "@import" not in page and "url(" not in page
    assert "default-src 'none'" in POLICY and POLICY in page.replace("&#x27;", "'")


def test_every_figure_is_there(page: str) -> None:
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert titles[:7] == [
        *("Accuracy over the tasks learned", "Forgetting", "Training loss by round"),
        *("Accuracy by task: fedavg", "Accuracy by task: der", "Bytes by part and direction", "Time by phase"),
    ]
    assert {"Memory", "Who saw what when", "Who holds which classes", "Buffer composition by task"} <= set(titles)
    assert page.count('class="band"') == 3  # acc_t, forgetting and loss of the method with two seeds
    assert re.findall(r'class="mark-names"[^>]*>(.*?)</div>', page)[2].count("<span") == 3


def test_a_plot_that_repeats_another_is_left_out(tmp_path: Path) -> None:
    """Scores at the ends of tasks are drawn by task; scores in between are drawn by round, too."""
    folder = finished(tmp_path / "a")
    assert "Accuracy by round" not in render(read_runs([tmp_path]))
    log(folder, [evaluation(0, 0, [0.4], end=False)])
    assert "Accuracy by round" in render(read_runs([tmp_path]))


def test_it_begins_with_what_was_run(page: str) -> None:
    text = re.sub(r"<[^>]*>", " ", page.partition("<header>")[2].partition("</header>")[0])
    assert "fedavg and der on digits" in page.partition("<h1>")[2].partition("</h1>")[0]
    sizes = "3 tasks, 4 clients, 6 rounds, network chosen by the data, seeds 0 and 1."
    assert f"fedavg and der on digits, domain-incremental: {sizes}" in text
    for word in ("What was run", "Scenario", "Network", "Training", "Methods", "Seeds"):
        assert word in text


def test_the_title_and_the_contents(tmp_path: Path) -> None:
    finished(tmp_path / "a")
    page = render(read_runs([tmp_path]), "My <digits>")
    assert "<title>My &lt;digits&gt;</title>" in page and "<h1>My &lt;digits&gt;</h1>" in page
    contents = page.partition("<nav")[2].partition("</nav>")[0]
    links = re.findall(r'href="#(.*?)">(.*?)<', contents)
    assert [title for _, title in links] == ["Results", "Learning", "Scores by task", "Cost", "Runs"]
    assert all(f'id="{anchor}"' in page for anchor, _ in links)


def test_mixed_runs_are_grouped_by_stream(tmp_path: Path) -> None:
    """Each stream has a chapter with its own table, so that the best value is the best on its own data."""
    stream = {"dataset": "mnist", "scenario": "domain-incremental", "tasks": 3, "clients": 4}
    finished(tmp_path / "a", "fedavg")
    finished(tmp_path / "b", "fedavg", stream=stream)
    finished(tmp_path / "c", "der", stream=stream, matrix=[[0.9, None, None], [0.9, 0.9, None], [0.8, 0.9, 0.9]])
    page = render(read_runs([tmp_path]))
    Tags(page)
    assert re.findall(r'<h2 id="part-\d">(.*?)</h2>', page) == ["digits", "mnist", "Runs"]
    assert page.count('id="table-comparison"') == 2 and 'data-figure="acc_t"' in page
    assert "on 2 streams (digits and mnist)" in page and "fedavg (mnist)" not in page
    chapter = page.partition(">mnist</h2>")[2].partition('id="part-3"')[0]
    assert "<strong>86.67</strong>" in chapter and "66.67" in chapter


def test_drawn_points_are_where_the_numbers_are(tmp_path: Path) -> None:
    """Acc_t is 80, 65 and 66.67 % on an axis from 65 to 80; tasks 1, 2, 3 across."""
    page = render([read_run(finished(tmp_path / "a").path)])
    frame, points = re.search(r'data-frame="([^"]*)".*?<polyline points="([^"]*)"', page).groups()
    assert frame == "1 3 65 80"
    assert points == "0,0 500,1000 1000,888.89"


def test_what_a_run_says_cannot_become_markup(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    folder = finished(tmp_path / "a", evil)
    log(folder, [{"event": "fault", "message": evil}, {"event": evil, "message": evil}])
    folder.write_result(result(method=evil, environment={evil: evil}))
    page = render(read_runs([tmp_path]))
    assert evil not in page
    assert [tag for tag, _ in Tags(page).found].count("script") == 1


def test_a_figure_that_runs_share_is_drawn_once(tmp_path: Path) -> None:
    for name in ("fedavg", "der", "er"):
        long_run(tmp_path / name, 200)
        text = (tmp_path / name / "recipe.toml").read_text()
        (tmp_path / name / "recipe.toml").write_text(text.replace('name = "fedavg"', f'name = "{name}"'))
    page = render(read_runs([tmp_path]))
    assert page.count('class="presence"') == 1
    assert page.count("Who saw what when: the same as in der.") == 2


def test_an_unfinished_run_and_one_without_events(tmp_path: Path) -> None:
    log(create(tmp_path / "a"), [start(), phase(0, trained=2), evaluation(0, 0, [0.5], False)])
    create(tmp_path / "b", "der")
    page = render(read_runs([tmp_path]))
    Tags(page)
    assert "2 runs, 2 of them unfinished" in page
    assert "unfinished at round 1 of 6" in page and "unfinished at round 0 of ?" in page
    assert "2 times a participant did not train, in 1 rounds." in page


def test_faults_warnings_and_unreadable_lines_are_shown(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    with open(folder.path / "events.jsonl", "a") as file:
        file.write("garbage\n")
    log(folder, [{"event": "warning", "message": "careful"}, {"event": "fault", "message": "OSError: disk full"}])
    page = render(read_runs([tmp_path]))
    assert "<b>fault</b> OSError: disk full" in page and "<b>warning</b> careful" in page
    assert "1 of 14 lines of events.jsonl could not be read." in page


def test_a_cell_of_the_matrix_is_shaded_by_its_score() -> None:
    """Fractions from 0 to 1, other scores from the lowest to the highest; an empty cell has no shade."""
    for scores, unit in (([0.25, 0.0, 1.0], "%"), ([30.0, 20.0, 60.0], "")):
        first, second, third = ((score, 0.0) for score in scores)
        assert re.findall(r"--v:(\d+)%", shaded_matrix([[first, None], [second, third]], unit)) == ["25", "0", "100"]


def test_many_tasks_are_shaded_instead_of_numbered(tmp_path: Path) -> None:
    matrix = [[0.5 if i <= t else None for i in range(40)] for t in range(40)]
    page = render([read_run(finished(tmp_path / "a", matrix=matrix).path)])
    assert 'class="shades"' in page
    Tags(page)


def test_a_run_of_ten_thousand_rounds_is_a_small_page(tmp_path: Path) -> None:
    page = render([read_run(long_run(tmp_path / "a", 10_000).path)])
    assert len(page) < 1_000_000
    assert "up to 10,000 points are drawn as about 600; extremes are kept" in page
    Tags(page)


def test_the_command_to_run_it_again(tmp_path: Path) -> None:
    folder = finished(tmp_path / "it's one")
    assert html.command(read_run(folder.path)) == (
        f"everfed run '{tmp_path}/it'\"'\"'s one/recipe.toml' --out '{tmp_path}/it'\"'\"'s one-again'"
    )
    other = create(tmp_path / "b", settings={"scale": 0.25, "data_dir": "/my data"})
    assert html.command(read_run(other.path)).endswith("--scale 0.25 --data '/my data'")
    own = create(tmp_path / "c", settings={"own_stream": True})
    page = render([read_run(own.path)])
    assert "got its stream from Python" in page and "To run it again" not in page


def test_the_resolved_recipe_is_in_the_page(page: str) -> None:
    assert "[train.optimizer]" in page and "rounds_per_task = 10" in page


def test_buffers_are_drawn_where_they_were_recorded(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    log(folder, [{"event": "buffer", "round": 3, "task": 1, "by_task": [30, 10]}])
    page = render([read_run(folder.path)])
    assert 'aria-label="task 1 30, task 2 10"' in page


def test_scores_that_are_no_fractions(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    log(folder, [start(tasks=2), phase(0), evaluation(0, 0, [40.0]), phase(1, 1), evaluation(1, 1, [60.0, 20.0])])
    folder.write_result(result(score="perplexity", accuracy_matrix=[[40.0, None], [60.0, 20.0]], metrics={"p": 20.0}))
    page = render([read_run(folder.path)])
    assert "Perplexity over the tasks learned" in page and "Perplexity, %" not in page


def test_what_parts_measured_is_drawn(tmp_path: Path) -> None:
    folder = finished(tmp_path / "a")
    assert "What parts measured" not in render([read_run(folder.path)])
    log(folder, [{"event": "measure", "round": i, "task": 0, "part": "gap", "local_global_gap": 0.1} for i in range(3)])
    page = render([read_run(folder.path)])
    assert "What parts measured" in page and "gap: local_global_gap" in page
