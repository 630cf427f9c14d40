"""Text over periods: who says what when, what is masked, and that a run over it is scored by perplexity."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import everfed
from everfed import streams
from everfed.core.context import TrainOptions
from everfed.core.step import Training
from everfed.core.stream import Stream
from everfed.data.tokens import IGNORED, MASK, PAD, SPECIAL, Tokenizer, mask_tokens, token_counts, token_loss
from everfed.data.utterances import load_utterances
from everfed.errors import DataError
from everfed.models.tinybert import TinyBERT
from everfed.streams.options import OptionError
from tests.support.toy import Bench

pytest.importorskip("tokenizers", reason="pip install 'everfed[text]'")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "roofs", "and", "sang", "songs"]


def day(number: float) -> str:
    return (datetime(2020, 1, 6, 9, tzinfo=UTC) + timedelta(days=number)).isoformat()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def said(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, 6))


def dated(path: Path, users: int = 4, weeks: int = 9, per_week: int = 5) -> Path:
    """Every user says something on the same days of every week."""
    rng = np.random.default_rng(0)
    rows = [
        {"user": f"u{user}", "time": day(7 * week + d), "text": said(rng)}
        for week in range(weeks)
        for d in range(per_week)
        for user in range(users)
    ]
    return write(path, rows)


def build(path: Path, rounds: int = 2, seed: int = 0, scale: float = 1.0, **options: Any) -> Any:
    table = {"dataset": str(path), "scenario": "periods", "tasks": 3, "clients": 4, "length": 12, **options}
    return streams.build({"vocabulary": 60, **table}, seed, rounds, scale=scale)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dated(tmp_path_factory.mktemp("text") / "talk.jsonl")


@pytest.fixture(scope="module")
def talk(file: Path) -> Any:
    return build(file)


# periods -------------------------------------------------------------------------------------------------------------
def test_a_period_is_two_weeks_to_train_and_one_to_test(talk: Any) -> None:
    assert isinstance(talk, Stream)
    assert [len(talk.data(client, task)) for task in range(3) for client in range(4)] == [10] * 12
    assert [len(talk.test(task)) for task in range(3)] == [20, 20, 20]
    start = int(datetime(2020, 1, 6, tzinfo=UTC).timestamp())
    assert talk.starts == tuple(start + k * 21 * 86_400 for k in range(3))


def test_train_and_test_text_is_of_its_own_weeks_and_user(talk: Any) -> None:
    lines = talk.utterances
    for task in range(3):
        for client in range(4):
            rows = talk.data(client, task).ids
            assert {lines.users[u] for u in lines.user[rows]} == {f"u{client}"}
            assert all(21 * task <= (lines.time[row] - talk.starts[0]) / 86_400 < 21 * task + 14 for row in rows)
        rows = talk.test(task).ids
        assert all(21 * task + 14 <= (lines.time[row] - talk.starts[0]) / 86_400 < 21 * task + 21 for row in rows)


def test_it_knows_the_period_of_its_utterances(talk: Any) -> None:
    for task in range(talk.tasks):
        ids = talk.data(1, task).ids
        assert len(ids) and talk.task_of(1, ids).tolist() == [task] * len(ids)


@pytest.mark.parametrize(("train_weeks", "test_weeks", "periods"), [(1, 1, 4), (4, 1, 1), (2, 1, 3), (1, 2, 3)])
def test_weeks_are_options(file: Path, train_weeks: int, test_weeks: int, periods: int) -> None:
    """Nine weeks; a last period without test weeks is left out."""
    with pytest.raises(OptionError, match=f"50 is too many; talk has {periods} periods"):
        build(file, tasks=50, train_weeks=train_weeks, test_weeks=test_weeks)


def test_weeks_in_which_nobody_speaks_are_no_period(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    days = [0, 1, 15, 105, 106, 120, 126, 141]  # weeks 0 and 2, then 15 and 17, then 18 and 20
    rows = [{"user": "a", "time": day(d), "text": said(rng)} for d in days]
    stream = build(write(tmp_path / "gap.jsonl", rows), clients=1)
    assert [len(stream.data(0, task)) for task in range(3)] == [2, 2, 1]


def test_without_dates_a_number_is_a_period_and_the_last_utterances_test(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    counts = {("a", 0): 10, ("a", 1): 5, ("b", 0): 1, ("b", 1): 4}
    rows = [{"user": u, "time": t, "text": said(rng)} for (u, t), n in counts.items() for _ in range(n)]
    stream = build(write(tmp_path / "acts.jsonl", rows), tasks=2, clients=2)
    assert [[len(stream.data(c, t)) for c in (0, 1)] for t in (0, 1)] == [[8, 1], [4, 3]]
    assert [len(stream.test(t)) for t in (0, 1)] == [2, 2]  # a fifth, rounded up; the only one is for training
    assert stream.test(0).ids.tolist() == [8, 9]


def test_users_are_drawn_by_the_seed_from_those_who_say_enough(tmp_path: Path) -> None:
    path = dated(tmp_path / "many.jsonl", users=12, weeks=6)
    picks = [tuple(build(path, seed=seed, tasks=2).chosen) for seed in range(5)]
    assert len(set(picks)) > 1 and all(len(set(pick)) == 4 for pick in picks)
    assert picks[0] == tuple(build(path, seed=0, tasks=2).chosen)
    with pytest.raises(OptionError, match="clients: 4 is too many; 0 users have 21 training utterances or more"):
        build(path, tasks=2, min_utterances=21)


def test_limits_count_per_client_and_period(file: Path) -> None:
    stream = build(file, max_train=3, max_test=7)
    assert [len(stream.data(c, t)) for t in range(3) for c in range(4)] == [3] * 12
    assert [len(stream.test(t)) for t in range(3)] == [7] * 3
    assert [len(build(file, scale=0.25).data(c, 0)) for c in range(4)] == [3] * 4


def test_validation_text_is_held_out_of_training_text(file: Path) -> None:
    stream = build(file, validation=0.2)
    held = set(stream.test(1, "validation").ids.tolist())
    trained = {row for client in range(4) for row in stream.data(client, 1).ids.tolist()}
    assert len(held) == 8 and len(trained) == 32 and not held & trained
    with pytest.raises(OptionError, match="validation"):
        build(file).test(0, "validation")


# tokens --------------------------------------------------------------------------------------------------------------
def test_the_tokenizer_knows_the_first_period_only(tmp_path: Path) -> None:
    rows = [{"user": "a", "time": t, "text": text} for t, text in [(0, "aba aba"), (1, "xyz xyz")] for _ in range(5)]
    stream = build(write(tmp_path / "two.jsonl", rows), tasks=2, clients=1)
    assert set(stream.data(0, 0).y[stream.data(0, 0).y >= 0].tolist()) <= set(range(len(SPECIAL), stream.classes))
    assert stream.tokenizer.encode(["aba"], 12).max() >= len(SPECIAL)
    assert (stream.tokenizer.encode(["xyz"], 12) < len(SPECIAL)).sum() >= 10  # letters it has never seen


def test_the_tokenizer_does_not_know_test_text(tmp_path: Path) -> None:
    """Of ten utterances the last two are for testing."""
    texts = ["aba aba"] * 8 + ["xyz xyz"] * 2
    rows = [{"user": "a", "time": 0, "text": text} for text in texts]
    stream = build(write(tmp_path / "one.jsonl", rows), tasks=1, clients=1)
    assert len(stream.data(0, 0)) == 8 and not {"x", "y", "z"} & {*"".join(vocabulary(stream))}


def vocabulary(stream: Any) -> list[str]:
    """The word pieces, without the special ones."""
    return [piece for piece in json.loads(stream.tokenizer.text)["model"]["vocab"] if not piece.startswith("[")]


def test_rows_are_cut_and_padded() -> None:
    tokenizer = Tokenizer.train(["one two three one two three"] * 3, 100)
    short, long = tokenizer.encode(["one", "one two three one two three"], 5)
    assert short[0] == long[0] == 2 and short[2] == 3 and short[3:].tolist() == [PAD, PAD]
    assert long[-1] == 3 and len(long) == 5


def test_every_process_trains_the_same_tokenizer(file: Path) -> None:
    """Two trainings here and one elsewhere: words are counted in tables whose order is another every time."""
    code = f"""
