"""Compiles the kernels of a served mixer before the first request. Needs no vLLM.

    warm_up(mixer, layout, tokens, row_size([layout]))

Triton compiles a kernel when it is launched first, and once more for arguments of another kind (kernels/launch.py). The
batches here are of all kinds that a server has: one piece of a prompt, pieces beside decodes, short ones, decodes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from surgery.mixers.linear import LinearMixer
from surgery.vllm.mixer_state import Batch, StateLayout, Tokens, mix_batch


class WarmUp(NamedTuple):
    """A batch: its decodes, and (tokens before the call, tokens in it) of each request, decodes first."""

    decodes: int
    requests: tuple[tuple[int, int], ...]


# Behind a window of 64, four chunks of 64 have pairs of chunks with and without a parent.
WARM_UPS = (
    WarmUp(0, ((0, 400),)),
    WarmUp(2, ((300, 1), (5, 1), (0, 90), (333, 70), (0, 3))),
    WarmUp(0, ((0, 2), (0, 3))),
    WarmUp(2, ((300, 1), (5, 1))),
)


@torch.no_grad()
def warm_up(mixer: LinearMixer, layout: StateLayout, tokens: Tokens, row: int) -> None:
    """Run the batches of WARM_UPS on zeros, with requests as long as `layout` allows. tokens: any of the model, of whose
    dtypes, sizes and device these are. row: numbers of a row of the cache.
    """
    requests, device = max(len(batch.requests) for batch in WARM_UPS), tokens.x_ND.device
    cache_SN = torch.zeros(requests, row, device=device)[:, : layout.size]
    for decodes, pieces in WARM_UPS:
        counts = [min(count, layout.longest) for _, count in pieces]
        lengths = [min(seen + count, layout.longest) for seen, count in pieces]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        q, k, v, x = (t.new_zeros(starts[-1], *t.shape[1:]) for t in tokens[:4])
        rope = None
        if tokens.rope is not None:
            cos, sin = (t.new_zeros(starts[-1], *t.shape[1:]) for t in tokens.rope)
            rope = cos, sin
        seen = [length - count for length, count in zip(lengths, counts, strict=True)]
        rows_R, seen_R = (torch.tensor(t, dtype=torch.int32, device=device) for t in (range(len(counts)), seen))
        mix_batch(mixer, layout, cache_SN, Batch(decodes, starts, lengths, rows_R, seen_R), Tokens(q, k, v, x, rope))


_warm: set[tuple[str, ...]] = set()


def warm_up_once(mixer: LinearMixer, layout: StateLayout, tokens: Tokens, row: int) -> None:
    """Run `warm_up` on a GPU once for mixers of the same options and sizes, outside of a CUDA graph."""
    x = tokens.x_ND
    key = tuple(map(repr, (mixer.config, mixer.shape, layout.size, row, x.dtype, x.device)))
    if x.is_cuda and key not in _warm and not torch.cuda.is_current_stream_capturing():
        _warm.add(key)
        warm_up(mixer, layout, tokens, row)
