"""Calls of one token: how few operations and functions of this package they run, and that what is kept between calls
changes no result and holds no tensor.
"""

from __future__ import annotations

import copy
import gc
import io
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.core import dispatch
from surgery.core.dispatch import DispatchedOp, dispatched_by, load_kernels, register_kernel, use_kernels
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT, btt_linear
from surgery.structures.btt_products import btt_call_key
from surgery.structures.low_rank import LowRank, low_rank_linear
from surgery.structures.monarch import Monarch
from surgery.structures.quantized import QuantizedLinear, Storage, quantized_product

CONFIGS = [LowRank(rank=6), BTT(blocks=(4, 4), rank=3), Monarch(blocks=(8, 8)), BTT(blocks=(3, 5), rank=2)]


class Operations(TorchDispatchMode):
    """Names of the operations that PyTorch's dispatcher runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


def count_calls(run) -> list[str]:
    """Return the names of this package's Python functions that `run` calls."""
    names, code = [], (str(Path(__file__).parents[2] / "surgery"), str(Path(__file__).parents[2] / "kernels"))
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(before)
    return [found.co_name for found in names if found.co_filename.startswith(code)]


def make_linear(config, out=48, in_=64, bias=False, dtype=torch.float32):
    """Return a linear with random values."""
    torch.manual_seed(0)
    kind = STRUCTURES[config]
    linear = kind(in_, out, kind.resolve(kind.fit(config, out, in_, out * in_ // 2), out, in_), bias, dtype=dtype)
    if bias:
        nn.init.normal_(linear.bias)
    return linear


def expected_product(linear, x):
    """Return the product with the dense matrix."""
    y = x @ linear.dense().mT
    return y if linear.bias is None else y + linear.bias


def stand_in(x, right, left, bias, out):
    """Return B x + bias as the kernel on a GPU does, by the operations of the reference."""
    return btt_linear.reference(x, right, left, bias, out)


def low_rank_stand_in(x, right, left, bias):
    """The same for low rank."""
    return low_rank_linear.reference(x, right, left, bias)


@pytest.fixture
def selected(monkeypatch):
    """Calls select kernels as on a GPU, and run a kernel that stands for Triton's.

    The list has one entry for each selection.
    """
    found = []

    def bind(*args):
        found.append(btt_call_key(*args))
        return lambda *given: stand_in(*given)

    kernel = dispatch.RegisteredKernel(stand_in, lambda *_: True, lambda *_: True, bind=bind)
    low_rank = dispatch.RegisteredKernel(
        low_rank_stand_in, lambda *_: True, lambda *_: True, bind=lambda *_: low_rank_stand_in
    )
    monkeypatch.setattr(dispatch, "_on_gpu", lambda *_: True)
    monkeypatch.setattr(low_rank_linear, "kernels", [low_rank])
    monkeypatch.setattr(low_rank_linear, "calls", {})
    packed = dispatch.RegisteredKernel(quantized_product.reference, lambda *_: True, lambda *_: True)
    monkeypatch.setattr(quantized_product, "kernels", [packed])
    monkeypatch.setattr(btt_linear, "kernels", [kernel])
    monkeypatch.setattr(btt_linear, "calls", {})
    monkeypatch.setattr(dispatch, "load_kernels", lambda: True)
    with use_kernels("measured"):
        yield found


@pytest.fixture(params=["reference", "kept"])
def path(request):
    """Run a test on the path of a CPU, and on that of a GPU, which keeps what it selected."""
    return request.getfixturevalue("selected") if request.param == "kept" else None


# -- how few steps -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config, grad, operations, calls",
    [
        (LowRank(rank=6), False, 9, 5),
        (BTT(blocks=(4, 4), rank=3), False, 9, 11),
        (Monarch(blocks=(8, 8)), False, 9, 11),
        (BTT(blocks=(4, 4), rank=3), True, 10, 12),
    ],
    ids=str,
)
def test_a_call_of_one_token_takes_few_steps(config, grad, operations, calls):
    linear, x = make_linear(config), torch.randn(1, 1, 64)
    with torch.set_grad_enabled(grad), use_kernels("measured"):
        linear(x)
        with Operations() as seen:
            linear(x)
        named = count_calls(lambda: linear(x))
    assert len(seen.names) <= operations, seen.names
    assert len(named) <= calls, named
    if not isinstance(config, LowRank):
        assert seen.names.count("bmm") == 2 and "clone" not in seen.names, "z is the only tensor that is copied"
        assert seen.names.count("as_strided_copy") == 1


def test_a_call_of_one_token_by_the_kernel_allocates_z_and_y_and_nothing_else(monkeypatch):
    pytest.importorskip("triton")
    from surgery.kernels.launch import CachedLaunch

    launches = []
    monkeypatch.setattr(CachedLaunch, "_launch_by_triton", lambda self, tensors: launches.append(len(tensors)))
    monkeypatch.setattr(btt_linear, "calls", {})
    linear, x = make_linear(BTT(blocks=(2, 4), rank=5), bias=True), torch.randn(1, 1, 64)
    with use_kernels("kernel"):
        for grad, most in ((False, 11), (True, 13)):
            with torch.set_grad_enabled(grad):
                linear(x)
                with Operations() as seen:
                    linear(x)
                named = count_calls(lambda: linear(x))
            assert [name for name in seen.names if "detach" not in name] == ["new_empty", "new_empty"]
            assert len(named) <= most, named
    assert launches == 12 * [4]


def test_a_bound_launch_hands_addresses_to_tritons_launcher():
    pytest.importorskip("triton")
    from surgery.kernels.launch import CachedLaunch

    class Compiled:
        """Stands for a kernel of Triton: lists the arguments of launches found anew, and of launches of what was
        compiled.
        """

        arg_names = ("x", "y", "n")

        def __init__(self, refuses=False):
            self.found, self.again, self.refuses = [], [], refuses

        def __getitem__(self, grid):
            def launch(*args, **options):
                if options:
                    self.found.append(args)
                    return self
                if self.refuses:
                    raise TypeError("function takes exactly 9 arguments")
                return self.again.append(args)

            return launch

    x, y = torch.zeros(64), torch.zeros(64)
    kernel = Compiled()
    launch = CachedLaunch(kernel, (3,), (7,), {"num_warps": 4}).bind(x, y)
    launch(x, y)
    launch(x, y)
    launch(x[1:], y)  # not aligned: another compiled kernel
    assert kernel.found == [(x, y, 7), (kernel.found[1][0], y, 7)] and kernel.found[1][0].data_ptr() == x.data_ptr() + 4
    assert kernel.again == [(x.data_ptr(), y.data_ptr(), 7)]
    kernel = Compiled(refuses=True)
    launch = CachedLaunch(kernel, (3,), (7,), {"num_warps": 4}).bind(x, y)
    for _ in range(4):
        launch(x, y)
    assert kernel.found == 4 * [(x, y, 7)] and not kernel.again, (
        "a launcher with other arguments: Triton looks the kernel up"
    )


# -- results -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_one_row_is_a_row_of_many(config, leading, bias, dtype, path):
    """Output and gradients of one row are those of the dense matrix, in calls that select and in calls that find what
    was selected.
    """
    linear = make_linear(config, bias=bias, dtype=dtype)
    x = torch.randn(*leading, 64, dtype=dtype)
    expected = expected_product(linear, x)
    with torch.no_grad():
        assert all(torch.allclose(linear(x), expected, atol=1e-5) for _ in range(2))
    x.requires_grad_()
    leaves, dy = [x, *linear.parameters()], torch.randn_like(expected)
    wanted = torch.autograd.grad(expected_product(linear, x), leaves, dy)
    for _ in range(2):
        y = linear(x)
        assert y.shape == (*leading, 48) and torch.allclose(y, expected, atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(torch.autograd.grad(y, leaves, dy), wanted))


def test_an_output_can_be_changed_in_place():
    """As that of nn.Linear: by a residual connection, say, also where the linear ran without gradients."""
    linear, added = make_linear(BTT(blocks=(4, 4), rank=3), bias=True), nn.Parameter(torch.ones(48))
    for shape in ((64,), (1, 64), (1, 1, 64), (2, 3, 64)):
        x = torch.randn(shape)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y = linear(x)
            y += added
            assert torch.allclose(y, expected_product(linear, x) + 1, atol=1e-5)
            assert torch.autograd.grad(y.sum(), added)[0].sum() == y.numel()


def test_gradients_of_gradients_of_one_row():
    linear = make_linear(BTT(blocks=(2, 2), rank=2), 6, 4, True, torch.float64)
    inputs = (torch.randn(1, 4, dtype=torch.float64), linear.right, linear.weight, linear.bias)
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(lambda *given: btt_linear(*given, 6), inputs)
    assert torch.autograd.gradgradcheck(lambda *given: btt_linear(*given, 6), inputs)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,)])
