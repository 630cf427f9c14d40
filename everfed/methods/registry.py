"""Methods by name: presets of parts, `fedgp+...` on top of any of them, and a user's own parts.

build("fedgp+der", {"memory": {"size": 200}, "der": {"weight": 0.5}})

Light to import: parts, and torch with them, are imported when a method is built.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from everfed.errors import CompositionError
from everfed.naming import load_object, nearest, with_options

if TYPE_CHECKING:
    from everfed.core.method import Method
    from everfed.core.optimizer import Optimizer
    from everfed.core.part import Part

    Entry = str | Mapping[str, Any] | Part | type[Part]  # of a list of parts

# where every part lies: name -> module:Class in everfed.methods
PARTS: dict[str, str] = {
    "fedavg": "aggregate.fedavg:FedAvg",
    "fedadagrad": "aggregate.server_optimizer:FedAdagrad",
    "fedadam": "aggregate.server_optimizer:FedAdam",
    "fedavgm": "aggregate.server_optimizer:FedAvgM",
    "fedyogi": "aggregate.server_optimizer:FedYogi",
    "feddyn": "aggregate.feddyn:FedDyn",
    "fisheravg": "aggregate.fisheravg:FisherAvg",
    "fednova": "aggregate.fednova:FedNova",
    "scaffold": "aggregate.scaffold:Scaffold",
    "compress": "common.compress:Compress",
    "fedasync": "aggregate.asynchronous:FedAsync",
    "fedbuff": "aggregate.asynchronous:FedBuff",
    "ties": "aggregate.ties:TIES",
    "ewc": "regularise.ewc:EWC",
    "fedcurv": "regularise.fedcurv:FedCurv",
    "fedlwf2t": "regularise.fedlwf2t:FedLwF2T",
    "fedprox": "regularise.fedprox:FedProx",
    "fedssi": "regularise.fedssi:FedSSI",
    "lwf": "regularise.lwf:LwF",
    "moon": "regularise.moon:MOON",
    "si": "regularise.si:SynapticIntelligence",
    "agem": "project.agem:AGEM",
    "fedgp": "project.fedgp:FedGP",
    "fedomg": "project.fedomg:FedOMG",
    "fot": "project.fot:FOT",
    "ogd": "project.ogd:OGD",
    "stamp": "project.stamp:STAMP",
    "der": "replay.der:DER",
    "der++": "replay.der:DERPlusPlus",
    "er": "replay.er:Replay",
    "fedcbdr": "replay.fedcbdr:FedCBDR",
    "icarl": "replay.icarl:ICaRL",
    "ideal": "replay.ideal:Ideal",
    "memory": "replay.memory:Memory",
    "af-fcl": "generative.af_fcl:AFFCL",
    "fedcil": "generative.fedcil:FedCIL",
    "glfc": "generative.glfc:GLFC",
    "lander": "generative.lander:Lander",
    "mfcl": "generative.mfcl:MFCL",
    "target": "generative.target:Target",
    "ccvr": "features.calibration:CCVR",
    "fedproto": "features.fedproto:FedProto",
    "fedproto-personal": "features.fedproto:PersonalFedProto",
    "fedran": "features.fedran:FedRAN",
    "hgp": "features.calibration:HGP",
    "ranpac": "features.ridge:RanPAC",
    "ridge": "features.ridge:Ridge",
    "ala": "personal.fedala:ALA",
    "dbe": "personal.feddbe:DBE",
    "fedas": "personal.fedas:FedAS",
    "fedl2p": "personal.fedl2p:FedL2P",
    "fedweit": "personal.fedweit:FedWeIT",
    "fed-cprompt": "pretrained.prompts:FedCPrompt",
    "dolfin": "pretrained.dolfin:DOLFIN",
    "ffa-lora": "pretrained.lora:FFALoRA",
    "lora": "pretrained.lora:LoRA",
    "lorm": "pretrained.lorm:LoRM",
    "pilora": "pretrained.pilora:PILoRA",
    "prompt-coda": "pretrained.prompts:PromptCODA",
    "prompt-dual": "pretrained.prompts:PromptDual",
    "prompt-l2p": "pretrained.prompts:PromptL2P",
    "prompt-shared": "pretrained.prompts:PromptShared",
    "regmean": "pretrained.regmean:RegMean",
}


class MethodError(CompositionError):
    """A method that cannot be built; says which key is wrong and what is allowed."""


@dataclass(frozen=True)
class Preset:
    """Parts by name, in order, and one line about them. fixed: options it sets, {part: {option: value}}."""

    about: str
    parts: tuple[str, ...]
    fixed: Mapping[str, Mapping[str, Any]]


def _preset(about: str, *parts: str, **fixed: Mapping[str, Any]) -> Preset:
    return Preset(about, parts, fixed)


def _choosing(about: str, policy: str | Mapping[str, Any]) -> Preset:
    """Replay as one data set of new and stored samples; only how the stored ones are chosen differs."""
    return _preset(about, "fedavg", "memory", "er", memory={"policy": policy}, er={"mode": "union"})


_BY_SAMPLES: dict[str, Any] = {"fedavg": {"weighting": "samples"}}
_KEEP_LOGITS: dict[str, Any] = {"memory": {"logits": True}}
_STSA: dict[str, Any] = {"ranpac": {"width": 1250, "penalty": 1e6, "classifier": "cosine", "train_first": True}}

PRESETS: dict[str, Preset] = {
    "fedavg": _preset("federated averaging, the lower bound", "fedavg"),
    "fedavgm": _preset("averaging with momentum on the server", "fedavg", "fedavgm"),
    "fedadam": _preset("averaging with Adam on the server", "fedavg", "fedadam"),
    "fedyogi": _preset("averaging with Yogi on the server", "fedavg", "fedyogi"),
    "fedadagrad": _preset("averaging with Adagrad on the server", "fedavg", "fedadagrad"),
    "scaffold": _preset("averaging with control variates against client drift", "fedavg", "scaffold"),
    "feddyn": _preset("clients' optima aligned with the global one by a dynamic regulariser", "feddyn"),
    "fednova": _preset("averaging of updates per step, for clients with different numbers of steps", "fednova"),
    "fisheravg": _preset("every parameter averaged by its Fisher information", "fisheravg"),
    "ties": _preset("updates trimmed, and merged where their signs agree", "ties"),
    "moon": _preset("features near the global model's and away from the client's last ones", "fedavg", "moon"),
    "fedprox": _preset("averaging with a proximal term", "fedavg", "fedprox"),
    "fedcurv": _preset("averaging with a Fisher penalty towards the other clients", "fedavg", "fedcurv"),
    "er": _preset("experience replay from a reservoir", "fedavg", "memory", "er"),
    "der": _preset("dark experience replay: stored logits", "fedavg", "memory", "der", **_KEEP_LOGITS),
    "der++": _preset("DER with replayed labels", "fedavg", "memory", "der++", **_KEEP_LOGITS),
    "agem": _preset("gradients projected on the client's own buffer", "fedavg", "memory", "agem"),
    "ewc": _preset("Fisher penalty towards the previous task's model", "fedavg", "ewc"),
    "lwf": _preset("distillation from the previous task's model", "fedavg", "lwf"),
    "fedlwf2t": _preset("distillation from the client's own last model and the server's", "fedavg", "fedlwf2t"),
    "mfcl": _preset("replays what a data-free generator makes of the previous task's model", "fedavg", "mfcl"),
    "glfc": _preset(
        "exemplars kept when a client detects a change of task, with a loss that makes up for their number",
        "fedavg",
        "memory",
        "er",
        "glfc",
        memory={"size": 2000, "policy": "on-transition"},
        er={"mode": "union"},
    ),
    "lga": _preset(
        "glfc with weights by earlier task, in both losses",
        "fedavg",
        "memory",
        "er",
        "glfc",
        memory={"size": 2000, "policy": "on-transition"},
        er={"mode": "union"},
        glfc={"weights": "lga", "compensation": 1.0, "relation": 1.0},
    ),
    "icarl": _preset(
        "exemplars by herding, distillation, and the nearest mean of exemplars",
        "fedavg",
        "memory",
        "er",
        "icarl",
        memory={"policy": {"kind": "herding", "last": True}},
        er={"mode": "union"},
    ),
    "fedcbdr": _preset(
        "replays samples of high leverage among all clients' features, with temperatures against imbalance",
        "fedavg",
        "memory",
        "er",
        "fedcbdr",
        memory={"policy": "fedcbdr"},
        er={"mode": "union"},
    ),
    "fedcil": _preset("every client's GAN replays earlier tasks; the server trains on what they all make", "fedcil"),
    "af-fcl": _preset(
        "replays features of a shared flow, as far as a client's own data makes them credible",
        "fedavg",
        "af-fcl",
        fedavg={"weighting": "samples"},
    ),
    "ogd": _preset("gradients orthogonal to those of earlier tasks' outputs", "fedavg", "ogd"),
    "si": _preset("synaptic intelligence: importance from every client's own training", "fedavg", "si"),
    "fedssi": _preset("synaptic intelligence of personalised surrogates, without rehearsal", "fedavg", "fedssi"),
    "fot": _preset("global updates orthogonal to earlier tasks' layer inputs", "fedavg", "fot"),
    "target": _preset("distils on images synthesised from the previous task's model", "fedavg", "target"),
    "lander": _preset("TARGET with features bound to label anchors", "fedavg", "lander"),
    "fedweit": _preset("shared, masked and task-adaptive weights, with what other clients published", "fedweit"),
    "fedomg": _preset("the server matches the clients' updates; STAMP's spatial half", "fedomg"),
    "stamp": _preset("updates matched over tasks on clients and over clients on the server", "fedomg", "stamp"),
    "stamp-temporal": _preset("updates matched over tasks on clients, averaged on the server", "fedavg", "stamp"),
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
    "ridge": _preset("closed form on frozen features: ridge regression by exact sums (AFL, AFCL)", "fedavg", "ridge"),
    "ranpac": _preset("ridge regression on random features of frozen ones, by exact sums", "fedavg", "ranpac"),
    "fedran": _preset("ranpac from low-rank summaries, which are a fraction of its bytes", "fedavg", "fedran"),
    "stsa": _preset("ranpac with weights of unit length, after a first task that trains", "fedavg", "ranpac", **_STSA),
    "stsa-e": _preset(
        "stsa from first-order sums of random groups of samples",
        "fedavg",
        "ranpac",
        ranpac={**_STSA["ranpac"], "groups": 5},
    ),
    "fedproto": _preset("features pulled towards class means that clients share", "fedavg", "fedproto"),
    "fedproto-personal": _preset("personalised: clients share class means alone", "fedavg", "fedproto-personal"),
    "ccvr": _preset("the head re-trained on virtual features at a task's end", "fedavg", "ccvr"),
    "hgp": _preset("the head re-trained in every round on a mixture of the clients' features", "fedavg", "hgp"),
    "fedala": _preset("personalised: a learned mixture of the global model and the client's own", "fedavg", "ala"),
    "feddbe": _preset("personalised: every client adds a vector of its own to the features", "fedavg", "dbe"),
    "fedas": _preset("personalised heads on an aligned base, averaged by Fisher information", "fedas"),
    "fedl2p": _preset("personalised: learned rates and statistics for fine-tuning", "fedavg", "fedl2p"),
    "lora": _preset("low-rank adapters of a frozen network, for every task, averaged", "fedavg", "lora", **_BY_SAMPLES),
    "ffa-lora": _preset(
        "LoRA with one factor random and frozen, so that averaging is exact", "fedavg", "ffa-lora", **_BY_SAMPLES
    ),
    "dolfin": _preset("LoRA in directions that earlier tasks' inputs do not use", "fedavg", "dolfin", **_BY_SAMPLES),
    "regmean": _preset("linear layers merged in least squares by the Gram matrices of their inputs", "regmean"),
    "lorm": _preset("LoRA with one factor at a time, merged in closed form", "lorm"),
    "pilora": _preset("prototypes of classes, and one LoRA for every task, orthogonal to earlier ones", "pilora"),
    "prompt-l2p": _preset("prompts of a pool, chosen for each sample by keys", "fedavg", "prompt-l2p", **_BY_SAMPLES),
    "prompt-dual": _preset("prompts for all tasks, and for each", "fedavg", "prompt-dual", **_BY_SAMPLES),
    "prompt-coda": _preset(
        "prompts as weighted sums of components, some for every task", "fedavg", "prompt-coda", **_BY_SAMPLES
    ),
    "coda-lwf": _preset(
        "CODA-Prompt with distillation from the previous task's model", "fedavg", "prompt-coda", "lwf", **_BY_SAMPLES
    ),
    "fed-cprompt": _preset(
        "CODA-Prompt with features near the received model's and away from the last task's",
        "fedavg",
        "fed-cprompt",
        **_BY_SAMPLES,
    ),
    "prompt-hgp": _preset(
        "one prompt for all tasks, and the head re-trained as by hgp", "fedavg", "prompt-shared", "hgp", **_BY_SAMPLES
    ),
    "ideal": _preset("joint training on all tasks so far, the upper bound", "fedavg", "ideal"),
}
# without FedGP: the upper bound keeps no buffer, generative replay no data; icarl has another head where FedGP computes
# its reference; decomposed and personal weights have no gradient to share; ablations stand alone; lorm trains other
# factors in every round
_GENERATIVE = ("mfcl", "target", "lander", "fedcil", "af-fcl")
_PERSONAL = ("fedproto-personal", "fedweit", "fedala", "feddbe", "fedas", "fedl2p")
_CLOSED = ("ridge", "ranpac", "fedran", "stsa", "stsa-e")  # no gradients, or those of the first task alone
_WITHOUT_FEDGP = ("ideal", "icarl", *_GENERATIVE, *_PERSONAL, *_CLOSED, "stamp-temporal", "coordinated-4", "lorm")
ALIASES = {"afl": "ridge", "afcl": "ridge", "acil": "ridge", "fed3r": "ridge"}  # other papers' names of the same method
_ON_ANY = ("compress", "fedasync", "fedbuff")  # parts that stand on top of any method: `fedgp+der+compress`
_UNDER_FEDGP: dict[str, dict[str, Any]] = {"ogd": {"project": "update"}}  # options set where FedGP comes after


_ALL = "`everfed list methods` shows all of them"


def names() -> dict[str, str]:
    """Every preset with one line about it, `fedgp` variants included."""
    listed = {name: preset.about for name, preset in PRESETS.items()}
    listed["fedgp"] = "averaging with gradients projected on the global buffer gradient"
    for name, preset in PRESETS.items():
        if name not in ("fedavg", *_WITHOUT_FEDGP):
            listed[f"fedgp+{name}"] = f"{preset.about}, with FedGP on top"
    return listed


def about(name: str) -> str:
    """One line about a method; "" where there is none of that name."""
    found = preset(name)
    return names().get(name) or (found.about if found else "")


def preset(name: str) -> Preset | None:
    """What a method's name stands for; None for no preset."""
    try:
        return _find(name)
    except MethodError:
        return None


