"""Time and memory of replay selection: solvers, exhaustive search, coordination, per-sample gradients.

Run as `python benchmarks/selection.py [--quick]`; writes one JSON object to standard output.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch import nn

from everfed.methods.replay.capped_simplex import project_capped_simplex
from everfed.methods.replay.coordinated import coordinate
from everfed.methods.replay.diversity import Candidates, convex_weights, objective, zero_diagonal_weights
from everfed.methods.replay.near_optimality import brute_force, draw_gradients
from everfed.methods.replay.sample_gradients import RandomProjection, sample_gradients


def seconds(work: Callable[[], object], repetitions: int = 3) -> float:
    """The best of a few runs."""
    times = []
    for _ in range(repetitions):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return round(min(times), 5)


def clustered(samples: int, d: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((samples, d)) + rng.standard_normal((8, d))[rng.integers(8, size=samples)]


def solvers(sizes: list[tuple[int, int]]) -> list[dict[str, float]]:
    """Gram matrix, convex and zero-diagonal solve for d = 300."""
    rows = []
    for samples, n in sizes:
        gradients = clustered(samples, 300)
        candidates, zeros = Candidates.of(gradients), np.zeros(samples)
        rows.append(
            {
                "samples": samples,
                "n": n,
                "gram_s": seconds(lambda gradients=gradients: Candidates.of(gradients)),
                "eigenvalue_s": seconds(lambda gram=candidates.gram: np.linalg.eigvalsh(gram)),
                "convex_s": seconds(lambda c=candidates, n=n, z=zeros: convex_weights(c, n, z)),
                "zero_diagonal_s": seconds(lambda c=candidates, n=n, z=zeros: zero_diagonal_weights(c, n, z, 0)),
                "projection_s": seconds(lambda y=candidates.norms, n=n: project_capped_simplex(y, n)),
            }
        )
    return rows


def exhaustive() -> dict[str, float]:
    """All subsets of 5 out of n."""
    grams = {n: Candidates.of(draw_gradients(np.random.default_rng(0), n)).gram for n in (10, 30, 50)}
    return {str(n): seconds(lambda gram=gram: brute_force(gram, 5)) for n, gram in grams.items()}


def coordination(clients: int, samples: int = 30, d: int = 300) -> list[dict[str, float]]:
    """The union's objective and the time, by number kept and number of exchanges."""
    rng = np.random.default_rng(0)
    gradients = [draw_gradients(rng, samples, d) for _ in range(clients)]
    rows = []
    for n in (1, 5, 20):
        drawn = [g[rng.choice(samples, n, replace=False)] for g in gradients]
        rows.append({"n": n, "policy": "random", "objective": _union(drawn)})
        for rounding in ("top-n", "zero-diagonal"):
            for exchanges in (0, 1, 2, 4):
                start = perf_counter()
                choices = coordinate(gradients, n, exchanges, rounding=rounding).choices
                spent = round(perf_counter() - start, 3)
                kept = _union([g[c] for g, c in zip(gradients, choices, strict=True)])
                rows.append({"n": n, "policy": rounding, "exchanges": exchanges, "objective": kept, "s": spent})
    return rows


def _union(kept: list[np.ndarray]) -> float:
    together = np.concatenate(kept)
    return round(objective(together, np.arange(len(together))), 1)


def gradients(samples: int) -> list[dict[str, float]]:
    """The 1,663,370-parameter network of McMahan et al.: full gradients in chunks, and projected ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    x, y = torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,))
    model_arguments = (model, dict(model.named_parameters()), dict(model.named_buffers()), x, y)
    one = (*model_arguments[:3], x[:1], y[:1])
    sample_gradients(*one, nn.functional.cross_entropy)  # code that loads on first use is not counted
    rows = []
    for projection in (RandomProjection(1024), RandomProjection(4096), None):
        memory = 2**29 + (0 if projection else samples * 1_663_370 * 4)
        before = _peak()
        start = perf_counter()
        sample_gradients(*model_arguments, nn.functional.cross_entropy, projection=projection, memory=memory)
        spent = round(perf_counter() - start, 3)
        rows.append(
            {
                "projected_to": projection.size if projection else 0,
                "s": spent,
                "budget_mb": memory / 2**20,
                "peak_grew_mb": _peak() - before,
            }
        )
    return rows


def _peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    result = {
        "gradients": gradients(16 if quick else 128),
        "solvers": solvers([(50, 5), (200, 20)] if quick else [(50, 5), (200, 20), (600, 50), (1500, 100)]),
        "exhaustive": exhaustive(),
        "coordination": coordination(10 if quick else 100),
    }
    json.dump(result, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
