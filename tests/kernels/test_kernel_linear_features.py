"""Inputs and outputs of linear mixers: the kernels of `linear_features` and `join_and_gate` against the references in
float64, outputs and every gradient."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import CUDA, DEVICE, gpu, patch_bfloat16_products
from helpers.saved_bytes import saved_storages, total_bytes
from torch.utils._python_dispatch import TorchDispatchMode

import surgery.mixers.linear
from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.mixers.base import AttentionShape, MixerInputs
from surgery.mixers.common.linear_features import FeaturePlan, linear_features
from surgery.mixers.common.window_hybrid import join_and_gate
from surgery.mixers.features.hedgehog import Hedgehog, HedgehogMap
from surgery.mixers.features.simple import Identity, IdentityMap
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def errors(ours: dict[str, Any], exact: dict[str, Any]) -> dict[str, float]:
    return {name: ((ours[name].double() - x).norm() / x.norm().clamp_min(1e-3)).item() for name, x in exact.items()}


def features_of(case: dict[str, Any], dtype: torch.dtype, choice: Any) -> dict[str, Any]:
    """Return outputs and gradients of one call of random inputs."""
    torch.manual_seed(0)
    B, T, H, K, R = 2, case.get("T", 37), case.get("H", 3), case["K"], case.get("R", case["K"])
    wide = torch.float64 if choice == "reference" else dtype
    both, turned = case["form"] == "both", case["rotated"]
    columns = K * (2 if both else 1)
    x = torch.randn(B, H, T, K, device=DEVICE).to(dtype).to(wide).requires_grad_()
    angle = torch.rand(case.get("rows", B), T, R, device=DEVICE) * 6
    angle[..., R // 2 :] = torch.rand_like(angle[..., R // 2 :]) * 6
    rotation = tuple(t.to(torch.float64 if choice == "reference" else torch.float32).expand(B, -1, -1)
                     for t in (angle.cos(), angle.sin()))  # fmt: skip
    shape = AttentionShape(8, H, H, columns, K, 0.3)
    feature_map = (HedgehogMap if case["map"] else IdentityMap)((Hedgehog if case["map"] else Identity)(), shape)
    feature_map.to(DEVICE, torch.float64 if choice == "reference" else torch.float32)
    weights = {}
    if isinstance(feature_map, HedgehogMap):
        w = torch.randn(H, columns, columns, device=DEVICE)
        feature_map.query_HKK.data.copy_(w)
        weights["w"] = feature_map.query_HKK
    first, last = case.get("span", (0, T))
    plan = FeaturePlan("queries", case["form"], turned, 0.3**0.5, case["norm"], first, last, 1, dtype)
    with use_kernels(choice), record_dispatch() as taken:
        features, near = linear_features(
            x.transpose(1, 2), rotation if turned else None, feature_map, torch.zeros(B, T, device=DEVICE), plan
        )
    assert choice == "reference" or (taken == {"linear_features"} and features.dtype == dtype)
    down = [torch.randn(t.shape, device=DEVICE) for t in (features, near)]
    total = sum((t.double() * d).sum() for t, d in zip((features, near), down))
    leaves = {"x": x, **weights}
    grads = torch.autograd.grad(total, list(leaves.values()))
    return {"features": features, "near": near, **{f"d{n}": g for n, g in zip(leaves, grads)}}


CASES = [
    {"K": 16, "form": "both", "rotated": True, "map": True, "norm": True, "span": (4, 30)},
    {"K": 20, "form": "both", "rotated": True, "map": True, "norm": False, "R": 12, "rows": 1},
    {"K": 24, "form": "given", "rotated": True, "map": True, "norm": True, "span": (9, 37)},
    {"K": 16, "form": "given", "rotated": False, "map": True, "norm": True, "H": 1},
    {"K": 40, "form": "both", "rotated": True, "map": False, "norm": True, "R": 16, "span": (4, 30)},
    {"K": 16, "form": "both", "rotated": True, "map": False, "norm": False},
    {"K": 16, "form": "given", "rotated": False, "map": False, "norm": True},
    {"K": 80, "form": "both", "rotated": True, "map": True, "norm": True, "T": 19, "H": 1},
]


@pytest.mark.parametrize("case", [{"span": (4, 290)}, {"form": "given", "rotated": False}, {"R": 12}], ids=str)
def test_one_program_takes_several_tiles(case, monkeypatch):
    """W is loaded once for them; in most cases here each tile has a program of its own."""
    import surgery.kernels.linear_features as module

    if not CUDA:
        patch_bfloat16_products(monkeypatch)
    case = {"K": 16, "form": "both", "rotated": True, "map": True, "norm": True, "T": 300, "H": 1} | case
    exact = features_of(case, torch.bfloat16, "reference")
    monkeypatch.setattr(module, "MAPPED_PROGRAMS", 5)  # 20 tiles: four for each program
    ours = features_of(case, torch.bfloat16, "kernel")
    assert max(errors(ours, exact).values()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_features(case):
    exact, ours = (features_of(case, torch.float32, choice) for choice in ("reference", "kernel"))
    found = errors(ours, exact)
    assert all(e < TOLERANCE[torch.float32] for e in found.values()), found


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_features_in_bfloat16(case, monkeypatch):
    if not CUDA:
        patch_bfloat16_products(monkeypatch)
    exact, ours = (features_of(case, torch.bfloat16, choice) for choice in ("reference", "kernel"))
    found = errors(ours, exact)
    assert all(e < TOLERANCE[torch.bfloat16] for e in found.values()), found


@gpu
@pytest.mark.parametrize("K", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_of_all_head_dims(K, dtype):
    if dtype == torch.float32 and K > 128:
        pytest.skip("float32 features of both forms have kernels for heads of up to 128")
    case = {"K": K, "form": "both", "rotated": True, "map": True, "norm": True, "T": 1500, "span": (68, 1500)}
    exact, ours = (features_of(case, dtype, choice) for choice in ("reference", "kernel"))
    found = errors(ours, exact)
    assert all(e < 2 * TOLERANCE[dtype] for e in found.values()), found


@pytest.mark.parametrize("gate", [None, "head", "value"])
@pytest.mark.parametrize(("V", "late"), [(16, 0), (24, 5)])
def test_join(gate, V, late):
    B, T, H = 2, 37, 3
    torch.manual_seed(0)
    leaves = {
        "near": torch.randn(B, T, H, V, device=DEVICE).transpose(1, 2),
        "far": torch.randn(B, H, T - late, V, device=DEVICE),
        "near_H": torch.randn(H, device=DEVICE),
        "far_H": torch.randn(H, device=DEVICE),
    }
    if gate is not None:
        leaves["gate"] = torch.randn(B, T, H, V if gate == "value" else 1, device=DEVICE)
    down = torch.randn(B, T, H, V, device=DEVICE)
    results = []
    for choice in ("reference", "kernel"):
        dtype = torch.float64 if choice == "reference" else torch.float32
        given = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
        with use_kernels(choice), record_dispatch() as taken:
            out = join_and_gate(*list(given.values())[:4], given.get("gate"), dtype)
        assert choice == "reference" or taken == {"join_and_gate"}
        grads = torch.autograd.grad((out * down).sum(), list(given.values()))
        results.append({"out": out, **dict(zip(given, grads))})
    found = errors(results[1], results[0])
    assert all(e < 1e-5 for e in found.values()), found


@pytest.mark.parametrize(
    "options",
    [
        {"mask": {"name": "hierarchical", "block": 16}, "scores": "delta", "output_gate": "value", "rope": "both"},
        {"mask": "gates", "scores": "delta", "output_gate": "head", "rope": "window"},
        {"mask": "gates", "features": "identity", "rope": "keep", "states": "per_head"},
    ],
    ids=str,
)
def test_mixers(options):
    """A whole mixer with its window: outputs and gradients of all parameters and inputs."""
    config = LinearAttention(**{"features": "hedgehog", "window": 8, "sinks": 2, "chunk": 16, **options})
    shape = AttentionShape(24, 4, 2, 16, 16, 0.25, rotary=16)
    torch.manual_seed(0)
    mixer = LinearMixer(config, shape).to(DEVICE)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    sizes = {"q": (1, 4, 33, 16), "k": (1, 2, 33, 16), "v": (1, 2, 33, 16), "x": (1, 33, 24)}
    leaves = {name: torch.randn(size, device=DEVICE) for name, size in sizes.items()}
    angle = torch.rand(1, 33, 8, device=DEVICE).repeat(1, 1, 2) * 6
    results = []
    for choice in ("reference", "kernel"):
        dtype = torch.float64 if choice == "reference" else torch.float32
        mixer.to(dtype)
        given = {name: t.to(dtype).requires_grad_() for name, t in leaves.items()}
        with use_kernels(choice), record_dispatch() as taken:
            out, _ = mixer.mix(MixerInputs(*given.values(), rope=(angle.cos().to(dtype), angle.sin().to(dtype))))
        if choice == "kernel":
            assert {"join_and_gate", "linear_features", "local_attention"} <= taken
        tensors = {**given, **dict(mixer.named_parameters())}
        grads = torch.autograd.grad(out.square().sum(), list(tensors.values()), allow_unused=True)
        results.append({"out": out, **{n: g for n, g in zip(tensors, grads) if g is not None}})
    found = errors(results[1], results[0])
    assert all(e < 1e-4 for e in found.values()), found


class CountOperators(TorchDispatchMode):
    """Counts operators that compute; those with which the interpreter reads and writes tensors are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.count += not (function.is_view or name.startswith(("empty", "new_empty", "set_", "copy_", "detach")))
        return function(*args, **(kwargs or {}))


