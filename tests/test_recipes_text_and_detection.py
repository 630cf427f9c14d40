"""FedGP's recipes for texts and driving scenes say what the paper says, where it says something."""

from everfed.recipe import read

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
