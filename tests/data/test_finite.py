"""NaN and infinity in a user's data are refused where they are read, with the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from everfed import streams
from everfed.data.sources import load
from everfed.errors import DataError

WRONG = [float("nan"), float("inf"), -float("inf"), 1e300]
Y = np.arange(40) % 4


def features(at: tuple[int, int] | None = None, value: float = float("nan")) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(40, 6))
    if at is not None:
        x[at] = value
    return x


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("part", ["train", "test"])
def test_arrays(part: str, value: float) -> None:
    x = {"train": features(), "test": features(), part: features((6, 3), value)}
    with pytest.raises(DataError, match=rf"arrays, {part} part: \S+ in column 4 of row 7 is no finite number"):
        streams.from_arrays(x["train"], Y, x["test"], Y, scenario="class-incremental", tasks=2)


def test_every_row_is_counted() -> None:
    x = features((6, 3))
    x[20] = np.inf
    with pytest.raises(DataError, match="row 7 is no finite number; 2 of 40 rows have such numbers: fill it in"):
        streams.from_arrays(x, Y, features(), Y, scenario="class-incremental", tasks=2)


def test_pictures_of_floats() -> None:
    x = np.zeros((40, 3, 2, 2), np.float32)
    x[6, 0, 1, 1] = np.nan
    with pytest.raises(DataError, match=r"nan at \[0, 1, 1\] of row 7"):
        streams.from_arrays(x, Y, x[:4], Y[:4], scenario="class-incremental", tasks=2)


def test_an_npz_file_is_named_with_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, x=features((36, 2)), y=Y)  # divided into two parts after it was read
    with pytest.raises(DataError, match="own.npz, x: nan in column 3 of row 37"):
        load(path)
    np.savez(path, x_train=features(), y_train=Y, x_test=features((3, 2)), y_test=Y)
    with pytest.raises(DataError, match="own.npz: own, test part: nan in column 3 of row 4"):
        load(path)


def test_data_sets_of_torch() -> None:
    good, bad = (TensorDataset(torch.tensor(x), torch.tensor(Y)) for x in (features(), features((6, 3))))
    stream = streams.from_datasets(bad, good, scenario="class-incremental", tasks=2, clients=2)
    with pytest.raises(DataError, match="datasets train, sample 6: nan in column 4 is no finite number"):
        for client in range(2):
            for task in range(2):
                _ = stream.data(client, task).x


def test_periods_of_an_own_function() -> None:
    def make(client: int) -> Any:
        yield features(), Y
        yield features((6, 3)), Y

    stream = streams.from_function(make, classes=4, tasks=2, clients=1)
    with pytest.raises(DataError, match="client 0, period 2: nan in column 4 of row 7"):
        stream.data(0, 1)
