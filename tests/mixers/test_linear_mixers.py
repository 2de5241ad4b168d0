"""Linear mixers: laws over masks x feature maps x score rules, in float64, and their configs and errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.small_mixers import random_model, random_model_with_mixers
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerInputs, MixerState, mixer_config
from surgery.mixers.features.base import FEATURES
from surgery.mixers.linear import LinearMixer, l2_normalize
from surgery.mixers.linear_config import BIDIRECTIONAL_MASKS, SIGNED_MASKS, LinearAttention
from surgery.mixers.masks.base import MASKS
from surgery.mixers.projections import Float32Linear

SHAPE = AttentionShape(dim=12, heads=4, groups=2, key=6, value=5, scaling=6**-0.5, rotary=6)
ENCODER = replace(SHAPE, causal=False)
SMALL = {  # options at which 20 tokens are many
    "toeplitz": {"length": 18},
    "banded": {"width": 4, "dilation": 2},
    "block_diagonal": {"block": 5},
    "input_toeplitz": {"length": 18},
    "fourier": {"period": 50},
    "toeplitz_blocks": {"block": 3, "components": 2},
    "blocks": {"block": 3, "count": 14},
    "hierarchical": {"levels": 5},
    "cosformer": {"length": 40},
    "favor": {"features": 16},
    "lara": {"features": 7},
    "rfa": {"features": 9},
}
MASK_OPTIONS = (
    "block",
    "admissibility",
    "form",
    "matrix",
    "rank",
    "levels",
    "gates",
)  # options of masks that a config of the tests gives beside the mixer's
MASK_NAMES, FEATURE_NAMES = MASKS.names(), FEATURES.names()
HYBRIDS = [
    {"window": 5},
    {"window": 5, "sinks": 2, "mask": "hierarchical"},
    {"window": 4, "sinks": 3, "features": "hedgehog", "normalise": True},
    {"window": 1, "sinks": 2, "features": "cosformer", "normalise": True, "mask": "toeplitz_blocks"},
    {"sinks": 3, "mask": "decay"},
    {"window": 6, "scores": "delta"},
    {"window": 3, "sinks": 1, "scores": "delta", "mask": "hierarchical"},
    {"window": 30, "sinks": 2, "mask": "ones"},
    {"convolution": 4, "output_gate": "head", "norm": "rms"},
    {"convolution": 3, "output_gate": "value", "window": 2, "sinks": 1, "scores": "delta", "norm": "rms"},
    {"window": 4, "sinks": 2, "scores": "delta", "states": "per_head"},
    {"states": "per_head", "mask": "hierarchical", "features": "elu"},
    {"window": 5, "sinks": 1, "rope": "window", "mask": "hierarchical"},
    {"window": 4, "rope": "both", "scores": "delta", "features": "hedgehog", "states": "per_head"},
    {"sinks": 2, "rope": "both", "features": "hedgehog", "normalise": True, "mask": "decay"},
    {"window": 3, "rope": "window", "convolution": 2, "mask": "toeplitz_blocks"},
    {"window": 3, "sinks": 1, "scores": "delta", "mask": "hierarchical", "block": 4},
    {"mask": "hierarchical", "block": 2, "features": "elu"},
    {"mask": "hierarchical", "admissibility": "strong", "scores": "delta", "window": 3, "sinks": 1},
    {"mask": "hierarchical", "admissibility": "strong", "features": "elu", "normalise": True},
    {"mask": "hierarchical", "block": 8, "states": "per_head", "window": 2},
    {"mask": "gates", "scores": "delta", "negative_eigenvalues": True, "window": 4, "sinks": 1},
]
HYBRIDS += [
    {"mask": mask, "scores": "delta", "negative_eigenvalues": True} for mask in ("ones", "gates", "hierarchical")
]

HYBRIDS += [
    {"near_tokens": "chunks", **options}
    for options in (
        {"window": 4},
        {"window": 3, "sinks": 2, "mask": "ones", "features": "elu"},
        {"window": 4, "sinks": 1, "mask": "decay", "features": "hedgehog", "normalise": True},
        {"window": 3, "sinks": 1, "mask": "toeplitz_blocks", "features": "elu", "normalise": True},
        {"window": 4, "mask": "toeplitz_blocks", "scores": "delta", "states": "per_head"},
        {"window": 2, "sinks": 1, "mask": "hierarchical", "features": "favor", "normalise": True},
        {"window": 4, "sinks": 2, "mask": "hierarchical", "block": 4, "scores": "delta", "rope": "both"},
        {"window": 2, "mask": "hierarchical", "block": 8, "scores": "delta", "rope": "window"},
        {"window": 4, "mask": "hierarchical", "block": 2, "states": "per_head", "sinks": 3},
        {"window": 1, "mask": "hierarchical", "features": "cosformer"},
        {"window": 4, "sinks": 1, "mask": "hierarchical", "admissibility": "strong", "scores": "delta"},
        {"window": 5, "sinks": 3, "scores": "delta", "convolution": 3, "output_gate": "value", "norm": "rms"},
        {"window": 3, "mask": "blocks", "features": "elu", "normalise": True},
        {"window": 2, "sinks": 2, "mask": "blocks", "scores": "delta"},
        {"window": 3, "sinks": 1, "mask": "toeplitz", "features": "elu", "mask_length": 5},
        {"window": 4, "mask": "toeplitz", "scores": "delta"},
        {"window": 3, "mask": "fourier", "sinks": 1},
        {"window": 30, "sinks": 2, "mask": "gates"},
    )
]


def small(name: str) -> dict:
    return {"name": name, **SMALL.get(name, {})}


def config_of(mask: str = "gates", features: str = "identity", **options) -> LinearAttention:
    """Normalised wherever that has a meaning, unless said."""
    if "normalise" not in options:
        phi = FEATURES[FEATURES.config_type(features)]
        may = (
            (phi.positive or phi.min_denominator > 0) and mask not in SIGNED_MASKS and options.get("scores") != "delta"
        )
        options["normalise"] = may
    mask_options = small(mask) | {name: options.pop(name) for name in MASK_OPTIONS if name in options}
    mask_options |= {"length": options.pop("mask_length")} if "mask_length" in options else {}
    map_options = small(features)
    if features in ("favor", "lara") and not options["normalise"]:
        map_options["queries"] = "exact"
    return LinearAttention(mask=mask_options, features=map_options, **{"chunk": 8, **options})


def pairs() -> list[LinearAttention]:
    kernel = [config_of(mask, features) for mask in MASK_NAMES for features in FEATURE_NAMES]
    delta = [config_of(mask, "identity", scores="delta") for mask in MASK_NAMES]
    return kernel + delta + [replace(config, negative_eigenvalues=True) for config in delta]


def chunk_pairs() -> list[LinearAttention]:
    """Every mask with softmax over chunks, under both score rules."""
    near = {"near_tokens": "chunks", "window": 4, "sinks": 1}
    kernel = [config_of(mask, "elu", **near) for mask in MASK_NAMES]
    decayed = LinearAttention(mask={"name": "hierarchical", "levels": 4, "gates": "decay"}, chunk=8, **near)
    return [*kernel, *(config_of(mask, scores="delta", **near) for mask in MASK_NAMES), decayed]


def config_name(config: LinearAttention) -> str:
    extras = [f"{o}{getattr(config, o)}" for o in ("window", "sinks", "convolution") if getattr(config, o)]
    extras += [config.rope] * (config.rope != "keep") + [config.states] * (config.states != "shared")
    extras += [config.near_tokens] * (config.near_tokens != "sliding")
    extras += ["negative"] * config.negative_eigenvalues
    extras += [
        f"{part}{n}" for part in ("block",) if config.mask.name == "hierarchical" and (n := config.mask.block) > 1
    ]
    if config.mask.name == "hierarchical":
        extras += ["strong"] * config.mask.strong + [config.mask.form] * (config.mask.form != "softplus")
        extras += [config.mask.matrix] * (config.mask.matrix != "scalar")
    return "-".join([config.mask.name, config.features.name, config.scores, *extras])


def make_mixer(
    config: LinearAttention, shape: AttentionShape = SHAPE, dtype: torch.dtype = torch.float64
) -> LinearMixer:
    """With every parameter moved off its start."""
    torch.manual_seed(1)
    mixer = LinearMixer(config, shape).to(dtype)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def random_inputs(length: int, batch: int = 3, valid_BT: Tensor | None = None, seed: int = 0) -> MixerInputs:
    torch.manual_seed(seed)
    sizes = [(SHAPE.heads, length, 6), (SHAPE.groups, length, 6), (SHAPE.groups, length, 5), (length, 12)]
    inputs = MixerInputs(*(torch.randn(batch, *size, dtype=torch.float64) for size in sizes), valid_BT)
    angle_BTR = torch.randn(batch, length, 3, dtype=torch.float64).repeat(1, 1, 2)
    return replace(inputs, rope=(angle_BTR.cos(), angle_BTR.sin()))


def piece(inputs: MixerInputs, start: int, end: int) -> MixerInputs:
    q, k, v, x, valid = inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV, inputs.x_BTD, inputs.valid_BT
    cut = slice(start, end)
    valid = None if valid is None else valid[:, cut]
    rope = None if inputs.rope is None else tuple(t[:, cut] for t in inputs.rope)
    return MixerInputs(q[:, :, cut], k[:, :, cut], v[:, :, cut], x[:, cut], valid, rope=rope)


def row(inputs: MixerInputs, b: int) -> MixerInputs:
    """The real tokens of one row, alone."""
    real = slice(None) if inputs.valid_BT is None else inputs.valid_BT[b]
    q, k, v, x = inputs.q_BHTK[b], inputs.k_BGTK[b], inputs.v_BGTV[b], inputs.x_BTD[b]
    rope = None if inputs.rope is None else tuple(t[b][None, real] for t in inputs.rope)
    return MixerInputs(q[None, :, real], k[None, :, real], v[None, :, real], x[None, real], rope=rope)


def pieces(
    mixer: LinearMixer, inputs: MixerInputs, ends: list[int], state: MixerState | None = None
) -> tuple[Tensor, MixerState]:
    state, outs = state or mixer.empty_state(len(inputs.x_BTD), "cpu"), []
    for start, end in zip([0, *ends], ends):
        out, state = mixer.mix(piece(inputs, start, end), state)
        outs.append(out)
    return torch.cat(outs, 2), state


def close(a: Tensor, b: Tensor, tolerance: float = 1e-11) -> None:
    assert a.shape == b.shape and torch.isfinite(a).all()
    assert (a - b).norm() <= tolerance * b.norm().clamp_min(1e-3), float((a - b).norm() / b.norm())


# -- the definition, written out token by token ----------------------------------------------------------------
def scores_by_loops(mixer: LinearMixer, q_HTF: Tensor, k_GTF: Tensor, beta_TG: Tensor | None) -> Tensor:
    """A_HTT; the delta rule by its products of reflections."""
    heads, length = q_HTF.shape[:2]
    a_HTT = torch.zeros(heads, length, length, dtype=torch.float64)
    for h in range(heads):
        g = h // (heads // len(k_GTF))
        for t in range(length):
            q_F = q_HTF[h, t]
            for s in range(t, -1, -1):
                k_F, beta = k_GTF[g, s], 1.0 if beta_TG is None else beta_TG[s, g]
                a_HTT[h, t, s] = beta * (q_F @ k_F)
                if beta_TG is not None:
                    q_F = q_F - beta * (q_F @ k_F) * k_F
    return a_HTT


def read_by_loops(
    mixer: LinearMixer, q_HF: Tensor, k_GnF: Tensor, x_1TD: Tensor, beta_TG: Tensor | None, t: int
) -> Tensor:
    """Weights (H, n) with which query t reads the state after the n tokens behind the sinks: M's row of the last of
    them, and of the hierarchical mask the row of a token that would follow without a gate."""
    groups, n, _ = k_GnF.shape
    sinks, tree = mixer.config.sinks, mixer.config.mask.name == "hierarchical"
    signals = {}
    for name, s in mixer.mask.signals(x_1TD).items():
        signals[name] = s[:, sinks : sinks + n] if name in mixer.mask.written_signals else s[:, t : t + 1]
        if name in mixer.mask.written_signals:
            signals[name] = torch.cat([signals[name], torch.zeros_like(s[:, :1])], 1) if tree else signals[name]
        else:
            signals[name] = signals[name].expand(-1, n + tree, *s.shape[2:])
    m_1GJnn = mixer.mask.dense(torch.zeros(1, dtype=torch.long), n + tree, signals)
    m_Hn = m_1GJnn.expand(1, groups, SHAPE.heads // groups, -1, -1).flatten(0, 2)[:, -1, :n]
    beta_nG = None if beta_TG is None else beta_TG[sinks : sinks + n]
    queries_HnF = q_HF[:, None].expand(-1, n, -1)
    return m_Hn * scores_by_loops(mixer, queries_HnF, k_GnF, beta_nG)[:, -1]


def rotated_by_loops(x_HTK: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of one row, pair by pair: dims f and f + 3 turn by the angle of pair f."""
    out = x_HTK.clone()
    for f in range(3):
        cos_T, sin_T = rope[0][0, :, f], rope[1][0, :, f]
        out[..., f] = x_HTK[..., f] * cos_T - x_HTK[..., f + 3] * sin_T
        out[..., f + 3] = x_HTK[..., f + 3] * cos_T + x_HTK[..., f] * sin_T
    return out


