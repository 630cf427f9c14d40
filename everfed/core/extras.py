"""Trainable tensors that parts add to a model: registered on the module, so that they are parameters like any other."""

from __future__ import annotations

from torch import nn

from everfed.core.context import Context
from everfed.core.part import Part

EXTRAS = "extras."  # what the names of all such parameters begin with


def registered(part: str, name: str, personal: bool) -> str:
    """The name under which a module lists a part's extra parameter."""
    scope = "personal" if personal else "shared"
    return EXTRAS + f"{scope}/{part}/{name}".replace(".", "_")


class Extras(nn.Module):
    """`module.extras[part][name]`. Personal ones are registered apart, so that their names tell."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[str, dict[str, nn.Parameter]] = {}

    def add(self, part: str, name: str, value: nn.Parameter, personal: bool) -> None:
        self.register_parameter(registered(part, name, personal).removeprefix(EXTRAS), value)
        self._parts.setdefault(part, {})[name] = value

    def __getitem__(self, part: str) -> dict[str, nn.Parameter]:
        return self._parts[part]


def attach(module: nn.Module, parts: tuple[Part, ...], ctx: Context) -> nn.Module:
    """Register the extra parameters of `parts` on `module`; a module whose method adds none is returned as it is."""
    extras = Extras()
    for part in parts:
        for personal, values in ((False, part.extra_parameters(ctx)), (True, part.personal_parameters(ctx))):
            for name, value in values.items():
                extras.add(part.name, name, nn.Parameter(value.clone()), personal)
    if next(extras.parameters(), None) is not None:
        module.extras = extras
    return module
