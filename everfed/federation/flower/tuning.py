"""Settings of Flower 1.41 that it has no option for: how long it waits, how large its pieces are."""

from __future__ import annotations

from flwr.app.message import array
from flwr.supercore.inflatable import inflatable_utils

FIRST, LONGEST = 0.05, 0.5  # seconds until an object that is not there yet is looked for again, doubled up to this
CHUNK = 16 << 20  # bytes of one request


def tune() -> None:
    """For this process.

    A message is announced before its objects are sent, and whoever pulls one that is not there yet sleeps: Flower for
    one second, two, four, up to ten; that was most of a small phase. It gives up after its two hours, as before, and no
    longer after 500 looks. Every object is a request with several database transactions, so they are made larger.
    """
    waits = {"initial_backoff": FIRST, "backoff_cap": LONGEST, "max_tries_per_object": None}
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__.update(waits)
    array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = CHUNK
