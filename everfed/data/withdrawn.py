"""Which samples are withdrawn: those of some clients, of some classes, or single ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from everfed.core.data import Data
from everfed.core.tree import Tree
from everfed.errors import SettingError


@dataclass(frozen=True)
class Withdrawn:
    """A sample is withdrawn if all that is given names it: its client, its class and its id."""

    clients: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    @staticmethod
    def of(given: Mapping[str, Any], clients: int, classes: int) -> Withdrawn:
        """Raises SettingError for what no client or class is, and where nothing is named."""
        allowed = {"clients": clients, "classes": classes, "samples": None}
        for key, values in given.items():
            if key not in allowed:
                raise SettingError(f"stream.withdrawn.{key} is not a key; it has {', '.join(allowed)}")
            most = allowed[key]
            if not isinstance(values, list | tuple) or any(
                isinstance(v, bool) or not isinstance(v, int) for v in values
            ):
                raise SettingError(f"stream.withdrawn.{key} must be a list of whole numbers; got {values!r}")
            if any(value < 0 or (most is not None and value >= most) for value in values):
                raise SettingError(
                    f"stream.withdrawn.{key} must be within 0..{most - 1 if most else ''}; got {list(values)}"
                )
        found = Withdrawn(**{key: tuple(values) for key, values in given.items()})
        if not any(asdict(found).values()):
            raise SettingError("nothing is withdrawn: name clients, classes or samples")
        if found.samples and len(found.clients) != 1:
            raise SettingError("samples are withdrawn from one client: name it in clients")
        return found

    def mask(self, client: int, data: Data) -> np.ndarray:
        """(n,) which of a client's samples are withdrawn."""
        found = np.full(len(data), not self.clients or client in self.clients)
        if self.classes:
            found &= np.isin(data.y.cpu().numpy(), self.classes)
        return found & np.isin(data.ids, self.samples) if self.samples else found

    def to_tree(self) -> Tree:
        return {key: torch.tensor(values, dtype=torch.int64) for key, values in asdict(self).items()}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> Withdrawn:
        return Withdrawn(*(tuple(tree[key].tolist()) for key in ("clients", "classes", "samples")))
