"""What the members of a sum under secure aggregation agree on, sign and bind their messages to.

The clients that attempt a sum together, with their keys and forms; what keys, letters, votes and opened sums are bound
to, so that none can be used at another time, in another group or for another question; and bytes in trees. `own` is a
client's state in the protocol (`everfed.privacy.secure`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.handle import Client
from everfed.core.message import MODEL
from everfed.core.tree import Tree, leaves
from everfed.privacy import masking
from everfed.privacy.encoding import EncodingError, Form, common_form, form_from_text, sizes

FEWEST = 3  # of two clients, each could compute the other's reply from the sum
KEYS = 2 * masking.PUBLIC  # bytes of a client's two public keys: for masks, for letters


def needed(clients: int, threshold: float) -> int:
    """How many of `clients` must stay to the end, never fewer than FEWEST. threshold: above 0.5, so more than half, and
    no server can split them into two groups and have each unmask the other."""
    return max(FEWEST, math.ceil(threshold * clients))


def where(phase: str, place: str, asked: str) -> str:
    """What the members of a sum must agree on beside their keys and forms."""
    return f"{phase} {place} {asked}"


@dataclass(frozen=True)
class Members:
    """The clients of one attempt at a sum. keys: each client's two public keys; forms: of each client's reply, as it
    advertised it; where: phase, place and what was asked, which the digest covers; signed: names and signatures of the
    clients that have a long-lived key."""

    keys: Mapping[int, bytes]
    forms: Mapping[int, str]
    where: str
    signed: Mapping[int, str] = field(default_factory=dict)

    @property
    def clients(self) -> list[int]:
        return sorted(self.keys)

    @cached_property
    def digest(self) -> bytes:
        """Of everything that the members must agree on."""
        rows = [[client, self.keys[client].hex(), self.forms[client]] for client in self.clients]
        return hashlib.sha256(json.dumps([self.where, rows]).encode()).digest()

    def mask_key(self, client: int) -> bytes:
        return self.keys[client][: masking.PUBLIC]

    def letter_key(self, client: int) -> bytes:
        return self.keys[client][masking.PUBLIC :]

    def share_place(self, client: int) -> int:
        """Where a client's shares are taken, from 1 on."""
        return self.clients.index(client) + 1

    def dealer(self, client: int) -> bytes:
        """What the commitments of a client's shares are bound to."""
        return hashlib.sha256(self.digest + client.to_bytes(8, "big")).digest()

    def sum_of(self, sharing: Iterable[int]) -> bytes:
        """What all masks and votes are bound to: masks of clients that received other members, forms or `sharing` do
        not cancel."""
        return hashlib.sha256(self.digest + set_text(sharing).encode()).digest()

    def form(self, allowed: frozenset[str], largest: int, fewest: int) -> Form:
        """The form of the sum, which every member computes from all forms: the paths that at least `fewest` have.
        Raises EncodingError where two differ, or where it has more than `largest` numbers."""
        form = common_form((form_from_text(text, allowed) for _, text in sorted(self.forms.items())), fewest)
        if sum(sizes(form)) > largest:
            raise EncodingError(f"a form of {sum(sizes(form))} numbers, at most {largest}")
        return form

    def to_tree(self) -> Tree:
        return {
            "clients": torch.tensor(self.clients),
            "keys": torch.stack([to_tensor(self.keys[client]) for client in self.clients]),
            "forms": {str(client): self.forms[client] for client in self.clients},
            "signed": {str(client): self.signed[client] for client in self.clients if client in self.signed},
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Any], where: str) -> Members:
        """Raises ValueError on anything that is not a list of clients with keys on the curve and a form each."""
        try:
            clients, rows = client_list(tree["clients"]), [to_bytes(row) for row in tree["keys"]]
            forms = {client: tree["forms"][str(client)] for client in clients}
            signed = {client: tree["signed"][str(client)] for client in clients if str(client) in tree["signed"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a list of clients, their keys and their forms: {error}") from error
        if len(rows) != len(clients) or not all(isinstance(text, str) for text in (*forms.values(), *signed.values())):
            raise ValueError("not one pair of keys and one form for each client")
        for client, row in zip(clients, rows, strict=True):
            if not are_keys(row):
                raise ValueError(f"the keys of client {client} are no points on the curve")
        return Members(dict(zip(clients, rows, strict=True)), forms, where, signed)


def are_keys(keys: bytes) -> bool:
    """Two public keys, both on the curve?"""
    return len(keys) == KEYS and all(masking.is_public(key) for key in (keys[: masking.PUBLIC], keys[masking.PUBLIC :]))


def set_text(clients: Iterable[int]) -> str:
    return ",".join(map(str, sorted(clients)))


def client_list(value: object) -> list[int]:
    """The clients of a tensor, ascending, each once. Raises ValueError."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.int64:
        raise ValueError("not a list of clients")
    clients: list[int] = value.tolist()
    if clients != sorted(set(clients)) or (clients and clients[0] < 0):
        raise ValueError("a list of clients names each once, in order")
    return clients


# bytes in trees ------------------------------------------------------------------------------------------------------
def to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def sized(value: object, size: int) -> bytes | None:
    """The bytes of a tensor of exactly `size` bytes; None for anything else."""
    is_bytes = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape == (size,)
    return to_bytes(value) if is_bytes else None  # type: ignore[arg-type]


def by_client(value: object, size: int) -> dict[int, bytes]:
    """{client: bytes} of the entries of a tree that are tensors of `size` bytes; others are left out."""
    if not isinstance(value, dict):
        return {}
    found = {key: sized(entry, size) for key, entry in value.items()}
    return {int(key): data for key, data in found.items() if data is not None and key.isdecimal()}


def as_sent(vector: np.ndarray) -> Tensor:
    """Unsigned numbers as the signed ones of the same bits, which every format has."""
    return torch.from_numpy(vector.view(np.int32 if vector.dtype == np.uint32 else np.int64))


# what a client signs, seals and records ------------------------------------------------------------------------------
MASKS, LETTERS, VOTES = b"masks", b"letters", b"votes"  # what agreed secrets are for
_LOG = logging.getLogger("everfed.client")


class ProtocolError(ValueError):
    """A request that no honest server makes; the client does not answer it."""


def with_new_keys(own: Tree, client: Client) -> tuple[Tree, Tree]:
    """(the state with fresh keys, the public ones to advertise, signed where this client has a long-lived key)."""
    private = [masking.new_private(), masking.new_private()]
    public = b"".join(masking.public_of(key) for key in private)
    credentials = None if client.attempt is None else client.attempt.credentials
    signed = {}
    if credentials is not None:
        signature = credentials.sign(_statement(own, client.id, public, own["form"], client))
        signed["signed"] = f"{credentials.name} {signature.hex()}"
    return {**own, "private": to_tensor(b"".join(private))}, {"keys": to_tensor(public), **signed}


def _statement(own: Tree, number: int, keys: bytes, form: str, client: Client) -> bytes:
    """What a client signs when it advertises keys: they are its own, for this phase of this run and no other, and for
    what it was asked. Who was asked otherwise does not find it signed."""
    return json.dumps(["secure", *_where(own, client), own["asked"], number, keys.hex(), form]).encode()


def unknown_members(own: Tree, members: Members, client: Client) -> list[int]:
    """The members whose keys are not signed by a client that this one knows from elsewhere than the server; none where
    it knows no clients."""
    credentials = None if client.attempt is None else client.attempt.credentials
    if credentials is None:
        return []
    found = []
    names = Counter(members.signed.get(number, "").partition(" ")[0] for number in members.clients)
    for number in members.clients:
        name, _, signature = members.signed.get(number, "").partition(" ")
        statement = _statement(own, number, members.keys[number], members.forms[number], client)
        problem = credentials.problem(name, _from_hex(signature), statement)
        if problem or (names[name] > 1 and name):
            _LOG.warning("no shares for client %d: %s", number, problem or f"{name} has several numbers")
            found.append(number)
    return [number for number in found if number != client.id]


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def ledger_keys(own: Tree, client: Client) -> list[str]:
    """What a sum that is opened is recorded under: the phase of the run; the model, at any repeat and for any server
    of the same recipe; the reply, whoever asks for it."""
    if client.attempt is None:  # a simulation: its clients' store is saved and restored with the server's state
        return []
    phase = f"{client.attempt.run} {own['phase']} {own['place']}"
    return [f"opened {name}" for name in (phase, own["model"], own["result"]) if name]


def require_same_set(own: Tree, clients: Iterable[int], client: Client) -> None:
    """Raises ProtocolError where this reply, or this phase, was opened in a sum of other clients."""
    for key in ledger_keys(own, client):
        known = client.attempt.ledger.find(key) if client.attempt else None
        if known is not None and known != set_text(clients):
            raise ProtocolError(
                f"this reply to phase {own['phase']!r} was opened in a sum of clients {known}; the difference to a sum "
                f"of clients {set_text(clients)} would reveal single replies. Resume with the same clients, or begin a "
                "run with another seed"
            )


def model_digest(phase: str, reply: Reply, client: Client) -> str:
    """Digest of the model that a reply answers, in a phase of a round of a recipe; "" without either."""
    model = dict(client.messages.get(MODEL, {}))
    if client.attempt is None or not reply.values or not model:
        return ""
    return _digest([client.attempt.recipe, phase, client.round], {"model": model})


def reply_digest(phase: str, reply: Reply, client: Client) -> str:
    """Digest of a reply and of the model that it answers, whichever run asks; "" for a reply without values."""
    if client.attempt is None or not reply.values:
        return ""
    about = [phase, client.round, reply.samples, reply.steps]
    return _digest(about, {"reply": reply.values, "model": dict(client.messages.get(MODEL, {}))})


def _digest(about: Sequence[object], tree: Tree) -> str:
    content = hashlib.blake2b(json.dumps(about).encode(), digest_size=32)
    for path, leaf in leaves(tree):
        content.update(path.encode())
        if isinstance(leaf, Tensor):
            content.update(to_bytes(leaf.reshape(-1).view(torch.uint8)))
        else:
            content.update(repr(leaf).encode())
    return content.hexdigest()


def private_keys(own: Tree) -> tuple[bytes, bytes]:
    """(of masks, of letters and votes)."""
    both = to_bytes(own["private"])
    return both[: len(both) // 2], both[len(both) // 2 :]


def letter_secret(own: Tree, members: Members, peer: int) -> bytes:
    return masking.agree(private_keys(own)[1], members.letter_key(peer), LETTERS)


def vote_secret(own: Tree, members: Members, peer: int) -> bytes:
    return masking.agree(private_keys(own)[1], members.letter_key(peer), VOTES)


def vote_text(members: Members, sharing: list[int], alive: list[int], voter: int) -> bytes:
    """What a client authenticates when it votes for opening the sum of `alive`."""
    return members.sum_of(sharing) + f"client {voter} opens {set_text(alive)}".encode()


def letter_context(own: Tree, members: Members, sender: int, receiver: int, client: Client) -> bytes:
    """What a letter is bound to, so that it opens at no other time, for no other client and in no other group."""
    return json.dumps([*_where(own, client), sender, receiver, members.digest.hex()]).encode()


def _where(own: Tree, client: Client) -> list[str | int]:
    """The run, and the phase in it."""
    return ["" if client.attempt is None else client.attempt.run, own["epoch"], own["phase"], own["place"]]


def place_of(client: Client) -> str:
    """Round and repeat."""
    return f"{client.round}.{client.repeat}"


def epoch_of(client: Client) -> int:
    return 0 if client.attempt is None else client.attempt.epoch
