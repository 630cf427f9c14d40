"""Labelled texts in the layouts they are published in, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from everfed.data.texts import is_text, load_texts
from everfed.errors import DataError


def write_jsonl(path: Path, *rows: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_with_parts_numbers_and_titles(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "text" / "yahoo10.jsonl",
        {"split": "train", "label": 1, "name": "Health", "text": "a cold"},
        {"split": "train", "label": 0, "name": "Society", "title": "Hello", "text": "a friend"},
        {"split": "extra", "label": 0, "name": "Society", "text": "left out"},
        {"split": "test", "label": 1, "name": "Health", "text": "a cough"},
    )
    texts = load_texts("yahooqa", tmp_path)
    assert texts.train == ("a cold", "Hello\na friend") and texts.y_train.tolist() == [1, 0]
    assert texts.test == ("a cough",) and texts.y_test.tolist() == [1]
    assert texts.class_names == ("Society", "Health")


def test_jsonl_by_name_without_parts_gets_a_fixed_fifth_for_testing(tmp_path: Path) -> None:
    rows = [{"label": "up" if i % 2 else "down", "text": f"text {i}"} for i in range(20)]
    path = write_jsonl(tmp_path / "mine.jsonl", *rows)
    texts = load_texts(str(path))
    assert texts.class_names == ("down", "up")
    assert np.bincount(texts.y_train).tolist() == [8, 8] and np.bincount(texts.y_test).tolist() == [2, 2]
    assert is_text("mine", tmp_path) and load_texts("mine", tmp_path).train == texts.train
    assert not is_text("other", tmp_path)


def test_the_csv_files_of_zhang(tmp_path: Path) -> None:
    folder = tmp_path / "yahoo_answers_csv"
    folder.mkdir()
    (folder / "classes.txt").write_text("Society\nScience\n")
    (folder / "train.csv").write_text('"2","why is ""blue"" blue?","","light\\nscatters"\n"1","hello, you","x","y"\n')
    (folder / "test.csv").write_text('"1","one","two","three"\n')
    texts = load_texts("yahooqa", tmp_path)
    assert texts.train == ('why is "blue" blue?\nlight\nscatters', "hello, you\nx\ny")
    assert texts.y_train.tolist() == [1, 0] and texts.class_names == ("Society", "Science")


def test_newsgroups_as_folders_of_messages(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for group in ("sci.space", "alt.atheism"):
            place = tmp_path / "20news-bydate" / f"20news-bydate-{part}" / group
            place.mkdir(parents=True)
            (place / "1").write_text(f"From: a\nSubject: {group} {part}\n\nbody\n\nmore")
    texts = load_texts("newsgroups", tmp_path)
    assert texts.class_names == ("alt.atheism", "sci.space")
    assert texts.train[1] == "sci.space train\nbody\n\nmore" and texts.y_test.tolist() == [0, 1]


def test_clinc_as_published_leaves_out_of_scope_utterances_out(tmp_path: Path) -> None:
    parts = {"train": [["hi", "greeting"], ["pay", "bill"], ["?", "oos"]], "val": [], "test": [["hey", "greeting"]]}
    (tmp_path / "data_full.json").write_text(json.dumps({**parts, "oos_test": [["x", "oos"]]}))
    texts = load_texts("clinc150", tmp_path)
    assert texts.class_names == ("bill", "greeting") and texts.train == ("hi", "pay") and texts.y_test.tolist() == [1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "no label"}, "line 1: needs an object with text, and label"),
        ({"label": 1}, "line 1: needs an object with text, and label"),
        ({"label": -1, "text": "x"}, "counted from 0; one is -1"),
        ({"label": 0, "text": "x", "split": "train"}, "no text of the test part"),
    ],
)
def test_what_is_refused_names_the_file(tmp_path: Path, row: dict[str, object], said: str) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", row)
    with pytest.raises(DataError, match="mine.jsonl") as caught:
        load_texts(str(path))
    assert said in str(caught.value)


def test_broken_json_and_mixed_labels_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    with pytest.raises(DataError, match="line 1: not JSON"):
        load_texts(str(broken))
    mixed = write_jsonl(tmp_path / "mixed.jsonl", {"label": 0, "text": "x"}, {"label": "one", "text": "y"})
    with pytest.raises(DataError, match="some labels are numbers and some are names"):
        load_texts(str(mixed))


def test_a_missing_set_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"yahoo_answers_csv.*github.com/zhangxiangxiao"):
        load_texts("yahooqa", tmp_path)
    with pytest.raises(DataError, match="no data folder is named"):
        load_texts("dbpedia", None)


def test_thinning_takes_the_same_texts_every_time_in_proportion(tmp_path: Path) -> None:
    rows = [{"split": p, "label": i % 4, "text": f"{p} {i}"} for p in ("train", "test") for i in range(40)]
    texts = load_texts(str(write_jsonl(tmp_path / "mine.jsonl", *rows)))
    few = texts.thinned(12, 100)
    assert np.bincount(few.y_train).tolist() == [3, 3, 3, 3] and few.test == texts.test
    assert few.train == texts.thinned(12, None).train and set(few.train) <= set(texts.train)
