"""What both sides of secure aggregation know: the members of a sum with their keys and forms, and bytes in trees.

What members agree on is in one digest, to which shares, masks and votes are bound: none can be used at another time, in
another group or for another question.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.core.tree import Tree
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
