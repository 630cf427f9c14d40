"""Compares the replies of a phase with each other: their form, how long their values are, how many samples are claimed.

Each bound follows what most clients send, which a minority cannot move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Place, Setup
from everfed.core.part import overrides
from everfed.core.phase import Mean, Phase
from everfed.federation.checking import Expected, Reason, Refusal

FEWEST = 3  # replies below which there is no majority to compare with


def find_other_forms(expected: Expected, replies: Mapping[int, Reply]) -> dict[int, Refusal]:
    """The clients with a value of another form than most clients' value. What is added up must have one shape; what is
    collected one structure (names, types and numbers of dimensions), since parts and other clients read it."""
    refused: dict[int, Refusal] = {}
    paths = {f"{part}/{key}" for part, keys in expected.declared.items() for key in keys} - set(expected.like)
    for path in sorted(paths):
        part, key = path.split("/", 1)
        sent = {client: reply.values.get(part, {}).get(key) for client, reply in replies.items()}
        forms = {client: _form(value, path in expected.alike) for client, value in sent.items() if value is not None}
        usual = Counter(forms.values()).most_common(1)
        for client, form in forms.items():
            if form != usual[0][0]:
                detail = f"{path} is {form} of client {client} and {usual[0][0]} of most"
                refused.setdefault(client, Refusal(Reason.WRONG_SHAPE, detail[:300]))
    return refused


def _form(value: Any, exact: bool) -> str:
    """exact: with the shape of a tensor, not only its number of dimensions. Names that are numbers, as of clients or
    classes, may differ."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape) if exact else f'of {value.dim()} dimensions'}"
    if isinstance(value, dict):
        inner = {"0" if str(name).isdecimal() else str(name): _form(one, exact) for name, one in value.items()}
        return f"{{{', '.join(f'{name}: {form}' for name, form in sorted(inner.items()))}}}"
    return "text" if isinstance(value, str) else "a number"


def find_outliers(
    expected: Expected, unmoved: Mapping[str, Tensor], replies: Mapping[int, Reply], factor: float
) -> dict[int, Refusal]:
    """The clients with a value that is added up and is too long: more than `factor` times the median of all replies,
    which a minority cannot move beyond what honest clients send; or than `factor`, where most send zeros. unmoved: of
    the values that are models, by path, the one that was sent; the others are compared with zero."""
    refused: dict[int, Refusal] = {}
    for path in sorted(expected.alike):
        part, key = path.split("/", 1)
        sent = {client: reply.values.get(part, {}).get(key) for client, reply in replies.items()}
        lengths = {client: _length(value, unmoved.get(path)) for client, value in sent.items() if value is not None}
        if len(lengths) < FEWEST:
            continue
        middle = median(lengths.values())
        for client, length in lengths.items():
            if length > factor * (middle or 1.0):
                what = f"{path} moved by {length:.3g}" if path in unmoved else f"{path} is {length:.3g} long"
                detail = f"{what}, that of the median client {middle:.3g}; at most {factor:g} times that"
                refused.setdefault(client, Refusal(Reason.OUTLIER, detail))
    return refused


def _length(value: Any, base: Tensor | None) -> float:
    """Of a tensor or a number: the distance from `base`, or from zero."""
    found = torch.as_tensor(value)
    moved = found if base is None else found - base.to(found.device)
    return float(torch.linalg.vector_norm(moved if moved.is_floating_point() else moved.double(), dtype=torch.float64))


class SampleClaims:
    """Caps the number of samples that clients claim, where replies are weighed by it.

    allowed: (client) -> at most so many, or None where the roster does not name the client. It then counts for what the
    server's own stream holds for it; where a client's data is known to itself alone, for the median of the phase's
    claims.
    """

    def __init__(self, setup: Setup, allowed: Callable[[int], int | None] = lambda client: None) -> None:
        self.setup, self.allowed = setup, allowed
        self._rehearses = any(overrides(part, "receive") for part in setup.method.parts)  # samples of earlier tasks
        self._held: dict[tuple[int, int], int] = {}  # (client, task) -> samples in the server's own stream

    def capped(self, phase: Phase, place: Place, claims: Mapping[int, int]) -> dict[int, int]:
        """{client: as how many it counts}, for those whose claim is larger."""
        reducers = self.setup.method.reducers(phase)
        if not any(isinstance(r, Mean) and r.weighted for keys in reducers.values() for r in keys.values()):
            return {}
        middle = int(median(sorted(claims.values()))) if claims else 0
        most = {client: self._most(client, place, middle) for client in claims}
        return {client: most[client] for client, claim in claims.items() if claim > most[client]}

    def _most(self, client: int, place: Place, middle: int) -> int:
        allowed = self.allowed(client)
        if allowed is not None:
            return allowed
        if self.setup.stream.private_data:
            return middle
        own = place.plan.tasks.get(client, place.plan.task)
        earlier = range(own) if self._rehearses else ()
        return self._size(client, own) + sum(self._size(client, task) for task in earlier)

    def _size(self, client: int, task: int) -> int:
        if (client, task) not in self._held:
            self._held[client, task] = len(self.setup.stream.data(client, task))
        return self._held[client, task]
