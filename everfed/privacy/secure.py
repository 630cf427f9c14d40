"""Secure aggregation on the clients' side: the server learns sums, and nothing of any one client.

The protocol of Bonawitz et al. (2017), "Practical Secure Aggregation for Privacy-Preserving Machine Learning", in four
steps inside every phase whose replies are added up:

    (the phase)  a client runs the phase, keeps its reply, and advertises two fresh public keys and the reply's form
    share        it splits its mask key and a seed of its own into shares, one encrypted for each other client
    mask         it sends its reply plus a mask from its seed plus or minus a mask shared with every other client
    unmask       it sends shares: of the seeds of clients whose vectors arrived, of the others' mask keys

Never both of one client: with both, its reply could be unmasked. Fewer than `threshold` clients cannot open anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed import (
    Collect,
    CompositionError,
    Context,
    Data,
    Message,
    Method,
    Optimizer,
    Part,
    Phase,
    Position,
    Protection,
    Reducer,
    State,
    Tree,
)
from everfed.core.client import Reply, synchronises
from everfed.core.phase import EVALUATE, TRAIN
from everfed.core.reduce import Total
from everfed.privacy import masking
from everfed.privacy.encoding import Code, encode, flat, form_from_text, form_of, form_to_text

NAME = "secure"
SHARE, MASK, UNMASK = "secure-share", "secure-mask", "secure-unmask"
FEWEST = 3  # of two clients, each could compute the other's reply from the sum
Weighing = Mapping[str, Mapping[str, bool]]  # phase -> "part/key" -> weighted by samples?


class ProtocolError(ValueError):
    """A request that no honest server makes; the client does not answer it."""


def needed(clients: int, threshold: float) -> int:
    """How many of `clients` must stay to the end: more than half in any case, so that no server can split them into two
    groups and have each unmask the other."""
    return max(2, clients // 2 + 1, math.ceil(threshold * clients))


@dataclass(frozen=True)
class SecureAggregation(Protection):
    """threshold: the share of a phase's clients that must stay to its end. clip, bits: floats are clipped to
    [-clip, clip] and sent in steps of 2 clip / 2^bits. weighing: what is added up, and how; `secured` fills it in."""

    threshold: float = 2 / 3
    clip: float = 16.0
    bits: int = 24
    weighing: Weighing = field(default_factory=dict)

    name = NAME
    adds = frozenset({"keys", "form"})

    def __post_init__(self) -> None:
        if not 0.5 < self.threshold <= 1:
            raise ValueError(f"threshold must be above 0.5 and at most 1; got {self.threshold}")
        if not 8 <= self.bits <= 28:
            raise ValueError(f"bits must be 8 to 28; got {self.bits}")
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"clip must be above 0; got {self.clip}")

    def check(self, parts: Sequence[Part], optimizer: Optimizer) -> Iterable[str]:
        masking.check_installed()
        return ()

    def phases(self) -> tuple[Phase, ...]:
        replies = {SHARE: ("letters",), MASK: ("narrow", "wide"), UNMASK: ("seeds", "keys")}
        return tuple(
            Phase(
                step,
                position=Position.INSIDE,
                reduce={key: Collect() for key in keys},
                run=partial(self._run, step),
            )
            for step, keys in replies.items()
        )

    def adds_up(self, phase: Phase, ctx: Context) -> bool:
        """Are there replies to protect?"""
        return bool(self.weighing.get(phase.name)) and (phase.name != TRAIN or synchronises(ctx))

    def code(self, phase: str, clients: int) -> Code:
        weighted = frozenset(path for path, weighed in self.weighing[phase].items() if weighed)
        return Code(self.clip, self.bits, clients, weighted)

    # the phase itself --------------------------------------------------------------------------------------------
    def seal(self, client: State, phase: Phase, message: Message, reply: Reply, ctx: Context) -> tuple[Tree, Reply]:
        """Keep the reply; advertise keys. Sample counts, steps and losses are not sent either."""
        if not self.adds_up(phase, ctx):
            return {"step": "idle"}, Reply({})
        unknown = set(flat(reply.values)) - set(self.weighing[phase.name])
        if unknown:
            raise CompositionError(f"phase {phase.name!r} replied {', '.join(sorted(unknown))} without a reducer")
        private = [masking.new_private(), masking.new_private()]
        own = {
            "step": SHARE,
            "phase": phase.name,
            "place": _place(ctx),
            "reply": {"values": reply.values, "samples": reply.samples, "steps": reply.steps, "loss": _loss(reply)},
            "private": to_tensor(b"".join(private)),
        }
        keys = to_tensor(b"".join(masking.public_of(key) for key in private))
        return own, Reply({self.name: {"keys": keys, "form": form_to_text(form_of(reply.values))}})

    # the steps inside it -----------------------------------------------------------------------------------------
    def _run(self, step: str, client: State, message: Message, data: Data, ctx: Context) -> tuple[Tree, Tree]:
        own, request = client.get(self.name, {}), message.get(self.name, {})
        if own.get("step") != step or own.get("place") != _place(ctx):
            raise ProtocolError(f"asked for {step}, but this client is at {own.get('step', 'nothing')}")
        steps = {SHARE: self._share, MASK: self._mask, UNMASK: self._unmask}
        return steps[step](own, request, _client(ctx))

    def _share(self, own: Tree, request: Tree, me: int) -> tuple[Tree, Tree]:
        publics = keys_by_client(request)
        if len(publics) < FEWEST:
            raise ProtocolError(f"{len(publics)} clients; secure aggregation needs {FEWEST}")
        private = _halves(to_bytes(own["private"]))
        if publics.get(me) != tuple(masking.public_of(key) for key in private):
            raise ProtocolError("the server passes on other keys than this client's")
        seed, threshold = masking.new_seed(), needed(len(publics), self.threshold)
        shares = {
            peer: mask_share + seed_share
            for peer, mask_share, seed_share in zip(
                publics,
                masking.split(private[0], threshold, len(publics)),
                masking.split(seed, threshold, len(publics)),
                strict=True,
            )
        }
        letters = {
            str(peer): to_tensor(
                masking.encrypt(masking.agree(private[1], publics[peer][1]), _letter(me, peer) + share)
            )
            for peer, share in shares.items()
            if peer != me
        }
        kept = {"clients": request["clients"], "keys": request["keys"], "seed": to_tensor(seed)}
        return {**own, **kept, "step": MASK, "shares": {str(me): to_tensor(shares[me])}}, {"letters": letters}

    def _mask(self, own: Tree, request: Tree, me: int) -> tuple[Tree, Tree]:
        """Keep the shares that the others sent; mask the reply."""
        publics, sharing = keys_by_client(own), [int(client) for client in request["sharing"]]
        if len(sharing) < needed(len(publics), self.threshold) or not {me} <= set(sharing) <= set(publics):
            raise ProtocolError(f"{len(sharing)} of {len(publics)} clients shared their keys")
        private = _halves(to_bytes(own["private"]))
        shares = dict(own["shares"])
        for peer in sharing:
            if peer != me:
                letter = masking.decrypt(masking.agree(private[1], publics[peer][1]), _letter_of(request, peer))
                shares[str(peer)] = to_tensor(_opened(letter, peer, me))
        phase = own["phase"]
        form = form_from_text(request["form"], frozenset(self.weighing[phase]))
        code = self.code(phase, len(publics))
        secrets = {peer: masking.agree(private[0], publics[peer][0]) for peer in sharing if peer != me}
        vectors = []
        for vector, part in zip(encode(_reply(own["reply"]), form, code), (b"narrow", b"wide"), strict=True):
            vectors.append(masked(vector, me, to_bytes(own["seed"]), secrets, part))
        kept = {"step": UNMASK, "phase": phase, "place": own["place"], "shares": shares, "sharing": request["sharing"]}
        return {**kept, "clients": own["clients"]}, {"narrow": as_sent(vectors[0]), "wide": as_sent(vectors[1])}

    def _unmask(self, own: Tree, request: Tree, me: int) -> tuple[Tree, Tree]:
        """Shares of seeds or of mask keys, never both of one client, and once only."""
        alive, gone = ({int(client) for client in request[key]} for key in ("alive", "gone"))
        sharing = {int(client) for client in own["sharing"]}
        if alive & gone or alive | gone != sharing or me not in alive:
            raise ProtocolError("the server's account of who is alive and who is gone does not add up")
        if len(alive) < needed(len(own["clients"]), self.threshold):
            raise ProtocolError(f"{len(alive)} of {len(own['clients'])} clients are left; too few to open a sum")
        halves = {int(peer): _halves(to_bytes(share)) for peer, share in own["shares"].items()}
        seeds = {str(peer): to_tensor(halves[peer][1]) for peer in sorted(alive)}
        keys = {str(peer): to_tensor(halves[peer][0]) for peer in sorted(gone)}
        return {"step": "idle"}, {"seeds": seeds, **({"keys": keys} if keys else {})}


# masks ---------------------------------------------------------------------------------------------------------------
def masked(vector: np.ndarray, me: int, seed: bytes, secrets: Mapping[int, bytes], part: bytes) -> np.ndarray:
    """The vector plus the client's own mask, plus the masks shared with higher clients, minus those with lower ones."""
    out = vector.copy()
    masking.add_mask(out, seed, part)
    for peer, secret in secrets.items():
        masking.add_mask(out, secret, part, minus=peer < me)
    return out


