"""Secure aggregation on the server's side: wraps any engine and turns one exchange into five.

Only keys, encrypted letters, masked vectors, votes and shares reach this process. What the runner receives is the sum.
A phase decides who may be in the sum, and attempts it. An attempt has five steps: share, mask, agree, recover, unmask.
Every share and vector is checked. A client whose keys, shares or vector are malformed is named and left out; while
nothing was opened, the others begin again with fresh keys. Before a sum is opened its set is recorded, so that a
restarted server opens it with the same clients only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Ledger, Place, Setup
from everfed.core.engine import Absent, Engine, Replies, Trained
from everfed.core.evaluate import EvalSpec
from everfed.core.events import Observer
from everfed.core.handle import Server
from everfed.core.message import Message, Model, PerClient, Traffic, addressed, payload_bytes
from everfed.core.phase import Phase, Total, When
from everfed.core.trainer import Trainer
from everfed.core.tree import Tree
from everfed.errors import CompositionError, Fault
from everfed.privacy import masking, shamir
from everfed.privacy.encoding import EncodingError, Form, Sums, common_form, decode, form_from_text, form_to_text, sizes
from everfed.privacy.secure_client import (
    AGREE,
    KEYS,
    LONGEST_SIGNED,
    MASK,
    MASKS,
    NAME,
    RECOVER,
    SHARE,
    UNMASK,
    VECTORS,
    SecureAggregation,
)
from everfed.privacy.secure_members import (
    FEWEST,
    Members,
    are_keys,
    by_client,
    client_list,
    needed,
    set_text,
    sized,
    to_tensor,
    where,
)
from everfed.privacy.secure_members import KEYS as KEYS_SIZE

Vectors = tuple[np.ndarray, np.ndarray]  # narrow, wide


class TooFewClients(Fault):
    """A sum that cannot be unmasked: too few clients stayed. The run can be resumed when they are back."""


class Left(Exception):
    """Some clients were left out before anything was opened; the others begin again with fresh keys."""


@dataclass(frozen=True)
class _Dealt:
    """What a client sent to be passed on: a letter to each other client, commitments, a proof."""

    letters: Tree
    commitments: bytes
    proof: bytes


class SecureSum:
    """One attempt at a sum, with the same members from `share` to `unmask`."""

    def __init__(self, phase: SecurePhase, members: Members) -> None:
        self.phase, self.members, self.part = phase, members, phase.engine.part
        self.threshold = needed(len(members.clients), self.part.threshold)
        self.form = common_form((phase.forms[client] for client in members.clients), self.threshold)
        self.code = self.part.code(phase.phase.name, len(members.clients))

    def run(self) -> Sums | None:
        dealt = self._share()
        sharing = sorted(dealt)
        self._require_all_repeats(sharing)
        self.phase.require(sharing, self.members.clients)
        vectors = self._mask(dealt)
        alive = sorted(vectors)
        self._require_all_repeats(alive)
        self.phase.require(alive, self.members.clients)
        if any(sum(path in self.phase.forms[client] for client in alive) < self.threshold for path in self.form):
            raise Left  # too few of those that have a value are there; the others begin again without it
        votes = self._agree(alive)
        gone = [client for client in sharing if client not in vectors]
        keys = self._recover(dealt, votes, gone) if gone else {}
        seeds = self._unmask(dealt, votes, alive)
        bound = self.members.sum_of(sharing)
        opened = [
            _unmasked(_total(vectors, index), seeds, keys, self.members, part + bound)
            for index, part in enumerate(VECTORS)
        ]
        return self._decoded(opened, alive)

    def _require_all_repeats(self, left: list[int]) -> None:
        """Raises Left where a client is gone and a reply that was opened before would be in another sum."""
        if left != self.members.clients and any(client in self.phase.repeats for client in left):
            raise Left

    # what clients deal to each other ------------------------------------------------------------------------------
    def _share(self) -> dict[int, _Dealt]:
        answers = self.phase.request(SHARE, self.members.clients, {NAME: self.members.to_tree()})
        self._resolve({c: self._complaints(c, answer) for c, answer in answers.items()}, "keys")
        found = {client: self._dealt(client, answer) for client, answer in answers.items()}
        for client in [client for client, dealt in found.items() if dealt is None]:
            self.phase.reject(client, "malformed: not a letter to each of the others, with commitments and a proof")
        return {client: dealt for client, dealt in found.items() if dealt is not None}

    def _dealt(self, client: int, answer: Tree) -> _Dealt | None:
        count = len(self.members.clients)
        letters = by_client(answer.get("letters"), masking.NONCE + shamir.DEALT + masking.TAG)
        commitments = sized(answer.get("commitments"), count * shamir.COMMITMENT)
        proof = sized(answer.get("proof"), self.threshold * shamir.SHARE)
        if set(letters) != set(self.members.clients) - {client} or commitments is None or proof is None:
            return None
        return _Dealt(answer["letters"], commitments, proof)

    def _mask(self, dealt: dict[int, _Dealt]) -> dict[int, Vectors]:
        sharing = sorted(dealt)
        letters = {c: {str(peer): dealt[peer].letters[str(c)] for peer in sharing if peer != c} for c in sharing}
        message = {
            "letters": PerClient(letters),
            "sharing": torch.tensor(sharing),
            "commitments": {str(client): to_tensor(one.commitments) for client, one in dealt.items()},
            "proofs": {str(client): to_tensor(one.proof) for client, one in dealt.items()},
        }
        answers = self.phase.request(MASK, sharing, {NAME: message})
        self._resolve({c: self._complaints(c, answer) & set(sharing) for c, answer in answers.items()}, "shares")
        found = {client: self._vectors(client, answer) for client, answer in answers.items()}
        return {client: vectors for client, vectors in found.items() if vectors is not None}

    def _complaints(self, client: int, answer: Tree) -> set[int]:
        return _named(answer, "complaints") & set(self.members.clients) - {client}

    def _resolve(self, complaints: dict[int, set[int]], what: str) -> None:
        """Leave out few clients that explain all complaints. One complaint does not show which of the two lies, so both
        go; a client that several complain about, or that complains about several, goes alone."""
        pairs = {(client, about) for client, named in complaints.items() for about in named}
        if not pairs:
            return
        while pairs:
            counted = Counter(client for pair in pairs for client in set(pair))
            most = max(counted.values())
            liars = [client for client, count in counted.items() if count == most]
            for client in liars:
                self.phase.reject(client, _blame(client, pairs, what))
            pairs = {pair for pair in pairs if not set(pair) & set(liars)}
        raise Left

    def _vectors(self, client: int, answer: Tree) -> Vectors | None:
        kinds: tuple[type[np.unsignedinteger], ...] = (self.code.dtype, np.uint64)
        found = []
        for key, size, kind in zip(("narrow", "wide"), sizes(self.form), kinds, strict=True):
            value = answer.get(key)
            if not isinstance(value, Tensor) or value.dim() != 1 or len(value) != size:
                self.phase.reject(client, f"wrong shape: {key} is not a vector of {size}")
                return None
            if value.dtype != (torch.int32 if kind is np.uint32 else torch.int64):
                self.phase.reject(client, f"wrong dtype: {key} is {value.dtype}")
                return None
            found.append(value.cpu().numpy().view(kind))
        return found[0], found[1]

    # opening ------------------------------------------------------------------------------------------------------
    def _agree(self, alive: list[int]) -> dict[int, Tree]:
        """{client: the others' votes, as they are passed on to it}."""
        answers = self.phase.request(AGREE, alive, {NAME: {"alive": torch.tensor(alive)}}, counts=False)
        self.phase.require_enough(sorted(answers), self.members.clients)
        cast = {client: by_client(answer.get("votes"), masking.MAC) for client, answer in answers.items()}
        for client, votes in cast.items():
            if set(votes) != set(alive) - {client}:
                self.phase.warn(client, "malformed: not a vote for each of the others")
        return {
            client: {str(voter): to_tensor(votes[client]) for voter, votes in cast.items() if client in votes}
            for client in answers
        }

    def _recover(self, dealt: dict[int, _Dealt], votes: dict[int, Tree], gone: list[int]) -> dict[int, bytes]:
        """The mask keys of clients that are gone. One whose shares do not give its key is left out before anything is
        opened."""
        answers = self._reveal(RECOVER, votes)
        shares = {client: by_client(answer.get("keys"), shamir.SHARE) for client, answer in answers.items()}
        keys = self._secrets(dealt, shares, gone)
        liars = [client for client in gone if not masking.fits(keys.get(client, b""), self.members.mask_key(client))]
        for client in liars:
            self.phase.reject(client, "malformed: its shares do not give its key")
        if liars:
            raise Left
        return keys

    def _unmask(self, dealt: dict[int, _Dealt], votes: dict[int, Tree], alive: list[int]) -> dict[int, bytes]:
        self.phase.engine.record_opened(self.phase.place, alive)
        answers = self._reveal(UNMASK, votes)
        shares = {client: by_client(answer.get("seeds"), 2 * shamir.SHARE) for client, answer in answers.items()}
        for client in alive:
            doubting = [peer for peer, answer in answers.items() if client in _named(answer, "doubts")]
            if doubting:
                self.phase.warn(client, f"malformed: its vote is not valid for clients {set_text(doubting)}")
        seeds = self._secrets(dealt, shares, alive)
        if len(seeds) < len(alive):
            lost = set_text(set(alive) - set(seeds))
            raise TooFewClients(f"{self.phase.where()}: the seeds of clients {lost} cannot be put together")
        return seeds

    def _reveal(self, step: str, votes: dict[int, Tree]) -> dict[int, Tree]:
        """Ask those that voted for their shares."""
        answers = self.phase.request(step, sorted(votes), {NAME: {"votes": PerClient(votes)}}, counts=False)
        self.phase.require_enough(sorted(answers), self.members.clients)
        return answers

    def _secrets(
        self, dealt: dict[int, _Dealt], shares: dict[int, dict[int, bytes]], dealers: list[int]
    ) -> dict[int, bytes]:
        """{dealer: its secret}, from shares that are what it committed to; without dealers whose shares give none.
        shares: {holder: {dealer: share}}; holders of false ones are named."""
        good: dict[int, dict[int, bytes]] = {dealer: {} for dealer in dealers}
        for holder, held in shares.items():
            place = self.members.share_place(holder)
            context = {dealer: (dealt[dealer].commitments, self.members.dealer(dealer)) for dealer in dealers}
            right = [d for d in dealers if shamir.is_committed(held.get(d, b""), place, *context[d])]
            for dealer in right:
                good[dealer][place] = held[dealer]
            if len(right) < len(dealers):
                wrong = set_text(set(dealers) - set(right))
                self.phase.warn(holder, f"malformed: not the shares of clients {wrong} that it was given")
        return {dealer: secret for dealer in dealers if (secret := self._secret(dealer, good[dealer])) is not None}

    def _secret(self, dealer: int, good: dict[int, bytes]) -> bytes | None:
        if len(good) < self.threshold:
            raise TooFewClients(
                f"{self.phase.where()}: {len(good)} good shares of client {dealer}'s secret arrived, {self.threshold} "
                "are needed; resume the run when more clients are back"
            )
        try:
            return shamir.combine(dict(sorted(good.items())[: self.threshold]))
        except ValueError:
            return None

    def _decoded(self, opened: list[np.ndarray], alive: list[int]) -> Sums | None:
        try:
            return decode(opened[0], opened[1], self.form, self.code, len(alive))
        except EncodingError as error:
            reason = f"no sum of replies ({error}): a vector of one of clients {set_text(alive)} is not its reply"
            for client in alive:
                self.phase.reject(client, reason)
            return None


def _named(answer: Tree, key: str) -> set[int]:
    """The clients that an answer names under `key`."""
    try:
        return set(client_list(answer.get(key)))
    except ValueError:
        return set()


def _blame(client: int, pairs: set[tuple[int, int]], what: str) -> str:
    about = set_text(sender for receiver, sender in pairs if receiver == client)
    by = set_text(receiver for receiver, sender in pairs if sender == client)
    said = [f"clients {by} cannot use its {what}"] if by else []
    said += [f"it cannot use the {what} of clients {about}"] if about else []
    return f"malformed: {', and '.join(said)}"


def _total(vectors: dict[int, Vectors], index: int) -> np.ndarray:
    """The sum of one of all clients' vectors; it wraps around."""
    first, *others = (one[index] for one in vectors.values())
    total = first.copy()
    for vector in others:
        total += vector
    return total


def _unmasked(
    total: np.ndarray, seeds: dict[int, bytes], keys: dict[int, bytes], members: Members, part: bytes
) -> np.ndarray:
    """Subtract the masks of all seeds, and those that the others share with clients that are gone."""
    for seed in seeds.values():
        masking.add_mask(total, seed, part, minus=True)
    for lost, key in keys.items():
        for peer in seeds:
            secret = masking.agree(key, members.mask_key(peer), MASKS)
            masking.add_mask(total, secret, part, minus=lost > peer)
    return total


class SecurePhase:
    """One phase's protocol: attempts at a sum, each with fresh keys, until one is opened."""

    def __init__(
        self, engine: Secured, phase: Phase, place: Place, replies: dict[int, Reply], absent: dict[int, Absent]
    ) -> None:
        self.engine, self.phase, self.place, self.absent = engine, phase, place, absent
        self.forms: dict[int, Form] = {}
        self.keys: dict[int, bytes] = {}
        self.signed: dict[int, str] = {}  # passed on to the others, who check it
        self.asked: dict[int, str] = {}
        self.repeats: dict[int, str] = {}  # the clients of the sum in which this very reply was opened before
        self.broken = 0  # replies that are not finite
        for client, reply in sorted(replies.items()):
            self._advertised(client, reply.values.get(NAME, {}))
        self._leave_out_who_was_asked_otherwise()
        self._leave_out_other_forms()
        self._leave_out_large_forms()
        self.opened = engine.opened_set(place)
        self._keep_to_the_opened_set()

    def _advertised(self, client: int, values: Tree) -> None:
        allowed = frozenset(self.engine.part.weighing[self.phase.name])
        keys = sized(values.get("keys"), KEYS_SIZE)
        try:
            form = form_from_text(values.get("form"), allowed)
        except EncodingError as error:
            self.reject(client, f"malformed: {error}")
            return
        if keys is None or not are_keys(keys):
            self.reject(client, "malformed: its keys are not two points on the curve")
        else:
            self.forms[client], self.asked[client] = form, str(values.get("asked", ""))
            self.broken += bool(values.get("broken"))
            if isinstance(values.get("opened"), str):
                self.repeats[client] = values["opened"]
            self._take_keys(client, keys, values)

    def _take_keys(self, client: int, keys: bytes, values: Tree) -> None:
        signed = values.get("signed")
        self.keys[client] = keys
        self.signed.pop(client, None)
        if isinstance(signed, str) and len(signed) <= LONGEST_SIGNED:
            self.signed[client] = signed

    def _leave_out_who_was_asked_otherwise(self) -> None:
        """The members' masks cancel only if all were asked the same."""
        if self.asked:
            usual = Counter(self.asked.values()).most_common(1)[0][0]
            for client in [client for client, asked in self.asked.items() if asked != usual]:
                self.reject(client, "malformed: it says that it was asked something else than the others")
                del self.forms[client], self.asked[client]

    def _leave_out_other_forms(self) -> None:
        """Each path has the form that most clients have; clients with another form are left out."""
        votes: dict[str, Counter[str]] = {}
        for form in self.forms.values():
            for path, entry in form.items():
                votes.setdefault(path, Counter())[form_to_text({path: entry})] += 1
        chosen = {path: count.most_common(1)[0][0] for path, count in votes.items()}
        for client, form in self.forms.items():
            if any(form_to_text({path: entry}) != chosen[path] for path, entry in form.items()):
                self.reject(client, "wrong shape: not the form of the others' replies")

    def _leave_out_large_forms(self) -> None:
        """Clients refuse a sum with more numbers than that; the largest form goes first."""
        largest = self.engine.part.largest_form(self.phase.name, self.engine.setup.facts)
        while (clients := self.clients) and _numbers(common_form(self.forms[c] for c in clients)) > largest:
            client = max(clients, key=lambda client: _numbers(self.forms[client]))
            self.reject(client, f"too large: a form of {_numbers(self.forms[client])} numbers")

    def _keep_to_the_opened_set(self) -> None:
        """A sum that was opened before the server was stopped is opened again with the same clients, or not at all."""
        for client in [] if self.opened is None else set(self.clients) - set(self.opened):
            self.absent[client] = Absent("late", "the sum of this phase was opened before, without it")

    def _leave_out_repeats(self) -> None:
        """A reply that was opened before is added up with the same clients again, or with none: the difference of two
        such sums would be replies of the others."""
        while other := [client for client in self.clients if self._is_repeat(client, set_text(self.clients))]:
            for client in other:
                reason = f"this very reply was opened in a sum of clients {self.repeats[client][:200]}"
                self.absent[client] = Absent("late", reason)

    def _is_repeat(self, client: int, clients: str) -> bool:
        return self.repeats.get(client, clients) != clients

    @property
    def clients(self) -> list[int]:
        """Those that may be in the sum."""
        return [client for client in sorted(self.forms) if client not in self.absent]

    def reject(self, client: int, reason: str) -> None:
        self.absent[client] = Absent("rejected", reason)

    def run(self) -> Sums | None:
        """None where what was opened is no sum of replies. Where no value is in enough replies nothing is opened."""
        while True:
            self._leave_out_repeats()
            if not (self.repeats and not self.clients):
                self.require(self.clients, self.clients)
            if not self._has_a_sum():
                return Sums({}, 0.0, 0, 0, 0)
            try:
                return SecureSum(self, self._members()).run()
            except Left:
                self._renew_keys()

    def fewest(self, clients: int) -> int:
        """In how many replies a value must be, and how many must stay, of so many clients."""
        return needed(clients, self.engine.part.threshold)

    def _has_a_sum(self) -> bool:
        """Warns of values that too few clients have, which are not added up."""
        clients = self.clients
        counts = Counter(path for client in clients for path in self.forms[client])
        fewest = self.fewest(len(clients))
        for path, count in sorted(counts.items()):
            if count < fewest:
                which = f"{path} is in the replies of {count} of {len(clients)} clients, and {fewest} are needed"
                self.engine.notify({"event": "warning", "message": f"{self.where()}: {which}; it is not added up"})
        return any(count >= fewest for count in counts.values())

    def _members(self) -> Members:
        clients = self.clients
        forms = {client: form_to_text(self.forms[client]) for client in clients}
        number = f"{self.place.round}.{self.place.repeat}"
        bound = where(self.phase.name, number, self.asked[clients[0]])
        return Members({client: self.keys[client] for client in clients}, forms, bound, self.signed)

    def _renew_keys(self) -> None:
        self._leave_out_repeats()
        if self.repeats and not self.clients:
            return
        self.require(self.clients, self.clients)
        for client, answer in self.request(KEYS, self.clients, {NAME: {}}).items():
            keys = sized(answer.get("keys"), KEYS_SIZE)
            if keys is None or not are_keys(keys):
                self.reject(client, "malformed: its new keys are not two points on the curve")
            else:
                self._take_keys(client, keys, answer)

    def request(self, step: str, clients: list[int], message: Message, counts: bool = True) -> dict[int, Tree]:
        answers, absent = self.engine.request(step, clients, message, self.place)
        if counts:  # a client whose vector has arrived counts, even if it is lost later
            self.absent.update(absent)
        return answers

    def require(self, have: list[int], of: list[int]) -> None:
        """Raises TooFewClients where a sum of the clients `have` may not be opened."""
        self.require_enough(have, of)
        if self.opened is not None and not set(self.opened) <= set(have):
            away = set_text(set(self.opened) - set(have))
            raise TooFewClients(
                f"{self.where()}: its sum was opened before the server was stopped, with clients "
                f"{set_text(self.opened)}; the difference to a sum without clients {away} would reveal their replies. "
                "Resume the run when they are back"
            )

    def require_enough(self, have: list[int], of: list[int]) -> None:
        wanted = self.fewest(len(of))
        if len(have) < wanted:
            raise TooFewClients(
                f"{self.where()}: {len(have)} clients are left, {wanted} are needed (at least {FEWEST}, and "
                f"privacy.threshold of the {len(of)} that began); resume the run when more are back"
            )

    def where(self) -> str:
        return f"secure aggregation of phase {self.phase.name!r} in round {self.place.round + 1}"

    def warn(self, client: int, reason: str) -> None:
        """Name a client that lied, but whose vector counts."""
        event = {"event": "client", "client": client, "phase": self.phase.name, "kind": "rejected", "reason": reason}
        self.engine.notify(event)


def _numbers(form: Form) -> int:
    return sum(sizes(form))


class Secured(Engine):
    """Wraps the engine that runs the clients. `exchange` yields empty replies; `merge` adds their sum. ledger: records
    which sets were opened, for a server that may be stopped and resumed; a simulation needs none."""

    def __init__(
        self,
        inner: Engine,
        setup: Setup,
        device: str = "cpu",
        notify: Observer = lambda event: None,
        ledger: Ledger | None = None,
    ) -> None:
        self.inner, self.setup, self.device, self.notify, self.ledger = inner, setup, device, notify, ledger
        self.name = inner.name
        part = setup.method.part(NAME)
        assert isinstance(part, SecureAggregation)
        self.part = part
        self._steps = {step.name: step for step in setup.method.phases(When.INSIDE)}
        self._sums: Sums | None = None
        self._asked = self._broken = 0  # replies, and those that were not finite
        self._traffic = Traffic()
        self._stage = 0  # of the current phase: every exchange has a place of its own

    def exchange(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> Iterator[tuple[int, Reply | Absent]]:
        """Yields which clients are absent, and empty replies of the others: their sum comes with `merge`."""
        self._sums, self._traffic, self._stage, self._broken = None, Traffic(), 0, 0
        if any(isinstance(value, PerClient) for values in (message or {}).values() for value in values.values()):
            raise CompositionError(
                f"privacy.secure_aggregation: phase {phase.name!r} sends clients messages of their own; they could not "
                "know that all were asked the same"
            )
        replies, absent = self._gather(phase, clients, message, place)
        if self.part.adds_up(phase, Server(NAME, {}, self.setup.server(phase.name, place))):
            secured = SecurePhase(self, phase, place, replies, absent)
            self._sums, self._broken = secured.run(), secured.broken
            self._asked = len(replies)
            self._warn(phase, place)
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
        replies.trained = _anonymous(self._sums, 2 * self._broken > self._asked)

    def request(
        self, step: str, clients: Sequence[int], message: Message, place: Place
    ) -> tuple[dict[int, Tree], dict[int, Absent]]:
        """One step of the protocol on `clients`: their replies, and which are absent."""
        for client in clients:
            self._traffic.sent(payload_bytes(addressed(message, client), {}))
        self._stage += 1
        replies, absent = self._gather(self._steps[step], clients, message, replace(place, stage=self._stage))
        return {client: reply.values.get(NAME, {}) for client, reply in replies.items()}, absent

    def _gather(
        self, phase: Phase, clients: Sequence[int], message: Message | None, place: Place
    ) -> tuple[dict[int, Reply], dict[int, Absent]]:
        replies: dict[int, Reply] = {}
        absent: dict[int, Absent] = {}
        for client, reply in self.inner.exchange(phase, clients, message, place):
            if isinstance(reply, Absent):
                absent[client] = reply
            else:
                replies[client] = reply
                self._traffic.received(reply.values)
        for client in set(clients) - set(replies) - set(absent):
            absent[client] = Absent("failed", "no answer")
        return replies, absent

    def opened_set(self, place: Place) -> list[int] | None:
        """The clients whose sum was opened at this place before the server was stopped."""
        known = self.ledger.find(_opened_key(place)) if self.ledger is not None else None
        return None if known is None else [int(client) for client in known.split(",")]

    def record_opened(self, place: Place, clients: list[int]) -> None:
        if self.ledger is not None:
            self.ledger.record(_opened_key(place), set_text(clients))

    def _warn(self, phase: Phase, place: Place) -> None:
        sums, where = self._sums, f"secure aggregation, phase {phase.name!r} of round {place.round + 1}"
        if sums is None:
            message = f"{where}: what was opened is no sum of replies, so at least one client sent a false vector; it "
            self.notify({"event": "warning", "message": message + "cannot be known which, and the sum is not used"})
        elif sums.clipped or self._broken:
            what = f"{sums.clipped} numbers were outside [-clip, clip] and {self._broken} replies were not finite"
            self.notify({"event": "warning", "message": f"{where}: {what}; see privacy.clip"})

    # the rest is the inner engine's ------------------------------------------------------------------------------
    def workbench(self) -> Trainer:
        return self.inner.workbench()

    def evaluate(self, model: Model, spec: EvalSpec) -> Tensor:
        return self.inner.evaluate(model, spec)

    def refusal(self, model: Model) -> str:
        return self.inner.refusal(model)

    def describe(self) -> dict[str, Any]:
        return {**self.inner.describe(), "secure_aggregation": True}

    def close(self) -> None:
        self.inner.close()


def _opened_key(place: Place) -> str:
    return f"opened {place.round}.{place.position}.{place.repeat}"


def _anonymous(sums: Sums, broken: bool) -> list[Trained]:
    """As many clients as trained, without their numbers, all with the mean loss; not finite where nothing was added up
    and most replies are broken."""
    if not sums.trained:
        return [Trained(-1, float("nan"), 1, 0)] if broken else []
    mean = sums.loss / sums.trained
    first = Trained(-1, mean, 1, sums.samples)
    return [first, *(Trained(-1, mean, 1, 0) for _ in range(sums.trained - 1))]