def test_only_the_gradients_that_are_needed_of_one_row(wanted, path):
    linear = make_linear(BTT(blocks=(4, 4), rank=3), bias=True)
    inputs = [torch.randn(1, 64), *(linear.right, linear.weight, linear.bias)]
    inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    everything = [t.detach().requires_grad_() for t in inputs]
    found = torch.autograd.grad(btt_linear(*inputs, 48).sum(), [inputs[i] for i in wanted])
    expected = torch.autograd.grad(btt_linear(*everything, 48).sum(), [everything[i] for i in wanted])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_by_the_kernel_kept_calls_are_bit_equal(monkeypatch):
    pytest.importorskip("triton")
    from helpers.kernel_rows import DEVICE, patch_tensor_loops

    patch_tensor_loops(monkeypatch)
    load_kernels()
    run = next(kernel.run for kernel in btt_linear.kernels if kernel.implementation == "kernel")
    linear = make_linear(BTT(blocks=(2, 4), rank=5), bias=True).to(DEVICE)
    given = linear.right, linear.weight, linear.bias, linear.out_features
    wide = torch.randn(2, 2, 70, device=DEVICE)
    for x in (torch.randn(1, 1, 64, device=DEVICE), wide[..., 3:67], wide[..., :64].transpose(0, 1)):
        x = x.detach().requires_grad_()
        with use_kernels("kernel"):
            expected, dy = run(x, *given), torch.randn(*x.shape[:-1], 48, device=DEVICE)
            wanted = torch.autograd.grad(expected, [x, *linear.parameters()], dy)
            for _ in range(2):
                y = linear(x)
                assert torch.equal(y, expected)
                found = torch.autograd.grad(y, [x, *linear.parameters()], dy)
                assert all(torch.equal(a, b) for a, b in zip(found, wanted))
                with torch.no_grad():
                    assert torch.equal(linear(x), expected)


