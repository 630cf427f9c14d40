"""Several runs side by side: methods and seeds on the same stream, or a grid over recipe keys."""

from __future__ import annotations

from everfed.comparison.comparing import compare
from everfed.comparison.result import Comparison
from everfed.comparison.sweeping import sweep

__all__ = ["Comparison", "compare", "sweep"]
