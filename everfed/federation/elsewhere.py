"""The data of a server that has none: stream.dataset = "everfed.federation.elsewhere:data" in a recipe whose clients
bring streams of their own (scenario "own", with classes and input_shape)."""

from __future__ import annotations

from typing import Any


def data(client: int) -> tuple[Any, ...]:
    """No periods: they are on the clients."""
    return ()
