"""Benchmark of whole models of a Llama's shape with random weights: original (SDPA), with mixers, with BTT linears.

Prefill and decoding by transformers' own code, eager, batch 1.

    prefill    tokens per second of one call over the prompt, which fills the cache and computes the logits of the last token
    decode     tokens per second after that prompt, one call per token, without cuDNN's attention except in the first row
    static     the same with generate(cache_implementation="static"): a step with linear mixers is one CUDA graph, other models
               are compiled by transformers
    compiled   prefill without a cache, every layer compiled by torch.compile: the original and models with structured linears
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from surgery.architectures.attention import attention_paths
from surgery.eval.speed.attention import split_ranks
from surgery.eval.speed.timer import BenchmarkCase, Call, TimedImplementation, forward
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.mlr import MLR
from surgery.modeling.attention import install
from surgery.modeling.fuse import fuse_projections
from surgery.modeling.joined import connect_joined, group_entries
from surgery.modeling.modules import build_module
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT
from surgery.structures.low_rank import LowRank
from surgery.training.compiled_layers import compile_layers

SHAPES: dict[str, dict[str, Any]] = {
    "full": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    },
}
SHAPES["main"] = SHAPES["full"]
CONTEXTS = {"full": (2048, 8192, 32768, 131072), "main": (8192, 131072), "small": (64, 128)}
STATIC = {"full": (2048, 32768), "main": (8192,), "small": (64,)}  # contexts; compiled anew for each
COMPILED = {"full": (2048, 8192), "main": (8192,), "small": (64,)}  # contexts of prefill with compiled layers
RANK_MULTIPLE = 64  # as in the recipe fast-half
EXTRA_SLOTS = 512  # tokens of a static cache behind its context
EXTENT = {"full": 8192, "main": 8192, "small": 128}  # level l of MLR attention is seen within EXTENT / 2^(l-1) tokens
ORIGINAL, WITHOUT_CUDNN, FAST_HALF = "original, SDPA", " without cuDNN", "fast-half"
FUSED = FAST_HALF + ", fused projections"  # surgery.fuse_projections, for decoding
JOINED = FAST_HALF + ", joined"  # share: input
JOINED_LINEARS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
STEPS = {"full": 6, "main": 6, "small": 2}


def benchmark_cases(sizes: str, device: torch.device, dtype: torch.dtype) -> Iterator[BenchmarkCase]:
    """Yield prefill and decoding cases; decoding continues from the cache of its prefill."""
    models: dict[str, Any] = {}
    caches: dict[str, Any] = {}
    for length in CONTEXTS[sizes]:
        where = {**SHAPES[sizes], "tokens": length, "batch": 1}
        ids_1T = torch.randint(SHAPES[sizes]["vocab_size"], (1, length), device=device)
        prefills, steps = [], []
        for name, choice, change in model_changes(sizes):
            made = lambda n=name, c=change: _get_model(models, n, c, sizes, device, dtype)  # noqa: E731
            off = name.endswith(WITHOUT_CUDNN), name != ORIGINAL  # cuDNN's attention, in prefill and decoding
            pre = lambda n=name, m=made, i=ids_1T, o=off: _prefill(m(), i, caches, n, o[0])  # noqa: E731
            last = lambda n=name: _take_cache(caches, n)  # noqa: E731
            step = lambda c=last, m=made, o=off: _decode_steps(m(), c(), STEPS[sizes], device, o[1])  # noqa: E731
            op = "original" if name.startswith(ORIGINAL) else None
            prefills.append(TimedImplementation(name, pre, choice, op=op))
            steps.append(TimedImplementation(name, step, choice, times=STEPS[sizes], op=op))
        yield BenchmarkCase("model, prefill", length, where, prefills, launches=True)
        yield BenchmarkCase("model, decode", length, where, steps, launches=True)
        caches.clear()
        if length in COMPILED[sizes]:
            compiled = _compiled_prefills(models, ids_1T, sizes, device, dtype)
            yield BenchmarkCase("model, prefill, layers compiled", length, where, compiled, launches=True)
        if length in STATIC[sizes]:
            yield BenchmarkCase(
                "model, decode, static cache",
                length,
                where,
                _static_implementations(models, length, sizes, device, dtype),
                launches=True,
            )


def model_changes(sizes: str) -> list[tuple[str, Any, Callable[[Any], None]]]:
    """Return (name, kernel choice, function that changes the original model)."""
    ranks, extents = split_ranks(SHAPES[sizes]["head_dim"], EXTENT[sizes])
    mlr = MLR(ranks=ranks, extents=extents)
    log_linear = LinearAttention(mask="hierarchical")
    return [
        (ORIGINAL, "measured", lambda model: None),
        (ORIGINAL + WITHOUT_CUDNN, "measured", lambda model: None),
        ("log-linear Mamba-2", "measured", lambda model: install_mixers(model, log_linear)),
        ("log-linear Mamba-2, reference", "reference", lambda model: install_mixers(model, log_linear)),
        ("MLR attention", "measured", lambda model: install_mixers(model, mlr)),
        ("MLR attention, reference", "reference", lambda model: install_mixers(model, mlr)),
        ("BTT half, 4 x 4", "measured", lambda model: replace_linears(model, BTT(blocks=(4, 4)))),
        ("BTT s=4", "measured", lambda model: replace_linears(model, BTT(rank=4))),
        (FAST_HALF, "measured", lambda model: replace_linears(model, LowRank(), RANK_MULTIPLE)),
        (FUSED, "measured", fast_half_fused),
        (JOINED, "measured", fast_half_joined),
    ]


def fast_half_fused(model: Any) -> None:
    """Replace every linear as `fast-half` does, and compute those of the same input together."""
    replace_linears(model, LowRank(), RANK_MULTIPLE)
    fuse_projections(model)


def fast_half_joined(model: Any) -> None:
    """Replace every linear as `fast-half` does with `share: input`: one matrix for q, k and v, and one for gate and
    up.
    """
    for layer in model.model.layers:
        for parent, names in zip((layer.self_attn, layer.mlp), JOINED_LINEARS):
            linears = [parent.get_submodule(name) for name in names]
            weight, outs = linears[0].weight, [linear.out_features for linear in linears]
            fitted = fit_half(LowRank(), linears[0].in_features, sum(outs), RANK_MULTIPLE)
            entries = group_entries(linears[0].in_features, dict(zip(names, outs)), fitted.to_dict())
            made = {name: build_module(entry, weight.device, weight.dtype) for name, entry in entries.items()}
            connect_joined(made)
            for name, module in made.items():
                parent.set_submodule(name, module.requires_grad_(weight.requires_grad))
    replace_linears(model, LowRank(), RANK_MULTIPLE)


def install_mixers(model: Any, config: Any) -> None:
    """Replace every attention by a mixer."""
    install(model, dict.fromkeys(attention_paths(model), config))


def replace_linears(model: Any, config: Any, multiple: int = 1, keep: float = 0.5) -> None:
    """Replace every linear of the layers; with the share `keep` of its parameters if the config has no rank.

    multiple: ranks above it are rounded down to its multiples.
    """
    for path, linear in list(model.model.layers.named_modules()):
        if isinstance(linear, nn.Linear):
            in_, out = linear.in_features, linear.out_features
            kind, fitted = STRUCTURES[config], fit_half(config, in_, out, multiple, keep)
            made = kind(in_, out, fitted, bias=False, device=linear.weight.device, dtype=linear.weight.dtype)
            model.model.layers.set_submodule(path, made)


def fit_half(config: Any, in_: int, out: int, multiple: int = 1, keep: float = 0.5) -> Any:
    """Return the config of the largest rank with the share `keep` of the parameters, if above `multiple` rounded down
    to its multiples.
    """
    fitted = STRUCTURES[config].fit(config, out, in_, int(keep * in_ * out))
    return replace(fitted, rank=fitted.rank // multiple * multiple) if fitted.rank > multiple > 1 else fitted


def _get_model(models: dict[str, Any], name: str, change: Any, sizes: str, device: Any, dtype: torch.dtype) -> Any:
    """Return the model, made once and kept; implementations that differ only in the kernel choice share it."""
    name = name.removesuffix(", reference").removesuffix(WITHOUT_CUDNN)
    if name not in models:
        models[name] = make_model(sizes, device, dtype)
        change(models[name])
    return models[name]


def make_model(sizes: str, device: Any, dtype: torch.dtype) -> Any:
    """Return the original: a Llama of the shape, with random weights."""
    return make_llama(SHAPES[sizes], device, dtype)


def make_llama(shape: dict[str, Any], device: Any, dtype: torch.dtype) -> Any:
    """Return a Llama of the shape, a part of its config, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**shape, max_position_embeddings=2**18, tie_word_embeddings=True)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _prefill(model: Any, ids_1T: Any, caches: dict[str, Any], name: str, flash: bool) -> Call:
    from transformers import DynamicCache

    def run() -> None:
        caches.pop(name, None)
        cache = DynamicCache(config=model.config)
        with allow_cudnn(not flash):
            model(ids_1T, past_key_values=cache, use_cache=True, logits_to_keep=1)
        caches[name] = cache

    return forward(run)


