"""The leaderboard: what is tried, what is kept, and the pages that are made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from everfed import api
from everfed.cli import app
from everfed.errors import UserError, is_user_error
from everfed.experiments.jobs import Outcome
from everfed.experiments.leaderboard import page, records, tuning
from everfed.experiments.leaderboard.page import Point, front
from everfed.methods import registry as methods
from everfed.recipe import read, settled, to_toml
from everfed.store.files import Locked, locked

STREAMS = ("rotated-digits", "split-digits", "cifar100")


# what is tried ---------------------------------------------------------------------------------------------------


def test_the_streams_and_the_methods() -> None:
    assert tuning.streams() == list(STREAMS)
    left_out = set(methods.names()) - set(tuning.compared())
    assert left_out == {name for name in methods.names() if name.startswith("fedgp+")} - set(tuning.WITH_FEDGP)
    assert set(tuning.WITH_FEDGP) <= set(tuning.compared())


@pytest.mark.parametrize("method", tuning.compared())
def test_every_method_has_a_weight_with_five_ascending_values_or_a_reason(method: str) -> None:
    weight, reason = tuning.weight_of(method), tuning.table()["without"].get(method)
    assert (weight is None) == bool(reason)
    if weight is None:
        return
    values = weight["values"]
    numbers = [float(re.findall(r"[0-9.]+", value)[-1]) if isinstance(value, str) else value for value in values]
    assert len(numbers) == 5 and numbers == sorted(set(numbers))


@pytest.mark.parametrize("method", tuning.compared())
def test_every_try_builds_the_method_with_other_settings(method: str) -> None:
    tried = set()
    for stream in STREAMS:
        for sets in tuning.tries(method, stream, 5):
            recipe = settled(read(f"leaderboard/{stream}", method=method, sets=list(sets)))
            built = methods.build(recipe.method.name, recipe.method.model_extra)
            tried.add((stream, recipe.train.optimizer.lr, repr(built.parts)))
    assert len(tried) == 5 * len(STREAMS)


@pytest.mark.parametrize("stream", STREAMS)
def test_tries_see_every_value_once_and_begin_with_the_middle(stream: str) -> None:
    tries = tuning.tries("er", stream, 5)
    assert tries[0] == (f"train.optimizer.lr={[0.2, 0.2, 0.1][STREAMS.index(stream)]}", "method.er.batch=16")
    assert len({rate for rate, _ in tries}) == len({weight for _, weight in tries}) == 5
    assert tuning.tries("er", stream, 2) == tries[:2]
    assert all(len(sets) == 1 for sets in tuning.tries("fedavg", stream, 5))


def test_the_recipes_hold_out_validation_data_and_give_all_buffers_one_size() -> None:
    for stream in STREAMS:
        recipe = read(f"leaderboard/{stream}")
        assert (recipe.stream.model_extra or {})["validation"] == 0.1
        sizes = set()
        for method in tuning.compared():
            section = settled(read(f"leaderboard/{stream}", method=method)).method
            parts = {part.name: part for part in methods.build(section.name, section.model_extra).parts}
            if "memory" in parts:
                sizes.add(parts["memory"].size)  # type: ignore[attr-defined]
        assert len(sizes) == 1


@pytest.mark.parametrize("method", tuning.compared())
def test_every_method_can_be_put_together_or_is_refused_with_a_reason(method: str) -> None:
    try:
        api.check(settled(read("leaderboard/split-digits", method=method)))
    except Exception as error:
        assert is_user_error(error), error


# records ---------------------------------------------------------------------------------------------------------


def result(acc: float, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    cost = {"seconds": seconds, "bytes_up": 100, "bytes_down": 50, "client_state_bytes": 80}
    facts = {"everfed": "0", "evaluated": "global", "environment": {"engine": "eager", "torch": "2"}}
    metrics = {"acc": acc, "forgetting": 0.1, "learning_accuracy": 0.9}
    return {"metrics": metrics, "cost": cost, "stream": {"clients": 8}, **facts, **more}


def added(root: Path, method: str, kind: str, key: int, entry: dict[str, Any]) -> records.Record:
    about = {"seed": key} if kind == "tests" else {"number": key, "seed": 100, "sets": [f"train.optimizer.lr={key}"]}
    return records.add(root, "h", "rotated-digits", method, kind, {**about, **entry})


def test_a_record_in_literal_numbers(tmp_path: Path) -> None:
    for number, acc in enumerate((0.5, 0.75, 0.75)):
        added(tmp_path, "er", "tries", number, records.measured(result(acc), "", None))
    added(tmp_path, "er", "tries", 3, records.measured(None, "the loss is not finite", None))
    for seed, acc in ((1, 0.5), (0, 0.7)):
        record = added(tmp_path, "er", "tests", seed, records.measured(result(acc), "", 40.0))
    best = records.best_try(record)
    assert best is not None and best["number"] == 1, "the first of two equal ones"
    assert [test["seed"] for test in record["tests"]] == [0, 1]
    assert records.mean(record, "acc") == pytest.approx(0.6)
    assert records.deviation(record, "acc") == pytest.approx(0.1)
    assert records.mean(record, "kept_bytes") == 10.0
    assert records.read_all(tmp_path) == [record]
    assert json.loads((tmp_path / "rotated-digits" / "er.json").read_text()) == record


def test_times_are_not_compared_between_kinds_of_devices(tmp_path: Path) -> None:
    """20 s on the same device is ten times FedAvg's 2 s; 200 s of a CPU say nothing about a GPU."""
    gpu = {"engine": "graphs", "torch": "2", "device_name": "NVIDIA H200"}
    cpu = {"engine": "eager", "torch": "2", "machine": "x86_64"}
    for method, seconds, where in (("fedavg", 2.0, gpu), ("er", 20.0, gpu), ("der", 200.0, cpu)):
        added(tmp_path, method, "tries", 0, records.measured(result(0.5), "", None))
        for seed in (0, 1):
            added(tmp_path, method, "tests", seed, records.measured(result(0.5, seconds, environment=where), "", 40.0))
    found = {line[0].text: line[page.COLUMNS.index("time")] for line in page.rows(records.read_all(tmp_path))}
    assert {name: cell.text for name, cell in found.items()} == {"fedavg": "1.00", "er": "10.00", "der": "-"}


