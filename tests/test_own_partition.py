"""Who holds what, and when: a column that names the client, a column of time, a folder of sites, lists of rows, a
function, a data set for every client, and tasks as lists of classes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import everfed
from everfed import streams
from everfed.cli import app

ROOT = Path(__file__).resolve().parent.parent
PARTITION = '''
import numpy as np

def odd_and_even(labels, clients, rng, rows, columns, *, first=0):
    """Rows by turns; it sees where they stand in the training part, and the columns."""
    assert len(rows) == len(labels)
    return [np.flatnonzero(rows % clients == (client + first) % clients) for client in range(clients)]

def any_share(labels, clients, rng, **options):
    return [np.arange(options.get("first", 0), len(labels) // 2), np.arange(len(labels) // 2, len(labels))]

def twice(labels, clients, rng):
    return [[0, 1], [1, 2]]
'''
RECIPE = """
[stream]
dataset = "clinic.csv"
scenario = "{scenario}"
{more}
[model]
kind = "mlp"
[train]
rounds_per_task = 1
[engine]
kind = "eager"
[method]
name = "fedavg"
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("day_partition.py").write_text(PARTITION)
    yield tmp_path
    sys.modules.pop("day_partition", None)


def table(path: str = "clinic.csv", site: str = "", rows: int = 120) -> list[dict[str, Any]]:
    """Visits at three sites of very different sizes, over years 9 to 12, with the site's number as a feature."""
    rng = np.random.default_rng(0)
    sites = rng.choice(["lund", "oslo", "york"], rows, p=[0.6, 0.3, 0.1])
    found = [
        {"site": sites[n], "year": int(9 + 4 * n / rows), "label": n % 3, "age": n, "dose": ord(sites[n][0])}
        for n in range(rows)
    ]
    kept = ["age", "dose", "label"] if site else list(found[0])
    lines = [",".join(str(row[key]) for key in kept) for row in found if site in ("", row["site"])]
    Path(path).write_text("\n".join([",".join(kept), *lines]))
    return found


def says(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == code, found.output
    return found.output


def made(options: dict[str, Any], **settings: Any) -> Any:
    return streams.build({"dataset": "clinic.csv", **options}, seed=0, rounds_per_task=1, **settings)


def doses(stream: Any, client: int, task: int = 0) -> set[int]:
    return set(stream.data(client, task).x[:, 1].int().tolist())


# a column that names the client --------------------------------------------------------------------------------------
def test_a_column_names_the_client_and_says_how_many_there_are() -> None:
    table()
    Path("clinic.toml").write_text(
        RECIPE.format(scenario="class-incremental", more='tasks = 3\npartition = { kind = "column", column = "site" }')
    )
    assert "3 clients" in says("run", "clinic.toml", "--set", "stream.normalise=none")
    stream = made({"scenario": "class-incremental", "tasks": 3, "partition": {"kind": "column", "column": "site"}})
    assert stream.clients == 3 and stream.input_shape == (3,)  # year, age and dose; the site is no feature
    for task in range(3):
        found = [set(stream.data(client, task).x[:, 2].int().tolist()) for client in range(3)]
        assert found == [{ord("l")}, {ord("o")}, {ord("y")}]
    refused = says("run", "clinic.toml", "--set", "stream.clients=4", "--out", "no", code=2)
    assert "column 'site' has 3 values, one for every client; set stream.clients = 3, or leave it out" in refused
    refused = says("run", "clinic.toml", "--set", "stream.partition.column=sight", "--out", "no", code=2)
    assert "there is no column 'sight'; it has site, year, age, dose" in refused
    refused = says("run", "clinic.toml", "--set", "stream.partition={kind='iid'}", "--out", "no", code=2)
    assert (
        "column 'site' holds text such as 'oslo'; features are numbers: encode it, leave it out, or name it as the "
        "column" in refused
    )


def test_a_partitioner_of_flower_sees_the_columns() -> None:
    pytest.importorskip("flwr_datasets", reason="the extra `hub` is not installed")
    table()
    natural = {"kind": "flwr:NaturalIdPartitioner", "partition_by": "site"}
    stream = made({"scenario": "class-incremental", "tasks": 1, "partition": natural})
    assert stream.clients == 3
    assert sorted(min(doses_of) for doses_of in (set(stream.data(c, 0).x[:, 2].int().tolist()) for c in range(3))) == [
        ord("l"),
        ord("o"),
        ord("y"),
    ]


def test_a_client_keeps_its_number_in_tasks_where_another_has_nothing() -> None:
    x, y = np.zeros((40, 2), "float32"), np.arange(40) % 2
    site = np.where((y == 1) | (np.arange(40) < 20), "b", "a")  # a has samples of class 0 alone
    stream = streams.from_arrays(
        x, y, x[:8], y[:8], columns={"site": (site, site[:8])}, tasks=2,
        partition={"kind": "column", "column": "site"}, scenario="class-incremental",
    )  # fmt: skip
    assert [[len(stream.data(client, task)) for client in (0, 1)] for task in (0, 1)] == [[10, 10], [0, 20]]


def test_arrays_have_columns_too_and_other_columns_are_another_stream() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 4)).astype("float32"), np.arange(40) % 2
    site, again = np.repeat(["a", "b"], 20), np.tile(["a", "b"], 20)
    parts = {"partition": {"kind": "column", "column": "site"}, "scenario": "class-incremental", "tasks": 1}
    one, other = (
        streams.from_arrays(x, y, x[:8], y[:8], columns={"site": (who, who[:8])}, **parts) for who in (site, again)
    )
    assert one.data(0, 0).ids.tolist() == list(range(20)) and other.data(0, 0).ids.tolist() == list(range(0, 40, 2))
    assert one.identity() != other.identity()
    with pytest.raises(everfed.UserError, match="column 'site' has 39 and 8 entries; expected 40 of the training part"):
        streams.from_arrays(x, y, x[:8], y[:8], columns={"site": (site[:39], site[:8])}, **parts)


