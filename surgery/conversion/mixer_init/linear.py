"""Linear-type attention initialized from softmax attention, on calibration windows, no training of the model.

0. Learned softmax features are made as sharp as serves best (beside a window whose softmax shares their denominator or
   norm: in step 2, together with the weight).
1. Masks forget as the teacher does: gates with a half life of the head's mean attention distance d (rate ln 2 / d),
   block mixing by the attention a token of one block gives one of another, Toeplitz block mixing by the exponentials
   that come nearest to that; the delta rule's step from the entropy of the attention.
2. Whatever the output is linear in (lambda of every Fenwick level, amplitudes of Toeplitz block mixing, the weight of
   the linear part) by nonnegative least squares of the teacher's output on what each gives alone. Where the two parts
   share a denominator or a norm, so that the output is linear in nothing: weight and sharpness by a search, head by head.
   Beside a window, one candidate always has the linear part switched off.
3. Some local steps of Adam on the mixer's own parameters, on the error behind the output projection.

Each is kept only if the error on held-out windows falls.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.calibration.attention_samples import AttentionSample, AttentionSamples
from surgery.conversion.mixer_init.base import (
    MIXER_INITS,
    InitializedMixer,
    MixerInit,
    build_mixer,
    relative_error,
    unpadded_tokens,
)
from surgery.mixers import AttentionShape
from surgery.mixers.features.hedgehog import HedgehogMap
from surgery.mixers.linear import LinearAttention, LinearMixer
from surgery.mixers.masks.block_mixing import BlocksMask
from surgery.mixers.masks.chunking import inverse_softplus
from surgery.mixers.masks.decay import DecayMask
from surgery.mixers.masks.gates import GatesMask
from surgery.mixers.masks.log_linear import HierarchicalMask
from surgery.mixers.masks.toeplitz_block_mixing import ToeplitzBlocksMask
from surgery.mixers.masks.toeplitz_fit import fit_heads, nonnegative_lstsq
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe

LEARNING_RATE = 1e-2  # of Adam; falls to nothing along half a cosine
PROFILE_WINDOWS = 4
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0)
WEIGHTS = (0.0, *(2.0**n for n in range(-8, 5)))  # of the linear part; the softmax part has weight 1
SOFTPLUS_ZERO, SOFTPLUS_ONE = -30.0, math.log(math.e - 1)  # softplus gives 1e-13 and 1


@MIXER_INITS.register(LinearAttention)
class LinearInit(MixerInit):
    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        mixer = build_mixer(target, fit[0].inputs.q_BHTK.device)
        assert isinstance(mixer, LinearMixer)
        errors = {"copied": relative_error(mixer, held)}
        best = mixer
        for stage, improve in (
            ("features", sharpen_features),
            ("profile", fit_mask_to_profile),
            ("least_squares", solve_least_squares),
            ("weights", weighed),
            ("window", window_alone),
            ("local", train_locally),
        ):
            candidate = improve(copy.deepcopy(best), fit, settings.steps)
            if candidate is None:
                continue
            errors[stage] = relative_error(candidate, held)
            if errors[stage] < min(v for k, v in errors.items() if k != stage):
                best = candidate
        return InitializedMixer(best, errors)


# -- 0. how sharp the features are -------------------------------------------------------------------
@torch.no_grad()
def sharpen_features(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Hedgehog's W as a multiple of the identity: at 1 its softmax over the features is all but flat."""
    if not isinstance(mixer.feature_map, HedgehogMap) or shared_scale(mixer):
        return None
    few = [fit[i] for i in range(min(len(fit), PROFILE_WINDOWS))]
    copies = [sharpened_by(mixer, torch.full((mixer.shape.groups,), sharpness)) for sharpness in SHARPNESS]
    return min(copies, key=lambda variant: relative_error(variant, few))


