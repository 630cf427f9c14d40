"""Secure aggregation on the clients' side: the server learns sums, and nothing of any one client.

The protocol of Bonawitz et al. (2017), "Practical Secure Aggregation for Privacy-Preserving Machine Learning", with the
consistency check of its Fig. 4, in steps inside every phase whose replies are added up:

    (the phase)  a client runs the phase, keeps its reply, and advertises two fresh public keys and the reply's form
    share        it splits its mask key and a seed of its own into shares, one encrypted for each other client
    mask         it sends its reply plus a mask from its seed plus or minus a mask shared with every other client
    agree        it sends a vote on the set of clients whose vectors arrived, authenticated for each of them
    recover      only if some are gone: having seen enough equal votes, it sends its shares of their mask keys
    unmask       having seen enough equal votes, it sends its shares of the seeds of those whose vectors arrived
    keys         only after a client was left out because it lied: fresh keys for the same reply, then `share` again

Never seed and mask key of one client: with both, its reply could be unmasked. Fewer than `threshold` clients cannot
open anything. A client that unmasks records the set in its ledger first, and never contributes the same reply, or to
the same phase of the same run, in any other set: the difference of two such sums would be replies of single clients.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.client import Reply
from everfed.core.context import Facts
from everfed.core.handle import Handle
from everfed.core.option import SumOptions
from everfed.core.phase import EVALUATE, TRAIN, Total
from everfed.core.tree import leaves
from everfed.method import (
    MODEL,
    Client,
    Collect,
    CompositionError,
    Method,
    Optimizer,
    Part,
    Phase,
    Protection,
    Reducer,
    Tree,
    Values,
    When,
)
from everfed.privacy import masking, shamir
from everfed.privacy.encoding import Code, EncodingError, Form, encode, flat, form_of, form_to_text, is_finite
from everfed.privacy.secure_members import (
    FEWEST,
    Members,
    as_sent,
    by_client,
    client_list,
    needed,
    set_text,
    sized,
    to_bytes,
    to_tensor,
    where,
)

NAME = "secure"
SHARE, MASK, AGREE = "secure-share", "secure-mask", "secure-agree"
RECOVER, UNMASK, KEYS = "secure-recover", "secure-unmask", "secure-keys"
REPLIES = {
    SHARE: ("letters", "commitments", "proof", "complaints"),
    MASK: ("narrow", "wide", "complaints"),
    AGREE: ("votes",),
    RECOVER: ("keys",),
    UNMASK: ("seeds", "doubts"),
    KEYS: ("keys", "signed"),
}
VECTORS = (b"narrow", b"wide")
MASKS, LETTERS, VOTES = b"masks", b"letters", b"votes"  # what agreed secrets are for
_IDLE = "idle"
LONGEST_SIGNED = 1000  # characters of a name and a signature
_KEPT = ("phase", "place", "epoch", "asked", "model", "result", "reply", "form")  # through a change of keys
Request = Mapping[str, Any]
Weighing = Mapping[str, Mapping[str, bool]]  # phase -> "part/key" -> weighted by samples?
_LOG = logging.getLogger("everfed.client")


class ProtocolError(ValueError):
    """A request that no honest server makes; the client does not answer it."""


@dataclass(frozen=True)
class SecureAggregation(Protection, SumOptions):
    """weighing: what is added up, and how; declared: by phase, how many numbers its values declare. `secured` fills
    both in."""

    weighing: Weighing = field(default_factory=dict)
    declared: Mapping[str, Callable[[Facts], int]] = field(default_factory=dict, compare=False)

    name = NAME
    adds = frozenset({"keys", "form", "signed", "asked", "broken", "opened"})
    per_epoch = True

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        masking.check_installed()
        return ()

    def phases(self) -> tuple[Phase, ...]:
        return tuple(
            Phase(step, when=When.INSIDE, reduce={key: Collect() for key in keys}, run=partial(self._run, step))
            for step, keys in REPLIES.items()
        )

    def adds_up(self, phase: Phase, side: Handle) -> bool:
        """Are there replies to protect?"""
        return bool(self.weighing.get(phase.name)) and (phase.name != TRAIN or side.synchronises)

    def largest_form(self, phase: str, facts: Facts) -> int:
        """How many numbers a sum may have: 64 models, and what the values declare beyond."""
        return 64 * facts.layout.size + (1 << 20) + (self.declared[phase](facts) if phase in self.declared else 0)

    def code(self, phase: str, clients: int) -> Code:
        weighted = frozenset(path for path, weighed in self.weighing[phase].items() if weighed)
        return Code(self.clip, self.bits, clients, weighted)

    # the phase itself --------------------------------------------------------------------------------------------
    def seal(self, client: Client, phase: Phase, reply: Reply) -> Reply:
        """Keep the reply; advertise keys. Sample counts, steps and losses are not sent either."""
        if not self.adds_up(phase, client):
            client.state = {"step": _IDLE}
            return Reply({})
        unknown = set(flat(reply.values)) - set(self.weighing[phase.name])
        if unknown:
            raise CompositionError(f"phase {phase.name!r} replied {', '.join(sorted(unknown))} without a reducer")
        broken = not is_finite(reply)
        if broken:  # it has nothing to add up, and must not be counted among those that have
            reply = Reply({})
        form = form_to_text(form_of(reply.values))
        own = {
            "phase": phase.name,
            "place": _place_of(client),
            "epoch": _epoch_of(client),
            "asked": "" if client.attempt is None else client.attempt.asked,
            "model": _model_digest(phase.name, reply, client),
            "result": _reply_digest(phase.name, reply, client),
            "reply": {"values": reply.values, "samples": reply.samples, "steps": reply.steps, "loss": _loss(reply)},
            "form": form,
            "step": SHARE,
        }
        client.state, advertised = _with_new_keys(own, client)
        said = {**advertised, "form": form, **({"asked": own["asked"]} if own["asked"] else {})}
        said |= _opened_elsewhere(own, client)
        return Reply({self.name: {**said, "broken": True} if broken else said})

    # the steps inside it -----------------------------------------------------------------------------------------
    def _run(self, step: str, client: Client) -> Values:
        own = client.state
        at = own.get("step", "nothing")
        expected = at in REPLIES if step == KEYS else at == step
        if not expected or own.get("place") != _place_of(client) or own.get("epoch") != _epoch_of(client):
            raise ProtocolError(
                f"asked for {step} at {_place_of(client)} in epoch {_epoch_of(client)} of the server, but this client "
                f"is at {at} of {own.get('place', 'no place')}, epoch {own.get('epoch', 'none')}; a phase begins with "
                "fresh keys"
            )
        steps = {SHARE: self._share, MASK: self._mask, AGREE: self._agree}
        steps |= {RECOVER: self._recover, UNMASK: self._unmask, KEYS: self._renew}
        client.state, reply = steps[step](own, client.message, client)
        return reply

    def _share(self, own: Tree, request: Request, client: Client) -> tuple[Tree, Tree]:
        """Check who is to be added up with, and split the secrets among them."""
        members, me = self._members(own, request), client.id
        private = _private_keys(own)
        if members.keys.get(me) != b"".join(map(masking.public_of, private)) or members.forms[me] != own["form"]:
            raise ProtocolError("the server passes on other keys, or another form, than this client's")
        if len(members.clients) < FEWEST:
            raise ProtocolError(f"{len(members.clients)} clients; secure aggregation needs {FEWEST}")
        if not self._form(own, members, client):
            raise ProtocolError(f"no value is in the replies of {self._needed(members)} of the members: no sum")
        unknown = _unknown_members(own, members, client)
        if unknown:
            return own, {"complaints": torch.tensor(unknown)}
        seed, count = masking.new_seed(), len(members.clients)
        dealing = shamir.deal(private[0], seed, needed(count, self.threshold), count, members.dealer(me))
        shares = dict(zip(members.clients, dealing.shares, strict=True))

        def sealed(peer: int, share: bytes) -> bytes:
            about = _letter_context(own, members, me, peer, client)
            return masking.encrypt(_letter_secret(own, members, peer), share, about)

        letters = {str(peer): to_tensor(sealed(peer, share)) for peer, share in shares.items() if peer != me}
        kept = {"members": members.to_tree(), "seed": to_tensor(seed), "shares": {str(me): to_tensor(shares[me])}}
        reply = {"letters": letters, "commitments": to_tensor(dealing.commitments), "proof": to_tensor(dealing.proof)}
        return {**own, **kept, "step": MASK}, reply

    def _mask(self, own: Tree, request: Request, client: Client) -> tuple[Tree, Tree]:
        """Check the shares that the others sent, and keep them; mask the reply. Names the senders of bad ones instead:
        nothing is sent then, and the server begins again without the liar."""
        members, me = self._members(own, own["members"]), client.id
        sharing = _clients_of(request, "sharing")
        if len(sharing) < self._needed(members) or not {me} <= set(sharing) <= set(members.clients):
            raise ProtocolError(f"{len(sharing)} of {len(members.clients)} clients shared their keys")
        _require_same_set(own, sharing, client)
        shares = {peer: self._opened(own, members, peer, request, client) for peer in sharing if peer != me}
        liars = [peer for peer, share in shares.items() if share is None]
        if liars:
            return own, {"complaints": torch.tensor(liars)}
        received = {str(peer): to_tensor(share) for peer, share in shares.items() if share is not None}
        vectors = self._masked(own, members, sharing, client)
        kept = {key: value for key, value in own.items() if key != "seed"}
        kept |= {"step": AGREE, "sharing": request["sharing"], "shares": {**own["shares"], **received}}
        return kept, {"narrow": as_sent(vectors[0]), "wide": as_sent(vectors[1])}

    def _opened(self, own: Tree, members: Members, peer: int, request: Request, client: Client) -> bytes | None:
        """The shares in a peer's letter; None where it cannot be opened or they are not what the peer committed to."""
        me, count = client.id, len(members.clients)
        letter = sized(request.get("letters", {}).get(str(peer)), masking.NONCE + shamir.DEALT + masking.TAG)
        commitments = sized(request.get("commitments", {}).get(str(peer)), count * shamir.COMMITMENT)
        proof = sized(request.get("proofs", {}).get(str(peer)), self._needed(members) * shamir.SHARE)
        if letter is None or commitments is None or proof is None:
            raise ProtocolError(f"no letter of client {peer}, or none of the right size")
        secret = _letter_secret(own, members, peer)
        try:
            share = masking.decrypt(secret, letter, _letter_context(own, members, peer, me, client))
        except ValueError:
            return None
        place, threshold = members.share_place(me), self._needed(members)
        return share if shamir.is_sound(share, place, commitments, proof, threshold, members.dealer(peer)) else None

    def _masked(self, own: Tree, members: Members, sharing: list[int], client: Client) -> list[np.ndarray]:
        form, code = self._form(own, members, client), self.code(own["phase"], len(members.clients))
        private, me, bound = _private_keys(own), client.id, members.sum_of(sharing)
        secrets = {peer: masking.agree(private[0], members.mask_key(peer), MASKS) for peer in sharing if peer != me}
        encoded = zip(encode(_reply(own["reply"]), form, code), VECTORS, strict=True)
        return [masked(vector, me, to_bytes(own["seed"]), secrets, part + bound) for vector, part in encoded]

    def _agree(self, own: Tree, request: Request, client: Client) -> tuple[Tree, Tree]:
        """Vote for the set that is to be opened, in a way that each member of it can check."""
        members, me, alive = self._members(own, own["members"]), client.id, _clients_of(request, "alive")
        sharing = client_list(own["sharing"])
        if not {me} <= set(alive) <= set(sharing):
            raise ProtocolError("the set to open is not one of clients that shared their keys, with this one")
        if len(alive) < self._needed(members):
            raise ProtocolError(f"{len(alive)} of {len(members.clients)} clients are left; too few to open a sum")
        for path in self._form(own, members, client):
            having = sum(path in json.loads(members.forms[peer]) for peer in alive)
            if having < self._needed(members):
                raise ProtocolError(f"{path} is in the replies of {having} of the clients that are left: no sum")
        _require_same_set(own, alive, client)
        votes = {
            str(peer): to_tensor(masking.mac(_vote_secret(own, members, peer), _vote_text(members, sharing, alive, me)))
            for peer in alive
            if peer != me
        }
        gone = set(sharing) - set(alive)
        return {**own, "step": RECOVER if gone else UNMASK, "alive": request["alive"]}, {"votes": votes}

    def _recover(self, own: Tree, request: Request, client: Client) -> tuple[Tree, Tree]:
        """Shares of the mask keys of those that are gone. They open nothing yet."""
        self._require_votes(own, request, client)
        gone = set(client_list(own["sharing"])) - set(client_list(own["alive"]))
        keys = {str(peer): to_tensor(shamir.key_share(to_bytes(own["shares"][str(peer)]))) for peer in sorted(gone)}
        return {**own, "step": UNMASK}, {"keys": keys}

    def _unmask(self, own: Tree, request: Request, client: Client) -> tuple[Tree, Tree]:
        """Shares of the seeds of those that are there; recorded before they are sent."""
        doubts = self._require_votes(own, request, client)
        alive = client_list(own["alive"])
        _require_same_set(own, alive, client)
        if client.attempt is not None:
            for key in _ledger_keys(own, client):
                client.attempt.ledger.record(key, set_text(alive))
        seeds = {str(peer): to_tensor(shamir.seed_share(to_bytes(own["shares"][str(peer)]))) for peer in alive}
        return {"step": _IDLE}, {"seeds": seeds, **({"doubts": torch.tensor(doubts)} if doubts else {})}

    def _renew(self, own: Tree, request: Request, client: Client) -> tuple[Tree, Tree]:
        """Fresh keys for the same reply. Shares of the old ones are dropped: what was masked with them stays masked."""
        return _with_new_keys({**{key: own[key] for key in _KEPT}, "step": SHARE}, client)

    # checks ------------------------------------------------------------------------------------------------------
    def _needed(self, members: Members) -> int:
        return needed(len(members.clients), self.threshold)

    def _members(self, own: Tree, request: Request) -> Members:
        try:
            return Members.from_tree(request, where(own["phase"], own["place"], own["asked"]))
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def _form(self, own: Tree, members: Members, client: Client) -> Form:
        """The form of the sum, from what the members advertised."""
        try:
            allowed, largest = frozenset(self.weighing[own["phase"]]), self.largest_form(own["phase"], client.facts)
            return members.form(allowed, largest, self._needed(members))
        except EncodingError as error:
            raise ProtocolError(str(error)) from error

    def _require_votes(self, own: Tree, request: Request, client: Client) -> list[int]:
        """At least `threshold` clients, this one included, voted for the set that this one voted for. Returns those
        whose vote is for something else."""
        members, me = self._members(own, own["members"]), client.id
        sharing, alive = client_list(own["sharing"]), client_list(own["alive"])
        cast = by_client(request.get("votes"), masking.MAC)
        equal = {
            peer: masking.is_mac(vote, _vote_secret(own, members, peer), _vote_text(members, sharing, alive, peer))
            for peer, vote in cast.items()
            if peer in alive and peer != me
        }
        agreeing = 1 + sum(equal.values())
        if agreeing < self._needed(members):
            raise ProtocolError(f"{agreeing} clients agree on the set to open; {self._needed(members)} are needed")
        return sorted(peer for peer, vote in equal.items() if not vote)


