"""Clients send the numbers of the classes whose sums they send. One that sends others must not end the server's run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from everfed.methods.features.calibration import CCVR
from everfed.methods.features.fedproto import FedProto
from everfed.methods.features.ridge import Ridge
from everfed.methods.features.statistics import class_numbers

CTX: Any = SimpleNamespace(facts=SimpleNamespace(classes=5), round=0)
WRONG = [torch.tensor([9.0, 2.0]), torch.tensor([-1.0, 2.0]), torch.tensor([2.0, 2.0])]


def test_the_classes_from_the_mean_of_numbers() -> None:
    mean = torch.tensor([3.0, 1.0], dtype=torch.float64) + 1e-9  # rounding of a weighted mean
    assert class_numbers(mean, 5).tolist() == [3, 1]
    assert class_numbers(torch.tensor([3, 1]), 5).tolist() == [3, 1]
    assert all(class_numbers(wrong, 5) is None for wrong in WRONG)


@pytest.mark.parametrize("classes", WRONG)
def test_sums_of_no_classes_change_nothing(classes: Tensor) -> None:
    counts, sums = torch.ones(2), torch.ones(2, 3)
    assert FedProto().update({}, {"counts": counts, "sums": sums, "classes": classes}, CTX) is None
    whole = {"counts": counts.long(), "sums": sums.long(), "squares": sums.long(), "classes": classes}
    assert CCVR()._add({}, whole, CTX) is None
    gram, products = torch.ones(1, 6, dtype=torch.int64), torch.ones(1, 3, 2, dtype=torch.int64)
    solved = {"gram": gram, "products": products, "counts": counts.long()[None], "classes": classes}
    assert Ridge(penalty=1.0)._add({}, solved, CTX) is None
