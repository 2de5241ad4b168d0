"""Mask of log-linear attention, M_ts = lambda_t^(level(t, s)) x gates (Guo et al. 2025, eq. 4, section 3.4).

A query at position t sees the past in buckets of a Fenwick tree: level 0 is t itself; level l >= 1 is the 2^(l-1)
tokens before the position t with its lowest l - 1 bits cleared, if bit l - 1 of t is set. In short, level(t, s) =
bit_length(t xor s), on absolute positions. With kernel scores and Gates this is log-linear Mamba-2; with the delta
rule, log-linear Gated DeltaNet.

The state after n tokens is one sum per set bit of n: `buckets` (B, L, G, F, V) with L = bit_length of the longest row.
Bucket l holds the tokens whose position differs from n in bit l but in no higher bit; other buckets are zeros. A token
reads all buckets. Then the token and all buckets below the lowest zero bit of n are merged into the bucket of that bit.

With strong admissibility (appendix B.4; strong_levels.py) the levels of the tokens differ, and buckets pass differently
from token to token. The number of buckets is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import dispatched
from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape, from_options
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs, MaskState, Signals
from surgery.mixers.masks.chunking import ChunkLayout, upcast_inputs
from surgery.mixers.masks.decay import Decay
from surgery.mixers.masks.gates import Gates
from surgery.mixers.masks.level_weights import (
    FORMS,
    LARGEST_BOUNDED,
    MATRICES,
    Form,
    LevelMatrices,
    Matrix,
    compute_lambdas,
    initial_scale,
    invert_lambdas,
    one_level_each,
)
from surgery.mixers.masks.log_linear_chunked import FenwickTree, bit_length
from surgery.mixers.masks.ones import Ones
from surgery.mixers.masks.semiseparable import Semiseparable, write_token
from surgery.mixers.masks.states_in_place import read_states, update_states
from surgery.mixers.masks.strong_levels import move_buckets, strong_chunks, strong_level
from surgery.mixers.projections import Float32Linear, float32_linear, is_hooked

if TYPE_CHECKING:
    from surgery.mixers.common.packed_pieces import PackedPieces


@dataclass(frozen=True)
class Hierarchical:
    """Config of the log-linear mask.

    levels: number of lambdas per query. Higher levels share the last one, so length is unlimited. "strong" is short for
    20 levels and `admissibility: strong`.
    block: tokens per leaf of the tree, a power of two. The levels within a block share the first lambda and one sum, so
    the state holds 1 + log2(T / block) sums instead of log2(T). gates: Gates, Decay or Ones (no gates), their names
    ("decay") or mappings, as in recipes. admissibility: which tokens share a level.
        weak    the first level at which query and token lie in the same block of 2^l tokens
        strong  the first at which they lie in the same block or in neighboring ones (strong_levels.py); block must be 1
    form: of lambda as a function of the hidden states: softplus, linear, positive or bounded (level_weights.py).
    matrix: scalar lambdas, or matrices Lambda of query features: diagonal, static or low_rank (level_weights.py), of
    rank `rank` if diagonal or low_rank.
    """

    name: ClassVar[str] = "hierarchical"
    levels: int | Literal["strong"] = 20
    gates: Any = "gates"
    block: int = 1
    admissibility: Literal["weak", "strong"] = "weak"
    form: Form = "softplus"
    matrix: Matrix = "scalar"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.levels == "strong":
            object.__setattr__(self, "levels", type(self).levels)
            object.__setattr__(self, "admissibility", "strong")
        gates = self.gates
        if isinstance(gates, str):
            gates = {"name": gates}
        if isinstance(gates, Mapping):
            options = dict(gates)
            gates = from_options(MASKS.config_type(str(options.pop("name", ""))), options)
        if not isinstance(gates, (Gates, Decay, Ones)):
            raise SurgeryError(f"hierarchical: gates must be gates, decay or ones (got {gates}); use ones for no gates")
        if not isinstance(self.levels, int):
            raise SurgeryError(f"hierarchical: levels must be a number or strong (got {self.levels!r}); for example 20")
        choices = {"admissibility": ("weak", "strong"), "form": FORMS, "matrix": MATRICES}
        for option, valid in choices.items():
            if getattr(self, option) not in valid:
                raise SurgeryError(
                    f"hierarchical: {option} must be one of {', '.join(valid)} (got {getattr(self, option)!r})"
                )
        if self.rank < 1:
            raise SurgeryError(f"hierarchical: rank must be 1 or more (got {self.rank}); for example 4")
        if self.levels < 2:
            raise SurgeryError(
                f"hierarchical: levels must be 2 or more (got {self.levels}), as level 0 is the query's own token; "
                "for example 20"
            )
        if self.block < 1 or self.block & (self.block - 1):
            raise SurgeryError(f"hierarchical: block must be a power of two (got {self.block}); for example 64")
        if self.block > 1 and self.admissibility == "strong":
            raise SurgeryError(
                f"hierarchical: block must be 1 with strong admissibility (got {self.block}), because a sum of the "
                "levels within a "
                "block would have to be split later; use block: 1, or levels: 20 for weak admissibility"
            )
        object.__setattr__(self, "gates", gates)

    @property
    def strong(self) -> bool:
        """Whether levels follow strong admissibility."""
        return self.admissibility == "strong"

    @property
    def lambdas(self) -> int:
        """The number of lambdas per query, `levels` as a number."""
        return int(self.levels)

    @property
    def block_bits(self) -> int:
        """log2 of the block: levels 0 to block_bits, which lie within a block, share the first lambda."""
        return self.block.bit_length() - 1


# Biases of lambda = 0 and lambda = 1, with c at its initial value: softplus maps -30 to 1e-13.
ONE_LEVEL_BIASES: dict[str, tuple[float, float]] = {
    "softplus": (-30.0, math.log(math.e - 1)),
    "linear": (0.0, 1.0),
    "positive": (-30.0, math.log(math.e - 1)),
    "bounded": (30.0, -30.0),
}


@MASKS.register(Hierarchical)
class HierarchicalMask(Mask):
    """Log-linear mask. Signal `level` (B, T, G, J, levels): lambda per query head, by default softplus(W x + b).

    Initially W = 0 and lambda = 1, so that the mask equals its gates; 0.99 in the form `bounded`.
    scale_HL: c of the forms of lambda, None for `softplus`. matrices: of matrix-valued Lambda, None for scalars.
    """

    config: Hierarchical

    def __init__(self, config: Hierarchical, shape: AttentionShape):
        super().__init__(config, shape)
        gates = MASKS[config.gates](config.gates, shape)
        assert isinstance(gates, Semiseparable)  # Hierarchical accepts no other masks
        self.gates = gates
        self.written_signals = gates.written_signals
        self.level = Float32Linear(shape.dim, shape.heads * config.lambdas)
        with torch.no_grad():
            self.level.weight.zero_()
            self.level.bias.copy_(invert_lambdas(config.form, torch.ones(())))
        scale_HL = torch.full((shape.heads, config.lambdas), initial_scale(config.form))
        self.scale_HL = None if config.form == "softplus" else nn.Parameter(scale_HL)
        kind = config.matrix
        self.matrices = None if kind == "scalar" else LevelMatrices(kind, config.rank, shape, config.lambdas)

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        bits: int = config.block_bits
        return (max(0, length.bit_length() - bits) + (bits > 0)) * features * values

    def signals(self, x_BTD: Tensor, length: int | None = None) -> Signals:
        """Return the tensors (B, T, ..) that the mask computes from the hidden states.

        With a bound on the positions, lambdas of levels that no token reaches are left out.
        """
        reached = self._reached_levels(length)
        scale_HL = None if self.scale_HL is None else self.scale_HL[:, :reached]
        scale = None if scale_HL is None else scale_HL.flatten()
        z_BTHL = self.level(x_BTD) if reached == self.config.lambdas else self._first_levels(x_BTD, reached)
        level_BTGJL = compute_lambdas(self.config.form, z_BTHL, scale).unflatten(-1, (self.shape.groups, -1, reached))
        more = {} if self.matrices is None else self.matrices("signals", x_BTD)
        return {"level": level_BTGJL, **more, **self.gates("signals", x_BTD)}

    def _reached_levels(self, length: int | None) -> int:
        """Return the number of lambdas that positions 0 .. length - 1 read; all of them where the mask's options number
        levels in another way, or where a hook or a replaced forward must see the whole projection."""
        if length is None or self.config.strong or self.matrices is not None or is_hooked(self.level):
            return self.config.lambdas
        return min(self.config.lambdas, max(0, (length - 1).bit_length() - self.config.block_bits) + 1)

    def _first_levels(self, x_BTD: Tensor, count: int) -> Tensor:
        """Return the outputs of `level` for the first `count` levels of each head, (B, T, heads x count)."""
        weight, bias = (
            t.unflatten(0, (self.shape.heads, -1))[:, :count].flatten(0, 1)
            for t in (self.level.weight, self.level.bias)
        )
        return float32_linear(x_BTD, weight, bias)

    def expand_queries(self, q_BGJTF: Tensor, signals: Signals) -> tuple[Tensor, Signals]:
        """Return (queries, signals) with a query for each level, if Lambda is matrix-valued."""
        if self.matrices is None:
            return q_BGJTF, signals
        q_BGJTF = self.matrices("queries", q_BGJTF, signals)
        others = {name: t for name, t in signals.items() if name != "diagonal"}
        return q_BGJTF, {**others, "level": one_level_each(signals["level"])}

    def sum_queries(self, out_BGJTV: Tensor) -> Tensor:
        """Return the outputs summed over the queries of all levels, if Lambda is matrix-valued."""
        if self.matrices is None:
            return out_BGJTV
        summed_BGJTV: Tensor = out_BGJTV.unflatten(2, (-1, self.config.lambdas)).sum(3)
        return summed_BGJTV

    @classmethod
    def query_macs(cls, config: Any, shape: AttentionShape, features: int) -> int:
        """Return multiply-accumulates of the matrices Lambda per token and query head."""
        return LevelMatrices.macs(config.matrix, config.rank, features, config.lambdas)

    @torch.no_grad()
    def set_constant_lambdas(self, lambda_HN: Tensor, levels: list[int]) -> Tensor:
        """Set the lambdas of these levels in place, by the bias; levels below and above get the first and the last of
        them.

        lambda_HN: >= 0, for each query head. Returns a factor (H,) that the mixer applies to the linear branch: 1, or
        in the form `bounded` what takes the largest lambda to 0.99.
        """
        lambda_HN, factor_H = (
            lambda_HN.double(),
            torch.ones(len(lambda_HN), dtype=torch.float64, device=lambda_HN.device),
        )
        if self.config.form == "bounded":
            factor_H = (lambda_HN.amax(-1) / LARGEST_BOUNDED).clamp_min(1e-6)
            lambda_HN = lambda_HN / factor_H.unsqueeze(-1)
        raw_HN, bias_HL = invert_lambdas(self.config.form, lambda_HN).float(), self.level.bias.view(len(lambda_HN), -1)
        bias_HL.copy_(raw_HN[:, -1:].expand_as(bias_HL))
        bias_HL[:, : levels[0]] = raw_HN[:, :1]
        bias_HL[:, levels] = raw_HN
        return factor_H.float()

    @torch.no_grad()
    def keep_one_level(self, level: int) -> None:
        """Set lambda in place to 1 at this level and to 0 at the others, up to 1e-12."""
        zero, one = ONE_LEVEL_BIASES[self.config.form]
        self.level.bias.fill_(zero)
        self.level.bias.view(-1, self.config.lambdas)[:, level] = one

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        sums = 1 if self.config.block_bits else 0
        return {"buckets": torch.zeros(rows, sums, self.shape.groups, features, values, device=device)}

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of tokens at start .. start + length."""
        at_BT = start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)
        level_BTT = self._lambda_numbers(at_BT.unsqueeze(2), at_BT.unsqueeze(1))
        level_BGJTL = signals["level"].movedim(1, 3)
        shape = (*level_BGJTL.shape[:-1], length)
        lambda_BGJTT = level_BGJTL.gather(-1, level_BTT[:, None, None].expand(shape))
        gates_BGJTT: Tensor = self.gates("dense", start_B, length, signals)
        return lambda_BGJTT * gates_BGJTT

    @property
    def is_standard(self) -> bool:
        """Whether the fused kernels of a decoding step, which compute levels and lambdas themselves, know the mask's
        options.
        """
        return not self.config.strong and self.config.form == "softplus" and self.config.matrix == "scalar"

    def _lambda_numbers(self, t: Tensor, s: Tensor) -> Tensor:
        """Return the number of the lambda with which position t reads position s <= t, at most levels - 1."""
        if self.config.strong:
            return strong_level(t, s).clamp_max(self.config.lambdas - 1)
        # Higher levels share the last lambda, so bit_length may stop there.
        bits = self.config.block_bits
        return (bit_length(t ^ s, self.config.lambdas - 1 + bits) - bits).clamp_min(0)

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state)."""
        if self.config.strong:
            return self._chunked_strong(rows, state, chunk)
        gates_BRGT = self.gates("log_gates", rows.start_B, rows.count_B, rows.v_BGTV.shape[2], rows.signals)
        bits = self.config.block_bits
        operands = rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV, rows.beta_BGT, gates_BRGT.squeeze(1), self._all_levels(rows)
        before = None if state is None else expand_buckets(state["buckets"], rows.start_B, bits)
        out, after = log_linear(
            *operands,
            start_B=rows.start_B,
            count_B=rows.count_B,
            buckets_BLGFV=before,
            chunk=chunk,
            levels=max_levels_after(rows, before),
        )
        return out, None if after is None else {"buckets": merge_low_buckets(after, bits)}

    def packed(self, row: MaskInputs, pieces: PackedPieces, state: MaskState, chunk: int) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the pieces) of pieces of several sequences in one row."""
        if self.config.strong:
            return super().packed(row, pieces, state, chunk)
        gates_BRGT = self.gates("log_gates", row.start_B, row.count_B, row.v_BGTV.shape[2], row.signals)
        operands = row.q_BGJTF, row.k_BGTF, row.v_BGTV, row.beta_BGT, gates_BRGT.squeeze(1), self._all_levels(row)
        bits = self.config.block_bits
        before = expand_buckets(state["buckets"], pieces.seen_R, bits)
        levels = max(before.shape[1], pieces.max_seen.bit_length())
        out, after = log_linear_packed(*operands, buckets_SLGFV=before, pieces=pieces, chunk=chunk, levels=levels)
        return out, {"buckets": merge_low_buckets(after, bits)}

    def packed_in_pool(
        self, row: MaskInputs, pieces: PackedPieces, pool: MaskState, page_R: Tensor, chunk: int
    ) -> Tensor:
        """Return out_BGJTV of `packed`, and update the alive buckets of each sequence in place."""
        if self.config.strong:  # its buckets are those of other positions
            in_use = count_sums(max(pieces.seen), self.config.block_bits)
            before = self.read_pages(pieces, {"buckets": pool["buckets"][:, :in_use]}, page_R)
            out_BGJTV, state = self.packed(row, pieces, before, chunk)
            grown = self.allocate(state, 2 ** pool["buckets"].shape[1] - 1)
            pool["buckets"][page_R] = grown["buckets"].to(pool["buckets"].dtype)
            return out_BGJTV
        gates_BRGT = self.gates("log_gates", row.start_B, row.count_B, row.v_BGTV.shape[2], row.signals)
        operands = row.q_BGJTF, row.k_BGTF, row.v_BGTV, row.beta_BGT, gates_BRGT.squeeze(1), row.signals["level"]
        out: Tensor = log_linear_in_pool(
            *operands,
            pool_PNGFV=pool["buckets"],
            page_R=page_R,
            pieces=pieces,
            chunk=chunk,
            block_bits=self.config.block_bits,
        )
        return out

    def allocate(self, state: MaskState, seen: int) -> MaskState:
        """Return the state with room for what it holds after so many tokens."""
        more = max(0, count_sums(seen, self.config.block_bits) - state["buckets"].shape[1])
        return {"buckets": F.pad(state["buckets"], (0, 0, 0, 0, 0, 0, 0, more))}

    def _chunked_strong(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        rows = upcast_inputs(rows)
        gates_BRGT = self.gates("log_gates", rows.start_B, rows.count_B, rows.v_BGTV.shape[2], rows.signals)
        before = None if state is None else state["buckets"].to(rows.v_BGTV.dtype)
        levels = max_levels_after(rows, before)
        levels = levels_after(before, rows.start_B, rows.count_B) if levels is None else levels
        gates_BGT = gates_BRGT.squeeze(1).to(rows.v_BGTV.dtype)
        out, after = strong_chunks(rows, gates_BGT, before, chunk, levels)
        return out, None if after is None else {"buckets": after}

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state) for one token of each row."""
        gate_BG = self.gates("log_gates", rows.start_B, rows.count_B, 1, rows.signals)[:, 0, :, 0]
        token = rows.q_BGJTF.squeeze(3), rows.k_BGTF.squeeze(2), rows.v_BGTV.squeeze(2)
        beta_BG = None if rows.beta_BGT is None else rows.beta_BGT.squeeze(2)
        bits = self.config.block_bits
        before = expand_buckets(state["buckets"], rows.start_B, bits)
        operands = *token, beta_BG, gate_BG, self._all_levels(rows).squeeze(1)
        # No kernel replaces the step with strong admissibility.
        step = partial(step_buckets, move=move_buckets) if self.config.strong else log_linear_step
        out_BGJV, after = step(
            *operands,
            start_B=rows.start_B,
            count_B=rows.count_B,
            buckets_BLGFV=before,
            levels=max_levels_after(rows, before),
        )
        return out_BGJV.unsqueeze(3), {"buckets": merge_low_buckets(after, bits)}

    def step_in_pool(self, rows: MaskInputs, pool: MaskState, page_B: Tensor) -> Tensor:
        """Return out_BGJTV of one token per row, and update the rows' pages in place: alive buckets only are read and
        written.
        """
        if self.config.strong:  # its buckets are those of other positions
            return super().step_in_pool(rows, pool, page_B)
        gate_BG = self.gates("log_gates", rows.start_B, rows.count_B, 1, rows.signals)[:, 0, :, 0]
        token = rows.q_BGJTF.squeeze(3), rows.k_BGTF.squeeze(2), rows.v_BGTV.squeeze(2)
        beta_BG = None if rows.beta_BGT is None else rows.beta_BGT.squeeze(2)
        level_BGJL = rows.signals["level"].squeeze(1)
        counts = tuple(rows.start_B.tolist()), tuple(rows.count_B.tolist())
        plan = pool_plan(*counts, self.config.block_bits, pool["buckets"].shape[1], page_B.device)
        out_BGJV = step_alive_buckets(
            *token,
            beta_BG,
            gate_BG,
            level_BGJL,
            pool_PNGFV=pool["buckets"],
            page_B=page_B,
            plan=plan,
            first_level=0 if self.config.block_bits else 1,
        )
        return out_BGJV.unsqueeze(3)

    def dense_by_block(self, start_B: Tensor, length: int, signals: Signals, block: int) -> Tensor:
        """Return M_BGJTT of queries that read the state at the start of their block.

        Levels are those of a query at the first token of the block: there, buckets are merged as in the state.
        """
        at_BT = start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)
        level_BGJTL = signals["level"].movedim(1, 3)
        index_BTT = self._lambda_numbers((at_BT // block * block).unsqueeze(2), at_BT.unsqueeze(1))[:, None, None]
        lambda_BGJTT = level_BGJTL.gather(-1, index_BTT.expand(*level_BGJTL.shape[:-1], length))
        gates_BGJTT: Tensor = self.gates("dense_by_block", start_B, length, signals, block)
        return lambda_BGJTT * gates_BGJTT

    def by_block(self, rows: MaskInputs, state: MaskState | None, block: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state) of queries that read the state at
        the start of their block. block: a power of two, so that blocks are the chunks of the tree."""
        if self.config.strong:
            return super().by_block(rows, state, block)
        rows = upcast_inputs(rows)
        gates_BRGT = self.gates("log_gates", rows.start_B, rows.count_B, rows.v_BGTV.shape[2], rows.signals)
        bits = self.config.block_bits
        before = None
        if state is not None:
            before = expand_buckets(state["buckets"].to(rows.v_BGTV.dtype), rows.start_B, bits)
        tree_rows = replace(rows, signals={"level": self._all_levels(rows)})
        length = rows.v_BGTV.shape[2]
        layout = ChunkLayout(
            length, length // block + 1, block, rows.start_B // block
        )  # needs no device synchronization
        gates_BGT = gates_BRGT.squeeze(1).to(rows.v_BGTV.dtype)
        tree = FenwickTree.from_inputs(tree_rows, gates_BGT, block.bit_length() - 1, layout)
        levels = max_levels_after(rows, before)
        levels = levels_after(before, rows.start_B, rows.count_B) if levels is None else levels
        out, after = tree.sweep_by_chunk(before, levels)
        return out, None if after is None else {"buckets": merge_low_buckets(after, bits)}

    def read(self, q_BGJTF: Tensor, start_B: Tensor, signals: Signals, state: MaskState) -> Tensor:
        """Return out_BGJTV of queries that all read the state, at the levels of the first token after it."""
        q_BGJTF = q_BGJTF.to(torch.promote_types(q_BGJTF.dtype, torch.float32))
        buckets_BNGFV, lambda_BTGJL = state["buckets"].to(q_BGJTF.dtype), signals["level"].to(q_BGJTF.dtype)
        first = 0 if self.config.block_bits else 1  # level of the first sum
        level_N = first + torch.arange(buckets_BNGFV.shape[1], device=q_BGJTF.device)
        weight_BGJTN = lambda_BTGJL[..., level_N.clamp_max(self.config.lambdas - 1)].movedim(1, 3)
        seen_BNGJTV = q_BGJTF.unsqueeze(1) @ buckets_BNGFV.unsqueeze(3)
        return torch.einsum("bgjtn,bngjtv->bgjtv", weight_BGJTN, seen_BNGJTV)

    def _all_levels(self, rows: MaskInputs) -> Tensor:
        """Return the lambda of every level, (B, T, G, J, bits + levels): those within a block repeat the first."""
        return repeat_first(rows.signals["level"], self.config.block_bits)


