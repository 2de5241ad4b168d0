"""Masks that depend on the distance, computed by FFT: M_ts = Re(phase_t h[t - s] phase_s), Toeplitz (phase 1) and
Fourier.

Kernel scores: o_t = sum_f q_tf (h * (k_f v))_t, one convolution over time per feature and value, in T log T by FFT.
A group of features at a time bounds the memory; activations are recomputed in the backward pass.
Delta rule: every token changes all earlier keys, u_s <- (I - beta_t k_t k_t^T) u_s, which is no convolution. `chunked`
is then the exact quadratic sum, one chunk of queries at a time.

The state is the whole history and grows with the length n: `keys` (B, G, n, F), for the delta rule the changed keys
u_s, and `values` (B, G, n, V), with the latest token last in every row. A step reads all of it. S = n + T.
Written signals that a mask has are kept too, (B, n, ..), with the first token first.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import Mask, MaskInputs, MaskState, Signals
from surgery.mixers.masks.chunking import ChunkLayout, index_rowwise, upcast_inputs
from surgery.mixers.masks.delta_rule import ChunkScores, chunk_scores

# Maximum number of complex elements per group of features.
FFT_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}


class DistanceMask(Mask):
    """Base class. A subclass defines M twice: by its entries, and by h (`distances`) and phases."""

    has_bounded_state: ClassVar[bool] = False

    def entries(self, at_BT: Tensor, from_BS: Tensor, signals: Signals) -> Tensor:
        """Return M_BGJTS of positions at_BT and from_BS, zero for s > t; B, G and J may be 1.

        signals: the written signals of all tokens, from the first one on.
        """
        raise NotImplementedError

    def distances(self, length: int, signals: Signals) -> Tensor:
        """Return h_BGJS at distances 0 .. length - 1; B may be 1. signals: as in `entries`."""
        raise NotImplementedError

    def phase(self, position_BS: Tensor) -> Tensor | None:
        """Return the phase of each position, or None without phases."""
        return None

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        reach = cls.reach(config)
        return (length if reach is None else min(length, reach - 1)) * (features + values)

    @classmethod
    def state_size_by_block(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state that `by_block` leaves after `length` tokens, per key/value
        head.
        """
        reach = cls.reach(config)
        return (length if reach is None else min(length, reach)) * (features + values)

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        sizes = {"keys": features, "values": values}
        return {name: torch.zeros(rows, self.shape.groups, 0, size, device=device) for name, size in sizes.items()}

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of tokens at start .. start + length."""
        at_BT = start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)
        return self.entries(at_BT, at_BT, signals).expand(len(start_B), -1, -1, -1, -1)

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state)."""
        rows = upcast_inputs(rows)
        signals = self._signals_from_first(rows, state)
        if rows.beta_BGT is None:
            history = self._history(rows, state)
            k_BGSF, v_BGSV = (torch.cat(pair, 2) for pair in zip(history, (rows.k_BGTF, rows.v_BGTV)))
            out = self.kernel_output(rows, k_BGSF, v_BGSV, signals)
        else:
            out, k_BGSF, v_BGSV = self._quadratic(rows, state, signals, chunk)
        return out, None if state is None else self._next_state(rows, state, k_BGSF, v_BGSV) | signals

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state) for one token of each row."""
        rows = upcast_inputs(rows)
        signals = self._signals_from_first(rows, state)
        out, k_BGSF, v_BGSV = self._quadratic(rows, state, signals, 1)
        return out, self._next_state(rows, state, k_BGSF, v_BGSV) | signals

    def by_block(self, rows: MaskInputs, state: MaskState | None, block: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state) of queries that read the state at
        the start of their block, in quadratic time."""
        rows = upcast_inputs(rows)
        layout = ChunkLayout.unaligned(rows.start_B, rows.v_BGTV.shape[2], block)
        q_BGNJCF = layout.to_chunks(rows.q_BGJTF, 3).transpose(2, 3)
        beta = None if rows.beta_BGT is None else layout.to_chunks(rows.beta_BGT, 2)
        scores = chunk_scores(q_BGNJCF[..., :0, :], layout.to_chunks(rows.k_BGTF, 2), beta)
        (u_BGSF, v_BGSV), outs, signals = self._history(rows, state), [], self._signals_from_first(rows, state)
        for n, v_BGCV in enumerate(layout.to_chunks(rows.v_BGTV, 2).unbind(2)):
            outs.append(self._read_history(q_BGNJCF[:, :, n], rows.start_B + n * block, u_BGSF, v_BGSV, signals))
            u_BGSF, v_BGSV = append_chunk(u_BGSF, scores, n), torch.cat([v_BGSV, v_BGCV], 2)
        out_BGJTV = torch.cat(outs, 3)[:, :, :, : layout.length]
        if state is None:
            return out_BGJTV, None
        return out_BGJTV, self._next_state(rows, state, u_BGSF, v_BGSV, nearest=0) | signals

    def read(self, q_BGJTF: Tensor, start_B: Tensor, signals: Signals, state: MaskState) -> Tensor:
        """Return out_BGJTV of queries that all read the history from the position of its last token."""
        q_BGJTF = q_BGJTF.to(torch.promote_types(q_BGJTF.dtype, torch.float32))
        kept = {name: t.to(q_BGJTF.dtype) for name, t in state.items()}
        return self._read_history(q_BGJTF, start_B, kept["keys"], kept["values"], kept)

    def _read_history(self, q_BGJTF: Tensor, end_B: Tensor, u_BGSF: Tensor, v_BGSV: Tensor, signals: Signals) -> Tensor:
        """Return out_BGJTV of queries at position end - 1, which is that of the last of S keys and values."""
        at_B1 = (end_B - 1).unsqueeze(1)
        from_BS = at_B1 - torch.arange(v_BGSV.shape[2] - 1, -1, -1, device=at_B1.device)
        mask_BGJ1S = self.entries(at_B1, from_BS, signals).to(v_BGSV.dtype)
        return ((q_BGJTF @ u_BGSF.mT.unsqueeze(2)) * mask_BGJ1S) @ v_BGSV.unsqueeze(2)

    def _history(self, rows: MaskInputs, state: MaskState | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of the state in the dtype of the call."""
        if state is None:
            return rows.k_BGTF[:, :, :0], rows.v_BGTV[:, :, :0]
        return state["keys"].to(rows.v_BGTV.dtype), state["values"].to(rows.v_BGTV.dtype)

    def _signals_from_first(self, rows: MaskInputs, state: MaskState | None) -> Signals:
        """Return the written signals (B, n, ..) of all tokens of each row, the first token first and zeros after the
        last one; none at distances that `reach` excludes.
        """
        new, reach = {name: rows.signals[name] for name in self.written_signals}, self.reach(self.config)
        if not new or state is None:
            return {name: t[:, :reach] for name, t in new.items()}
        size = int((rows.start_B + rows.count_B).max())
        place_n = torch.arange(size if reach is None else min(size, reach), device=rows.start_B.device)
        signals = {}
        for name, t in new.items():
            past, after_Bn = state[name].to(t.dtype), place_n - rows.start_B.unsqueeze(1)
            all_tokens = F.pad(torch.cat([past, t], 1), (0, 0) * (t.dim() - 2) + (0, 1))
            index_Bn = torch.where(after_Bn < 0, place_n, past.shape[1] + after_Bn.clamp_max(t.shape[1]))
            signals[name] = index_rowwise(all_tokens, index_Bn)
        return signals

    def kernel_output(self, rows: MaskInputs, k_BGSF: Tensor, v_BGSV: Tensor, signals: Signals) -> Tensor:
        """Return out_BGJTV for kernel scores, by FFT."""
        size, length = v_BGSV.shape[2], rows.v_BGTV.shape[2]
        h_BGJS = self.distances(size, signals)
        points = 1 << (size + max(1, h_BGJS.shape[-1]) - 2).bit_length()
        at_BS = rows.start_B.unsqueeze(1) - (size - length) + torch.arange(size, device=rows.start_B.device)
        elements = rows.q_BGJTF[:, :, :, 0, 0].numel() * v_BGSV.shape[-1] * points
        out = torch.zeros((), dtype=v_BGSV.dtype, device=v_BGSV.device)
        max_elements = FFT_ELEMENTS.get(out.device.type, FFT_ELEMENTS["cuda"])
        for q_BGJTf, k_BGSf in zip(*(x.split(max(1, max_elements // elements), -1) for x in (rows.q_BGJTF, k_BGSF))):
            args = (q_BGJTf, k_BGSf, v_BGSV, h_BGJS, self.phase(at_BS), points)
            out = out + checkpoint(fft_filter, *args, use_reentrant=False)
        return out

    def _quadratic(
        self, rows: MaskInputs, state: MaskState | None, signals: Signals, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (out_BGJTV, keys and values of the history and the call) for both score rules, in quadratic time."""
        length = rows.v_BGTV.shape[2]
        layout = ChunkLayout.unaligned(rows.start_B, length, chunk)
        beta = None if rows.beta_BGT is None else layout.to_chunks(rows.beta_BGT, 2)
        v_BGNCV = layout.to_chunks(rows.v_BGTV, 2)
        scores = chunk_scores(layout.to_chunks(rows.q_BGJTF, 3).transpose(2, 3), layout.to_chunks(rows.k_BGTF, 2), beta)
        (u_BGSF, v_BGSV), outs = self._history(rows, state), []
        for n in range(layout.count):
            past_BGJCS = scores.read_xJCF[:, :, n] @ u_BGSF.mT.unsqueeze(2)
            v_BGSV = torch.cat([v_BGSV, v_BGNCV[:, :, n]], 2)
            at_BC = (
                rows.start_B.unsqueeze(1) + n * layout.chunk + torch.arange(layout.chunk, device=rows.start_B.device)
            )
            from_BS = at_BC[:, -1:] - torch.arange(v_BGSV.shape[2] - 1, -1, -1, device=at_BC.device)
            mask_BGJCS = self.entries(at_BC, from_BS, signals).to(v_BGSV.dtype)
            all_BGJCS = torch.cat([past_BGJCS, scores.inner_xJCC[:, :, n]], -1)
            outs.append((all_BGJCS * mask_BGJCS) @ v_BGSV.unsqueeze(2))
            u_BGSF = append_chunk(u_BGSF, scores, n)
        return torch.cat(outs, 3)[:, :, :, :length], u_BGSF, v_BGSV

    def _next_state(
        self, rows: MaskInputs, state: MaskState, k_BGSF: Tensor, v_BGSV: Tensor, nearest: int = 1
    ) -> MaskState:
        """Return the keys and values within reach of later tokens: the last real token of each row last, zeros before
        its first. nearest: distance at which later queries read the last token."""
        size, reach = int((rows.start_B + rows.count_B).max()), self.reach(self.config)
        size = max(size if reach is None else min(size, reach - nearest), 0)
        last_B1 = (state["keys"].shape[2] + rows.count_B).unsqueeze(1)
        index_Bn = last_B1 - size + torch.arange(size, device=last_B1.device)
        row_B1 = torch.arange(len(index_Bn), device=index_Bn.device).unsqueeze(1)
        after = {}
        for name, x in (("keys", k_BGSF), ("values", v_BGSV)):
            x = F.pad(x, (0, 0, 1, 0))  # entry 0: zeros for slots before the history
            after[name] = x.transpose(1, 2)[row_B1, (index_Bn + 1).clamp_min(0)].transpose(1, 2)
        return after


def append_chunk(u_BGSF: Tensor, scores: ChunkScores, n: int) -> Tensor:
    """Return the keys of the history followed by those of chunk n, which changes the former under the delta rule."""
    if scores.keys_xCF is not None:
        u_BGSF = u_BGSF - (u_BGSF @ scores.keys_xCF[:, :, n].mT) @ scores.write_xCF[:, :, n]
    return torch.cat([u_BGSF, scores.write_xCF[:, :, n]], 2)


def fft_filter(
    q_BGJTF: Tensor, k_BGSF: Tensor, v_BGSV: Tensor, h_BGJS: Tensor, phase_BS: Tensor | None, points: int
) -> Tensor:
    """Return sum_f q_tf Re(phase_t sum_s h[t - s] phase_s k_sf v_s) (B, G, J, T, V) for the last T of S positions.

    points: length of the FFT.
    """
    size, length = v_BGSV.shape[2], q_BGJTF.shape[3]
    kv_BGFVS = torch.einsum("bgsf,bgsv->bgfvs", k_BGSF, v_BGSV)
    if phase_BS is None:
        spectrum = torch.fft.rfft(kv_BGFVS, points).unsqueeze(2) * torch.fft.rfft(h_BGJS, points)[..., None, None, :]
        sums = torch.fft.irfft(spectrum, points)[..., size - length : size]
    else:
        phase_B111S = phase_BS[:, None, None, None]
        spectrum = torch.fft.fft(kv_BGFVS * phase_B111S, points).unsqueeze(2)
        sums = torch.fft.ifft(spectrum * torch.fft.fft(h_BGJS, points)[..., None, None, :])[..., size - length : size]
        sums = (sums * phase_B111S.unsqueeze(2)[..., size - length :]).real
    return torch.einsum("bgjtf,bgjfvt->bgjtv", q_BGJTF, sums)
