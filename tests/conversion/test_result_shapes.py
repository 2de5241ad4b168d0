"""Results that are made from shapes alone are those of torch's own kernels for the meta device."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import surgery
from surgery.conversion.estimation import counting, fits
from surgery.conversion.estimation.result_shapes import result

ROOT = Path(__file__).parents[2]
SQUARE, WIDE, ROW, BATCH = (5, 5), (5, 7), (7,), (3, 5, 5)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS = {
    "product": lambda: x(*WIDE) * x(*ROW),
    "product with a number": lambda: 2.0 * x(*WIDE),
    "integers by a number": lambda: x(4, dtype=torch.int32) * 0.5,
    "quotient of integers": lambda: x(4, dtype=torch.int64) / x(4, dtype=torch.int64),
    "two dtypes": lambda: x(*WIDE, dtype=torch.bfloat16) + x(*WIDE),
    "a scalar tensor": lambda: x(*WIDE, dtype=torch.bfloat16) + x(),
    "transposed": lambda: x(*WIDE).mT.sqrt(),
    "comparison": lambda: x(*WIDE) > 0,
    "condition": lambda: torch.where(x(*WIDE) > 0, x(*ROW), x(5, 1)),
    "clamped": lambda: x(*WIDE).clamp_min(1e-3),
    "clamped on both sides": lambda: x(*WIDE).clamp(-126, 126),
    "largest": lambda: x(*WIDE).amax((-2, -1), keepdim=True),
    "in place": lambda: x(*WIDE).add_(x(*ROW)),
    "sum": lambda: x(*WIDE).sum(),
    "sum of booleans": lambda: (x(*WIDE) > 0).sum(0),
    "sum in float64": lambda: x(*WIDE).sum(dtype=torch.float64),
    "mean that keeps": lambda: x(*BATCH).mean((0, -1), keepdim=True),
    "norm": lambda: torch.linalg.vector_norm(x(*BATCH), dim=-2),
    "any": lambda: (x(*WIDE) > 0).any(),
    "all": lambda: (x(*WIDE) > 0).all(-1),
    "mm": lambda: x(*SQUARE) @ x(*WIDE),
    "bmm": lambda: x(*BATCH) @ x(3, 5, 2),
    "addmm": lambda: torch.addmm(x(*ROW), x(*SQUARE), x(*WIDE)),
    "baddbmm": lambda: torch.baddbmm(x(*BATCH), x(*BATCH), x(*BATCH)),
    "cholesky": lambda: torch.linalg.cholesky_ex(x(*BATCH)),
    "eigh": lambda: torch.linalg.eigh(x(*BATCH)),
    "eigvalsh": lambda: torch.linalg.eigvalsh(x(*BATCH)),
    "triangular": lambda: torch.linalg.solve_triangular(x(*BATCH), x(3, 5, 2), upper=True),
    "cholesky_solve": lambda: torch.cholesky_solve(x(*WIDE), x(*SQUARE)),
    "stack": lambda: torch.stack([x(*WIDE), x(*WIDE)], -1),
    "cat": lambda: torch.cat([x(*WIDE), x(5, 2)], -1),
    "cumsum": lambda: x(*WIDE).cumsum(0),
    "flip": lambda: x(*WIDE).flip(0),
    "clone": lambda: x(*WIDE).mT.clone(),
    "contiguous": lambda: x(*WIDE).mT.contiguous(),
    "zeros": lambda: torch.zeros(3, 4, device="meta", dtype=torch.float16),
    "zeros_like": lambda: torch.zeros_like(x(*WIDE)),
    "new_zeros": lambda: x(*WIDE).new_zeros((2, 3), dtype=torch.float64),
    "eye": lambda: torch.eye(3, 4, device="meta"),
    "scalar_tensor": lambda: torch.scalar_tensor(1.0, device="meta"),
}  # fmt: skip


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


class Compared(TorchDispatchMode):
    """Compares the results of rules with torch's. with_rule: names of the operations that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.with_rule: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        ours, theirs = result(name, args, kwargs or {}), func(*args, **(kwargs or {}))
        if ours is not None:
            self.with_rule.add(name)
            pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
            for found, expected in pairs:
                assert _layout(found) == _layout(expected), name
        return theirs


@pytest.mark.parametrize("call", CALLS)
def test_a_rule_gives_what_torch_gives(call):
    with torch.no_grad(), Compared() as compared:
        CALLS[call]()
    assert compared.with_rule or call == "eigvalsh"


def test_estimates_do_not_depend_on_the_rules(monkeypatch):
    counts = (fits.count_stage, fits.count_rank_errors, fits.count_quick_fits, fits.count_projection)
    estimates = []
    for _ in range(2):
        for count in counts:
            count.cache_clear()
        plan = surgery.plan(ROOT / "recipes/tiny/checkpoint", "btt-half")
        estimates.append(plan["estimate"])
        monkeypatch.setattr(counting, "result", lambda *given: None)
    assert estimates[0] == estimates[1]