def repeat_first(level_BTGJL: Tensor, bits: int) -> Tensor:
    """Return the lambdas with the first one `bits` times more."""
    if not bits:
        return level_BTGJL
    return torch.cat([level_BTGJL[..., :1].expand(*level_BTGJL.shape[:-1], bits), level_BTGJL], dim=-1)


def count_sums(seen: int, bits: int) -> int:
    """Return how many sums the state has after so many tokens, in blocks of 2^bits tokens."""
    return max(0, seen.bit_length() - bits) + (bits > 0)


def bucket_sources(seen_R: Tensor, bits: int, buckets: int) -> Tensor:
    """Return the sum of the state, (buckets, R), that is each bucket of `expand_buckets` after seen_R tokens; -1 for an
    empty one."""
    bit_L1 = torch.arange(buckets, device=seen_R.device).unsqueeze(1)
    set_LR = (seen_R >> bit_L1) & 1 == 1
    is_lowest_LR = seen_R & ((1 << bit_L1) - 1) == 0
    source_LR = torch.where(bit_L1 < bits, 0, bit_L1 - bits + (bits > 0))
    return torch.where(set_LR & ((bit_L1 >= bits) | is_lowest_LR), source_LR, -1)


def expand_buckets(sums_BNGFV: Tensor, seen_B: Tensor, bits: int) -> Tensor:
    """Return one bucket per level, (B, bits + N - 1, G, F, V), of a state in which the lowest `bits` share a sum.

    The shared sum becomes the bucket of the lowest set bit of the position, and the other low buckets are zeros.
    Outputs are the same, because these levels have one lambda. For example with bits = 3 at position 6 = 110 in binary,
    the buckets of bits 1 and 2 are both in bucket 1. Tokens 6 and 7 are read with them under the same lambda, and token
    7 merges all of them into bucket 3.
    """
    if not bits:
        return sums_BNGFV
    at_L = torch.arange(bits, device=seen_B.device)
    bit_BL = (seen_B.unsqueeze(1) >> at_L) & 1
    lowest_BL = (bit_BL == 1) & (bit_BL.cumsum(1) == 1)
    low_BLGFV = torch.where(lowest_BL[..., None, None, None], sums_BNGFV[:, :1], 0)
    return torch.cat([low_BLGFV, sums_BNGFV[:, 1:]], dim=1)


