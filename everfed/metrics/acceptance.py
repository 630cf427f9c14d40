"""When a published number, or the claim of an experiment, counts as reproduced.

All values and deviations are in points (per cent), as the papers print them. A deviation that a paper does not give is
None and widens nothing. Whether a cell may be compared at all is `never_compared`'s answer.
"""

from __future__ import annotations

from collections.abc import Mapping

CELL_FLOOR = 3.0
SIGN_MARGIN = 2.0
_ROUNDING = 1e-9  # published decimals are not exact in binary: 8.05 - 5.05 must count as 3 points


def cell_tolerance(std_ours: float | None, std_paper: float | None) -> float:
    """max(2 * (std_ours + std_paper), 3 points)."""
    for name, std in (("std_ours", std_ours), ("std_paper", std_paper)):
        if std is not None and not std >= 0:
            raise ValueError(f"{name} is {std}; allowed: 0 or more, or None where it is not known")
    return max(2 * ((std_ours or 0.0) + (std_paper or 0.0)), CELL_FLOOR)


def cell_reproduced(ours: float, paper: float, std_ours: float | None = None, std_paper: float | None = None) -> bool:
    """|ours - paper| <= tolerance."""
    return abs(ours - paper) <= cell_tolerance(std_ours, std_paper) + _ROUNDING


def sign_disagreements(ours: Mapping[str, float], paper: Mapping[str, float], baseline: str) -> tuple[str, ...]:
    """The methods whose published difference to `baseline` exceeds 2 points and has another sign in our run."""
    if set(ours) != set(paper):
        raise ValueError(f"both sides must hold the same methods; only on one: {sorted(set(ours) ^ set(paper))}")
    if baseline not in paper:
        raise ValueError(f"baseline {baseline!r} is not among the methods; allowed: {sorted(paper)}")
    claimed = [method for method in paper if abs(paper[method] - paper[baseline]) > SIGN_MARGIN + _ROUNDING]
    return tuple(m for m in claimed if (ours[m] - ours[baseline]) * (paper[m] - paper[baseline]) <= 0)


def experiment_reproduced(ours: Mapping[str, float], paper: Mapping[str, float], baseline: str) -> bool:
    """True when every published difference to `baseline` larger than 2 points has the same sign in our run."""
    return not sign_disagreements(ours, paper, baseline)


def never_compared(paper: str, table: str, metric: str) -> str | None:
    """Why a published cell must not be compared with ours, or None when it may be.

    Names as in the papers' tables: table "T7 scalability" or "F3" (figure), metric "sec/round", "hours".
    """
    if paper == "FedSSI" and table == "T7 scalability":
        return "these numbers repeat the paper's Table 2"
    if paper == "STAMP" and table.startswith("F"):
        return "the authors' plotting scripts add constants to the logged accuracies"
    if metric == "hours" or "s/round" in metric or "sec/round" in metric:
        return "absolute times depend on the machine; compare ratios to FedAvg on one machine"
    return None
