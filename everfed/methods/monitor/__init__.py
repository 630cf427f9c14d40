"""The drift monitor of a recipe's [monitor] table, and what clients report for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everfed.core.events import LOSS, Monitor
from everfed.core.method import Method
from everfed.methods.monitor.drift import DriftMonitor, PageHinkley, Track
from everfed.methods.monitor.features import SIGNAL as FEATURES
from everfed.methods.monitor.features import FeatureShift

if TYPE_CHECKING:
    from everfed.recipe.schema import MonitorSection

BOTH = "both"


def _watched(section: MonitorSection) -> tuple[str, ...]:
    if section.kind == "none":
        return ()
    return (LOSS, FEATURES) if section.watch == BOTH else (section.watch,)


def reporting(method: Method, section: MonitorSection) -> Method:
    """The method with the part that reports feature shifts, where the recipe asks for them."""
    if FEATURES not in _watched(section):
        return method
    return Method(method.name, (*method.parts, FeatureShift(section.samples)), method.warnings)


def monitors(section: MonitorSection) -> list[Monitor]:
    """The monitors that a recipe asks for."""
    watched = _watched(section)
    detector = PageHinkley(section.delta, section.threshold, section.window, section.warmup)
    return [DriftMonitor(detector, watched)] if watched else []


__all__ = ["FEATURES", "DriftMonitor", "FeatureShift", "PageHinkley", "Track", "monitors", "reporting"]