def merge_low_buckets(buckets_BLGFV: Tensor, bits: int) -> Tensor:
    """Return the state with one sum for the lowest `bits` buckets, (B, 1 + L - bits, G, F, V); the inverse of
    `expand_buckets`."""
    if not bits:
        return buckets_BLGFV
    return torch.cat([buckets_BLGFV[:, :bits].sum(1, keepdim=True), buckets_BLGFV[:, bits:]], dim=1)


def bucket_plan(start_B: Tensor, count_B: Tensor, bits: int, buckets: int) -> tuple[Tensor, Tensor]:
    """Return (alive_BN: which buckets of a state at position start_B hold tokens; into_B: the bucket that the next token
    enters, -1 in rows without one).

    With blocks of 2^bits tokens, bucket 0 is the running block and bucket i >= 1 that of bit bits + i - 1 of the
    position, which is set if the bucket is alive. At the end of a block, the token and all buckets below the lowest zero
    bit enter that bit's bucket.
    """
    block_B, at_N = start_B >> bits, torch.arange(buckets, device=start_B.device)
    if bits:
        alive_BN = (block_B.unsqueeze(1) >> (at_N - 1).clamp_min(0)) & 1 == 1
        alive_BN[:, 0] = (start_B & (2**bits - 1)) != 0
        ends_B = ((start_B + 1) & (2**bits - 1)) == 0
        into_B = torch.where(ends_B, bit_length(block_B ^ (block_B + 1), buckets), 0)
    else:
        alive_BN = (block_B.unsqueeze(1) >> at_N) & 1 == 1
        into_B = bit_length(block_B ^ (block_B + 1), buckets + 1) - 1
    return alive_BN, torch.where(count_B > 0, into_B, -1)


