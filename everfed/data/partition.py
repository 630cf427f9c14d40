"""Partitions: ways to divide a label column among clients.

Every function is `(labels, clients, rng, **options) -> parts`: `labels` (n,) integers, `parts[k]` the ascending
positions that client k holds. No position is given twice; all but `pathological`, `indices` and a user's own give every
position away. A function with an argument `rows` or `columns` also gets where the labels stand in the training part, or
the columns of the whole training part by name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from everfed.errors import PartitionError, optional_package
from everfed.naming import load_object

Parts = list[np.ndarray]
Divide = Callable[..., Parts]

# a Dirichlet draw that gives a client too few samples is repeated at most so often
DRAWS = 1000
# Populations up to this size are reported client by client, larger ones by their distribution.
DETAIL = 100


def iid(labels: np.ndarray, clients: int, rng: np.random.Generator, *, min_samples: int = 1) -> Parts:
    """Uniformly at random; sizes differ by one at most."""
    _require_whole("min_samples", min_samples, least=0)
    _require_samples(labels, clients, min_samples)
    owner = np.empty(len(labels), np.int64)
    owner[rng.permutation(len(labels))] = _even_owners(np.arange(clients), len(labels))
    return _by_owner(owner, clients)


def shards(labels: np.ndarray, clients: int, rng: np.random.Generator, *, per_client: int = 2) -> Parts:
    """Sort by label, cut `per_client * clients` equal shards, deal `per_client` to each client (FedGP's code).

    Shards straddle class borders, so a client may hold more than `per_client` labels.
    """
    _require_whole("per_client", per_client)
    _require_samples(labels, clients, per_client)
    cuts = np.array_split(np.argsort(labels, kind="stable"), per_client * clients)
    dealt = rng.permutation(len(cuts)).reshape(clients, per_client)
    return [np.sort(np.concatenate([cuts[s] for s in row])) for row in dealt]


def exact_labels(labels: np.ndarray, clients: int, rng: np.random.Generator, *, per_client: int = 2) -> Parts:
    """Exactly `per_client` labels for every client, every label held by equally many clients (or one more)."""
    _require_whole("per_client", per_client)
    classes = np.unique(labels)
    _require_classes("per_client", per_client, classes)
    if clients * per_client < len(classes):
        raise PartitionError(
            f"clients * per_client = {clients * per_client} leaves some of {len(classes)} labels without a client; "
            f"per_client must be at least {-(-len(classes) // clients)}"
        )
    return _share_classes(labels, classes, _even_hands(len(classes), clients, per_client, rng), clients, rng)


def dirichlet(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float,
    balance: bool = False,
    min_samples: int = 1,
) -> Parts:
    """Each class is shared out in proportions p ~ Dir(alpha * 1_K).

    balance: clients that already hold n/K samples get no more of later classes (FedGP's code).
    min_samples: the whole draw is repeated until every client has as many; 0 allows clients without data.
    """
    _require_positive("alpha", alpha)
    _require_bool("balance", balance)
    _require_whole("min_samples", min_samples, least=0)
    _require_samples(labels, clients, min_samples)
    for _ in range(DRAWS):
        owner = _dirichlet_owners(labels, clients, rng, alpha, balance)
        if np.bincount(owner, minlength=clients).min() >= min_samples:
            return _by_owner(owner, clients)
    raise PartitionError(
        f"no Dirichlet draw in {DRAWS} gave each of {clients} clients min_samples = {min_samples} of {len(labels)} "
        f"samples at alpha = {alpha}; raise alpha, lower min_samples (0 allows empty clients) or use fewer clients"
    )


def pathological(labels: np.ndarray, clients: int, rng: np.random.Generator, *, classes_per_client: int) -> Parts:
    """`classes_per_client` classes for every client: class k mod C for client k, the others at random.

    A class is shared evenly by its holders. With fewer clients than classes, a class without a holder is left out.
    """
    _require_whole("classes_per_client", classes_per_client)
    classes = np.unique(labels)
    _require_classes("classes_per_client", classes_per_client, classes)
    rank = rng.random((clients, len(classes)))
    rank[np.arange(clients), np.arange(clients) % len(classes)] = -1.0  # its own class comes first
    held = np.argsort(rank, axis=1)[:, :classes_per_client]
    return _share_classes(labels, classes, held, clients, rng)


def lda(labels: np.ndarray, clients: int, rng: np.random.Generator, *, alpha: float) -> Parts:
    """Equal sizes, skewed labels: every client draws its mix of classes p ~ Dir(alpha * 1_C) and takes from it (MFCL).

    Samples are taken without replacement; a class that is exhausted is left out and the rest of the mix renormalised,
    so that the last clients get what is left. Sizes differ by one at most.
    """
    _require_positive("alpha", alpha)
    _require_samples(labels, clients, 1)
    classes = np.unique(labels)
    piles = [rng.permutation(np.flatnonzero(labels == c)) for c in classes]
    left = np.array([len(pile) for pile in piles])
    parts = []
    for size in np.bincount(_even_owners(np.arange(clients), len(labels)), minlength=clients):
        counts = _from_mix(rng.dirichlet(np.full(len(classes), float(alpha))), left, int(size), rng)
        taken = [pile[n - k : n] for pile, n, k in zip(piles, left, counts, strict=True)]
        left = left - counts
        parts.append(np.sort(np.concatenate(taken)))
    return parts


def by_column(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    column: str,
    rows: np.ndarray,
    columns: Mapping[str, np.ndarray],
) -> Parts:
    """A column of the data names the client: its values in order are clients 0, 1, 2, ..."""
    if column not in columns:
        raise PartitionError(f"there is no column {column!r}; it has {', '.join(columns) or 'none'}")
    values, owner = np.unique(columns[column], return_inverse=True)
    if len(values) != clients:
        raise PartitionError(
            f"column {column!r} has {len(values)} values, one for every client; set stream.clients = {len(values)}, or "
            "leave it out"
        )
    return _by_owner(owner[rows], clients)


def by_lists(
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    lists: Sequence[Sequence[int]] | str,
    rows: np.ndarray,
) -> Parts:
    """Lists of rows of the training part, one for every client, from 0; or a JSON file of such lists."""
    own = index_lists(lists)
    if len(own) != clients:
        raise PartitionError(
            f"{len(own)} lists for {clients} clients; set stream.clients to {len(own)}, or leave it out"
        )
    return [np.flatnonzero(np.isin(rows, mine)) for mine in own]


def index_lists(lists: Any) -> list[np.ndarray]:
    """Rows by client. Raises PartitionError for anything else, and for a row that several clients have."""
    if isinstance(lists, str | Path):
        try:
            lists = json.loads(Path(lists).expanduser().read_text())
        except (OSError, ValueError) as problem:
            raise PartitionError(f"lists = {str(lists)!r} cannot be read as JSON: {problem}") from problem
    try:
        own = [np.asarray(mine, dtype=np.int64).reshape(-1) for mine in lists]
    except (TypeError, ValueError) as problem:
        raise PartitionError(f"lists must hold a list of row numbers for every client: {problem}") from problem
    every = np.concatenate([*own, np.zeros(0, np.int64)])
    found, times = np.unique(every, return_counts=True)
    if len(found) == 0 or found[0] < 0:
        raise PartitionError("lists must hold a list of row numbers from 0 for every client")
    if times.max() > 1:
        raise PartitionError(f"row {found[times.argmax()]} is in the lists of several clients")
    return own


KINDS: Mapping[str, Divide] = {
    "iid": iid,
    "shards": shards,
    "exact-labels": exact_labels,
    "dirichlet": dirichlet,
    "lda": lda,
    "pathological": pathological,
    "column": by_column,
    "indices": by_lists,
}
FLWR_PREFIX = "flwr:"
LABEL = "label"  # what flwr-datasets calls the labels


def partition(
    kind: str | Divide,
    labels: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    rows: np.ndarray | None = None,
    columns: Mapping[str, np.ndarray] | None = None,
    **options: Any,
) -> Parts:
    """The partition `kind` names, with its own options; `flwr:Name` is a partitioner of flwr-datasets, and
    `package.module:name` a function of a user's own. rows: where the labels stand in the training part. columns: of the
    whole training part."""
    _require_whole("clients", clients)
    if len(labels) == 0:
        raise PartitionError(f"there is no sample to divide among {clients} clients")
    given: dict[str, Any] = {"rows": np.arange(len(labels)) if rows is None else rows, "columns": columns or {}}
    if isinstance(kind, str) and kind.startswith(FLWR_PREFIX):
        return flwr_partition(kind.removeprefix(FLWR_PREFIX), labels, clients, rng, **given, **options)
    check_options(kind, options)
    divide = _function(kind)
    wanted = {key: value for key, value in given.items() if key in inspect.signature(divide).parameters}
    parts = divide(labels, clients, rng, **wanted, **options)
    return parts if kind in KINDS else _checked(parts, len(labels), clients)


def _function(kind: str | Divide) -> Divide:
    if isinstance(kind, str) and kind not in KINDS:
        kind = load_object(kind, "stream.partition.kind")
    if isinstance(kind, str):
        return KINDS[kind]
    if not callable(kind):
        raise PartitionError(f"a partition of your own is a function of labels, clients and rng, not {kind!r}")
    return kind


def _checked(parts: Any, count: int, clients: int) -> Parts:
    """What a user's own function gave. Raises PartitionError where it is no partition."""
    try:
        own = [np.sort(np.asarray(part, dtype=np.int64).reshape(-1)) for part in parts]
    except (TypeError, ValueError) as problem:
        raise PartitionError(f"your function must give a list of positions for every client: {problem}") from problem
    if len(own) != clients:
        raise PartitionError(f"your function gave {len(own)} lists of positions for {clients} clients")
    every = np.concatenate(own)
    if len(every) and not 0 <= every.min() <= every.max() < count:
        raise PartitionError(f"your function gave position {every.max()} of {count} samples; they count from 0")
    found, times = np.unique(every, return_counts=True)
    if len(found) and times.max() > 1:
        raise PartitionError(f"your function gave position {found[times.argmax()]} to several clients")
    return own


def check_options(kind: str | Divide, options: Mapping[str, Any]) -> None:
    """Raises PartitionError for an unknown kind, an unknown option or a missing one; needs no labels."""
    if isinstance(kind, str) and kind.startswith(FLWR_PREFIX):
        return  # its options are checked against the partitioner's own signature
    if isinstance(kind, str) and kind not in KINDS and ":" not in kind:
        raise PartitionError(
            f"unknown kind {kind!r}; allowed: {', '.join(KINDS)}, {FLWR_PREFIX}<PartitionerName>, package.module:name"
        )
    accepted = option_names(kind)
    unknown = sorted(set(options) - set(accepted))
    if unknown and not _takes_any(kind):
        raise PartitionError(f"{kind!r} has no option {unknown[0]!r}; allowed: {', '.join(accepted)}")
    missing = [name for name, required in accepted.items() if required and name not in options]
    if missing:
        raise PartitionError(f"{kind!r} needs the option {missing[0]!r}")


def option_names(kind: str | Divide) -> dict[str, bool]:
    """The options of a kind, each with whether it must be given: the arguments after labels, clients and rng."""
    parameters = list(inspect.signature(_function(kind)).parameters.values())[3:]
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ("rows", "columns")]
    return {p.name: p.default is p.empty for p in named}


def _takes_any(kind: str | Divide) -> bool:
    """Does a function take options by any name, `**options`?"""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(_function(kind)).parameters.values())


