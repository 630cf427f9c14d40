"""Streams: what each client sees over time. `build` makes one from a recipe, `from_arrays` from arrays,
`from_datasets` from data sets of torch or Hugging Face, `from_function` from a function that yields periods of data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.stream import Stream
from everfed.data.lazy import Joined, is_several, lazy_source
from everfed.data.partition import FLWR_PREFIX, KINDS, columns_of, natural_clients
from everfed.data.source import Columns, Source, make_source
from everfed.data.sources import TextOptions, data_folder, load
from everfed.data.tables import FILE, numbers_or_words
from everfed.data.tables import SUFFIXES as TABLES
from everfed.data.targets import CLASSES
from everfed.naming import load_object
from everfed.streams.domain_incremental import TRANSFORMS
from everfed.streams.incremental import IncrementalStream
from everfed.streams.options import OptionError, Options, require_choice, require_whole
from everfed.streams.own import MakeStream, Own, Period
from everfed.streams.planned import PlannedStream
from everfed.streams.withdrawal import without_samples

__all__ = [
    "PARTITIONS",
    "SCENARIOS",
    "TRANSFORMS",
    "OptionError",
    "Options",
    "Period",
    "build",
    "from_arrays",
    "from_datasets",
    "from_function",
]

CLIENT = "client"  # the column of a list of data sets, one for every client

# name -> where its class lies, imported when it is asked for, and a line for `everfed list streams`
SCENARIOS: dict[str, tuple[str, str]] = {
    "domain-incremental": (
        "domain_incremental:DomainIncremental",
        "the same classes in every task, seen through another rotation or pixel permutation",
    ),
    "class-incremental": (
        "class_incremental:ClassIncremental",
        "new classes in every task; a test sample may be of any class",
    ),
    "task-incremental": (
        "class_incremental:TaskIncremental",
        "new classes in every task; the task of a test sample is known",
    ),
    "blurry": (
        "blurry:Blurry",
        "classes overlap between tasks without boundaries (i-Blurry, Si-Blurry)",
    ),
    "multi-domain": (
        "multi_domain:MultiDomain",
        "the same classes in every task, from another data set or domain each time",
    ),
    "by-column": (
        "by_column:ByColumn",
        "a column of the data says when a sample came: a task is one of its values, or a stretch of them",
    ),
    "task-pool": (
        "task_pool:TaskPool",
        "every client draws tasks of its own from all classes; scored on each client's own tests",
    ),
    "periods": (
        "periods:Periods",
        "users' utterances over periods of time; masked language modelling, scored by perplexity",
    ),
    "driving": (
        "driving:Driving",
        "vehicles that detect what is on the road, some of which move to another place; scored by mAP",
    ),
    "language": (
        "language:Language",
        "texts and instructions of every client for a causal language model, scored by perplexity on each client's own",
    ),
    "own": (
        "own:Own",
        "periods that a function of your own yields for every client; scored on each client's own tests",
    ),
}
PARTITIONS: Mapping[str, str] = {
    **{name: (divide.__doc__ or "").splitlines()[0] for name, divide in KINDS.items()},
    "package.module:name": "A function of your own: (labels, clients, rng, **options) to a list of positions a client.",
    f"{FLWR_PREFIX}<PartitionerName>": "Any sample partitioner of flwr-datasets, with its own options.",
}


def class_of(scenario: str) -> type[Any]:
    """The class of a scenario, or one of the user's own, `package.module:Name`. Raises OptionError."""
    if ":" in scenario:
        found = load_object(scenario, "stream.scenario")
        if not isinstance(found, type) or not issubclass(found, Stream):
            raise OptionError("scenario", f"{scenario} is no class derived from everfed.method.Stream")
        return found
    module, _, name = SCENARIOS[scenario][0].partition(":")
    kind: type[PlannedStream] = getattr(import_module(f"everfed.streams.{module}"), name)
    return kind


def build(
    options: Mapping[str, Any],
    seed: int,
    rounds_per_task: int,
    data_dir: str | Path | None = None,
    scale: float = 1.0,
) -> Stream:
    """The stream of a recipe's [stream] table.

    Keys: dataset, scenario, seed (the stream's own; default `seed`), those of `Options`, and the scenario's own:
    transform (domain-incremental), class_order (class- and task-incremental), those of `Blurry`, domains
    (multi-domain), classes_per_task, sample_split and class_overlap_within_step (task-pool), those of `Periods`,
    `Driving`, `Language` and `Own`. The
    table `withdrawn` leaves training samples out (`withdrawal.py`). A scenario `package.module:Name` is a class of the
    user's own, made from the table's other keys. Raises OptionError for keys and values that are not allowed,
    DataError for a missing data set. The division of the data among clients is drawn here.
    """
    table = dict(options)
    if withdrawn := table.pop("withdrawn", None):
        if not isinstance(withdrawn, Mapping):
            raise OptionError("withdrawn", f"must be a table with clients, classes or samples; got {withdrawn!r}")
        return without_samples(build(table, seed, rounds_per_task, data_dir, scale), withdrawn)
    if not isinstance(table.get("dataset"), (str, Path)) or not str(table["dataset"]):
        raise OptionError("dataset", f"expected the name or path of a data set, got {table.get('dataset')!r}")
    dataset = table.pop("dataset")
    scenario = str(table.get("scenario", ""))
    if ":" in scenario and not issubclass(class_of(scenario), PlannedStream):
        given = {"dataset": dataset, "data_dir": data_dir, "rounds_per_task": rounds_per_task, "scale": scale}
        del table["scenario"]
        return _own_class(scenario, {**given, "seed": seed}, table)
    kind, common, own = _split_options(table)
    seed = own.pop("seed", seed)
    aside = columns_of(common.partition) | columns_of(own)
    # a scenario may need more than one set
    read: Callable[..., Any] = getattr(kind, "read", partial(_read, common, aside))
    source = read(dataset, data_dir)
    common = _by_the_data(kind, source, common, own, table)
    return _make(kind, source, common, seed=seed, rounds_per_task=rounds_per_task, scale=scale, **own)