class PoolPlan(NamedTuple):
    """The A alive buckets of the rows of a decoding step, and where their tokens enter.

    row_A, bucket_A: their rows and numbers, also as `places`. into: the bucket that the token of each row enters, -1
    without one. joins_A: whether it is this one.
    """

    row_A: Tensor
    bucket_A: Tensor
    joins_A: Tensor
    places: list[tuple[int, int]]
    into: list[int]


@lru_cache(maxsize=16)  # the layers of a model ask for the same plan
def pool_plan(
    start: tuple[int, ...], count: tuple[int, ...], bits: int, buckets: int, device: torch.device
) -> PoolPlan:
    """Return the plan of rows at these positions. See `bucket_plan`."""
    start_B, count_B = (torch.tensor(numbers, device=device) for numbers in (start, count))
    alive_BN, into_B = bucket_plan(start_B, count_B, bits, buckets)
    row_A, bucket_A = alive_BN.nonzero(as_tuple=True)
    places = list(zip(row_A.tolist(), bucket_A.tolist()))
    return PoolPlan(row_A, bucket_A, bucket_A == into_B[row_A], places, into_B.tolist())


def step_alive_buckets(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gate_BG: Tensor,
    level_BGJL: Tensor,
    *,
    pool_PNGFV: Tensor,
    page_B: Tensor,
    plan: PoolPlan,
    first_level: int,
) -> Tensor:
    """Return out_BGJV of `log_linear_step`, and update the buckets of the rows' pages in place.

    The A alive buckets of all rows are multiplied and updated where they lie: what is small is computed for all of them
    together, and a state is neither gathered nor scattered. The delta rule takes S to S' - beta k (k^T S') with S' = e^g S,
    so k^T S' and q^T S' come from one product. A token that joins a running block is part of the same change of rank 1.
    gate_BG: or gate_BGF, by key channel. first_level: number of the lambda of bucket 0.
    """
    wide = torch.promote_types(v_BGV.dtype, torch.float32)
    q_BGJF, k_BGF, v_BGV, gate_BG, level_BGJL = (x.to(wide) for x in (q_BGJF, k_BGF, v_BGV, gate_BG, level_BGJL))
    write_BGF = k_BGF if beta_BG is None else beta_BG.to(wide).unsqueeze(-1) * k_BGF
    own_BGJ1 = q_BGJF @ write_BGF.unsqueeze(-1)
    fade_BGF = (gate_BG if gate_BG.dim() == 3 else gate_BG.unsqueeze(-1)).exp()  # (B, G, 1): the same for all channels
    out_BGJV = level_BGJL[..., :1] * own_BGJ1 * v_BGV.unsqueeze(2)
    keys_BGXF = q_BGJF if beta_BG is None else torch.cat([k_BGF.unsqueeze(2), q_BGJF], dim=2)
    keys_BGXF = fade_BGF.unsqueeze(2) * keys_BGXF
    pages, (row_A, bucket_A, joins_A, places, into) = page_B.tolist(), plan
    states = [pool_PNGFV.select(0, pages[row]).select(0, bucket) for row, bucket in places]
    seen_AGJV = read_states(keys_BGXF[row_A], states)
    change_AG1V = joins_A[:, None, None, None] * v_BGV.unsqueeze(2)[row_A]
    if beta_BG is not None and places:
        read_AG1V, seen_AGJV = seen_AGJV[:, :, :1], seen_AGJV[:, :, 1:]
        seen_AGJV = seen_AGJV - own_BGJ1[row_A] * read_AG1V
        change_AG1V = change_AG1V - read_AG1V
    if places:
        level_A = (bucket_A + first_level).clamp_max(level_BGJL.shape[-1] - 1)
        level_AGJ1 = level_BGJL[row_A].gather(-1, level_A[:, None, None, None].expand(-1, *level_BGJL.shape[1:3], 1))
        out_BGJV.index_add_(0, row_A, level_AGJ1 * seen_AGJV)
    update_states(states, fade_BGF.unsqueeze(-1)[row_A], write_BGF.unsqueeze(-1)[row_A], change_AG1V)
    alive = set(places)
    for row, bucket in enumerate(into):
        if bucket < 0 or (row, bucket) in alive:
            continue
        sum_GFV = write_BGF[row].unsqueeze(-1) * v_BGV[row].unsqueeze(-2)
        for (other, below), state_GFV in zip(places, states):
            if other == row and below < bucket:
                sum_GFV += state_GFV
                state_GFV.zero_()
        pool_PNGFV[pages[row], bucket] = sum_GFV
    return out_BGJV


