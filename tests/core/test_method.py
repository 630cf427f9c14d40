"""Every composition that cannot work is refused before anything runs, with what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from everfed.core.handle import Client
from everfed.core.message import Values
from everfed.core.method import Method, compose
from everfed.core.optimizer import Optimizer
from everfed.core.part import BOUNDARIES, PLAIN, TASK_ID, Part, options_of
from everfed.core.phase import ALWAYS, BEGIN, END, FIRST, Cohort, Collect, Mean, Phase, Reducer, Rounds, When, every
from everfed.core.replica import Gradient
from everfed.core.step import Step
from everfed.core.tree import Tree
from everfed.errors import CompositionError
from everfed.methods import registry as methods
from everfed.methods.aggregate.fedavg import FedAvg
from everfed.methods.project.agem import AGEM
from everfed.methods.project.fedgp import FedGP
from everfed.methods.regularise.fedcurv import FedCurv
from everfed.methods.regularise.fedprox import FedProx
from everfed.methods.replay.der import DER, DERPlusPlus
from everfed.methods.replay.er import Replay
from everfed.methods.replay.ideal import Ideal
from everfed.methods.replay.memory import Memory
from tests.support.toy import Toy


def nothing(client: Client) -> Values:
    """A phase's work on a client that does nothing."""
    return {}


@dataclass(frozen=True)
class Nameless(Part):
    pass


@dataclass(frozen=True)
class Slashed(Part):
    name: ClassVar[str] = "a/b"


@dataclass(frozen=True)
class OtherAverage(FedAvg):
    name: ClassVar[str] = "other"


@dataclass(frozen=True)
class WithPhase(Part):
    """A part with one phase, as a test wants it."""

    phase: Phase = field(default_factory=lambda: Phase("extra", run=nothing))
    name: ClassVar[str] = "own"

    def phases(self) -> tuple[Phase, ...]:
        return (self.phase,)


@dataclass(frozen=True)
class NeedsBoundaries(Part):
    name: ClassVar[str] = "edge"

    def needs(self) -> set[str]:
        return {BOUNDARIES}


@dataclass(frozen=True)
class NeedsTask(Part):
    name: ClassVar[str] = "task"

    def needs(self) -> set[str]:
        return {TASK_ID}


@dataclass(frozen=True)
class Reveals(Part):
    name: ClassVar[str] = "curious"

    def reducers(self) -> Mapping[str, Reducer]:
        return {"x": Collect()}


@dataclass(frozen=True)
class Objective(Part):
    name: ClassVar[str] = "objective"

    def objective(self, step: Step) -> Tensor:
        return step.outputs.sum()


@dataclass(frozen=True)
class OtherObjective(Objective):
    name: ClassVar[str] = "objective2"


@dataclass(frozen=True)
class Forward(Part):
    name: ClassVar[str] = "forward"

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        return torch.zeros(1)


@dataclass(frozen=True)
class OtherForward(Forward):
    name: ClassVar[str] = "forward2"


@dataclass(frozen=True)
class Misspelt(Part):
    name: ClassVar[str] = "misspelt"

    def gradent(self, step: Step, gradient: Gradient) -> Tensor:
        return -gradient.vector


