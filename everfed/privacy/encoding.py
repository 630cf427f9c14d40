"""Replies as vectors of whole numbers that can be added under masks, and back.

Two vectors: `narrow` holds the float32 (and smaller) tensors, clipped to [-clip, clip] and rounded to multiples of
2 clip / 2^bits, modulo 2^32, or 2^64 where weights or many clients ask for it; `wide` holds, modulo 2^64, all that must
be exact or has no bound known ahead: integers, float64, plain numbers, weights and counts. Absent values are zeros with
weight 0, so that the server does not learn which clients sent none.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.client import Reply

FINE = 1 << 16  # steps to the unit of numbers in `wide`
_ROOM = 1 << 62  # |sum| of a wide entry over all clients
MAX_SAMPLES = 1 << 24
_COUNTS = ("loss", "trained", "samples", "clipped")
Form = dict[str, list[Any]]  # "part/key" -> [dtype, shape]; dtype "number" for plain ones
NUMBER = "number"


class EncodingError(ValueError):
    """A reply that cannot be added under masks."""


@dataclass(frozen=True)
class Code:
    """How a phase's replies are encoded. weighted: the paths that are weighted by samples. clients: at most so many."""

    clip: float
    bits: int
    clients: int
    weighted: frozenset[str] = frozenset()

    @property
    def step(self) -> float:
        """Floats are rounded to multiples of it; a mean is off by half of it at most, where nothing was clipped."""
        return 2.0 * self.clip / (1 << self.bits)

    @property
    def limit(self) -> int:
        """The largest number of steps in a rounded float."""
        return (1 << (self.bits - 1)) - 1

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        weight = MAX_SAMPLES if self.weighted else 1
        return np.uint32 if self.bits + math.ceil(math.log2(self.clients * weight + 1)) <= 32 else np.uint64

    def factor(self, path: str, samples: int) -> int:
        return samples if path in self.weighted else 1


def flat(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"part/key": value}, without absent values."""
    return {f"{part}/{key}": v for part, keys in values.items() for key, v in keys.items() if v is not None}


def form_of(values: Mapping[str, Mapping[str, Any]]) -> Form:
    """Types and shapes of a reply's values; nothing of their content."""
    return {path: _form(path, value) for path, value in sorted(flat(values).items())}


def _form(path: str, value: Any) -> list[Any]:
    if isinstance(value, Tensor) and not value.is_complex():
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, bool | int | float):
        return [NUMBER, []]
    raise EncodingError(f"{path} is no tensor and no number, so it cannot be added under masks")


def _is_narrow(entry: list[Any]) -> bool:
    return entry[0] in ("float32", "float16", "bfloat16")


def sizes(form: Form) -> tuple[int, int]:
    """Lengths of the narrow and the wide vector."""
    narrow = sum(math.prod(entry[1]) for entry in form.values() if _is_narrow(entry))
    wide = sum(math.prod(entry[1]) for entry in form.values() if not _is_narrow(entry))
    return narrow, wide + len(form) + len(_COUNTS)


def encode(reply: Reply, form: Form, code: Code) -> tuple[np.ndarray, np.ndarray]:
    """(narrow, wide) of a reply that is finite."""
    values, samples = flat(reply.values), reply.samples
    if samples > MAX_SAMPLES:
        raise EncodingError(f"{samples} samples; secure aggregation takes {MAX_SAMPLES} at most")
    loss = 0.0 if reply.loss is None else float(reply.loss)
    narrow, wide, weights, clipped = [], [], [], 0
    for path, entry in form.items():
        factor = code.factor(path, reply.samples) if path in values else 0
        weights.append(factor)
        if not _is_narrow(entry):
            wide.append(_exact(path, values.get(path), entry, factor, code.clients))
        elif path in values:
            rounded, outside = _rounded(values[path], code)
            narrow.append(rounded * factor)
            clipped += outside
        else:
            narrow.append(np.zeros(math.prod(entry[1]), dtype=np.int64))
    trained = 1 if reply.steps else 0
    mean_loss = round(loss / reply.steps * FINE) if trained else 0
    counts = [mean_loss, trained, reply.samples * trained, clipped]
    every = [*wide, np.array([*weights, *counts], dtype=np.int64)]
    return _joined(narrow).astype(code.dtype), np.concatenate(every).view(np.uint64)