# -- what is kept between calls ----------------------------------------------------------------------------------------
def test_what_a_selection_depends_on_is_in_the_key():
    linear = make_linear(BTT(blocks=(4, 4), rank=3))
    given, x = (linear.right, linear.weight, None, 48), torch.randn(1, 64)
    with torch.no_grad():
        keys = [btt_call_key(t, *given) for t in (x, x[None], torch.randn(2, 64), torch.randn(1, 65)[:, 1:])]
        keys += [btt_call_key(x, *given[:2], torch.randn(48), 48), btt_call_key(x, *given[:3], 47)]
        keys += [btt_call_key(x.double(), linear.right.double(), linear.weight.double(), None, 48)]
    keys.append(btt_call_key(x, *given))  # gradients are recorded
    assert None not in keys and len(set(keys)) == len(keys)


def test_calls_whose_selection_is_not_kept(selected):
    linear = make_linear(BTT(blocks=(4, 4), rank=3))
    given, x = (linear.right, linear.weight, None, 48), torch.randn(1, 64)
    assert btt_call_key(x, *given) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert btt_call_key(x, *given) is None
        assert linear(x).dtype == torch.bfloat16
    assert btt_call_key(x.double(), *given) is None, "two dtypes"
    assert btt_call_key(x.to("meta"), *(t.to("meta") for t in given[:2]), *given[2:]) is None
    assert btt_call_key(x, linear.right.mT.contiguous().mT, *given[1:]) is None, "cores with gaps"
    assert btt_call_key(x.as_subclass(type("Marked", (torch.Tensor,), {})), *given) is None
    with torch._subclasses.FakeTensorMode() as mode:
        assert btt_call_key(mode.from_tensor(x), *given) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(btt_call_key(row, *given)) or linear(row))(torch.randn(3, 64))
    assert seen == [None]
    assert not selected and not btt_linear.calls


def test_a_choice_of_kernels_is_part_of_what_is_kept():
    op = dispatched_by(lambda x: len(x))(lambda x: x + 1)
    assert isinstance(op, DispatchedOp)
    tried = []
    accepts = lambda x: tried.append(len(x)) or True  # noqa: E731
    x = torch.zeros(3)
    assert torch.equal(op(x), x + 1)
    register_kernel(op, accepts=accepts, bind=lambda x: lambda x: x + 3)(lambda x: x + 2)
    for _ in range(2):
        with use_kernels("kernel"):
            assert torch.equal(op(x), x + 3)
        with use_kernels("reference"):
            assert torch.equal(op(x), x + 1)
        assert torch.equal(op(x), x + 1)
    assert tried == [3], "selected once"


