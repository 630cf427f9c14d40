"""The leaderboard's records: one JSON file for a method on a stream, with its tries, the best of them and its tests.

A record is all that the page needs, and all that a later sitting needs to go on: what stands in it is not run again.
Processes that share a folder add to the same records; an addition never removes what another one wrote.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.store.files import Locked, locked, make_folder, write_atomic

FOLDER = Path("results") / "leaderboard"
Record = dict[str, Any]
_NEEDED = ("stream", "method", "recipe_hash", "tries", "tests")
SCORES = ("acc", "forgetting", "learning_accuracy")


def place(root: Path, stream: str, method: str) -> Path:
    return root / stream / f"{method}.json"


def read(path: Path) -> Record:
    """One record. Raises UserError for a file that is none."""
    try:
        record: Record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no record of the leaderboard: {error}") from error
    missing = [key for key in _NEEDED if not isinstance(record, dict) or key not in record]
    if missing:
        raise UserError(f"{path} is no record of the leaderboard: it has no {', '.join(missing)}")
    return record


def read_all(root: Path) -> list[Record]:
    """Every record below `root`, by stream and method."""
    return [read(path) for path in sorted(root.glob("*/*.json"))]


def opened(root: Path, stream: str, method: str, recipe_hash: str) -> Record:
    """The record of a method on a stream, empty where there is none. Raises UserError where it belongs to another
    recipe: numbers of two recipes must not stand in one table."""
    path = place(root, stream, method)
    if not path.exists():
        return {"stream": stream, "method": method, "recipe_hash": recipe_hash, "tries": [], "tests": []}
    record = read(path)
    if record["recipe_hash"] != recipe_hash:
        raise UserError(
            f"{path} was made with another version of the recipe leaderboard/{stream}; remove it, or choose other "
            "--records"
        )
    return record


def add(root: Path, recipe_hash: str, stream: str, method: str, kind: str, entry: Mapping[str, Any]) -> Record:
    """Put a try or a test (kind: "tries" or "tests") into its record; one that is there already stays, unless it is a
    test of another try than the best one."""
    path = place(root, stream, method)
    make_folder(path.parent)
    with _turn(path):
        record = opened(root, stream, method, recipe_hash)
        record["tests"] = tests_of_best(record)
        if _key(kind, entry) not in {_key(kind, known) for known in record[kind]}:
            record[kind] = sorted([*record[kind], dict(entry)], key=lambda known: _key(kind, known))
        write_atomic(path, _text(record).encode(), shared=True)
    return record


def forget_failures(root: Path, streams: Iterable[str], methods: Iterable[str]) -> None:
    """Remove failed tries and tests from the records. Tests stay, and count as long as their try is the best."""
    wanted = {place(root, stream, method) for stream in streams for method in methods}
    for path in sorted(path for path in wanted if path.exists()):
        with _turn(path):
            record = read(path)
            best = best_try(record)
            known = {} if best is None else {"try": best["number"]}  # older records do not name it
            kept = {
                "tries": [entry for entry in record["tries"] if not entry["problem"]],
                "tests": [{**known, **entry} for entry in finished_tests(record)],
            }
            write_atomic(path, _text({**record, **kept}).encode(), shared=True)


def best_try(record: Record) -> Mapping[str, Any] | None:
    """The try with the highest accuracy on validation data, the first of equals; None where none finished."""
    finished = [entry for entry in record["tries"] if entry["acc"] is not None]
    return max(finished, key=lambda entry: entry["acc"], default=None)


def tests_of_best(record: Record) -> list[Mapping[str, Any]]:
    """The tests of the try that is the best now; those of another one are out of date."""
    best = best_try(record)
    return [entry for entry in record["tests"] if best is None or entry.get("try", best["number"]) == best["number"]]


def finished_tests(record: Record) -> list[Mapping[str, Any]]:
    return [entry for entry in tests_of_best(record) if not entry["problem"]]


def mean(record: Record, key: str) -> float | None:
    """Of the finished tests; None where there is none, or where one has no such number."""
    values = [entry.get(key) for entry in finished_tests(record)]
    return statistics.fmean(values) if values and None not in values else None  # type: ignore[arg-type]


def deviation(record: Record, key: str) -> float:
    """Population deviation over the seeds."""
    return statistics.pstdev([entry[key] for entry in finished_tests(record)])


def problem(record: Record) -> str:
    """Why a method has no number on a stream; empty where it has one. The reason of most of its tests, or of most of
    its tries where none of them finished."""
    if finished_tests(record):
        return ""
    failed = tests_of_best(record) or ([] if best_try(record) else record["tries"])
    reasons = [entry["problem"] for entry in failed if entry["problem"]]
    return statistics.mode(reasons) if reasons else f"not tested yet; tries so far: {len(record['tries'])}"


def measured(result: Mapping[str, Any] | None, failed: str, samples: float | None) -> dict[str, Any]:
    """The numbers of a run that a record keeps. failed: why there is no result. samples: that a client keeps."""
    if result is None:
        return {"acc": None, "problem": failed}
    cost, clients = result["cost"], result["stream"]["clients"]
    return {
        **{key: result["metrics"].get(key) for key in SCORES},
        **{key: cost[key] for key in ("seconds", "bytes_up", "bytes_down")},
        "kept_bytes": cost["client_state_bytes"] / clients,
        "kept_samples": samples,
        "evaluated": result["evaluated"],
        "everfed": result["everfed"],
        "environment": result["environment"],
        "problem": "",
    }


def _key(kind: str, entry: Mapping[str, Any]) -> Any:
    return entry["seed"] if kind == "tests" else entry["number"]


def _text(record: Record) -> str:
    """One line for every try and every test."""
    lists: Callable[[str], str] = lambda key: ",\n".join(f"    {json.dumps(entry)}" for entry in record[key])  # noqa: E731
    facts = "".join(f"  {json.dumps(key)}: {json.dumps(record[key])},\n" for key in ("stream", "method", "recipe_hash"))
    return f'{{\n{facts}  "tries": [\n{lists("tries")}\n  ],\n  "tests": [\n{lists("tests")}\n  ]\n}}\n'


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for the lock beside a record; it is removed again."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        try:
            with locked(lock):
                yield
                lock.unlink()
                return
        except Locked:
            time.sleep(0.02)