def secured(method: Method, threshold: float = 2 / 3, clip: float = 16.0, bits: int = 24) -> Method:
    """The method under secure aggregation. Raises CompositionError where the server must see single replies."""
    shown = method.reveals()
    if shown:
        phase, parts = next(iter(shown.items()))
        raise CompositionError(
            f"privacy.secure_aggregation: method {method.name!r} cannot run under it: in phase {phase!r} the server "
            f"needs every client's own reply to {' and '.join(parts)}, not their sum; switch it off or choose a method "
            "whose replies are added up (docs/privacy.md lists them)"
        )
    weighing = {phase.name: _weighing(method.reducers(phase)) for phase in method.scheduled_phases()}
    weighing[EVALUATE] = {f"{EVALUATE}/counts": False}
    part = SecureAggregation(threshold, clip, bits, weighing)
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


# bytes in trees ------------------------------------------------------------------------------------------------------
def to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def as_sent(vector: np.ndarray) -> Tensor:
    """Unsigned numbers as the signed ones of the same bits, which every format has."""
    return torch.from_numpy(vector.view(np.int32 if vector.dtype == np.uint32 else np.int64))


def keys_by_client(request: Tree) -> dict[int, tuple[bytes, bytes]]:
    """{client: (mask key, letter key)} of the public keys that the server passes on, in client order."""
    rows = [to_bytes(row) for row in request["keys"]]
    clients = [int(client) for client in request["clients"]]
    if len(rows) != len(clients) or clients != sorted(set(clients)) or any(len(r) != 2 * masking.PUBLIC for r in rows):
        raise ProtocolError("not a list of clients and their keys")
    return {client: (row[: masking.PUBLIC], row[masking.PUBLIC :]) for client, row in zip(clients, rows, strict=True)}


def _halves(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


def _letter(sender: int, receiver: int) -> bytes:
    """The header of a letter: sender and receiver, so that none can be redirected."""
    return sender.to_bytes(8, "little") + receiver.to_bytes(8, "little")


def _letter_of(request: Tree, peer: int) -> bytes:
    letter = request.get("letters", {}).get(str(peer))
    if not isinstance(letter, Tensor):
        raise ProtocolError(f"no letter of client {peer}")
    return to_bytes(letter)


def _opened(letter: bytes, sender: int, receiver: int) -> bytes:
    if letter[:16] != _letter(sender, receiver):
        raise ProtocolError(f"a letter that is not of client {sender}")
    return letter[16:]


def _place(ctx: Context) -> str:
    return f"{ctx.round}.{ctx.repeat}"


def _client(ctx: Context) -> int:
    if ctx.client is None:
        raise ProtocolError("no client")
    return ctx.client


def _loss(reply: Reply) -> float | None:
    return None if reply.loss is None else float(reply.loss)


def _reply(kept: Tree) -> Reply:
    values: dict[str, Any] = kept["values"]
    return Reply(values, kept["samples"], kept["steps"], kept["loss"])
