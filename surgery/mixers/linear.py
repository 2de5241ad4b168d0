"""How linear-type attention is chosen, and what is refused.

Linear-type attention: O = (A . M) V, A a kernel of features or the delta rule, M one structured mask (design.md).

    kernel:  A_ts = phi(q_t) . phi(k_s)                                   delta:  A = T_K (see scores.py), k of unit norm
    normalise: O_t / sum_s (A . M)_ts, by a column of ones beside V carried through the same recurrence
               (z of Katharopoulos et al. 2020, eq. 12; TBM eq. 1, where the denominator of its eq. 4 cancels)
    window, sinks: far tokens by the linear part, near ones and the first ones by softmax (surgery/mixers/common/window_hybrid.py)

Of what the library masks only padding is seen here (valid_BT; packed documents come as rows of their own), and a
module's own sliding window ends: the linear part sees all tokens. Attention dropout has no weights to act on. Bidirectional attention reads masks
that are causal by nature forwards and backwards (surgery/mixers/common/bidirectional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import dispatched
from surgery.core.errors import SurgeryError
from surgery.core.registry import Registry
from surgery.mixers.base import (
    MIXERS,
    AttentionShape,
    Mixer,
    MixerConfig,
    MixerCost,
    MixerInputs,
    MixerState,
    from_options,
)
from surgery.mixers.common.bidirectional import bidirectional_output, dense_output, zero_padding_writes
from surgery.mixers.common.meta_weights import EmptyOnMeta
from surgery.mixers.common.padding import Unpadder, shift_rows
from surgery.mixers.common.window_hybrid import RingAndSinks, Tensors, WindowBuffer, local_attention
from surgery.mixers.features.base import FEATURES
from surgery.mixers.layers import HeadNorm, OutputGate, ShortConvolution
from surgery.mixers.masks.base import MASKS, MaskInputs
from surgery.mixers.projections import Float32Linear, autocast_disabled

SIGNED_MASKS = ("toeplitz", "fourier")  # masks whose entries may be negative
BIDIRECTIONAL_MASKS = ("blocks", "toeplitz_blocks")  # masks that are bidirectional themselves


@dataclass(frozen=True)
class LinearAttention(MixerConfig):
    """mask, features: configs, or how recipes write them: "decay", {"name": "decay", ..}.

    rope: whether q and k come rotated. chunk: tokens at once in training and prefill. convolution: width of a short
    one on q, k and v (0: none). gate: on the output, one number for each head or for each value. norm: of each
    head's output. window, sinks: tokens that softmax attends to (0: none). linear_weight: of the linear part's output
    at the start, learned per head; the softmax part starts at 1.
    """

    name: ClassVar[str] = "linear"
    mask: Any = "gates"
    features: Any = "identity"
    scores: Literal["kernel", "delta"] = "kernel"
    normalise: bool = False
    rope: Literal["keep", "drop"] = "keep"
    chunk: int = 64
    convolution: int = 0
    gate: Literal["head", "value"] | None = None
    norm: Literal["rms"] | None = None
    window: int = 0
    sinks: int = 0
    linear_weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", parse_nested_config(MASKS, self.mask))
        object.__setattr__(self, "features", parse_nested_config(FEATURES, self.features or "identity"))
        words = {"scores": ("kernel", "delta"), "rope": ("keep", "drop"), "gate": (None, "head", "value")}
        for option, valid in {**words, "norm": (None, "rms")}.items():
            if getattr(self, option) not in valid:
                raise SurgeryError(f"linear: {option} {getattr(self, option)!r}; valid: {', '.join(map(str, valid))}")
        for option, least in {"chunk": 1, "convolution": 0, "window": 0, "sinks": 0}.items():
            if getattr(self, option) < least:
                raise SurgeryError(f"linear: {option} {getattr(self, option)} must be {least} or more")


def parse_nested_config(registry: Registry[Any], value: Any) -> Any:
    """A config from a config, its name, or a mapping with its name."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        if not hasattr(value, "name"):
            raise SurgeryError(f"linear: {registry.what} {value!r} is no {registry.what}; use {registry.names()[0]!r}")
        return value
    options = dict(value)
    return from_options(registry.config_type(str(options.pop("name", ""))), options)


def mask_shape(config: LinearAttention, shape: AttentionShape) -> AttentionShape:
    """What the mask is told: one that is causal by nature is read forwards and backwards."""
    return shape if config.mask.name in BIDIRECTIONAL_MASKS else replace(shape, causal=True)