def canonical(name: str) -> str:
    """The name as presets have it: `der+fedgp` is `fedgp+der`."""
    base = name.removesuffix("+fedgp")
    return name if base == name or not base else f"fedgp+{base}"


def build(
    name: str = "",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    parts: Sequence[Entry] | None = None,
    optimizer: Optimizer | None = None,
) -> Method:
    """A method from a preset's name, from `package.module:Name` (a part, or a list of parts), or from a list of parts:
    part names, tables {part = NAME, option = value, ...}, parts themselves; a part may be named `package.module:Name`.
    `options` are by part: {"memory": {"size": 200}}."""
    from everfed.core.method import SGD, compose

    name = canonical(name)
    name = ALIASES.get(name, name)
    if parts is None and ":" in name:
        parts = _own_parts(name)
    if parts:
        chosen = [_named(entry) for entry in parts]
    else:
        preset = _find(name)
        chosen = [(part_class(part), dict(preset.fixed.get(part, {}))) for part in preset.parts]
    given = {key: dict(value) for key, value in (options or {}).items()}
    built = [
        with_options(cls, {**own, **given.pop(cls.name, {})}, f"method.{cls.name}", error=MethodError)
        for cls, own in chosen
    ]
    if given:
        known = ", ".join(part.name for part in built)
        raise MethodError(f"method.{next(iter(given))} names no part of this method; it has {known}")
    return compose(*built, name=name, optimizer=optimizer or SGD)


