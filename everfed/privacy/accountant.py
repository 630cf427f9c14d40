"""How much of a privacy budget is spent, computed by Google's dp-accounting."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from everfed.errors import UserError


class MissingAccountant(UserError):
    """Differential privacy without the package that accounts for it."""


def check_installed() -> None:
    """Refuse to start where spending could not be accounted for."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise MissingAccountant(
            "privacy.dp is accounted for by dp-accounting; pip install 'everfed[privacy]'"
        ) from error


def epsilon(noise: float, releases: Mapping[int, int], delta: float, sensitivity: float = 1.0) -> float:
    """The epsilon at `delta` that has been spent by Gaussian mechanisms.

    noise: standard deviation in units of the clip. releases: {K: how often K values, each clipped and noised by itself,
    were released at once}; K values are one Gaussian mechanism whose sensitivity is sqrt(K) times as large.
    sensitivity: in units of the clip; 1 where a client is there or not, 2 where its reply is exchanged for another.
    No amplification by sampling is claimed: every release counts as if all clients had taken part.
    """
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for values, count in sorted(releases.items()):
        if count:
            accountant.compose(GaussianDpEvent(noise / (sensitivity * sqrt(values))), count)
    return float(accountant.get_epsilon(delta)) if any(releases.values()) else 0.0
