"""Vectors that are mostly zero, as trees of their nonzero entries."""

from __future__ import annotations

import torch
from torch import Tensor

from everfed.core.legacy import Tree


def sparse(vector: Tensor) -> Tree:
    """{size, indices (k,) int32, values (k,)}: 8 bytes for each entry that is not 0."""
    if len(vector) >= 2**31:
        raise ValueError(f"a vector of {len(vector)} entries is too long for 32-bit positions")
    indices = vector.nonzero().squeeze(1)
    return {"size": len(vector), "indices": indices.to(torch.int32), "values": vector[indices]}


def dense(tree: Tree) -> Tensor:
    """The vector again."""
    values: Tensor = tree["values"]
    return torch.zeros(tree["size"], device=values.device).index_put_((tree["indices"].long(),), values)