def entries(method: Any) -> list[Entry] | None:
    """The parts of a method that is given as a list of parts, or as one part, which stands on top of `fedavg` unless it
    aggregates itself; None for anything else."""
    from everfed.core.part import Aggregator, Part

    if isinstance(method, list | tuple):
        return list(method)
    kind = method if isinstance(method, type) else type(method)
    if not issubclass(kind, Part):
        return None
    return [method] if issubclass(kind, Aggregator) else ["fedavg", method]


def _own_parts(name: str) -> list[Entry]:
    """The parts of a method of a user's own, `package.module:Name`. `fedgp+` before it adds FedGP, with a memory where
    there is none."""
    path = name.removeprefix("fedgp+")
    if "+" in path:
        own = path.rpartition("+")[2]
        raise MethodError(
            f"method.name: {name!r} is no method. {own!r} stands on top of fedavg by itself, and `fedgp+{own}` has "
            f"FedGP on top; anything else is a list: method.parts = {json.dumps(path.split('+'))}"
        )
    found = load_object(path, "method.name")
    parts = entries(found)
    if parts is None:
        raise MethodError(f"method.name: {path} is a {type(found).__name__}; expected a part, or a list of parts")
    if path == name:
        return parts
    buffer = [] if any(_named(entry)[0].name == "memory" for entry in parts) else ["memory"]
    return [*parts, *buffer, "fedgp"]


