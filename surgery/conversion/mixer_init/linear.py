"""Initialize linear-type attention from softmax attention (the teacher) on calibration samples, without training the
model.

The stages run in this order, and each is accepted only if the error on held-out samples falls:
features       scale the weights of learned softmax features: the best of SHARPNESS
profile        set the mask from the teacher's attention map. Gates and decay: rate ln 2 / d, that is, a half-life of the
               mean attention distance d. Block mixing: the mean attention between blocks; Toeplitz block mixing: its
               fit by exponentials. Delta rule: the step size from the entropy of the attention.
least_squares  parameters in which the output is linear (lambda of each Fenwick level, amplitudes of Toeplitz block
               mixing, weight of the linear part): nonnegative least squares with a ridge against the teacher's output
weights        where the linear part and the window's softmax share a denominator or a norm, so that the output is not
               linear in the weights: grid search of weight and sharpness, head by head
window         with a sliding window: the linear part switched off
local          steps of Adam on the mixer's parameters; the loss is the error after the output projection

H query heads in G key/value groups, M blocks, N terms or tokens, V value dimension, K key dimension.
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
from surgery.mixers.common.near_chunks import ChunkBuffer
from surgery.mixers.features.hedgehog import HedgehogMap
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.block_mixing import BlocksMask
from surgery.mixers.masks.chunking import inverse_softplus
from surgery.mixers.masks.decay import DecayMask
from surgery.mixers.masks.gates import GatesMask
from surgery.mixers.masks.log_linear import HierarchicalMask
from surgery.mixers.masks.toeplitz_block_mixing import ToeplitzBlocksMask
from surgery.mixers.masks.toeplitz_fit import fit_heads, nonnegative_lstsq
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.attention_recipe import AttentionRecipe

LEARNING_RATE = 1e-2  # of Adam; decays to zero along half a cosine
PROFILE_SAMPLES = 4  # samples whose attention maps are measured
SHARPNESS = (1.0, 2.0, 4.0, 8.0, 16.0)  # candidate factors of the feature weights
RIDGE = 1e-5  # of the least squares: as if one query in 100,000 more were equal to a key; weights stay below about 150
WEIGHTS = (0.0, *(2.0**n for n in range(-8, 5)))  # of the linear part; the softmax part has weight 1
SOFTPLUS_ZERO, SOFTPLUS_ONE = -30.0, math.log(math.e - 1)  # softplus maps them to 1e-13 and 1


@MIXER_INITS.register(LinearAttention)
class LinearInit(MixerInit):
    """Initialization of linear-type attention in stages (see the module)."""

    def init(
        self, target: AttentionTarget, settings: AttentionRecipe, fit: AttentionSamples, held: AttentionSamples
    ) -> InitializedMixer:
        """Return the mixer of the stage with the lowest held-out error, and the error after each stage that applies."""
        mixer = build_mixer(target, fit[0].inputs.q_BHTK.device)
        assert isinstance(mixer, LinearMixer)
        errors = {"copied": relative_error(mixer, held)}
        best = mixer
        for stage, run_stage in (
            ("features", sharpen_features),
            ("profile", fit_mask_to_profile),
            ("least_squares", solve_least_squares),
            ("weights", search_linear_weights),
            ("window", disable_linear_part),
            ("local", train_locally),
        ):
            candidate = run_stage(copy.deepcopy(best), fit, settings.steps)
            if candidate is None:
                continue
            errors[stage] = relative_error(candidate, held)
            if errors[stage] < min(v for k, v in errors.items() if k != stage):
                best = candidate
        return InitializedMixer(best, errors)


# A stage takes a copy of the best mixer so far, which it may change, and returns the changed mixer. It returns None if
# it does not apply. `steps` is read by the last stage only.


# -- features --------------------------------------------------------------------------------------
@torch.no_grad()
def sharpen_features(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Return the best copy over SHARPNESS; None unless the features are Hedgehog and scaled separately.

    Hedgehog's weights start as the identity, with which the softmax over the features is almost uniform.
    """
    if not isinstance(mixer.feature_map, HedgehogMap) or has_shared_scale(mixer):
        return None
    few = [fit[i] for i in range(min(len(fit), PROFILE_SAMPLES))]
    copies = [
        copy_with_sharpness(mixer, torch.full((mixer.linear_shape.groups,), sharpness)) for sharpness in SHARPNESS
    ]
    return min(copies, key=lambda variant: relative_error(variant, few))