def masked(vector: np.ndarray, me: int, seed: bytes, secrets: Mapping[int, bytes], part: bytes) -> np.ndarray:
    """The vector plus the client's own mask, plus the masks shared with higher clients, minus those with lower ones."""
    out = vector.copy()
    masking.add_mask(out, seed, part)
    for peer, secret in secrets.items():
        masking.add_mask(out, secret, part, minus=peer < me)
    return out


def secured(method: Method, **options: Any) -> Method:
    """The method under secure aggregation. Raises CompositionError where the server must see single replies."""
    shown = method.reveals()
    if shown:
        phase, parts = next(iter(shown.items()))
        raise CompositionError(
            f"privacy.secure_aggregation: method {method.name!r} cannot run under it: in phase {phase!r} the server "
            f"needs every client's own reply to {' and '.join(parts)}, not their sum; switch it off or choose a method "
            "whose replies are added up (docs/privacy-reference.md lists them)"
        )
    weighing = {phase.name: _weighing(method.reducers(phase)) for phase in method.scheduled_phases()}
    weighing[EVALUATE] = {f"{EVALUATE}/counts": False}
    declared = {phase.name: partial(method.declared_numbers, phase) for phase in method.scheduled_phases()}
    part = SecureAggregation(**options, weighing=weighing, declared=declared)
    part.check(method.parts, Optimizer())
    return Method(method.name, (*method.parts, part), method.warnings)


