"""Recipes: what is read is what was written, and what is refused is named with its place and what is allowed."""

import errno
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everfed import __version__
from everfed.core.engine import ClientError
from everfed.core.option import HasOptions, option
from everfed.errors import DataError, RecipeError, UserError, exit_code, is_user_error, sentence
from everfed.methods.registry import MethodError
from everfed.recipe import (
    Places,
    Recipe,
    from_table,
    parse_value,
    placed,
    read,
    read_placed,
    scaled,
    settled,
    to_toml,
    unused_settings,
)
from everfed.recipe.problems import split_key
from everfed.recipe.schema import section_of

SMALL = """\
# a recipe for tests
[stream]
dataset = "digits"
tasks = 3

[train]
rounds_per_task = 4
optimizer = { kind = "sgd", lr = 0.1 }

[method]
name = "der"
memory = { size = 20 }
der = { weight = 0.5 }
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def refused(text: str, tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as found:
        read(path, **changes)
    return str(found.value).replace(str(path), "FILE")


# reading ---------------------------------------------------------------------------------------------------------


def test_another_method_keeps_how_clients_are_weighted(small: Path) -> None:
    """Weighting is the recipe's, whichever method runs; the file's options are defaults of the other method."""
    small.write_text(SMALL + 'weighting = "samples"\n')
    for recipe in (read(small), read(small, method="fedavg"), read(small, sets=["method.name=fedgp"])):
        assert recipe.method.weighting == "samples"
    assert read(small, method="fedavg", sets=["method.weighting=uniform"]).method.weighting == "uniform"
    assert read(small, method="er").method.defaults == {"memory": {"size": 20}, "der": {"weight": 0.5}}


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        *((key, "1.0", "less than 1") for key in ("beta1", "beta2")),
        *((key, "0.0", "greater than 0") for key in ("eps", "lr_end")),
        *((key, "-0.1", "or equal to 0") for key in ("beta1", "beta2", "lr", "momentum", "weight_decay")),
    ],
)
def test_the_optimiser_s_constants_have_bounds(small: Path, key: str, value: str, allowed: str) -> None:
    """With a beta of 1 Adam would divide by zero."""
    with pytest.raises(RecipeError, match=rf"train\.optimizer\.{key}.*{allowed}"):
        read(small, sets=[f"train.optimizer.{key}={value}"])


def test_a_file_is_read_and_named_after_itself(small: Path) -> None:
    recipe = read(small)
    assert (recipe.name, recipe.seed, recipe.train.rounds_per_task) == ("small", 0, 4)
    assert recipe.stream.model_extra == {"tasks": 3}
    assert recipe.method.model_extra == {"memory": {"size": 20}, "der": {"weight": 0.5}}
    assert recipe.train.optimizer.lr == 0.1


def test_a_shipped_recipe_is_found_by_its_short_name() -> None:
    assert read("demo").name == "demo"
    assert read("fedgp/table1-rotated-mnist").name == "fedgp/table1-rotated-mnist"


def test_a_local_file_of_a_shipped_name_needs_its_path(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    (small.parent / "demo").write_text(SMALL)
    assert read("demo").stream.model_extra["tasks"] == 5
    assert read("./demo").stream.model_extra["tasks"] == 3


def test_what_is_neither_a_file_nor_shipped_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="dmo is neither a file nor a shipped recipe. Did you mean demo"):
        read("dmo")
    with pytest.raises(RecipeError, match="everfed list recipes"):
        read(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="is a folder, not a recipe; `everfed resume"):
        read(tmp_path)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="binary.toml cannot be read as text"):
        read(path)


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    message = refused("[stream]\ntasks = = 3\n", tmp_path)
    assert message.startswith("FILE is not valid TOML: ")
    assert "line 2" in message


# settings from the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("true", True),
        ("shards", "shards"),
        ('"shards"', "shards"),
        ("[1, 2]", [1, 2]),
        ('{ kind = "iid" }', {"kind": "iid"}),
        ("package.module:Name", "package.module:Name"),
        ("2024-01-02", "2024-01-02"),
        ("a = b", "a = b"),
    ],
)
def test_values_are_toml_and_bare_words_are_strings(text: str, value: object) -> None:
    assert parse_value(text, "--set x") == value


@pytest.mark.parametrize("text", ["", "[1", '"open', "{ a = "])
def test_values_that_open_something_must_close_it(text: str) -> None:
    with pytest.raises(RecipeError, match="--set x: .* is not a TOML value"):
        parse_value(text, "--set x")


def test_dotted_keys_split_as_in_toml() -> None:
    assert split_key("a.b.c") == ("a", "b", "c")
    assert split_key('method."der++".weight') == split_key("method.der++.weight") == ("method", "der++", "weight")
    assert split_key("a..b") == split_key("") == split_key("a b") == ()


def test_sets_reach_into_tables_and_make_them(small: Path) -> None:
    recipe = read(small, seed=7, sets=["train.optimizer.lr=0.5", "stream.partition.kind=iid", "eval.every=2"])
    assert recipe.seed == 7
    assert (recipe.train.optimizer.lr, recipe.train.optimizer.kind) == (0.5, "sgd")
    assert recipe.stream.model_extra["partition"] == {"kind": "iid"}
    assert recipe.eval.every == 2


def test_the_last_of_two_settings_counts(small: Path) -> None:
    assert read(small, sets=["stream.tasks=4", "stream.tasks=9"]).stream.model_extra["tasks"] == 9


@pytest.mark.parametrize("entry", ["train.batch_size", "=3", "a b=3", ""])
def test_a_setting_without_key_or_value_is_refused(small: Path, entry: str) -> None:
    with pytest.raises(RecipeError, match="write it as key=value"):
        read(small, sets=[entry])


def test_a_setting_below_a_plain_value_is_refused(small: Path) -> None:
    with pytest.raises(RecipeError, match=r"--set stream.tasks.x=1: stream.tasks is not a table; it is 3"):
        read(small, sets=["stream.tasks.x=1"])


# another method --------------------------------------------------------------------------------------------------


def test_another_method_keeps_the_options_that_fit_it(small: Path) -> None:
    recipe = settled(read(small, method="er"))
    assert recipe.method.name == "er"
    assert recipe.method.model_extra == {"memory": {"size": 20}}
    assert settled(read(small, method="fedavg")).method.model_extra == {}
    assert settled(read(small, sets=["method.name=fedavg"])) == settled(read(small, method="fedavg"))


def test_naming_the_own_method_changes_nothing(small: Path) -> None:
    assert read(small, method="der") == read(small)


def test_options_set_by_hand_win_over_the_files_own(small: Path) -> None:
    recipe = settled(read(small, method="fedgp+der", sets=["method.memory.size=7", "method.fedgp.samples=3"]))
    assert recipe.method.model_extra == {"memory": {"size": 7}, "der": {"weight": 0.5}, "fedgp": {"samples": 3}}


def test_a_default_for_no_part_at_all_is_refused(small: Path) -> None:
    small.write_text(SMALL.replace("memory =", "memroy ="))
    with pytest.raises(RecipeError, match="method.memroy names no part. Did you mean memory"):
        settled(read(small, method="er"))


def test_parts_set_by_hand_replace_the_preset(small: Path) -> None:
    recipe = read(small, sets=['method.parts=["fedavg", { part = "fedprox", mu = 0.1 }]'])
    assert recipe.method.name == ""
    assert recipe.method.parts == ["fedavg", {"part": "fedprox", "mu": 0.1}]
    assert settled(recipe).method.model_extra == {}


# refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds_per_task", "rounds_per_tasks", "FILE, line 7: train.rounds_per_tasks is not a key. Did you mean"),
        ("[train]", "[trian]", "FILE, line 6: trian is not a key. Did you mean train?"),
        ("lr = 0.1", "lr = -1", "FILE, line 8: train.optimizer.lr must be greater than or equal to 0; got -1"),
        ("lr = 0.1", "lr = nan", "FILE, line 8: train.optimizer.lr must be a finite number; got nan"),
        (
            "lr = 0.1",
            "lr = 0.1, moment = 1",
            "FILE, line 8: train.optimizer.moment is not a key. Did you mean momentum",
        ),
        (
            '"sgd"',
            '"sdg"',
            "FILE, line 8: train.optimizer.kind must be one of sgd, adam, adamw; got 'sdg'. Did you mean sgd?",
        ),
        ("= 4", "= 0", "FILE, line 7: train.rounds_per_task must be greater than or equal to 1; got 0"),
        ("= 4", '= "4"', "FILE, line 7: train.rounds_per_task must be a valid integer; got '4'"),
        ("= 4", "= true", "FILE, line 7: train.rounds_per_task must be a valid integer; got True"),
        ("= 4", "= 4\nsync_every = 3", "FILE, line 6: train: rounds_per_task = 4 must be a multiple of sync_every = 3"),
        ('name = "der"', "parts = [3]", "FILE, line 11: method.parts: an entry is a part's name or a table with part"),
        ('"digits"', "3", "FILE, line 3: stream.dataset must be a valid string; got 3"),
    ],
)
def test_refusals_name_line_key_and_what_is_allowed(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    assert refused(SMALL.replace(old, new, 1), tmp_path).startswith(message)


def test_unknown_keys_list_the_allowed_ones(tmp_path: Path) -> None:
    message = refused(SMALL.replace("rounds_per_task", "rounds"), tmp_path)
    assert message.endswith(
        "Allowed: rounds_per_task, optimizer, local_epochs, batch_size, sync_every, logits, drop_last, micro_batch"
    )


def test_a_missing_method_says_how_to_name_one(tmp_path: Path) -> None:
    text = SMALL[: SMALL.index("[method]")]
    assert refused(text, tmp_path) == (
        "FILE: method is missing; add [method] with a name, or use --method NAME (`everfed list methods` shows them)"
    )
    assert refused(text + "[method]\n", tmp_path).startswith("FILE, line 10: method: needs a name")
    assert read(tmp_path / "bad.toml", method="fedavg").method.name == "fedavg"


def test_what_an_option_broke_is_said_of_the_option(tmp_path: Path) -> None:
    assert refused(SMALL, tmp_path, sets=["train.logits=all"]).startswith(
        "--set train.logits=all: train.logits must be"
    )
    assert refused(SMALL, tmp_path, sets=["trian.x=1"]).startswith("--set trian.x=1: trian is not a key")
    assert refused(SMALL, tmp_path, seed=-1).startswith("--seed -1: seed must be")


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    message = refused(SMALL.replace("tasks = 3", "tasks = 3\n[eval]\nevery = -1").replace("= 4", "= 0"), tmp_path)
    assert len(message.splitlines()) == 2


def test_a_table_from_python_is_refused_the_same_way() -> None:
    with pytest.raises(RecipeError, match="recipe: train.batch_size must be a valid integer; got 'many'"):
        from_table({"method": {"name": "fedavg"}, "train": {"batch_size": "many"}})


# places of errors from the layers below --------------------------------------------------------------------------


def placed_message(small: Path, error: Exception, **changes: object) -> str:
    with pytest.raises(RecipeError) as found, placed(read_placed(small, **changes).places):
        raise error
    return str(found.value).replace(str(small), "FILE")


def test_errors_of_other_layers_get_their_line(small: Path) -> None:
    assert placed_message(small, MethodError("method.der.weight must be at least 0; got -1")) == (
        "FILE, line 13: method.der.weight must be at least 0; got -1"
    )
    assert placed_message(small, MethodError("part 'der' needs part 'memory'")).startswith(
        "FILE, line 10: method: part"
    )
    assert placed_message(small, DataError("data set 'digits' is broken")).startswith("FILE, line 3: stream.dataset: ")


def test_an_error_that_says_what_to_set_gets_the_place_of_that(small: Path) -> None:
    error = DataError("client 0, period 1: class 7 does not fit; set stream.dataset to another one")
    assert placed_message(small, error) == f"FILE, line 3: {error}"


def test_an_error_of_a_client_gets_the_place_of_its_cause(small: Path) -> None:
    error = ClientError(1, "train", 3, "no such file")
    error.__cause__ = DataError("no such file")
    message = "FILE, line 3: stream.dataset: client 1 failed in phase 'train' of round 4: no such file"
    assert placed_message(small, error) == message


def test_a_key_of_a_newer_version_is_called_one(tmp_path: Path) -> None:
    text = refused(SMALL + "\n[shiny]\na = 1\n", tmp_path)
    assert f"shiny is not a key. everfed {__version__} has none like it; a newer version may. Allowed:" in text
    assert "newer" not in refused(SMALL.replace("[train]", "[trian]"), tmp_path)


def test_what_is_not_there_is_no_suggestion(small: Path) -> None:
    message = placed_message(small, DataError("stream.dataset: module 'mine' has no 'nothing'; it has make_stream, np"))
    assert "Did you mean" not in message


def test_errors_of_other_layers_get_their_option(small: Path) -> None:
    message = placed_message(small, MethodError("method.memory names no part"), sets=["method.memory.size=3"])
    assert message.startswith("--set method.memory.size=3: method.memory names no part")


def test_errors_of_other_layers_get_a_suggestion(small: Path) -> None:
    error = MethodError("method.name must be one of fedavg, fedgp+der; got 'fedgp+dr'")
    assert placed_message(small, error).endswith("Did you mean fedgp+der?")


def test_bugs_and_users_own_errors_pass_untouched() -> None:
    for error in (KeyError("a bug"), UserError("already clear")):
        with pytest.raises(type(error)) as found, placed(Places("x")):
            raise error
        assert found.value is error


def test_exit_codes() -> None:
    from everfed.core.events import Diverged

    assert exit_code(RecipeError("x")) == exit_code(MethodError("x")) == exit_code(DataError("x")) == 2
    assert exit_code(Diverged("x")) == 1
    assert exit_code(ValueError("x")) is None
    assert is_user_error(MethodError("x")) and not is_user_error(ValueError("x"))


def test_a_place_that_cannot_be_written_is_the_users_and_a_file_that_we_lost_is_not() -> None:
    refused = PermissionError(errno.EACCES, "Permission denied", "runs/x")
    assert exit_code(refused) == 2 and sentence(refused) == "runs/x: Permission denied"
    assert exit_code(FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/x")) is None
    assert exit_code(OSError(errno.ENOSPC, "No space left on device")) is None  # nobody knows where


# made from recipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "every", "factor", "left"),
    [(20, 1, 1.0, 20), (20, 1, 0.1, 6), (20, 1, 0.001, 1), (20, 2, 0.5, 14), (20, 2, 0.3, 10), (20, 2, 0.01, 2)],
)
def test_scaling_keeps_whole_synchronisations(rounds: int, every: int, factor: float, left: int) -> None:
    recipe = from_table({"method": {"name": "fedavg"}, "train": {"rounds_per_task": rounds, "sync_every": every}})
    assert scaled(recipe, factor).train.rounds_per_task == left


@given(st.integers(1, 50), st.integers(1, 6), st.floats(0.0, 1.0, exclude_min=True))
def test_scaled_rounds_stay_legal(synchronisations: int, every: int, factor: float) -> None:
    rounds = synchronisations * every
    recipe = from_table({"method": {"name": "fedavg"}, "train": {"rounds_per_task": rounds, "sync_every": every}})
    left = scaled(recipe, factor).train.rounds_per_task
    assert every <= left <= rounds
    assert left % every == 0


@pytest.mark.parametrize("factor", [0.0, -0.5, 1.5, float("nan")])
def test_a_scale_outside_its_range_is_refused(small: Path, factor: float) -> None:
    with pytest.raises(RecipeError, match="--scale must be above 0 and at most 1"):
        scaled(read(small), factor)


def test_scaling_settles_the_defaults(small: Path) -> None:
    assert scaled(read(small, method="er"), 1.0) == settled(read(small, method="er"))


names = st.text(string.ascii_lowercase + "+_-", min_size=1, max_size=8)
plain = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(names.map("x_".__add__), values, max_size=4), st.floats(0, 10), st.integers(0, 2**40))
def test_a_recipe_written_and_read_again_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, options: dict, lr: float, seed: int
) -> None:
    table = {
        "seed": seed,
        "stream": options,
        "model": {"kind": "my.models:Net", **options},
        "train": {"optimizer": {"lr": lr}},
        "method": {"parts": ["fedavg", {"part": "my.parts:Own", "options": options}], "defaults": {"memory": options}},
        "compare": {"methods": ["fedavg"]},
    }
    recipe = from_table(table)
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_text(to_toml(recipe), encoding="utf-8")
    assert read(path) == recipe


def test_a_recipe_made_in_python_may_hold_tuples_and_none() -> None:
    stream = {"normalise": {"mean": (0.5,), "std": (0.5,)}, "max_train": None}
    recipe = from_table({"method": {"name": "fedavg"}, "stream": stream})
    assert recipe.stream.model_extra == {"normalise": {"mean": [0.5], "std": [0.5]}}


def test_the_resolved_recipe_spells_out_every_value() -> None:
    text = to_toml(from_table({"method": {"name": "fedavg"}}))
    for section, kind in Recipe.model_fields.items():
        if section not in ("name", "seed", "compare", "methods"):
            assert f"[{section}]" in text, kind
    assert "local_epochs = 1" in text and "[method.defaults]" not in text


def test_settings_of_a_comparison_that_a_run_leaves_out_are_known() -> None:
    compare = {"methods": ["der", "er"], "options": {"der": ["train.optimizer.lr=0.02", "method.der.weight=2.0"]}}
    table = {"method": {"name": "der"}, "compare": compare, "train": {"optimizer": {"lr": 0.02}}}
    assert unused_settings(from_table(table)) == ["method.der.weight=2.0"]
    assert unused_settings(read(table, method="er")) == unused_settings(read({"method": {"name": "er"}})) == []


def test_a_table_has_its_options_types_and_bounds_from_their_declaration() -> None:
    @dataclass(frozen=True)
    class Inner(HasOptions):
        names: Sequence[str] = option()

    @dataclass(frozen=True)
    class Outer(HasOptions):
        share: float = option(0.5, above=0, at_most=1)
        decay: float = option(0.9, at_least=0, below=1)
        kind: str = option("a", one_of=("a", "b"))
        rates: Sequence[float] = option((1.0,))
        inner: Sequence[Inner] = option(())
        hidden: int = option(3)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.kind == "b" and self.share < 1:
                raise ValueError("kind = 'b' needs share = 1")

    made = section_of(Outer, "hidden")
    assert made().model_dump() == {"share": 0.5, "decay": 0.9, "kind": "a", "rates": [1.0], "inner": []}
    assert made(rates=[0.5], kind="b", share=1.0).as_options(Outer, hidden=4) == Outer(1.0, 0.9, "b", (0.5,), hidden=4)
    bounds = [{"share": 0.0}, {"share": 2.0}, {"decay": -0.1}, {"decay": 1.0}, {"kind": "c"}]
    for wrong in (*bounds, {"rates": [""]}, {"inner": [{}]}, {"kind": "b"}, {"hidden": 1}):
        with pytest.raises(ValidationError):
            made(**wrong)


def test_what_a_relation_refuses_is_named_with_its_table() -> None:
    with pytest.raises(RecipeError, match=r"train\.optimizer: factors must be .* got \[\] with schedule = 'table'"):
        from_table({"method": {"name": "fedavg"}, "train": {"optimizer": {"schedule": "table"}}})
