"""Which presets a test runs on.

`each_preset`: every one with parts of its own, and FedGP on top of its own family. `each_kind`: one of every way to use
the protocol, for claims about engines and streams, which do not know methods. The others are marked slow in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everfed.methods import registry as methods

FAMILY = ("fedavg", "fedprox", "fedcurv", "er", "der", "der++", "agem")  # what the FedGP paper composes with
KINDS = (
    "fedadam",  # state on the server
    "fedcurv",  # statistics of all clients in every message
    "fedgp+der++",  # a buffer, a phase of its own, a projection
    "coordinated",  # the server takes part in what buffers hold
    "glfc",  # exemplars and an older model
    "fot",  # phases at the end of a task
    "mfcl",  # the server trains a generator
    "fedcil",  # clients send a generator, too
    "fedweit",  # parameters that stay on clients
    "stamp",  # another aggregation than the mean
    "fedala",  # every client is scored with a model of its own
    "feddbe",  # another forward pass
)

ON_TOP = ("fedgp+der+compress",)  # parts that stand on top of any method


def each_preset() -> list[Any]:
    return _slow_unless(lambda name: not name.startswith("fedgp+") or name.removeprefix("fedgp+") in FAMILY)


def each_kind() -> list[Any]:
    return _slow_unless(lambda name: name in KINDS)


def _slow_unless(by_default: Callable[[str], bool]) -> list[Any]:
    presets = [name if by_default(name) else pytest.param(name, marks=pytest.mark.slow) for name in methods.names()]
    return [*presets, *ON_TOP]