import json, hashlib
from everfed.data.tokens import Tokenizer
texts = [json.loads(line)["text"] for line in open({str(file)!r})]
print(hashlib.sha256(Tokenizer.train(texts, 60).text.encode()).hexdigest())
"""
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    for _ in range(2):
        assert hashlib.sha256(Tokenizer.train(texts, 60).text.encode()).hexdigest() == elsewhere.strip()


def test_without_the_package_the_remedy_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"needs the package tokenizers; .*: pip install 'everfed\[text\]'"):
        build(file)


# masks ---------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 6), st.integers(1, 20), st.floats(0.01, 1.0), st.integers(0, 1000))
@settings(max_examples=60)
def test_masks_hide_ordinary_tokens_and_at_least_one(n: int, length: int, rate: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 40, (n, length))
    x, y = mask_tokens(tokens, rate, 40, rng)
    predicted = y != IGNORED
    assert (y[predicted] == tokens[predicted]).all()
    assert (tokens[predicted] >= len(SPECIAL)).all()
    assert (x[~predicted] == tokens[~predicted]).all()
    assert (predicted.any(1) == (tokens >= len(SPECIAL)).any(1)).all()
    assert ((x[predicted] >= len(SPECIAL)) | (x[predicted] == MASK)).all()


def test_fifteen_in_a_hundred_and_eighty_ten_ten() -> None:
    tokens = np.full((500, 200), 7)
    x, y = mask_tokens(tokens, 0.15, 1000, np.random.default_rng(0))
    predicted = y != IGNORED
    assert predicted.mean() == pytest.approx(0.15, abs=0.005)
    assert (x[predicted] == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (x[predicted] == 7).mean() == pytest.approx(0.1, abs=0.01)


def test_a_sample_is_stored_and_tested_with_one_mask(file: Path, talk: Any) -> None:
    for read in (lambda stream: stream.data(1, 2), lambda stream: stream.test(2)):
        first, again = read(talk), read(build(file))
        assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
        assert not torch.equal(first.x, read(build(file, seed=1)).x)


def whole(x: Tensor, y: Tensor) -> Tensor:
    """The tokens behind a masked sample."""
    return torch.where(y >= 0, y, x)


def test_in_training_masks_are_drawn_anew_by_the_same_rule(talk: Any) -> None:
    data = talk.data(1, 2)
    draws = torch.from_numpy(talk.draw_augmentation(np.random.default_rng(0), 300 * len(data)))
    x, y = talk.augment_samples(data.x.repeat(300, 1), data.y.repeat(300, 1), draws)
    tokens, predicted = whole(data.x, data.y).repeat(300, 1), y != IGNORED
    assert torch.equal(torch.where(predicted, y, tokens), tokens) and torch.equal(x[~predicted], tokens[~predicted])
    assert (predicted & (tokens < len(SPECIAL))).sum() == 0 and predicted.any(1).all()
    # each ordinary token of a row is equally likely to be predicted, at least as often as the rate says
    shares = predicted.reshape(300, *data.y.shape).float().mean(0)[whole(data.x, data.y) >= len(SPECIAL)]
    assert shares.min() > talk.mask_rate - 4 * math.sqrt(talk.mask_rate * (1 - talk.mask_rate) / 300)
    assert (x[predicted] == MASK).float().mean() == pytest.approx(0.8, abs=0.02)
    assert not torch.equal(x[: len(data)], x[len(data) : 2 * len(data)])


def test_static_masks_stay(file: Path, talk: Any) -> None:
    assert build(file, masking="static").draw_augmentation(np.random.default_rng(0), 5) is None
    assert talk.describe()["masking"] == "dynamic"


def test_two_epochs_train_on_two_masks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the steps of a local training see: the same tokens in both epochs, under other masks."""
    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr("everfed.core.step.Training.begin", spying(Training.begin, seen))
    stream = build(file)
    bench = Bench("fedavg", stream=stream, train=TrainOptions(2, 100), module=lambda *_: TinyBERT(
        stream.input_shape, stream.classes, layers=1, width=8, heads=2, feed_forward=8))  # fmt: skip
    bench.run(rounds=1)
    (x, y), (again_x, again_y) = seen[:2]
    order, again = (whole(*pair).tolist() for pair in ((x, y), (again_x, again_y)))
    assert sorted(order) == sorted(again)
    assert sorted(x.tolist()) != sorted(again_x.tolist())


