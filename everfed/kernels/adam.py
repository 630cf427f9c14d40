"""A step of Adam on one vector as one Triton kernel; PyTorch's operations are ten, each a pass over the vectors."""

# Triton kernels have no types
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adam(
    params_ptr, gradient_ptr, m_ptr, v_ptr, t_ptr, rate_ptr, size,
    KEEP_M: tl.constexpr, TAKE_M: tl.constexpr, LOG_M: tl.constexpr,
    KEEP_V: tl.constexpr, TAKE_V: tl.constexpr, LOG_V: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KEEP: beta. TAKE: 1 - beta. LOG: log(beta)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    g = tl.load(gradient_ptr + places, inside, 0.0)
    m = KEEP_M * tl.load(m_ptr + places, inside, 0.0) + TAKE_M * g
    v = KEEP_V * tl.load(v_ptr + places, inside, 0.0) + TAKE_V * g * g
    tl.store(m_ptr + places, m, inside)
    tl.store(v_ptr + places, v, inside)
    t = tl.load(t_ptr)  # float64: 1 - beta^t would lose digits while t is small
    m_hat = m / (1.0 - tl.exp(t * LOG_M)).to(tl.float32)
    v_hat = v / (1.0 - tl.exp(t * LOG_V)).to(tl.float32)
    p = tl.load(params_ptr + places, inside, 0.0)
    tl.store(params_ptr + places, p - tl.load(rate_ptr) * (m_hat / (tl.sqrt(v_hat) + EPS)), inside)


def adam(
    params: Tensor, gradient: Tensor, state: dict[str, Tensor], rate: Tensor, betas: tuple[float, float], eps: float
) -> None:
    """One step, in place. state: the moments m and v, float32 like the parameters, and t, float64, which counts this
    step already. rate: 0-d. betas: above 0 and below 1."""
    how = {
        f"{name}_{of}": value
        for of, beta in zip("MV", betas, strict=True)
        for name, value in (("KEEP", beta), ("TAKE", 1.0 - beta), ("LOG", math.log(beta)))
    }
    _adam[(triton.cdiv(len(params), BLOCK),)](
        params, gradient, state["m"], state["v"], state["t"], rate, len(params), **how, EPS=eps, BLOCK=BLOCK
    )
