"""One token through a linear mixer with a window, by the kernels against the reference in float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from helpers.kernel_rows import CUDA, DEVICE, patch_bfloat16_products
from helpers.slow import slow_where
from helpers.small import tiny_inputs
from helpers.small_mixers import random_model_with_mixers

from surgery.core.dispatch import load_kernels, use_kernels
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, MixerState, mixer_config
from surgery.mixers.linear import one_token
from surgery.mixers.linear_config import LinearAttention

SHAPE = AttentionShape(dim=40, heads=4, groups=2, key=24, value=17, scaling=24**-0.5, rotary=18)
TREE = {"name": "hierarchical", "levels": 3}
BLOCKS = {"name": "hierarchical", "levels": 3, "block": 4}
CONFIGS = [
    {"window": 5, "sinks": 2},
    {"window": 5, "sinks": 2, "mask": "decay", "scores": "delta"},
    {"window": 3, "mask": "hierarchical"},
    {"window": 18, "sinks": 1, "mask": TREE, "scores": "delta"},
    {"window": 5, "sinks": 2, "scores": "delta", "negative_eigenvalues": True},
    {"window": 1, "sinks": 3, "mask": "ones", "rope": "drop"},
    {"window": 4, "sinks": 1, "scores": "delta", "mask": "hierarchical", "states": "per_head"},
    {"window": 4, "sinks": 2, "rope": "window", "states": "per_head"},
    {"window": 4, "sinks": 2, "rope": "both", "scores": "delta", "mask": TREE},
    {"window": 3, "sinks": 2, "mask": "ones", "features": "hedgehog", "normalise": True},
    {"window": 3, "features": "hedgehog", "normalise": True, "mask": "hierarchical", "states": "per_head"},
    {"window": 2, "sinks": 1, "features": "hedgehog", "scores": "delta", "rope": "both"},
    {"window": 3, "scores": "delta", "mask": BLOCKS},
    {"window": 3, "sinks": 1, "features": "hedgehog", "normalise": True, "mask": BLOCKS},
    {"window": 1, "mask": {"name": "hierarchical", "block": 64}, "states": "per_head"},
    {
        "window": 3,
        "sinks": 1,
        "mask": "hierarchical",
        "convolution": 3,
        "output_gate": "value",
        "norm": "rms",
        "scores": "delta",
    },
]
PROMPT = [[True] * 11, [False] * 8 + [True] * 3, [False] * 3 + [True] * 8]  # rows of different lengths
STEPS = [None, [[True], [False], [True]], None, [[True], [True], [False]], None]

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def mixer_of(config: LinearAttention, shape: AttentionShape = SHAPE):
    """Return a mixer in float64 whose parameters differ from their initial values."""
    torch.manual_seed(0)
    mixer = MIXERS[config](config, shape).double()
    for parameter in mixer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return mixer.to(DEVICE)


def tokens(
    length: int, valid_BT=None, dtype=torch.float64, *, seed: int = 0, shape=SHAPE, batch: int = 3
) -> MixerInputs:
    torch.manual_seed(seed)
    sizes = [(shape.heads, length, shape.key), (shape.groups, length, shape.key), (shape.groups, length, shape.value)]
    drawn = [torch.randn(batch, *size).to(dtype).to(DEVICE) for size in (*sizes, (length, shape.dim))]
    angle_BTR = torch.randn(batch, length, shape.rotary // 2).repeat(1, 1, 2).to(DEVICE)
    valid_BT = None if valid_BT is None else torch.tensor(valid_BT, device=DEVICE)
    return MixerInputs(*drawn, valid_BT, rope=(angle_BTR.cos().to(dtype), angle_BTR.sin().to(dtype)))


def widen(inputs: MixerInputs) -> MixerInputs:
    """Return the inputs in float64."""
    wide = {n: t.double() for n, t in vars(inputs).items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return replace(inputs, **wide, rope=tuple(t.double() for t in inputs.rope))


def rounded(state: MixerState, dtype: torch.dtype) -> MixerState:
    """Return the state in the dtypes that a mixer of that dtype has."""
    waits = ("ring.k", "ring.v", "ring.linear_k", "sink.k", "sink.v")
    tensors = {n: t.to(dtype if n in waits else torch.float32) for n, t in state.tensors.items()}
    return replace(state, tensors=tensors)


def miss(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.isfinite().all()
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def check_steps(mixer, state: MixerState, dtype: torch.dtype, steps, tolerance: float, donate: bool, **sizes) -> None:
    """Compare steps of the kernels with the reference in float64, from the same rounded numbers.

    Both continue from their own state.
    """
    ours = rounded(state, dtype)
    exact = MixerState(ours.seen_B, {n: t.double() for n, t in ours.tensors.items()}, ours.max_seen)
    narrow = copy.deepcopy(mixer).float()
    for i, valid_BT in enumerate(steps):
        given = tokens(1, valid_BT, dtype, seed=i + 1, **sizes)
        right, exact = one_token.reference(given.q_BHTK.double(), mixer, widen(given), exact)
        before = {n: t.clone() for n, t in ours.tensors.items()}
        past = ours.donate() if donate else ours
        with use_kernels("kernel"):
            assert one_token.select_kernel(given.q_BHTK, narrow, given, past)
            out, after = narrow.mix(given, past)
        if not donate:
            assert all(torch.equal(t, ours.tensors[n]) for n, t in before.items())
        else:
            assert all(after.tensors[n] is t for n, t in ours.tensors.items() if n.startswith(("ring.", "sink.")))
        assert out.dtype == dtype and miss(out, right) < tolerance
        assert torch.equal(after.seen_B, exact.seen_B) and after.max_seen == exact.max_seen and not after.donated
        for name, t in exact.tensors.items():
            assert miss(after.tensors[name], t) < tolerance, name
        ours = after


# Each part of these is in one of the others.
LIKE_OTHERS = [CONFIGS[i] for i in (6, 8, 13)]


@pytest.mark.parametrize("options", slow_where(lambda options: options in LIKE_OTHERS, CONFIGS), ids=str)
@torch.no_grad()
def test_steps_behind_a_prompt(options):
    """Past the sinks, through the window's end and powers of two, with rows of different lengths and steps without a
    token in some of them. Every other config's states are donated; the others stay as they are."""
    mixer = mixer_of(LinearAttention(**options))
    state = mixer.mix(tokens(11, PROMPT), mixer.empty_state(3, DEVICE))[1]
    check_steps(mixer, state, torch.float32, STEPS, 5e-6, CONFIGS.index(options) % 2 == 1)