def columns_of(options: Mapping[str, Any]) -> set[str]:
    """The columns of the data that a partition needs."""
    named = {options[key] for key in ("column", "partition_by") if isinstance(options.get(key), str)}
    return named - {LABEL}


def natural_clients(options: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> int | None:
    """How many clients there are by the data or the lists; None where a partition makes as many as it is asked to."""
    kind = options["kind"]
    if kind == "indices":
        return len(index_lists(options["lists"]))
    key = {"column": "column", f"{FLWR_PREFIX}NaturalIdPartitioner": "partition_by"}.get(kind, "")
    named = str(options.get(key))
    return len(np.unique(columns[named])) if named in columns else None


def who_got_what(labels: np.ndarray, parts: Sequence[np.ndarray]) -> dict[str, Any]:
    """A JSON-ready report: samples and classes per client; client by client up to `DETAIL` clients.

    `hash` identifies the division: two runs with the same hash used the same one.
    """
    classes, column = np.unique(labels, return_inverse=True)
    counts = _counts(column, parts, len(classes))
    sizes = counts.sum(axis=1)
    report: dict[str, Any] = {
        "clients": len(parts),
        "samples": int(sizes.sum()),
        "unassigned": len(labels) - int(sizes.sum()),
        "samples_per_client": {
            "min": int(sizes.min()),
            "median": float(np.median(sizes)),
            "mean": float(sizes.mean()),
            "max": int(sizes.max()),
        },
        "clients_without_data": int((sizes == 0).sum()),
        "clients_by_number_of_classes": _histogram((counts > 0).sum(axis=1)),
        "labels": classes.tolist(),
        "samples_per_class": counts.sum(axis=0).tolist(),
        "hash": _fingerprint(parts, len(labels)),
    }
    if len(parts) <= DETAIL:
        report["table"] = counts.tolist()  # rows are clients, columns are `labels`
    return report


def _counts(column: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """(clients, classes) samples held."""
    owner = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    held = column[np.concatenate(parts)]
    return np.bincount(owner * classes + held, minlength=len(parts) * classes).reshape(len(parts), classes)


def _histogram(values: np.ndarray) -> dict[str, int]:
    found, times = np.unique(values, return_counts=True)
    return {str(v): int(t) for v, t in zip(found, times, strict=True)}


def _fingerprint(parts: Sequence[np.ndarray], samples: int) -> str:
    owner = np.full(samples, -1, dtype="<i8")
    owner[np.concatenate(parts)] = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    return hashlib.sha256(owner.tobytes()).hexdigest()[:16]


def _by_owner(owner: np.ndarray, clients: int) -> Parts:
    """Positions grouped by owner, ascending within each; owner -1: none."""
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[a:b] for a, b in pairwise(ends)]


def _even_owners(holders: np.ndarray, count: int) -> np.ndarray:
    """(count,) owners: `holders` in runs whose lengths differ by one at most, the longer runs first."""
    size, extra = divmod(count, len(holders))
    return np.repeat(holders, size + (np.arange(len(holders)) < extra))


def _dirichlet_owners(
    labels: np.ndarray, clients: int, rng: np.random.Generator, alpha: float, balance: bool
) -> np.ndarray:
    """One draw: the owner of every sample."""
    owner = np.empty(len(labels), np.int64)
    held = np.zeros(clients, np.int64)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        p = rng.dirichlet(np.full(clients, float(alpha)))
        if balance:
            p = _only_open(p, held * clients < len(labels))
        # Divided by its own last entry, the sum ends at 1 exactly: a closed last client gets no rounding remainder.
        sums = np.cumsum(p)
        share = np.diff((sums / sums[-1] * len(members)).astype(np.int64), prepend=0)
        owner[members] = np.repeat(np.arange(clients), share)
        held += share
    return owner


def _from_mix(p: np.ndarray, left: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """(classes,) how many samples of each class a client with mix p takes, `size` together, no more than are left."""
    counts = np.zeros_like(left)
    while counts.sum() < size:
        draw = rng.multinomial(size - counts.sum(), _only_open(p, counts < left))
        counts = np.minimum(counts + draw, left)
    return counts


def _only_open(p: np.ndarray, is_open: np.ndarray) -> np.ndarray:
    """Proportions with nothing for closed clients; at least one is open while samples remain."""
    p = np.where(is_open, p, 0.0)
    # at a tiny alpha closed clients can have all of the mass: the open ones then share evenly
    return p / p.sum() if p.sum() > 0 else is_open / is_open.sum()


def _even_hands(classes: int, clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """(clients, per_client) distinct classes per row, every class dealt equally often (or once more).

    Taking the classes with most cards left never runs into a hand that cannot be completed.
    """
    cards = np.full(classes, clients * per_client // classes)
    cards[rng.permutation(classes)[: clients * per_client % classes]] += 1
    hands = np.empty((clients, per_client), np.int64)
    for row in hands:
        row[:] = np.argsort(-(cards + rng.random(classes)))[:per_client]
        cards[row] -= 1
    return rng.permutation(hands)


def _share_classes(
    labels: np.ndarray, classes: np.ndarray, held: np.ndarray, clients: int, rng: np.random.Generator
) -> Parts:
    """Share every class evenly among the clients whose row of `held` (indices into `classes`) names it."""
    owner = np.full(len(labels), -1, np.int64)
    for index, c in enumerate(classes):
        members = rng.permutation(np.flatnonzero(labels == c))
        holders = np.flatnonzero((held == index).any(axis=1))
        if len(holders) > len(members):
            raise PartitionError(
                f"label {c} has {len(members)} samples for {len(holders)} clients; use fewer clients or fewer "
                "labels per client"
            )
        if len(holders):
            owner[members] = _even_owners(holders, len(members))
    return _by_owner(owner, clients)


def _require_whole(option: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise PartitionError(f"{option} must be a whole number of at least {least}, got {value!r}")


def _require_positive(option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise PartitionError(f"{option} must be a positive number, got {value!r}")


def _require_bool(option: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise PartitionError(f"{option} must be true or false, got {value!r}")


def _require_samples(labels: np.ndarray, clients: int, each: int) -> None:
    if len(labels) < clients * each:
        raise PartitionError(
            f"{len(labels)} samples are too few for {clients} clients with at least {each} each; "
            f"allowed: at most {len(labels) // each} clients"
        )


def _require_classes(option: str, value: int, classes: np.ndarray) -> None:
    if value > len(classes):
        raise PartitionError(f"{option} = {value} but there are only {len(classes)} classes to hold")


# partitioners of flwr-datasets ---------------------------------------------------------------------------------------
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
    names = ("datasets", "flwr_datasets.partitioner")
    datasets, partitioners = (optional_package(one, "hub", "a flwr: partition", PartitionError) for one in names)
    build = _partitioner_class(partitioners, name)
    partitioner = _construct(build, name, clients, int(rng.integers(2**31)), options)
    own = {LABEL: np.asarray(labels, dtype=np.int64), POSITION: np.arange(len(labels))}
    partitioner.dataset = datasets.Dataset.from_dict({**{key: of[rows] for key, of in columns.items()}, **own})
    return _positions(partitioner, name, clients)


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