def test_stored_samples_are_those_of_a_client_at_the_end(tmp_path: Path) -> None:
    """At the end of the second task four clients hold 30 + 50 samples together."""
    lines = [{"event": "buffer", "round": at, "by_task": counts} for at, counts in ((1, [60, 0]), (3, [30, 50]))]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cell = SimpleNamespace(folder=tmp_path)
    assert tuning._kept_samples(Outcome(cell, {"stream": {"clients": 4}})) == 20.0  # type: ignore[arg-type]


def test_what_is_there_stays(tmp_path: Path) -> None:
    added(tmp_path, "er", "tests", 0, records.measured(result(0.5), "", None))
    record = added(tmp_path, "er", "tests", 0, records.measured(result(0.9), "", None))
    assert records.mean(record, "acc") == 0.5


def test_between_reading_and_writing_a_record_no_other_process_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, lock = records.opened, tmp_path / STREAMS[0] / ".fedavg.json.lock"

    def refused(*arguments: Any) -> records.Record:
        with pytest.raises(Locked), locked(lock):
            pass
        return opened(*arguments)

    monkeypatch.setattr(records, "opened", refused)
    assert len(added(tmp_path, "fedavg", "tests", 0, {"problem": ""})["tests"]) == 1
    assert not lock.exists()


def test_failures_are_forgotten_and_nothing_else(tmp_path: Path) -> None:
    """A command with --again that is interrupted leaves the tests as they were."""
    fine, failed = records.measured(result(0.5), "", None), records.measured(None, "a fault of the machine", None)
    added(tmp_path, "er", "tries", 0, fine)
    added(tmp_path, "er", "tries", 1, failed)
    added(tmp_path, "er", "tests", 0, fine)
    added(tmp_path, "er", "tests", 1, failed)
    records.forget_failures(tmp_path, ["rotated-digits"], ["er", "fedavg"])
    (er,) = records.read_all(tmp_path)
    assert [entry["number"] for entry in er["tries"]] == [0]
    assert [(entry["seed"], entry["try"]) for entry in er["tests"]] == [(0, 0)]
    assert records.mean(er, "acc") == 0.5