@pytest.mark.parametrize("head_dim", [80, 128, 256])
@torch.no_grad()
def test_many_features(head_dim):
    """Four features of each head dim, as in the recipes hybrid-25 and log-linear."""
    shape = AttentionShape(
        dim=40, heads=2, groups=1, key=head_dim, value=head_dim, scaling=head_dim**-0.5, rotary=head_dim
    )
    options = {"window": 4, "sinks": 1, "rope": "both", "features": "hedgehog", "scores": "delta", "mask": TREE}
    mixer = mixer_of(LinearAttention(**options), shape)
    state = mixer.mix(tokens(11, shape=shape, batch=1), mixer.empty_state(1, DEVICE))[1]
    check_steps(mixer, state, torch.float32, [None] * 2, 5e-6, True, shape=shape, batch=1)


@torch.no_grad()
def test_steps_from_nothing():
    mixer = mixer_of(LinearAttention(mask=TREE, scores="delta", window=3, sinks=2))
    check_steps(mixer, mixer.empty_state(1, DEVICE), torch.float32, [None] * 9, 5e-6, True, batch=1)


@torch.no_grad()
def test_blocks_from_nothing():
    """Through the ends of four blocks of two tokens, which merge as leaves of the tree."""
    mixer = mixer_of(LinearAttention(mask={**TREE, "block": 2}, scores="delta", window=1))
    check_steps(mixer, mixer.empty_state(1, DEVICE), torch.float32, [None] * 10, 5e-6, True, batch=1)


@pytest.mark.parametrize("options", [CONFIGS[3], CONFIGS[6], CONFIGS[8]], ids=str)
@torch.no_grad()
def test_half_precision(options):
    dtype = torch.bfloat16 if CUDA else torch.float16
    mixer = mixer_of(LinearAttention(**options))
    state = mixer.mix(tokens(11, PROMPT), mixer.empty_state(3, DEVICE))[1]
    check_steps(mixer, state, dtype, STEPS[:2], 1e-2, True)