LOGITS = Memory(size=4, logits=True)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "exactly one part must own aggregation.*none"),
        ((FedProx(),), "exactly one part must own aggregation"),
        ((FedAvg(), OtherAverage()), "exactly one part must own aggregation.*fedavg.*other"),
        ((FedAvg(), FedProx(), FedProx(0.5)), "more than once: fedprox"),
        ((FedAvg(), Nameless()), "need a name.*Nameless"),
        ((FedAvg(), Slashed()), "without '/'.*Slashed"),
        ((FedAvg(), Replay()), "'er' needs part 'memory'"),
        ((FedAvg(), DER()), "'der' needs part 'memory'"),
        ((FedAvg(), AGEM()), "'agem' needs part 'memory'"),
        ((FedAvg(), FedGP()), "'fedgp' needs part 'memory'"),
        ((FedAvg(), Memory(), DER()), "memory.logits = true"),
        ((FedAvg(), Memory(), DERPlusPlus()), "memory.logits = true"),
        ((FedAvg(), Memory(), FedGP(), FedProx()), "last gradient rule; move fedprox before"),
        ((FedAvg(), Memory(), FedGP(), FedCurv()), "last gradient rule; move fedcurv before"),
        ((FedAvg(), Memory(), FedGP(), AGEM()), "last gradient rule; move agem before"),
        ((FedAvg(), WithPhase(Phase("extra"))), "phase 'extra' has clients, but no run="),
        ((FedAvg(), WithPhase(Phase("train", run=nothing))), "not a legal phase"),
        ((FedAvg(), WithPhase(Phase("x", Cohort.SERVER, reduce={"y": Mean()}))), "not a legal phase"),
        ((FedAvg(), WithPhase(Phase("x", Cohort.SERVER, run=nothing))), "not a legal phase"),
        ((FedAvg(), Misspelt()), "part 'misspelt' has a method 'gradent', which is no hook: 'gradient'"),
        (
            (FedAvg(), Objective(), OtherObjective()),
            r"only one part may define objective\(\); got objective, objective2",
        ),
        ((FedAvg(), Forward(), OtherForward()), r"only one part may define forward\(\); got forward, forward2"),
    ],
)
def test_refused(parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        compose(*parts)


@pytest.mark.parametrize("replay", [Replay(), DER(), AGEM()])
def test_a_part_before_the_memory_it_reads_is_refused(replay: Part) -> None:
    with pytest.raises(CompositionError, match="memory"):
        compose(FedAvg(), replay, LOGITS)


def test_a_phase_called_evaluate_is_refused() -> None:
    with pytest.raises(CompositionError, match="not a legal phase"):
        compose(FedAvg(), WithPhase(Phase("evaluate", run=nothing)))


@pytest.mark.parametrize(
    ("part", "options"),
    [
        (FedAvg, {"weighting": "loud"}),
        (FedProx, {"mu": -0.1}),
        (FedProx, {"mu": float("nan")}),
        (FedCurv, {"weight": -1.0}),
        (FedCurv, {"fisher": "exact"}),
        (FedCurv, {"fisher_samples": 0}),
        (Memory, {"size": -1}),
        (Memory, {"offer": "sometimes"}),
        (Replay, {"batch": 0}),
        (DER, {"weight": -1.0}),
        (DER, {"batch": 0}),
        (DERPlusPlus, {"label_weight": -0.5}),
        (AGEM, {"batch": 0}),
        (FedGP, {"samples": -1}),
        (FedGP, {"mode": "sleep"}),
    ],
)
def test_parts_refuse_values_outside_their_range(part: type[Part], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        part(**options)
    with pytest.raises(methods.MethodError, match=f"method.{part.name}.{next(iter(options))}".replace("+", r"\+")):
        methods.build(parts=[{"part": part.name, **options}])


# streams -------------------------------------------------------------------------------------------------------------
BLIND = Toy(boundaries=False, task_ids=False)


@pytest.mark.parametrize(
    "part",
    [
        NeedsBoundaries(),
        WithPhase(Phase("x", rounds=BEGIN, run=nothing)),
        WithPhase(Phase("x", rounds=END, run=nothing)),
    ],
)
def test_a_stream_that_hides_boundaries_is_refused(part: Part) -> None:
    method = compose(FedAvg(), part)
    method.fit_stream(Toy())
    with pytest.raises(CompositionError, match="when a task begins or ends.*stream 'toy'"):
        method.fit_stream(BLIND)


def test_a_boundary_cohort_needs_boundaries_whenever_it_runs() -> None:
    with pytest.raises(CompositionError, match="begins or ends"):
        compose(FedAvg(), WithPhase(Phase("x", Cohort.BOUNDARY, ALWAYS, run=nothing))).fit_stream(BLIND)


def test_a_stream_that_hides_tasks_is_refused() -> None:
    with pytest.raises(CompositionError, match="which task a client is in"):
        compose(FedAvg(), NeedsTask()).fit_stream(Toy(task_ids=False))


@pytest.mark.parametrize("name", methods.names())
def test_no_preset_of_the_fedgp_family_needs_boundaries(name: str) -> None:
    if name in FAMILY:
        methods.build(name).fit_stream(BLIND)


FAMILY = ("fedavg", "fedprox", "fedcurv", "er", "der", "der++", "agem", "fedgp", "fedgp+der", "fedgp+agem", "fedgp+er")


# what a method tells about itself ------------------------------------------------------------------------------------
def test_order_phases_and_aggregator() -> None:
    method = methods.build("fedgp+der")
    assert [part.name for part in method.parts] == ["fedavg", "memory", "der", "fedgp"]
    assert method.aggregator.name == "fedavg" == method.train_phase().owner
    assert [phase.name for phase in method.phases(When.AFTER)] == ["reference"]
    assert method.phases(When.BEFORE) == ()
    assert not method.personal


def test_what_the_server_sees_one_by_one() -> None:
    assert methods.build("fedgp+der++").reveals() == {}
    assert compose(FedAvg(), Reveals()).reveals() == {"train": ["curious"]}
    collecting = WithPhase(Phase("x", reduce={"y": Collect()}, run=nothing))
    assert compose(FedAvg(), collecting).reveals() == {"x": ["own"]}


def test_doubtful_compositions_warn() -> None:
    assert compose(FedAvg(), Memory(), FedGP()).warnings == ()
    assert "adam" in compose(FedAvg(), Memory(), FedGP(), optimizer=Optimizer("adam")).warnings[0]


# presets -------------------------------------------------------------------------------------------------------------
NAMES = {
    "fedavg": ["fedavg"],
    "fedprox": ["fedavg", "fedprox"],
    "fedcurv": ["fedavg", "fedcurv"],
    "er": ["fedavg", "memory", "er"],
    "der": ["fedavg", "memory", "der"],
    "der++": ["fedavg", "memory", "der++"],
    "agem": ["fedavg", "memory", "agem"],
    "ideal": ["fedavg", "ideal"],
    "fedgp": ["fedavg", "memory", "fedgp"],
    "fedgp+fedprox": ["fedavg", "fedprox", "memory", "fedgp"],
    "fedgp+fedcurv": ["fedavg", "fedcurv", "memory", "fedgp"],
    "fedgp+er": ["fedavg", "memory", "er", "fedgp"],
    "fedgp+der": ["fedavg", "memory", "der", "fedgp"],
    "fedgp+der++": ["fedavg", "memory", "der++", "fedgp"],
    "fedgp+agem": ["fedavg", "memory", "agem", "fedgp"],
}


@pytest.mark.parametrize(("name", "parts"), NAMES.items())
def test_presets_are_what_the_papers_compose(name: str, parts: list[str]) -> None:
    assert name in methods.names()
    assert [part.name for part in methods.build(name).parts] == parts


@pytest.mark.parametrize("name", methods.names())
def test_every_listed_name_builds_under_that_name(name: str) -> None:
    method = methods.build(name)
    assert method.name == name
    assert isinstance(method, Method)


def test_defaults_are_the_papers() -> None:
    names = ("fedgp+der", "fedgp+der++", "fedgp+agem", "fedprox", "fedcurv", "er")
    by_name = {part.name: options_of(part) for name in names for part in methods.build(name).parts}
    assert by_name["fedavg"]["weighting"] == "uniform" and by_name["fedavg"]["reducer"] == "mean"
    assert by_name["memory"]["size"] == 200 and by_name["memory"]["offer"] == "first_visit"
    assert by_name["der"] == {"weight": 1.0, "batch": 32}
    assert by_name["der++"] == {"weight": 0.1, "batch": 32, "label_weight": 0.5}
    assert by_name["agem"] == {"batch": 32}
    assert by_name["er"] == {"batch": 32, "mode": "per_step"}
    assert by_name["fedgp"] == {"samples": 32, "mode": "train"}
    assert by_name["fedprox"] == {"mu": 0.01}
    assert by_name["fedcurv"] == {"weight": 1.0, "fisher": "sample", "fisher_samples": 500}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "fedsgd"}, "method.name: there is no method 'fedsgd'. Did you mean"),
        ({"name": "fedgp+ideal"}, "method.name: .*FedGP does not go on top of ideal"),
        ({"name": "fedgp+"}, r"method.name: there is no method 'fedgp\+'"),
        ({"name": ""}, "method.name: there is no method ''"),
        ({"name": "fedavg", "options": {"memory": {"size": 3}}}, "method.memory names no part.*fedavg"),
        ({"name": "der", "options": {"der": {"alpha": 1}}}, "method.der.alpha is not an option.*weight, batch"),
        ({"name": "ideal", "options": {"ideal": {"x": 1}}}, "method.ideal.x is not an option.*none"),
        ({"parts": ["fedavg", "unheard"]}, "method.parts: 'unheard' is not a part"),
        ({"parts": ["fedavg", "os:path"]}, "'os:path' is not a part"),
        ({"parts": ["fedavg", "der"]}, "'der' needs part 'memory'"),
    ],
)
def test_methods_that_cannot_be_built(call: dict[str, Any], message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        methods.build(**call)


def test_a_user_s_own_part_enters_by_its_name() -> None:
    parts = ["fedavg", {"part": "tests.core.test_method:NeedsTask"}, {"part": "fedprox", "mu": 0.5}]
    built = methods.build(parts=parts).parts
    assert [part.name for part in built] == ["fedavg", "task", "fedprox"]
    assert options_of(built[2]) == {"mu": 0.5}


# phases --------------------------------------------------------------------------------------------------------------
def due(when: Rounds, rounds: int = 6) -> list[int]:
    stream = Toy(tasks=2, rounds_per_task=3)
    return [index for index in range(rounds) if Phase("x", rounds=when).due(index, stream.round(index), rounds)]


def test_in_which_rounds_a_phase_runs() -> None:
    assert due(ALWAYS) == [0, 1, 2, 3, 4, 5]
    assert due(FIRST) == [0]
    assert due(BEGIN) == [0, 3]
    assert due(END) == [2, 5]
    assert due(every(2)) == [0, 2, 4]
    assert due(every(4, 1)) == [1, 5]


def test_a_phase_may_leave_out_the_last_round() -> None:
    stream = Toy(tasks=2, rounds_per_task=3)
    phase = Phase("x", rounds=END, in_last_round=False)
    assert [index for index in range(6) if phase.due(index, stream.round(index), 6)] == [2]


def test_composition_fills_in_the_owner_of_a_phase() -> None:
    assert [phase.owner for phase in compose(FedAvg(), WithPhase()).own_phases] == ["own"]


@pytest.mark.parametrize(("rounds", "offset"), [(0, 0), (2, 2), (2, -1)])
def test_every_refuses_nonsense(rounds: int, offset: int) -> None:
    with pytest.raises(ValueError, match="every"):
        every(rounds, offset)


def test_who_takes_part_in_a_phase() -> None:
    plan = Toy(cohorts={1: (2,)}).round(1)  # the last round of task 0
    assert Phase("a").clients(plan) == (2,)
    assert Phase("a", cohort=Cohort.ALL).clients(plan) == (0, 1, 2)
    assert Phase("a", cohort=Cohort.SERVER).clients(plan) == ()
    assert Phase("a", cohort=Cohort.BOUNDARY, rounds=END).clients(plan) == (0, 1, 2)
    assert Phase("a", cohort=Cohort.BOUNDARY, rounds=BEGIN).clients(plan) == ()


def test_ideal_takes_any_stream_and_no_buffer() -> None:
    assert not methods.build("ideal").needs("memory")
    assert compose(FedAvg(), Ideal()).needs("history")


@dataclass(frozen=True)
class Compares(Part):
    """Compares features of the network itself."""

    name: ClassVar[str] = "compares"

    def needs(self) -> Set[str]:
        return {PLAIN}


@dataclass(frozen=True)
class Turns(Part):
    name: ClassVar[str] = "turns"

    def forward(self, module: nn.Module, x: Tensor, state: Tree, message: Tree) -> Tensor:
        outputs: Tensor = module(-x)
        return outputs


def test_who_compares_features_of_the_network_stands_beside_no_other_forward_pass() -> None:
    with pytest.raises(CompositionError, match="'compares' compares features of the network itself; 'turns' changes"):
        compose(FedAvg(), Compares(), Turns())