def test_operators_and_saved_bytes(monkeypatch):
    """The mixer of hybrid-25 under autocast stays a few kernels that keep little more than their inputs."""
    if not CUDA:
        patch_bfloat16_products(monkeypatch)
        monkeypatch.setattr(surgery.mixers.linear, "matmul_dtype", lambda v: torch.bfloat16)
    T, H, K = 128, 3, 16
    options = {"mask": {"name": "hierarchical", "block": 512}, "scores": "delta", "features": "hedgehog"}
    config = LinearAttention(**options, output_gate="value", rope="both", window=64, sinks=4)
    mixer = LinearMixer(config, AttentionShape(H * K, H, 1, K, K, 0.25, rotary=K)).to(DEVICE)
    sizes = (1, H, T, K), (1, 1, T, K), (1, 1, T, K), (1, T, H * K)
    inputs = [torch.randn(size, device=DEVICE).bfloat16().requires_grad_() for size in sizes]
    rope = torch.ones(1, T, K, device=DEVICE), torch.zeros(1, T, K, device=DEVICE)
    saved, autocast = saved_storages((*inputs, *mixer.parameters())), torch.autocast(DEVICE, torch.bfloat16)
    with use_kernels("kernel"), record_dispatch() as taken, CountOperators() as operators, saved as kept, autocast:
        out, _ = mixer.mix(MixerInputs(*inputs, rope=rope))
    assert taken == {"linear_features", "local_attention", "log_linear", "join_and_gate"}
    assert operators.count <= 60, operators.count  # the references: 218
    assert total_bytes(kept) <= 1610 * T, total_bytes(kept) / T  # the references: 12,900 bytes a token
    out.float().sum().backward()