def test_why_a_method_has_no_number(tmp_path: Path) -> None:
    """The reason is that of tries only where none of them finished: else its tests are still to come."""
    fine, failed = records.measured(result(0.5), "", None), records.measured(None, "the loss is not finite", None)
    assert records.problem(added(tmp_path, "er", "tries", 0, failed)) == "the loss is not finite"
    assert records.problem(added(tmp_path, "er", "tries", 1, fine)) == "not tested yet; tries so far: 2"
    lost = records.measured(None, "out of memory", None)
    assert records.problem(added(tmp_path, "er", "tests", 0, lost)) == "out of memory"
    assert records.problem(added(tmp_path, "er", "tests", 1, fine)) == ""


def test_tests_count_as_long_as_their_try_is_the_best(tmp_path: Path) -> None:
    fine, worse, better = (records.measured(result(acc), "", None) for acc in (0.5, 0.4, 0.6))
    added(tmp_path, "er", "tries", 0, fine)
    for seed in (0, 1):
        added(tmp_path, "er", "tests", seed, {"try": 0, **fine})
    record = added(tmp_path, "er", "tries", 1, worse)
    assert len(records.finished_tests(record)) == 2
    record = added(tmp_path, "er", "tries", 2, better)
    assert records.finished_tests(record) == [] and len(record["tests"]) == 2
    record = added(tmp_path, "er", "tests", 1, {"try": 2, **better})
    assert [(entry["seed"], entry["try"]) for entry in record["tests"]] == [(1, 2)]
    assert records.mean(record, "acc") == 0.6


def test_records_of_another_recipe_are_refused(tmp_path: Path) -> None:
    added(tmp_path, "er", "tests", 0, records.measured(result(0.5), "", None))
    with pytest.raises(UserError, match="another version of the recipe leaderboard/rotated-digits"):
        records.opened(tmp_path, "rotated-digits", "er", "other")


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "rotated-digits").mkdir()
    (tmp_path / "rotated-digits" / "er.json").write_text("{}")
    with pytest.raises(UserError, match=r"er.json is no record of the leaderboard: it has no stream"):
        records.read_all(tmp_path)
    (tmp_path / "rotated-digits" / "er.json").write_text("null")
    with pytest.raises(UserError, match=r"er.json is no record of the leaderboard: it has no stream"):
        records.read_all(tmp_path)


# pages -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path: Path) -> Path:
    for method, acc, seconds in (("fedavg", 0.5, 2.0), ("er", 0.7, 3.0), ("ideal", 0.9, 4.0), ("fedala", 0.6, 2.0)):
        more = {"evaluated": "personalised"} if method == "fedala" else {}
        kept = 40.0 if method == "er" else None
        added(tmp_path, method, "tries", 0, records.measured(result(acc), "", kept))
        for seed in (0, 1):
            added(tmp_path, method, "tests", seed, records.measured(result(acc, seconds, **more), "", kept))
    added(tmp_path, "ewc", "tries", 0, records.measured(None, "the loss is not finite", None))
    return tmp_path


def test_the_table_has_the_best_first_and_what_is_needed_beside_it(board: Path) -> None:
    lines = [[cell.text for cell in row] for row in page.rows(records.read_all(board))]
    assert [line[0] for line in lines] == ["ideal", "er", "fedala †", "fedavg"]
    assert lines[1] == [
        *("er", "70.0 ± 0.0", "10.0 ± 0.0", "90.0 ± 0.0", "100 B", "50 B", "1.50", "10 B", "40", "sums only"),
        *("yes", "not needed", "lr 0"),
    ]
    assert lines[0][7:9] == ["all data", "all"]
    assert page.failures(records.read_all(board)) == [("ewc", "the loss is not finite")]


