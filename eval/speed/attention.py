"""Benchmark of attention over T tokens, forward and training: torch's fused softmax, MLR attention, linear attention
masks.

B = 2 with 48 heads and V = 64; also B = 1 with 8 heads, which fill only part of a GPU. Softmax and block mixing: K = 64
in every head. Gates, log-linear attention and the delta rule: K = 128 with one query/key head shared by all values, the
setting of Guo et al. 2025. Masks are called with given signals (gates, lambdas), MLR attention as the whole mixer. The
softmax branch of linear mixers is called with windows of 64, 256 and 1,024 tokens and four sinks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surgery.eval.speed.baselines import CallAndLeaves, fla_baselines
from surgery.eval.speed.roofline import linear_attention_work, log_linear_reads, softmax_work, window_work
from surgery.eval.speed.timer import BenchmarkCase, TimedImplementation, WorkEstimate, backward, forward
from surgery.mixers import MIXERS, MixerInputs
from surgery.mixers.base import AttentionShape
from surgery.mixers.common.window_hybrid import RecentAndSinks, local_attention
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.masks.base import MASKS, MaskInputs
from surgery.mixers.mlr import MLR

TOKENS = {
    "full": (128, 512, *(2**i for i in range(10, 18))),
    "main": (4096, 8192, 16384, 32768),
    "small": (64, 128),
}
MIXER_WINDOWS = {0: "", 64: ", window 64", 256: ", window 256"}  # of the whole log-linear GDN mixer
MIXER_HIDDEN = 1024  # hidden size, read by gates and lambdas
WIDTHS = {"full": (2, 48, 64, 128), "main": (2, 48, 64, 128), "small": (1, 2, 16, 16)}  # B, H, V, K of the linear ones
FEW_HEADS, FEW_HEADS_TOKENS = (1, 8, 64, 128), (128, 1024, 8192)
RANKS = (32, 8, 6, 4, 4, 4, 4, 2)
CHUNK = 64
LOCAL_WINDOWS, LOCAL_SINKS = (64, 256, 1024), 4
Widths = tuple[int, int, int, int]
CallMakers = list[tuple[str, Any, Callable[[], CallAndLeaves], WorkEstimate, str | None, dict[str, int]]]


@dataclass
class BenchmarkTokens:
    """Inputs of one length. Softmax's q, k, v are (B, H, T, 64); q_BT1K and k_BT1K are shared by all heads."""

    q_BHTV: Tensor
    k_BHTV: Tensor
    v_BHTV: Tensor
    q_BT1K: Tensor
    k_BT1K: Tensor
    gate_BTH: Tensor
    level_BTH1L: Tensor
    beta_BHT: Tensor

    @classmethod
    def random(cls, widths: Widths, length: int, device: torch.device, dtype: torch.dtype) -> BenchmarkTokens:
        """Draw inputs of one length."""
        batch, heads, value, key = widths
        draw = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
        levels = (length - 1).bit_length() + 1
        return cls(
            draw(batch, heads, length, value),
            draw(batch, heads, length, value),
            draw(batch, heads, length, value),
            draw(batch, length, 1, key) * key**-0.5,
            draw(batch, length, 1, key),
            -0.1 * torch.rand(batch, length, heads, device=device),
            torch.rand(batch, length, heads, 1, levels, device=device) + 0.5,
            torch.rand(batch, heads, length, device=device),
        )


def benchmark_cases(sizes: str, device: torch.device, dtype: torch.dtype, others: bool) -> Iterator[BenchmarkCase]:
    """Yield the cases of all lengths, forward and training."""
    for length in FEW_HEADS_TOKENS if sizes == "full" else ():
        yield from _length_cases("attention, batch 1, 8 heads", FEW_HEADS, length, device, dtype, False)
    for length in TOKENS[sizes]:
        yield from _length_cases("attention", WIDTHS[sizes], length, device, dtype, others)


def _length_cases(
    title: str, widths: Widths, length: int, device: torch.device, dtype: torch.dtype, others: bool
) -> Iterator[BenchmarkCase]:
    batch, heads, value, key = widths
    where = {"batch": batch, "heads": heads, "value": value, "key of softmax": value, "key of linear": key}
    for back in (False, True):
        tokens = BenchmarkTokens.random(widths, length, device, dtype)
        implementations = [
            TimedImplementation(name, lambda m=make, b=back: _make_call(m, b), choice, work, op=op, options=options)
            for name, choice, make, work, op, options in _call_makers(tokens, back, others)
        ]
        sizes = {**where, "lanes": batch * heads, "tokens": length}
        yield BenchmarkCase(f"{title}, forward{' + backward' if back else ''}", length, sizes, implementations)


def _make_call(make: Callable[[], CallAndLeaves], back: bool) -> Any:
    call, leaves = make()
    return backward(call, leaves) if back else forward(call)