@dispatched
def log_linear(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    *,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor | None,
    chunk: int,
    levels: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGJTV, buckets after the tokens, or None without buckets before) in float32 or float64.

    Kernels may return `out` in v's dtype. beta_BGT: step sizes of the delta rule, None for kernel scores.
    gates_BGT: log-gates; B and G may be 1. level_BTGJL: lambdas. start_B, count_B: as in `MaskInputs`.
    buckets_BLGFV: state before the tokens, None: no state is needed. chunk: rounded down to a power of two, and no
    longer than the sequence needs. levels: number of buckets after the tokens; None: the minimum, which synchronizes
    with the device.
    """
    length = v_BGTV.shape[2]
    bits = min(chunk.bit_length() - 1, (length - 1).bit_length())
    rows = upcast_inputs(MaskInputs(q_BGJTF, k_BGTF, v_BGTV, beta_BGT, start_B, count_B, {"level": level_BTGJL}))
    tree = FenwickTree.from_inputs(rows, gates_BGT.to(rows.v_BGTV.dtype), bits)
    levels = levels_after(buckets_BLGFV, start_B, count_B) if levels is None else levels
    return tree.sweep(None if buckets_BLGFV is None else buckets_BLGFV.to(rows.v_BGTV.dtype), levels)


@dispatched
def log_linear_packed(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    *,
    buckets_SLGFV: Tensor,
    pieces: PackedPieces,
    chunk: int,
    levels: int,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, buckets after the pieces) of pieces of S sequences in one row (B = 1).

    Arguments as in `log_linear`. buckets_SLGFV: state of each sequence before its piece. levels: upper bound of the
    number of buckets after the pieces.
    """
    outs, lasts = [], []
    for group in pieces.groups:
        k, v, gates = (group.to_rows(t, 2, zeros=True) for t in (k_BGTF, v_BGTV, gates_BGT))
        beta = None if beta_BGT is None else group.to_rows(beta_BGT, 2, zeros=True)
        out, after = log_linear(
            *(group.to_rows(q_BGJTF, 3), k, v, beta, gates, group.to_rows(level_BTGJL, 1)),
            start_B=group.start_D,
            count_B=group.count_D,
            buckets_BLGFV=buckets_SLGFV[group.index_D, : group.max_start.bit_length()],  # the others are zeros
            chunk=chunk,
            levels=group.max_seen.bit_length(),
        )
        assert after is not None  # buckets are given
        outs.append(out)
        lasts.append(after)
    return pieces.join_tokens(outs, 3), pieces.join_states(lasts, buckets_SLGFV)


