"""The adapter to Flower. Only this folder imports it, and nothing outside does so at its top: Flower is an extra."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from everfed.errors import UserError

LEAST, BELOW = "1.41", "2"  # the versions of Flower that fit, as in pyproject.toml


def require_flower() -> None:
    """Raises UserError when Flower is not installed, or in a version that does not fit."""
    if find_spec("flwr") is None:
        raise UserError("a federation needs Flower: pip install 'everfed[flower]'")
    found = version("flwr")
    if not _numbers(LEAST) <= _numbers(found) < _numbers(BELOW):
        raise UserError(f"flwr {found} does not fit; install 'flwr>={LEAST},<{BELOW}'")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