def _by_the_data(
    kind: type[PlannedStream], source: Any, common: Options, own: Mapping[str, Any], given: Mapping[str, Any]
) -> Options:
    """The options with as many clients and tasks as the data has, where nothing is said."""
    columns = {key: train for key, (train, _) in getattr(source, "columns", {}).items()}
    clients = natural_clients(common.partition, columns) if "clients" not in given else None
    count: Callable[..., int | None] | None = getattr(kind, "natural_tasks", None)
    tasks = count(source, **own) if count is not None and "tasks" not in given else None
    clients, tasks = clients or common.clients, tasks or common.tasks
    return replace(common, clients=clients, tasks=tasks)


def _own_class(name: str, given: dict[str, Any], table: Mapping[str, Any]) -> Stream:
    """A stream of the user's own class, made from the keys of its table; of what else is `given`, what it takes."""
    kind: Callable[..., Stream] = class_of(name)
    parameters = inspect.signature(kind).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in table:
            if key not in parameters:
                allowed = ", ".join(sorted({"scenario", *parameters}))
                raise OptionError(key, f"is not an argument of {name}; it has {allowed}")
        given = {key: value for key, value in given.items() if key in parameters}
    try:
        return kind(**{**given, **table})
    except TypeError as problem:
        raise OptionError("scenario", f"{name} cannot be made from its keys: {problem}") from problem


def _read(common: Options, aside: Collection[str], dataset: str | Path, data_dir: str | Path | None) -> Source:
    texts = TextOptions(common.encoder, common.max_train, common.max_test)
    tables = Path(dataset).suffix in TABLES or FILE in aside
    if common.label is not None and not tables:
        raise OptionError("label", f"names a column of a table ({', '.join(TABLES)}); {dataset} is none, leave it out")
    source = load(
        dataset,
        data_dir,
        texts,
        image_size=common.image_size,
        label=common.label,
        label_kind=common.label_kind,
        aside=aside,
    )
    if common.encoder is None or source.encoder:
        return source
    from everfed.data.encoders import encoded_images, is_of_texts, make_image_encoder

    if is_of_texts(common.encoder):
        raise OptionError("encoder", f"{source.name} has no texts; leave it out")
    if source.x_train.dtype != torch.uint8:
        raise OptionError("encoder", f"{source.name} has neither texts nor images; leave it out")
    source = source.thinned(common.max_train, common.max_test)
    return encoded_images(source, make_image_encoder(common.encoder, data_folder(data_dir)))


def from_arrays(
    x_train: np.ndarray | Tensor,
    y_train: np.ndarray | Tensor,
    x_test: np.ndarray | Tensor,
    y_test: np.ndarray | Tensor,
    *,
    scenario: str,
    seed: int = 0,
    rounds_per_task: int = 20,
    scale: float = 1.0,
    name: str = "arrays",
    classes: int | None = None,
    columns: Mapping[str, tuple[Any, Any]] | None = None,
    **options: Any,
) -> Stream:
    """A stream of a user's own arrays: images or features x (n, ...) and targets y: classes (n,), whole numbers or
    words; several labels a sample (n, labels), 0 or 1; or numbers for regression, floats (n,) or (n, targets).

    columns: what says whose a sample is, or when it came, for partition = {"kind": "column", "column": "site"} and
    scenario="by-column": {"site": (of the training samples, of the test samples)}. `options` are those of `build`.
    Labels count from 0; `classes` is needed when some class has no sample.
    """
    kind, common, own = _split_options({"scenario": scenario, **options})
    arrays = (x_train, y_train, x_test, y_test)
    label_kind = common.label_kind
    more: dict[str, Any] = {"classes": classes, "label_kind": label_kind, "columns": _columns(columns)}
    source = make_source(name, *arrays, origin="arrays in memory", **more)
    common = _by_the_data(kind, source, common, own, options)
    return _make(kind, source, common, seed=seed, rounds_per_task=rounds_per_task, scale=scale, **own)


