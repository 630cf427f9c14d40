"""Settings of Flower 1.41 without an option: how long it waits, how large its objects are."""

from __future__ import annotations

from flwr.app.message import array
from flwr.supercore.inflatable import inflatable_utils

FIRST, LONGEST = 0.05, 0.5  # seconds before an object that has not arrived is requested again, doubled up to this
CHUNK = 16 << 20  # bytes of one request


def tune() -> None:
    """Apply them to this process.

    A message is announced before its objects are sent, and pulling an object that has not arrived sleeps: in Flower for
    one second, two, four, up to ten, which was most of a small phase. It still gives up after two hours, but no longer
    after 500 tries. Every object is a request with several database transactions, so objects are made larger.
    """
    waits = {"initial_backoff": FIRST, "backoff_cap": LONGEST, "max_tries_per_object": None}
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__.update(waits)
    array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE = CHUNK
