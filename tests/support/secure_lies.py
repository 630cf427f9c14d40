"""Lies of one client in the steps of secure aggregation: name -> (step, what it sends instead of its values)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from everfed.core.tree import map_tensors
from everfed.privacy.secure_client import AGREE, MASK, SHARE, UNMASK

Lie = Callable[[dict[str, Any]], Any]
OFF_CURVE = torch.full((66,), 255, dtype=torch.uint8)


def changed(tree: Any) -> Any:
    """Every tensor with its lowest bits flipped."""
    return map_tensors(lambda tensor: tensor ^ 1, tree) if isinstance(tree, dict) else tree ^ 1


def key(name: str, value: Any) -> Lie:
    return lambda reply: {**reply, name: value(reply[name]) if callable(value) else value}


# before the sum is opened: the liar is left out
LEFT_OUT: dict[str, tuple[str, Lie]] = {
    "keys that are no points on the curve": ("train", key("keys", OFF_CURVE)),
    "keys of zeros": ("train", key("keys", torch.zeros(66, dtype=torch.uint8))),
    "keys of another type": ("train", key("keys", "keys")),
    "a form of another type": ("train", key("form", 5)),
    "letters that cannot be opened": (SHARE, key("letters", changed)),
    "letters of another size": (SHARE, key("letters", lambda tree: map_tensors(lambda t: t[:-1], tree))),
    "letters to strangers": (SHARE, key("letters", lambda tree: {str(int(k) + 7): v for k, v in tree.items()})),
    "letters under odd names": (SHARE, key("letters", lambda tree: {f"{k}x": v for k, v in tree.items()})),
    "commitments to other shares": (SHARE, key("commitments", changed)),
    "commitments that are too few": (SHARE, key("commitments", lambda t: t[:-1])),
    "a proof of something else": (SHARE, key("proof", changed)),
    "a proof of another degree": (SHARE, key("proof", lambda t: t.repeat(2))),
    "nothing to share": (SHARE, lambda reply: {}),
    "complaints about everyone": (MASK, lambda reply: {"complaints": torch.tensor([1, 2, 3, 4])}),
    "complaints in an odd form": (MASK, lambda reply: {"complaints": torch.zeros(2, 2)}),
    "a vector of another size": (MASK, key("narrow", torch.zeros(3, dtype=torch.int32))),
    "a vector of another type": (MASK, key("wide", lambda t: t.double())),
    "no vector": (MASK, lambda reply: {}),
}
# when its vector is in the sum already: the lie does not count
IGNORED: dict[str, tuple[str, Lie]] = {
    "votes for something else": (AGREE, key("votes", changed)),
    "no votes": (AGREE, lambda reply: {}),
    "votes of another type": (AGREE, key("votes", 3)),
    "false shares of seeds": (UNMASK, key("seeds", changed)),
    "shares of another size": (UNMASK, key("seeds", lambda tree: map_tensors(lambda t: t[:5], tree))),
    "another client's share": (UNMASK, key("seeds", lambda tree: {**tree, "1": tree["2"]})),
    "no shares": (UNMASK, lambda reply: {}),
}