def check_config(config: LinearAttention, shape: AttentionShape) -> None:
    """SurgeryError where this config cannot serve that attention; says why."""
    if shape.heads % shape.groups:
        raise SurgeryError(f"linear: {shape.heads} query heads cannot share {shape.groups} key/value heads evenly")
    features = FEATURES[config.features]
    if config.normalise and config.scores == "delta":
        raise SurgeryError("linear: the delta rule's scores may be negative, so normalise: true has no meaning")
    if config.normalise and not (features.positive or features.least > 0):
        raise SurgeryError(
            f"linear: {config.features.name} scores may be negative and cannot be normalised; "
            "use normalise: false, or features such as elu, hedgehog or favor"
        )
    if not config.normalise and getattr(config.features, "queries", "exact") == "scaled":
        raise SurgeryError(
            f"linear: {config.features.name} with queries: scaled divides each query by a number of its own, which only "
            "a normaliser takes out; use normalise: true, or queries: exact"
        )
    if config.normalise and config.mask.name in SIGNED_MASKS:
        raise SurgeryError(
            f"linear: a {config.mask.name} mask may be negative and cannot be normalised; "
            "use normalise: false, or a mask such as gates or toeplitz_blocks"
        )
    if not shape.causal and config.window + config.sinks > 0:
        raise SurgeryError(
            f"linear: window {config.window} and sinks {config.sinks} delay the linear part, which bidirectional "
            "attention cannot; use window: 0 and sinks: 0"
        )
    MASKS[config.mask].check_config(config.mask, mask_shape(config, shape), config.scores == "delta")


ReadFn = Callable[[MaskInputs], tuple[Tensor, Tensors | None]]

MIN_DENOMINATOR = 1e-30  # a denominator of nonnegative scores, all of them zero


@dataclass
class ProjectedTokens:
    """One call's tokens, packed and convolved."""

    q_BTHK: Tensor
    k_BTGK: Tensor
    v_BTGV: Tensor
    x_BTD: Tensor
    unpadder: Unpadder


