"""One attempt at a sum under secure aggregation, on the server's side: share, mask, agree, recover, unmask.

Every share and vector is checked. Before the sum is opened its set is recorded, so that a restarted server opens no
other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from everfed.core.message import PerClient
from everfed.core.tree import Tree
from everfed.errors import Fault
from everfed.privacy import masking, shamir
from everfed.privacy.encoding import EncodingError, Sums, common_form, decode, sizes
from everfed.privacy.members import Members, by_client, client_list, needed, set_text, sized, to_tensor
from everfed.privacy.secure import AGREE, MASK, MASKS, NAME, RECOVER, SHARE, UNMASK, VECTORS

if TYPE_CHECKING:
    from everfed.privacy.secure_phase import SecurePhase

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
        self.phase.require(sharing, self.members.clients)
        vectors = self._mask(dealt)
        alive = sorted(vectors)
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