@torch.no_grad()
def copy_with_sharpness(mixer: LinearMixer, factor_G: Tensor) -> LinearMixer:
    """Return a copy with Hedgehog weights multiplied by one factor for each key/value head and its query heads."""
    variant = copy.deepcopy(mixer)
    assert isinstance(variant.feature_map, HedgehogMap)
    w_HKK, w_GKK = variant.feature_map.query_HKK, variant.feature_map.key_GKK
    factor_G11 = factor_G.to(w_GKK)[:, None, None]
    w_HKK.mul_(factor_G11.repeat_interleave(mixer.shape.heads // mixer.linear_shape.groups, 0))
    w_GKK.mul_(factor_G11)
    return variant


# -- profile ---------------------------------------------------------------------------------------
@dataclass
class AttentionProfile:
    """Statistics of the teacher's attention, for each query head.

    distance_H: mean attention distance in tokens. entropy_H: mean entropy relative to uniform attention, 0 to 1.
    blocks_HMM: mean attention weight of a visible pair of tokens from two blocks; empty without a block size.
    """

    distance_H: Tensor
    entropy_H: Tensor
    blocks_HMM: Tensor


@torch.no_grad()
def measure_profile(samples: AttentionSamples, block: int | None) -> AttentionProfile:
    """Return the profile of the first PROFILE_SAMPLES samples. block: tokens of a block, None for no block means."""
    distances: list[Tensor] = []
    entropies: list[Tensor] = []
    blocks: list[Tensor] = []
    for i in range(min(len(samples), PROFILE_SAMPLES)):
        sample = samples[i]
        map_BHTT = attention_map(sample, samples.target.shape)
        for means, values_BHT in zip((distances, entropies), map_statistics(map_BHTT)):
            means.append(unpadded_tokens(values_BHT[..., None], sample).mean((1, 2)))
        if block is not None:
            blocks.append(block_means(map_BHTT, block, samples.target.shape.causal).mean(0))
    mean_HMM = mean_over_samples(blocks) if blocks else torch.zeros(0)
    return AttentionProfile(torch.stack(distances).mean(0), torch.stack(entropies).mean(0), mean_HMM)


def map_statistics(map_BHTT: Tensor) -> tuple[Tensor, Tensor]:
    """Return each query's mean distance in tokens, and its entropy relative to uniform attention, (B, H, T) each."""
    t_T = torch.arange(map_BHTT.shape[-1], device=map_BHTT.device)
    distance_BHT = (map_BHTT * (t_T[:, None] - t_T).abs().float()).sum(-1)
    return distance_BHT, torch.special.entr(map_BHTT).sum(-1) / (t_T + 2).log()


def step_sizes(entropy: Tensor) -> Tensor:
    """Return the delta rule's step sizes: attention to a single token overwrites the state (1); uniform attention adds
    little of each token (0).
    """
    return (1 - entropy).clamp(0.05, 0.95)


def decay_rates(distance: Tensor) -> Tensor:
    """Return the decay rates per token whose half-life is the mean attention distance."""
    return math.log(2) / distance.clamp_min(0.5)


def block_means(map_BHTT: Tensor, block: int, causal: bool) -> Tensor:
    """Return the mean of an attention map over the visible pairs of tokens from two blocks, (B, H, M, M)."""
    length = map_BHTT.shape[-1]
    visible_TT = torch.ones(length, length, dtype=map_BHTT.dtype, device=map_BHTT.device)
    member_TM = nn.functional.one_hot(torch.arange(length, device=map_BHTT.device) // block).to(map_BHTT.dtype)
    count_MM = member_TM.mT @ (visible_TT.tril() if causal else visible_TT) @ member_TM
    return member_TM.mT @ map_BHTT @ member_TM / count_MM.clamp_min(1)


def mean_over_samples(blocks: list[Tensor]) -> Tensor:
    """Return the mean of the block means (H, M, M) of several samples, each over the samples that are long enough for
    the pair of blocks.
    """
    most = max(mean_HMM.shape[-1] for mean_HMM in blocks)
    sum_HMM, count_MM = blocks[0].new_zeros(blocks[0].shape[0], most, most), blocks[0].new_zeros(most, most)
    for mean_HMM in blocks:
        size = mean_HMM.shape[-1]
        sum_HMM[:, :size, :size] += mean_HMM
        count_MM[:size, :size] += 1
    return sum_HMM / count_MM.clamp_min(1)


def attention_map(sample: AttentionSample, shape: AttentionShape) -> Tensor:
    """Return the attention map of the teacher, (B, H, T, T) float32, with its soft cap and sliding window."""
    inputs = sample.teacher
    keys = inputs.k_BGTK.repeat_interleave(inputs.q_BHTK.shape[1] // inputs.k_BGTK.shape[1], dim=1)
    scores = shape.scaling * inputs.q_BHTK.float() @ keys.float().mT
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    t_T = torch.arange(scores.shape[-1], device=scores.device)
    distance_TT = t_T[:, None] - t_T
    if shape.causal:
        scores = scores.masked_fill(distance_TT < 0, -torch.inf)
    if shape.window is not None:
        scores = scores.masked_fill(distance_TT.abs() >= shape.window, -torch.inf)
    if inputs.valid_BT is not None:
        scores = scores.masked_fill(~inputs.valid_BT[:, None, None], torch.finfo(scores.dtype).min)
    return scores.softmax(-1)


@torch.no_grad()
def fit_mask_to_profile(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Set the mask and the delta rule's step sizes from the teacher's profile; None if the mixer has neither of
    them.
    """
    mask = mixer.mask.gates if isinstance(mixer.mask, HierarchicalMask) else mixer.mask
    known = (GatesMask, DecayMask, BlocksMask, ToeplitzBlocksMask)
    if not isinstance(mask, known) and mixer.beta_proj is None:
        return None
    profile = measure_profile(fit, mask.config.block if isinstance(mask, (BlocksMask, ToeplitzBlocksMask)) else None)
    groups = mixer.linear_shape.groups
    rate_G = decay_rates(profile.distance_H.view(groups, -1).mean(1))
    if isinstance(mask, GatesMask):
        mask.rate.bias.copy_(inverse_softplus(rate_G))
    elif isinstance(mask, DecayMask):
        mask.log_decay_G.copy_(rate_G.log())
    elif isinstance(mask, BlocksMask):
        mask.initialize(extend_blocks(profile.blocks_HMM, mask.config.count).unflatten(0, (groups, -1)))
    elif isinstance(mask, ToeplitzBlocksMask):
        heads = fit_heads(profile.blocks_HMM.unflatten(0, (groups, -1)), mask.config.components, mask.shape.causal)
        size = profile.blocks_HMM.diagonal(dim1=-2, dim2=-1).mean().clamp_min(1e-9)
        mask.initialize((heads.amplitude / size).movedim(-1, 0).float(), heads.rate[:, 0].mT.float())
    if mixer.beta_proj is not None:
        step_G = step_sizes(profile.entropy_H.view(groups, -1).mean(1))
        nn.init.zeros_(mixer.beta_proj.weight)
        mixer.beta_proj.bias.copy_((step_G / mixer.config.largest_step).logit())
    return mixer


def extend_blocks(blocks_HMM: Tensor, count: int) -> Tensor:
    """Return the means for `count` blocks, (H, count, count).

    Entries of blocks beyond the samples' length are those of the last measured block at the same distance.
    """
    size = min(blocks_HMM.shape[-1], count)
    last_HM = blocks_HMM[:, size - 1, :size].flip(-1)  # indexed by distance
    at_M = torch.arange(count, device=blocks_HMM.device)
    out_HMM = last_HM[:, (at_M[:, None] - at_M).abs().clamp_max(size - 1)]
    out_HMM[:, :size, :size] = blocks_HMM[:, :size, :size]
    return out_HMM


# -- least squares ---------------------------------------------------------------------------------
@torch.no_grad()
def solve_least_squares(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Fit the weights of the output's terms by nonnegative least squares with a ridge, head by head.

    The ridge is RIDGE times the energy that a term of weight 1 would have if every query were equal to a key
    (`matched_energy`). Without it, a term that is almost zero on the samples got any weight (2e7): sharp features of
    queries and keys hardly overlap, until a text has an attention sink behind the mixer's own sinks, a key that all
    queries match.

    Returns None if the output is not linear in them: a denominator or a norm follows the sum.
    """
    if mixer.config.normalise or mixer.norm is not None or mixer.linear_weight_H is None:
        return None
    gram_HNN = torch.zeros(mixer.shape.heads, term_count(mixer), term_count(mixer), dtype=torch.float64)
    cross_HN = torch.zeros(gram_HNN.shape[:2], dtype=torch.float64)
    copies: dict[int, LinearMixer] = {}
    for sample in fit:
        terms = visible_terms(mixer, sample.inputs.x_BTD.shape[1])
        if not terms:
            continue
        new = [term for term in terms if term not in copies]
        copies |= dict(zip(new, single_term_copies(mixer, new)))
        softmax_HX = torch.zeros(())
        if mixer.window_buffer is not None:
            softmax_HX = head_outputs(copy_without_linear_part(mixer), sample)
        terms_HNX = torch.stack([head_outputs(copies[term], sample) - softmax_HX for term in terms], 1)
        target_HX = unpadded_tokens(sample.target_BHTV.float(), sample).flatten(1) - softmax_HX
        at_N = torch.tensor(terms)
        gram_HNN[:, at_N[:, None], at_N] += (terms_HNX @ terms_HNX.mT).double().cpu()
        gram_HNN[:, at_N, at_N] += RIDGE * matched_energy(mixer, sample).double().cpu().unsqueeze(-1)
        cross_HN[:, at_N] += (terms_HNX @ target_HX[..., None])[..., 0].double().cpu()
    if not copies:
        return None
    terms = sorted(copies)
    gram_HNN, cross_HN = gram_HNN[:, terms][:, :, terms], cross_HN[:, terms]
    weight_HN = nonnegative_lstsq(gram_HNN, cross_HN, rounds=200).float().to(mixer.linear_weight_H.device)
    set_term_weights(mixer, terms, weight_HN)
    return mixer


def head_outputs(mixer: LinearMixer, sample: AttentionSample) -> Tensor:
    """Return the mixer's outputs over the real tokens of a sample, (H, N V)."""
    return unpadded_tokens(mixer.mix(sample.inputs)[0].float(), sample).flatten(1)


def matched_energy(mixer: LinearMixer, sample: AttentionSample) -> Tensor:
    """Return the energy of the linear part's output if each query matched one key and no other, (H,): the sum over the
    tokens of |k|^2 |v|^2, times the mean of |q|^2 over the queries."""
    rows = mixer.mask_inputs(sample.inputs)
    query_BGJ = rows.q_BGJTF.float().square().sum(-1).mean(-1)
    written_BG = (rows.k_BGTF.float().square().sum(-1) * rows.v_BGTV.float().square().sum(-1)).sum(-1)
    return (query_BGJ * written_BG.unsqueeze(-1)).sum(0).view(mixer.shape.heads, -1).mean(1)


def copy_without_linear_part(mixer: LinearMixer) -> LinearMixer:
    """Return a copy whose output is the softmax over the window and the sinks alone."""
    variant = copy.deepcopy(mixer)
    variant.linear_weight_H.fill_(0.0)  # type: ignore[union-attr]
    return variant


def visible_terms(mixer: LinearMixer, tokens: int) -> list[int]:
    """Return the numbers of the linear part's terms that a sample of so many tokens has: Fenwick levels, exponentials,
    or the one term of other masks. Empty if the linear part sees no token.

    A level that no pair of tokens has is left out: its term is zero up to rounding, and a weight fitted to rounding
    could be any number, which longer texts would then meet.
    """
    mask, buffer, config = mixer.mask, mixer.window_buffer, mixer.config
    far, lowest = tokens - config.window - config.sinks, 0
    highest = (far - 1).bit_length()
    if isinstance(
        buffer, ChunkBuffer
    ):  # states after blocks of 2^w tokens have buckets w .. only, which are levels w + 1 ..
        far = buffer.far_tokens(tokens - 1)
        lowest, highest = config.window.bit_length(), far.bit_length()
        if isinstance(mask, HierarchicalMask) and mask.config.strong:
            lowest = 1  # all buckets hold tokens
    if far < 1:
        return []
    if not isinstance(mask, HierarchicalMask):
        return list(range(term_count(mixer)))
    bits, last = mask.config.block_bits, mask.config.lambdas - 1
    return sorted({min(max(0, level - bits), last) for level in range(lowest, highest + 1)})


def term_count(mixer: LinearMixer) -> int:
    """Return how many terms the linear part has for rows of any length."""
    if isinstance(mixer.mask, HierarchicalMask):
        return int(mixer.mask.config.lambdas)
    return int(mixer.mask.config.components) if isinstance(mixer.mask, ToeplitzBlocksMask) else 1


def single_term_copies(mixer: LinearMixer, terms: list[int]) -> list[LinearMixer]:
    """Return copies whose linear part is a single one of these terms, with weight 1."""
    copies = []
    for i in terms:
        variant = copy.deepcopy(mixer)
        if isinstance(variant.mask, HierarchicalMask):
            variant.mask.keep_one_level(i)
        elif isinstance(variant.mask, ToeplitzBlocksMask):
            variant.mask.amplitude_RGJ.fill_(SOFTPLUS_ZERO)[i] = SOFTPLUS_ONE
        variant.linear_weight_H.fill_(1.0)  # type: ignore[union-attr]
        copies.append(variant)
    return copies


def set_term_weights(mixer: LinearMixer, terms: list[int], weight_HN: Tensor) -> None:
    """Set the weights of these terms of the linear part in place.

    Levels beyond a sample's length get the last weight, and levels below the lowest the first.
    """
    mask = mixer.mask
    mixer.linear_weight_H.fill_(1.0)  # type: ignore[union-attr]
    raw_HN = inverse_softplus(weight_HN.double().clamp_min(1e-6)).float()
    if isinstance(mask, HierarchicalMask):
        mixer.linear_weight_H.copy_(mask.set_constant_lambdas(weight_HN, terms))  # type: ignore[union-attr]
    elif isinstance(mask, ToeplitzBlocksMask):
        mask.amplitude_RGJ.copy_(raw_HN.mT.view_as(mask.amplitude_RGJ))
    else:
        mixer.linear_weight_H.copy_(weight_HN[:, 0])  # type: ignore[union-attr]


# -- weights ---------------------------------------------------------------------------------------
def has_shared_scale(mixer: LinearMixer) -> bool:
    """Return whether the linear and the softmax part share a denominator or a norm, so that only the ratio of their
    weights matters."""
    return mixer.window_buffer is not None and (mixer.config.normalise or mixer.norm is not None)


@torch.no_grad()
def search_linear_weights(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Search the weight of the linear part of each head, and the sharpness of Hedgehog features of each key/value head.

    All pairs of SHARPNESS and WEIGHTS are tried on a few samples. Returns None unless the parts share a scale.
    """
    if not has_shared_scale(mixer):
        return None
    groups, is_hedgehog = mixer.linear_shape.groups, isinstance(mixer.feature_map, HedgehogMap)
    factors = SHARPNESS if is_hedgehog else (1.0,)
    copies = [copy_with_sharpness(mixer, torch.full((groups,), f)) for f in factors] if is_hedgehog else [mixer]
    error_SPH = torch.zeros(len(copies), len(WEIGHTS), mixer.shape.heads, dtype=torch.float64)
    for i in range(min(len(fit), PROFILE_SAMPLES)):
        sample = fit[i]
        target_HNV = unpadded_tokens(sample.target_BHTV.float(), sample)
        for s, variant in enumerate(copies):
            for p, out_BHTV in enumerate(variant.outputs_by_linear_weight(sample.inputs, WEIGHTS)):
                difference_HNV = unpadded_tokens(out_BHTV.float(), sample) - target_HNV
                error_SPH[s, p] += difference_HNV.square().sum((1, 2), dtype=torch.float64).cpu()
    error_SPH = error_SPH.nan_to_num(nan=torch.inf)
    least_SH, weight_index_SH = error_SPH.min(1)
    chosen_G = least_SH.unflatten(1, (groups, -1)).sum(2).argmin(0)
    best = copy_with_sharpness(mixer, torch.tensor(factors)[chosen_G]) if is_hedgehog else mixer
    chosen_H = chosen_G.repeat_interleave(mixer.shape.heads // groups)
    weight_H = torch.tensor(WEIGHTS)[weight_index_SH.gather(0, chosen_H[None])[0]]
    best.linear_weight_H.copy_(weight_H)  # type: ignore[union-attr]
    best.near_weight_H.fill_(1.0)  # type: ignore[union-attr]
    return best


# -- window ----------------------------------------------------------------------------------------
@torch.no_grad()
def disable_linear_part(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Return a copy with only the softmax over the window and the sinks; None if the mixer has no window."""
    return copy_without_linear_part(mixer) if mixer.window_buffer is not None else None


# -- local -----------------------------------------------------------------------------------------
def train_locally(mixer: LinearMixer, fit: AttentionSamples, steps: int) -> LinearMixer | None:
    """Train all parameters of the mixer on |W_o (o - o*)|^2 / |W_o o*|^2, one sample for each step; None for 0
    steps.
    """
    parameters = [p.requires_grad_(True) for p in mixer.parameters()]
    if steps == 0 or not parameters:
        return None
    output_OI = fit.output_OI()
    adam = torch.optim.Adam(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))
    with torch.enable_grad():
        for step in range(steps):
            adam.param_groups[0]["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            sample = fit[step]
            out_BHTV, _ = mixer.mix(sample.inputs)
            difference, norm = (
                (unpadded_tokens(x, sample).transpose(0, 1).flatten(1) @ output_OI.mT).square().mean()
                for x in (out_BHTV.float() - sample.target_BHTV, sample.target_BHTV)
            )
            adam.zero_grad()
            (difference / norm.clamp_min(1e-30)).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
    return mixer.requires_grad_(False)
