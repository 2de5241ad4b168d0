"""Log-linear attention in the linear layers that a model has of its own: Gated DeltaNet, Mamba-2 and Kimi delta
attention (Guo et al. 2025).

    O = (A . M) V,   M_ts = lambda_t^(level(t, s)) x gates_ts,   lambda_t^(l) = softplus(W_l x_t + b_l) / log 2

The layer computes queries, keys, values, gates and the step sizes beta as before; the mixer adds the level weights
lambda. With W = b = 0 they are exactly 1, in every dtype in which W and b are stored, and M is the layer's own mask of
gates. Gated DeltaNet reads A with the delta rule; Mamba-2 has kernel scores, with q = C, k = B and v = dt x. The gates of
Kimi delta attention, one for each key channel, are no mask (masks/channel_gates.py).

There is one group per value head (J = 1 query head). r = G / g value heads share each of g heads of queries and keys. For
several tokens the g heads become rows of the batch, with r groups that read one query and one key: no copy is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.base import (
    MIXERS,
    AttentionShape,
    Mixer,
    MixerCost,
    MixerInputs,
    MixerState,
)
from surgery.mixers.common.bidirectional import dense_output
from surgery.mixers.masks.base import Mask, MaskInputs
from surgery.mixers.masks.channel_gates import CHUNK as CHANNELS_CHUNK
from surgery.mixers.masks.channel_gates import log_linear_channels
from surgery.mixers.masks.gates import Gates, GatesMask
from surgery.mixers.masks.log_linear import Hierarchical, HierarchicalMask, pool_plan, step_alive_buckets
from surgery.mixers.native_config import Native
from surgery.mixers.padding import Unpadder
from surgery.mixers.projections import Float32Linear, autocast_disabled

CHUNK = 64  # tokens per chunk in training and prefill


@dataclass
class NativeInputs(MixerInputs):
    """Inputs of one call, after the layer's convolution.

    q_BHTK, k_BGTK: with the heads that share queries and keys, which divide those of v_BGTV. All as the products need
    them (normalized, scaled, times dt). gate_BTG:
    log-gates, (B, T, G, K) if they differ from key channel to key channel. beta_BGT: step sizes of the delta rule, None for
    kernel scores.
    """

    gate_BTG: Tensor | None = None
    beta_BGT: Tensor | None = None

    def at_tokens(self, index: slice | Tensor) -> NativeInputs:
        """Return the inputs of some tokens."""
        assert self.gate_BTG is not None
        beta_BGT = None if self.beta_BGT is None else self.beta_BGT[:, :, index]
        tokens: NativeInputs = super().at_tokens(index)  # type: ignore[assignment]
        return replace(tokens, gate_BTG=self.gate_BTG[:, index], beta_BGT=beta_BGT)


def _may_overwrite(state: MixerState) -> bool:
    """Return whether a step may update the state in place: nobody else reads it, no gradient needs it, and it is on a
    CPU, where no kernel takes steps.
    """
    buckets = state.tensors["buckets"]
    inference = buckets.is_inference() and not torch.is_inference_mode_enabled()
    plain = not (torch.compiler.is_compiling() or torch.is_grad_enabled() or buckets.requires_grad or inference)
    return plain and state.donated and state.max_seen is not None and buckets.device.type == "cpu"


def _expand_heads(rows: MaskInputs) -> MaskInputs:
    """Return the inputs with a query and a key for every value head: copies, for a single token or the definition."""

    def expanded(x: Tensor) -> Tensor:
        copies = rows.v_BGTV.shape[1] // x.shape[1]
        x_BG: Tensor = x.unsqueeze(2).expand(-1, -1, copies, *x.shape[2:]).flatten(1, 2)
        return x_BG

    return replace(rows, q_BGJTF=expanded(rows.q_BGJTF), k_BGTF=expanded(rows.k_BGTF))


def _heads_as_rows(rows: MaskInputs) -> MaskInputs:
    """Return the inputs with a row for each head of queries and keys, all of whose groups read the same ones."""
    heads = rows.k_BGTF.shape[1]

    def of_groups(x: Tensor, dim: int) -> Tensor:
        x_R: Tensor = x.unflatten(dim, (heads, -1)).movedim(dim, 1).flatten(0, 1)
        return x_R

    return replace(
        rows,
        q_BGJTF=rows.q_BGJTF.flatten(0, 1).unsqueeze(1),
        k_BGTF=rows.k_BGTF.flatten(0, 1).unsqueeze(1),
        v_BGTV=of_groups(rows.v_BGTV, 1),
        beta_BGT=None if rows.beta_BGT is None else of_groups(rows.beta_BGT, 1),
        start_B=rows.start_B.repeat_interleave(heads),
        count_B=rows.count_B.repeat_interleave(heads),
        signals={name: of_groups(signal, 2) for name, signal in rows.signals.items()},
    )


class _GivenGates(GatesMask):
    """Gates that come with the call as signal `gate`, without parameters."""

    def __init__(self, config: Gates, shape: AttentionShape):
        Mask.__init__(self, config, shape)


class _GivenLevels(HierarchicalMask):
    """The log-linear mask, with level weights and gates that come with the call as signals, without parameters."""

    def __init__(self, config: Hierarchical, shape: AttentionShape):
        Mask.__init__(self, config, shape)
        self.gates = _GivenGates(config.gates, shape)
        self.written_signals = self.gates.written_signals
        self.matrices = None


def mask_config(config: Native) -> Hierarchical:
    """Return the config of the mask."""
    return Hierarchical(levels=config.levels, block=config.block)


@MIXERS.register(Native)
class NativeMixer(Mixer):
    """Level weights of a native linear layer. Parameters: `level`, W (value heads x levels, dim) and b."""

    config: Native
    rotated = False
    counts_tokens = True

    def __init__(self, config: Native, shape: AttentionShape):
        super().__init__(config, shape)
        self.level = Float32Linear(shape.dim, shape.groups * config.levels)
        torch.nn.init.zeros_(self.level.weight)
        torch.nn.init.zeros_(self.level.bias)
        self.mask = _GivenLevels(mask_config(config), shape)

    def level_weights(self, x_BTD: Tensor) -> Tensor:
        """Return lambda of the hidden states, (B, T, G, 1, levels), in float32 or float64."""
        z_BTL: Tensor = self.level(x_BTD)
        lambda_BTL = F.softplus(z_BTL) / F.softplus(z_BTL.new_zeros(()))  # exactly 1 at z = 0
        lambda_BTGJL: Tensor = lambda_BTL.unflatten(-1, (self.shape.groups, 1, self.config.levels))
        return lambda_BTGJL

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        buckets = self.mask("empty_state", batch, self.shape.key, self.shape.value, device)
        return MixerState(torch.zeros(batch, dtype=torch.int64, device=device), buckets, max_seen=0)

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        with autocast_disabled(inputs.x_BTD.device):
            unpadder = self._unpadder(inputs)
            rows = self._rows(inputs, unpadder, state)
            before = None if state is None else state.tensors
            buckets: dict[str, Tensor] | None
            by_channel, is_step = rows.signals["gate"].dim() == 4, inputs.x_BTD.shape[1] == 1
            if state is not None and is_step and _may_overwrite(state):
                out_BGJTV, buckets = self._step_in_place(_expand_heads(rows), state.tensors)
            elif by_channel:
                out_BGJTV, buckets = self._mix_channels(rows, state)
            elif before is not None and is_step:
                out_BGJTV, buckets = self._step(_expand_heads(rows), before)
            else:
                out_BGJTV, buckets = self._mix_chunks(rows, before)
            out_BHTV = unpadder.pad(out_BGJTV.squeeze(2), dim=2)
        if state is None or buckets is None:
            return out_BHTV, None
        return out_BHTV, MixerState(state.seen_B + unpadder.count_B, buckets, rows.max_seen)

    def _step(self, rows: MaskInputs, before: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (out_BGJTV, the mask's state after one token of each row)."""
        out_BGJTV, after = self.mask("step", rows, before)
        return out_BGJTV, after

    def _step_in_place(self, rows: MaskInputs, before: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`_step` that reads and writes only the buckets that hold tokens, in place."""
        assert rows.max_seen is not None
        bits, buckets_BLGFV = self.config.block.bit_length() - 1, before["buckets"]
        size = (rows.max_seen >> bits).bit_length() + (bits > 0)
        if size > buckets_BLGFV.shape[1]:
            buckets_BLGFV = F.pad(buckets_BLGFV, (0, 0, 0, 0, 0, 0, 0, size - buckets_BLGFV.shape[1]))
        pool, page_B = {"buckets": buckets_BLGFV}, torch.arange(len(buckets_BLGFV), device=buckets_BLGFV.device)
        if rows.signals["gate"].dim() == 3:
            out_BGJTV: Tensor = self.mask("step_in_pool", rows, pool, page_B)
            return out_BGJTV, pool
        assert rows.beta_BGT is not None
        counts = tuple(rows.start_B.tolist()), tuple(rows.count_B.tolist())
        out_BGJV = step_alive_buckets(
            rows.q_BGJTF.squeeze(3),
            rows.k_BGTF.squeeze(2),
            rows.v_BGTV.squeeze(2),
            rows.beta_BGT.squeeze(2),
            rows.signals["gate"].squeeze(1),
            rows.signals["level"].squeeze(1),
            pool_PNGFV=buckets_BLGFV,
            page_B=page_B,
            plan=pool_plan(*counts, bits, buckets_BLGFV.shape[1], page_B.device),
            first_level=0 if bits else 1,
        )
        return out_BGJV.unsqueeze(3), pool

    def _mix_chunks(
        self, rows: MaskInputs, before: dict[str, Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return (out_BGJTV, the mask's state after the tokens, or None without a state)."""
        heads, groups = rows.k_BGTF.shape[1], self.shape.groups
        if heads == groups:
            out_BGJTV, after = self.mask("chunked", rows, before, CHUNK)
            return out_BGJTV, after
        if before is not None:
            buckets_BLGFV = before["buckets"]
            before = {"buckets": buckets_BLGFV.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)}
        out, after = self.mask("chunked", _heads_as_rows(rows), before, CHUNK)
        out_BGJTV = out.unflatten(0, (-1, heads)).flatten(1, 2)
        if after is None:
            return out_BGJTV, None
        return out_BGJTV, {"buckets": after["buckets"].unflatten(0, (-1, heads)).transpose(1, 2).flatten(2, 3)}

    def _mix_channels(
        self, rows: MaskInputs, state: MixerState | None, chunk: int = CHANNELS_CHUNK
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return (out_BGJTV, buckets after the tokens, or None without a state) with gates by channel."""
        assert rows.beta_BGT is not None
        block = self.config.block
        before = None if state is None else state.tensors["buckets"]
        seen = int((rows.start_B + rows.count_B).max()) if rows.max_seen is None else rows.max_seen
        levels = max((seen // block).bit_length(), 0 if before is None else before.shape[1] - (block > 1))
        out_BGTV, after = log_linear_channels(
            rows.q_BGJTF.squeeze(2),
            rows.k_BGTF,
            rows.v_BGTV,
            rows.beta_BGT,
            rows.signals["gate"],
            rows.signals["level"].squeeze(3),
            start_B=rows.start_B,
            count_B=rows.count_B,
            buckets_BLGFV=before,
            levels=levels,
            block=block,
            chunk=chunk,
        )
        return out_BGTV.unsqueeze(2), None if after is None else {"buckets": after}

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time; with gates by channel token by token."""
        with autocast_disabled(inputs.x_BTD.device):
            unpadder = self._unpadder(inputs)
            rows = self._rows(inputs, unpadder, None)
            by_channel = rows.signals["gate"].dim() == 4
            if by_channel:
                out_BGJTV, _ = self._mix_channels(rows, None, chunk=1)
            else:
                out_BGJTV = dense_output(self.mask, _expand_heads(rows))
            return unpadder.pad(out_BGJTV.squeeze(2), dim=2)

    def _unpadder(self, inputs: MixerInputs) -> Unpadder:
        batch, length, _ = inputs.x_BTD.shape
        return Unpadder.from_mask(inputs.valid_BT, batch, length, inputs.x_BTD.device)

    def _rows(self, inputs: MixerInputs, unpadder: Unpadder, state: MixerState | None) -> MaskInputs:
        """Return the inputs of the mask: real tokens first in each row, counted from the row's first token."""
        assert isinstance(inputs, NativeInputs) and inputs.gate_BTG is not None
        beta_BGT, tokens = inputs.beta_BGT, inputs.x_BTD.shape[1]
        seen_B = torch.zeros_like(unpadder.count_B) if state is None else state.seen_B
        before = 0 if state is None else state.max_seen
        return MaskInputs(
            q_BGJTF=unpadder.unpad(inputs.q_BHTK, dim=2).unsqueeze(2),
            k_BGTF=unpadder.unpad(inputs.k_BGTK, dim=2),
            v_BGTV=unpadder.unpad(inputs.v_BGTV, dim=2),
            beta_BGT=None if beta_BGT is None else unpadder.unpad(beta_BGT, dim=2),
            start_B=seen_B,
            count_B=unpadder.count_B,
            signals={
                "level": self.level_weights(unpadder.unpad(inputs.x_BTD, dim=1)),
                "gate": unpadder.unpad(inputs.gate_BTG, dim=1),
            },
            max_seen=None if before is None else before + tokens,
        )

    @classmethod
    def cost(cls, config: Native, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        state = HierarchicalMask.state_size(mask_config(config), shape, shape.key, shape.value, length)
        params = shape.groups * config.levels * (shape.dim + 1)
        macs = shape.groups * (state + 3 * shape.key * shape.value) + shape.groups * config.levels * shape.dim
        return MixerCost(shape.groups * state, macs, params, float32=shape.groups * state)
