"""Several runs side by side: methods and seeds on the same stream, or a grid over recipe keys."""

from __future__ import annotations

from everfed.experiments.comparing import compare
from everfed.experiments.result import Comparison
from everfed.experiments.sweeping import sweep

__all__ = ["Comparison", "compare", "sweep"]