@MIXERS.register(LinearAttention)
class LinearMixer(Mixer):
    """beta_proj: the delta rule's step sizes; near_weight_H, linear_weight_H: how the two parts mix."""

    config: LinearAttention

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        check_config(config, shape)
        self.rotated = config.rope == "keep"
        self.mask = MASKS[config.mask](config.mask, mask_shape(config, shape))
        self.feature_map = FEATURES[config.features](config.features, shape)
        self.beta_proj = Float32Linear(shape.dim, shape.groups) if config.scores == "delta" else None
        channels = shape.heads * shape.key + shape.groups * (shape.key + shape.value)
        self.convolution = ShortConvolution(channels, config.convolution) if config.convolution else None
        self.norm = HeadNorm(shape.heads, shape.value) if config.norm else None
        gates = {"head": 1, "value": shape.value}
        self.gate = OutputGate(shape.dim, shape.heads, gates[config.gate]) if config.gate else None
        self.window_buffer = WindowBuffer(config.window, config.sinks) if config.window + config.sinks else None
        self.near_weight_H = nn.Parameter(torch.ones(shape.heads)) if self.window_buffer else None
        # Where all is normalised together a factor on the whole would cancel.
        start_H = torch.full((shape.heads,), float(config.linear_weight))
        self.linear_weight_H = nn.Parameter(start_H) if self.window_buffer or not config.normalise else None

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        check_config(config, shape)

    # -- states --------------------------------------------------------------------------------------
    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        if not self.shape.causal:
            raise SurgeryError("linear: bidirectional attention has no state; call mix without one")
        kept = self.mask.empty_state(batch, self._width(), self.shape.value + self.config.normalise, device)
        past = self._past(batch, device)
        return replace(past, tensors={**past.tensors, **{f"mask.{name}": t for name, t in kept.items()}})

    def _past(self, batch: int, device: torch.device | str) -> MixerState:
        """What is remembered beside the mask's state: inputs of the convolution, the window, the sinks."""
        tensors: dict[str, Tensor] = {}
        if self.convolution is not None:
            channels, width = self.convolution.channels, self.convolution.width
            tensors["convolution"] = torch.zeros(batch, width - 1, channels, device=device)
        if self.window_buffer is not None:
            nothing_BWD = torch.zeros(batch, self.window_buffer.window, self.shape.dim, device=device)
            for name, t in self._written_signals(nothing_BWD, self.mask("signals", nothing_BWD)).items():
                tensors[f"ring.{name}"] = torch.zeros_like(t)
            for name, size in (("k", self.shape.key), ("v", self.shape.value)):
                tensors[f"ring.{name}"] = torch.zeros(
                    batch, self.window_buffer.window, self.shape.groups, size, device=device
                )
                tensors[f"sink.{name}"] = torch.zeros(
                    batch, self.window_buffer.sinks, self.shape.groups, size, device=device
                )
        return MixerState(torch.zeros(batch, dtype=torch.int64, device=device), tensors, max_seen=0)

    def _width(self) -> int:
        return self.feature_map.features(self.config.features, self.shape)

    def _written_signals(self, x_BTD: Tensor, signals: dict[str, Tensor]) -> dict[str, Tensor]:
        """What tokens write besides k and v: (B, T, ..) each."""
        written = {name: signals[name] for name in self.mask.written_signals}
        return written if self.beta_proj is None else {**written, "beta": self.beta_proj(x_BTD).sigmoid()}

    # -- the verb ------------------------------------------------------------------------------------
    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        window = self.config.window
        if state is None:
            past = self._past(len(inputs.x_BTD), inputs.x_BTD.device)
            return self._run(inputs, past, lambda rows: self._read(rows, None, inputs), max(window, 64))[0], None
        if not self.shape.causal:
            raise SurgeryError("linear: bidirectional attention has no state; call mix without one")
        return (one_token if inputs.x_BTD.shape[1] == 1 else mix_tokens)(inputs.q_BHTK, self, inputs, state)

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        past = self._past(len(inputs.x_BTD), inputs.x_BTD.device)
        return self._run(inputs, past, lambda rows: (dense_output(self.mask, rows), None), inputs.x_BTD.shape[1])[0]

    def _read(self, rows: MaskInputs, kept: Tensors | None, inputs: MixerInputs) -> tuple[Tensor, Tensors | None]:
        if kept is not None and rows.v_BGTV.shape[2] == 1:
            return self.mask("step", rows, kept)
        out_BGJTV, after = self.mask("chunked", to_matmul_dtype(rows, inputs.v_BGTV), kept, self.config.chunk)
        return out_BGJTV.to(rows.v_BGTV.dtype), after

    def _run(self, inputs: MixerInputs, past: MixerState, read: ReadFn, block: int) -> tuple[Tensor, MixerState]:
        with autocast_disabled(inputs.x_BTD.device):
            return self._mix_tokens(inputs, past, read, block)

    def _mix_tokens(self, inputs: MixerInputs, past: MixerState, read: ReadFn, block: int) -> tuple[Tensor, MixerState]:
        linear_BGJTV, near, tokens, after = self._parts(inputs, past, read, block)
        out_BTHV = tokens.unpadder.pad(self._finish(linear_BGJTV, near, tokens.x_BTD), dim=1)
        return out_BTHV.transpose(1, 2).to(inputs.v_BGTV.dtype), after

    def weighed(self, inputs: MixerInputs, weights: Sequence[float]) -> list[Tensor]:
        """Outputs (B, H, T, V) with each of these weights on the linear part of every head and the softmax part at 1.
        Both parts are computed once."""
        assert self.linear_weight_H is not None
        past = self._past(len(inputs.x_BTD), inputs.x_BTD.device)
        with autocast_disabled(inputs.x_BTD.device):
            read = lambda rows: self._read(rows, None, inputs)  # noqa: E731
            linear_BGJTV, near, tokens, _ = self._parts(inputs, past, read, max(self.config.window, 64))
            outs = []
            for weight in weights:
                linear_H = torch.full_like(self.linear_weight_H, weight)
                out_BTHV = self._finish(linear_BGJTV, near, tokens.x_BTD, linear_H, torch.ones_like(linear_H))
                outs.append(tokens.unpadder.pad(out_BTHV, dim=1).transpose(1, 2))
        return outs

    def _parts(
        self, inputs: MixerInputs, past: MixerState, read: ReadFn, block: int
    ) -> tuple[Tensor, RingAndSinks | None, ProjectedTokens, MixerState]:
        """(the linear part before its weight, the softmax part, the tokens, the state after them)."""
        tokens, after = self._tokens(inputs, past)
        unpadder, near = tokens.unpadder, None
        signals = self.mask("signals", tokens.x_BTD)
        written = {"k": tokens.k_BTGK, "v": tokens.v_BTGV, **self._written_signals(tokens.x_BTD, signals)}
        if self.window_buffer is not None:
            queue = self.window_buffer.queue(written, past.tensors)
            sinks = {n: self.window_buffer.fill_sinks(n, written[n], past.tensors, past.seen_B, unpadder) for n in "kv"}
            near = self._local_attention(tokens.q_BTHK, queue, sinks, past.seen_B, block)
            after = {
                **after,
                **self.window_buffer.next_rings(queue, unpadder),
                **{f"sink.{n}": t for n, t in sinks.items()},
            }
            written = self.window_buffer.delayed_tokens(queue)
        max_seen = None if past.max_seen is None else past.max_seen + inputs.x_BTD.shape[1]
        rows = replace(self._rows(tokens, written, signals, past.seen_B), max_seen=max_seen)
        linear_BGJTV, kept = self._linear(rows, read, unpadder)
        after.update({f"mask.{name}": t for name, t in (kept or {}).items()})
        return linear_BGJTV, near, tokens, MixerState(past.seen_B + unpadder.count_B, after, max_seen)

    def _tokens(self, inputs: MixerInputs, past: MixerState) -> tuple[ProjectedTokens, Tensors]:
        x_BTD, heads = inputs.x_BTD, (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV)
        unpadder = Unpadder.from_mask(inputs.valid_BT, x_BTD.shape[0], x_BTD.shape[1], x_BTD.device)
        q, k, v = (unpadder.unpad(t.transpose(1, 2), dim=1) for t in heads)
        if self.convolution is None:
            return ProjectedTokens(q, k, v, unpadder.unpad(x_BTD, dim=1), unpadder), {}
        channels_BTC = torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1)
        channels_BTC, past_BWC = self.convolution(channels_BTC, past.tensors["convolution"], unpadder)
        parts = channels_BTC.split([t.shape[2] * t.shape[3] for t in (q, k, v)], dim=-1)
        q, k, v = (part.view_as(t) for part, t in zip(parts, (q, k, v)))
        return ProjectedTokens(q, k, v, unpadder.unpad(x_BTD, dim=1), unpadder), {"convolution": past_BWC}

    def _rows(self, tokens: ProjectedTokens, written: Tensors, signals: Tensors, seen_B: Tensor) -> MaskInputs:
        """What the linear part reads and writes, entry i of the call's query i."""
        dtype, length = accumulation_dtype(tokens.q_BTHK), tokens.x_BTD.shape[1]
        position_BT = seen_B.unsqueeze(1) + torch.arange(length, device=seen_B.device)
        root = self.shape.scaling**0.5
        q_BHTF = self.feature_map("queries", tokens.q_BTHK.transpose(1, 2).to(dtype) * root, position_BT)
        k_BHTK = written["k"].transpose(1, 2).to(dtype) * root
        k_BGTF = self.feature_map("keys", k_BHTK, position_BT - self.config.window)
        if self.beta_proj is not None:
            q_BHTF, k_BGTF = l2_normalize(q_BHTF), l2_normalize(k_BGTF)
        v_BGTV = written["v"].transpose(1, 2).to(dtype)
        return MaskInputs(
            q_BGJTF=q_BHTF.unflatten(1, (self.shape.groups, -1)),
            k_BGTF=k_BGTF,
            v_BGTV=F.pad(v_BGTV, (0, 1), value=1.0) if self.config.normalise else v_BGTV,
            beta_BGT=written["beta"].mT if self.beta_proj is not None else None,
            start_B=seen_B,
            count_B=tokens.unpadder.count_B,
            signals={name: written.get(name, t) for name, t in signals.items()},
        )

    def _linear(self, rows: MaskInputs, read: ReadFn, unpadder: Unpadder) -> tuple[Tensor, Tensors | None]:
        """(out_BGJTV of the linear part, what the mask keeps)."""
        if self.window_buffer is not None:
            rows, offset_B = self.window_buffer.align_inputs(rows)
            out_BGJTV, kept = read(zero_padding_writes(rows, self.mask.written_signals))
            return shift_rows(out_BGJTV, -offset_B, dim=3), kept
        if unpadder.index_BT is not None:
            rows = zero_padding_writes(rows, self.mask.written_signals)
        if self.shape.causal or self.config.mask.name in BIDIRECTIONAL_MASKS:
            return read(rows)
        return bidirectional_output(lambda r: read(r)[0], self.mask, rows, unpadder), None

    def _local_attention(
        self, q_BTHK: Tensor, queue: Tensors, sinks: Tensors, seen_B: Tensor, block: int
    ) -> RingAndSinks:
        q_BGJTK = q_BTHK.transpose(1, 2).unflatten(1, (self.shape.groups, -1)).to(accumulation_dtype(q_BTHK))
        keys, values = ((queue[n].transpose(1, 2), sinks[n].transpose(1, 2)) for n in "kv")
        return local_attention(q_BGJTK, keys, values, seen_B, self.shape, block)

    def _finish(
        self,
        linear_BGJTV: Tensor,
        near: RingAndSinks | None,
        x_BTD: Tensor,
        linear_H: Tensor | None = None,
        near_H: Tensor | None = None,
    ) -> Tensor:
        """The two parts mixed (with the mixer's own weights unless others are given), the normaliser, norm and gate:
        out_BTHV."""
        linear_H = self.linear_weight_H if linear_H is None else linear_H
        near_H = self.near_weight_H if near_H is None else near_H
        out = linear_BGJTV.flatten(1, 2).transpose(1, 2)
        normalise = self.config.normalise
        if linear_H is not None:
            out = out * branch_weight(linear_H, out, normalise)
        if near is not None and near_H is not None:
            above, below = (t.flatten(1, 2).transpose(1, 2) for t in near)
            softmax = torch.cat([above, below], dim=-1) if normalise else above / below
            out = out + branch_weight(near_H, out, normalise) * softmax
        if normalise:
            out = out[..., :-1] / out[..., -1:].clamp_min(max(self.feature_map.least, MIN_DENOMINATOR))
        if self.norm is not None:
            out = self.norm(out)
        return out if self.gate is None else self.gate(out, x_BTD)

    @classmethod
    def cost(cls, config: Any, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        with EmptyOnMeta():
            mixer = cls(config, shape)
        mixer.to("meta")
        state = mixer._past(1, "meta")
        width, values = mixer._width(), shape.value + config.normalise
        near = min(length, config.window + config.sinks)
        kept = MASKS[config.mask].state_size(config.mask, mask_shape(config, shape), width, values, length - near)
        writes = shape.groups * width * values * (3 if config.scores == "delta" else 1)
        linears = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, (nn.Linear, ShortConvolution)))
        macs = shape.heads * (kept + near * (shape.key + shape.value)) + writes + linears
        return MixerCost(
            cache=shape.groups * kept + sum(t.numel() for t in state.tensors.values()),
            macs=macs + mixer.feature_map.macs(config.features, shape),
            params=sum(t.numel() for t in (*mixer.parameters(), *mixer.buffers())),
        )