def spying(begin: Any, seen: list[tuple[Tensor, Tensor]]) -> Any:
    def spy(step: Training, x: Tensor, y: Tensor, rows: Any) -> None:
        if rows:  # else there is no minibatch yet
            seen.append((x.clone(), y.clone()))
        begin(step, x, y, rows)

    return spy


def test_the_loss_is_the_mean_over_predicted_tokens() -> None:
    outputs = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [[0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]]]))
    y = torch.tensor([[0, IGNORED], [2, IGNORED]])
    assert token_loss(outputs, y).item() == pytest.approx(-(math.log(0.5) + math.log(0.5)) / 2)
    assert token_counts(outputs, y).tolist() == pytest.approx([2.0, 2 * math.log(2)])
    nothing = torch.full((2, 2), IGNORED)
    assert token_loss(outputs, nothing).item() == 0.0
    uniform = torch.zeros(3, 4, 10)
    tokens, nll = token_counts(uniform, torch.ones(3, 4, dtype=torch.int64)).tolist()
    assert math.exp(nll / tokens) == pytest.approx(10.0)


# files ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"user": "a", "text": "b"}], r"line 1: needs the fields user, time and text; it has \['user', 'text'\]"),
        ([{"user": "a", "time": "soon", "text": "b"}], "line 1: time: expected a date"),
        ([{"user": "a", "time": 1, "text": "b"}, {"user": "a", "time": day(0), "text": "b"}], "use one of them"),
        ([], "holds no utterance"),
    ],
)
def test_files_that_are_not_utterances_are_refused(tmp_path: Path, rows: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        load_utterances(write(tmp_path / "bad.jsonl", rows))


def test_sets_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="chitchat.*Looked for"):
        load_utterances("chitchat", tmp_path)
    with pytest.raises(DataError, match="Allowed: chitchat, shakespeare, or the path of a jsonl file"):
        load_utterances("elsewhere", tmp_path)
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError, match="line 1: not JSON"):
        load_utterances(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(("name", "tasks"), [("chitchat", 5), ("shakespeare", 6)])
def test_the_public_sets_stand_in_for_private_text(name: str, tasks: int) -> None:
    folder = Path(os.environ.get("EVERFED_DATA", "/nowhere"))
    if not (folder / "utterances" / f"{name}.jsonl").is_file():
        pytest.skip(f"{name} is not in EVERFED_DATA")
    table = {"dataset": name, "scenario": "periods", "tasks": tasks, "clients": 100, "max_train": 5, "max_test": 20}
    facts = streams.build(table, 0, 1, folder).describe()
    assert "private voice-assistant transcripts" in facts["stands_for"]
    assert len(facts["period_starts"]) == tasks and all(facts["samples"]["test"])
    with pytest.raises(OptionError, match=f"too many; {name} has {tasks} periods"):
        streams.build({**table, "tasks": tasks + 1}, 0, 1, folder)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"partition": {"kind": "dirichlet", "alpha": 1.0}}, "stream.partition: has no effect in the scenario periods"),
        ({"augment": "crop-flip"}, "stream.augment: has no effect"),
        ({"train_weeks": 0}, "stream.train_weeks"),
        ({"mask_rate": 0.0}, "stream.mask_rate"),
        ({"masking": "never"}, "stream.masking"),
        ({"vocabulary": 3}, "stream.vocabulary"),
        ({"transform": "rotate"}, "stream.transform: is not a key of the periods stream"),
    ],
)
def test_keys_that_do_not_fit_are_refused(file: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        build(file, **options)


# a run ---------------------------------------------------------------------------------------------------------------
MODEL = {"kind": "tinybert", "layers": 1, "width": 16, "heads": 2, "feed_forward": 16, "positions": 12, "dropout": 0.0}


def recipe(file: Path, method: str, size: int = 4) -> dict[str, Any]:
    return {
        "stream": {"dataset": str(file), "scenario": "periods", "tasks": 3, "clients": 4, "length": 12,
                   "vocabulary": 60, "max_train": 6},
        "model": MODEL,
        "train": {"rounds_per_task": 2, "batch_size": 4, "optimizer": {"kind": "adam", "lr": 0.01}},
        "eval": {"zero_shot": True},
        "engine": {"kind": "eager", "device": "cpu"},
        "method": {"name": method} | ({"memory": {"size": size}} if method != "fedavg" else {}),
    }  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "coordinated", "gss-greedy", "re-fed"])
