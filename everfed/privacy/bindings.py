"""What a client's keys, letters, votes and opened sums are bound to in secure aggregation.

Each is made for one phase of one run and one set of clients, so that none can be used at another time or in another
group. `own` is a client's state in the protocol (`everfed.privacy.secure`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.handle import Client
from everfed.core.message import MODEL
from everfed.core.tree import Tree, leaves
from everfed.privacy import masking
from everfed.privacy.members import Members, set_text, to_bytes, to_tensor

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
    """What a sum that is opened is recorded under: the phase of the run; the model, in any round, at any repeat and for
    any server of the same recipe; the reply, whoever asks for it."""
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
    """Digest of the model that a reply answers, in a phase of a recipe, in any round; "" without either."""
    model = dict(client.messages.get(MODEL, {}))
    if client.attempt is None or not reply.values or not model:
        return ""
    return _digest([client.attempt.recipe, phase], {"model": model})


def reply_digest(phase: str, reply: Reply, client: Client) -> str:
    """Digest of a reply and of the model that it answers, whichever run asks, in any round; "" for a reply without
    values."""
    if client.attempt is None or not reply.values:
        return ""
    about = [phase, reply.samples, reply.steps]
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
