"""Initialize a stock layer with Gated DeltaNet or Kimi delta attention from softmax attention, without training the model.

    o_t = W_o [norm(S_t q_t) * f(z_t)],    S_t = S_{t-1} Diag(e^{g_t}) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T

q, k, v: SiLU of a causal convolution over the last four tokens; q and k normalized; beta = sigmoid(W_b x); z = W_z x. What
differs between the two, f and g, is in `surgery.conversion.stock_modules`.

The stages run in this order, and each is accepted only if the error on held-out samples falls:
copied         q, k, v and the output projection are copied, a key/value head to each of its query heads. The convolution
               reads the current token alone, with so small a gain that SiLU is linear there; the norms behind it undo
               the gain. Gates that need a constant, and have no bias, read it from the hidden states: u with u . x close
               to 1. No decay, beta 1/2
profile        decay and beta from the teacher's attention map, as for the mixers of `surgery.conversion.mixer_init`
features       the gain of q and k: the best of GAINS. A large one leaves the positive parts alone
output         W_o: ridge regression towards the copied weights
local          steps of Adam on all parameters of the layer, on |o - o*|^2 / |o*|^2, then W_o once more

N samples of T tokens, D hidden states, H query heads in G key/value groups, K dims of a head, F = H K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.checkpoint.stock_tensors import AttentionSizes
from surgery.conversion.mixer_init.linear import PROFILE_SAMPLES, decay_rates, step_sizes
from surgery.conversion.stock_modules import StockModule
from surgery.structures import linalg

GAINS = (0.25, 1.0, 4.0)  # candidate root mean squares of what SiLU reads, for q and k
VALUE_GAIN = 0.25  # of the values; SiLU(x) = x / 2 + x^2 / 4 - ..
CONSTANT_RIDGE, OUTPUT_RIDGE = 1e-4, 1e-3  # relative to the mean of the diagonal
BATCH_TOKENS, STEP_TOKENS = 4096, 1024  # in a pass without gradients, and in a step of training
RATES = {"matrices": 1e-3, "vectors": 1e-2}  # of Adam; decay to zero along half a cosine


@dataclass
class LayerSamples:
    """What a layer reads, and what its attention gives in the original model. x_NTD: hidden states behind the norm of
    the stock layer; target_NTD: output of the attention; valid_NT: False at padding; held: the first held-out row.
    """

    x_NTD: Tensor
    target_NTD: Tensor
    valid_NT: Tensor
    held: int

    def batches(self, held: bool, most: int | None = None) -> Iterator[slice]:
        """Yield the rows that are fitted to, at most `most` of them, or the held-out ones, BATCH_TOKENS at a time."""
        start, stop = (self.held, len(self.x_NTD)) if held else (0, min(most or self.held, self.held))
        size = max(1, BATCH_TOKENS // self.x_NTD.shape[1])
        for first in range(start, stop, size):
            yield slice(first, min(first + size, stop))


def initialize_layer(
    module: StockModule,
    layer: Mapping[str, Tensor],
    scale_D: Tensor,
    sizes: AttentionSizes,
    samples: LayerSamples,
    *,
    profile: tuple[Tensor, Tensor],
    steps: int,
) -> dict[str, float]:
    """Initialize a module in place; return the held-out error after each stage.

    layer: tensors of the source's layer. scale_D: what its columns are multiplied by, see `split_norm`. profile: mean
    distance and entropy of the attention, (H,) each.
    """
    constant_D = constant_direction(samples)
    rows = attention_rows(layer, scale_D, sizes, constant_D)
    module.copy(rows, layer["self_attn.o_proj.weight"], constant_D)
    set_gains(module, samples, VALUE_GAIN, GAINS[0])
    scale_output(module, samples)
    errors = {"copied": held_out_error(module, samples)}

    def profile_stage() -> None:
        distance_H, entropy_H = profile
        module.set_gates(decay_rates(distance_H), step_sizes(entropy_H), constant_D)
        scale_output(module, samples)

    def features_stage() -> None:
        candidates = []
        for gain in GAINS[1:]:
            set_gains(module, samples, VALUE_GAIN, gain)
            scale_output(module, samples)
            candidates.append((held_out_error(module, samples), copy_state(module.module)))
        module.module.load_state_dict(min(candidates, key=lambda pair: pair[0])[1])

    def local_stage() -> None:
        train_layer(module, samples, steps)
        solve_output(module, samples)

    stages: dict[str, Callable[[], None]] = {
        "profile": profile_stage,
        "features": features_stage,
        "output": lambda: solve_output(module, samples),
        **({"local": local_stage} if steps else {}),
    }
    for name, run in stages.items():
        before, least = copy_state(module.module), min(errors.values())
        run()
        errors[name] = held_out_error(module, samples)
        if not errors[name] < least:
            module.module.load_state_dict(before)
    return errors


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a module's tensors."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# -- copied ----------------------------------------------------------------------------------------
@torch.no_grad()
def constant_direction(samples: LayerSamples) -> Tensor:
    """Return u (D,) with u . x as close to 1 as a linear function of the hidden states can be (ridge regression)."""
    size = samples.x_NTD.shape[-1]
    moment_DD, mean_D, count = samples.x_NTD.new_zeros(size, size), samples.x_NTD.new_zeros(size), 0
    for rows in samples.batches(held=False):
        x_ND = samples.x_NTD[rows][samples.valid_NT[rows]]
        moment_DD += x_ND.mT @ x_ND
        mean_D += x_ND.sum(0)
        count += len(x_ND)
    moment_DD = moment_DD.double() / count
    direction_D: Tensor = linalg.solve(moment_DD + _ridge(moment_DD, CONSTANT_RIDGE), mean_D.double() / count)
    return direction_D.to(mean_D)


def _ridge(moment_FF: Tensor, share: float) -> Tensor:
    return share * moment_FF.diagonal().mean().clamp_min(1e-12) * torch.eye(len(moment_FF)).to(moment_FF)


@torch.no_grad()
def attention_rows(
    layer: Mapping[str, Tensor], scale_D: Tensor, sizes: AttentionSizes, constant_D: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows (F, D) of q, k and v of softmax attention, with a key/value head for each query head.

    Biases are read from the hidden states; the weights of a QK norm are in the rows.
    """
    repeats = sizes.heads // sizes.groups
    rows = []
    for name in "qkv":
        weight_HKD = (layer[f"self_attn.{name}_proj.weight"] * scale_D).unflatten(0, (-1, sizes.key))
        if (bias := layer.get(f"self_attn.{name}_proj.bias")) is not None:
            weight_HKD = weight_HKD + bias.view(-1, sizes.key, 1) * constant_D
        if (norm_K := layer.get(f"self_attn.{name}_norm.weight")) is not None:
            weight_HKD = weight_HKD * norm_K[:, None]
        rows.append((weight_HKD if name == "q" else weight_HKD.repeat_interleave(repeats, 0)).flatten(0, 1))
    return rows[0], rows[1], rows[2]