@pytest.mark.slow
def test_one_graph():
    """Under torch.compile both are nodes of one graph, forwards and backwards."""
    options = {"mask": "gates", "scores": "delta", "features": "hedgehog", "output_gate": "value", "rope": "both"}
    config = LinearAttention(**options, window=8, sinks=2, chunk=16)
    torch.manual_seed(0)
    mixer = LinearMixer(config, AttentionShape(48, 3, 1, 16, 16, 0.25, rotary=16)).to(DEVICE)
    sizes = (1, 3, 40, 16), (1, 1, 40, 16), (1, 1, 40, 16), (1, 40, 48)
    given = [torch.randn(size, device=DEVICE).requires_grad_() for size in sizes]
    angle = torch.rand(1, 40, 8, device=DEVICE).repeat(1, 1, 2)

    def run(*tensors):
        out = mixer.mix(MixerInputs(*tensors, rope=(angle.cos(), angle.sin())))[0]
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    def compiled(*tensors):
        mix = torch.compile(
            lambda *t: mixer.mix(MixerInputs(*t, rope=(angle.cos(), angle.sin())))[0],
            fullgraph=True, backend="aot_eager",
        )  # fmt: skip
        out = mix(*tensors)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    torch.compiler.reset()
    with use_kernels("kernel"):
        for ours, eager in zip(compiled(*given), run(*given)):
            assert (ours - eager).norm() <= 1e-5 * eager.norm()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_keys_after_rope_that_are_known(mapped, grad):
    """Features of both forms without a copy that has them side by side; with gradients there is one."""
    torch.manual_seed(0)
    x, known = (torch.randn(1, 37, 3, 20, dtype=torch.float64, device=DEVICE) for _ in range(2))
    feature_map = (HedgehogMap if mapped else IdentityMap)(
        (Hedgehog if mapped else Identity)(), AttentionShape(8, 3, 3, 40, 20, 0.3)
    ).to(DEVICE, torch.float64)  # fmt: skip
    if isinstance(feature_map, HedgehogMap):
        feature_map.key_GKK.data.normal_()
    plan = FeaturePlan("keys", "both", False, 0.3**0.5, True, 4, 30, 1, torch.float32)
    position_BT = torch.zeros(1, 37, device=DEVICE)
    wanted, _ = linear_features(x, None, feature_map, position_BT, plan, known)
    joined = torch.cat([x, known], dim=-1)
    plain, _ = linear_features(joined, None, feature_map, position_BT, dataclasses.replace(plan, form="given"))
    torch.testing.assert_close(wanted, plain, rtol=0, atol=0)
    single = feature_map.float(), x.float().transpose(1, 2).contiguous().transpose(1, 2), known.float()
    with use_kernels("kernel"), record_dispatch() as taken, torch.set_grad_enabled(grad):
        got, near = linear_features(single[1], None, single[0], position_BT, plan, single[2].requires_grad_(grad))
    assert taken == {"linear_features"} and got.requires_grad == grad and near is single[2]
    assert (got.double() - wanted).norm() / wanted.norm() < 1e-5
