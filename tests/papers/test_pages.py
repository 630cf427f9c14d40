"""REPRODUCIBILITY.md and docs/results/ are those of the records."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from everfed.cli import app
from everfed.experiments.papers import planning, records
from everfed.experiments.papers.judging import runs_of
from everfed.experiments.papers.pages import PAGES, SCREEN, findings, pages
from everfed.experiments.papers.records import FOLDER
from everfed.experiments.papers.tables import Planned, find, notes, papers
from everfed.methods import registry as methods
from everfed.naming import split_names
from everfed.recipe import read, settled
from everfed.recipe import shipped as recipes
from tests.papers.test_records import made

ROOT = Path(__file__).parents[2]
KEPT = records.read_all(ROOT / FOLDER)


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return pages(KEPT)


def test_the_pages_are_those_of_the_records(written: dict[str, str]) -> None:
    """A page that differs, or one too many, is mended by: everfed record --pages ."""
    assert KEPT
    for name, text in written.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name}: write it anew with everfed record --pages ."
    made_before = {path.relative_to(ROOT).as_posix() for path in (ROOT / PAGES).iterdir()} - {f"{PAGES}/earlier.md"}
    assert made_before | {SCREEN} == set(written)


def test_every_record_is_shown_on_a_page(written: dict[str, str]) -> None:
    text = "\n".join(written.values())
    for record in KEPT:
        assert f"`{record['recipe']}`:" in text, f"{record['recipe']} has records, but no page shows them"


def test_the_screen_is_one(written: dict[str, str]) -> None:
    assert len(written[SCREEN].split()) <= 1500
    assert all(f"({PAGES}/{key}.md)" in written[SCREEN] for key in papers())


def test_a_page_begins_with_three_sentences_and_their_counts(written: dict[str, str]) -> None:
    for key in papers():
        assert len(notes(key).answer) == 3
        for sentence in notes(key).answer:
            assert sentence.endswith(".") and len(sentence.split()) <= 45, sentence
        assert not re.search(r"\{\w+\}", written[f"{PAGES}/{key}.md"]), f"{key}: a count was not filled in"


def test_pages_are_written_below_a_folder(tmp_path: Path) -> None:
    """FedAvg as printed in three seeds: one level, no effect, and the plot has its panel."""
    for seed, accuracy in enumerate((0.67, 0.6802, 0.69)):
        records.write(made(seed=seed, accuracy=accuracy), tmp_path / "kept")
    done = CliRunner().invoke(app, ["record", "--pages", str(tmp_path), "--records", str(tmp_path / "kept")])
    assert done.exit_code == 0, done.output
    screen, page = ((tmp_path / name).read_text() for name in (SCREEN, f"{PAGES}/fedgp.md"))
    row = next(line for line in screen.splitlines() if "fedgp.md" in line)
    assert [cell.strip() for cell in row.split("|")[2:8]] == ["0 of 0", "0", "0", "0", "1", "1"]
    assert "| 68.01 ± 0.82 | 68.02 ± 3.1 | -0.01      | unresolved" in page and "No effect is judged yet." in page
    assert (
        "![fedgp/table1" in page and "rotated-MNIST (Domain-IL): Acc_T" in (tmp_path / PAGES / "fedgp.svg").read_text()
    )
    assert not (tmp_path / PAGES / "mfcl.svg").exists()


def test_a_changed_number_changes_the_pages() -> None:
    before, after = (pages([made(accuracy=accuracy)])[f"{PAGES}/fedgp.md"] for accuracy in (0.68, 0.69))
    assert before != after


def test_a_number_that_several_tables_print_counts_in_the_first() -> None:
    """DER's accuracy on rotated MNIST is in Tables 1, 2 and 3."""
    runs = [made(method, seed, 0.5) for method in ("der", "fedgp+der") for seed in range(3)]
    found = findings("fedgp", runs_of(runs))
    assert {name: len(own) for name, own in found.tables.items()} == {"fedgp/table1": 2}


def test_a_plot_has_a_mark_for_ours_and_the_papers_number(written: dict[str, str]) -> None:
    root = ElementTree.fromstring(written[f"{PAGES}/fedgp.svg"])
    kinds = [element.get("class") for element in root.iter() if element.tag.endswith(("circle", "path"))]
    found = findings("fedgp", runs_of(KEPT))
    drawn = [one for one in found.tables["fedgp/table1"] if one.spread and one.paper is not None]
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == len(drawn) + 2  # and two in the legend
    assert sum(circle.get("class") == "o" for circle in circles) == sum(bool(one.level) for one in drawn) + 1
    assert kinds.count("p") == 2 * len(drawn) + 1


@pytest.mark.parametrize("key", list(papers()))
def test_notes_name_what_there_is(key: str) -> None:
    known = notes(key)
    assert set(known.recipes) <= {*recipes.names(), *(record["recipe"] for record in KEPT)}
    for group in known.runs():
        assert group.minutes >= 0 and group.command
    for one in known.disagreements:
        assert one.seen and (one.ruled_out or one.not_tried or one.next or one.settled), one.question
        for sentence in (*one.seen, *one.ruled_out, *one.not_tried):
            assert len(sentence.split()) <= 40, sentence


@pytest.mark.parametrize("plan", [plan for key in papers() for plan in notes(key).runs()], ids=lambda plan: plan.what)
def test_a_planned_command_can_be_typed(plan: Planned) -> None:
    """Its table or recipe, methods and settings exist. `everfed run` does not know what a recipe gives a method in a
    comparison, such as an optimiser of its own."""
    program, verb, name, *rest = shlex.split(plan.command)
    if (program, verb) == ("python", "-m"):
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
        return
    options: dict[str, list[str]] = {}
    for key, value in zip(rest[::2], rest[1::2], strict=True):
        options.setdefault(key, []).append(value)
    assert program == "everfed" and verb in ("run", "compare", "reproduce")
    chosen = split_names(options.get("--methods", options.get("--method", [""]))[0])
    if verb == "reproduce":
        assert planning.plan(find(name), chosen, split_names(options.get("--columns", [""])[0]))
        return
    given = read(name).compare.options if read(name).compare else {}  # type: ignore[union-attr]
    for method in chosen or [None]:
        section = settled(read(name, method=method, sets=options.get("--set", []))).method
        assert methods.build(section.name, section.model_extra, section.parts)
        assert verb == "compare" or method not in given, f"everfed run leaves out what {name} gives {method}"


def test_a_plan_names_a_table_or_a_command() -> None:
    with pytest.raises(ValueError, match="name either a table and its seeds, or what to run"):
        Planned(what="nothing", minutes=1)
    plan = Planned(what="some", minutes=1, table="fedgp/table1", columns=["CIFAR10 ("], methods=["a", "b"], seeds=3)
    assert plan.command == "everfed reproduce fedgp/table1 --methods a,b --columns 'CIFAR10 (' --seeds 3"
