"""The adapter to Flower. Only this folder imports it, and nothing outside does so at its top: Flower is an extra."""

from __future__ import annotations

from importlib.util import find_spec

from everfed.errors import UserError


def require_flower() -> None:
    """Raises UserError when Flower is not installed, or in a version that does not fit."""
    if find_spec("flwr") is None:
        raise UserError("a federation needs Flower: pip install 'everfed[flower]'")
    from everfed.federation.flower.touches import require_fitting

    require_fitting()