@torch.no_grad()
def test_bfloat16_of_real_heads(monkeypatch):
    """Grouped queries, 64 dims, window 64 and a soft cap, with strides as attention hands heads over."""
    if not CUDA:
        patch_bfloat16_products(monkeypatch)
    shape = AttentionShape(dim=64, heads=8, groups=2, key=64, value=64, scaling=0.125, softcap=20.0)
    mixer = mixer_of(LinearAttention(mask="hierarchical", scores="delta", window=64, sinks=4), shape)
    state = mixer.mix(tokens(75, shape=shape, batch=1), mixer.empty_state(1, DEVICE))[1]
    check_steps(mixer, state, torch.bfloat16, [None] * 2, 1e-2, True, shape=shape, batch=1)


@pytest.mark.parametrize(
    "options, launches",
    [
        ({"mask": "hierarchical", "scores": "delta"}, 2),
        ({}, 2),
        ({"rope": "window"}, 3),
        ({"rope": "both"}, 3),
        ({"features": "hedgehog", "mask": "ones", "normalise": True}, 3),
        ({"features": "hedgehog", "rope": "both", "mask": "hierarchical", "scores": "delta"}, 3),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_step_is_two_launches(options, launches, monkeypatch):
    """And no operation of torch, but for new memory and views: with RoPE of its own or features, a third launch."""
    load_kernels()
    from surgery.kernels import window_step
    from surgery.kernels.ssd import fused_token
    from surgery.kernels.window_step import prepare

    counted: list[str] = []

    class AnyGrid(SimpleNamespace):
        def __getitem__(self, grid):
            return lambda *_, **__: counted.append("launch")

    monkeypatch.setattr(fused_token, "signals", AnyGrid())
    for module in (window_step, prepare):
        monkeypatch.setattr(module, "_launch", lambda *_: lambda *_: counted.append("launch"))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not (function.is_view or str(function).startswith(("aten.empty", "aten.new_empty", "aten.split"))):
                counted.append(str(function))
            return function(*args, **(kwargs or {}))

    mixer = mixer_of(LinearAttention(window=4, sinks=1, **options)).float()
    given = tokens(1, dtype=torch.float32)
    state = rounded(mixer.mix(widen(tokens(9)), mixer.empty_state(3, DEVICE))[1], torch.float32)
    with Operations():
        window_step.one_token_with_window(given.q_BHTK, mixer, given, state.donate())
    assert counted == ["launch"] * launches


@torch.no_grad()
def test_padding_reaches_nothing():
    """NaN in a row without a token leaves its state as it is and gives zeros."""
    mixer = mixer_of(LinearAttention(window=3, sinks=1, mask="hierarchical", scores="delta"))
    state = rounded(mixer.mix(tokens(9), mixer.empty_state(3, DEVICE))[1], torch.float32)
    given = tokens(1, [[True], [False], [True]], torch.float32, seed=1)
    for t in (given.q_BHTK, given.k_BGTK, given.v_BGTV, given.x_BTD):
        t[1] = torch.nan
    with use_kernels("kernel"):
        out, after = mixer.float().mix(given, state)
    assert out.isfinite().all() and not out[1].any()
    for name, t in state.tensors.items():
        assert torch.equal(after.tensors[name][1], t[1]), name


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0, "sinks": 2},
        {"window": 3, "mask": "toeplitz"},
        {"window": 3, "mask": "toeplitz_blocks"},
    ],
    ids=str,
)
@torch.no_grad()
def test_what_is_left_to_the_reference(options):
    mixer = mixer_of(LinearAttention(**options)).float()
    given, state = tokens(1, dtype=torch.float32), rounded(mixer.empty_state(3, DEVICE), torch.float32)
    with use_kernels("kernel"):
        assert one_token.select_kernel(given.q_BHTK, mixer, given, state) is None


