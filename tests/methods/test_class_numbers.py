"""Clients send the numbers of the classes whose sums they send. One that sends others must not end the server's run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everfed.methods.features.calibration import CCVR
from everfed.methods.features.fedproto import FedProto
from everfed.methods.features.ridge import Ridge
from everfed.methods.features.statistics import class_numbers
from tests.support.toy import Bench, Toy

WRONG = [torch.tensor([9.0, 2.0]), torch.tensor([-1.0, 2.0]), torch.tensor([2.0, 2.0])]


def test_the_classes_from_the_mean_of_numbers() -> None:
    mean = torch.tensor([3.0, 1.0], dtype=torch.float64) + 1e-9  # rounding of a weighted mean
    assert class_numbers(mean, 5).tolist() == [3, 1]
    assert class_numbers(torch.tensor([3, 1]), 5).tolist() == [3, 1]
    assert all(class_numbers(wrong, 5) is None for wrong in WRONG)


@pytest.mark.parametrize("classes", WRONG)
def test_sums_of_no_classes_change_nothing(classes: Tensor) -> None:
    counts, sums = torch.ones(2), torch.ones(2, 3)
    means = {"counts": counts, "sums": sums, "classes": classes}
    whole = {"counts": counts.long(), "sums": sums.long(), "squares": sums.long(), "classes": classes}
    gram, products = torch.ones(1, 6, dtype=torch.int64), torch.ones(1, 3, 2, dtype=torch.int64)
    solved = {"gram": gram, "products": products, "counts": counts.long()[None], "classes": classes}
    for part, hook, reduced in (
        (FedProto(), FedProto.update, means),
        (CCVR(), CCVR._calibrate, whole),
        (Ridge(penalty=1.0), Ridge._new_head, solved),
    ):
        server = Bench(stream=Toy(classes=5)).server(part.name, reduced=reduced)
        model = server.model
        hook(part, server)  # type: ignore[operator]
        assert server.state == {} and server.model is model
