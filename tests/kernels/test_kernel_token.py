"""One token through a whole linear mixer in two launches, against the reference in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from helpers.kernel_rows import DEVICE

from surgery.core.dispatch import use_kernels
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, MixerState
from surgery.mixers.linear import one_token
from surgery.mixers.linear_config import LinearAttention

SHAPE = AttentionShape(dim=40, heads=4, groups=2, key=24, value=17, scaling=24**-0.5)
MASKS = [
    "gates",
    "decay",
    "ones",
    "hierarchical",
    {"name": "hierarchical", "levels": 3, "gates": "decay"},
    {"name": "hierarchical", "levels": 2, "block": 2},
    {"name": "hierarchical", "block": 8},
]

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def mixer_of(config: LinearAttention):
    """With every parameter moved off its start."""
    torch.manual_seed(0)
    mixer = MIXERS[config](config, SHAPE).double()
    for parameter in mixer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return mixer.to(DEVICE)


def tokens(batch: int, length: int, valid_BT=None, dtype=torch.float64) -> MixerInputs:
    torch.manual_seed(length)
    sizes = [(4, length, 24), (2, length, 24), (2, length, 17), (length, 40)]
    drawn = (torch.randn(batch, *size, dtype=torch.float64).to(dtype).to(DEVICE) for size in sizes)
    return MixerInputs(*drawn, None if valid_BT is None else torch.tensor(valid_BT, device=DEVICE))


def to_float32(state: MixerState) -> MixerState:
    return MixerState(state.seen_B, {n: t.float() for n, t in state.tensors.items()}, state.max_seen)


def miss(a, b) -> float:
    assert a.shape == b.shape
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-30))


@pytest.mark.parametrize("scores, negative", [("kernel", False), ("delta", False), ("delta", True)])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@torch.no_grad()
def test_token(mask, scores, negative):
    """From nothing, from a few tokens, and where a row has none."""
    mixer = mixer_of(LinearAttention(mask=mask, scores=scores, negative_eigenvalues=negative))
    state = mixer.empty_state(3, DEVICE)
    for length, valid_BT in [(0, None), (5, [[True] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])]:
        if length:
            state = mixer.mix(tokens(3, length, valid_BT), state)[1]
        for step_B1 in ([[True], [False], [True]], None):
            inputs = tokens(3, 1, step_B1)
            right, after = one_token.reference(inputs.q_BHTK, mixer, inputs, state)
            with use_kernels("kernel"):
                given = tokens(3, 1, step_B1, torch.float32)
                assert one_token.select_kernel(given.q_BHTK, mixer.float(), given, to_float32(state))
                ours, left = mixer.mix(given, to_float32(state))
            mixer.double()
            real_B = torch.tensor([True] * 3 if step_B1 is None else [b for (b,) in step_B1], device=DEVICE)
            assert miss(ours[real_B], right[real_B]) < 2e-6
            assert torch.equal(left.seen_B, after.seen_B) and left.max_seen == after.max_seen
            assert all(miss(left.tensors[n], t) < 1e-6 for n, t in after.tensors.items() if t.numel())
            state = after


@torch.no_grad()
def test_half_precision_and_strides():
    """Of q, k, v as attention hands them over: rows of one projection's output."""
    mixer = mixer_of(LinearAttention(mask="hierarchical", scores="delta"))
    state = mixer.mix(tokens(1, 5), mixer.empty_state(1, DEVICE))[1]
    inputs = tokens(1, 1, dtype=torch.float16 if DEVICE == "cpu" else torch.bfloat16)
    inputs.q_BHTK = inputs.q_BHTK.transpose(1, 2).contiguous().transpose(1, 2)
    exact = MixerInputs(*(x.double() for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV, inputs.x_BTD)))
    right, after = one_token.reference(exact.q_BHTK, mixer, exact, state)
    with use_kernels("kernel"):
        ours, left = mixer.float().mix(inputs, to_float32(state))
    assert ours.dtype == inputs.v_BGTV.dtype and miss(ours, right) < 5e-3
    assert all(miss(left.tensors[n], t) < 1e-5 for n, t in after.tensors.items())


UNKNOWN = [
    {"levels": "strong"},
    {"levels": 3, "form": "bounded"},
    {"levels": 2, "matrix": "static"},
]  # options of log-linear masks that the kernels of a decoding step do not compute
UNKNOWN = [{"mask": {"name": "hierarchical", **options}} for options in UNKNOWN]


@pytest.mark.parametrize(
    "options", [{"features": "relu"}, {"sinks": 4}, {"convolution": 3}, {"output_gate": "head"}, *UNKNOWN], ids=str
)
@torch.no_grad()
def test_what_is_left_to_the_reference(options):
    mixer = mixer_of(LinearAttention(**options)).float()
    inputs = tokens(1, 1, dtype=torch.float32)
    state = mixer.empty_state(1, DEVICE)
    with use_kernels("kernel"):
        assert one_token.select_kernel(inputs.q_BHTK, mixer, inputs, state) is None


CALLS = [
    *((UNKNOWN[0], more) for more in ({}, {"scores": "delta"}, {"window": 3})),
    *((mask, {}) for mask in UNKNOWN[1:]),
]


@pytest.mark.parametrize("options, more", CALLS, ids=str)
@torch.no_grad()
def test_masks_without_a_kernel_give_the_definition(options, more):
    """Prefill and steps with kernels requested, against the quadratic definition in float64."""
    mixer = mixer_of(LinearAttention(**options, **more))
    whole = tokens(1, 5)
    right = mixer.dense(whole)
    given = MixerInputs(*(x.float() for x in (whole.q_BHTK, whole.k_BGTK, whole.v_BGTV, whole.x_BTD)))
    mixer, state, outs = mixer.float(), mixer.float().empty_state(1, DEVICE), []
    with use_kernels("kernel"):
        for a, b in ((0, 3), (3, 4), (4, 5)):
            heads = (x[:, :, a:b] for x in (given.q_BHTK, given.k_BGTK, given.v_BGTV))
            piece = MixerInputs(*heads, given.x_BTD[:, a:b])
            out, state = mixer.mix(piece, state)
            assert b - a > 1 or one_token.select_kernel(piece.q_BHTK, mixer, piece, state) is None
            outs.append(out)
        assert miss(mixer.mix(given)[0], right) < 2e-6
    assert miss(torch.cat(outs, 2), right) < 2e-6


@torch.no_grad()
@pytest.mark.parametrize("change", ["none", "hook", "offload", "lora"])
def test_fused_step_declines_submodules_that_must_be_called(change):
    import accelerate
    import peft

    from surgery.kernels.ssd.fused_token import reads_plain_linears

    mixer = mixer_of(LinearAttention(mask="hierarchical", scores="delta")).float()
    if change == "hook":
        mixer.beta_proj.register_forward_hook(lambda module, args, out: None)
    if change == "offload":
        accelerate.cpu_offload(mixer, execution_device=torch.device(DEVICE))
    if change == "lora":
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["level"]), mixer)
    assert reads_plain_linears(mixer) is (change == "none")
