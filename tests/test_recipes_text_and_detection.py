"""FedGP's recipes for texts and driving scenes say what the paper says, where it says something."""

import pytest

from everfed.recipe import read
from everfed.recipe import shipped as recipes

METHODS = ["fedavg", "fedgp", "agem", "fedgp+agem", "der", "fedgp+der", "ideal"]


def test_table_6_follows_the_paper() -> None:
    recipe = read("fedgp/table6-yahooqa")
    stream, method = recipe.stream.model_extra, recipe.method.model_extra
    assert (recipe.stream.dataset, recipe.stream.scenario) == ("yahooqa", "class-incremental")
    assert (stream["tasks"], stream["clients"], stream["class_order"]) == (5, 10, "natural")
    assert stream["partition"] == {"kind": "dirichlet", "alpha": 0.3, "balance": True, "min_samples": 10}
    assert (recipe.model.kind, recipe.model.model_extra["hidden"]) == ("mlp", [])
    assert (method["memory"]["size"], method["der"]["weight"], method["fedgp"]["samples"]) == (200, 1.0, 32)
    assert (recipe.compare.methods, recipe.compare.seeds) == (METHODS, [0, 1, 2, 3, 4])


def test_the_small_table_6_differs_in_size_and_encoder_alone() -> None:
    small, whole = read("fedgp/table6-yahooqa-small"), read("fedgp/table6-yahooqa")
    assert small.method == whole.method and small.model == whole.model and small.compare.methods == METHODS
    changed = {**whole.stream.model_dump(), "encoder": "hashing", "max_train": 2000, "max_test": 1000}
    assert small.stream.model_dump() == changed


@pytest.mark.parametrize("name", ["carla", "streets", "streets-small"])
def test_figure_4_follows_the_paper(name: str) -> None:
    """Two vehicles, 70 rounds, one moves at round 60, buffer of 200; the rest is not in the paper."""
    recipe = read(f"fedgp/figure4-{name}")
    stream, method = recipe.stream.model_extra, recipe.method.model_extra
    assert (stream["clients"], stream["moves_at"], stream["moving"], stream["boundaries"]) == (2, 60, [1], False)
    assert stream["tasks"] * recipe.train.rounds_per_task == 70 and recipe.eval.every == 1
    assert method["memory"]["size"] == 200
    assert recipe.compare.methods == ["fedavg", "der", "fedgp+der", "ideal"]
    assert recipe.model.kind == ("micro-yolo" if name == "streets-small" else "tiny-yolo")


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("coordinated/")])
def test_coordinated_replay_weighs_clients_by_samples_and_averages_over_masks(name: str) -> None:
    """Eq. 1 has n_m / n; gradients of a selection are a mean over several masks."""
    defaults = read(name).method.defaults
    assert defaults["fedavg"] == {"weighting": "samples"}
    assert defaults["memory"]["gradients"]["draws"] > 1