def by_loops(mixer: LinearMixer, inputs: MixerInputs) -> Tensor:
    """One row without padding: far tokens by (A . M), near ones and sinks by softmax, as the config's words say."""
    config, length = mixer.config, inputs.x_BTD.shape[1]
    q_HTK, k_GTK, v_GTV, x_1TD = inputs.q_BHTK[0], inputs.k_BGTK[0], inputs.v_BGTV[0], inputs.x_BTD
    window, sinks, at_1T = config.window, config.sinks, torch.arange(length)[None]
    far_q_HTK, far_k_GTK, groups = q_HTK, k_GTK, SHAPE.groups
    if config.rope in ("window", "both"):
        q_HTK, k_GTK = (rotated_by_loops(t, inputs.rope) for t in (q_HTK, k_GTK))
    if config.rope == "both":
        far_q_HTK, far_k_GTK = torch.cat([far_q_HTK, q_HTK], -1), torch.cat([far_k_GTK, k_GTK], -1)
    if config.states == "per_head":
        groups, far_k_GTK = SHAPE.heads, far_k_GTK.repeat_interleave(SHAPE.heads // SHAPE.groups, 0)
    q_HTF = mixer.feature_map.queries(far_q_HTK[None] * SHAPE.scaling**0.5, at_1T)[0]
    k_GTF = mixer.feature_map.keys(far_k_GTK[None] * SHAPE.scaling**0.5, at_1T)[0]
    beta_TG = None
    if config.scores == "delta":
        q_HTF, k_GTF, beta_TG = l2_normalize(q_HTF), l2_normalize(k_GTF), mixer.beta_proj(x_1TD)[0].sigmoid()
        beta_TG = 2 * beta_TG if config.negative_eigenvalues else beta_TG
    block_T = (torch.arange(length) - sinks) // max(window, 1)  # of near_tokens: chunks
    by_block = config.near_tokens == "chunks"
    count = max(length - window - sinks, 0)  # queries window + sinks .. read keys sinks .. length - window
    lag, write = slice(length - count, None), slice(sinks, sinks + count)
    far_HTT = torch.zeros(SHAPE.heads, length, length, dtype=torch.float64)
    if by_block:
        for t in range(length):
            done = window * (int(block_T[t]) - 1)
            if done > 0:
                far_HTT[:, t, sinks : sinks + done] = read_by_loops(
                    mixer, q_HTF[:, t], k_GTF[:, sinks : sinks + done], x_1TD, beta_TG, t
                )
    elif count:
        signals = mixer.mask.signals(x_1TD)
        signals = {n: t[:, write if n in mixer.mask.written_signals else lag] for n, t in signals.items()}
        m_HTT = mixer.mask.dense(torch.zeros(1, dtype=torch.long), count, signals)
        m_HTT = m_HTT.expand(1, groups, SHAPE.heads // groups, -1, -1).flatten(0, 2)
        beta_TG = None if beta_TG is None else beta_TG[write]
        far_HTT[:, lag, write] = m_HTT * scores_by_loops(mixer, q_HTF[:, lag], k_GTF[:, write], beta_TG)
    v_HTV, k_HTK = (t.repeat_interleave(SHAPE.heads // SHAPE.groups, 0) for t in (v_GTV, k_GTK))
    score_HTT, distance_TT = q_HTK @ k_HTK.mT * SHAPE.scaling, at_1T.mT - at_1T
    near_TT = distance_TT < window if not by_block else block_T.unsqueeze(0) >= block_T.unsqueeze(1) - 1
    near_TT = (distance_TT >= 0) & (near_TT | (at_1T < sinks))
    score_HTT = score_HTT.masked_fill(~near_TT, -torch.inf)
    near = linear = torch.ones(())
    if mixer.near_weight_H is not None:
        near = mixer.near_weight_H[:, None, None]
    if mixer.linear_weight_H is not None:
        linear = mixer.linear_weight_H[:, None, None]
    if not (window or sinks):
        weights_HTT = linear * far_HTT
    elif config.normalise:
        weights_HTT = linear * far_HTT + near * (score_HTT - score_HTT.amax(-1, keepdim=True)).exp()
    else:
        weights_HTT = linear * far_HTT + near * score_HTT.softmax(-1)
    if config.normalise:
        weights_HTT = weights_HTT / weights_HTT.sum(-1, keepdim=True).clamp_min(
            mixer.feature_map.min_denominator or 1e-30
        )
    return (weights_HTT @ v_HTV)[None]


# -- laws ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [*pairs(), *chunk_pairs()], ids=config_name)
def test_dense_chunked_and_step_agree(config):
    """On padded rows, each at its own position; their gradients too."""
    torch.manual_seed(3)
    valid_BT = torch.rand(2, 21) > 0.25
    mixer, inputs = make_mixer(config), random_inputs(21, 2, valid_BT)
    leaves = [t.requires_grad_() for t in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV, inputs.x_BTD)]
    direction = torch.randn(2, 4, 21, 5, dtype=torch.float64)
    truth = mixer.dense(inputs)
    slopes = torch.autograd.grad((truth * direction).sum(), leaves, allow_unused=True)
    for out in (mixer.mix(inputs)[0], pieces(mixer, inputs, [16, 18, 19, 20, 21])[0]):
        close(out, truth)
        for a, b in zip(torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True), slopes):
            assert (a is None) == (b is None)
            if b is not None:
                close(a, b, 1e-9)


FULL = [config_of(mask, "elu") for mask in MASK_NAMES] + [config_of(mask, scores="delta") for mask in MASK_NAMES]
FULL += [
    config_of(**options) if "normalise" in options else config_of(normalise=False, **options) for options in HYBRIDS
]


@pytest.mark.parametrize("config", FULL, ids=config_name)
def test_laws(config):
    """The definition; causality; a ragged batch = each alone, however it is padded; pieces = at once; NaN in padding
    stays there; chunks of any length; states are values, and rows of them are sequences."""
    mixer, length = make_mixer(config), 19
    torch.manual_seed(4)
    valid_BT = torch.rand(4, length) > 0.3
    valid_BT[1] = torch.arange(length) >= 8  # left padding
    valid_BT[2], valid_BT[3] = True, torch.arange(length) < 11  # none; right padding
    inputs = random_inputs(length, 4, valid_BT)
    with torch.no_grad():
        whole = mixer.mix(inputs)[0]
        for b in range(4):
            alone = row(inputs, b)
            close(whole[b : b + 1, :, valid_BT[b]], mixer.mix(alone)[0])
            assert not whole[b, :, ~valid_BT[b]].any()
        if not (config.convolution or config.output_gate or config.norm):
            close(mixer.mix(alone)[0], by_loops(mixer, alone))
            close(mixer.mix(row(inputs, 2))[0], by_loops(mixer, row(inputs, 2)))
        spoilt = replace(inputs, x_BTD=inputs.x_BTD.masked_fill(~valid_BT.unsqueeze(-1), torch.nan))
        close(mixer.mix(spoilt)[0], whole)
        later = random_inputs(length, 4, valid_BT, seed=9)
        mixed = [
            torch.cat([a[..., :12, :], b[..., 12:, :]], -2)
            for a, b in zip(vars(inputs).values(), list(vars(later).values())[:4])
        ]
        close(mixer.mix(MixerInputs(*mixed, valid_BT, rope=inputs.rope))[0][:, :, :12], whole[:, :, :12])
        close(pieces(mixer, inputs, [1, 3, 6, 13, length])[0], whole)
        mixer.config = replace(config, chunk=3)
        close(mixer.mix(inputs)[0], whole)
        states_are_values(mixer, inputs, whole)


@pytest.mark.parametrize("near", ["sliding", "chunks"])
@pytest.mark.parametrize("scores", ["kernel", "delta"])
@pytest.mark.parametrize("mask", MASK_NAMES)
def test_first_pieces_may_be_shorter_than_window_and_sinks(mask, scores, near):
    """One, two or three tokens first, of rows that have up to all of them: no token has reached the state of the mask
    yet.
    """
    features = "elu" if scores == "kernel" else "identity"
    mixer, length = make_mixer(config_of(mask, features, scores=scores, window=4, sinks=2, near_tokens=near)), 15
    valid_BT = torch.arange(length) >= torch.tensor([[0], [1], [5]])
    inputs = random_inputs(length, 3, valid_BT)
    with torch.no_grad():
        whole = mixer.mix(inputs)[0]
        for ends in ([1, 3, 6, 7, 8], [2, 3, 4], [3, 4, 6], [5, 6, 7]):
            out, state = pieces(mixer, inputs, [*ends, length])
            close(out, whole)
            assert {n: t.shape for n, t in state.tensors.items()} == {
                n: t.shape for n, t in mixer.mix(inputs, mixer.empty_state(3, "cpu"))[1].tensors.items()
            }


def states_are_values(mixer: LinearMixer, inputs: MixerInputs, whole: Tensor) -> None:
    out, state = pieces(mixer, inputs, [9])
    before = {name: t.clone() for name, t in state.tensors.items()}
    rest, _ = mixer.mix(piece(inputs, 9, 19), state)
    close(torch.cat([out, rest], 2), whole)
    assert all(torch.equal(t, state.tensors[name]) for name, t in before.items())
    index = torch.tensor([3, 0, 0])
    picked = replace(
        piece(inputs, 9, 19),
        **{name: t[index] for name, t in vars(piece(inputs, 9, 19)).items() if isinstance(t, Tensor)},
        rope=tuple(t[index, 9:19] for t in inputs.rope),
    )
    close(mixer.mix(picked, state.rows(index))[0], rest[index])


@pytest.mark.parametrize(
    "config",
    [config_of(m, "elu") for m in MASK_NAMES]
    + [config_of(), config_of(convolution=4, output_gate="head", norm="rms", normalise=False)],
    ids=config_name,
)
def test_both_ways(config):
    """Bidirectional: dense = chunked, ragged rows = each alone, no state."""
    mixer, length = make_mixer(config, ENCODER), 14
    valid_BT = torch.arange(length) < torch.tensor([[14], [9]])
    valid_BT[1] = valid_BT[1].flip(0)
    inputs = random_inputs(length, 2, valid_BT)
    with torch.no_grad():
        out = mixer.mix(inputs)[0]
        close(out, mixer.dense(inputs))
        alone = row(inputs, 1)
        close(out[1:, :, valid_BT[1]], mixer.mix(alone)[0])
    with pytest.raises(SurgeryError, match="bidirectional attention has no state"):
        mixer.empty_state(1, "cpu")


@pytest.mark.parametrize("scores", ["kernel", "delta"])
@pytest.mark.parametrize("mask", [n for n in MASK_NAMES if n not in BIDIRECTIONAL_MASKS])
def test_both_ways_is_a_pass_each_way_less_the_token_itself(mask, scores):
    """What a token adds to its own output is what a causal pass loses without its value."""
    config, length = config_of(mask, scores=scores), 9
    causal, inputs = make_mixer(config), random_inputs(length, 1)
    turned = MixerInputs(*(t.flip(1 if t.dim() == 3 else 2) for t in list(vars(inputs).values())[:4]))
    with torch.no_grad():
        back = causal.mix(turned)[0]
        truth = causal.mix(inputs)[0] + back.flip(2)
        for t in range(length):
            without = turned.v_BGTV.clone()
            without[:, :, t] = 0
            truth[:, :, length - 1 - t] -= (back - causal.mix(replace(turned, v_BGTV=without))[0])[:, :, t]
        close(make_mixer(config, ENCODER).mix(inputs)[0], truth)


@pytest.mark.parametrize("features", ["elu", "hedgehog", "favor", "lara"])
@pytest.mark.parametrize("extra", [{}, {"window": 4, "sinks": 2}], ids=["linear", "hybrid"])
def test_normalised_rows_sum_to_one(features, extra):
    """v = 1 comes out as 1, where all scores are positive. (relu and cosFormer may see nothing at all.)"""
    for mask in [n for n in MASK_NAMES if n not in SIGNED_MASKS]:
        mixer, inputs = make_mixer(config_of(mask, features, **extra)), random_inputs(17, 2)
        out = mixer.mix(replace(inputs, v_BGTV=torch.ones_like(inputs.v_BGTV)))[0]
        close(out, torch.ones_like(out), 1e-9)


@pytest.mark.parametrize("config", [*FULL[-len(HYBRIDS) :], config_of("hierarchical", scores="delta")], ids=config_name)
def test_gradients_by_finite_differences(config):
    """Of outputs in q, k, v, x, every parameter, and the state that the call began with."""
    mixer, valid_BT = make_mixer(config), torch.tensor([[True] * 9, [False] * 3 + [True] * 6])
    inputs = random_inputs(9, 2, valid_BT)
    with torch.no_grad():
        state = pieces(mixer, inputs, [5])[1]
    rest = piece(inputs, 5, 9)
    names = list(state.tensors)
    parameters = dict(mixer.named_parameters())
    leaves = [t.clone().requires_grad_() for t in (rest.q_BHTK, rest.k_BGTK, rest.v_BGTV, rest.x_BTD)]
    leaves += [state.tensors[n].double().requires_grad_() for n in names] + list(parameters.values())

    def out(*t: Tensor) -> Tensor:
        begun = MixerState(state.seen_B, dict(zip(names, t[4 : 4 + len(names)])))
        return mixer.mix(MixerInputs(*t[:4], rest.valid_BT, rope=rest.rope), begun)[0]

    assert torch.autograd.gradcheck(out, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("config", FULL, ids=config_name)
def test_against_float64(config, dtype, tolerance):
    """From the same rounded numbers, prefill and steps. States are float32, waiting keys and values as they came."""
    mixer, inputs = make_mixer(config), random_inputs(40, 1)
    wide, half = ([t.to(dtype).to(d) for t in list(vars(inputs).values())[:4]] for d in (torch.float64, dtype))
    mixer.to(dtype).double()
    rope = {d: tuple(t.to(dtype).to(d) for t in inputs.rope) for d in (torch.float64, dtype)}
    with torch.no_grad():
        truth = mixer.dense(MixerInputs(*wide, rope=rope[torch.float64]))
        mixer.to(dtype)
        out, state = pieces(mixer, MixerInputs(*half, rope=rope[dtype]), [33, 38, 39, 40])
        at_once, _ = mixer.mix(MixerInputs(*half, rope=rope[dtype]))
    assert out.dtype == at_once.dtype == dtype
    close(out.double(), truth, tolerance)
    close(at_once.double(), truth, tolerance)
    for name, t in state.tensors.items():
        waits = name in ("ring.k", "ring.v", "ring.linear_k", "sink.k", "sink.v")
        assert t.dtype == (dtype if waits else torch.float32), name


@pytest.mark.parametrize("config", FULL, ids=config_name)
def test_cost_is_the_live_state(config):
    mixer = make_mixer(config)
    with torch.no_grad():
        _, state = pieces(mixer, random_inputs(19, 1), [19])
    cost = LinearMixer.cost(config, SHAPE, 19)
    assert cost.cache == sum(t.numel() for t in state.tensors.values())
    assert cost.params == sum(t.numel() for t in mixer.state_dict().values()) and cost.macs > 0


# -- near_tokens: chunks, and one normaliser for both branches ----------------------------------------------------------
@pytest.mark.parametrize("near", ["sliding", "chunks"])
@pytest.mark.parametrize("mask", [name for name in MASK_NAMES if name not in SIGNED_MASKS])
def test_near_and_far_tokens_share_one_normaliser(mask, near):
    """LoLCATs (Zhang et al. 2025), eq. 6, with scores far beyond the range of exp: the largest near score is
    subtracted.
    """
    config = config_of(mask, "hedgehog", normalise=True, window=4, sinks=1, near_tokens=near)
    mixer, inputs = make_mixer(config), random_inputs(19, 1)
    inputs.q_BHTK.mul_(500)
    with torch.no_grad():
        truth = by_loops(mixer, inputs)
        close(mixer.mix(inputs)[0], truth)
        close(pieces(mixer, inputs, [7, 8, 9, 14, 15, 16, 19])[0], truth)
        far = mixer.linear_weight_H.clone()
        mixer.linear_weight_H.zero_()
        assert (mixer.mix(inputs)[0] - truth).norm() > 1e-3 * truth.norm()  # the far tokens count
        mixer.linear_weight_H.copy_(far)
        single = MixerInputs(*(t.float() for t in list(vars(inputs).values())[:4]))
        close(mixer.float().mix(single)[0].double(), truth, 1e-2)


@pytest.mark.parametrize("sinks", [0, 3])
def test_chunks_are_the_queries_block_and_the_one_before(sinks):
    """Exact softmax over 5 to 8 tokens and the sinks; a far token enters the state when its block is two behind, for
    each length of the prefill."""
    mixer, inputs = (
        LinearMixer(LinearAttention(window=4, sinks=sinks, near_tokens="chunks"), SHAPE).double(),
        random_inputs(22),
    )
    with torch.no_grad():
        mixer.linear_weight_H.zero_()
        k, v = (t.repeat_interleave(2, 1) for t in (inputs.k_BGTK, inputs.v_BGTV))
        t = torch.arange(22)
        block = (t - sinks) // 4
        near = (block >= block[:, None] - 1) & (t >= sinks) | (t < sinks)
        near = near & (t <= t[:, None])
        assert near[:, sinks:].sum(1)[sinks + 4 :].unique().tolist() == [5, 6, 7, 8]
        truth = F.scaled_dot_product_attention(inputs.q_BHTK, k, v, attn_mask=near, scale=SHAPE.scaling)
        close(mixer.mix(inputs)[0], truth)
        mixer.linear_weight_H.fill_(1.0)
        whole = mixer.mix(inputs)[0]
        for first in range(1, 22):
            out, state = pieces(mixer, inputs, [first, *range(first + 1, 23)])
            close(out, whole)
            assert state.tensors["ring.k"].shape[1] == 8


def test_chunks_that_cannot_be():
    for options, message in (
        ({"near_tokens": "chunk", "window": 4}, r"near_tokens must be one of sliding, chunks \(got 'chunk'\)"),
        ({"near_tokens": "chunks"}, "needs the number of tokens of a block, and window is 0"),
        ({"near_tokens": "chunks", "sinks": 4}, "window is 0"),
        (
            {"near_tokens": "chunks", "window": 48, "mask": "hierarchical"},
            r"power of two \(got 48\).*for example window: 32",
        ),
        ({"near_tokens": "chunks", "window": 4, "normalise": True}, "identity scores may be negative"),
    ):
        with pytest.raises(SurgeryError, match=message):
            LinearMixer.check_config(LinearAttention(**options), SHAPE)
    with pytest.raises(SurgeryError, match="need causal attention"):
        LinearMixer.check_config(LinearAttention(near_tokens="chunks", window=4), ENCODER)


def test_the_fused_step_and_captured_decoding_leave_chunks_to_the_reference():
    from surgery.modeling.cuda_graph import can_capture

    sliding, chunks = (
        LinearMixer(LinearAttention(window=4, near_tokens=near), SHAPE) for near in ("sliding", "chunks")
    )
    assert can_capture(sliding) and not can_capture(chunks)
    pytest.importorskip("triton")
    from surgery.kernels import window_step

    inputs = MixerInputs(*(t.bfloat16() for t in list(vars(random_inputs(1)).values())[:4]))
    with torch.no_grad():
        for mixer in (sliding.bfloat16(), chunks.bfloat16()):
            state = mixer.mix(inputs, mixer.empty_state(3, "cpu"))[1]
            assert window_step.accepts(inputs.q_BHTK, mixer, inputs, state) is (mixer is sliding)


# -- around ------------------------------------------------------------------------------------------------------
def test_a_window_over_everything_is_softmax_attention():
    mixer, inputs = LinearMixer(LinearAttention(window=40, linear_weight=0.0), SHAPE).double(), random_inputs(23)
    k, v = (t.repeat_interleave(2, 1) for t in (inputs.k_BGTK, inputs.v_BGTV))
    truth = F.scaled_dot_product_attention(inputs.q_BHTK, k, v, is_causal=True, scale=SHAPE.scaling)
    close(mixer.mix(inputs)[0], truth)
    close(pieces(mixer, inputs, [1, 2, 9, 23])[0], truth)
    sliding = LinearMixer(LinearAttention(window=6, linear_weight=0.0), SHAPE).double()
    distance = torch.arange(23).unsqueeze(1) - torch.arange(23)
    band = (distance >= 0) & (distance < 6)
    truth = F.scaled_dot_product_attention(inputs.q_BHTK, k, v, attn_mask=band, scale=SHAPE.scaling)
    close(sliding.mix(inputs)[0], truth)
    capped = LinearMixer(LinearAttention(window=40, linear_weight=0.0), replace(SHAPE, softcap=0.7)).double()
    score = 0.7 * torch.tanh(inputs.q_BHTK @ k.mT * SHAPE.scaling / 0.7)
    close(capped.mix(inputs)[0], score.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v)


YARN = {
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
}


def test_rope_in_the_window_is_the_models_own_rotation():
    """A window over everything, with the linear branch off, is the model itself: padded on either side, with partial
    RoPE, scaled cos and sin, and from a cache."""
    for family, changes in (("llama", {}), ("qwen3", {}), ("gpt_neox", {}), ("llama", YARN)):
        for rope in ("window", "both"):
            config = LinearAttention(scores="delta", window=40, rope=rope, linear_weight=0.0)
            model = random_model_with_mixers(family, config, **changes).double()
            original = random_model(family, **changes).double()
            for name, parameter in model.named_parameters():
                if name.endswith(("near_weight_H", "linear_weight_H")):
                    torch.nn.init.constant_(parameter, float("near" in name))
            ids = torch.arange(3, 33).view(2, 15)
            mask = torch.ones_like(ids)
            mask[1, :4] = 0
            position_ids = (mask.cumsum(1) - 1).clamp_min(0)
            given = {"attention_mask": mask, "position_ids": position_ids}
            with torch.no_grad():
                close(model(ids, **given).logits[mask > 0], original(ids, **given).logits[mask > 0], 1e-6)
                start = model(ids[:1, :9], use_cache=True)
                rest = model(ids[:1, 9:], past_key_values=start.past_key_values).logits
                close(rest, original(ids[:1]).logits[:, 9:], 1e-6)


def test_rope_of_the_window_needs_a_window():
    with pytest.raises(SurgeryError, match="there is no window"):
        LinearMixer.check_config(LinearAttention(rope="window"), SHAPE)
    with pytest.raises(SurgeryError, match="rotation from position_embeddings"):
        LinearMixer(LinearAttention(rope="window", window=4), SHAPE).double().mix(replace(random_inputs(9), rope=None))
    with pytest.raises(SurgeryError, match="block must be a power of two"):
        config_of("hierarchical", block=3)


@pytest.mark.parametrize("shape", [replace(SHAPE, rotary=0), replace(SHAPE, interleaved=True)], ids=["none", "pairs"])
def test_two_forms_need_rope_in_halves_and_else_both_branches_read_the_same(shape):
    for rope in ("window", "both"):
        mixer = LinearMixer(LinearAttention(rope=rope, window=4), shape)
        assert mixer.rope == "keep" and mixer.rotated
        assert mixer.linear_shape.key == shape.key


def test_extras_start_as_the_identity():
    inputs = random_inputs(23)
    plain = LinearMixer(LinearAttention(mask="decay"), SHAPE).double().mix(inputs)[0]
    for options in ({"output_gate": "head"}, {"output_gate": "value"}, {"convolution": 4}):
        mixer = LinearMixer(LinearAttention(mask="decay", **options), SHAPE).double()
        assert torch.equal(mixer.mix(inputs)[0], plain), options
        close(pieces(mixer, inputs, [3, 4, 23])[0], plain)
    normed = LinearMixer(LinearAttention(mask="decay", norm="rms"), SHAPE).double().mix(inputs)[0]
    close(normed, F.rms_norm(plain, (5,), eps=1e-6))


def test_linear_attention_and_the_delta_rule_are_their_recurrences():
    """Katharopoulos et al. 2020, eqs. 16-20; Yang et al. 2024 (DeltaNet), eq. 3, with gates (Gated DeltaNet, eq.
    10).
    """
    inputs, out, out_delta = random_inputs(15, 1), [], []
    kernel = make_mixer(config_of("ones", "elu"))
    delta = make_mixer(config_of("gates", scores="delta"))
    gate_TG = delta.mask.signals(inputs.x_BTD)["gate"][0].exp()
    beta_TG = delta.beta_proj(inputs.x_BTD)[0].sigmoid()
    s, z, d = (torch.zeros(2, *size, dtype=torch.float64) for size in ((6, 5), (6,), (5, 6)))
    for t in range(15):
        q, k, v = inputs.q_BHTK[0, :, t], inputs.k_BGTK[0, :, t], inputs.v_BGTV[0, :, t]
        phi_q, phi_k = (1 + F.elu(x * SHAPE.scaling**0.5) for x in (q, k))
        s, z = s + phi_k[:, :, None] * v[:, None], z + phi_k
        groups = torch.tensor([0, 0, 1, 1])
        out.append(torch.einsum("hk,hkv->hv", phi_q, s[groups]) / (phi_q * z[groups]).sum(-1, keepdim=True))
        k, q = l2_normalize(k * SHAPE.scaling**0.5), l2_normalize(q * SHAPE.scaling**0.5)
        turn = torch.eye(6) - beta_TG[t, :, None, None] * k[:, :, None] * k[:, None]
        d = gate_TG[t, :, None, None] * d @ turn + beta_TG[t, :, None, None] * v[:, :, None] * k[:, None]
        out_delta.append(torch.einsum("hvk,hk->hv", d[groups], q) * delta.linear_weight_H[:, None])
    close(kernel.mix(inputs)[0], torch.stack(out, 1)[None])
    close(delta.mix(inputs)[0], torch.stack(out_delta, 1)[None])


def test_negative_eigenvalues_reach_minus_one():
    """Grazzi et al. 2025: with beta in (0, 2), I - beta k k^T has the eigenvalue 1 - beta > -1 along k. Tokens of one
    key and value 0 multiply by it what the first token wrote: at beta = 2 its sign alternates, at beta = 1 it is gone.
    Up to the epsilon of the keys' norm.
    """
    inputs, length = random_inputs(6, 1), 6
    k_BGTK, v_BGTV = inputs.k_BGTK[:, :, :1].expand(-1, -1, length, -1), inputs.v_BGTV.clone()
    v_BGTV[:, :, 1:] = 0
    inputs = replace(inputs, q_BHTK=k_BGTK.repeat_interleave(2, 1), k_BGTK=k_BGTK, v_BGTV=v_BGTV)
    v_BHV = v_BGTV[:, :, 0].repeat_interleave(2, 1)
    for negative, largest in ((True, 2.0), (False, 1.0)):
        mixer = LinearMixer(config_of("ones", scores="delta", negative_eigenvalues=negative), SHAPE).double()
        with torch.no_grad():
            mixer.beta_proj.weight.zero_()
            mixer.beta_proj.bias.fill_(40.0)  # where the sigmoid is 1
            for out_BHTV in (mixer.dense(inputs), mixer.mix(inputs)[0], pieces(mixer, inputs, list(range(1, 7)))[0]):
                for t in range(length):
                    expected_BHV = largest * (1 - largest) ** t * v_BHV
                    torch.testing.assert_close(out_BHTV[:, :, t], expected_BHV, rtol=1e-4, atol=1e-4)


def test_negative_eigenvalues_need_the_delta_rule():
    with pytest.raises(SurgeryError, match="which scores: kernel does not have; use scores: delta"):
        LinearAttention(negative_eigenvalues=True)


def test_a_row_of_padding_changes_nothing():
    """And gives zeros, with a window and without."""
    for options in ({}, {"window": 3, "sinks": 2, "convolution": 3, "scores": "delta"}):
        mixer, inputs = make_mixer(config_of("hierarchical", **options)), random_inputs(6, 2)
        with torch.no_grad():
            _, state = pieces(mixer, inputs, [6])
            for length in (1, 3):
                valid_BT = torch.tensor([[True] * length, [False] * length])
                out, after = mixer.mix(random_inputs(length, 2, valid_BT, seed=5), state)
                assert not out[1].any() and after.seen_B.tolist() == [6 + length, 6]
                more = random_inputs(5, 2, seed=6)
                close(mixer.mix(more, after)[0][1:], mixer.mix(more, state)[0][1:])


def test_lengths_around_a_chunk():
    """At the default chunk, T = 1 .. 1000."""
    for options in ({}, {"scores": "delta"}, {"window": 64, "sinks": 4, "features": "hedgehog", "normalise": True}):
        mixer = make_mixer(LinearAttention(**options))
        for length in (1, 2, 63, 64, 65, 1000):
            inputs = random_inputs(length, 1)
            with torch.no_grad():
                close(mixer.mix(inputs)[0], mixer.dense(inputs), 1e-10)


def test_autocast_leaves_the_sums_alone():
    inputs = MixerInputs(*(t.float() for t in list(vars(random_inputs(70)).values())[:4]))
    mixer = make_mixer(config_of("gates", "elu", window=4), dtype=torch.float32)
    truth = mixer.mix(inputs)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixer.mix(inputs)[0], truth)
        close(mixer.dense(inputs), truth, 1e-5)


# -- configs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("config", [*pairs(), *FULL], ids=config_name)
def test_configs_round_trip(config):
    data = json.loads(json.dumps(config.to_dict()))
    assert data["mixer"] == "linear" and mixer_config(data) == config and hash(config) is not None
    assert MIXERS[config] is LinearMixer


def test_how_recipes_write_it():
    short = mixer_config({"mixer": "linear", "mask": "hierarchical", "features": None, "scores": "delta"})
    assert short == LinearAttention(mask={"name": "hierarchical"}, features="identity", scores="delta")
    nested = LinearAttention(mask={"name": "hierarchical", "gates": {"name": "decay"}})
    assert mixer_config(nested.to_dict()) == nested and nested.mask.gates.name == "decay"
    assert LinearMixer(LinearAttention(rope="drop"), SHAPE).rotated is False
    assert LinearMixer(LinearAttention(), SHAPE).rotated is True


@pytest.mark.parametrize(
    "options, said",
    [
        ({"mask": "gate"}, "unknown mask 'gate'; did you mean 'gates'"),
        ({"mask": {"name": "decay", "gama": 1}}, "'decay' has no option 'gama'"),
        ({"features": "hedgehogs"}, "unknown feature map 'hedgehogs'; did you mean 'hedgehog'"),
        ({"scores": "dela"}, r"scores must be one of kernel, delta \(got 'dela'\)"),
        ({"output_gate": True}, r"output_gate must be one of None, head, value \(got True\)"),
        ({"chunk": 0}, r"chunk must be 1 or more \(got 0\)"),
        ({"window": -1}, r"window must be 0 or more \(got -1\)"),
        ({"mask": 3}, r"mask must be the name of a mask .* \(got 3\)"),
        ({"features": "favor"}, "favor with queries: scaled divides the features of each query"),
        ({"normalise": True}, "identity scores may be negative"),
        ({"normalise": True, "features": "elu", "scores": "delta"}, "scores: delta may be negative"),
        ({"normalise": True, "features": "elu", "mask": "fourier"}, "mask fourier may be negative"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(SurgeryError, match=said):
        LinearMixer.check_config(LinearAttention(**options), SHAPE)


def test_refused_shapes():
    with pytest.raises(SurgeryError, match="window 4 and sinks 0 need causal attention"):
        LinearMixer.check_config(LinearAttention(window=4), ENCODER)
    with pytest.raises(
        SurgeryError, match=r"query heads \(4\) must be a multiple of the number of key/value heads \(3\)"
    ):
        LinearMixer.check_config(LinearAttention(), replace(SHAPE, groups=3))


def test_checkpoints():
    """A mixer made on the meta device takes what another saved, and is it."""
    config = config_of("hierarchical", "lara", window=3, sinks=1, convolution=2, output_gate="value", norm="rms")
    mixer, inputs = make_mixer(config), random_inputs(11)
    with torch.device("meta"):
        other = LinearMixer(config, SHAPE)
    assert all(t.is_meta for t in other.state_dict().values())
    other.load_state_dict(mixer.state_dict(), assign=True)
    assert torch.equal(other.mix(inputs)[0], mixer.mix(inputs)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 on a GPU has a way of its own")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_maps_of_bfloat16_are_as_good_as_float32(stored):
    linear = Float32Linear(2048, 96).to("cuda", stored)
    x = torch.randn(2, 33, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, wanted = linear(x), linear.double()(x.double())
    assert got.dtype == torch.float32
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