# a column of time ----------------------------------------------------------------------------------------------------
def test_a_column_of_time_makes_the_tasks() -> None:
    found = table()
    by_year = {"scenario": "by-column", "column": "year", "partition": {"kind": "column", "column": "site"}}
    stream = made(by_year)
    assert (stream.tasks, stream.clients) == (4, 3)  # 9 comes before 10
    for task in range(4):
        ages = {row["age"] for row in found if row["year"] == 9 + task}
        ours = [stream.data(client, task).x[:, 0].int().tolist() for client in range(3)] + [
            stream.test(task).x[:, 0].int().tolist()
        ]
        assert {age for some in ours for age in some} == ages
    assert stream.describe()["tasks_by_column"][1] == {"first": 10, "last": 10, "values": 1}
    halves = made({**by_year, "tasks": 2})
    assert halves.describe()["tasks_by_column"] == [
        {"first": 9, "last": 10, "values": 2},
        {"first": 11, "last": 12, "values": 2},
    ]
    with pytest.raises(everfed.UserError, match="stream.tasks: 5 is too many; column 'year' has 4 values"):
        made({**by_year, "tasks": 5})
    with pytest.raises(everfed.UserError, match="expected the column that says when a sample came, got None"):
        made({"scenario": "by-column", "partition": {"kind": "column", "column": "site"}})


# a folder of sites ---------------------------------------------------------------------------------------------------
def test_a_folder_of_tables_has_a_client_for_every_file() -> None:
    Path("sites").mkdir()
    for site in ("lund", "oslo", "york"):
        table(f"sites/{site}.csv", site)
    options = {"scenario": "class-incremental", "tasks": 1, "partition": {"kind": "column", "column": "file"}}
    stream = streams.build({"dataset": "sites", **options}, seed=0, rounds_per_task=1)
    assert stream.clients == 3
    assert [doses(stream, client) for client in range(3)] == [{ord("l")}, {ord("o")}, {ord("y")}]
    for path in Path("sites").iterdir():
        path.write_text(path.read_text().replace("label", "outcome"))
    named = streams.build({"dataset": "sites", **options, "label": "outcome"}, seed=0, rounds_per_task=1)
    assert named.clients == 3 and torch.equal(named.data(0, 0).y, stream.data(0, 0).y)
    Path("sites/york.csv").write_text("dose,age,label\n" + "1,2,0\n1,2,1\n1,2,2\n" * 3)
    for site in ("lund", "oslo"):
        table(f"sites/{site}.csv", site)
    with pytest.raises(everfed.UserError, match="york: samples are of dose, age, those of lund of age, dose"):
        streams.build({"dataset": "sites", **options}, seed=0, rounds_per_task=1)


