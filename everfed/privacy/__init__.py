"""Protections around any method, as parts and engine wrappers: secure aggregation and differential privacy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from everfed.core.context import Ledger, Setup
from everfed.core.engine import Engine
from everfed.core.method import Method
from everfed.core.server import RunState
from everfed.errors import CompositionError

if TYPE_CHECKING:
    from everfed.core.events import Observer
    from everfed.recipe import PrivacySection


def protect(method: Method, section: PrivacySection) -> Method:
    """The method with the protections that the recipe asks for. Raises CompositionError where it cannot have them."""
    if section.dp is not None or section.secure_aggregation:
        _refuse_other_values(method, "dp" if section.dp is not None else "secure_aggregation")
    if section.dp is not None:  # first: what is masked is already clipped
        from everfed.privacy.differential import private

        method = private(method, **section.dp.model_dump())
    if section.secure_aggregation:
        from everfed.privacy.secure_client import secured

        method = secured(method, **section.model_dump(exclude={"secure_aggregation", "dp"}))
    return method


def _refuse_other_values(method: Method, key: str) -> None:
    """Raises CompositionError where clients send something else than the values that are clipped and added up."""
    if method.opening:
        raise CompositionError(
            f"privacy.{key}: it works on the values that the server adds up, and part {method.opening[0].name!r} sends "
            "others, which the server must see reply by reply; leave out one of the two"
        )


def check(setup: Setup) -> None:
    """Refuse models and options that the protections do not cover. Raises CompositionError."""
    if setup.method.protections:
        from everfed.privacy.differential import check_setup

        check_setup(setup)


def accounting(setup: Setup, folder: Path, notify: Observer) -> Callable[[RunState], None] | None:
    """A function that records what a run has released in a ledger in its folder; None where nothing is counted."""
    if not setup.method.protections:
        return None
    from everfed.privacy.spending import RunLedger, protection

    part = protection(setup.method)
    return None if part is None else RunLedger(folder, part, notify).record


def wrap(engine: Engine, setup: Setup, device: str, notify: Observer, ledger: Ledger | None = None) -> Engine:
    """The engine with the server's side of the method's protections. ledger: of the run, where clients are real."""
    if not setup.method.protections:
        return engine
    from everfed.privacy.secure_client import NAME
    from everfed.privacy.spending import protection

    noise = protection(setup.method)
    if engine.sharded and noise is not None and noise.seed < 0:
        raise CompositionError(
            "privacy.dp: every rank would draw the server's noise with a key of its own, and the ranks would end with "
            "different models; engine.kind = 'ranks' needs privacy.dp.seed, or use eager, processes or graphs"
        )
    if not any(part.name == NAME for part in setup.method.parts):
        return engine
    if engine.sharded:
        raise CompositionError("privacy.secure_aggregation needs all clients behind one server; engine.kind is 'ranks'")
    from everfed.privacy.secure_server import Secured

    return Secured(engine, setup, device, notify, ledger)
