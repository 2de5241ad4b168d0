"""Kernels of other packages: layouts, the check against the reference, the choice, packages that do not work.

The packages' modules are stand-ins that compute their documented functions token by token on the CPU.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import patch_bfloat16_products

from surgery.core.dispatch import use_kernels, without_timed_choices
from surgery.core.errors import SurgeryError
from surgery.kernels.gated_delta import GATED_DELTA_OP, gated_delta
from surgery.kernels.packages import contest
from surgery.kernels.packages.adapters import GATED_DELTA_KERNELS, SSD_KERNELS
from surgery.kernels.packages.contest import CallClass, check_kernel, random_call, reference_outputs, results
from surgery.kernels.ssd import ssd

pytestmark = pytest.mark.usefixtures("loops_of_tensors")
FLASH_QLA, FLA_DELTA, FLASHINFER = GATED_DELTA_KERNELS
(FLA_SSD,) = SSD_KERNELS
KERNELS = [FLASH_QLA, FLA_DELTA, FLASHINFER, FLA_SSD]


class Clock:
    """Milliseconds that stand-ins say they took; our kernel takes 1."""

    now = 0.0

    def measure(self, run):
        before = self.now
        run()
        return self.now - before or 1.0


def recurrence(q, k, v, log_gates, beta, scale, first, ends):
    """(out (B, T, H, V), states (R, H, K, V)) of tokens before heads, by the formula of the delta rule or of SSD."""
    heads = v.shape[2]
    q, k = (x.float().repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    v, log_gates = v.float(), log_gates.float()
    borders = [(b, 0, v.shape[1]) for b in range(len(v))]
    if ends is not None:
        borders = [(0, start, end) for start, end in zip(ends.tolist(), ends.tolist()[1:])]
    outs, states = [], []
    for r, (b, start, end) in enumerate(borders):
        state = torch.zeros(heads, k.shape[-1], v.shape[-1]) if first is None else first[r].float()
        for t in range(start, end):
            state = log_gates[b, t].exp()[:, None, None] * state
            write = v[b, t]
            if beta is not None:
                write = beta[b, t, :, None] * (write - torch.einsum("hk,hkv->hv", k[b, t], state))
            state = state + k[b, t].unsqueeze(-1) * write.unsqueeze(-2)
            outs.append(scale * torch.einsum("hk,hkv->hv", q[b, t], state))
        states.append(state)
    return torch.stack(outs).unflatten(0, v.shape[:2]), torch.stack(states)


def like_fla(clock, milliseconds, factor=1.0, fails_backward=False):
    """Stand-in of chunk_gated_delta_rule of fla and flash_qla; without beta, of chunk_simple_gla."""

    def chunk(q, k, v, g, beta=None, *, scale, initial_state, output_final_state, cu_seqlens):
        assert output_final_state and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert q.dtype == k.dtype == v.dtype and g.dtype == torch.float32
        assert q.shape == k.shape and v.shape[2] % q.shape[2] == 0
        assert beta is not None or q.shape[2] == v.shape[2]  # simple GLA has no heads that share queries
        clock.now += milliseconds
        out, last = recurrence(q, k, v, g, beta, scale, initial_state, cu_seqlens)
        if fails_backward and torch.is_grad_enabled():
            out.register_hook(refuse)
        return (factor * out).to(q.dtype), last

    def refuse(_grad):
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs\nproduces incorrect results")

    return chunk


def like_flashinfer(clock, milliseconds):
    """Stand-in of flashinfer's chunk_gated_delta_rule: gates themselves, one packed row, states (R, H, V, K)."""

    def chunk(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        assert q.dim() == 3 and g.shape == beta.shape == v.shape[:2] and output_final_state
        assert not torch.is_grad_enabled()
        clock.now += milliseconds
        first = None if initial_state is None else initial_state.mT
        rows = (x.unsqueeze(0) for x in (q, k, v, g.log(), beta))
        out, last = recurrence(*rows, scale, first, cu_seqlens)
        return out[0].to(q.dtype), last.mT.contiguous()

    return chunk


@pytest.fixture
def clock(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip(
            "stand-ins and our kernels run on the CPU here, which takes Triton's interpreter (TRITON_INTERPRET=1)"
        )
    clock = Clock()
    monkeypatch.setattr(contest, "runs_on", lambda x: True)
    monkeypatch.setattr(contest, "measure", clock.measure)
    for package in ("fla", "flash_qla", "flashinfer"):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
    contest.clear()
    yield clock
    contest.clear()


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a module with the given function into sys.modules."""

    def put(kernel, function):
        parts = kernel.module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        called = "chunk_simple_gla" if kernel is FLA_SSD else "chunk_gated_delta_rule"
        monkeypatch.setattr(sys.modules[kernel.module], called, function, raising=False)
        contest.clear()

    return put


def call_class(kernel, pass_="forward", *, shared=False, J=1, first=True, packed=False):
    size = 128 if kernel in (FLASH_QLA, FLASHINFER) else 16
    dtype = torch.bfloat16 if size == 128 else torch.float32
    delta = kernel is not FLA_SSD
    return CallClass("op", pass_, dtype, torch.device("cpu"), 2, J, size, size, shared, delta, first, packed)


def stand_in(kernel, clock, milliseconds=0.5):
    return like_flashinfer(clock, milliseconds) if kernel is FLASHINFER else like_fla(clock, milliseconds)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared, J, first", [(False, 1, True), (True, 1, False), (False, 3, True)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.module)
def test_adapters_agree_with_the_reference(kernel, shared, J, first, packed, clock, install, monkeypatch):
    """Outputs, states and gradients, with the documented layouts of each package."""
    monkeypatch.setattr(contest, "CHECK_TOKENS", 71)
    install(kernel, stand_in(kernel, clock))
    for pass_ in ("forward", "backward") if kernel.has_backward else ("forward",):
        of = call_class(kernel, pass_, shared=shared, J=J, first=first, packed=packed)
        assert check_kernel(kernel, of) is None


def draw(dtype=torch.float32, K=16, T=37, beta=True):
    of = CallClass("", "forward", dtype, torch.device("cpu"), 2, 1, K, K, False, beta, True, False)
    rows, _ = random_call(of)
    short = (rows.q[:, :, :, :T], *(None if x is None else x[:, :, :T] for x in rows[1:5]), rows.first)
    return [x if x is None else x.clone().requires_grad_() for x in short]


def run_op(leaves, delta=True):
    q, k, v, beta, gates, first = leaves
    out, last = gated_delta(q, k, v, beta, gates, first) if delta else ssd(q, k, v, gates, first)
    grads = torch.autograd.grad((out.float().square().sum() + last.sum()), [x for x in leaves if x is not None])
    return out, last, *grads


@pytest.mark.parametrize("delta", [True, False], ids=["gated delta rule", "SSD"])
def test_the_op_runs_the_fastest_package_forward_and_backward(delta, clock, install):
    kernel = FLA_DELTA if delta else FLA_SSD
    leaves = draw(beta=delta)
    with use_kernels("kernel"):
        ours = run_op(leaves, delta)
    assert results() == []
    install(kernel, like_fla(clock, 0.25))
    theirs = run_op(leaves, delta)
    assert [(r.pass_, r.chosen, r.milliseconds) for r in results()] == [
        (pass_, "fla", {"ours": 1.0, "fla": 0.25}) for pass_ in ("forward", "backward")
    ]
    for a, b in zip(ours, theirs):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)
    before = clock.now
    run_op(leaves, delta)
    assert len(results()) == 2 and clock.now == before + 2 * 0.25  # the choices hold: one run in each pass


def test_inside_a_compiled_model_the_node_makes_the_same_choice(clock, install):
    install(FLA_DELTA, like_fla(clock, 0.25))
    leaves = [x.detach() for x in draw()]
    out, last = GATED_DELTA_OP.node(*leaves, None, 64)
    assert [r.chosen for r in results()] == ["fla"] and out.permute(0, 3, 1, 2, 4).is_contiguous()
    want, state = gated_delta(*leaves)
    assert torch.equal(out, want) and torch.equal(last, state)


def choose_once(clock, delta=True):
    leaves = draw(beta=delta)
    run_op(leaves, delta)
    return {result.pass_: result for result in results()}


def test_a_slower_package_is_not_chosen(clock, install):
    install(FLA_DELTA, like_fla(clock, 3.0))
    made = choose_once(clock)
    assert [made[p].chosen for p in ("forward", "backward")] == ["ours", "ours"]
    assert made["forward"].milliseconds == {"ours": 1.0, "fla": 3.0}


def test_a_wrong_package_is_left_out_with_its_error(clock, install):
    install(FLA_DELTA, like_fla(clock, 0.1, factor=1.02))
    made = choose_once(clock)
    assert made["forward"].chosen == "ours" and "fla" not in made["forward"].milliseconds
    assert made["forward"].left_out["fla"] == "output has a relative error of 0.02, above 0.005"
    assert "left out: output has" in str(made["forward"])


def test_inputs_that_are_not_finite_decide_nothing(clock, install):
    install(FLA_DELTA, like_fla(clock, 0.1))
    leaves = [x.detach() for x in draw()]
    gated_delta(leaves[0], leaves[1], leaves[2] * float("nan"), *leaves[3:])
    assert results() == []
    gated_delta(*leaves)
    assert results()[0].chosen == "fla"


def test_a_package_that_is_wrong_at_the_size_of_the_call_only_is_left_out(clock, install):
    right, wrong = like_fla(clock, 0.1), like_fla(clock, 0.1, factor=1.1)
    install(
        FLA_DELTA,
        lambda q, *args, **kwargs: (right if q.shape[1] == contest.CHECK_TOKENS else wrong)(q, *args, **kwargs),
    )
    made = choose_once(clock)
    assert made["forward"].chosen == "ours"
    assert made["forward"].left_out["fla"].startswith("at this size output has a relative error of 0.1")


def test_a_package_whose_backward_raises_still_runs_forward(clock, install):
    install(FLA_DELTA, like_fla(clock, 0.1, fails_backward=True))
    made = choose_once(clock)
    assert made["forward"].chosen == "fla" and made["backward"].chosen == "ours"
    assert made["backward"].left_out["fla"] == (
        "RuntimeError: Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results"
    )


def test_the_fastest_of_several_packages_is_chosen(clock, install, monkeypatch):
    patch_bfloat16_products(monkeypatch)
    monkeypatch.setattr(contest, "CHECK_TOKENS", 20)
    install(FLA_DELTA, like_fla(clock, 0.5))
    install(FLASH_QLA, like_fla(clock, 0.4))
    install(FLASHINFER, like_flashinfer(clock, 0.3))
    leaves = draw(torch.bfloat16, K=128, T=9)
    run_op(leaves)
    assert [r.chosen for r in results()] == ["flashinfer", "flash-qla"]
    assert results()[1].left_out == {"flashinfer": "it has no backward"}
    run_op(draw())
    reason = "it takes bfloat16 and float16 (got torch.float32)"
    assert results()[2].left_out == {"flash-qla": reason, "flashinfer": reason}


def test_a_package_that_fails_at_import_gives_one_warning(clock, tmp_path, monkeypatch, caplog):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING):
        made = choose_once(clock)
        run_op(draw(beta=False), delta=False)
    reason = "import fla.ops.gated_delta_rule: OSError: undefined symbol: _ZN3c10"
    assert [record.getMessage() for record in caplog.records] == [f"kernels of fla are not used: {reason}"]
    assert made["forward"].chosen == "ours" and made["forward"].left_out["fla"] == reason


@pytest.mark.parametrize("size", ["check", "call"])
def test_a_package_that_breaks_the_gpu_is_an_error(size, clock, install, monkeypatch):
    """After an illegal address every later call fails, so that the package must not be left out in silence."""

    def breaks(q, *args, **kwargs):
        if size == "check" or q.shape[1] != contest.CHECK_TOKENS:
            monkeypatch.setattr(contest, "wait_for", fails)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return like_fla(clock, 0.1)(q, *args, **kwargs)

    def fails(_device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    install(FLA_DELTA, breaks)
    message = (
        r"a kernel of fla \(fla.ops.gated_delta_rule\) stopped cpu .* SURGERY_KERNEL_PACKAGES=flash-qla,flashinfer"
    )
    with pytest.raises(SurgeryError, match=message):
        choose_once(clock)
    assert results() == []


def test_inputs_of_the_check_do_not_depend_on_the_defaults_of_torch():
    of = call_class(FLA_DELTA, "backward")
    want = random_call(of)[0]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # as a model that is made on a GPU by default
            made = random_call(of)[0]
            directions = contest._random_directions(made, None)
    finally:
        torch.set_default_dtype(dtype)
    assert all(torch.equal(x, y) for x, y in zip(made, want))
    assert all(torch.equal(x, y) for x, y in zip(directions, contest._random_directions(want, None)))


def test_names_of_packages_restrict_and_force_the_choice(clock, install, monkeypatch):
    install(FLA_DELTA, like_fla(clock, 5.0))
    rows = random_call(call_class(FLA_DELTA))[0]
    leaves = [x.detach()[..., :9, :] if x is not None and x.dim() > 3 else x for x in (rows.q, rows.k, rows.v)]
    short = (*leaves, rows.beta[..., :9], rows.gates[..., :9], rows.first)
    with use_kernels("fla"):
        gated_delta(*short)
    assert results()[-1].chosen == "fla" and results()[-1].milliseconds == {}
    with use_kernels("flashinfer"):  # not installed
        gated_delta(*short)
    assert len(results()) == 1
    monkeypatch.setenv(contest.VARIABLE, "none")
    contest.clear()
    gated_delta(*short)
    assert results() == []
    monkeypatch.delenv(contest.VARIABLE)
    contest.clear()
    with without_timed_choices():  # as in a conversion
        gated_delta(*short)
        assert results() == []
        with use_kernels("fla"):
            gated_delta(*short)
    assert results()[-1].chosen == "fla"
    monkeypatch.setenv(contest.VARIABLE, "flash-qla, fal")
    contest.clear()
    with pytest.raises(SurgeryError, match=r"SURGERY_KERNEL_PACKAGES='flash-qla, fal' names 'fal', which is not one"):
        gated_delta(*short)


def test_reference_of_packed_sequences_is_that_of_each(clock):
    rows, ends = random_call(call_class(FLA_DELTA, packed=True))
    out, last = reference_outputs(rows, ends)
    second = slice(int(ends[1]), int(ends[2]))
    alone = type(rows)(
        rows.q[:, :, :, second],
        *(x[:, :, second] for x in (rows.k, rows.v, rows.beta, rows.gates)),
        rows.first[1:],
    )
    want, state = reference_outputs(alone, None)
    torch.testing.assert_close(out[:, :, :, second], want)
    torch.testing.assert_close(last[1:], state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", [1000, 8192])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("delta", [True, False], ids=["gated delta rule", "SSD"])
def test_installed_packages_on_a_gpu(delta, shared, length, monkeypatch):
    """Whatever is chosen and forced agrees with our kernel; pytest -rP shows choices, times and reasons."""
    monkeypatch.setattr(contest, "CHECK_TOKENS", length)  # of the inputs below, after all checks
    of = CallClass("", "forward", torch.bfloat16, torch.device("cuda"), 8, 1, 128, 128, shared, delta, True, False)
    rows, _ = random_call(of)
    monkeypatch.undo()
    contest.clear()
    leaves = [x if x is None else x.detach().requires_grad_() for x in rows]
    with use_kernels("kernel"):
        ours = run_op(leaves, delta)
    for choice in ("measured", "flash-qla", "fla", "flashinfer"):
        with use_kernels(choice):
            for a, b in zip(ours, run_op(leaves, delta)):
                assert float((a - b).norm() / a.norm()) < 0.08, (choice, [str(result) for result in results()])
    print("\n".join(map(str, results())) or "no package of the extra gpu-fast is installed")


def test_importing_the_kernels_imports_no_package():
    import subprocess

    code = (
        "import sys; from surgery.core.dispatch import load_kernels; load_kernels(); "
        "print([m for m in ('fla', 'flash_qla', 'flashinfer') if m in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"
