"""A dataset without samples, for a server: stream.dataset = "everfed.federation.elsewhere:data" in a recipe whose
clients have streams of their own (scenario "own", with classes and input_shape)."""

from __future__ import annotations

from typing import Any


def data(client: int) -> tuple[Any, ...]:
    """No periods: the data is on the clients."""
    return ()