@torch.no_grad()
def sharpened_by(mixer: LinearMixer, factor_G: Tensor) -> LinearMixer:
    """A copy whose Hedgehog weights are multiplied by one factor for each key/value head and its query heads."""
    variant = copy.deepcopy(mixer)
    assert isinstance(variant.feature_map, HedgehogMap)
    w_HKK, w_GKK = variant.feature_map.query_HKK, variant.feature_map.key_GKK
    factor_G11 = factor_G.to(w_GKK)[:, None, None]
    w_HKK.mul_(factor_G11.repeat_interleave(mixer.shape.heads // mixer.shape.groups, 0))
    w_GKK.mul_(factor_G11)
    return variant


# -- 1. what the teacher attends to ------------------------------------------------------------------
@dataclass
class AttentionProfile:
    """Of each query head: mean distance of what it attends to, tokens; entropy of its attention over that of a
    uniform one, 0 to 1; attention that a token of one block gives to each token it sees of another (H, M, M)."""

    distance_H: Tensor
    entropy_H: Tensor
    blocks_HMM: Tensor


@torch.no_grad()
def measure_profile(windows: AttentionSamples, block: int | None) -> AttentionProfile:
    distances, entropies, blocks = [], [], []
    for i in range(min(len(windows), PROFILE_WINDOWS)):
        window = windows[i]
        map_BHTT = attention_map(window, windows.target.shape)
        length = map_BHTT.shape[-1]
        t_T = torch.arange(length, device=map_BHTT.device)
        apart_TT = (t_T[:, None] - t_T).abs().float()
        distances.append(unpadded_tokens((map_BHTT * apart_TT).sum(-1, keepdim=True), window).mean((1, 2)))
        entropy_BHT = torch.special.entr(map_BHTT).sum(-1) / (t_T + 2).log()
        entropies.append(unpadded_tokens(entropy_BHT[..., None], window).mean((1, 2)))
        if block is not None:
            blocks.append(block_means(map_BHTT, block, windows.target.shape.causal).mean(0))
    nothing = torch.zeros(0)
    mean_HMM = torch.stack(blocks).mean(0) if blocks else nothing
    return AttentionProfile(torch.stack(distances).mean(0), torch.stack(entropies).mean(0), mean_HMM)


def block_means(map_BHTT: Tensor, block: int, causal: bool) -> Tensor:
    """(B, H, M, M): mean over the pairs of tokens of two blocks of which one sees the other."""
    length = map_BHTT.shape[-1]
    seen_TT = torch.ones(length, length, dtype=map_BHTT.dtype, device=map_BHTT.device)
    member_TM = nn.functional.one_hot(torch.arange(length, device=map_BHTT.device) // block).to(map_BHTT.dtype)
    count_MM = member_TM.mT @ (seen_TT.tril() if causal else seen_TT) @ member_TM
    return member_TM.mT @ map_BHTT @ member_TM / count_MM.clamp_min(1)


def attention_map(window: AttentionSample, shape: AttentionShape) -> Tensor:
    """softmax(Q K^T) of the teacher (B, H, T, T), float32; causal and padding, which is all a profile needs."""
    inputs = window.teacher
    keys = inputs.k_BGTK.repeat_interleave(inputs.q_BHTK.shape[1] // inputs.k_BGTK.shape[1], dim=1)
    scores = shape.scaling * inputs.q_BHTK.float() @ keys.float().mT
    length = scores.shape[-1]
    if shape.causal:
        ahead = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    if inputs.valid_BT is not None:
        scores = scores.masked_fill(~inputs.valid_BT[:, None, None], torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


@torch.no_grad()
def fit_mask_to_profile(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """The mixer itself, its mask and steps set by what the teacher attends to; None where neither has a say."""
    mask = mixer.mask.gates if isinstance(mixer.mask, HierarchicalMask) else mixer.mask
    known = (GatesMask, DecayMask, BlocksMask, ToeplitzBlocksMask)
    if not isinstance(mask, known) and mixer.beta_proj is None:
        return None
    seen = measure_profile(fit, mask.config.block if isinstance(mask, (BlocksMask, ToeplitzBlocksMask)) else None)
    groups = mixer.shape.groups
    rate_G = math.log(2) / seen.distance_H.view(groups, -1).mean(1).clamp_min(0.5)
    if isinstance(mask, GatesMask):
        mask.rate.bias.copy_(inverse_softplus(rate_G))
    elif isinstance(mask, DecayMask):
        mask.log_decay_G.copy_(rate_G.log())
    elif isinstance(mask, BlocksMask):
        mask.initialize(extend_blocks(seen.blocks_HMM, mask.config.count).unflatten(0, (groups, -1)))
    elif isinstance(mask, ToeplitzBlocksMask):
        heads = fit_heads(seen.blocks_HMM.unflatten(0, (groups, -1)), mask.config.components, mask.shape.causal)
        size = seen.blocks_HMM.diagonal(dim1=-2, dim2=-1).mean().clamp_min(1e-9)
        mask.initialize((heads.amplitude / size).movedim(-1, 0).float(), heads.rate[:, 0].mT.float())
    if mixer.beta_proj is not None:
        # Attention on one token overwrites; attention on all adds little of each.
        step_G = (1 - seen.entropy_H.view(groups, -1).mean(1)).clamp(0.05, 0.95)
        nn.init.zeros_(mixer.beta_proj.weight)
        mixer.beta_proj.bias.copy_(step_G.logit())
    return mixer


def extend_blocks(blocks_HMM: Tensor, count: int) -> Tensor:
    """To `count` blocks: those the text did not reach mix by distance as its last one does."""
    size = min(blocks_HMM.shape[-1], count)
    last_HM = blocks_HMM[:, size - 1, :size].flip(-1)  # by distance
    at_M = torch.arange(count, device=blocks_HMM.device)
    out_HMM = last_HM[:, (at_M[:, None] - at_M).abs().clamp_max(size - 1)]
    out_HMM[:, :size, :size] = blocks_HMM[:, :size, :size]
    return out_HMM


# -- 2. least squares --------------------------------------------------------------------------------
@torch.no_grad()
def solve_least_squares(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """None where the output is linear in nothing: a shared denominator, a norm behind it (see `nearby_rows`)."""
    if mixer.config.normalise or mixer.norm is not None or mixer.linear_weight_H is None:
        return None
    copies = single_term_copies(mixer, fit[0].inputs.x_BTD.shape[1])
    gram_HNN = torch.zeros(mixer.shape.heads, len(copies), len(copies), dtype=torch.float64)
    wanted_HN = torch.zeros(gram_HNN.shape[:2], dtype=torch.float64)
    for window in fit:
        near_HX = (
            head_outputs(without_linear_part(mixer), window) if mixer.window_buffer is not None else torch.zeros(())
        )
        given_HNX = torch.stack([head_outputs(variant, window) - near_HX for variant in copies], 1)
        goal_HX = unpadded_tokens(window.target_BHTV.float(), window).flatten(1) - near_HX
        gram_HNN += (given_HNX @ given_HNX.mT).double().cpu()
        wanted_HN += (given_HNX @ goal_HX[..., None])[..., 0].double().cpu()
    set_term_weights(mixer, nonnegative_lstsq(gram_HNN, wanted_HN, rounds=200).float().to(mixer.linear_weight_H.device))
    return mixer


def head_outputs(mixer: LinearMixer, window: AttentionSample) -> Tensor:
    """(H, N V)"""
    return unpadded_tokens(mixer.mix(window.inputs)[0].float(), window).flatten(1)


def without_linear_part(mixer: LinearMixer) -> LinearMixer:
    """The softmax part alone."""
    variant = copy.deepcopy(mixer)
    variant.linear_weight_H.fill_(0.0)  # type: ignore[union-attr]
    return variant


def single_term_copies(mixer: LinearMixer, length: int) -> list[LinearMixer]:
    """Copies that each show one of the terms the linear part is a sum of, with weight one."""
    mask, copies = mixer.mask, []
    if isinstance(mask, HierarchicalMask):
        terms = min(length.bit_length() + 1, mask.config.levels)
    else:
        terms = mask.config.components if isinstance(mask, ToeplitzBlocksMask) else 1
    for i in range(terms):
        variant = copy.deepcopy(mixer)
        if isinstance(variant.mask, HierarchicalMask):
            variant.mask.level.bias.view(mixer.shape.heads, -1).fill_(SOFTPLUS_ZERO)[:, i] = SOFTPLUS_ONE
        elif isinstance(variant.mask, ToeplitzBlocksMask):
            variant.mask.amplitude_RGJ.fill_(SOFTPLUS_ZERO)[i] = SOFTPLUS_ONE
        variant.linear_weight_H.fill_(1.0)  # type: ignore[union-attr]
        copies.append(variant)
    return copies


def set_term_weights(mixer: LinearMixer, weight_HN: Tensor) -> None:
    """The terms' weights where they belong; levels that the text is too short for take the last one's."""
    mask, heads = mixer.mask, mixer.shape.heads
    mixer.linear_weight_H.fill_(1.0)  # type: ignore[union-attr]  # as in `exclusive_lock`
    raw_HN = inverse_softplus(weight_HN.double().clamp_min(1e-6)).float()
    if isinstance(mask, HierarchicalMask):
        bias_HL = mask.level.bias.view(heads, -1)
        bias_HL.copy_(raw_HN[:, -1:].expand_as(bias_HL))
        bias_HL[:, : raw_HN.shape[1]] = raw_HN
    elif isinstance(mask, ToeplitzBlocksMask):
        mask.amplitude_RGJ.copy_(raw_HN.mT.view_as(mask.amplitude_RGJ))
    else:
        mixer.linear_weight_H.copy_(weight_HN[:, 0])  # type: ignore[union-attr]


def shared_scale(mixer: LinearMixer) -> bool:
    """Whether both parts stand over one denominator or before one norm, so that only the ratio of their weights counts."""
    return mixer.window_buffer is not None and (mixer.config.normalise or mixer.norm is not None)


@torch.no_grad()
def weighed(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Of each head the weight of the linear part, 0 among them, and of each key/value head the sharpness of learned
    softmax features, that come nearest to the teacher; by trying all pairs of SHARPNESS and WEIGHTS."""
    if not shared_scale(mixer):
        return None
    groups, sharp = mixer.shape.groups, isinstance(mixer.feature_map, HedgehogMap)
    factors = SHARPNESS if sharp else (1.0,)
    copies = [sharpened_by(mixer, torch.full((groups,), f)) for f in factors] if sharp else [mixer]
    wrong_SPH = torch.zeros(len(copies), len(WEIGHTS), mixer.shape.heads, dtype=torch.float64)
    for i in range(min(len(fit), PROFILE_WINDOWS)):
        window = fit[i]
        goal_HNV = unpadded_tokens(window.target_BHTV.float(), window)
        for s, variant in enumerate(copies):
            for p, out_BHTV in enumerate(variant.outputs_by_linear_weight(window.inputs, WEIGHTS)):
                off_HNV = unpadded_tokens(out_BHTV.float(), window) - goal_HNV
                wrong_SPH[s, p] += off_HNV.square().sum((1, 2), dtype=torch.float64).cpu()
    wrong_SPH = wrong_SPH.nan_to_num(nan=torch.inf)
    least_SH, at_SH = wrong_SPH.min(1)
    chosen_G = least_SH.unflatten(1, (groups, -1)).sum(2).argmin(0)
    best = sharpened_by(mixer, torch.tensor(factors)[chosen_G]) if sharp else mixer
    chosen_H = chosen_G.repeat_interleave(mixer.shape.heads // groups)
    weight_H = torch.tensor(WEIGHTS)[at_SH.gather(0, chosen_H[None])[0]]
    best.linear_weight_H.copy_(weight_H)  # type: ignore[union-attr]
    best.near_weight_H.fill_(1.0)  # type: ignore[union-attr]
    return best


@torch.no_grad()
def window_alone(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """The softmax over the window and the sinks, the linear part switched off; None where there is no window."""
    return without_linear_part(mixer) if mixer.window_buffer is not None else None


# -- 3. local steps ----------------------------------------------------------------------------------
def train_locally(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Every parameter of the mixer, on |W_o (o - o*)|^2 / |W_o o*|^2, a window a step."""
    parameters = [p.requires_grad_(True) for p in mixer.parameters()]
    if steps == 0 or not parameters:
        return None
    output_OI = fit.output_OI()
    adam = torch.optim.Adam(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))
    with torch.enable_grad():
        for step in range(steps):
            adam.param_groups[0]["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            window = fit[step]
            out_BHTV, _ = mixer.mix(window.inputs)
            wrong, whole = (
                (unpadded_tokens(x, window).transpose(0, 1).flatten(1) @ output_OI.mT).square().mean()
                for x in (out_BHTV.float() - window.target_BHTV, window.target_BHTV)
            )
            adam.zero_grad()
            (wrong / whole.clamp_min(1e-30)).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
    return mixer.requires_grad_(False)
