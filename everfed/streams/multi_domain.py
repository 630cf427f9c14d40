"""Multi-domain: the same classes in every task, from another data set or domain each time (Digit10, Office, PACS)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everfed.data import transforms
from everfed.data.domains import Domains, load_domains
from everfed.data.lazy import Samples, joined_samples
from everfed.data.source import Source
from everfed.errors import DataError
from everfed.streams.incremental import IncrementalStream, Rows, choose_rows
from everfed.streams.options import OptionError, Options


class MultiDomain(IncrementalStream):
    """Task t is the t-th domain, divided anew among the clients. `max_train`, `max_test`, `validation` and the scale of
    a quick look count per domain."""

    scenario = "multi-domain"
    any_targets = True

    read = staticmethod(load_domains)

    def __init__(
        self, source: Domains, options: Options, *, domains: Sequence[str] | None = None, **settings: Any
    ) -> None:
        if not isinstance(source, Domains):
            raise OptionError("scenario", "multi-domain takes several data sets; arrays of one fit the other scenarios")
        if domains is not None:
            source = _chosen(source, domains)
        if options.tasks > len(source.names):
            names = ", ".join(source.names)
            raise OptionError("tasks", f"{options.tasks} is too many; {source.name} has {len(source.names)}: {names}")
        self.domains = source.chosen(source.names[: options.tasks])
        whole = _in_one_format(self.domains, options)
        super().__init__(whole, replace(options, image_size=None, channels=None), **settings)
        self.name = f"{source.name}-domains"

    @staticmethod
    def natural_tasks(source: Any, domains: Sequence[str] | None = None, **settings: Any) -> int | None:
        """One for every domain."""
        return len(domains) if domains is not None else len(source.names) if isinstance(source, Domains) else None

    def _choose_rows(self) -> Rows:
        sources = self.domains.sources
        self._train_ends = np.cumsum([0, *(len(one.y_train) for one in sources)])
        self._test_ends = np.cumsum([0, *(len(one.y_test) for one in sources)])
        chosen = [choose_rows(one, self.options, self.seed, self.scale) for one in sources]
        return Rows(
            _shifted([rows.train for rows in chosen], self._train_ends),
            _shifted([rows.validation for rows in chosen], self._train_ends),
            _shifted([rows.test for rows in chosen], self._test_ends),
        )

    def _pool(self, rows: np.ndarray, y: np.ndarray, task: int) -> np.ndarray:
        """The rows of the task's domain."""
        ends = self._train_ends if y is self._y_train else self._test_ends
        return rows[(rows >= ends[task]) & (rows < ends[task + 1])]

    def facts(self) -> dict[str, Any]:
        """The domains in order, with where they came from and how many samples of each are used."""
        counts = [
            {
                "train": len(self._pool(self._rows.train, self._y_train, task)),
                "test": len(self._pool(self._rows.test, self._y_test, task)),
            }
            for task in range(self.options.tasks)
        ]
        origins = [source.origin for source in self.domains.sources]
        return {"domains": list(self.domains.names), "origins": origins, "samples_per_domain": counts}


def _shifted(rows: list[np.ndarray], ends: np.ndarray) -> np.ndarray:
    """Positions within each domain as positions within all of them together."""
    return np.concatenate([part + start for part, start in zip(rows, ends[:-1], strict=True)])


def _chosen(domains: Domains, names: Sequence[str]) -> Domains:
    try:
        return domains.chosen(tuple(names))
    except DataError as problem:
        raise OptionError("domains", str(problem)) from problem


def _in_one_format(domains: Domains, options: Options) -> Source:
    """All domains as one source, one after the other."""
    channels, size = domains.format or (None, None)
    channels, size = options.channels or channels, options.image_size or size
    x_train, x_test, y_train, y_test = (
        [getattr(source, part) for source in domains.sources] for part in ("x_train", "x_test", "y_train", "y_test")
    )
    x_train, x_test = ([_formatted(x, channels, size) for x in xs] for xs in (x_train, x_test))
    kinds = {(x.dtype, tuple(x.shape[1:])) for x in x_train}
    if len(kinds) > 1:
        shapes = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in zip(domains.names, x_train, strict=True))
        raise OptionError("image_size", f"the domains differ ({shapes}); set stream.image_size and stream.channels")
    first, origin = domains.sources[0], "; ".join(source.origin for source in domains.sources)
    return Source(
        domains.name,
        joined_samples(x_train),
        torch.cat(y_train),
        joined_samples(x_test),
        torch.cat(y_test),
        first.classes,
        first.class_names,
        origin,
        targets=first.targets,
    )


def _formatted(x: Tensor | Samples, channels: int | None, size: int | None) -> Any:
    """Images in the given format; other samples as they are."""
    if isinstance(x, Samples):
        return x.formatted(channels or x.shape[1], size or x.shape[2])
    if x.dtype != torch.uint8 or (channels in (None, x.shape[1]) and size in (None, x.shape[2])):
        return x
    return transforms.to_format(x, channels or x.shape[1], size or x.shape[2])
