"""What a dishonest server sees of a client: random recipes and models against no policy, and against a strict one.

python -m benchmarks.dishonest_server [--count 100] [--seed 0] [--out benchmarks/results/dishonest-server.json]

Every attempt draws a few changes to a plain recipe (a tiny scale, batches of one sample, a gradient of one sample,
other methods, networks, files, code) and a model (as it is, zeros, not a number, overflowing). Half of them ask for
secure aggregation, as a strict client wants it. One real client, in this process, is asked to train and for every other
phase of the method. What comes back is looked through: values of the client's own, and the client's samples in them, by
the cosine of each row of the first layer with each sample. The client has 45 samples of digits in a task; under secure
aggregation it gives away keys and forms.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everfed.core.message import Model
from everfed.federation.client import Identity, RealClient
from everfed.federation.policy import OWN_CODE, Guard, Policy
from everfed.federation.request import FAILED, REFUSED, REPLY, Answer
from everfed.federation.runtime import RuntimeBuilder
from everfed.naming import files_inside, restricted
from everfed.privacy.secure_client import NAME
from everfed.recipe import to_toml
from tests.federation.asking import request, values
from tests.federation.field import small_recipe

STRICT = Policy(
    require_secure_aggregation=True,
    least_samples=20,
    least_batch=8,
    least_scale=1.0,
    models=["mlp"],
    parts=["fedavg", "fedgp", "memory", "der"],
)
KNOWN = 0.999  # a cosine above it is the sample
CHANGES = (
    (),
    ("train.batch_size=1",),
    ("train.batch_size=1", "train.optimizer.lr=0.001"),
    ("train.rounds_per_task=1", "train.local_epochs=5"),
    ("stream.max_train=6",),
    ("model.hidden=[]",),
    ("model.hidden=[500]",),
    ("model.kind=everfed.models:build",),
    ("model.kind=subprocess:run",),
    ("model.kind=timm:resnet18", "model.checkpoint_path=/etc/passwd"),
    ("model.weights=/etc/ssl/key.safetensors",),
    ("stream.dataset=/etc/passwd.csv",),
    ("stream.dataset=hub:someone/some",),
    ("privacy.secure_aggregation=true",),
    ("privacy.secure_aggregation=true", "privacy.threshold=0.51"),
    ("train.optimizer.lr=0",),
)
METHODS = {  # with options that make a reply of few samples
    **dict.fromkeys(("fedavg", "scaffold", "fednova", "fedprox", "si", "ridge", "fedproto", "ccvr", "fedomg"), ((),)),
    **dict.fromkeys(("fedgp+der", "fedgp+er", "fedgp"), (("method.fedgp.samples=1",), ("method.memory.size=1",), ())),
    **dict.fromkeys(("fedcurv",), (("method.fedcurv.fisher_samples=1",), ())),
}
MODELS = ("as it is", "zeros", "not a number", "overflowing")
SCALES = (1.0, 1.0, 0.5, 0.03)


@dataclass(frozen=True)
class Seen:
    """What one attempt showed. kinds: of the answers; own: values of this client alone; sample: the largest cosine."""

    kinds: tuple[str, ...]
    reason: str
    own: tuple[str, ...]
    sample: float


def attempt(folder: Path, rng: random.Random, policy: Policy) -> tuple[dict[str, Any], Seen]:
    """(what the server asked, what it saw)."""
    name = rng.choice(sorted(METHODS))
    sets = [*rng.choice(METHODS[name]), *(one for change in rng.sample(CHANGES, rng.randint(1, 2)) for one in change)]
    crafted, scale = rng.choice(MODELS), rng.choice(SCALES)
    if rng.random() < 0.5:  # a server that knows what a strict client asks for
        sets, scale = [*sets, "privacy.secure_aggregation=true"], 1.0
    about = {"method": name, "sets": sets, "model": crafted, "scale": scale}
    try:
        text = to_toml(small_recipe(folder, 2, *sets, method=name))
    except ValueError as error:  # everfed's own server could not send it
        return about, Seen(("no recipe",), str(error)[:100], (), 0.0)
    build = RuntimeBuilder(data_dir=str(folder), policy=policy)
    guard = Guard(RealClient(folder / "state", Identity("site-0", 0), build), policy, None, folder)
    model, samples = _outside_view(text)
    sent = _crafted(model, crafted)
    answers = []
    for position, phase in enumerate(_phases(text)):
        packet = request({"model": dict(sent)}, phase=phase, place=(0, position, 0, 0), recipe=text, scale=scale)
        answers.append(Answer.of(guard.answer(packet)))
        if answers[-1].kind == REFUSED:
            break
    found = [values(answer) for answer in answers if answer.kind == REPLY]
    flat = {f"{p}/{k}": v for one in found for p, tree in one.items() if p != NAME for k, v in tree.items()}
    reason = next((answer.reason for answer in answers if answer.kind in (REFUSED, FAILED)), "")
    best = max([0.0, *(_nearest(value, sent["params"], samples) for value in flat.values())])
    return about, Seen(tuple(answer.kind for answer in answers), reason, tuple(sorted(flat)), best)


@lru_cache(maxsize=1)
def _assembled(text: str) -> Any:
    with restricted(OWN_CODE), files_inside(None):
        return RuntimeBuilder().assembled(text, 1.0)


def _outside_view(text: str) -> tuple[Model, Tensor]:
    """The model that the server sends, and the samples that it looks for; of what cannot be built: nothing."""
    try:
        run = _assembled(text)
        samples = run.stream.inputs(run.stream.data(0, 0).x).flatten(1)
        return run.first_model(), samples
    except Exception:
        return {"params": torch.zeros(1), "stats": torch.zeros(0), "counters": torch.zeros(0)}, torch.zeros(0, 64)


def _phases(text: str) -> list[str]:
    try:
        return [phase.name for phase in _assembled(text).method.scheduled_phases()]
    except Exception:
        return ["train"]


def _crafted(model: Model, how: str) -> Model:
    params = model["params"]
    numbers = {"zeros": 0.0, "not a number": float("nan"), "overflowing": 1e30}
    return {**model, "params": torch.full_like(params, numbers[how]) if how in numbers else params}


def _nearest(value: Any, sent: Tensor, samples: Tensor) -> float:
    """The largest cosine of a sample with a row of what may be the first layer's gradient."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not len(samples):
        return 0.0
    change = (value - sent if value.shape == sent.shape else value).flatten().double()
    width = samples.shape[1]
    rows = change[: len(change) // width * width].reshape(-1, width)[:2000]
    rows = rows[(rows.norm(dim=1) > 1e-12) & rows.isfinite().all(1)]
    if not len(rows):
        return 0.0
    x = samples.double()
    cosines = (rows @ x.T).abs() / (rows.norm(dim=1, keepdim=True) * x.norm(dim=1) + 1e-12)
    return float(cosines.max())


def campaign(count: int, seed: int, policy: Policy) -> dict[str, Any]:
    """Counts of what `count` attempts showed, and the worst of them."""
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    known: list[dict[str, Any]] = []
    own = protected = 0
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="ef") as name:
            about, seen = attempt(Path(name), random.Random(f"{seed} {number}"), policy)
        kinds.update(set(seen.kinds))
        reasons.update([_short(seen.reason)] if seen.reason else [])
        own, protected = own + bool(seen.own), protected + (REPLY in seen.kinds and not seen.own)
        if seen.sample > KNOWN:
            known.append({**about, "values": seen.own, "cosine": round(seen.sample, 6)})
    return {
        "attempts": count,
        "with an answer of this kind": dict(kinds.most_common()),
        "the server saw values of the client alone": own,
        "it saw keys and forms, or nothing": protected,
        "a sample was among the values": len(known),
        "which": known,
        "reasons": dict(reasons.most_common()),
    }


def _short(reason: str) -> str:
    """The kind of a reason, without its numbers."""
    for word in ("is not allowed here", "policy ", "computed from fewer", "only files inside", "is no class of"):
        if word in reason:
            return reason[reason.index(word) :].partition(":")[0].partition(" =")[0].partition(" (")[0][:60]
    return reason.partition(":")[0][:60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    os.fsync = lambda descriptor: None  # nothing here outlives the process
    found = {
        "seed": chosen.seed,
        "strict": STRICT.model_dump(exclude_defaults=True),
        "without a policy": campaign(chosen.count, chosen.seed, Policy()),
        "under the strict policy": campaign(chosen.count, chosen.seed, STRICT),
    }
    print(json.dumps(found, indent=2))
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
