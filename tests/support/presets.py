"""Which presets a test runs on: every one with parts of its own, and FedGP on top of its own family. The many further
`fedgp+...` compositions of the same parts are run by `make slow`."""

from __future__ import annotations

from typing import Any

import pytest

from everfed import methods

FAMILY = ("fedavg", "fedprox", "fedcurv", "er", "der", "der++", "agem")  # what the FedGP paper composes with


def each_preset() -> list[Any]:
    """All presets as test parameters, the repetitive ones marked slow."""
    return [name if _by_default(name) else pytest.param(name, marks=pytest.mark.slow) for name in methods.names()]


def _by_default(name: str) -> bool:
    return not name.startswith("fedgp+") or name.removeprefix("fedgp+") in FAMILY
