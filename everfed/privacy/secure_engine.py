"""Secure aggregation on the server's side: wraps any engine and turns one exchange into four.

Only keys, encrypted letters, masked vectors and shares reach this process. What the runner receives is the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed import Each, Model, Phase, Position, Trainer, Tree
from everfed.core.client import Reply
from everfed.core.context import Moment, World
from everfed.core.engine import Absent, Engine, Replies, Trained
from everfed.core.message import Message, Traffic, addressed, payload_bytes
from everfed.core.reduce import Total
from everfed.core.scoring import Exam
from everfed.privacy import masking
from everfed.privacy.encoding import EncodingError, Form, Sums, decode, form_from_text, form_to_text, sizes
from everfed.privacy.secure import FEWEST, MASK, NAME, SHARE, UNMASK, SecureAggregation, needed, to_bytes, to_tensor

Notify = Callable[[dict[str, Any]], None]


class TooFewClients(RuntimeError):
    """A sum that cannot be unmasked: too few clients stayed. The run can be resumed when they are back."""


class Secured(Engine):
    """Wraps the engine that runs the clients. `exchange` yields empty replies; `merge` adds their sum."""

    def __init__(self, inner: Engine, world: World, device: str = "cpu", notify: Notify = lambda event: None) -> None:
        self.inner, self.world, self.device, self.notify = inner, world, device, notify
        self.name = inner.name
        part = world.method.part(NAME)
        assert isinstance(part, SecureAggregation)
        self.part = part
        self._steps = {step.name: step for step in world.method.phases(Position.INSIDE)}
        self._sums: Sums | None = None
        self._traffic = Traffic()

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, moment: Moment
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """Yields which clients are absent, and empty replies of the others: their sum comes with `merge`."""
        self._sums, self._traffic = None, Traffic()
        replies, absent = self._gather(phase, clients, message, moment)
        if self.part.adds_up(phase, self.world.server(phase.name, moment)):
            round_ = _Round(self, phase, moment, replies, absent)
            self._sums = round_.run()
            self._warn(phase, moment, self._sums)
        for client in clients:
            yield client, absent[client] if client in absent else Reply({})

    def merge(self, replies: Replies) -> None:
        """Put the sum where the replies would have been added up."""
        replies.traffic.up.update(self._traffic.up)
        replies.traffic.down.update(self._traffic.down)
        if self._sums is None:
            return
        for path, (value, weight, dtype) in self._sums.totals.items():
            part, key = path.split("/", 1)
            total = replies.reduction.under_way[part][key]
            if weight and isinstance(total, Total):
                total.total = value.to(self.device) if isinstance(value, Tensor) else value
                total.weight, total.dtype = weight, dtype
        replies.trained = _anonymous(self._sums)

    def request(
        self, step: str, clients: Sequence[int], message: Message, moment: Moment
    ) -> tuple[dict[int, Tree], dict[int, Absent]]:
        """One step of the protocol on `clients`: their replies, and which are absent."""
        for client in clients:
            self._traffic.sent(payload_bytes(addressed(message, client), {}))
        stage = 1 + list(self._steps).index(step)
        replies, absent = self._gather(self._steps[step], clients, message, replace(moment, stage=stage))
        return {client: reply.values.get(NAME, {}) for client, reply in replies.items()}, absent

    def _gather(
        self, phase: Phase, clients: Sequence[int], message: Message | None, moment: Moment
    ) -> tuple[dict[int, Reply], dict[int, Absent]]:
        replies: dict[int, Reply] = {}
        absent: dict[int, Absent] = {}
        for client, reply in self.inner.exchange(phase, clients, message, moment):
            if isinstance(reply, Absent):
                absent[client] = reply
            else:
                replies[client] = reply
                self._traffic.received(reply.values)
        for client in set(clients) - set(replies) - set(absent):
            absent[client] = Absent("failed", "no answer")
        return replies, absent

    def _warn(self, phase: Phase, moment: Moment, sums: Sums) -> None:
        if sums.clipped or sums.broken:
            what = f"{sums.clipped} numbers were outside [-clip, clip] and {sums.broken} replies were not finite"
            where = f"phase {phase.name!r} of round {moment.round}"
            self.notify({"event": "warning", "message": f"secure aggregation, {where}: {what}; see privacy.clip"})

    # the rest is the inner engine's ------------------------------------------------------------------------------
    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def evaluate(self, model: Model, exam: Exam) -> Tensor:
        return self.inner.evaluate(model, exam)

    def describe(self) -> dict[str, Any]:
        return {**self.inner.describe(), "secure_aggregation": True}

    def close(self) -> None:
        self.inner.close()


class _Round:
    """One phase's protocol."""

    def __init__(
        self, engine: Secured, phase: Phase, moment: Moment, replies: dict[int, Reply], absent: dict[int, Absent]
    ) -> None:
        self.engine, self.phase, self.moment, self.absent = engine, phase, moment, absent
        self.forms: dict[int, Form] = {}
        self.keys: dict[int, bytes] = {}
        for client, reply in sorted(replies.items()):
            self._advertised(client, reply.values.get(NAME, {}))
        self.form = self._common_form()
        self.clients = sorted(self.forms)

    def _advertised(self, client: int, values: Tree) -> None:
        allowed = frozenset(self.engine.part.weighing[self.phase.name])
        try:
            form, keys = form_from_text(values.get("form"), allowed), to_bytes(values["keys"])
            if len(keys) != 2 * masking.PUBLIC:
                raise EncodingError(f"keys of {len(keys)} bytes")
        except (EncodingError, KeyError, AttributeError) as error:
            self.absent[client] = Absent("rejected", f"malformed: {error}")
            return
        self.forms[client], self.keys[client] = form, keys

    def _common_form(self) -> Form:
        """All paths of all clients, each in the form that most have; clients with another form are left out."""
        votes: dict[str, Counter[str]] = {}
        for form in self.forms.values():
            for path, entry in form.items():
                votes.setdefault(path, Counter())[form_to_text({path: entry})] += 1
        chosen = {path: count.most_common(1)[0][0] for path, count in votes.items()}
        for client, form in list(self.forms.items()):
            if any(form_to_text({path: entry}) != chosen[path] for path, entry in form.items()):
                del self.forms[client]
                self.absent[client] = Absent("rejected", "wrong shape: not the form of the others' replies")
        used = {path for form in self.forms.values() for path in form}
        allowed = frozenset(self.engine.part.weighing[self.phase.name])
        parsed = [form_from_text(text, allowed) for path, text in sorted(chosen.items()) if path in used]
        return {path: entry for one in parsed for path, entry in one.items()}

    def run(self) -> Sums:
        self._enough(self.clients, self.clients, FEWEST)
        letters = self._share()
        vectors = self._mask(letters)
        return self._open(sorted(letters), vectors)

    def _share(self) -> dict[int, Tree]:
        message = {
            "clients": torch.tensor(self.clients),
            "keys": torch.stack([to_tensor(self.keys[client]) for client in self.clients]),
        }
        answers = self._request(SHARE, self.clients, {NAME: message})
        return {c: a["letters"] for c, a in answers.items() if self._whole(c, a.get("letters"), self.clients)}

    def _whole(self, client: int, letters: Any, receivers: list[int]) -> bool:
        """Does a reply hold one letter for each of the other clients?"""
        wanted = {str(receiver) for receiver in receivers if receiver != client}
        if (
            isinstance(letters, dict)
            and set(letters) == wanted
            and all(isinstance(x, Tensor) for x in letters.values())
        ):
            return True
        self.absent[client] = Absent("rejected", "malformed: not a letter to each of the others")
        return False

    def _mask(self, letters: dict[int, Tree]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        sharing = sorted(letters)
        self._enough(sharing, self.clients)
        own = {c: {str(sender): letters[sender][str(c)] for sender in sharing if sender != c} for c in sharing}
        message = {"letters": Each(own), "sharing": torch.tensor(sharing), "form": form_to_text(self.form)}
        answers = self._request(MASK, sharing, {NAME: message})
        found = {client: self._vectors(client, answer) for client, answer in answers.items()}
        return {client: vectors for client, vectors in found.items() if vectors is not None}

    def _vectors(self, client: int, answer: Tree) -> tuple[np.ndarray, np.ndarray] | None:
        narrow = self.engine.part.code(self.phase.name, len(self.clients)).dtype
        kinds: tuple[type[np.unsignedinteger], ...] = (narrow, np.uint64)
        found = []
        for key, size, kind in zip(("narrow", "wide"), sizes(self.form), kinds, strict=True):
            value = answer.get(key)
            if not isinstance(value, Tensor) or value.dim() != 1 or len(value) != size:
                self.absent[client] = Absent("rejected", f"wrong shape: {key} is not a vector of {size}")
                return None
            if value.dtype != (torch.int32 if kind is np.uint32 else torch.int64):
                self.absent[client] = Absent("rejected", f"wrong dtype: {key} is {value.dtype}")
                return None
            found.append(value.cpu().numpy().view(kind))
        return found[0], found[1]

    def _open(self, sharing: list[int], vectors: dict[int, tuple[np.ndarray, np.ndarray]]) -> Sums:
        alive = sorted(vectors)
        gone = [client for client in sharing if client not in vectors]
        self._enough(alive, self.clients)
        message = {"alive": torch.tensor(alive), "gone": torch.tensor(gone, dtype=torch.int64)}
        answers = self._request(UNMASK, alive, {NAME: message}, counts=False)
        self._enough(sorted(answers), self.clients)
        narrow, wide = (
            np.sum([vectors[c][i] for c in alive], axis=0, dtype=vectors[alive[0]][i].dtype) for i in (0, 1)
        )
        seeds = {client: self._secret(answers, "seeds", client) for client in alive}
        keys = {client: self._secret(answers, "keys", client) for client in gone}
        opened = [
            _unmasked(v, seeds, keys, self._publics(), part) for v, part in ((narrow, b"narrow"), (wide, b"wide"))
        ]
        code = self.engine.part.code(self.phase.name, len(self.clients))
        return decode(opened[0], opened[1], self.form, code)

    def _publics(self) -> dict[int, bytes]:
        return {client: self.keys[client][: masking.PUBLIC] for client in self.clients}

    def _secret(self, answers: dict[int, Tree], kind: str, client: int) -> bytes:
        """Reconstruct a client's secret from the shares of the others."""
        shares = [
            a[kind][str(client)] for a in answers.values() if isinstance(a.get(kind, {}).get(str(client)), Tensor)
        ]
        try:
            wanted = needed(len(self.clients), self.engine.part.threshold)
            return masking.combine([to_bytes(share) for share in shares[:wanted]])
        except ValueError as error:
            raise TooFewClients(f"{self._where()}: the secret of client {client} cannot be put together") from error

    def _request(self, step: str, clients: list[int], message: Message, counts: bool = True) -> dict[int, Tree]:
        answers, absent = self.engine.request(step, clients, message, self.moment)
        if counts:  # a client whose vector has arrived counts, even if it is lost later
            self.absent.update(absent)
        return answers

    def _enough(self, have: list[int], of: list[int], fewest: int = 0) -> None:
        wanted = max(fewest, needed(len(of), self.engine.part.threshold)) if of else FEWEST
        if len(have) < wanted:
            raise TooFewClients(
                f"{self._where()}: {len(have)} clients are left, {wanted} are needed (at least {FEWEST}, and "
                f"privacy.threshold of the {len(of)} that began); resume the run when more are back"
            )

    def _where(self) -> str:
        return f"secure aggregation of phase {self.phase.name!r} in round {self.moment.round}"


def _unmasked(
    total: np.ndarray, seeds: dict[int, bytes], keys: dict[int, bytes], publics: dict[int, bytes], part: bytes
) -> np.ndarray:
    """Subtract the masks of all seeds, and those that the others share with clients that are gone."""
    total = total.copy()
    for seed in seeds.values():
        masking.add_mask(total, seed, part, minus=True)
    for lost, key in keys.items():
        for peer in seeds:
            masking.add_mask(total, masking.agree(key, publics[peer]), part, minus=lost > peer)
    return total


def _anonymous(sums: Sums) -> list[Trained]:
    """As many clients as trained, without their numbers, all with the mean loss."""
    if sums.broken:
        return [Trained(-1, float("nan"), 1, 0)]
    if not sums.trained:
        return []
    mean = sums.loss / sums.trained
    first = Trained(-1, mean, 1, sums.samples)
    return [first, *(Trained(-1, mean, 1, 0) for _ in range(sums.trained - 1))]