def _call_makers(tokens: BenchmarkTokens, back: bool, others: bool) -> CallMakers:
    batch, heads, length, value = tokens.v_BHTV.shape
    width, key, levels = tokens.v_BHTV.element_size(), tokens.q_BT1K.shape[-1], tokens.level_BTH1L.shape[-1]
    full = softmax_work(batch, heads, length, value, value, back=back, width=width)
    far = softmax_work(batch, heads, length, mean_rank(value, length), value, back=back, width=width)
    linear = lambda groups, key, extra, reads=1: linear_attention_work(  # noqa: E731
        batch, heads, groups, length, key, value, back=back, width=width, extra=extra, reads=reads
    )
    buckets = log_linear_reads(length)
    ranks, extents = split_ranks(value, length)
    backends = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
    torchs = backends if tokens.v_BHTV.is_cuda else {"SDPA": None}
    whole = (value // 2, value // 2), (2 * length,)
    ours: list[tuple[str, str | None, Callable[[], CallAndLeaves], WorkEstimate]] = [
        ("MLR attention, one level", "mlr", lambda: make_mlr(tokens, *whole), full),
        ("MLR attention", "mlr", lambda: make_mlr(tokens, ranks, extents), far),
        ("SSD", "gates", lambda: make_masked(tokens, "gates"), linear(1, key, 1)),
        ("log-linear Mamba-2", "hierarchical", lambda: make_masked(tokens, "hierarchical"), linear(1, key, 1 + levels, buckets)),
        ("Gated DeltaNet", "gates delta", lambda: make_masked(tokens, "gates", True), linear(1, key, 2)),
        ("log-linear GDN", "hierarchical delta", lambda: make_masked(tokens, "hierarchical", True), linear(1, key, 2 + levels, buckets)),
        ("TBM, R = 8", "toeplitz_blocks", lambda: make_block_masked(tokens, "toeplitz_blocks", components=8), linear(heads, value, 0)),
        ("MHLA", "blocks", lambda: make_block_masked(tokens, "blocks", count=-(-length // CHUNK)), linear(heads, value, 0)),
    ]  # fmt: skip
    for window in LOCAL_WINDOWS:
        near = window_work(batch, heads, length, window, value, value, back=back, width=width)
        ours.append((f"window {window}", "local attention", functools.partial(make_local, tokens, window), near))
    works = [linear(1, key, 1 + levels, buckets), linear(1, key, 1), linear(1, key, 2)]
    terms = {"MLR attention, one level": {"levels": 1}, "MLR attention": {"levels": len(ranks)}}
    terms |= {f"window {window}": {"window": window} for window in LOCAL_WINDOWS}
    return [
        *((name, "measured", lambda b=b: make_sdpa(tokens, b), full, "original", {}) for name, b in torchs.items()),
        *(
            (f"{name}, {way}", way, make, work, op, terms.get(name, {}))
            for name, op, make, work in ours
            for way in ("kernel", "reference")
        ),
        *(
            (
                f"mixer{tail}",
                "kernel",
                functools.partial(make_mixer, tokens, window),
                linear(heads, value, 2 + levels, buckets),
                None,
                {},
            )
            for window, tail in MIXER_WINDOWS.items()
        ),
        *(
            (name, "measured", make, work, None, {})
            for (name, make), work in zip(fla_baselines(tokens), works)
            if others
        ),
    ]


def make_sdpa(t: BenchmarkTokens, backend: Any) -> CallAndLeaves:
    """Return the call of scaled dot-product attention by one backend, and its leaf tensors."""
    q, k, v = t.q_BHTV, t.k_BHTV, t.v_BHTV

    def call() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call, [q, k, v]


def split_ranks(key: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return MLR attention's ranks (32|8|6|4|4|4|4|2 of 64 dimensions, or halves of them) and extents T / 2^(l-1)."""
    ranks = RANKS if key == sum(RANKS) else (key // 2, key // 4, key // 4)
    return ranks, tuple(max(1, length >> level) for level in range(1, len(ranks)))


def mean_rank(key: int, length: int) -> float:
    """Return the mean number of score dimensions of a causal pair: a share 1 - (1 - e)^2 of pairs is nearer than e
    T.
    """
    ranks, extents = split_ranks(key, length)
    return sum(rank * (1 - (1 - extent / length) ** 2) for rank, extent in zip(ranks, (length, *extents)))


def make_mlr(t: BenchmarkTokens, ranks: tuple[int, ...], extents: tuple[int, ...]) -> CallAndLeaves:
    """Return the call of MLR attention and its leaf tensors."""
    batch, heads, length, value = t.v_BHTV.shape
    shape = AttentionShape(1, heads, heads, value, value, value**-0.5)
    config = MLR(ranks=ranks, extents=extents)
    mixer = MIXERS[config](config, shape).to(t.v_BHTV.device)
    x_BT1 = t.v_BHTV.new_zeros(batch, length, 1)
    inputs = MixerInputs(t.q_BHTV, t.k_BHTV, t.v_BHTV, x_BT1)
    return lambda: mixer(inputs)[0], [t.q_BHTV, t.k_BHTV, t.v_BHTV]


def make_local(t: BenchmarkTokens, window: int) -> CallAndLeaves:
    """Return the call of the softmax branch of a linear mixer whose rows begin with the call, and its leaf tensors."""
    batch, heads, _, value = t.v_BHTV.shape
    shape = AttentionShape(1, heads, heads, value, value, value**-0.5)
    seen_B = torch.zeros(batch, dtype=torch.long, device=t.v_BHTV.device)
    k, v = (F.pad(x.detach(), (0, 0, window, 0)).requires_grad_() for x in (t.k_BHTV, t.v_BHTV))
    sinks = [x[:, :, :LOCAL_SINKS].detach().requires_grad_() for x in (t.k_BHTV, t.v_BHTV)]
    keys, values = RecentAndSinks(k, sinks[0]), RecentAndSinks(v, sinks[1])
    call = lambda: local_attention(t.q_BHTV.unsqueeze(2), keys, values, seen_B, shape, max(window, 64)).out  # noqa: E731
    return call, [t.q_BHTV, k, v, *sinks]


def make_mixer(t: BenchmarkTokens, window: int) -> CallAndLeaves:
    """Return the call of a whole log-linear GDN mixer, from queries, keys, values and hidden states to outputs, and its
    leaf tensors.

    window: tokens of its softmax branch, which has four sinks; 0: no softmax branch.
    """
    batch, heads, length, value = t.v_BHTV.shape
    shape = AttentionShape(MIXER_HIDDEN, heads, heads, value, value, value**-0.5)
    config = LinearAttention(
        mask={"name": "hierarchical", "levels": t.level_BTH1L.shape[-1]}, scores="delta",
        window=window, sinks=LOCAL_SINKS if window else 0,
    )  # fmt: skip
    mixer = MIXERS[config](config, shape).to(t.v_BHTV.device, t.v_BHTV.dtype)
    x_BTD = torch.randn(batch, length, MIXER_HIDDEN, device=t.v_BHTV.device, dtype=t.v_BHTV.dtype)
    inputs = MixerInputs(t.q_BHTV, t.k_BHTV, t.v_BHTV, x_BTD)
    return lambda: mixer(inputs)[0], [t.q_BHTV, t.k_BHTV, t.v_BHTV, *(p for p in mixer.parameters() if p.requires_grad)]


def make_masked(t: BenchmarkTokens, mask: str, delta: bool = False) -> CallAndLeaves:
    """Return the call of masked linear attention with one query/key head, whose features are not copied per head."""
    heads = t.v_BHTV.shape[1]
    options = {"levels": t.level_BTH1L.shape[-1]} if mask == "hierarchical" else {}
    config = LinearAttention(mask={"name": mask, **options}, scores="delta" if delta else "kernel")
    key = t.q_BT1K.shape[-1]
    made = MASKS[config.mask](config.mask, AttentionShape(1, heads, heads, key, t.v_BHTV.shape[-1], 1.0))
    module: Any = made.to(t.v_BHTV.device)
    k_BT1K = F.normalize(t.k_BT1K.float(), dim=-1).to(t.v_BHTV.dtype) if delta else t.k_BT1K
    beta = t.beta_BHT if delta else None
    signals = {"gate": t.gate_BTH, **({"level": t.level_BTH1L} if mask == "hierarchical" else {})}

    def call() -> Tensor:
        shared = (x.transpose(1, 2).expand(-1, heads, -1, -1) for x in (t.q_BT1K, k_BT1K))
        q_BHTK, k_BHTK = shared
        return module.chunked(mask_inputs(q_BHTK, k_BHTK, t.v_BHTV, beta, signals), None, CHUNK)[0]

    return call, [t.q_BT1K, k_BT1K, t.v_BHTV, *signals.values(), *([] if beta is None else [beta])]


def make_block_masked(t: BenchmarkTokens, mask: str, **options: int) -> CallAndLeaves:
    """Return the call of block mixing with nonnegative features in every head."""
    config = LinearAttention(mask={"name": mask, "block": CHUNK, **options})
    heads, value = t.v_BHTV.shape[1], t.v_BHTV.shape[-1]
    made = MASKS[config.mask](config.mask, AttentionShape(1, heads, heads, value, value, 1.0))
    module: Any = made.to(t.v_BHTV.device)
    q, k = (x.softmax(-1) for x in (t.q_BHTV, t.k_BHTV))
    call = lambda: module.chunked(mask_inputs(q, k, t.v_BHTV, None, {}), None, CHUNK)[0]  # noqa: E731
    return call, [q, k, t.v_BHTV, *module.parameters()]


def mask_inputs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, signals: dict[str, Tensor]) -> MaskInputs:
    """Pack tensors into MaskInputs."""
    start_B = torch.zeros(v.shape[0], dtype=torch.long, device=v.device)
    return MaskInputs(q.unsqueeze(2), k, v, beta, start_B, torch.full_like(start_B, v.shape[2]), signals)