@torch.no_grad()
def set_gains(module: StockModule, samples: LayerSamples, value_gain: float, key_gain: float) -> None:
    """Set the convolution to a factor on the current token, so that what SiLU reads has these root mean squares."""
    row = samples.x_NTD[0][samples.valid_NT[0]]
    gains = []
    for states_ND, gain in zip(module.qkv(row), (key_gain, key_gain, value_gain)):
        size = states_ND.square().mean().sqrt().clamp_min(1e-12)
        gains.append((gain / size).expand(states_ND.shape[-1]))
    convolution = module.module.conv1d.weight
    convolution.zero_()
    convolution[:, 0, -1] = torch.cat(gains)


# -- output ----------------------------------------------------------------------------------------
def output_error(module: StockModule, samples: LayerSamples, rows: slice) -> tuple[Tensor, Tensor]:
    """Return o - o* and o* of the real tokens of some rows, (tokens, D) each."""
    valid_NT, target_NTD = samples.valid_NT[rows], samples.target_NTD[rows]
    return (module.module(samples.x_NTD[rows]) - target_NTD)[valid_NT], target_NTD[valid_NT]


@torch.no_grad()
def held_out_error(module: StockModule, samples: LayerSamples) -> float:
    """Return |o - o*| / |o*| over the real tokens of the held-out rows."""
    difference = norm = 0.0
    for rows in samples.batches(held=True):
        error_ND, target_ND = output_error(module, samples, rows)
        difference += float(error_ND.square().sum(dtype=torch.float64))
        norm += float(target_ND.square().sum(dtype=torch.float64))
    error = math.sqrt(difference / max(norm, 1e-30))
    return error if math.isfinite(error) else 1e30