@torch.no_grad()
def test_what_a_call_may_not_be():
    mixer = mixer_of(LinearAttention(window=3)).float()
    given, state = tokens(1, dtype=torch.float32), rounded(mixer.empty_state(3, DEVICE), torch.float32)
    half = replace(given, k_BGTK=given.k_BGTK.half())
    wide = replace(state, tensors={n: t.double() for n, t in state.tensors.items()})
    with use_kernels("kernel"):
        assert one_token.select_kernel(given.q_BHTK, mixer, given, state)
        for inputs, past in ((half, state), (given, wide), (given, replace(state, max_seen=None))):
            assert one_token.select_kernel(inputs.q_BHTK, mixer, inputs, past) is None
        with torch.enable_grad():
            assert one_token.select_kernel(given.q_BHTK, mixer, given, state) is None
        mixer.mask.rate.register_forward_hook(lambda module, args, out: None)
        assert one_token.select_kernel(given.q_BHTK, mixer, given, state) is None


@torch.no_grad()
def test_the_reference_runs_until_the_kernels_are_measured(monkeypatch):
    from surgery.kernels import tuning, window_step

    load_kernels()
    mixer, given = mixer_of(LinearAttention(window=3)).float(), tokens(1, dtype=torch.float32)
    monkeypatch.setattr(tuning, "device_rows", lambda place: [])
    tuning.fastest_measured.cache_clear()
    assert not window_step._is_fastest_step("window gates")(given.q_BHTK, mixer)
    row = {"op": "window gates", "pass": "step", "sizes": {"lanes": 12, "window": 3}, "kernel": 0.1, "reference": 0.3}
    monkeypatch.setattr(tuning, "device_rows", lambda place: [row])
    tuning.fastest_measured.cache_clear()
    assert window_step._is_fastest_step("window gates")(given.q_BHTK, mixer)
    tuning.fastest_measured.cache_clear()


GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def model():
    """A model of two layers whose windows are full after the prompt."""
    torch.manual_seed(0)
    config = {"mixer": "linear", "scores": "delta", "window": 5, "sinks": 2}
    return random_model_with_mixers("llama", mixer_config(config)).eval().to(DEVICE)


@pytest.fixture
def steps(monkeypatch):
    """Let the kernels compute the steps, and only them: under the interpreter prompts would take long.

    Counts the steps.
    """
    load_kernels()
    from surgery.kernels import window_step
    from surgery.mixers import linear

    taken = []

    def step(*call):
        if not window_step.accepts(*call):
            return one_token.reference(*call)
        taken.append(call[-1].donated)
        return window_step.one_token_with_window(*call)

    monkeypatch.setattr(linear, "one_token", step)
    return taken


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"cache_implementation": "static"}],
    ids=["beams", "prompt lookup", "static"],
)
@torch.no_grad()
def test_generated_tokens(options, model, steps, monkeypatch):
    """In place or by value: left padding, beams, tokens that are taken back, and a captured step, which is a function
    on a CPU.
    """
    from surgery.mixers import linear
    from surgery.modeling import cuda_graph

    if not CUDA:
        monkeypatch.setattr(cuda_graph, "record_graph", lambda step: step)
        monkeypatch.setattr(cuda_graph, "is_on_one_gpu", lambda model: True)
    rows = 2 if "cache_implementation" in options else 1
    ids = tiny_inputs("llama", rows, 9, 3)["input_ids"].to(DEVICE)
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompt["attention_mask"][0, : 3 * (rows - 1)] = 0
    ours = model.generate(**prompt, **GREEDY, **options)
    assert steps and all(donated is ("prompt_lookup_num_tokens" not in options) for donated in steps)
    monkeypatch.setattr(linear, "one_token", one_token)
    assert torch.equal(ours, model.generate(**prompt, **GREEDY, **options))


@torch.no_grad()
def test_turns_of_a_chat(model, steps):
    """Single tokens by the kernels, prompts by the reference, on one cache; a copy of the cache goes its own way."""
    from transformers import DynamicCache

    ids, turns = tiny_inputs("llama", 1, 20, 3)["input_ids"].to(DEVICE), [9, 10, 11, 16, 17, 20]
    cache, outs, twin = DynamicCache(config=model.config), [], None
    for start, stop in zip([0, *turns], turns):
        if start == 11:
            twin = copy.deepcopy(cache)
        outs.append(model(ids[:, start:stop], past_key_values=cache).logits)
    again = [model(ids[:, i : i + 1], past_key_values=twin).logits for i in (11, 12)]
    right = model(ids, use_cache=False).logits
    assert miss(torch.cat(outs, 1), right) < 1e-5
    assert miss(torch.cat(again, 1), right[:, 11:13]) < 1e-5
    assert len(steps) == 2 * (3 + 2)