def test_a_run_is_scored_by_perplexity_in_all_periods(file: Path, tmp_path: Path, method: str) -> None:
    result = everfed.run(recipe(file, method), tmp_path / "run").data
    assert result["score"] == "perplexity"
    matrix, tokens = np.array(result["accuracy_matrix"]), result["n_test"]
    assert matrix.shape == (3, 3) and (matrix > 1).all() and (matrix[-1] < matrix[0]).all()
    assert all(count > 0 for count in tokens)
    overall = np.exp((np.log(matrix) * tokens).sum(1) / sum(tokens))
    assert result["metrics"]["perplexity"] == pytest.approx(overall[-1])
    assert result["metrics"]["forgetting_factor"] == pytest.approx(overall[-1] - overall[:-1].min())
    assert result["metrics"]["rcp"] is None  # nobody said what the run without replay reached


def test_without_zero_shot_earlier_models_were_not_scored_on_all_periods(file: Path, tmp_path: Path) -> None:
    table = recipe(file, "fedavg") | {"eval": {}}
    result = everfed.run(table, tmp_path / "run").data
    assert result["metrics"]["perplexity"] > 1 and result["metrics"]["forgetting_factor"] is None
    assert result["accuracy_matrix"][0][1:] == [None, None]


def test_herding_needs_classes(file: Path, tmp_path: Path) -> None:
    with pytest.raises(
        everfed.UserError, match="part 'memory' needs one class for every sample, .* scored by perplexity"
    ):
        everfed.run(recipe(file, "herding"), tmp_path / "run")