@torch.no_grad()
def output_moments(module: StockModule, samples: LayerSamples, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return E[f f^T] (F, F) and E[y* f^T] (D, F) of what the output projection reads, in float64. most: rows at most."""
    seen: list[Tensor] = []
    hook = module.output.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    features, width = module.output.in_features, samples.x_NTD.shape[-1]
    moment_FF = samples.x_NTD.new_zeros(features, features, dtype=torch.float64)
    cross_DF = samples.x_NTD.new_zeros(width, features, dtype=torch.float64)
    try:
        for rows in samples.batches(held=False, most=most):
            module.module(samples.x_NTD[rows])
            f_NF = seen.pop()[samples.valid_NT[rows]]
            moment_FF += f_NF.mT @ f_NF
            cross_DF += samples.target_NTD[rows][samples.valid_NT[rows]].mT @ f_NF
    finally:
        hook.remove()
    return moment_FF, cross_DF


@torch.no_grad()
def scale_output(module: StockModule, samples: LayerSamples) -> None:
    """Multiply the output projection by the one factor that fits best."""
    moment_FF, cross_DF = output_moments(module, samples, PROFILE_SAMPLES)
    weight_DF = module.output.weight.double()
    factor = (weight_DF * cross_DF).sum() / ((weight_DF @ moment_FF) * weight_DF).sum().clamp_min(1e-30)
    module.output.weight.mul_(factor.to(module.output.weight))


@torch.no_grad()
def solve_output(module: StockModule, samples: LayerSamples) -> None:
    """Set the output projection to the ridge regression around its present weights."""
    moment_FF, cross_DF = output_moments(module, samples)
    weight_DF = module.output.weight.double()
    residual_FD = (cross_DF - weight_DF @ moment_FF).mT
    change_FD = linalg.solve(moment_FF + _ridge(moment_FF, OUTPUT_RIDGE), residual_FD)
    module.output.weight.copy_(weight_DF + change_FD.mT)


# -- local -----------------------------------------------------------------------------------------
def train_layer(module: StockModule, samples: LayerSamples, steps: int) -> None:
    """Train all parameters of the layer, on STEP_TOKENS tokens for each step."""
    named = dict(module.module.named_parameters())
    is_matrix = {name: p.dim() == 2 for name, p in named.items()}
    groups = [
        {"params": [p for name, p in named.items() if is_matrix[name]], "lr": RATES["matrices"]},
        {"params": [p for name, p in named.items() if not is_matrix[name]], "lr": RATES["vectors"]},
    ]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    rows = min(max(1, STEP_TOKENS // samples.x_NTD.shape[1]), samples.held)
    with torch.enable_grad():
        for parameter in named.values():
            parameter.requires_grad_(True)
        for step in range(steps):
            first = step * rows % (samples.held - rows + 1)
            error_ND, target_ND = output_error(module, samples, slice(first, first + rows))
            loss = error_ND.square().mean() / target_ND.square().mean().clamp_min(1e-30)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(list(named.values()), 1.0)
            adam.step()
            schedule.step()
    module.module.requires_grad_(False)