def test_a_kernel_that_is_registered_later_is_found():
    op = dispatched_by(lambda x: len(x))(lambda x: x + 1)
    x = torch.zeros(3)
    with use_kernels("kernel"):
        assert torch.equal(op(x), x + 1)
        register_kernel(op, accepts=lambda x: True)(lambda x: x + 2)
        assert torch.equal(op(x), x + 2)


def test_no_more_than_a_few_thousand_selections_are_kept(monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_CALLS", 3)
    op = dispatched_by(lambda x: len(x))(lambda x: x + 1)
    with use_kernels("kernel"):
        for n in range(9):
            assert len(op(torch.zeros(n))) == n and len(op.calls) <= 3


def test_no_tensor_is_kept_alive(selected):
    linear, x = make_linear(BTT(blocks=(4, 4), rank=3), bias=True), torch.randn(1, 64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            linear(x), linear(x)
    held = [weakref.ref(t) for t in (linear, x, *linear.parameters())]
    del linear, x
    gc.collect()
    assert selected and btt_linear.calls and not any(ref() is not None for ref in held)


def test_the_bound_decoding_kernel_holds_no_tensor():
    pytest.importorskip("triton")
    from surgery.kernels.btt import bind_kernel

    for grad in (True, False):
        linear, x = make_linear(BTT(blocks=(4, 4), rank=3), bias=True), torch.randn(1, 64)
        with torch.set_grad_enabled(grad):
            run = bind_kernel(x, linear.right, linear.weight, linear.bias, 48)
        held = [weakref.ref(t) for t in (x, *linear.parameters())]
        del linear, x
        gc.collect()
        assert run is not None and not any(ref() is not None for ref in held)


def test_calls_that_copy_x_are_not_bound():
    """Rows at several distances, rows so far apart that offsets in a tile exceed 32 bits, and more rows than a program
    takes.
    """
    pytest.importorskip("triton")
    from surgery.kernels.btt import bind_kernel, plan

    linear = make_linear(BTT(blocks=(4, 4), rank=3))
    far = torch.empty(2, 2**31 // plan.MAX_TILE_TOKENS, dtype=torch.bfloat16)[:, :64]
    wide, many = torch.randn(3, 2, 70)[..., :64].transpose(0, 1), torch.randn(17, 64)
    for x in (far, wide, many):
        assert bind_kernel(x, linear.right.to(x.dtype), linear.weight.to(x.dtype), None, 48) is None
    far = far[:1]  # one row has no distance
    for x in (far, wide[:1, :1]):
        assert bind_kernel(x, linear.right.to(x.dtype), linear.weight.to(x.dtype), None, 48) is not None


# -- what may happen to a linear between two calls ---------------------------------------------------------------------
def train_step(linear):
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    linear(torch.randn(1, 64)).square().sum().backward()
    optimizer.step()


def replace_parameters(linear):
    for name, parameter in list(linear.named_parameters()):
        setattr(linear, name, nn.Parameter(2 * parameter.detach()))


def change_data(linear):
    for parameter in linear.parameters():
        parameter.data = 3 * parameter.data


def change_in_place(linear):
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.mul_(1.5)


def load_other_state(linear):
    linear.load_state_dict({name: 2 * core for name, core in linear.state_dict().items()}, assign=True)


def freeze(linear):
    linear.requires_grad_(False)


def wrap_in_parametrization(linear):
    class Doubled(nn.Module):
        def forward(self, core):
            return 2 * core

    from torch.nn.utils import parametrize

    parametrize.register_parametrization(linear, "right", Doubled())


def prune_weights(linear):
    from torch.nn.utils import prune

    prune.l1_unstructured(linear, "weight", amount=0.5)


def transpose_memory(linear):
    linear.right = nn.Parameter(linear.right.detach().mT.contiguous().mT)


CHANGES = [
    train_step, replace_parameters, change_data, change_in_place, load_other_state, freeze, wrap_in_parametrization, prune_weights,
    transpose_memory,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_a_linear_that_changes_between_calls(config, change, path):
    linear, x = make_linear(config, bias=True), torch.randn(1, 64)
    linear(x), linear(x)
    before = linear(x).detach()
    change(linear)
    y, expected = linear(x), expected_product(linear, x)
    assert torch.allclose(y, expected, atol=1e-4)
    assert y.requires_grad == (change is not freeze)
    assert torch.equal(y, before) == (change in (freeze, transpose_memory)) or torch.allclose(y, before, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_calls_of_other_dtypes_shapes_and_devices_in_turn(config, path):
    linear = make_linear(config, bias=True)
    for _ in range(2):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            linear.to(dtype)
            for shape in ((64,), (1, 64), (1, 1, 64), (5, 64), (0, 64), (2, 3, 64)):
                x = torch.randn(shape, dtype=dtype)
                y = linear(x)
                assert y.dtype == dtype and y.shape == (*shape[:-1], 48)
                assert torch.allclose(y, expected_product(linear, x), atol=0.2 if dtype == torch.bfloat16 else 1e-4)
        on_meta = copy.deepcopy(linear).to("meta")
        assert on_meta(torch.empty(1, 64, device="meta", dtype=dtype)).shape == (1, 48)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_autocast_and_grad_mode_in_turn(config, path):
    linear, x = make_linear(config), torch.randn(1, 64)
    expected = expected_product(linear, x)
    for _ in range(2):
        assert linear(x).requires_grad and linear(x).dtype == torch.float32
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = linear(x)
                assert not y.requires_grad and torch.allclose(y, expected, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
            assert y.dtype == torch.bfloat16 and torch.allclose(y.float(), expected, atol=0.1)
        linear.requires_grad_(False)
        assert not linear(x).requires_grad and linear(x.clone().requires_grad_()).requires_grad
        linear.requires_grad_(True)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_transforms_after_plain_calls(config, path):
    """torch.func, torch.compile, torch.export and torch.jit.trace of a linear that was called, and plain calls after
    them.
    """
    linear, x = make_linear(config, bias=True), torch.randn(1, 64)
    expected = expected_product(linear, x).detach()
    close = lambda y: torch.allclose(y, expected, atol=1e-5)  # noqa: E731
    assert close(linear(x))
    doubled = {name: 2 * core.detach() for name, core in linear.named_parameters()}
    other = copy.deepcopy(linear)
    other.load_state_dict(doubled)
    assert torch.allclose(torch.func.functional_call(linear, doubled, (x,)), other(x), atol=1e-5)
    assert close(torch.func.vmap(linear)(x.expand(3, 64)[:, None])[1])
    run = lambda given: torch.func.functional_call(linear, given, (x,)).sum()  # noqa: E731
    slopes = torch.func.grad(run)({name: core.detach() for name, core in linear.named_parameters()})
    wanted = torch.autograd.grad(linear(x).sum(), list(linear.parameters()))
    assert all(torch.allclose(slopes[name], b, atol=1e-4) for (name, _), b in zip(linear.named_parameters(), wanted))
    torch.compiler.reset()
    assert close(torch.compile(linear, fullgraph=True, backend="aot_eager")(x))
    assert close(torch.export.export(linear, (x,)).module()(x))
    with torch.no_grad():
        traced = torch.jit.trace(linear, x)
        assert close(traced(x)) and torch.allclose(traced(2 * x), expected_product(linear, 2 * x), atol=1e-5)
    assert close(linear(x))
    assert all(torch.tensor(key[0][0]).numel() for key in btt_linear.calls), "sizes are integers"


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_copies_and_files_of_a_linear_that_was_called(config, path):
    linear, x = make_linear(config, bias=True), torch.randn(1, 64)
    y = linear(x)
    kept = set(linear.__dict__)
    assert kept == set(make_linear(config, bias=True).__dict__), "a call leaves nothing in the module"
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    for other in (copy.deepcopy(linear), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), y)
        change_in_place(other)
        assert not torch.equal(other(x), y) and torch.equal(linear(x), y)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_quantized_linears(config, path):
    linear, x = make_linear(config, bias=True), torch.randn(1, 64)
    linear(x)
    quantized = QuantizedLinear(linear, Storage(8))
    for _ in range(2):
        assert torch.allclose(quantized(x), expected_product(quantized.float_linear(), x), atol=1e-4)
    assert not torch.equal(quantized(x), linear(x)), "rounded"
    assert torch.allclose(quantized(x), linear(x), atol=0.2)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_adapters(config, path):
    """LoRA from PEFT over a linear: the adapter adds to its output, and merging it is the structure's own affair."""
    peft = pytest.importorskip("peft")
    import surgery.modeling.lora  # noqa: F401

    model = nn.Sequential()
    model.add_module("linear", make_linear(config, bias=True))
    x = torch.randn(1, 64)
    base = model(x).detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
    y = adapted(x)
    assert y.requires_grad and not torch.allclose(y, base)
    with adapted.disable_adapter():
        assert torch.equal(adapted(x), base)
    assert torch.equal(adapted(x), y)