def test_a_point_is_at_the_bytes_of_both_directions_or_at_the_stored_samples(board: Path) -> None:
    """100 bytes up and 50 down; ideal stores all samples and has no place among the others."""
    found = records.read_all(board)
    assert {point.name: point.cost for point in page.points(found, page.BYTES)} == {
        name: 150.0 for name in ("er", "fedala †", "fedavg", "ideal")
    }
    by_samples = {point.name: point.cost for point in page.points(found, page.SAMPLES)}
    assert by_samples == {"er": 40.0, "fedala †": 0.0, "fedavg": 0.0}


def test_tries_that_ended_without_a_number_are_named_with_the_kind_of_reason(board: Path) -> None:
    problems = [
        "CUDA out of memory. Tried",
        "took longer than the limit of 60 s for a run",
        "the loss is not finite",
        "x",
    ]
    for number, problem in enumerate(problems, 1):
        added(board, "er", "tries", number, records.measured(None, problem, None))
    assert page._lost(records.read_all(board), "tries") == (
        " Tries that ended without a number: "
        "diverged: er 1; failed: er 1; out of memory: er 1; over the time limit: er 1."
    )


def test_a_row_of_fewer_seeds_is_named(board: Path) -> None:
    added(board, "er", "tests", 2, records.measured(None, "the loss is not finite", None))
    conditions = page._conditions(records.read_all(board))
    assert conditions.endswith(" Tests that ended without a number: diverged: er 1.")


def test_a_method_whose_tries_are_not_all_there_is_not_among_those_that_were_compared(board: Path) -> None:
    for number in (0, 1):
        added(board, "der", "tries", number, records.measured(result(0.5), "", None))
    found = records.read_all(board)
    assert ("der", "not tested yet; tries so far: 2") in page.failures(found)
    assert page._conditions(found).startswith("1 tries and 2 seeds for every method in the table;")


def test_methods_without_a_record_are_named_as_not_run(board: Path) -> None:
    found = records.read_all(board)
    missing = page.not_run(found)
    assert sorted([*missing, "er", "ewc", "fedala", "fedavg", "ideal"]) == sorted(tuning.compared())
    assert f"Not run on this stream: `{'`, `'.join(missing)}`." in page._section("rotated-digits", found, "board")
    assert f"Not run on this stream: {', '.join(missing)}." in page.report(found)


@pytest.mark.parametrize(
    ("sets", "shown"),
    [
        (["train.optimizer.lr=0.2", "method.er.batch=16"], "lr 0.2, er.batch 16"),
        (["train.optimizer.lr=0.2", 'method."der++".weight=0.1'], "lr 0.2, der++.weight 0.1"),
        (['method.memory.policy={kind = "re-fed", informative = 0.5}'], "informative 0.5"),
    ],
)
def test_the_settings_of_the_best_try_are_shown(sets: list[str], shown: str) -> None:
    assert page.chosen_settings({"tries": [{"acc": 0.5, "sets": sets}]}) == shown


def test_what_a_server_sees_and_what_a_method_needs() -> None:
    stamp, ewc = page.facts_of("split-digits", "stamp"), page.facts_of("split-digits", "ewc")
    assert not stamp.secure and stamp.sees.startswith("every client's fedomg/") and stamp.boundaries
    assert ewc.secure and ewc.boundaries and not ewc.keeps_all
    assert not page.facts_of("split-digits", "er").boundaries