def part_class(name: str) -> type[Part]:
    """The part of that name, shipped with everfed or `package.module:Name`. Raises MethodError."""
    where = f"everfed.methods.{PARTS[name]}" if name in PARTS else name
    found = load_object(where, "method.parts") if ":" in where else None
    from everfed.core.part import Part

    if not (isinstance(found, type) and issubclass(found, Part)):
        raise MethodError(
            f"method.parts: {name!r} is not a part.{nearest(name, PARTS)} `everfed list parts` shows all; one of your "
            "own is named package.module:Name"
        )
    return found


def name_of(part: type[Part]) -> str:
    """The name by which `part_class` finds this part again."""
    path = f"{part.__module__}:{part.__qualname__}"
    return part.name if path == f"everfed.methods.{PARTS.get(part.name)}" else path


def part_classes() -> dict[str, type[Part]]:
    """Every part that ships with everfed, by name."""
    return {name: part_class(name) for name in PARTS}


def _find(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    below, _, last = name.rpartition("+")
    if below and last in _ON_ANY:
        preset = _find(below)
        return Preset(f"{preset.about}, with {last} on top", (*preset.parts, last), preset.fixed)
    base = "fedavg" if name == "fedgp" else name.removeprefix("fedgp+")
    if (name == "fedgp" or name.startswith("fedgp+")) and base in PRESETS and base not in _WITHOUT_FEDGP:
        preset = PRESETS[base]
        buffer = () if "memory" in preset.parts else ("memory",)
        return Preset(preset.about, (*preset.parts, *buffer, "fedgp"), {**preset.fixed, **_UNDER_FEDGP})
    if base in _WITHOUT_FEDGP:
        raise MethodError(f"method.name: {name!r}: FedGP does not go on top of {base}. {_ALL}")
    raise MethodError(f"method.name: there is no method {name!r}.{nearest(name, names())} {_ALL}")


def _named(entry: Entry) -> tuple[type[Part], dict[str, Any]]:
    """(class, options) of an entry in a list of parts."""
    from everfed.core.part import Part

    if isinstance(entry, Part):
        return type(entry), {field.name: getattr(entry, field.name) for field in fields(entry)}
    if isinstance(entry, type) and issubclass(entry, Part):
        return entry, {}
    if isinstance(entry, Mapping):
        return part_class(entry.get("part", "")), {key: value for key, value in entry.items() if key != "part"}
    return part_class(entry), {}


# the papers of methods -----------------------------------------------------------------------------------------------
_ON_TOP = "fedgp+"


@dataclass(frozen=True)
class Citation:
    """key: of its BibTeX entry."""

    key: str
    authors: str
    title: str
    venue: str
    year: int

    @property
    def short(self) -> str:
        """As "Buzzega et al., NeurIPS 2020"."""
        names = [name.partition(",")[0] for name in self.authors.split(" and ")]
        who = names[0] if len(names) == 1 else " and ".join(names) if len(names) == 2 else f"{names[0]} et al."
        who = who.replace(" and others", " et al.")
        return f"{who}, {self.venue} {self.year}"

    @property
    def bibtex(self) -> str:
        """An entry; {{...}} keeps the title's capitals."""
        kind, where = (
            ("misc", "howpublished")
            if ":" in self.venue or self.venue == "preprint"
            else ("inproceedings", "booktitle")
        )
        lines = {"author": self.authors, "title": f"{{{self.title}}}", where: self.venue, "year": str(self.year)}
        body = ",\n".join(f"  {key} = {{{value}}}" for key, value in lines.items())
        return f"@{kind}{{{self.key},\n{body}\n}}"


@cache
def _papers() -> dict[str, Citation]:
    """By the name of a method or part."""
    table = tomllib.loads(resources.files("everfed.methods").joinpath("papers.toml").read_text(encoding="utf-8"))
    found = {}
    for key, entry in table.items():
        paper = Citation(key, entry["authors"], entry["title"], entry["venue"], entry["year"])
        found.update(dict.fromkeys(entry.get("names", [key]), paper))
    return found


def papers(method: str) -> list[Citation]:
    """Of a method's name, its own first: that of the preset, else those of its parts beside averaging."""
    base = canonical(method).removeprefix(_ON_TOP)
    base = ALIASES.get(base, base)
    found = preset(base)
    parts = found.parts if found else (base,)
    names = [base] if base in _papers() else [part for part in parts if part != "fedavg" or len(parts) == 1]
    names = ["fedgp", *names] if canonical(method).startswith(_ON_TOP) else names
    return list(dict.fromkeys(_papers()[name] for name in names if name in _papers()))


def family(method: str) -> str:
    """The folder of everfed.methods in which what is particular to a method lies."""
    name = canonical(method)
    found = preset(name)
    part = "fedgp" if name.startswith(_ON_TOP) or found is None else found.parts[-1]
    return PARTS[part].partition(".")[0] if part in PARTS else "own"