def test_a_folder_of_images_has_a_client_for_every_folder() -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
    for site, grey in (("east", 10), ("west", 200)):
        for label in ("ant", "bee") if site == "west" else ("bee",):  # a site may lack a class
            Path("photos", site, label).mkdir(parents=True)
            for number in range(10):
                image.new("L", (4, 4), grey + number % 2).save(f"photos/{site}/{label}/{number}.png")
    options = {"scenario": "class-incremental", "tasks": 1, "partition": {"kind": "column", "column": "folder"}}
    stream = streams.build({"dataset": "photos", **options}, seed=0, rounds_per_task=1)
    assert stream.clients == 2 and stream.class_names == ("ant", "bee")
    assert stream.data(0, 0).x.max() <= 11 and stream.data(1, 0).x.min() >= 200
    assert set(stream.data(0, 0).y.tolist()) == {1}


# lists of rows, functions --------------------------------------------------------------------------------------------
def test_lists_of_rows_say_who_holds_what() -> None:
    lists = [[5, 3, 8], list(range(20, 60)), [0]]
    Path("parts.json").write_text(json.dumps(lists))
    for given in (lists, "parts.json", [np.array(part) for part in lists]):
        source = {"dataset": "digits", "scenario": "domain-incremental", "tasks": 2}
        stream = streams.build({**source, "partition": {"kind": "indices", "lists": given}}, seed=0, rounds_per_task=1)
        assert stream.clients == 3
        assert [stream.data(client, 0).ids.tolist() for client in range(3)] == [[3, 5, 8], list(range(20, 60)), [0]]
    for wrong, words in (
        ([[1], [1]], "row 1 is in the lists of several clients"),
        ("no.json", "cannot be read as JSON"),
    ):
        with pytest.raises(everfed.UserError, match=words):
            streams.build({**source, "partition": {"kind": "indices", "lists": wrong}}, seed=0, rounds_per_task=1)


def test_a_function_of_ones_own_divides() -> None:
    source = {"dataset": "digits", "scenario": "domain-incremental", "tasks": 2, "clients": 2}
    own = {"kind": "day_partition:odd_and_even", "first": 1}
    stream = streams.build({**source, "partition": own}, seed=0, rounds_per_task=1)
    assert {int(i) % 2 for i in stream.data(0, 0).ids} == {1}
    free = streams.build(
        {**source, "partition": {"kind": "day_partition:any_share", "first": 3}}, seed=0, rounds_per_task=1
    )
    assert len(free.data(1, 0)) - len(free.data(0, 0)) >= 3  # `**options` takes every option, and needs none
    import day_partition  # type: ignore[import-not-found]

    x, y = np.zeros((20, 3), "float32"), np.arange(20) % 2
    direct = streams.from_arrays(
        x, y, x, y, scenario="class-incremental", tasks=1, clients=2, partition={"kind": day_partition.odd_and_even}
    )
    assert {int(i) % 2 for i in direct.data(0, 0).ids} == {0}
    for partition, words in (
        ({"kind": "day_partition:odd_and_even", "frist": 1}, "has no option 'frist'; allowed: first"),
        ({"kind": "day_partition:twice"}, "your function gave position 1 to several clients"),
        ({"kind": "day_partition:none"}, "module 'day_partition' has no 'none'"),
        ({"kind": "irid"}, "unknown kind 'irid'; allowed: .*column, indices, flwr:"),
    ):
        with pytest.raises(everfed.UserError, match=words):
            streams.build({**source, "partition": partition}, seed=0, rounds_per_task=1)


def test_the_function_of_the_documents_divides() -> None:
    (code,) = re.findall(
        r"```python\n(import numpy as np\n\n\ndef divide.*?)```", (ROOT / "docs/streams.md").read_text(), re.S
    )
    Path("my_division.py").write_text(code)
    own = {"kind": "my_division:divide", "share": 0.25}
    options = {"dataset": "digits", "scenario": "domain-incremental", "clients": 4, "partition": own}
    stream = streams.build(options, seed=0, rounds_per_task=1)
    sizes = [len(stream.data(client, 0)) for client in range(4)]
    assert sizes[0] == int(0.25 * sum(sizes)) and max(sizes[1:]) - min(sizes[1:]) <= 1


# a data set for every client -----------------------------------------------------------------------------------------
class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, value: float, count: int) -> None:
        self.value, self.count = value, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), self.value), index % 2


