"""The mapping from tables to recipes is whole: every table, figure and printed cell of the papers is in it."""

from __future__ import annotations

import pytest

from everfed.errors import UserError
from everfed.experiments.jobs import new_job
from everfed.experiments.papers.measures import MEASURES
from everfed.experiments.papers.planning import experiments, plan
from everfed.experiments.papers.tables import Item, PaperTable, find, papers, printed, tables
from everfed.recipe import shipped as recipes

# every numbered table and figure of the five papers
NUMBERED = {
    "fedgp": ["fig1", "fig2", "fig3", "fig4a", "fig4b", "fig5", *(f"table{i}" for i in range(1, 10))],
    "fedssi": ["fig1", "fig2", "fig3", "fig4", *(f"table{i}" for i in range(1, 13) if i != 7)],
    "coordinated": [f"fig{i}" for i in range(1, 7)],
    "mfcl": ["fig1", "table1", "table2", "table3"],
    "stamp": ["fig1", "fig2", "fig3", "fig4", *(f"table{i}" for i in range(1, 6))],
}


def test_every_numbered_table_and_figure_is_there() -> None:
    for paper, names in NUMBERED.items():
        assert {f"{paper}/{name}" for name in names} <= set(tables())
    assert {"fedssi/table7-scalability", "fedssi/table7-bandwidth"} <= set(tables())
    assert set(NUMBERED) == set(papers())


def test_every_printed_cell_belongs_to_a_table() -> None:
    planned = {cell.target for table in tables().values() for cell in plan(table)}
    assert set(printed()) <= planned


@pytest.mark.parametrize("table", tables().values(), ids=lambda table: table.name)
def test_a_table_names_only_what_there_is(table: PaperTable) -> None:
    for block in table.item.blocks:
        assert set(block.methods or ()) <= set(table.methods)
        assert set(block.metrics) <= set(table.paper.metrics)
    assert set(table.paper.baselines.values()) | {table.paper.baseline} <= set(table.paper.methods)
    for metric in table.paper.metrics.values():
        assert bool(metric.missing) != (metric.measure in MEASURES)
        assert not metric.against or metric.against in table.paper.methods


@pytest.mark.parametrize("table", tables().values(), ids=lambda table: table.name)
def test_every_cell_runs_or_says_why_not(table: PaperTable) -> None:
    """And what runs can be read: the recipe with the method's options and what the cell sets."""
    cells = plan(table)
    assert bool(cells) != bool(table.item.nothing)
    assert len({(c.dataset, c.setting, c.method, c.metric) for c in cells}) == len(cells)
    for experiment in experiments(cells):
        method = experiment.method or None
        new_job("", experiment.recipe, None, method=method, seed=0, sets=experiment.sets)  # type: ignore[arg-type]


def test_recipes_of_tables_are_mapped() -> None:
    """A recipe that a paper's table or figure is named in is used by it; what is made small is for a look only."""
    used = {block.recipe for table in tables().values() for block in table.item.blocks}
    full = {name for name in recipes.names() if not name.endswith("-small")}
    named = {name for name in full if name.partition("/")[2].startswith(("table", "fig"))}
    assert named - used == set(), "say in everfed/experiments/papers/tables.toml which cells these recipes give"


def test_tables_are_found_by_name_and_near_misses_are_hinted() -> None:
    assert find("FedGP/Table1").name == "fedgp/table1"
    with pytest.raises(UserError, match="there is no table 'fedgp/tabel1'. Did you mean fedgp/table1"):
        find("fedgp/tabel1")


def test_an_item_has_blocks_or_a_reason() -> None:
    with pytest.raises(ValueError, match="needs either blocks to run or the reason"):
        Item.model_validate({"name": "fig9", "about": "?"})