def _joined(vectors: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(vectors) if vectors else np.zeros(0, dtype=np.int64)


def _rounded(value: Tensor, code: Code) -> tuple[np.ndarray, int]:
    exact = value.detach().reshape(-1).to("cpu", torch.float64).numpy()
    outside = int(np.count_nonzero(np.abs(exact) > code.clip))
    return np.clip(np.rint(exact / code.step), -code.limit, code.limit).astype(np.int64), outside


def _exact(path: str, value: Any, entry: list[Any], factor: int, clients: int) -> np.ndarray:
    """Integers as they are, other numbers in steps of 1 / FINE."""
    if value is None:
        return np.zeros(math.prod(entry[1]), dtype=np.int64)
    scale = FINE if entry[0] in (NUMBER, "float64") else 1
    array = value.detach().reshape(-1).cpu().numpy() if isinstance(value, Tensor) else np.array([value])
    if np.abs(array.astype(np.float64)).max(initial=0.0) * scale * max(factor, 1) * clients > _ROOM:
        raise EncodingError(f"{path} holds numbers too large to be added under masks")
    return (np.rint(array * scale) if scale > 1 else array).astype(np.int64) * factor


def is_finite(reply: Reply) -> bool:
    """Is every number of it finite?"""
    loss = 0.0 if reply.loss is None else float(reply.loss)
    return math.isfinite(loss) and all(_finite(value) for value in flat(reply.values).values())


def _finite(value: Any) -> bool:
    return bool(torch.isfinite(value).all()) if isinstance(value, Tensor) else math.isfinite(value)


@dataclass(frozen=True)
class Sums:
    """What a server learns. totals: {path: (weighted sum in float64, weight, dtype)}; loss: sum of clients' mean
    losses; trained, samples: how many clients trained, on how many samples; clipped: numbers that were outside [-clip,
    clip]."""

    totals: dict[str, tuple[Tensor | float, float, torch.dtype | None]]
    loss: float
    trained: int
    samples: int
    clipped: int


def decode(narrow: np.ndarray, wide: np.ndarray, form: Form, code: Code, added: int) -> Sums:
    """The sums of `added` clients' vectors, unmasked, as numbers. Raises EncodingError where no replies have such sums:
    some vector was not an encoded reply, or not masked as agreed."""
    exact = _signed(wide)
    first = len(exact) - len(form) - len(_COUNTS)
    weights, counts = exact[first : first + len(form)], exact[first + len(form) :]
    _check_counts(counts, len(narrow), added)
    _check_values(_signed(narrow), exact[:first], weights, form, code, added)
    floats = _signed(narrow).astype(np.float64) * code.step
    totals, at_narrow, at_wide = {}, 0, 0
    for (path, entry), weight in zip(form.items(), weights, strict=True):
        size = math.prod(entry[1])
        if _is_narrow(entry):
            totals[path] = _total(floats[at_narrow : at_narrow + size], entry, int(weight))
            at_narrow += size
        else:
            scale = FINE if entry[0] in (NUMBER, "float64") else 1
            totals[path] = _total(exact[at_wide : at_wide + size] / scale, entry, int(weight))
            at_wide += size
    loss, trained, samples, clipped = (int(count) for count in counts)
    return Sums(totals, loss / FINE, trained, samples, clipped)


def _check_counts(counts: np.ndarray, numbers: int, added: int) -> None:
    most = {
        "loss": _ROOM,
        "trained": added,
        "samples": added * MAX_SAMPLES,
        "clipped": added * numbers,
    }
    for name, count in zip(_COUNTS, counts.tolist(), strict=True):
        if not (-_ROOM if name == "loss" else 0) <= count <= most[name]:
            raise EncodingError(f"{name} of {added} clients is {count}")


def _check_values(
    narrow: np.ndarray, wide: np.ndarray, weights: np.ndarray, form: Form, code: Code, added: int
) -> None:
    """No client's number is beyond the limit, so no sum is beyond its weight times the limit."""
    at = 0
    for (path, entry), weight in zip(form.items(), weights.tolist(), strict=True):
        if not 0 <= weight <= added * (MAX_SAMPLES if path in code.weighted else 1):
            raise EncodingError(f"{path} has a weight of {weight} from {added} clients")
        if _is_narrow(entry):
            size = math.prod(entry[1])
            if _largest(narrow[at : at + size]) > code.limit * weight:
                raise EncodingError(f"{path} is larger than {added} clients can make it")
            at += size
    if _largest(wide) > _ROOM:
        raise EncodingError(f"numbers are larger than {added} clients can make them")


def _largest(vector: np.ndarray) -> int:
    return max(int(vector.max(initial=0)), -int(vector.min(initial=0)))


def _signed(vector: np.ndarray) -> np.ndarray:
    return vector.view(np.int32 if vector.dtype == np.uint32 else np.int64)


def _total(values: np.ndarray, entry: list[Any], weight: int) -> tuple[Tensor | float, float, torch.dtype | None]:
    if entry[0] == NUMBER:
        return float(values[0]), float(weight), None
    return torch.from_numpy(values.copy()).reshape(entry[1]), float(weight), getattr(torch, entry[0])


def common_form(forms: Iterable[Form], fewest: int = 1) -> Form:
    """The paths that at least `fewest` forms have: a sum of one client's value would be that value. Raises
    EncodingError where two forms of one path differ."""
    found: Form = {}
    counts: Counter[str] = Counter()
    for form in forms:
        counts.update(form.keys())
        for path, entry in form.items():
            if found.setdefault(path, entry) != entry:
                raise EncodingError(f"two forms of {path}: {found[path]} and {entry}")
    return {path: entry for path, entry in sorted(found.items()) if counts[path] >= fewest}


def form_to_text(form: Form) -> str:
    return json.dumps(form)


def form_from_text(text: Any, allowed: frozenset[str]) -> Form:
    """Raises EncodingError on anything that is not the form of a reply with `allowed` paths."""
    try:
        found = json.loads(text)
        form: Form = {str(path): [str(kind), [int(side) for side in shape]] for path, (kind, shape) in found.items()}
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise EncodingError(f"not the form of a reply: {error}") from error
    for path, (kind, shape) in form.items():
        known = kind == NUMBER or isinstance(getattr(torch, kind, None), torch.dtype)
        if path not in allowed or not known or any(side < 0 for side in shape) or math.prod(shape) > 1 << 36:
            raise EncodingError(f"not the form of a reply: {path[:80]}")
    return dict(sorted(form.items()))