@dispatched
def log_linear_in_pool(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    *,
    pool_PNGFV: Tensor,
    page_R: Tensor,
    pieces: PackedPieces,
    chunk: int,
    block_bits: int,
) -> Tensor:
    """Return out_BGJTV of pieces of R sequences in one row (B = 1), and update their sums in place.

    Arguments as in `log_linear_packed`; levels 0 .. block_bits share the first lambda. pool_PNGFV: sums of a state with
    blocks of 2^block_bits tokens (`bucket_plan`), in pages, of which sequence r has page_R[r]; sums of empty buckets may
    hold anything.
    """
    levels = pieces.max_seen.bit_length()
    sums = min(count_sums(pieces.max_seen, block_bits), pool_PNGFV.shape[1])

    def sources(_first_R: Tensor, seen_R: Tensor, _count_R: Tensor) -> list[Tensor]:
        source_RL = bucket_sources(seen_R, block_bits, levels).T
        return [source_RL.clamp_min(0), source_RL < 0]

    if pieces.begins:
        before = pool_PNGFV.new_zeros(len(page_R), 0, *pool_PNGFV.shape[2:])
    else:
        source_RL, empty_RL = pieces.tables(("buckets", block_bits), sources)
        before = pool_PNGFV[page_R.unsqueeze(1), source_RL].masked_fill(empty_RL.bool()[..., None, None, None], 0)
    tokens = q_BGJTF, k_BGTF, v_BGTV, beta_BGT, gates_BGT, repeat_first(level_BTGJL, block_bits)
    out, after = log_linear_packed(*tokens, buckets_SLGFV=before, pieces=pieces, chunk=chunk, levels=levels)
    after = merge_low_buckets(F.pad(after, (0, 0, 0, 0, 0, 0, 0, max(0, block_bits - after.shape[1]))), block_bits)
    pool_PNGFV[page_R, :sums] = after[:, :sums].to(pool_PNGFV.dtype)
    return out


