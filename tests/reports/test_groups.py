"""Which runs are seeds of one experiment, what they are called, and their colours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed.reports.colours import DARK, LIGHT, ON_DARK, ON_LIGHT
from everfed.reports.groups import COLOURS, Colours, assigned, by_stream, grouped, variant
from everfed.reports.read import read_runs
from tests.reports.folders import create, finished, log, start


def test_runs_that_differ_in_their_seed_or_engine_are_one_experiment(tmp_path: Path) -> None:
    finished(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 1, engine={"kind": "eager"})
    finished(tmp_path / "c", "der", 0)
    grouping = grouped(read_runs([tmp_path]))
    assert [(group.label, [run.seed for run in group.runs]) for group in grouping.groups] == [
        ("fedavg", [0, 1]),
        ("der", [0]),
    ]
    assert grouping.notes == ("Seeds differ, so means are not over the same draws: 0 and 1 of fedavg; 0 of der.",)


def test_the_best_score_comes_first_and_unfinished_runs_last(tmp_path: Path) -> None:
    """Everything on a page follows this order: tables, legends, matrices, bars, runs."""
    for method, last in (("ewc", 0.1), ("der", 0.9), ("er", 0.5)):
        finished(tmp_path / method, method, matrix=[[0.5, None], [last, 0.5]])
    create(tmp_path / "a", "agem")
    (stream,) = by_stream(read_runs([tmp_path]))
    assert [group.label for group in stream.groups] == ["der", "er", "ewc", "agem"]
    assert [run.method for run in stream.runs] == ["der", "er", "ewc", "agem"]


def test_a_method_added_later_changes_no_colour(tmp_path: Path) -> None:
    """A dashboard that saw the first runs only, and a report of all."""
    for clock, method in enumerate(("si", "der", "ewc", "lwf", "er", "agem", "fedprox", "fedavg"), start=1):
        log(create(tmp_path / method, method), [start(method)], clock)
    runs = read_runs([tmp_path])
    early = assigned([run for run in runs if run.method in ("si", "der", "ewc")])
    known = {run.method: early.of(*variant(run)) for run in runs if run.method in ("si", "der", "ewc")}
    whole = {group.label: group.colour for group in grouped(runs).groups}
    assert {method: whole[method] for method in known} == known
    assert len({colour % COLOURS for colour in whole.values()}) == 8
    assigned(runs, early)
    assert {run.method: early.of(*variant(run)) for run in runs} == whole


def test_an_option_that_differs_makes_another_experiment_and_is_spelled_out(tmp_path: Path) -> None:
    for size in (100, 200):
        finished(tmp_path / str(size), "der", parts={"memory": {"size": size}})
    labels = [group.label for group in grouped(read_runs([tmp_path])).groups]
    assert labels == ["der (memory.size=100)", "der (memory.size=200)"]


def test_many_settings_of_one_method_have_colours_of_their_own(tmp_path: Path) -> None:
    """A sweep: four dashes of one colour would leave lines that look alike. Beside another method they keep its."""
    for size in range(6):
        finished(tmp_path / str(size), "der", parts={"memory": {"size": 100 + size}})
    assert len({group.colour % COLOURS for group in grouped(read_runs([tmp_path])).groups}) == 6
    finished(tmp_path / "er", "er")
    assert len({group.colour % COLOURS for group in grouped(read_runs([tmp_path])).groups}) == 2


def test_a_seed_that_was_run_twice_counts_once_and_is_reported(tmp_path: Path) -> None:
    create(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 0)
    grouping = grouped(read_runs([tmp_path]))
    assert [run.name for group in grouping.groups for run in group.runs] == ["b"]
    assert grouping.notes == ("b and a are the same experiment with the same seed; only the first counts.",)


def test_different_streams_and_scales_are_noted(tmp_path: Path) -> None:
    finished(tmp_path / "a", "fedavg", 0)
    stream = {"dataset": "digits", "scenario": "domain-incremental", "tasks": 5, "clients": 4}
    finished(tmp_path / "b", "der", 0, stream=stream)
    finished(tmp_path / "c", "fedavg", 0, settings={"scale": 0.5})
    grouping = grouped(read_runs([tmp_path]))
    assert [group.label for group in grouping.groups] == ["fedavg (scale=1.0)", "der", "fedavg (scale=0.5)"]
    assert (
        len(grouping.notes) == 2 and "--scale 0.5" in grouping.notes[0] and "stream.tasks differ" in grouping.notes[1]
    )


def test_the_data_set_comes_first_in_a_label(tmp_path: Path) -> None:
    stream = {"dataset": "mnist", "scenario": "domain-incremental", "tasks": 5, "clients": 4}
    finished(tmp_path / "a", "fedavg")
    finished(tmp_path / "b", "fedavg", stream=stream, train={"rounds_per_task": 3})
    finished(tmp_path / "c", "der", stream=stream)
    finished(tmp_path / "d", "der", stream=stream, parts={"memory": {"size": 7}}, eval={"every": 2})
    labels = [group.label for group in grouped(read_runs([tmp_path])).groups]
    assert labels == [
        "fedavg (digits)",
        "fedavg (mnist)",
        "der (mnist, eval.every=0)",
        "der (mnist, memory.size=7, eval.every=2)",
    ]


def test_options_that_do_nothing_are_in_no_label(tmp_path: Path) -> None:
    """A memory that fedavg does not have, Adam's numbers beside SGD, a monitor that is off."""
    finished(tmp_path / "a", "fedavg", 0)
    finished(tmp_path / "b", "fedavg", 1, parts={"defaults": {"memory": {"size": 20}}})
    finished(tmp_path / "c", "fedavg", 2, train={"optimizer": {"beta1": 0.5, "lr_end": 0.1}}, monitor={"window": 9})
    (group,) = grouped(read_runs([tmp_path])).groups
    assert (group.label, [run.seed for run in group.runs]) == ("fedavg", [0, 1, 2])
    finished(tmp_path / "d", "der", 0, parts={"defaults": {"memory": {"size": 20}}})
    finished(tmp_path / "e", "der", 0, parts={"memory": {"size": 30}})
    labels = [group.label for group in grouped(read_runs([tmp_path])).groups]
    assert labels == ["fedavg", "der (memory.size=20)", "der (memory.size=30)"]


