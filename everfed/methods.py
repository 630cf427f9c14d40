"""Methods by name: presets of parts, `fedgp+...` on top of any of them, and a user's own parts.

build("fedgp+der", {"memory": {"size": 200}, "der": {"weight": 0.5}})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from everfed.core.method import SGD, Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import CompositionError, Part
from everfed.naming import load_object
from everfed.parts.aggregate.average import FedAvg
from everfed.parts.generative.af_fcl import AFFCL
from everfed.parts.generative.fedcil import FedCIL
from everfed.parts.generative.glfc import GLFC
from everfed.parts.generative.lander import Lander
from everfed.parts.generative.mfcl import MFCL
from everfed.parts.generative.target import Target
from everfed.parts.memory.buffer import Memory
from everfed.parts.memory.der import DER, DERPlusPlus
from everfed.parts.memory.ideal import Ideal
from everfed.parts.memory.replay import Replay
from everfed.parts.personal.ala import ALA
from everfed.parts.personal.dbe import DBE
from everfed.parts.personal.fedas import FedAS
from everfed.parts.personal.fedl2p import FedL2P
from everfed.parts.personal.fedweit import FedWeIT
from everfed.parts.project.agem import AGEM
from everfed.parts.project.fedgp import FedGP
from everfed.parts.project.fedomg import FedOMG
from everfed.parts.project.fot import FOT
from everfed.parts.project.ogd import OGD
from everfed.parts.project.stamp import STAMP
from everfed.parts.regularise.curvature import FedCurv
from everfed.parts.regularise.ewc import EWC
from everfed.parts.regularise.fedlwf2t import FedLwF2T
from everfed.parts.regularise.fedssi import FedSSI
from everfed.parts.regularise.lwf import LwF
from everfed.parts.regularise.proximal import FedProx
from everfed.parts.regularise.synaptic import SynapticIntelligence


class MethodError(CompositionError):
    """A method that cannot be built; says which key is wrong and what is allowed."""


@dataclass(frozen=True)
class Preset:
    """Part classes in order, and one line about them. fixed: options that the preset sets, {part: {option: value}}."""

    about: str
    parts: tuple[type[Part], ...]
    fixed: Mapping[str, Mapping[str, Any]]


def _preset(about: str, *parts: type[Part], **fixed: Mapping[str, Any]) -> Preset:
    return Preset(about, parts, fixed)


def _choosing(about: str, policy: str | Mapping[str, Any]) -> Preset:
    """Replay as one data set of new and stored samples; only how the stored ones are chosen differs."""
    return _preset(about, FedAvg, Memory, Replay, memory={"policy": policy}, er={"mode": "union"})


_KEEP_LOGITS: dict[str, Any] = {"memory": {"logits": True}}

PRESETS: dict[str, Preset] = {
    "fedavg": _preset("federated averaging, the lower bound", FedAvg),
    "fedprox": _preset("averaging with a proximal term", FedAvg, FedProx),
    "fedcurv": _preset("averaging with a Fisher penalty towards the other clients", FedAvg, FedCurv),
    "er": _preset("experience replay from a reservoir", FedAvg, Memory, Replay),
    "der": _preset("dark experience replay: stored logits", FedAvg, Memory, DER, **_KEEP_LOGITS),
    "der++": _preset("DER with replayed labels", FedAvg, Memory, DERPlusPlus, **_KEEP_LOGITS),
    "agem": _preset("gradients projected on the client's own buffer", FedAvg, Memory, AGEM),
    "ewc": _preset("Fisher penalty towards the previous task's model", FedAvg, EWC),
    "lwf": _preset("distillation from the previous task's model", FedAvg, LwF),
    "fedlwf2t": _preset("distillation from the client's own last model and the server's", FedAvg, FedLwF2T),
    "mfcl": _preset("replays what a data-free generator makes of the previous task's model", FedAvg, MFCL),
    "glfc": _preset(
        "exemplars kept when a client notices a change of task, with a loss that makes up for their number",
        FedAvg,
        Memory,
        Replay,
        GLFC,
        memory={"size": 2000, "policy": "on-transition"},
        er={"mode": "union"},
    ),
    "fedcil": _preset("every client's GAN replays earlier tasks; the server trains on what they all make", FedCIL),
    "af-fcl": _preset(
        "replays features of a shared flow, as far as a client's own data makes them credible",
        FedAvg,
        AFFCL,
        fedavg={"weighting": "samples"},
    ),
    "ogd": _preset("gradients orthogonal to those of earlier tasks' outputs", FedAvg, OGD),
    "si": _preset("synaptic intelligence: importance from every client's own training", FedAvg, SynapticIntelligence),
    "fedssi": _preset("synaptic intelligence of personalised surrogates, without rehearsal", FedAvg, FedSSI),
    "fot": _preset("global updates orthogonal to earlier tasks' layer inputs", FedAvg, FOT),
    "target": _preset("distils on images synthesised from the previous task's model", FedAvg, Target),
    "lander": _preset("TARGET with features bound to label anchors", FedAvg, Lander),
    "fedweit": _preset("shared, masked and task-adaptive weights, with what other clients published", FedWeIT),
    "fedomg": _preset("the server matches the clients' updates; STAMP's spatial half", FedOMG),
    "stamp": _preset("updates matched over tasks on clients and over clients on the server", FedOMG, STAMP),
    "stamp-temporal": _preset("updates matched over tasks on clients, averaged on the server", FedAvg, STAMP),
    "naive-uniform": _choosing("replays a uniform choice of the task's samples and the stored ones", "naive-uniform"),
    "approximate-uniform": _choosing("replays the same share of every task's samples", "approximate-uniform"),
    "fixed-proportion": _choosing("replays with a fixed share for the newest task", "fixed-proportion"),
    "herding": _choosing("replays iCaRL's exemplars", "herding"),
    "gss-greedy": _choosing("replays samples whose gradients oppose each other, kept online", "gss-greedy"),
    "gss-cluster": _choosing("replays samples whose gradients lie apart", "gss-cluster"),
    "uncoordinated": _choosing("replays samples that each client chose for diverse gradients", "uncoordinated"),
    "coordinated": _choosing("replays samples that all clients chose together for diverse gradients", "coordinated"),
    "coordinated-4": _choosing(
        "coordinated, with four exchanges instead of one", {"kind": "coordinated", "exchanges": 4}
    ),
    "re-fed": _choosing("replays the samples that matter most between local and global model", "re-fed"),
    "fedala": _preset("personalised: a learned mixture of the global model and the client's own", FedAvg, ALA),
    "feddbe": _preset("personalised: every client adds a vector of its own to the features", FedAvg, DBE),
    "fedas": _preset("personalised heads on an aligned base, averaged by Fisher information", FedAS),
    "fedl2p": _preset("personalised: learned rates and statistics for fine-tuning", FedAvg, FedL2P),
    "ideal": _preset("joint training on all tasks so far, the upper bound", FedAvg, Ideal),
}
# the upper bound keeps no buffer, generative replay no data; decomposed and personal weights have no gradient to share;
# ablations stand alone
_GENERATIVE = ("mfcl", "target", "lander", "fedcil", "af-fcl")
_PERSONAL = ("fedweit", "fedala", "feddbe", "fedas", "fedl2p")
_WITHOUT_FEDGP = ("ideal", *_GENERATIVE, *_PERSONAL, "stamp-temporal", "coordinated-4")
_UNDER_FEDGP: dict[str, dict[str, Any]] = {"ogd": {"project": "update"}}  # options that a last gradient rule asks for


def names() -> dict[str, str]:
    """Every preset with one line about it, `fedgp` variants included."""
    listed = {name: preset.about for name, preset in PRESETS.items()}
    listed["fedgp"] = "averaging with gradients projected on the global buffer gradient"
    for name, preset in PRESETS.items():
        if name not in ("fedavg", *_WITHOUT_FEDGP):
            listed[f"fedgp+{name}"] = f"{preset.about}, with FedGP on top"
    return listed


def build(
    name: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    parts: list[str | Mapping[str, Any]] | None = None,
    optimizer: Optimizer = SGD,
) -> Method:
    """A method from a preset's name, or from a list of parts: part names, or tables {part = NAME, option = value, ...};
    a part may be named `package.module:Name`. `options` are by part: {"memory": {"size": 200}}."""
    if parts:
        chosen = [_named(entry) for entry in parts]
    else:
        preset = _find(name)
        chosen = [(cls, dict(preset.fixed.get(cls.name, {}))) for cls in preset.parts]
    given = {key: dict(value) for key, value in (options or {}).items()}
    built = [_construct(factory, {**own, **given.pop(factory.name, {})}) for factory, own in chosen]
    if given:
        known = ", ".join(part.name for part in built)
        raise MethodError(f"method.{next(iter(given))} names no part of this method; it has {known}")
    return compose(*built, name=name, optimizer=optimizer)


def part_classes() -> dict[str, type[Part]]:
    """Every part that ships with everfed, by name."""
    found = {cls.name: cls for preset in PRESETS.values() for cls in preset.parts}
    return {**found, FedGP.name: FedGP}


def _find(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    base = "fedavg" if name == "fedgp" else name.removeprefix("fedgp+")
    if (name == "fedgp" or name.startswith("fedgp+")) and base in PRESETS and base not in _WITHOUT_FEDGP:
        preset = PRESETS[base]
        buffer = () if Memory in preset.parts else (Memory,)
        return Preset(preset.about, (*preset.parts, *buffer, FedGP), {**preset.fixed, **_UNDER_FEDGP})
    raise MethodError(f"method.name must be one of {', '.join(names())}; got {name!r}")


def _named(entry: str | Mapping[str, Any]) -> tuple[type[Part], dict[str, Any]]:
    options = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "part"}
    name = entry if isinstance(entry, str) else entry.get("part", "")
    if ":" in name:
        cls = load_object(name, "method.parts")
    else:
        cls = part_classes().get(name)
    if not (isinstance(cls, type) and issubclass(cls, Part)):
        allowed = ", ".join(part_classes())
        raise MethodError(f"method.parts: {name!r} is not a part; use one of {allowed} or package.module:Name")
    return cls, options


def _construct(cls: type[Part], options: dict[str, Any]) -> Part:
    allowed = [field.name for field in fields(cls)]
    for key in options:
        if key not in allowed:
            raise MethodError(f"method.{cls.name}.{key} is not an option; it has {', '.join(allowed) or 'none'}")
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise MethodError(f"method.{cls.name}.{error}") from error
