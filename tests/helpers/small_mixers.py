"""Two mixers to test the machinery with: exact softmax attention, and a recurrence."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from surgery.mixers import MIXERS, Mixer, MixerConfig, MixerState

# Specs of every kind of mixer with the options of shipped recipes, small enough for heads of 8 dims.
SHIPPED = {"features": "hedgehog", "rope": "both", "output_gate": "value", "window": 5, "sinks": 2, "chunk": 8}
MIXER_SPECS: dict[str, dict[str, Any]] = {
    "mlr": {"mixer": "mlr", "ranks": [4, 2, 2], "extents": [16, 5], "form": "nested"},
    "window": {"mixer": "window", "window": 6, "sinks": 2},
    "global window": {"mixer": "global_window", "ranks": [4, 4], "window": 6},
    "bilinear": {"mixer": "bilinear_btt", "norm": "qk"},
    "bilinear mlbtc": {"mixer": "bilinear_mlbtc"},
    "none": {"mixer": "none"},
    "retnet": {"mixer": "linear", "mask": "decay", "chunk": 8},
    "ssd": {"mixer": "linear", "mask": "gates", "chunk": 8, "convolution": 3},
    "gated deltanet": {"mixer": "linear", "scores": "delta", **SHIPPED},
    "log-linear": {"mixer": "linear", "mask": {"name": "hierarchical", "block": 4}, "scores": "delta", **SHIPPED},
    "log-linear mamba-2": {"mixer": "linear", "mask": "hierarchical", "chunk": 8, "states": "per_head"},
    "log-linear strong": {"mixer": "linear", "mask": {"name": "hierarchical", "levels": "strong"}, "scores": "delta", "chunk": 8},
    "log-linear matrices": {"mixer": "linear", "mask": {"name": "hierarchical", "levels": 5, "matrix": "low_rank", "form": "bounded"}, "window": 4, "chunk": 8},
    "toeplitz blocks": {"mixer": "linear", "mask": {"name": "toeplitz_blocks", "block": 4}, **SHIPPED, "normalise": True, "rope": "window"},
    "mhla": {"mixer": "linear", "mask": {"name": "blocks", "block": 8, "count": 8}, "features": "relu", "normalise": True, "chunk": 8},
    "softmax": {"mixer": "softmax", "rope": "drop", "scale": "length", "trained_length": 6},
    "heads": {"mixer": "head_hybrid", "softmax_heads": [1], "others": {"mixer": "linear", "mask": {"name": "hierarchical", "block": 4}, "scores": "delta", **SHIPPED}},
    "heads, gates": {"mixer": "head_hybrid", "softmax_heads": [0], "others": {"mixer": "linear", "chunk": 8, "convolution": 3}, "softmax": {"rope": "drop", "scale": "length", "trained_length": 6}},
    "heads, window": {"mixer": "head_hybrid", "softmax_heads": [1], "others": {"mixer": "window", "window": 6, "sinks": 2}},
    "lolcats": {"mixer": "linear", "mask": "ones", "features": "hedgehog", "normalise": True, "window": 4, "sinks": 1, "chunk": 8},
    "gated deltanet behind chunks": {"mixer": "linear", "scores": "delta", **SHIPPED, "near_tokens": "chunks", "convolution": 2},
    "log-linear behind chunks": {"mixer": "linear", "mask": {"name": "hierarchical", "block": 4}, "scores": "delta", **SHIPPED, "window": 4, "near_tokens": "chunks"},
    "tbm behind chunks": {"mixer": "linear", "mask": {"name": "toeplitz_blocks", "block": 4}, **SHIPPED, "normalise": True, "near_tokens": "chunks"},
    "toeplitz behind chunks": {"mixer": "linear", "mask": {"name": "toeplitz", "length": 9}, "window": 3, "near_tokens": "chunks", "states": "per_head"},
    "mhla behind chunks": {"mixer": "linear", "mask": {"name": "blocks", "block": 6, "count": 11}, "scores": "delta", "window": 4, "near_tokens": "chunks"},
}  # fmt: skip


@dataclass(frozen=True)
class ExactConfig(MixerConfig):
    """Config of ExactMixer."""

    name: ClassVar[str] = "test-exact"


@dataclass(frozen=True)
class DecayedConfig(MixerConfig):
    """Config of DecayedMixer."""

    name: ClassVar[str] = "test-decayed"
    half_life: int = 6
    rotated: bool = True


class ExactMixer(Mixer):
    """Softmax over all keys so far; the state holds keys, values and their validity."""

    config_type = ExactConfig

    def empty_state(self, batch, device):
        shape = self.shape
        tensors = {
            "k": torch.zeros(batch, shape.groups, 0, shape.key, device=device),
            "v": torch.zeros(batch, shape.groups, 0, shape.value, device=device),
            "valid": torch.zeros(batch, 0, dtype=torch.bool, device=device),
        }
        return MixerState(torch.zeros(batch, dtype=torch.int64, device=device), tensors)

    def mix(self, inputs, state=None):
        B, _, T, _ = inputs.q_BHTK.shape
        valid = inputs.valid_BT
        valid = torch.ones(B, T, dtype=torch.bool, device=inputs.x_BTD.device) if valid is None else valid
        wide = torch.promote_types(inputs.q_BHTK.dtype, torch.float32)
        k, v = inputs.k_BGTK.to(wide), inputs.v_BGTV.to(wide)
        after = None
        if state is not None:
            k = torch.cat([state.tensors["k"], k], dim=2)
            v = torch.cat([state.tensors["v"], v], dim=2)
            after = MixerState(
                state.seen_B + valid.sum(1),
                {"k": k, "v": v, "valid": torch.cat([state.tensors["valid"], valid], dim=1)},
            )
            valid = after.tensors["valid"]
        S, per = k.shape[2], self.shape.heads // self.shape.groups
        scores = inputs.q_BHTK.to(wide) @ k.repeat_interleave(per, 1).mT * self.shape.scaling
        if self.shape.softcap:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        allowed = valid[:, None, None, :]
        positions = torch.arange(S, device=k.device)
        behind = positions[S - T :, None] - positions
        allowed = allowed & (behind.abs() < (self.shape.window or S))
        if self.shape.causal:
            allowed = allowed & (behind >= 0)
        weights = torch.softmax(scores.masked_fill(~allowed, -1e30), dim=-1)
        return (weights @ v.repeat_interleave(per, 1)).to(inputs.q_BHTK.dtype), after


class DecayedMixer(Mixer):
    """state = decay state + k v^T, out = q state, decay = exp(-rate); padding leaves the state unchanged."""

    config_type = DecayedConfig

    def __init__(self, config, shape):
        super().__init__(config, shape)
        self.rotated = config.rotated
        self.rate_G = nn.Parameter(torch.full((shape.groups,), 0.7 / config.half_life))
        self.gate = nn.Linear(shape.dim, shape.heads)
        self.register_buffer("order_K", torch.arange(shape.key).flip(0))
        self.register_buffer("ones_1", torch.ones(1), persistent=False)

    def empty_state(self, batch, device):
        shape = self.shape
        sums = torch.zeros(batch, shape.groups, shape.key, shape.value, device=device)
        return MixerState(torch.zeros(batch, dtype=torch.int64, device=device), {"sums": sums})

    def mix(self, inputs, state=None):
        B, _, T, _ = inputs.q_BHTK.shape
        valid = inputs.valid_BT
        valid = torch.ones(B, T, dtype=torch.bool, device=inputs.x_BTD.device) if valid is None else valid
        q, k, v = (
            inputs.q_BHTK[..., self.order_K].float(),
            inputs.k_BGTK[..., self.order_K].float(),
            inputs.v_BGTV.float(),
        )
        start = self.empty_state(B, k.device) if state is None else state
        sums, decay, outs = start.tensors["sums"], torch.exp(-self.rate_G.float())[:, None, None], []
        for t in range(T):
            new = decay * sums + k[:, :, t, :, None] * v[:, :, t, None, :] * self.ones_1.float()
            sums = torch.where(valid[:, t, None, None, None], new, sums)
            outs.append(
                torch.einsum("bgjk,bgkv->bgjv", q[:, :, t].unflatten(1, (self.shape.groups, -1)), sums).flatten(1, 2)
            )
        gate = torch.sigmoid(self.gate(inputs.x_BTD)).float().transpose(1, 2)[..., None]
        out = (torch.stack(outs, dim=2) * self.shape.scaling * gate).to(inputs.q_BHTK.dtype)
        after = None if state is None else MixerState(state.seen_B + valid.sum(1), {"sums": sums})
        return out, after

    def dense(self, inputs):
        return self.mix(replace(inputs))[0]


@contextmanager
def register_test_mixers():
    """Register both mixers for one test module, so that other tests' loops over MIXERS do not see them."""
    before = dict(MIXERS._by_config), dict(MIXERS._by_name)
    for config, mixer in ((ExactConfig, ExactMixer), (DecayedConfig, DecayedMixer)):
        MIXERS.register(config)(mixer)
    try:
        yield
    finally:
        for config in (ExactConfig, DecayedConfig):
            MIXERS._by_config.pop(config)
            MIXERS._by_name.pop(config.name)
    assert set(before[1]) <= set(MIXERS._by_name)


@torch.no_grad()
def enlarge_parameters(model):
    """Make a new model's weights large enough that each layer matters; return the model."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(20.0 if "embed" in name or "wte" in name else 4.0)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_model(family: str, **changes):
    """Return a tiny model in eval mode, with weights large enough that layers matter."""
    from helpers.small import tiny_config

    torch.manual_seed(0)
    cls, config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    return enlarge_parameters(cls(config).eval())


def random_model_with_mixers(family: str, config: MixerConfig, layers=None, **changes):
    """Return such a model with mixers, perturbed, in the given layers or in all."""
    from surgery.architectures.attention import attention_paths
    from surgery.modeling.attention import install

    model = random_model(family, **changes)
    paths = attention_paths(model)
    install(model, {paths[i]: config for i in (range(len(paths)) if layers is None else layers)})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mixer." in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
