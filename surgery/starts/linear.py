"""Linear-type attention started from softmax attention, on calibration windows, no training of the model.

1. Gates forget as the teacher does: a half life of the head's mean attention distance d (rate ln 2 / d); the delta
   rule's step from the entropy of its attention (Taylor-Calibrate's rules, without their Taylor step).
2. Whatever the output is linear in (lambda of every Fenwick level, amplitudes of Toeplitz block mixing, the weight of
   the linear part) by nonnegative least squares of the teacher's output on what each gives alone.
3. Some local steps of Adam on the mixer's own parameters, on the error behind the output projection.

Each is kept only if the error on held-out windows falls.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.attention_recipe import Attention
from surgery.mixers import AttentionShape
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.decay import DecayMask
from surgery.mixers.masks.frame import inverse_softplus
from surgery.mixers.masks.gates import GatesMask
from surgery.mixers.masks.hierarchical import HierarchicalMask
from surgery.mixers.masks.toeplitz_blocks import ToeplitzBlocksMask
from surgery.seats import Seat
from surgery.starts.base import STARTS, Start, Started, blank, real, relative_error
from surgery.windows import Window, Windows

RATE = 1e-2  # of Adam; falls to nothing along half a cosine
PROFILE_WINDOWS = 4
OFF, ON = -30.0, math.log(math.e - 1)  # softplus gives 1e-13 and 1


@STARTS.register(LinearAttention)
class LinearStart(Start):
    def start(self, seat: Seat, settings: Attention, fit: Windows, held: Windows) -> Started:
        mixer = blank(seat, fit[0].inputs.q_BHTK.device)
        assert isinstance(mixer, LinearMixer)
        errors = {"copied": relative_error(mixer, held)}
        best = mixer
        for stage, better in (("gates", gated), ("least_squares", solved), ("local", trained)):
            candidate = better(copy.deepcopy(best), fit, settings.steps)
            if candidate is None:
                continue
            errors[stage] = relative_error(candidate, held)
            if errors[stage] < min(v for k, v in errors.items() if k != stage):
                best = candidate
        return Started(best, errors)


# -- 1. what the teacher attends to ------------------------------------------------------------------
@dataclass
class Profile:
    """Of each query head: mean distance of what it attends to, tokens; entropy of its attention over that of a
    uniform one, 0 to 1."""

    distance_H: Tensor
    entropy_H: Tensor


@torch.no_grad()
def profile(windows: Windows) -> Profile:
    distances, entropies = [], []
    for i in range(min(len(windows), PROFILE_WINDOWS)):
        window = windows[i]
        map_BHTT = attention_map(window, windows.seat.shape)
        length = map_BHTT.shape[-1]
        t_T = torch.arange(length, device=map_BHTT.device)
        apart_TT = (t_T[:, None] - t_T).abs().float()
        distances.append(real((map_BHTT * apart_TT).sum(-1, keepdim=True), window).mean((1, 2)))
        entropy_BHT = torch.special.entr(map_BHTT).sum(-1) / (t_T + 2).log()
        entropies.append(real(entropy_BHT[..., None], window).mean((1, 2)))
    return Profile(torch.stack(distances).mean(0), torch.stack(entropies).mean(0))


def attention_map(window: Window, shape: AttentionShape) -> Tensor:
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
def gated(mixer: LinearMixer, fit: Windows, steps: int) -> LinearMixer | None:
    """Half lives and step sizes from the profile; the mixer itself, changed."""
    gates = mixer.mask.gates if isinstance(mixer.mask, HierarchicalMask) else mixer.mask
    if not isinstance(gates, (GatesMask, DecayMask)) and mixer.beta_proj is None:
        return None
    seen = profile(fit)
    groups = mixer.shape.groups
    rate_G = math.log(2) / seen.distance_H.view(groups, -1).mean(1).clamp_min(0.5)
    if isinstance(gates, GatesMask):
        gates.rate.bias.copy_(inverse_softplus(rate_G))
    elif isinstance(gates, DecayMask):
        gates.log_decay_G.copy_(rate_G.log())
    if mixer.beta_proj is not None:
        # Attention on one token overwrites; attention on all adds little of each.
        step_G = (1 - seen.entropy_H.view(groups, -1).mean(1)).clamp(0.05, 0.95)
        nn.init.zeros_(mixer.beta_proj.weight)
        mixer.beta_proj.bias.copy_(step_G.logit())
    return mixer


# -- 2. least squares --------------------------------------------------------------------------------
@torch.no_grad()
def solved(mixer: LinearMixer, fit: Windows, steps: int) -> LinearMixer | None:
    """None where the output is linear in nothing: a shared denominator, a norm behind it."""
    if mixer.config.normalise or mixer.norm is not None or mixer.linear_weight_H is None:
        return None
    ways = alone(mixer, fit[0].inputs.x_BTD.shape[1])
    gram_HNN = torch.zeros(mixer.shape.heads, len(ways), len(ways), dtype=torch.float64)
    wanted_HN = torch.zeros(gram_HNN.shape[:2], dtype=torch.float64)
    for window in fit:
        near_HX = written(nothing(mixer), window) if mixer.delay is not None else torch.zeros(())
        given_HNX = torch.stack([written(way, window) - near_HX for way in ways], 1)
        goal_HX = real(window.target_BHTV.float(), window).flatten(1) - near_HX
        gram_HNN += (given_HNX @ given_HNX.mT).double().cpu()
        wanted_HN += (given_HNX @ goal_HX[..., None])[..., 0].double().cpu()
    put(mixer, nonnegative(gram_HNN, wanted_HN).float().to(mixer.linear_weight_H.device))
    return mixer


def written(mixer: LinearMixer, window: Window) -> Tensor:
    """(H, N V)"""
    return real(mixer.mix(window.inputs)[0].float(), window).flatten(1)


def nothing(mixer: LinearMixer) -> LinearMixer:
    """The softmax part alone."""
    way = copy.deepcopy(mixer)
    way.linear_weight_H.fill_(0.0)  # type: ignore[union-attr]
    return way


def alone(mixer: LinearMixer, length: int) -> list[LinearMixer]:
    """Copies that each show one of the terms the linear part is a sum of, with weight one."""
    mask, ways = mixer.mask, []
    if isinstance(mask, HierarchicalMask):
        terms = min(length.bit_length() + 1, mask.config.levels)
    else:
        terms = mask.config.components if isinstance(mask, ToeplitzBlocksMask) else 1
    for i in range(terms):
        way = copy.deepcopy(mixer)
        if isinstance(way.mask, HierarchicalMask):
            way.mask.level.bias.view(mixer.shape.heads, -1).fill_(OFF)[:, i] = ON
        elif isinstance(way.mask, ToeplitzBlocksMask):
            way.mask.amplitude_RGJ.fill_(OFF)[i] = ON
        way.linear_weight_H.fill_(1.0)  # type: ignore[union-attr]
        ways.append(way)
    return ways


def put(mixer: LinearMixer, weight_HN: Tensor) -> None:
    """The terms' weights where they belong; levels that the text is too short for take the last one's."""
    mask, heads = mixer.mask, mixer.shape.heads
    raw_HN = inverse_softplus(weight_HN.double().clamp_min(1e-6)).float()
    if isinstance(mask, HierarchicalMask):
        bias_HL = mask.level.bias.view(heads, -1)
        bias_HL.copy_(raw_HN[:, -1:].expand_as(bias_HL))
        bias_HL[:, : raw_HN.shape[1]] = raw_HN
    elif isinstance(mask, ToeplitzBlocksMask):
        mask.amplitude_RGJ.copy_(raw_HN.mT.view_as(mask.amplitude_RGJ))
    else:
        mixer.linear_weight_H.copy_(weight_HN[:, 0])  # type: ignore[union-attr]


def nonnegative(gram_HNN: Tensor, wanted_HN: Tensor, rounds: int = 200) -> Tensor:
    """argmin x^T G x / 2 - w^T x over x >= 0, a coordinate at a time; a little ridge for terms that are alike."""
    gram_HNN = gram_HNN + 1e-6 * torch.diag_embed(gram_HNN.diagonal(dim1=-2, dim2=-1) + 1e-12)
    x_HN = torch.zeros_like(wanted_HN)
    for _ in range(rounds):
        for n in range(x_HN.shape[1]):
            rest_H = wanted_HN[:, n] - (gram_HNN[:, n] * x_HN).sum(-1) + gram_HNN[:, n, n] * x_HN[:, n]
            x_HN[:, n] = (rest_H / gram_HNN[:, n, n]).clamp_min(0)
    return x_HN


# -- 3. local steps ----------------------------------------------------------------------------------
def trained(mixer: LinearMixer, fit: Windows, steps: int) -> LinearMixer | None:
    """Every parameter of the mixer, on |W_o (o - o*)|^2 / |W_o o*|^2, a window a step."""
    if steps == 0:
        return None
    output_OI = fit.output_OI()
    parameters = [p.requires_grad_(True) for p in mixer.parameters()]
    adam = torch.optim.Adam(parameters, lr=RATE, betas=(0.9, 0.95))
    with torch.enable_grad():
        for step in range(steps):
            adam.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
            window = fit[step]
            out_BHTV, _ = mixer.mix(window.inputs)
            wrong, whole = (
                (real(x, window).transpose(0, 1).flatten(1) @ output_OI.mT).square().mean()
                for x in (out_BHTV.float() - window.target_BHTV, window.target_BHTV)
            )
            adam.zero_grad()
            (wrong / whole.clamp_min(1e-30)).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
    return mixer.requires_grad_(False)