@dispatched
def log_linear_step(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gate_BG: Tensor,
    level_BGJL: Tensor,
    *,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor,
    levels: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJV, buckets after the token) for one token per row, or no token in rows with count_B = 0.

    Arguments as in `log_linear`.
    """
    return step_buckets(
        q_BGJF, k_BGF, v_BGV, beta_BG, gate_BG, level_BGJL,
        move=merge_buckets, start_B=start_B, count_B=count_B, buckets_BLGFV=buckets_BLGFV, levels=levels,
    )  # fmt: skip


def step_buckets(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gate_BG: Tensor,
    level_BGJL: Tensor,
    *,
    move: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor],
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor,
    levels: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`log_linear_step` whose token enters the buckets by `move`: `merge_buckets`, or `move_buckets` with strong
    admissibility.
    """
    out_BGJV, token_BGFV, buckets_BLGFV = read_with_token(
        q_BGJF, k_BGF, v_BGV, beta_BG, gate_BG, level_BGJL, buckets_BLGFV=buckets_BLGFV
    )
    size = levels_after(buckets_BLGFV, start_B, count_B) if levels is None else levels
    return out_BGJV, move(buckets_BLGFV, token_BGFV, start_B, count_B, size)


def read_with_token(
    q_BGJF: Tensor,
    k_BGF: Tensor,
    v_BGV: Tensor,
    beta_BG: Tensor | None,
    gate_BG: Tensor,
    level_BGJL: Tensor,
    *,
    buckets_BLGFV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out_BGJV, the token's k v^T (B, G, F, V), the buckets after its gate and transition) in float32 or
    float64.

    The query reads its own token at level 0 and bucket l - 1 at level l.
    """
    wide = torch.promote_types(v_BGV.dtype, torch.float32)
    q_BGJF, k_BGF, v_BGV, gate_BG, level_BGJL, buckets_BLGFV = (
        x.to(wide) for x in (q_BGJF, k_BGF, v_BGV, gate_BG, level_BGJL, buckets_BLGFV)
    )
    write_BGF, buckets_BLGFV = write_token(k_BGF, beta_BG, buckets_BLGFV)
    buckets_BLGFV = gate_BG.exp()[:, None, :, None, None] * buckets_BLGFV
    token_BGFV = write_BGF.unsqueeze(-1) * v_BGV.unsqueeze(-2)
    every_BLGFV = torch.cat([token_BGFV.unsqueeze(1), buckets_BLGFV], dim=1)
    which_L = torch.arange(every_BLGFV.shape[1], device=level_BGJL.device).clamp_max(level_BGJL.shape[-1] - 1)
    seen_BLGJV = q_BGJF.unsqueeze(1) @ every_BLGFV
    out_BGJV = (level_BGJL[..., which_L].movedim(-1, 1).unsqueeze(-1) * seen_BLGJV).sum(1)
    return out_BGJV, token_BGFV, buckets_BLGFV


def max_levels_after(rows: MaskInputs, buckets_BLGFV: Tensor | None) -> int | None:
    """Return an upper bound of the number of buckets after the tokens, or None if it needs a device synchronization."""
    n_before = 0 if buckets_BLGFV is None else buckets_BLGFV.shape[1]
    return None if rows.max_seen is None else max(n_before, rows.max_seen.bit_length())


def levels_after(buckets_BLGFV: Tensor | None, start_B: Tensor, count_B: Tensor) -> int:
    """Return the number of buckets after the tokens. Synchronizes with the device."""
    n_before = 0 if buckets_BLGFV is None else buckets_BLGFV.shape[1]
    return max(n_before, int((start_B + count_B).max()).bit_length())


def merge_buckets(buckets_BLGFV: Tensor, token_BGFV: Tensor, start_B: Tensor, count_B: Tensor, size: int) -> Tensor:
    """Return the buckets after one token, `size` of them.

    The token and all buckets below the lowest zero bit of the position are merged into the bucket of that bit. Rows
    without a token (count_B = 0) do not change.
    """
    buckets_BLGFV = F.pad(buckets_BLGFV, (0, 0, 0, 0, 0, 0, 0, size - buckets_BLGFV.shape[1]))
    into_B1 = (bit_length(start_B ^ (start_B + count_B), size) - 1).unsqueeze(1)  # -1: no token
    at_L = torch.arange(size, device=into_B1.device)
    merged_BL = (at_L < into_B1)[..., None, None, None]
    total_BGFV = token_BGFV + torch.where(merged_BL, buckets_BLGFV, 0).sum(1)
    others_BLGFV = torch.where(merged_BL, 0, buckets_BLGFV)
    return torch.where((at_L == into_B1)[..., None, None, None], total_BGFV.unsqueeze(1), others_BLGFV)