def test_users_left_out_are_no_clients_of_any_seed_and_give_the_tokenizer(tmp_path: Path) -> None:
    """Six users, each with a word of its own: the vocabulary has the words of the two who are left out."""
    rng, own = np.random.default_rng(0), ("plum", "kiwi", "fig", "quince", "melon", "grape")
    rows = [
        {"user": f"u{user}", "time": period, "text": f"{own[user]} {own[user]} {said(rng)}"}
        for period in range(3)
        for user in range(6)
        for _ in range(5)
    ]
    path = write(tmp_path / "numbered.jsonl", rows)
    made = [build(path, seed=seed, clients=3, left_out=2, vocabulary=500) for seed in range(4)]
    outside = {user for one in made for user in range(6)} - {int(user) for one in made for user in one.chosen}
    assert len(outside) == 2, "over four seeds every other user is drawn"
    assert {one.tokenizer.text for one in made} == {made[0].tokenizer.text}
    assert made[0].left_out_tokens().shape == (2 * 3 * 4, 12), "four of five utterances a period are for training"
    known = json.loads(made[0].tokenizer.text)["model"]["vocab"]
    assert {user for user in range(6) if f"Ġ{own[user]}" in known} == outside
    assert build(path, clients=3).describe().get("left_out") is None and made[0].describe()["left_out"] == 2


def test_too_many_users_left_out_are_refused(file: Path) -> None:
    with pytest.raises(OptionError, match="4 beside 1 that are left out is too many; 4 users"):
        build(file, left_out=1)