def _weighing(reducers: Mapping[str, Mapping[str, Reducer]]) -> dict[str, bool]:
    found = {}
    for part, keys in reducers.items():
        for key, reducer in keys.items():
            total = reducer.start()
            if not isinstance(total, Total):
                raise CompositionError(
                    f"privacy.secure_aggregation: {part}/{key} is reduced by {reducer!r}, not added up"
                )
            found[f"{part}/{key}"] = total.weighted
    return found


def _clients_of(request: Request, key: str) -> list[int]:
    try:
        return client_list(request.get(key))
    except ValueError as error:
        raise ProtocolError(f"{key}: {error}") from error


def _loss(reply: Reply) -> float | None:
    return None if reply.loss is None else float(reply.loss)


def _reply(kept: Tree) -> Reply:
    values: dict[str, Any] = kept["values"]
    return Reply(values, kept["samples"], kept["steps"], kept["loss"])


# what a client signs, seals and records ------------------------------------------------------------------------------
def _with_new_keys(own: Tree, client: Client) -> tuple[Tree, Tree]:
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


def _unknown_members(own: Tree, members: Members, client: Client) -> list[int]:
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


def _ledger_keys(own: Tree, client: Client) -> list[str]:
    """What a sum that is opened is recorded under: the phase of the run; the model, at any repeat and for any server
    of the same recipe; the reply, whoever asks for it."""
    if client.attempt is None:  # a simulation: its clients' store is saved and restored with the server's state
        return []
    phase = f"{client.attempt.run} {own['phase']} {own['place']}"
    return [f"opened {name}" for name in (phase, own["model"], own["result"]) if name]


