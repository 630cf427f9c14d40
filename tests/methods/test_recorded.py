"""Every preset, every named choice of its options, all its numbers moved, and another training: results are those in
`recorded.json`.

    python -m tests.methods.test_recorded [TEXT ...]     # writes it anew, or the cases with a TEXT in their names

A run's results stay as they are. Where a difference is meant, write the file anew and name the change in CHANGELOG.md.
Numbers are compared to a thousandth, since other machines differ in the last bits.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.core.context import TrainOptions
from everfed.core.optimizer import Optimizer
from everfed.core.option import Option, declared_options
from everfed.core.tree import Leaf, leaves
from everfed.methods import registry as methods
from tests.support.toy import Bench, Norm, Outcome, Toy, small_memory

FILE = Path(__file__).with_name("recorded.json")
# clients with more, few, no and new data, of whom some take part
STREAM = Toy(
    clients=5,
    samples=9,
    sizes={(1, 1): 0, (2, 0): 0, (2, 1): 6, (3, 0): 5, (4, 1): 12},
    cohorts={1: (0, 1, 2, 4), 2: (0, 1, 2, 4), 3: (0, 2, 3)},
    only={0: (0, 1, 2)},
    augmented=True,
)
MOMENTUM = TrainOptions(2, 4, Optimizer(lr=0.05, momentum=0.5, state="task"))
PLAIN = TrainOptions(2, 4, Optimizer(lr=0.05))
# synchronised every other round, with a rate that moves with every step
SELDOM = TrainOptions(
    2, 4, Optimizer(lr=0.05, schedule="cosine", by="step", state="kept"), sync_every=2, logits="seen", drop_last=True,
    batchnorm="local",
)  # fmt: skip
Options = dict[str, dict[str, Any]]
Case = tuple[str, Options, tuple[TrainOptions, ...]]
Numbers = dict[str, Any]  # {structure, losses, bytes, states: {owner and part: [number, length]}}


# what makes a choice possible, or quick
TOGETHER: dict[str, Options] = {
    "glfc.old_model=proxy": {"glfc": {"perturbation": 1, "reconstruction": 1, "iterates": 1}},
}
ELSEWHERE = {"af-fcl.replay_layers=middle"}  # needs a deeper network: test_af_fcl.py


@cache
def cases() -> dict[str, Case]:
    """Name -> (preset, options, trainings). A part's choices are tried on the first preset that has it."""
    found: dict[str, Case] = {}
    tried: set[str] = set()
    for preset in (name for name in methods.names() if not name.startswith("fedgp+")):
        small = small_memory(preset)
        found[preset] = preset, small, (MOMENTUM, PLAIN)
        found[f"{preset} seldom"] = preset, small, (SELDOM,)
        moved = small
        for part in methods.build(preset, small).parts:
            for option, declared in declared_options(type(part)):
                own = getattr(part, option)
                for value in other_choices(own, declared) if f"{part.name}.{option}" not in tried else ():
                    choice = f"{part.name}.{option}={value}"
                    if choice in ELSEWHERE:
                        continue
                    together = {**small, **TOGETHER.get(choice, {})}
                    found[f"{preset} {choice}"] = (
                        preset,
                        with_option(together, part.name, option, value),
                        (MOMENTUM, PLAIN),
                    )
                tried.add(f"{part.name}.{option}")
                if isinstance(own, float):
                    value = next(v for v in (0.7 * own or 0.3, 0.3) if not declared.problem(v))
                    moved = with_option(moved, part.name, option, value)
        found[f"{preset} moved"] = preset, moved, (MOMENTUM, PLAIN)
    return found


def other_choices(own: Any, declared: Option) -> tuple[Any, ...]:
    values = declared.one_of or ((True, False) if isinstance(own, bool) else ())
    return tuple(value for value in values if value != own)


def with_option(options: Options, part: str, option: str, value: Any) -> Options:
    return {**options, part: {**options.get(part, {}), option: value}}


def numbers(outcome: Outcome) -> Numbers:
    """What a run came to, in few numbers: every number of every state counts, and its place."""
    owners = [("server", outcome.state.server), *(("clients", state) for _, state in sorted(outcome.clients.items()))]
    forms, found = [], defaultdict[str, list[Tensor]](list)
    for owner, parts in owners:
        for part, tree in parts.items():
            for path, leaf in leaves(tree):
                forms.append(f"{owner} {part}/{path} {form(leaf)}")
                if not isinstance(leaf, str | bool | None):
                    found[f"{owner} {part}"].append(torch.as_tensor(leaf).detach().double().flatten())
    trained = [event for event in outcome.events if event.get("loss") is not None]
    return {
        "structure": zlib.crc32("\n".join(sorted(forms)).encode()),
        "losses": [rounded(event["loss"]) for event in trained],
        "bytes": [outcome.state.traffic.up.total(), outcome.state.traffic.down.total()],
        "states": {place: digest(torch.cat(values)) for place, values in found.items()},
    }


def digest(values: Tensor) -> list[float]:
    """A sum in which every place has a weight of its own, and the length, for the tolerance."""
    weights = torch.cos(torch.arange(len(values), dtype=torch.float64) + 1)
    return [rounded(float(values @ weights)), rounded(float(values.norm()))]


def form(leaf: Leaf) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, str | bool | None) else type(leaf).__name__


def rounded(value: float) -> float:
    return float(f"{value:.5g}")


def check(found: Numbers, wanted: Numbers) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-3)
    assert found["states"].keys() == wanted["states"].keys()
    for place, (number, length) in wanted["states"].items():
        assert found["states"][place] == pytest.approx([number, length], abs=1e-3 * length + 1e-6), place
    assert (found["bytes"], found["structure"]) == (wanted["bytes"], wanted["structure"])


def attempt(preset: str, options: Options, trainings: tuple[TrainOptions, ...]) -> Numbers | None:
    """The numbers of a run with the first of the trainings that the method allows; None where it allows none."""
    for train in trainings:
        with suppress(ValueError):  # the method does not take these options
            methods.build(preset, options, optimizer=train.optimizer).fit_stream(STREAM)
            return numbers(Bench(preset, options, STREAM, train, Norm).run())
    return None


@cache
def recorded() -> dict[str, Numbers | None]:
    found: dict[str, Numbers | None] = json.loads(FILE.read_text())
    return found


@pytest.mark.parametrize("case", [case for case in cases() if case in recorded()])
def test_results_are_those_that_were_recorded(case: str) -> None:
    found, wanted = attempt(*cases()[case]), recorded()[case]
    if found is None or wanted is None:
        assert found == wanted
    else:
        check(found, wanted)


def test_every_case_is_recorded() -> None:
    assert cases().keys() == recorded().keys(), "python -m tests.methods.test_recorded NAME records a new method"


if __name__ == "__main__":
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    chosen = [case for case in cases() if not sys.argv[1:] or any(text in case for text in sys.argv[1:])]
    kept |= {case: attempt(*cases()[case]) for case in chosen}
    lines = [f"{json.dumps(case)}: {json.dumps(kept[case])}" for case in cases() if case in kept]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