def test_the_pages_are_made_of_the_records_by_one_command(board: Path) -> None:
    text, html = board / "board.md", board / "board.html"
    text.write_text("before\n<!-- leaderboard: rotated-digits -->\n<!-- leaderboard: end -->\nafter\n")
    command = ["leaderboard", "--only-page", "--records", str(board), "--page", str(text), "--html", str(html)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "no number: rotated-digits ewc: the loss is not finite" in done.output
    written = text.read_text()
    assert written.startswith("before\n") and written.endswith("after\n")
    assert "| ideal " in written and "* `ewc`: the loss is not finite" in written
    assert "1 tries and 2 seeds for every method in the table" in written
    for kind in page.KINDS:
        ElementTree.parse(board / "board" / f"rotated-digits-{kind}.svg")
    assert html.read_text().count("data-value") == 4 * len(page.COLUMNS)
    again = written, html.read_text()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (text.read_text(), html.read_text()) == again


def test_the_documentation_says_what_the_records_say() -> None:
    root = Path(__file__).resolve().parent.parent
    text = (root / "docs" / "leaderboard.md").read_text()
    found = records.read_all(root / records.FOLDER)
    assert page.renewed(text, found, "leaderboard") == text
    folder = root / "docs" / "leaderboard"
    assert (folder / "report.html").read_text() == page.report(found)
    beside = page.beside(folder.with_suffix(".md"), found)
    assert {path.name for path in beside} == {path.name for path in folder.iterdir()} - {"report.html"}
    assert {path.name for path, text in beside.items() if path.read_text() != text} == set()


def test_the_documented_page_has_a_row_for_every_method_and_names_its_streams(board: Path) -> None:
    """ideal has the highest mean; der has no number on the first stream, so it comes last whatever its mean."""
    for method, acc in (("fedavg", 0.4), ("er", 0.5), ("ideal", 0.8), ("fedala", 0.6), ("der", 0.99)):
        records.add(board, "0", "split-digits", method, "tries", {"number": 0, "sets": [], "acc": acc, "problem": ""})
        entry = {"seed": 0, "try": 0, **records.measured(result(acc), "", None)}
        records.add(board, "0", "split-digits", method, "tests", entry)
    table = page.renewed("<!-- leaderboard: all -->\n<!-- leaderboard: end -->\n", records.read_all(board), "x")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:-1]]
    assert rows[0] == ["method", "[rotated-digits](x/rotated-digits.md)", "[split-digits](x/split-digits.md)"]
    assert [row[0] for row in rows[2:]] == ["ideal", "fedala †", "er", "fedavg", "der"]
    assert rows[2] == ["ideal", "90.0 ± 0.0", "80.0"] and rows[-1] == ["der", "-", "99.0"]


def test_the_page_about_choosing_has_the_numbers_of_the_records_in_their_order() -> None:
    root = Path(__file__).resolve().parent.parent
    table = (root / "docs" / "choosing.md").read_text().partition("<!-- measured -->\n")[2].partition("\n\n")[0]
    found = {
        (one["stream"], one["method"]): records.mean(one, "acc") for one in records.read_all(root / records.FOLDER)
    }
    compared = 0
    for line in table.splitlines()[2:]:
        for stream, cell in zip(STREAMS, line.strip("| ").split("|")[1:], strict=False):
            entries = [entry.split() for entry in cell.split(",") if entry.strip()]
            means = [found[stream, method] or 0.0 for method, _ in entries]
            assert [number for _, number in entries] == [f"{100 * mean:.1f}" for mean in means], (stream, line)
            assert means == sorted(means, reverse=True), (stream, line)
            compared += len(entries)
    assert compared > 40


def test_a_page_that_cannot_be_written_is_refused_before_the_first_run(tmp_path: Path) -> None:
    command = ["leaderboard", "--streams", "split-digits", "--methods", "fedavg", "--tries", "1", "--seeds", "1"]
    command += ["--out", str(tmp_path / "runs"), "--records", str(tmp_path / "records"), "--page"]
    missing, unmarked = tmp_path / "missing.md", tmp_path / "unmarked.md"
    unmarked.write_text("no marks")
    for path, reason in ((missing, "cannot be read: No such file"), (unmarked, "has no place for the leaderboard")):
        refused = CliRunner().invoke(app, [*command, str(path)])
        assert refused.exit_code == 2 and f"--page {path} {reason}" in refused.output, refused.output
    assert list(tmp_path.iterdir()) == [unmarked]


def test_machines_get_json_only(board: Path) -> None:
    html = str(board / "board.html")
    done = CliRunner().invoke(app, ["leaderboard", "--only-page", "--records", str(board), "--html", html, "--json"])
    assert json.loads(done.stdout)["written"] == [html]


def test_where_the_table_is_to_be_had_is_printed(board: Path) -> None:
    done = CliRunner().invoke(app, ["leaderboard", "--only-page", "--records", str(board)])
    assert done.stdout.endswith("the table: everfed leaderboard --only-page --html FILE\n")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5, unique_by=lambda one: one[0]))
