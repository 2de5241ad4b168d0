"""One more token at contexts of T: each mixer with its own cache against softmax on a full one.

Width 2048, 32 query heads on 8 key/value heads of 64, as a Llama of 1B parameters; a step is the mixer's whole call: what it
reads off the hidden states, what it appends and what it attends to. Tokens a second are
1000 x batch / ms. A full cache is measured as transformers grows it (a copy for each token) and as it could be (room
laid out before).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import Choice, choose, watched
from surgery.eval.speed.attention import split
from surgery.eval.speed.timer import Call, Heat, Rival, Work, forward, graphed
from surgery.mixers import MIXERS, Inputs, State
from surgery.mixers.base import AttentionShape
from surgery.mixers.linear import LinearAttention
from surgery.mixers.mlr import MLR

CONTEXTS = {"full": (1024, 4096, 16384, 65536), "main": (16384, 65536), "small": (64, 128)}
BATCHES = {"full": (1, 16), "main": (16,), "small": (1, 2)}
SHAPES = {"full": (2048, 32, 8, 64), "main": (2048, 32, 8, 64), "small": (32, 4, 2, 16)}  # D, H, G, K = V
STEPS = 8
PIECE = 4096  # tokens at once while a cache is filled


def mixers(key: int, longest: int) -> list[tuple[str, Choice, Any, str, dict[str, int]]]:
    """MLR attention's extents are those of the longest context."""
    ranks, extents = split(key, longest)
    whole = MLR(ranks=(key // 2, key // 2), extents=(4 * longest,))
    tbm = {"name": "toeplitz_blocks", "components": 8}
    every: list[tuple[str, str, Any]] = [
        ("MLR attention, one level", "mlr", whole),
        ("MLR attention", "mlr", MLR(ranks=ranks, extents=extents)),
        ("SSD", "gates", LinearAttention()),
        ("log-linear Mamba-2", "hierarchical", LinearAttention(mask="hierarchical")),
        ("Gated DeltaNet", "gates delta", LinearAttention(scores="delta")),
        ("log-linear GDN", "hierarchical delta", LinearAttention(mask="hierarchical", scores="delta")),
        ("TBM, R = 8", "toeplitz_blocks", LinearAttention(mask=tbm, features="relu", normalise=True)),
    ]
    choices: tuple[Choice, ...] = ("kernel", "reference")
    levels = {whole: {"levels": 1}, every[1][2]: {"levels": len(ranks)}}
    return [
        (f"{name}, {choice}", choice, config, op, levels.get(config, {}))
        for name, op, config in every
        for choice in choices
    ]


@dataclass
class Bench:
    """Mixers and the states of one row, which grow from context to context."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype
    longest: int
    made: dict[Any, Any] = field(default_factory=dict)
    states: dict[Any, State] = field(default_factory=dict)

    def inputs(self, batch: int, length: int) -> Inputs:
        draw = lambda *dims: torch.randn(*dims, device=self.device, dtype=self.dtype)  # noqa: E731
        s = self.shape
        keys = draw(batch, s.groups, length, s.key), draw(batch, s.groups, length, s.value)
        return Inputs(draw(batch, s.heads, length, s.key), *keys, draw(batch, length, s.dim))

    def state(self, config: Any, batch: int, length: int) -> tuple[Any, State]:
        """The mixer and its state after that many tokens, every row alike. Filled by kernels whatever is timed."""
        if config not in self.made:
            with torch.device(self.device):
                self.made[config] = MIXERS[config](config, self.shape).to(self.dtype)
            self.states[config] = self.made[config].empty_state(1, self.device)
        mixer, state = self.made[config], self.states[config]
        with torch.no_grad(), choose("kernel" if self.device.type == "cuda" else "reference"), watched():
            while (seen := int(state.seen_B)) < length:
                state = mixer(self.inputs(1, min(PIECE, length - seen)), state)[1]
        self.states[config] = state
        return mixer, state.rows(torch.zeros(batch, dtype=torch.long))


def heats(sizes: str, device: torch.device, dtype: torch.dtype) -> Iterator[Heat]:
    dim, heads, groups, key = SHAPES[sizes]
    shape = AttentionShape(dim, heads, groups, key, key, key**-0.5)
    longest = max(CONTEXTS[sizes])
    bench = Bench(shape, device, dtype, longest)
    where = {"dim": dim, "heads": heads, "groups": groups, "key": key, "value": key}
    for length in CONTEXTS[sizes]:
        for batch in BATCHES[sizes]:
            for graph in (False, True):
                sized = {**where, "batch": batch, "lanes": batch * heads, "context": length}
                name = f"decode, batch {batch}{', CUDA graph' if graph else ''}"
                yield Heat(name, length, sized, _rivals(bench, batch, length, graph, sized), launches=not graph)


def _rivals(bench: Bench, batch: int, length: int, graph: bool, sized: dict[str, Any]) -> list[Rival]:
    full = 2 * batch * bench.shape.groups * length * bench.shape.key * bench.dtype.itemsize
    sized["cache"] = {"SDPA, room laid out": full, "SDPA, grown as in transformers": full}
    times = STEPS if graph else 1
    room = lambda: _sdpa(bench, batch, length, True, graph)  # noqa: E731
    rivals = [Rival("SDPA, room laid out", room, work=Work(full, 0), times=times, op="original")]
    if not graph:
        grown = lambda: _sdpa(bench, batch, length, False, graph)  # noqa: E731
        rivals.append(Rival("SDPA, grown as in transformers", grown, work=Work(full, 0)))
    for name, choice, config, op, options in mixers(bench.shape.key, bench.longest):
        make = lambda n=name, c=config: _step(bench, n, c, batch, length, graph, sized)  # noqa: E731
        rivals.append(Rival(name, make, choice, times=times, op=op, options=options))
    return rivals


def _step(bench: Bench, name: str, config: Any, batch: int, length: int, graph: bool, sized: dict[str, Any]) -> Call:
    """Each step takes the state that the one before left; a graph holds STEPS of them."""
    mixer, state = bench.state(config, batch, length)
    sized["cache"][name] = state.nbytes()
    inputs, now, held = bench.inputs(batch, 1), [state], []

    def advance() -> None:
        now[0] = mixer(inputs, now[0])[1]

    if graph:  # which reads the state it was captured from
        return graphed([lambda: held.append(now[0]), *STEPS * [forward(advance)]], bench.device)
    return forward(advance)


def _sdpa(bench: Bench, batch: int, length: int, room: bool, graph: bool) -> Call:
    held, new = bench.inputs(batch, length + 1), bench.inputs(batch, 1)
    k, v = held.k_BGTK, held.v_BGTV

    def step() -> Tensor:
        keys, values = k, v
        if room:
            k[:, :, length:].copy_(new.k_BGTK)
            v[:, :, length:].copy_(new.v_BGTV)
        else:
            keys, values = torch.cat([k[:, :, 1:], new.k_BGTK], 2), torch.cat([v[:, :, 1:], new.v_BGTV], 2)
        return F.scaled_dot_product_attention(new.q_BHTK, keys, values, enable_gqa=True)

    run: Callable[[], Any] = forward(step)
    return graphed(STEPS * [run], bench.device) if graph else run