@contextmanager
def allow_cudnn(on: bool) -> Iterator[None]:
    """Set whether SDPA may use cuDNN's attention.

    torch 2.11 prefers it on Hopper, and it builds a plan for every new cache length.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on and before)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _compiled_prefills(
    models: dict[str, Any], ids_1T: Any, sizes: str, device: torch.device, dtype: torch.dtype
) -> list[TimedImplementation]:
    """Return prefill by compiled layers of the original and the models with structured linears; on a CPU nothing is
    compiled.
    """
    implementations = []
    for name, choice, change in model_changes(sizes):
        if not name.startswith((ORIGINAL, "BTT", FAST_HALF)) or name.endswith(WITHOUT_CUDNN):
            continue

        def make(name: str = name, change: Any = change) -> Call:
            model = _get_model(models, f"{name}, compiled", change, sizes, device, dtype)
            if device.type == "cuda":
                compile_layers(model)
            return forward(lambda: model(ids_1T, use_cache=False, logits_to_keep=1))

        implementations.append(TimedImplementation(name, make, choice, op="original" if name == ORIGINAL else None))
    return implementations


def _static_implementations(
    models: dict[str, Any], length: int, sizes: str, device: torch.device, dtype: torch.dtype
) -> list[TimedImplementation]:
    implementations = []
    for name, choice, change in model_changes(sizes):
        if (
            name.startswith("MLR") or choice == "reference" or name.endswith(WITHOUT_CUDNN)
        ):  # MLR attention's cache grows
            continue
        made = lambda n=name, c=change: _get_model(models, n, c, sizes, device, dtype)  # noqa: E731
        kind = _graph_steps if name.startswith("log-linear") else _compiled_steps
        make = lambda m=made, k=kind: k(m(), length, STEPS[sizes], device)  # noqa: E731
        op = "original" if name == ORIGINAL else None
        implementations.append(TimedImplementation(name, make, choice, times=STEPS[sizes], op=op))
    return implementations


def _graph_steps(model: Any, length: int, steps: int, device: torch.device) -> Call:
    """Return decoding steps of surgery.modeling.cuda_graph after a prefill."""
    from transformers import DynamicCache

    from surgery.modeling.cuda_graph import CapturedDecodeStep

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long, device=device), past_key_values=cache, logits_to_keep=1)
    return _step_call(
        CapturedDecodeStep(model, length + EXTRA_SLOTS) if device.type == "cuda" else model,
        cache,
        length,
        steps,
        device,
    )


def _compiled_steps(model: Any, length: int, steps: int, device: torch.device) -> Call:
    """Return decoding steps compiled by transformers; the cache holds zeros, because only time matters."""
    from transformers import StaticCache

    cache, config = StaticCache(config=model.config, max_cache_len=length + EXTRA_SLOTS), model.config
    cache.early_initialization(1, config.num_key_value_heads, config.head_dim, model.dtype, device)
    for layer in cache.layers:
        seen: Any = getattr(layer, "cumulative_length")  # noqa: B009  not every kind of layer has it
        seen.fill_(length)
    call = model.get_compiled_call(None) if device.type == "cuda" else model
    return _step_call(call, cache, length, steps, device)


def _step_call(call: Any, cache: Any, length: int, steps: int, device: torch.device) -> Call:
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
    place_11 = torch.full_like(token_11, length)

    def run() -> None:
        for _ in range(steps):
            call(input_ids=token_11, position_ids=place_11, past_key_values=cache, use_cache=True)
            place_11.add_(1)

    return forward(run)


def _take_cache(caches: dict[str, Any], name: str) -> Any:
    if name not in caches:
        raise LookupError("not run: its prefill was not")
    return caches.pop(name)


def _decode_steps(model: Any, cache: Any, steps: int, device: torch.device, flash: bool) -> Call:
    """Return decoding steps; the cache keeps growing, by less than 1% of a long context."""
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=device)

    def run() -> None:
        with allow_cudnn(not flash):
            for _ in range(steps):
                model(token_11, past_key_values=cache, use_cache=True)

    return forward(run)
