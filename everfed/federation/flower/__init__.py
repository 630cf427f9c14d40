"""The adapter to Flower. Only this folder imports it, and nothing outside does so at its top: Flower is an extra."""

from __future__ import annotations

import os
from importlib.util import find_spec

from everfed.errors import UserError

CHUNK = 16 << 20  # bytes of one object of a message: each is a request with several transactions
os.environ.setdefault("FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", str(CHUNK))  # read when Flower is imported


def require_flower() -> None:
    """Raises UserError when Flower is not installed, or in a version that does not fit."""
    if find_spec("flwr") is None:
        raise UserError("a federation needs Flower: pip install 'everfed[flower]'")
    from everfed.federation.flower.touches import require_fitting

    require_fitting()
