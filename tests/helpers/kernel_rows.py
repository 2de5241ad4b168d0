"""Random inputs for kernels of masked attention, and their errors relative to float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gpu = pytest.mark.skipif(not CUDA, reason="too slow under the interpreter")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
HALF_DTYPES = [torch.bfloat16, torch.float16]
SIZES = [  # B, G, J, T, F, V, queries and keys (of the delta rule keys) shared by the groups
    (2, 8, 1, 1000, 128, 64, True),
    (1, 2, 3, 517, 64, 65, False),
    (1, 1, 2, 300, 256, 128, False),
    (1, 1, 1, 200, 256, 256, False),
    (1, 2, 1, 4160, 128, 64, True),
]


def patch_tensor_loops(monkeypatch) -> None:
    """Let Triton 3.6's interpreter run loops whose bounds are tensors, which fails with numpy 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def set_attributes(tensor, *scope):
        patch(tensor, *scope)
        name, index = "__index__", lambda self: int(self.handle.data.item())
        scope[0].set_attr(tensor, name, index) if scope else setattr(tensor, name, index)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", set_attributes)


def patch_bfloat16_products(monkeypatch) -> None:
    """Let Triton 3.6's interpreter multiply bfloat16 matrices.

    It holds them as 16-bit integers and multiplies those.
    """
    import numpy as np
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != interpreter.tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: product(self, widened(a), widened(b), *rest),
    )


def log_gates(kind: str, *shape: int) -> torch.Tensor:
    """Return logarithms of gates of a kind: mild, strong and the like."""
    drawn = torch.rand(*shape, device=DEVICE)
    return {
        "mild": -0.1 * drawn,
        "none": 0 * drawn,
        "wild": torch.where(drawn < 0.1, -1e4, -1e-4 * drawn),
        "any": -torch.exp(8 * drawn - 4),
    }[kind]


def random_tokens(B, G, J, T, F, V, *, shared=False, dtype=torch.float32, gates="mild") -> list[torch.Tensor]:
    """Return q_BGJTF, k_BGTF, v_BGTV and gates_BGT, with strides as in models.

    shared: queries and keys are expanded over the groups.
    """
    torch.manual_seed(T + 7)
    one = 1 if shared else G
    q = torch.randn(B, T, one, J, F, device=DEVICE).permute(0, 2, 3, 1, 4)
    k = torch.randn(B, T, one, F, device=DEVICE).transpose(1, 2) / F**0.5
    v = torch.randn(B, T, G, V, device=DEVICE).transpose(1, 2)
    return [q.to(dtype), k.to(dtype), v.to(dtype), log_gates(gates, B, T, G).transpose(1, 2)]


def relative_errors(ours: Callable, exact: Callable, leaves: list[torch.Tensor]) -> list[float]:
    """Return |ours - exact| / |exact| for each output and each leaf's gradient; `exact` runs in float64."""
    torch.manual_seed(1)
    results = []
    for call, dtype in ((ours, None), (exact, torch.float64)):
        given = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
        outs = [x for x in call(*given) if x is not None]
        if not results:
            weights = [torch.randn_like(x.float()) for x in outs]
        grads = torch.autograd.grad(
            sum((x.double() * w).sum() for x, w in zip(outs, weights)), given, allow_unused=True
        )
        results.append([*outs, *(torch.zeros_like(x) if d is None else d for d, x in zip(grads, given))])
    assert all(a.isfinite().all() for a in results[0])
    return [
        float((a.detach().double() - b.detach()).norm() / b.detach().norm().clamp_min(1e-30)) for a, b in zip(*results)
    ]