def mix_tokens(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """What `mixer.mix(inputs, state)` is."""
    kept = {name[5:]: t for name, t in state.tensors.items() if name.startswith("mask.")}
    read = lambda rows: mixer._read(rows, kept, inputs)  # noqa: E731
    return mixer._run(inputs, state, read, max(mixer.config.window, 64))


@dispatched
def one_token(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """The same of one token a row, as a function of its queries that a kernel may stand in for."""
    return mix_tokens(q_BHTK, mixer, inputs, state)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """float32, or float64 where that came in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def to_matmul_dtype(rows: MaskInputs, v: Tensor) -> MaskInputs:
    """With queries, keys and values in bfloat16 where the layer's come so and a GPU multiplies faster in it; sums, gates
    and states stay as they are. Features of float16 may pass its range and stay too."""
    if v.dtype != torch.bfloat16 or not v.is_cuda:
        return rows
    q, k, v = (x.to(torch.bfloat16) for x in (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV))
    return replace(rows, q_BGJTF=q, k_BGTF=k, v_BGTV=v)


def l2_normalize(x: Tensor) -> Tensor:
    """Return x divided by its L2 norm over the last axis."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def branch_weight(weight_H: Tensor, out_BTHV: Tensor, normalise: bool) -> Tensor:
    """Against (B, T, H, V); in a common denominator not negative."""
    weight_H1 = weight_H.to(out_BTHV.dtype).unsqueeze(-1)
    return weight_H1.clamp_min(0) if normalise else weight_H1
