"""MLR attention with blocks that end at separators, such as line ends or the ends of documents (Kuang et al. 2025,
footnote 1).

    S_ts = scaling sum_l [b_l(t) = b_l(s)] q_t,l . k_s,l      s <= t, softmax over s

Level 1 applies to all pairs. b_l(t) counts the separators of level l that stand before token t. A separator of a
coarser level also ends the blocks of all finer levels, so that blocks are nested. A separator belongs to the block that
it ends. The key cache of a level holds the keys of the open block; `extents` bound it as in the sliding form of
surgery/mixers/mlr.py. A plain-torch reference that recipes do not offer: the inputs of a mixer hold no token ids.

B batch, H heads, T queries, S keys, K key dim, V value dim, L levels with separators; ranks r_0, .., r_L sum to at most
K, and the first r_0 dims of a head are level 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError


@dataclass(frozen=True)
class DynamicBlocks:
    """Options: ranks of level 1 and of the levels with separators; token ids of the separators of each such level, from
    the coarsest to the finest; extents in tokens, which bound the distance within these levels (empty: no bound).

    Raises SurgeryError if the numbers of levels differ or a rank is negative.
    """

    ranks: tuple[int, ...]
    separators: tuple[Collection[int], ...]
    extents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        levels = len(self.separators)
        if len(self.ranks) != levels + 1 or len(self.extents) not in (0, levels):
            raise SurgeryError(
                f"dynamic blocks: {levels} sets of separators need {levels + 1} ranks and no extents or {levels} (got "
                f"{len(self.ranks)} ranks and {len(self.extents)} extents); level 1 has no separators"
            )
        if min(self.ranks) < 0 or any(extent < 1 for extent in self.extents):
            raise SurgeryError(
                f"dynamic blocks: ranks must be 0 or more and extents 1 or more (got {self.ranks} and {self.extents})"
            )

    def ends(self, ids_BT: Tensor) -> Tensor:
        """Return end_LBT, True at tokens that end a block of a level."""
        known: set[int] = set()
        ends = []
        for separators in self.separators:
            known |= set(separators)
            ends.append(torch.isin(ids_BT, torch.tensor(sorted(known), dtype=ids_BT.dtype, device=ids_BT.device)))
        return torch.stack(ends) if ends else ids_BT.new_zeros(0, *ids_BT.shape, dtype=torch.bool)

    def block_numbers(self, ids_BT: Tensor) -> Tensor:
        """Return b_LBT, the number of separators of each level before each token."""
        end_LBT = self.ends(ids_BT).long()
        return end_LBT.cumsum(-1) - end_LBT

    def visible(self, query_LBT: Tensor, key_LBS: Tensor) -> Tensor:
        """Return visible_LBTS: whether a level counts for a query and a key, given their block numbers.

        The queries are the last T of the S tokens. Causality is not included.
        """
        T, S = query_LBT.shape[-1], key_LBS.shape[-1]
        same_LBTS = query_LBT.unsqueeze(-1) == key_LBS.unsqueeze(-2)
        if not self.extents:
            return same_LBTS
        distance_TS = torch.arange(S - T, S).unsqueeze(1) - torch.arange(S)
        return same_LBTS & (distance_TS < torch.tensor(self.extents)[:, None, None])[:, None].to(same_LBTS.device)

    def split(self, x: Tensor) -> list[Tensor]:
        """Return the dims of each level."""
        return list(x[..., : sum(self.ranks)].split(self.ranks, dim=-1))


def dense_attention(
    config: DynamicBlocks, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTV: Tensor, ids_BT: Tensor, scaling: float
) -> Tensor:
    """Return out_BHTV of whole sequences by the definition."""
    block_LBT, length = config.block_numbers(ids_BT), ids_BT.shape[1]
    counts_LBTT = config.visible(block_LBT, block_LBT).unsqueeze(2)
    far, *near = (q @ k.mT for q, k in zip(config.split(q_BHTK), config.split(k_BHTK)))
    scores_BHTT = far + sum(
        (torch.where(counts, score, 0) for counts, score in zip(counts_LBTT, near)), far.new_zeros(())
    )
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=ids_BT.device).tril()
    out_BHTV: Tensor = (scaling * scores_BHTT).masked_fill(~causal_TT, -torch.inf).softmax(-1) @ v_BHTV
    return out_BHTV


def mean_macs(config: DynamicBlocks, ids_BT: Tensor) -> float:
    """Return multiply-accumulates of the scores per token and head, averaged over these tokens: sum_l r_l times the
    mean number of visible keys.
    """
    block_LBT = config.block_numbers(ids_BT)
    pairs_LBTT = config.visible(block_LBT, block_LBT).tril()
    tokens = ids_BT.numel()
    far = config.ranks[0] * (ids_BT.shape[1] + 1) / 2
    return far + sum(rank * int(pairs.sum()) / tokens for rank, pairs in zip(config.ranks[1:], pairs_LBTT))


@dataclass
class DynamicCache:
    """The cache of one sequence: values (H, n, V), and for each level the keys (H, n_l, r_l) that later queries read,
    the last n_l ones.

    `extend` returns a new cache and leaves this one as it is.
    """

    keys: list[Tensor] = field(default_factory=list)
    values_HnV: Tensor | None = None

    def extend(
        self, config: DynamicBlocks, q_HTK: Tensor, k_HTK: Tensor, v_HTV: Tensor, ids_T: Tensor, scaling: float
    ) -> tuple[Tensor, DynamicCache]:
        """Return (out_HTV of the next T tokens, the cache after them)."""
        length = len(ids_T)
        values = v_HTV if self.values_HnV is None else torch.cat([self.values_HnV, v_HTV], 1)
        total, end_LT = values.shape[1], config.ends(ids_T.unsqueeze(0)).squeeze(1)
        number_LT = config.block_numbers(ids_T.unsqueeze(0)).squeeze(1)
        scores_HTS = q_HTK.new_zeros(len(q_HTK), length, total)
        kept = []
        for level, (q, k) in enumerate(zip(config.split(q_HTK), config.split(k_HTK))):
            keys = torch.cat([self.keys[level], k], 1) if self.keys else k
            first = total - keys.shape[1]
            score = q @ keys.mT
            if level:
                # Cached keys are of the block that is open before the first new token, number 0.
                number_T = number_LT[level - 1]
                number_S = torch.cat([number_T.new_zeros(keys.shape[1] - length), number_T])
                only = DynamicBlocks((0, 1), ((),), config.extents[level - 1 : level])
                score = torch.where(only.visible(number_T[None, None], number_S[None, None])[0], score, 0)
                keys = self._open_block(config, level, keys, end_LT[level - 1])
            scores_HTS[:, :, first:] += score
            kept.append(keys)
        later_TS = torch.arange(total) > torch.arange(total - length, total).unsqueeze(1)
        out_HTV = (scaling * scores_HTS).masked_fill(later_TS.to(scores_HTS.device), -torch.inf).softmax(-1) @ values
        return out_HTV, DynamicCache(kept, values)

    @staticmethod
    def _open_block(config: DynamicBlocks, level: int, keys: Tensor, end_T: Tensor) -> Tensor:
        """Return the keys that later queries of the level read: those since the last separator, bounded by the
        extent.
        """
        after = len(end_T) - 1 - int(end_T.nonzero().max()) if bool(end_T.any()) else keys.shape[1]
        if config.extents:
            after = min(after, config.extents[level - 1] - 1)
        return keys[:, keys.shape[1] - min(after, keys.shape[1]) :]

    def elements(self) -> int:
        """Return the number of cached elements."""
        values = 0 if self.values_HnV is None else self.values_HnV.numel()
        return values + sum(keys.numel() for keys in self.keys)


def separators_of(words: Sequence[str], vocabulary: Sequence[str]) -> list[int]:
    """Return the ids of all tokens whose text contains one of the words, for example line ends.

    vocabulary: text of each token id. Raises SurgeryError if a word is in no token.
    """
    found = [[i for i, text in enumerate(vocabulary) if word in text] for word in words]
    for word, ids in zip(words, found):
        if not ids:
            raise SurgeryError(
                f"dynamic blocks: no token contains the separator {word!r}, so it would end no block; choose a "
                "separator that is a token"
            )
    return sorted({i for ids in found for i in ids})
