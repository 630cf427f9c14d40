"""The parts of the CARLA recorder that need no server: where boxes lie in the image, and the files it writes."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from everfed.data.scenes import load_scenes

EXAMPLE = Path(__file__).parents[2] / "examples/carla_recorder.py"
IDENTITY = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("carla_recorder", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cube(x: float, y: float, z: float, half: float = 1.0) -> list[SimpleNamespace]:
    corners = itertools.product((-half, half), repeat=3)
    return [SimpleNamespace(x=x + a, y=y + b, z=z + c) for a, b, c in corners]


def test_a_cube_ahead_is_in_the_middle_of_the_image(recorder: ModuleType) -> None:
    """90 degrees: the focal length is half the width, 160 pixels; the near side is 9 m away."""
    left, top, width, height = recorder.project(cube(10, 0, 0), IDENTITY)
    assert (left + width / 2, top + height / 2) == pytest.approx((160, 96))
    assert (width, height) == pytest.approx((2 * 160 / 9, 2 * 160 / 9))


def test_what_is_behind_or_beside_is_not_seen(recorder: ModuleType) -> None:
    assert recorder.project(cube(-10, 0, 0), IDENTITY) is None
    assert recorder.project(cube(10, 50, 0), IDENTITY) is None


def test_what_is_written_is_read_back_town_by_town(recorder: ModuleType, tmp_path: Path) -> None:
    frames = [(f"images/{n}.jpg", [("bike", [0, 0, 160, 96])] if n else []) for n in range(4)]
    for town in ("Town01", "Town04", "Town01"):  # the last call replaces the first
        recorder.write(frames, tmp_path, town, 0.25)
    scenes = load_scenes(tmp_path)
    assert set(scenes.domains) == {"Town01", "Town04"}
    train, _ = scenes.part("Town01", "train", (192, 320), None)
    test, _ = scenes.part("Town04", "test", (192, 320), None)
    assert (len(train), len(test), len(train[0].boxes)) == (3, 1, 0)
    assert test[0].boxes.tolist() == [[1, 0.25, 0.25, 0.5, 0.5]]
