"""Every shipped recipe is valid, builds all that it compares, and says what the paper's tables say."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from everfed import api
from everfed.data.available import available
from everfed.data.domains import KNOWN
from everfed.experiments.papers.tables import papers
from everfed.method import Optimizer
from everfed.methods import registry as methods
from everfed.recipe import Recipe, read, read_placed, settled, to_toml
from everfed.recipe import shipped as recipes
from everfed.streams.options import NORMALISATIONS

NAMES = recipes.names()
# of images; tests/test_recipes_text_and_detection.py looks at the others
OTHERS = ("fedgp/table6", "fedgp/figure4", "fedgp/table4-cifar100-small")
FEDGP = [name for name in NAMES if name.startswith("fedgp/") and not name.startswith(OTHERS)]


def test_the_tables_of_fedgp_are_all_there() -> None:
    mnist, cifar = ("rotated-mnist", "permuted-mnist"), ("cifar10", "cifar100")
    wanted = {f"fedgp/table{number}-{data}" for number in (1, 3, 5) for data in (*mnist, *cifar)}
    wanted |= {"fedgp/table2-rotated-mnist", "fedgp/table2-cifar100", "fedgp/table4-cifar100"}
    wanted |= {"fedgp/table8-permuted-mnist", "fedgp/table8-cifar10"}
    assert set(FEDGP) == wanted
    assert "demo" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_what_it_is_and_how_to_run_it(name: str) -> None:
    comment = re.match(r"(?:#.*\n)+", recipes.text(name))
    assert comment is not None
    assert recipes.about(name)
    assert f"everfed compare {name}" in comment[0]
    assert all(len(line) <= 120 for line in recipes.text(name).splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_builds_every_method_it_compares(name: str) -> None:
    recipe = read(name)
    assert recipe.compare is not None
    assert recipe.method.name in recipe.compare.methods
    for method in recipe.compare.methods:
        section = settled(read(name, method=method, sets=recipe.compare.options.get(method, ()))).method
        methods.build(section.name, section.model_extra)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_being_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(read(name)))
    assert read(path) == read(name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_nothing_twice_and_nothing_misspelt_in_defaults(name: str) -> None:
    method = tomllib.loads(recipes.text(name))["method"]
    assert not set(method.get("defaults", {})) & set(method)
    assert set(method.get("defaults", {})) <= set(methods.part_classes())


def one_of_each() -> list[Any]:
    """Names of recipes; of those with the same data, scenario and network the first, the others marked slow, as are
    those that draw or read many images or encode text."""
    slow = {"chitchat", "shakespeare", "yahooqa", "pacs", "streets", "carla"}
    seen: set[tuple[Any, ...]] = set()
    found: list[Any] = []
    for name in NAMES:
        recipe = read(name)
        kind = (recipe.stream.dataset, recipe.stream.scenario, recipe.model.kind)
        quick = kind not in seen and recipe.stream.dataset not in slow
        found.append(name if quick else pytest.param(name, marks=pytest.mark.slow))
        seen.add(kind)
    return found


@pytest.mark.parametrize("name", one_of_each())
def test_a_recipe_fits_its_data(name: str) -> None:
    found = {set_name for set_name, there, _ in available(os.environ.get("EVERFED_DATA")) if there}
    dataset = read(name).stream.dataset
    if dataset not in found:
        pytest.skip(f"data set {dataset} is not in EVERFED_DATA")
    if name == "fedssi/table2-office-caltech10" and not KNOWN[dataset].layouts[-1].find(
        Path(os.environ["EVERFED_DATA"])
    ):
        pytest.skip("of office-caltech10 only features are in EVERFED_DATA, no images")
    weights = (read(name).model.model_extra or {}).get("weights")
    if weights and not (Path(os.environ["EVERFED_DATA"]) / weights).exists():
        pytest.skip(f"{weights} is not in EVERFED_DATA; its recipe has the command that makes it")
    api.check(read(name), os.environ.get("EVERFED_DATA"))


def settings(recipe: Recipe) -> dict[str, object]:
    train, stream = recipe.train, recipe.stream.model_extra
    return {
        "tasks": stream["tasks"],
        "clients": stream["clients"],
        "rounds": train.rounds_per_task,
        "epochs": train.local_epochs,
        "lr": train.optimizer.lr,
        "model": recipe.model.kind,
        "partition": stream["partition"],
    }


MNIST = {
    "tasks": 10,
    "rounds": 20,
    "epochs": 1,
    "lr": 0.01,
    "model": "small-cnn",
    "partition": {"kind": "shards", "per_client": 2},
}
CIFAR = {
    "rounds": 20,
    "epochs": 5,
    "lr": 0.1,
    "model": "resnet18",
    "partition": {"kind": "dirichlet", "alpha": 0.3, "balance": True, "min_samples": 10},
}
PUBLISHED = {
    "rotated-mnist": MNIST,
    "permuted-mnist": MNIST,
    "cifar10": {**CIFAR, "tasks": 5},
    "cifar100": {**CIFAR, "tasks": 10},
}


@pytest.mark.parametrize("name", FEDGP)
def test_fedgp_recipes_follow_the_paper(name: str) -> None:
    table, data = re.fullmatch(r"fedgp/table(\d)-(.+)", name).groups()
    recipe = read(name)
    clients = 20 if table == "5" else 10
    assert settings(recipe) == {**PUBLISHED[data], "clients": clients}
    assert (recipe.train.batch_size, recipe.train.optimizer.kind, recipe.train.optimizer.momentum) == (32, "sgd", 0.0)
    assert recipe.train.sync_every == (2 if table == "3" else 1)
    assert recipe.method.weighting == "uniform"
    assert recipe.method.model_extra["memory"]["size"] == (500 if table in "28" else 200)
    assert recipe.method.model_extra["der"] == {"weight": 1.0, "batch": 32}
    assert recipe.method.model_extra["fedgp"] == {"samples": 32, "mode": "train"}
    assert (recipe.train.logits, recipe.eval.logits) == ("full", "full")
    assert recipe.compare.seeds == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", FEDGP)
def test_fedgp_recipes_show_the_images_as_the_paper_did(name: str) -> None:
    stream = read(name).stream
    shown = {key: stream.model_extra.get(key) for key in ("transform", "class_order", "normalise", "augment")}
    data = name.split("-", 1)[1]
    assert (
        shown
        == {
            "rotated-mnist": {"transform": "rotate", "class_order": None, "normalise": "none", "augment": None},
            "permuted-mnist": {"transform": "permute", "class_order": None, "normalise": "none", "augment": None},
            "cifar10": {"transform": None, "class_order": "natural", "normalise": "half", "augment": "none"},
            "cifar100": {"transform": None, "class_order": "natural", "normalise": "cifar100", "augment": "crop-flip"},
        }[data]
    )
    assert stream.scenario == ("domain-incremental" if "mnist" in data else "class-incremental")


def compared(name: str, method: str) -> Recipe:
    """The recipe as `everfed compare` runs it for one method."""
    comparison = read(name).compare
    assert comparison is not None and method in comparison.methods
    return settled(read(name, method=method, sets=comparison.options.get(method, ())))


@pytest.mark.parametrize("name", ["mfcl/table1-cifar100", "mfcl/cifar100-small", "mfcl/af-fcl-cifar100"])
def test_fedcil_is_compared_in_the_range_of_its_generator_with_its_authors_optimiser(name: str) -> None:
    """As `everfed reproduce` runs it; black and white are the ends of tanh."""
    recipe = compared(name, "fedcil")
    mean, std = NORMALISATIONS[recipe.stream.model_extra["normalise"]]
    assert ((0.0 - mean[0]) / std[0], (1.0 - mean[0]) / std[0]) == (-1.0, 1.0)
    optimizer = recipe.train.optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.beta1, optimizer.state) == ("adam", 2e-4, 0.5, "task")
    assert compared(name, "fedavg").stream == read(name).stream  # the others see what they saw
    assert read(name).compare.options["fedcil"] == papers()["mfcl"].options["FedCIL"]


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if n.startswith("mfcl/") and n != "mfcl/fedcil-mnist"],  # FedCIL's authors have another one
)
def test_convolutions_are_initialised_as_in_the_released_code(name: str) -> None:
    assert read(name).model.model_extra["init"] == "he-fan-out"


def test_mfcl_on_tiny_imagenet_trains_on_images_like_the_generator_s() -> None:
    """Its generator ends in a normalisation to mean 0 and deviation 1; the authors use ImageNet's statistics."""
    mean, std = NORMALISATIONS[read("mfcl/tiny-imagenet").stream.model_extra["normalise"]]
    assert (mean, std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("name", ["target-cifar100", "family-cifar100-small", "synthetic-cifar100-small"])
def test_the_distillation_of_target_moves_the_network_no_further_than_its_authors(name: str) -> None:
    """25 at a rate of 0.01; 25 at 0.1 destroys it."""
    recipe = compared(f"mfcl/{name}", "target")
    assert recipe.train.optimizer.lr * recipe.method.model_extra["target"]["alpha_kd"] <= 25.0 * 0.01


def test_recipes_of_target_and_lander_follow_the_released_code() -> None:
    target, lander = (read(f"mfcl/{name}-cifar100") for name in ("target", "lander"))
    for recipe in (target, lander):
        assert recipe.stream.model_extra["augment"] == "crop-flip-brightness"
    assert lander.stream.model_extra["partition"] == {"kind": "dirichlet", "alpha": 0.5, "balance": True}
    for name in ("mfcl/target-cifar100", "mfcl/lander-cifar100"):
        part = compared(name, "lwf").method.model_extra["lwf"]
        assert part["weight"] * 2.0**2 == 3.0  # beta tau^2 KL is lamda times their cross-entropy, but for a constant
    assert compared("mfcl/target-cifar100", "ewc").method.model_extra["ewc"]["weight"] == 1000.0
    rates = {m: compared("mfcl/lander-cifar100", m).train.optimizer for m in ("fedavg", "lwf", "target", "lander")}
    assert {m: (o.lr, o.schedule) for m, o in rates.items()} == {
        "fedavg": (0.01, "constant"),
        "lwf": (0.01, "constant"),
        "target": (0.04, "constant"),
        "lander": (0.04, "cosine"),
    }


def test_the_last_round_of_glfc_s_tasks_is_annealed() -> None:
    recipe = read("mfcl/glfc-cifar100")
    optimizer = Optimizer(**recipe.train.optimizer.model_dump())
    rates = [optimizer.rate(index, recipe.train.rounds_per_task) for index in range(10)]
    assert rates == pytest.approx([2.0, 2.0, 2.0, 2.0, 2.0, 0.4, 2.0, 2.0, 2.0, 0.016])


def test_af_fcl_keeps_its_statistics_to_itself() -> None:
    name = "mfcl/af-fcl-cifar100"
    assert read(name).model.batchnorm == "local"
    assert read(name).stream.model_extra["augment"] == "crop-flip-brightness"
    assert compared(name, "glfc").model.batchnorm == "mean"  # the server's old model would have none


def test_only_table_4_is_asynchronous_and_its_small_form_differs_in_scale_alone() -> None:
    for name in FEDGP:
        assert ("asynchronous" in read(name).stream.model_extra) == name.startswith("fedgp/table4")
    full, small = read("fedgp/table4-cifar100"), read("fedgp/table4-cifar100-small")
    assert full.stream == small.stream
    assert full.model_copy(update={"name": "", "train": None, "compare": None}) == small.model_copy(
        update={"name": "", "train": None, "compare": None}
    )


def test_tables_compare_the_methods_of_the_paper() -> None:
    bases = ["fedavg", "fedcurv", "fedprox", "agem", "der"]
    on_top = ["fedgp", "fedgp+fedcurv", "fedgp+fedprox", "fedgp+agem", "fedgp+der"]
    for name in FEDGP:
        compared = set(read(name).compare.methods)
        wanted = {"1": {*bases, *on_top, "ideal"}, "5": {*bases, *on_top, "ideal"}, "3": {"fedgp+agem", "fedgp+der"}}
        replay = {"agem", "fedgp+agem", "der", "fedgp+der"}
        wanted["4"] = {*replay, "fedavg", "ideal"}
        assert compared == wanted.get(name[len("fedgp/table")], replay)


def test_commands_in_the_comments_set_keys_that_exist() -> None:
    for name in NAMES:
        for entry in re.findall(r"--set (\S+)", recipes.text(name)):
            assert read_placed(name, sets=[entry]).recipe


def test_mfcls_table_1_has_the_settings_of_the_paper() -> None:
    recipe = read("mfcl/table1-cifar100")
    optimizer, stream = recipe.train.optimizer, recipe.stream.model_extra
    assert settings(recipe) | {"participation": stream["participation"]} == {
        "tasks": 10,
        "clients": 50,
        "rounds": 100,
        "epochs": 10,
        "lr": 0.1,
        "model": "resnet18",
        "partition": {"kind": "lda", "alpha": 1.0},
        "participation": 0.1,
    }
    assert (optimizer.schedule, optimizer.lr_end, optimizer.momentum, optimizer.weight_decay) == (
        "geometric",
        0.01,
        0.0,
        1e-5,
    )
    assert (recipe.train.batch_size, recipe.train.logits, recipe.eval.logits) == (32, "seen", "seen")
    assert recipe.compare is not None
    assert set(recipe.compare.methods) == {"fedavg", "fedprox", "fedcil", "fedlwf2t", "mfcl", "ideal"}
    assert recipe.compare.seeds == [0, 1, 2]


def test_stamps_code_has_the_options_of_the_released_code() -> None:
    """Clones go on with the client's moments, 25 solver steps with momentum 0.1 on clients, the first task matched."""
    stamp = read("stamp/code-cifar100").method.model_extra["stamp"]
    assert (stamp["moments"], stamp["match_first"], stamp["rate"]) == ("copied", True, 2.0)
    assert (stamp["solver"], stamp["solver_steps"], stamp["solver_momentum"]) == ("softmax_sgd", 25, 0.1)


def test_the_gap_is_compared_with_the_methods_of_figure_1() -> None:
    compared = read("stamp/fig1-cifar100").compare
    assert compared is not None and {"af-fcl", "fedssi", "stamp"} <= set(compared.methods)
