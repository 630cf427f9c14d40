"""Generator training on a GPU: captured against step by step, in fp32; and in bf16."""

from __future__ import annotations

import pytest
import torch

from everfed.core.context import Setup
from everfed.core.replica import initial_weights
from everfed.core.trainer import Trainer
from everfed.engines.captured_steps import LoopingTrainer
from everfed.engines.eager import new_trainer
from everfed.method import Model
from everfed.methods.generative.inversion import Inversion, training_on
from everfed.models.generators import GeneratorBlueprint
from tests.support.phases import phase_of
from tests.support.rehearsal_free import ClassToy
from tests.support.toy import Bench, Norm, Outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# Adam divides gradients that are zero but for rounding (of biases before BatchNorm) by their own size
TOLERANCE = 1e-3
BLUEPRINT = GeneratorBlueprint((1, 4, 4), 6, light=True)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def case() -> Bench:
    return Bench("mfcl", stream=ClassToy(tasks=3, classes=6), module=Norm)


def trained(kind: type[Trainer], precision: str = "fp32") -> tuple[Model, torch.Tensor]:
    """A generator after chunks of three and two steps, and the terms of its loss in the last."""
    chunks = (3, 2)
    bench = case()
    trainer = new_trainer(bench.setup(), bench.build_module, "cuda", precision, kind)
    how = Inversion(batch=16, lr=1e-3)
    model: Model = {k: v.cuda() for k, v in initial_weights(BLUEPRINT, 0).items()}
    moments = how.optimizer.init(model["params"])
    seen, terms = torch.tensor([True] * 4 + [False] * 2), torch.zeros(4)
    for number, steps in enumerate(chunks):
        training = training_on(trainer, BLUEPRINT, how)
        model, moments, terms = training.run(bench.model(), model, moments, seen, steps, seed=number)
    assert moments["t"].item() == sum(chunks)
    return model, terms.cpu()


def test_a_captured_loop_counts_every_run_and_no_trial() -> None:
    generator = torch.Generator("cuda")
    bench = case()
    trainer = new_trainer(bench.setup(), bench.build_module, "cuda", "fp32", LoopingTrainer)
    counter, drawn = torch.zeros((), device="cuda"), torch.zeros(4, device="cuda")

    def body() -> None:
        counter.add_(1.0)
        drawn.copy_(torch.randn(4, generator=generator, device="cuda"))

    loop = trainer.loop(body, [counter, drawn], generator)
    results = []
    for _ in range(2):
        generator.manual_seed(5)
        loop(3)
        results.append(drawn.clone())
    generator.manual_seed(5)
    for _ in range(3):
        expected = torch.randn(4, generator=generator, device="cuda")
    assert counter.item() == 6.0
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], expected)


def test_captured_generator_training_equals_what_comes_step_by_step() -> None:
    (eager, terms), (captured, others) = trained(Trainer), trained(LoopingTrainer)
    assert torch.allclose(terms, others, atol=TOLERANCE)
    assert torch.equal(eager["counters"], captured["counters"])
    assert (eager["stats"] - captured["stats"]).norm() < TOLERANCE * eager["stats"].norm()


def test_generator_training_in_bf16_stays_near_fp32() -> None:
    (_, terms), (_, low) = trained(LoopingTrainer), trained(LoopingTrainer, "bf16")
    assert torch.allclose(terms, low, atol=0.1)


def on_graphs(bench: Bench) -> Outcome:
    """A whole run in bf16, clients and server."""
    from everfed.engines.graphs import Graphs
    from everfed.store.clients import ClientStore

    def graphs(setup: Setup, store: ClientStore) -> Graphs:
        return Graphs(setup, store, bench.build_module, "cuda", "bf16", slots=2)

    return bench.run(graphs)


@pytest.mark.parametrize(
    ("method", "phase", "repeats"),
    [("mfcl", "generator", 6), ("target", "synthesis", 6), ("fedcil", "consolidate", 12)],
)
def test_a_whole_run_on_the_graphs_engine(method: str, phase: str, repeats: int) -> None:
    outcome = on_graphs(Bench(method, stream=ClassToy(tasks=3, classes=6), module=Norm))
    assert outcome.params.isfinite().all()
    assert sum(e["event"] == "phase" and e["phase"] == phase for e in outcome.events) == repeats


def test_consolidation_is_captured_and_equals_what_comes_step_by_step() -> None:
    """Of FedCIL's server, with and without earlier tasks: the same losses over two chunks."""
    bench = Bench("fedcil", stream=ClassToy(tasks=2), module=Norm)
    part = bench.build_method().part("fedcil")
    states, losses = bench.run(rounds=3).state.server, []
    for kind in (Trainer, LoopingTrainer):
        trainer, moments = new_trainer(bench.setup(), bench.build_module, "cuda", "fp32", kind), {}
        for repeat, past in enumerate((True, False)):
            server = bench.server("fedcil", states, round_index=3, phase="consolidate", repeat=repeat)
            server.context = server.context.at(trainer=trainer)
            server.state |= {"moments": moments, **({} if past else {"old": {}})}
            phase_of(part, "consolidate").update(server)
            moments = server.state["moments"]
            losses.append(torch.tensor(list(server.reports.values())))
    assert torch.allclose(losses[0], losses[2], atol=TOLERANCE)
    assert torch.allclose(losses[1], losses[3], atol=TOLERANCE)
