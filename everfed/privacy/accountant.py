"""How much of a privacy budget is spent, computed by Google's dp-accounting."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, sqrt

from everfed.errors import UserError


class MissingAccountant(UserError):
    """Differential privacy without the package that accounts for it."""


def check_installed() -> None:
    """Refuse to start where noise could not be drawn or spending not be accounted for."""
    try:
        import cryptography  # noqa: F401
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise MissingAccountant(
            "privacy.dp is accounted for by dp-accounting, and its noise drawn by cryptography; "
            "pip install 'everfed[privacy]'"
        ) from error


def multiplier(noise: float, values: int, sensitivity: float = 1.0) -> float:
    """The noise of one release in units of its sensitivity. noise, sensitivity: in units of the clip; `values`, each
    clipped and noised by itself, are one Gaussian mechanism whose sensitivity is sqrt(values) times as large."""
    return noise / (sensitivity * sqrt(values))


def epsilon(noise: float, releases: Mapping[int, int], delta: float, sensitivity: float = 1.0) -> float:
    """The epsilon at `delta` that has been spent by Gaussian mechanisms of one noise.

    noise: standard deviation in units of the clip. releases: {K: how often K values were released at once}.
    sensitivity: in units of the clip; 1 where a client is there or not, 2 where its reply is exchanged for another.
    No amplification by sampling is claimed: every release counts as if all clients had taken part.
    """
    return composed({multiplier(noise, K, sensitivity): releases[K] for K in sorted(releases)}, delta)


def composed(releases: Mapping[float, int], delta: float) -> float:
    """The epsilon at `delta` of Gaussian mechanisms, {multiplier: how often}; infinite where one had no noise."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    if releases.get(0.0):
        return inf
    accountant = RdpAccountant()
    for noise, count in releases.items():
        if count:
            accountant.compose(GaussianDpEvent(noise), count)
    return float(accountant.get_epsilon(delta)) if any(releases.values()) else 0.0
