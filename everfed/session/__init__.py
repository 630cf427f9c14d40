"""From a recipe to a run: builds the stream, the model, the method and the engine, drives the runner, and writes down
what came of it."""

from everfed.session.assembly import OtherWeights, Run, assemble, build_method, identity_of
from everfed.session.execution import estimate, execute
from everfed.session.forgetting import forget

__all__ = ["OtherWeights", "Run", "assemble", "build_method", "estimate", "execute", "forget", "identity_of"]
