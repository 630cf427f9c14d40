"""From a recipe to a run: builds the stream, the model, the method and the engine, drives the runner, and writes down
what came of it."""

from everfed.session.assembly import Assembly, assemble, build_method
from everfed.session.estimate import estimate
from everfed.session.execution import execute
from everfed.session.outcome import load_module

__all__ = ["Assembly", "assemble", "build_method", "estimate", "execute", "load_module"]
