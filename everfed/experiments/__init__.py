"""Several runs side by side: methods and seeds on the same stream, or a grid over recipe keys."""

from __future__ import annotations

from everfed.experiments.comparison import Comparison
from everfed.experiments.grid import compare, sweep

__all__ = ["Comparison", "compare", "sweep"]