def test_a_list_of_data_sets_has_one_for_every_client() -> None:
    given = {"scenario": "class-incremental", "tasks": 1, "rounds_per_task": 1}
    stream = streams.from_datasets(
        [Numbers(1, 6), Numbers(2, 10), Numbers(3, 4)], [Numbers(9, 4), Numbers(8, 4)], **given
    )
    assert stream.clients == 3
    assert [sorted(set(stream.data(client, 0).x.flatten().tolist())) for client in range(3)] == [[1], [2], [3]]
    assert [len(stream.data(client, 0)) for client in range(3)] == [6, 10, 4]
    assert sorted(set(stream.test(0).x.flatten().tolist())) == [8, 9]
    with pytest.raises(everfed.UserError, match="a list of data sets has one for every client; leave it out"):
        streams.from_datasets([Numbers(1, 6)], Numbers(9, 4), partition={"kind": "iid"}, **given)


# tasks ---------------------------------------------------------------------------------------------------------------
def test_tasks_are_lists_of_classes() -> None:
    order = [[9, 8], [7, 6, 5], [0]]
    stream = streams.build(
        {"dataset": "digits", "scenario": "class-incremental", "class_order": order}, seed=0, rounds_per_task=1
    )
    assert stream.tasks == 3 and [stream.labels(task) for task in range(3)] == [(8, 9), (5, 6, 7), (0,)]
    small = ["--set=stream.max_train=60", "--set=train.rounds_per_task=1", "--set=engine.kind=eager", "--method=fedavg"]
    scenario = ["--set=stream.scenario=class-incremental", "--set=stream.partition={kind='iid'}"]
    Path("d.toml").write_text('[stream]\ndataset = "digits"\nclients = 2\n[method]\nname = "er"')
    assert "3 tasks" in says("run", "d.toml", *scenario, *small, "--set=stream.class_order=[[9,8],[7,6,5],[0]]")
    for keys, words in (
        ({"tasks": 2}, "stream.tasks: class_order has 3 groups, one for every task; got 2: leave it out"),
        ({"class_order": [[1, 2], 3]}, "expected classes, or a list of classes for every task"),
        ({"class_order": [[1, 2], [2]]}, "expected different classes from 0 to 9"),
    ):
        with pytest.raises(everfed.UserError, match=words):
            table_ = {"dataset": "digits", "scenario": "class-incremental", "class_order": order, **keys}
            streams.build(table_, seed=0, rounds_per_task=1)


def test_there_are_as_many_tasks_as_domains() -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra `images` is not installed")
    for domain in ("ink", "oil", "pen"):
        for label in ("ant", "bee"):
            Path("art", domain, label).mkdir(parents=True)
            for number in range(8):
                image.new("RGB", (8, 8), (number, 0, 0)).save(f"art/{domain}/{label}/{number}.png")
    options: dict[str, Any] = {"dataset": "art", "scenario": "multi-domain", "image_size": 8, "clients": 2}
    assert streams.build(options, seed=0, rounds_per_task=1).tasks == 3
    assert streams.build({**options, "domains": ["pen", "ink"]}, seed=0, rounds_per_task=1).tasks == 2
    assert streams.build({**options, "tasks": 1}, seed=0, rounds_per_task=1).tasks == 1


def test_a_column_of_numbers_that_is_called_like_a_client_is_a_feature_with_a_warning() -> None:
    """Only where its numbers are whole, and where it is not the partition's column."""
    rows = [f"{n % 3},{n % 2 + 0.5},{n},{n % 4}" for n in range(120)]
    Path("clinic.csv").write_text("\n".join(["site,user,age,label", *rows]))
    options = {"dataset": "clinic.csv", "scenario": "domain-incremental", "transform": "permute", "clients": 3}
    heard: list[str] = []

    def hear(event: dict[str, Any]) -> None:
        heard.extend([event["message"]] if event["event"] == "warning" else [])

    recipe = {"name": "warned", "model": {"kind": "mlp"}, "engine": {"kind": "eager"}, "method": {"name": "fedavg"}}
    everfed.run({**recipe, "stream": options, "train": {"rounds_per_task": 1}}, observers=[hear], progress=False)
    (said,) = [line for line in heard if "column" in line]
    assert said.startswith("the column 'site' is a feature like all others; if it says whose a sample is, set stream.")
    own = made({**options, "partition": {"kind": "column", "column": "site"}})
    assert own.warnings == () and own.input_shape == (2,)