def _columns(columns: Mapping[str, tuple[Any, Any]] | None) -> Columns:
    found = {}
    for name, parts in (columns or {}).items():
        if not isinstance(parts, tuple | list) or len(parts) != 2:
            raise OptionError(
                "columns", f"{name!r}: expected (values of the training samples, values of the test samples)"
            )
        found[name] = (numbers_or_words(np.asarray(parts[0])), numbers_or_words(np.asarray(parts[1])))
    return found


def from_datasets(
    train: Any,
    test: Any,
    *,
    scenario: str,
    seed: int = 0,
    rounds_per_task: int = 20,
    scale: float = 1.0,
    name: str = "datasets",
    targets: tuple[Any, Any] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
    cache: str | Path | None = None,
    workers: int = 4,
    columns: Mapping[str, tuple[Any, Any]] | None = None,
    **options: Any,
) -> Stream:
    """A stream of two data sets of torch (`dataset[i]` gives a sample and its label) or of Hugging Face, as they are.
    train: also a list with one data set for every client; test: also a list of data sets. columns: as in `from_arrays`.

    A sample is decoded when a client first sees it, by `workers` threads, brought to `image_size` and `channels`, and
    lies from then on in a memory-mapped file: in the folder `cache`, where later runs find it, or in a temporary one.
    targets: the labels of both sets, of any kind that `from_arrays` takes, where reading them from the sets would
    decode every sample. `options` are those of `build`; random transforms belong into `augment`, since a set's own
    would be drawn only once.
    """
    kind, common, own = _split_options({"scenario": scenario, **options})
    if not issubclass(kind, IncrementalStream) or scenario == "multi-domain":
        raise OptionError("scenario", f"{scenario} is not made from two data sets; use another scenario")
    require_whole("workers", workers, least=0)
    known = dict(_columns(columns))
    if is_several(train):
        if "partition" in options:
            raise OptionError("partition", "a list of data sets has one for every client; leave it out")
        train, test = Joined(train), Joined(test) if is_several(test) else test
        same = isinstance(test, Joined) and len(test.datasets) == len(train.datasets)
        known[CLIENT] = (train.places(), test.places() if same else np.full(len(test), -1))
        options = {**options, "partition": {"kind": "column", "column": CLIENT}}
        common = replace(common, partition=options["partition"])
    source = lazy_source(
        train,
        test,
        name=name,
        targets=targets,
        classes=classes,
        class_names=class_names,
        cache=cache,
        workers=workers,
        label_kind=common.label_kind,
    )
    source = replace(source, columns=known)
    common = _by_the_data(kind, source, common, own, options)
    return _make(kind, source, common, seed=seed, rounds_per_task=rounds_per_task, scale=scale, **own)


def from_function(
    make: MakeStream, *, classes: int, seed: int = 0, rounds_per_task: int = 20, scale: float = 1.0, **options: Any
) -> Stream:
    """A stream of periods that a user's own function yields for every client (`everfed.streams.feed`).

    classes: as many as may ever appear; the number of labels or targets with label_kind = "multi-label" or
    "regression". `options` are those of `build` for scenario "own".
    """
    _, common, own = _split_options({"scenario": Own.scenario, "classes": classes, **options})
    return Own(make, common, seed=seed, rounds_per_task=rounds_per_task, scale=scale, **own)


def _make(kind: type[PlannedStream], source: Any, common: Options, **settings: Any) -> Stream:
    """The stream; raises OptionError for a scenario that divides classes where samples have none of their own."""
    targets = getattr(source, "targets", None)  # only data sets have kinds of targets
    if targets is not None and common.label_kind not in (None, targets):
        raise OptionError("label_kind", f"{source.name} has {targets} targets, not {common.label_kind}; leave it out")
    if targets not in (None, CLASSES) and issubclass(kind, IncrementalStream) and not kind.any_targets:
        kinds = {name: class_of(name) for name in SCENARIOS}
        able = [name for name, one in kinds.items() if issubclass(one, IncrementalStream) and one.any_targets]
        raise OptionError(
            "scenario",
            f"{kind.scenario} divides single classes among tasks, and {source.name} has {targets} targets; allowed: "
            f"{', '.join(able)}",
        )
    make: Callable[..., Stream] = kind  # the type of its first argument differs by scenario
    return make(source, common, **settings)


def _split_options(table: Mapping[str, Any]) -> tuple[type[PlannedStream], Options, dict[str, Any]]:
    """(scenario class, shared options, the rest), with unknown keys refused."""
    rest = dict(table)
    scenario = rest.pop("scenario", None)
    if ":" not in str(scenario):
        require_choice("scenario", scenario, SCENARIOS)
    kind = class_of(scenario)
    shared, own = {f.name for f in fields(Options)}, {*_own_keys(kind), "seed"}
    for key in rest:
        if key not in shared | own:
            allowed = ", ".join(sorted({"dataset", "scenario"} | shared | own))
            raise OptionError(key, f"is not a key of the {scenario} stream; allowed: {allowed}")
    common = Options(**{k: v for k, v in rest.items() if k in shared})
    return kind, common, {k: v for k, v in rest.items() if k in own}


def _own_keys(kind: type[PlannedStream]) -> list[str]:
    """The keys that only this scenario has: its constructor's keyword arguments."""
    parameters = inspect.signature(kind).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
