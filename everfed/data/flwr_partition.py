"""Any partitioner of flwr-datasets, by name, as a partition of a label column."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from everfed.data.errors import PartitionError
from everfed.data.partition import LABEL

POSITION = "position"


def flwr_partition(
    name: str,
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    rows: np.ndarray,
    columns: Mapping[str, np.ndarray],
    **options: Any,
) -> list[np.ndarray]:
    """What `flwr_datasets.partitioner.<name>` gives each of `clients`; `options` are its own. It sees the columns of
    the data at `rows`, beside the labels.

    The number of clients, the label column and the seed are filled in where the partitioner takes them.
    """
    datasets, partitioners = _packages()
    build = _partitioner_class(partitioners, name)
    partitioner = _construct(build, name, clients, int(rng.integers(2**31)), options)
    own = {LABEL: np.asarray(labels, dtype=np.int64), POSITION: np.arange(len(labels))}
    partitioner.dataset = datasets.Dataset.from_dict({**{key: of[rows] for key, of in columns.items()}, **own})
    return _positions(partitioner, name, clients)


def _packages() -> tuple[Any, Any]:
    try:
        import datasets
        import flwr_datasets.partitioner as partitioners
    except ImportError as missing:
        raise PartitionError(
            "a flwr: partition needs the package flwr-datasets; install it with: pip install 'everfed[hub]'"
        ) from missing
    return datasets, partitioners


def _partitioner_class(partitioners: Any, name: str) -> Callable[..., Any]:
    names = [n for n in dir(partitioners) if n.endswith("Partitioner") and n != "Partitioner"]
    names = [n for n in names if not n.startswith("Vertical")]  # those divide columns, not samples
    if name not in names:
        raise PartitionError(f"flwr-datasets has no sample partitioner {name!r}; allowed: {', '.join(names)}")
    build: Callable[..., Any] = getattr(partitioners, name)
    return build


def _construct(build: Callable[..., Any], name: str, clients: int, seed: int, options: dict[str, Any]) -> Any:
    accepted = [p for p in inspect.signature(build).parameters if p != "self"]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise PartitionError(f"{name} has no option {unknown[0]!r}; allowed: {', '.join(accepted)}")
    ours = {"num_partitions": clients, "partition_by": LABEL, "seed": seed}
    try:
        return build(**{k: v for k, v in ours.items() if k in accepted} | options)
    except (TypeError, ValueError) as problem:
        raise PartitionError(f"{name} refused its options: {problem}") from problem


def _positions(partitioner: Any, name: str, clients: int) -> list[np.ndarray]:
    try:
        if partitioner.num_partitions != clients:
            raise PartitionError(f"{name} makes {partitioner.num_partitions} partitions for {clients} clients")
        parts = [partitioner.load_partition(k)[POSITION][:] for k in range(clients)]
    except PartitionError:
        raise
    except (TypeError, ValueError) as problem:
        raise PartitionError(f"{name} cannot divide these labels: {problem}") from problem
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]