def test_runs_by_stream(tmp_path: Path) -> None:
    stream = {"dataset": "digits", "scenario": "domain-incremental", "tasks": 5, "clients": 4}
    finished(tmp_path / "a", "fedavg")
    finished(tmp_path / "b", "der", stream=stream)
    finished(tmp_path / "c", "fedavg", stream=stream)
    found = by_stream(read_runs([tmp_path]))
    assert [(one.name, [group.label for group in one.groups]) for one in found] == [
        ("digits (tasks=3)", ["fedavg"]),
        ("digits (tasks=5)", ["der", "fedavg"]),
    ]
    assert found[0].groups[0].colour == found[1].groups[1].colour


@given(st.lists(st.tuples(st.sampled_from("abcdefghijklm"), st.sampled_from("xy"), st.text(max_size=3)), unique=True))
def test_colours_are_distinct_and_stay(variants: list[tuple[str, str, str]]) -> None:
    """A method has one colour; variants on one stream differ in it or in their dash; nothing changes later."""
    colours = Colours()
    colours.assign(variants[:5])
    before = {variant: colours.of(*variant) for variant in variants[:5]}
    found = {variant: colours.of(*variant) for variant in variants}
    assert all(found[variant] == number for variant, number in before.items())
    for stream in "xy":
        own = [number for (_, name, _), number in found.items() if name == stream]
        assert len(set(own)) == len(own)
    by_method: dict[str, set[int]] = {}
    for (method, _, _), number in found.items():
        by_method.setdefault(method, set()).add(number % COLOURS)
    assert all(len(numbers) == 1 for numbers in by_method.values())
    if len(by_method) <= COLOURS:
        assert len(set.union(set(), *by_method.values())) == len(by_method)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "methods"), [(LIGHT, ON_LIGHT), (DARK, ON_DARK)])
def test_text_and_lines_stand_out_in_both_themes(theme: dict[str, str], methods: tuple[str, ...]) -> None:
    """WCAG 2 AA: 4.5 for text, 3 for graphics."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for ground in (theme["ground"], theme["panel"]):
        assert all(contrast(theme[name], ground) >= 4.5 for name in ("text", "soft", "accent", "bad", "good"))
        assert all(contrast(colour, ground) >= 3 for colour in methods)
    assert len(methods) == COLOURS


def oklab(colour: str, seen: Sequence[Sequence[float]]) -> list[float]:
    """The colour in OKLab, whose distances are close to those that people see. seen: changes linear RGB before."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    linear = [max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))) for row in seen]
    cones = [sum(a * b for a, b in zip(row, linear, strict=True)) ** (1 / 3) for row in CONES]
    return [sum(a * b for a, b in zip(row, cones, strict=True)) for row in LAB]


CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
# all, deuteranopia, protanopia (Machado, Oliveira and Fernandes 2009, severity 1)
SEEN = {
    "all": (((1, 0, 0), (0, 1, 0), (0, 0, 1)), 0.15),
    "no green": (
        ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
        0.07,
    ),
    "no red": (
        ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        0.07,
    ),
}


@pytest.mark.parametrize("eyes", SEEN)
@pytest.mark.parametrize("methods", [ON_LIGHT, ON_DARK], ids=["light", "dark"])
def test_ten_methods_can_be_told_apart(methods: tuple[str, ...], eyes: str) -> None:
    seen, least = SEEN[eyes]
    found = [oklab(colour, seen) for colour in methods]
    assert min(math.dist(one, other) for one, other in itertools.combinations(found, 2)) > least
