"""What is remembered on a machine is found again, and never in the way of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from everfed.engines.calibration import Remembered, key_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "everfed"


def test_numbers_are_found_by_those_who_come_later(cache: Path) -> None:
    Remembered("slots.json").put("a", (5, 4))
    Remembered("slots.json").put("b", (1, 1))
    assert Remembered("slots.json").find("a", 2) == [5.0, 4.0]
    assert Remembered("slots.json").find("b", 2) == [1.0, 1.0]
    assert Remembered("slots.json").find("c", 2) is None
    assert Remembered("others.json").find("a", 2) is None
    assert [path.name for path in cache.iterdir()] == ["slots.json"]


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": 3}', '{"a": ["x", 1]}', '{"a": [1]}', '{"a": null}', '{"a": [NaN, 1]}']
)
def test_another_file_is_as_good_as_none(cache: Path, content: str) -> None:
    cache.mkdir()
    (cache / "slots.json").write_text(content)
    memory = Remembered("slots.json")
    assert memory.find("a", 2) is None
    memory.put("a", (2, 3))
    assert memory.find("a", 2) == [2.0, 3.0]


def test_a_folder_that_cannot_be_written_is_no_fault(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    memory = Remembered("slots.json")
    memory.put("a", (2, 3))
    assert memory.find("a", 2) is None


def test_keys_differ_by_every_fact_and_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of("mfcl", 1) == key_of("mfcl", 1)
    assert len({key_of("mfcl", 1), key_of("mfcl", 2), key_of("fedavg", 1), key_of("mfcl1")}) == 4
    here = key_of("mfcl", 1)
    monkeypatch.setattr("platform.node", lambda: "another machine")
    assert key_of("mfcl", 1) != here