def _opened_elsewhere(own: Tree, client: Client) -> Tree:
    """The clients with whom this very reply was opened in another round, if it was. A sum with other clients then goes
    on without it; a sum of the same round is refused instead (`_require_same_set`)."""
    if client.attempt is None or not own["result"]:
        return {}
    *here, reply = map(client.attempt.ledger.find, _ledger_keys(own, client))
    return {} if reply is None or any(here) else {"opened": reply}


def _require_same_set(own: Tree, clients: Iterable[int], client: Client) -> None:
    """Raises ProtocolError where this reply, or this phase, was opened in a sum of other clients."""
    for key in _ledger_keys(own, client):
        known = client.attempt.ledger.find(key) if client.attempt else None
        if known is not None and known != set_text(clients):
            raise ProtocolError(
                f"this reply to phase {own['phase']!r} was opened in a sum of clients {known}; the difference to a sum "
                f"of clients {set_text(clients)} would reveal single replies. Resume with the same clients, or begin a "
                "run with another seed"
            )


def _model_digest(phase: str, reply: Reply, client: Client) -> str:
    """Digest of the model that a reply answers, in a phase of a round of a recipe; "" without either."""
    model = dict(client.messages.get(MODEL, {}))
    if client.attempt is None or not reply.values or not model:
        return ""
    return _digest([client.attempt.recipe, phase, client.round], {"model": model})


