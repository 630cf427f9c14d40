"""Language models across clients: rows of tokens from lines of JSON, next-token loss, tiny GPT-2 and Llama models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everfed
from everfed import streams
from everfed.core.stream import Stream
from everfed.data.tokens import rows_of
from everfed.errors import DataError
from everfed.federation.runtime import RuntimeBuilder
from everfed.recipe import to_toml
from everfed.recipe.reading import from_table
from everfed.session import assembly, export, saved_model
from everfed.streams import OptionError
from everfed.streams.language import Language
from everfed.streams.objectives import NextToken

NONE = -100
CLIENTS, PERIODS, LENGTH = 3, 2, 8


# rows of tokens -------------------------------------------------------------------------------------------------------
def marked(*tokens: int, prompt: int = 0) -> tuple[list[int], list[bool]]:
    return list(tokens), [place >= prompt for place in range(len(tokens))]


def test_packed_rows_are_full_and_lose_no_token() -> None:
    x, y = rows_of([marked(1, 2, 3, 9), marked(4, 5, 9)], 4, end=9, pack=True)
    assert x.tolist() == [[1, 2, 3, 9], [4, 5, 9, 9]]
    assert y.tolist() == [[2, 3, 9, 4], [5, 9, NONE, NONE]]


def test_unpacked_documents_begin_a_row_and_go_on_in_the_next() -> None:
    x, y = rows_of([marked(1, 2, 3, 4, 9), marked(5, 9)], 3, end=9, pack=False)
    assert x.tolist() == [[1, 2, 3], [4, 9, 9], [5, 9, 9]]
    assert y.tolist() == [[2, 3, 4], [9, NONE, NONE], [9, NONE, NONE]]


def test_a_prompt_is_read_and_not_predicted() -> None:
    x, y = rows_of([marked(1, 2, 3, 4, 9, prompt=3)], 6, end=9, pack=False)
    assert x.tolist() == [[1, 2, 3, 4, 9, 9]] and y.tolist() == [[NONE, NONE, 4, 9, NONE, NONE]]
    assert len(rows_of([marked(1, 2, prompt=2)], 4, end=9, pack=False)[0]) == 0  # nothing to predict
    assert [part.shape for part in rows_of([], 4, end=9, pack=True)] == [(0, 4), (0, 4)]


def test_the_objective_counts_what_is_predicted() -> None:
    """Uniform outputs over 5 tokens: every token costs log 5."""
    y = torch.tensor([[1, NONE, 4], [NONE, NONE, 0]])
    sums = NextToken().sums(torch.zeros(2, 3, 5), y).tolist()
    assert sums == pytest.approx([3, 3 * math.log(5)])
    assert NextToken().value("perplexity", sums) == pytest.approx(5)
    assert NextToken().value("perplexity", [0.0, 0.0]) is None
    assert NextToken().loss(torch.zeros(2, 3, 5), y).item() == pytest.approx(math.log(5))


# a stream -------------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with the notes of all clients, and two networks whose tokens are bytes."""
    transformers = pytest.importorskip("transformers", reason="the extra `text` is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `text` is not installed")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(["<end>", *letters])}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    common = {"vocab_size": len(letters) + 1, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    llama = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    for name, config in (("gpt2", transformers.GPT2Config(**gpt2, **common)),
                         ("llama", transformers.LlamaConfig(**llama, **common))):  # fmt: skip
        config.save_pretrained(tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / name)
    rows = [
        {"prompt": f"{number}?", "response": "yes" * (client + 1), "client": client, "period": period}
        for client in range(CLIENTS)
        for period in range(PERIODS)
        for number in range(5)
    ]
    write(tmp_path / "notes.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(**stream: Any) -> dict[str, Any]:
    common = {"scenario": "language", "dataset": "notes", "tokenizer": "gpt2", "length": LENGTH}
    return {**common, "tasks": PERIODS, "clients": CLIENTS, "participation": 1.0, **stream}


def stream(folder: Path, **options: Any) -> Stream:
    return streams.build(settings(**options), 0, 1, folder)


def test_every_client_has_its_own_documents_some_of_them_held_out(folder: Path) -> None:
    made = stream(folder, pack=False, length=16)
    assert made.score == "perplexity" and made.input_shape == (16,) and made.classes == 257
    for client in range(CLIENTS):
        train, test = made.data(client, 1), made.test_of(client, 1)
        assert len(train) == 4 and len(test) == 1 and train.x.dtype == torch.int64
        predicted = (train.y != NONE).sum(1).tolist()
        assert predicted == [3 * (client + 1) + 1] * 4  # "yes", and the end
    whole = np.concatenate([made.data(0, 0).x, made.test_of(0, 0).x])
    assert len(np.unique(whole[:, 0])) == 5  # no document is in both


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}', 'needs an object with "text", or with "prompt" and "response"'),
        ('{"text": "a", "period": -1}', '"period" is a whole number, counted from 0; got -1'),
        ('{"text": "a", "client": "ann"}', "\"client\" is a whole number, counted from 0; got 'ann'"),
    ],
)
def test_a_line_that_does_not_fit_is_named(line: str, message: str, folder: Path) -> None:
    (folder / "notes.jsonl").write_text(line)
    with pytest.raises(DataError, match=message):
        stream(folder).data(0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": ""}, "stream.tokenizer: expected the folder"),
        ({"tokenizer": "none"}, "stream.tokenizer = 'none' was not found"),
        ({"length": 1}, "stream.length"),
        ({"pack": "yes"}, "stream.pack: expected true or false"),
        ({"label_kind": "classes"}, "stream.label_kind: is 'tokens' in the scenario language"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises((OptionError, DataError), match=message):
        stream(folder, **options)


# training -------------------------------------------------------------------------------------------------------------
def recipe(network: str, method: str = "fedavg", **model: Any) -> dict[str, Any]:
    optimizer = {"kind": "adamw", "lr": 0.02}
    return {
        "name": "notes",
        "stream": settings(tokenizer=network),
        "model": {"kind": f"hf:{network}", "task": "next-token", **model},
        "method": {"name": method},
        "train": {"rounds_per_task": 2, "optimizer": optimizer},
        "engine": {"kind": "eager"},
    }


@pytest.mark.parametrize(
    ("network", "method", "model"),
    [
        ("gpt2", "fedgp+er", {"lora": {"rank": 2, "head": False}}),
        ("llama", "er", {"lora": {"rank": 2, "head": False}, "dtype": "bfloat16", "checkpointing": True}),
        ("llama", "ewc", {}),
    ],
)
def test_perplexity_falls_and_what_was_forgotten_is_measured(
    network: str, method: str, model: dict[str, Any], folder: Path
) -> None:
    """257 tokens: a model that knows nothing has a perplexity of about 257."""
    table = recipe(network, method, **model)
    table["eval"] = {"zero_shot": True}
    result = everfed.run(table, folder / "run", data_dir=folder, progress=False)
    rows = result.accuracy_matrix.to_numpy()
    assert rows.shape == (PERIODS, PERIODS) and (rows[-1] < 250).all()
    assert result.metrics["perplexity"] < 250
    assert result.metrics["forgetting"] == pytest.approx(rows[1, 0] - rows[0, 0], rel=1e-6)


def test_adapters_leave_the_head_and_the_embedding_alone(folder: Path) -> None:
    run = assembly.assemble(from_table(recipe("gpt2", lora={"rank": 2, "head": False})), str(folder))
    names = {entry.name for entry in run.setup.facts.layout.params}
    assert names and all(name.endswith(("lora_A", "lora_B")) for name in names)
    with pytest.raises(everfed.UserError, match=r"the head base.lm_head shares its weight.*lora.head = false"):
        everfed.run(recipe("gpt2", lora={"rank": 2}), folder / "run", data_dir=folder, progress=False)


@pytest.mark.parametrize("to", ["hf", "peft"])
def test_a_language_model_is_exported(to: str, folder: Path) -> None:
    if to == "peft":
        pytest.importorskip("peft", reason="the extra `peft` is not installed")
    table = recipe("llama", lora={"rank": 2, "head": False})
    everfed.run(table, folder / "run", data_dir=folder, progress=False)
    file = folder / "run/model.safetensors"
    description = saved_model.read_description(file)
    assert description is not None
    module = saved_model.load(file, description)
    assert export.export(module, description, to, folder / "out") < 1e-4


def test_a_model_option_that_does_not_exist_is_refused(folder: Path) -> None:
    for key, value in (("task", "words"), ("dtype", "int8")):
        with pytest.raises(everfed.UserError, match=f"model.{key} must be one of .*; got '{value}'"):
            everfed.run(recipe("gpt2", **{key: value}), folder / "run", data_dir=folder, progress=False)


def test_the_recipe_of_the_page_runs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/language-models.md").read_text()
    text = page.partition("<!-- recipe: language-models -->\n```toml\n")[2].partition("```")[0]
    assert len(text.splitlines()) <= 16
    (folder / "llama").rename(folder / "my-model")
    (folder / "notes.toml").write_text(text)
    few = {"train.rounds_per_task": 1, "stream.tasks": PERIODS, "stream.length": LENGTH}
    result = everfed.run("notes.toml", folder / "run", data_dir=folder, sets=few, progress=False)
    assert result.metrics["perplexity"] < 270


# real clients ---------------------------------------------------------------------------------------------------------
def test_a_real_client_reads_its_own_file_and_a_server_none(folder: Path, tmp_path: Path) -> None:
    """The server's recipe names "notes"; each client has a file of that name, without client numbers."""
    whole = (folder / "notes.jsonl").read_text().splitlines()
    (folder / "notes.jsonl").unlink()
    server = assembly.assemble(from_table(recipe("gpt2")), str(folder))
    for client in range(CLIENTS):
        place = tmp_path / f"site-{client}"
        place.mkdir()
        (place / "gpt2").symlink_to(folder / "gpt2")
        lines = [row for row in map(json.loads, whole) if row.pop("client") == client]
        write(place / "notes.jsonl", lines)
        site = RuntimeBuilder(data_dir=str(place)).assembled(to_toml(server.recipe), 1.0)
        assert assembly.fingerprint(site) == assembly.fingerprint(server)
        assert len(site.stream.data(client, 0)) > 0 and len(site.stream.test_of(client, 1)) > 0
    with pytest.raises(DataError, match="texts 'notes' were not found. Looked for a jsonl file at"):
        server.stream.data(0, 0)


# streams of one's own by name ----------------------------------------------------------------------------------------
class Told(Language):
    """A planned stream of one's own: its options are those of its parent."""


def test_a_stream_may_be_named_by_its_class(folder: Path) -> None:
    made = stream(folder, scenario=f"{__name__}:Told")
    assert isinstance(made, Told) and len(made.data(0, 0)) > 0
    table = recipe("gpt2")
    table["stream"]["scenario"] = f"{__name__}:Told"
    assert everfed.run(table, folder / "run", data_dir=folder, progress=False).metrics["perplexity"] < 260


def test_a_class_that_is_no_stream_is_refused(folder: Path) -> None:
    with pytest.raises(
        OptionError, match="stream.scenario: builtins:dict is no class derived from everfed.method.Stream"
    ):
        stream(folder, scenario="builtins:dict")
