"""Benchmark of decoding one token at context length T: each mixer with its own cache against softmax with a full cache.

Width 2048, 32 query heads on 8 key/value heads of 64, as in a Llama of 1B parameters. A step is the mixer's whole call,
from hidden states to output. Tokens per second = 1000 x batch / ms. The full cache is measured as transformers grows it
(one copy per token) and preallocated. Linear mixers are also measured with a window of 64 tokens and four sinks. As in
a cache, each step may overwrite the state of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import KernelChoice, record_dispatch, use_kernels
from surgery.eval.speed.attention import split_ranks
from surgery.eval.speed.timer import (
    BenchmarkCase,
    Call,
    TimedImplementation,
    WorkEstimate,
    forward,
    graph_call,
    graph_title,
)
from surgery.mixers import MIXERS, MixerInputs, MixerState
from surgery.mixers.base import AttentionShape
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.mlr import MLR

CONTEXTS = {"full": (1024, 4096, 16384, 65536), "main": (16384, 65536), "small": (64, 128)}
BATCHES = {"full": (1, 16), "main": (16,), "small": (1, 2)}
SHAPES = {"full": (2048, 32, 8, 64), "main": (2048, 32, 8, 64), "small": (32, 4, 2, 16)}  # D, H, G, K = V
STEPS = 8
FILL_TOKENS = 4096  # tokens at once while a cache is filled
WINDOW, SINKS = 64, 4


def mixer_choices(key: int, longest: int) -> list[tuple[str, KernelChoice, Any, str, dict[str, int]]]:
    """Return the mixers to time; MLR attention's extents are those of the longest context."""
    ranks, extents = split_ranks(key, longest)
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
    choices: tuple[KernelChoice, ...] = ("kernel", "reference")
    sizes = {whole: {"levels": 1}, every[1][2]: {"levels": len(ranks)}}
    for name, op, config in every[2:6]:
        hybrid = replace(config, window=WINDOW, sinks=SINKS)
        every.append((f"{name}, window {WINDOW}", f"window {op}", hybrid))
        sizes[hybrid] = {"window": WINDOW}
    return [
        (f"{name}, {choice}", choice, config, op, sizes.get(config, {}))
        for name, op, config in every
        for choice in choices
    ]


@dataclass
class MixerStates:
    """Mixers and their states for one row, extended from context to context."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype
    longest: int
    mixers: dict[Any, Any] = field(default_factory=dict)
    states: dict[Any, MixerState] = field(default_factory=dict)

    def inputs(self, batch: int, length: int) -> MixerInputs:
        """Draw the inputs of a call over `length` tokens of `batch` rows."""
        draw = lambda *dims: torch.randn(*dims, device=self.device, dtype=self.dtype)  # noqa: E731
        s = self.shape
        keys = draw(batch, s.groups, length, s.key), draw(batch, s.groups, length, s.value)
        return MixerInputs(draw(batch, s.heads, length, s.key), *keys, draw(batch, length, s.dim))

    def state(self, config: Any, batch: int, length: int) -> tuple[Any, MixerState]:
        """Return the mixer and its state after `length` equal tokens; kernels fill it whatever is timed."""
        if config not in self.mixers:
            with torch.device(self.device):
                self.mixers[config] = MIXERS[config](config, self.shape).to(self.dtype)
            self.states[config] = self.mixers[config].empty_state(1, self.device)
        mixer, state = self.mixers[config], self.states[config]
        with torch.no_grad(), use_kernels("kernel" if self.device.type == "cuda" else "reference"), record_dispatch():
            while (seen := int(state.seen_B)) < length:
                state = mixer(self.inputs(1, min(FILL_TOKENS, length - seen)), state)[1]
        self.states[config] = state
        return mixer, state.rows(torch.zeros(batch, dtype=torch.long))


def benchmark_cases(sizes: str, device: torch.device, dtype: torch.dtype) -> Iterator[BenchmarkCase]:
    """Yield the cases of all contexts and batch sizes."""
    dim, heads, groups, key = SHAPES[sizes]
    shape = AttentionShape(dim, heads, groups, key, key, key**-0.5)
    longest = max(CONTEXTS[sizes])
    mixer_states = MixerStates(shape, device, dtype, longest)
    where = {"dim": dim, "heads": heads, "groups": groups, "key": key, "value": key}
    for length in CONTEXTS[sizes]:
        for batch in BATCHES[sizes]:
            for graph in (False, True):
                sized = {**where, "batch": batch, "lanes": batch * heads, "context": length}
                name = f"decode, batch {batch}{f', {graph_title(device)}' if graph else ''}"
                yield BenchmarkCase(
                    name, length, sized, _implementations(mixer_states, batch, length, graph, sized), launches=not graph
                )


def _implementations(
    mixer_states: MixerStates, batch: int, length: int, graph: bool, sized: dict[str, Any]
) -> list[TimedImplementation]:
    full = 2 * batch * mixer_states.shape.groups * length * mixer_states.shape.key * mixer_states.dtype.itemsize
    sized["cache"] = {"SDPA, room laid out": full, "SDPA, grown as in transformers": full}
    times = STEPS if graph else 1
    room = lambda: _sdpa_step(mixer_states, batch, length, True, graph)  # noqa: E731
    implementations = [
        TimedImplementation("SDPA, room laid out", room, work=WorkEstimate(full, 0), times=times, op="original")
    ]
    if not graph:
        grown = lambda: _sdpa_step(mixer_states, batch, length, False, graph)  # noqa: E731
        implementations.append(TimedImplementation("SDPA, grown as in transformers", grown, work=WorkEstimate(full, 0)))
    for name, choice, config, op, options in mixer_choices(mixer_states.shape.key, mixer_states.longest):
        make = lambda n=name, c=config: _mixer_step(mixer_states, n, c, batch, length, graph=graph, sized=sized)  # noqa: E731
        implementations.append(TimedImplementation(name, make, choice, times=times, op=op, options=options))
    return implementations


def _mixer_step(
    mixer_states: MixerStates, name: str, config: Any, batch: int, length: int, *, graph: bool, sized: dict[str, Any]
) -> Call:
    """Return a call in which each step continues from the previous state; a CUDA graph holds STEPS of them."""
    mixer, state = mixer_states.state(config, batch, length)
    sized["cache"][name] = state.nbytes()
    inputs, now, held = mixer_states.inputs(batch, 1), [state], []

    def advance() -> None:
        now[0] = mixer(inputs, now[0].donate())[1]

    if graph:  # which reads the state it was captured from
        return graph_call([lambda: held.append(now[0]), *STEPS * [forward(advance)]], mixer_states.device)
    return forward(advance)


def _sdpa_step(mixer_states: MixerStates, batch: int, length: int, room: bool, graph: bool) -> Call:
    held, new = mixer_states.inputs(batch, length + 1), mixer_states.inputs(batch, 1)
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
    return graph_call(STEPS * [run], mixer_states.device) if graph else run