def _reply_digest(phase: str, reply: Reply, client: Client) -> str:
    """Digest of a reply and of the model that it answers, in whichever run and round; "" for one without values."""
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


def _private_keys(own: Tree) -> tuple[bytes, bytes]:
    """(of masks, of letters and votes)."""
    both = to_bytes(own["private"])
    return both[: len(both) // 2], both[len(both) // 2 :]


def _letter_secret(own: Tree, members: Members, peer: int) -> bytes:
    return masking.agree(_private_keys(own)[1], members.letter_key(peer), LETTERS)


def _vote_secret(own: Tree, members: Members, peer: int) -> bytes:
    return masking.agree(_private_keys(own)[1], members.letter_key(peer), VOTES)


def _vote_text(members: Members, sharing: list[int], alive: list[int], voter: int) -> bytes:
    """What a client authenticates when it votes for opening the sum of `alive`."""
    return members.sum_of(sharing) + f"client {voter} opens {set_text(alive)}".encode()


def _letter_context(own: Tree, members: Members, sender: int, receiver: int, client: Client) -> bytes:
    """What a letter is bound to, so that it opens at no other time, for no other client and in no other group."""
    return json.dumps([*_where(own, client), sender, receiver, members.digest.hex()]).encode()


def _where(own: Tree, client: Client) -> list[str | int]:
    """The run, and the phase in it."""
    return ["" if client.attempt is None else client.attempt.run, own["epoch"], own["phase"], own["place"]]


def _place_of(client: Client) -> str:
    """Round and repeat."""
    return f"{client.round}.{client.repeat}"


def _epoch_of(client: Client) -> int:
    return 0 if client.attempt is None else client.attempt.epoch
