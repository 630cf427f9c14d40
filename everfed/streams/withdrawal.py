"""A stream without some of its training samples: what a run sees that never had them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from everfed.core.data import Data
from everfed.core.stream import Stream, digest_of
from everfed.data.withdrawn import Withdrawn


def without_samples(stream: Stream, given: Mapping[str, Any]) -> Stream:
    """The same stream, whose clients lack the samples that `given` names (clients, classes, samples). Tests stay."""
    withdrawn = Withdrawn.of(given, stream.clients, stream.classes)
    kind: Any = type(stream)

    class Without(kind):
        def data(self, client: int, task: int) -> Data:
            found = super().data(client, task)
            return found.take(np.flatnonzero(~withdrawn.mask(client, found)))

        def identity(self) -> str:
            return digest_of(super().identity() + json.dumps(asdict(withdrawn)))

    found = copy.copy(stream)
    object.__setattr__(found, "__class__", Without)
    return found
