"""Builds a client's runtime from the server's recipe: the same method and model, on this client's own data."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field

import torch

from everfed import engines
from everfed.errors import UserError
from everfed.federation.client import ClientRuntime
from everfed.federation.policy import Policy
from everfed.recipe import Recipe, from_table, scaled
from everfed.session import Run, assemble
from everfed.store.clients import ClientStore


@dataclass(frozen=True)
class RuntimeBuilder:
    """data_dir: the folder of data sets for the recipe's stream; data: instead, a stream of one's own,
    `package.module:function`; device: where this client trains, whatever the recipe says; policy: what this client
    agrees to."""

    data_dir: str | None = None
    data: str | None = None
    device: str = "cpu"
    policy: Policy = field(default_factory=Policy)

    def __call__(self, text: str, scale: float) -> ClientRuntime:
        torch.set_num_threads(1)  # as in every engine: results are exact only at one thread
        built, store = self.assembled(text, scale), ClientStore()
        engine = engines.build(built.recipe.engine, built.setup, store, built.build_module, lambda event: None)
        return ClientRuntime(built.setup, engine, store, self.policy.fewest)

    def assembled(self, text: str, scale: float) -> Run:
        """The pieces of the server's run, within this client's policy."""
        self.policy.check_text(text, scale)
        recipe = self._own_engine(self._own_data(from_table(tomllib.loads(text))))
        self.policy.check_recipe(recipe)
        built = assemble(scaled(recipe, scale), self.data_dir, scale)
        self.policy.check_method(built.setup.method)
        return built

    def _own_data(self, recipe: Recipe) -> Recipe:
        if self.data is None:
            return recipe
        if recipe.stream.scenario != "own":
            raise UserError(
                f"--data {self.data} needs a recipe with stream.scenario = 'own'; the server's is "
                f"{recipe.stream.scenario!r}, whose data every client reads from --data-dir"
            )
        section = recipe.stream.model_copy(update={"dataset": self.data})
        return recipe.model_copy(update={"stream": section})

    def _own_engine(self, recipe: Recipe) -> Recipe:
        kind = "eager" if self.device == "cpu" else "graphs"
        section = recipe.engine.model_copy(update={"kind": kind, "device": self.device})
        return recipe.model_copy(update={"engine": section})