def test_names_in_a_picture_do_not_lie_on_each_other(drawn: list[tuple[int, int]]) -> None:
    points = [Point("a-long-name", cost, accuracy / 10) for cost, accuracy in drawn]
    labels = ElementTree.fromstring(page.drawing(points, "x")).findall("text")
    places = [(float(one.get("x", 0)), float(one.get("y", 0))) for one in labels if one.text == "a-long-name"]
    assert len(places) == len(front(points))
    for i, (x, y) in enumerate(places):
        assert all(abs(x - other) >= 70 or abs(y - row) >= 13.9 for other, row in places[:i])


def test_a_front_in_literal_numbers() -> None:
    a, b, c, d = Point("a", 1, 0.5), Point("b", 2, 0.4), Point("c", 2, 0.7), Point("d", 3, 0.7)
    assert front([d, c, b, a]) == [a, c]
    assert [point.name for point in page.points([], page.BYTES)] == []


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=20))
def test_no_point_beats_one_of_the_front(drawn: list[tuple[int, int]]) -> None:
    points = [Point(str(i), cost, accuracy / 20) for i, (cost, accuracy) in enumerate(drawn)]
    found = front(points)
    for point in points:
        assert any(best.cost <= point.cost and best.accuracy >= point.accuracy for best in found)
    for best in found:
        assert not any(p.cost <= best.cost and p.accuracy > best.accuracy for p in points)
        assert not any(p.cost < best.cost and p.accuracy >= best.accuracy for p in points)


# the command -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_core")
def test_a_small_leaderboard_from_tries_to_records(tmp_path: Path) -> None:
    """Two tries and one test of fedavg and ewc, whose second try at a high rate may diverge; repeated, nothing runs."""
    command = ["leaderboard", "--streams", "split-digits", "--methods", "fedavg,er", "--tries", "2", "--seeds", "1"]
    command += ["--jobs", "1", "--out", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    kept = records.read_all(tmp_path / "records")
    assert [record["method"] for record in kept] == ["er", "fedavg"]
    for record in kept:
        assert [entry["number"] for entry in record["tries"]] == [0, 1]
        assert [entry["seed"] for entry in record["tests"]] == [0]
        best = records.best_try(record)
        assert best is not None and best["acc"] == max(entry["acc"] for entry in record["tries"])
        runs = tmp_path / "runs" / "split-digits" / record["method"]
        recipe = read(runs / f"test-0-try-{best['number']}" / "recipe.toml")
        assert f"train.optimizer.lr={recipe.train.optimizer.lr}" in best["sets"]
        assert recipe.eval.split == "test"
        tried = read(runs / "try-0" / "recipe.toml")
        assert tried.eval.split == "validation" and tried.seed == 100
    assert kept[0]["tests"][0]["kept_samples"] > 0 and kept[1]["tests"][0]["kept_samples"] is None
    again = CliRunner().invoke(app, [*command[:-3], str(tmp_path / "elsewhere"), *command[-2:]])
    assert again.exit_code == 0 and not (tmp_path / "elsewhere").exists(), again.output


@pytest.mark.usefixtures("one_core")
def test_a_run_folder_of_other_settings_is_not_taken_for_a_try(tmp_path: Path) -> None:
    """Left by an earlier table of tries: its number would stand for settings that it did not have."""
    left = tmp_path / "runs" / "split-digits" / "fedavg" / "try-0"
    left.mkdir(parents=True)
    other = read("leaderboard/split-digits", method="fedavg", sets=["train.optimizer.lr=0.3"])
    (left / "recipe.toml").write_text(to_toml(settled(other)))
    command = ["leaderboard", "--streams", "split-digits", "--methods", "fedavg", "--tries", "1", "--seeds", "1"]
    command += ["--jobs", "1", "--out", str(tmp_path / "runs"), "--records", str(tmp_path / "records")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and f"{left} belongs to another recipe" in refused.output.replace("\n", "")
    assert not (tmp_path / "records").exists()


def test_an_unknown_method_is_refused() -> None:
    refused = CliRunner().invoke(app, ["leaderboard", "--methods", "odd"])
    assert refused.exit_code == 2 and "--methods odd: use some of fedavg" in refused.output
