"""Saving a cache to disk: mixer states, and the keys and values of softmax layers.

A file holds the rings of linear mixers with a window in order of position (`rings_to_queues`), and a digest of the
decoder whose calls filled the cache: states of other weights have the same shapes and mean nothing.

save_cache(output.past_key_values, "prompt.safetensors")
cache = load_cache("prompt.safetensors", model)             generate(..., past_key_values=cache) continues from it
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_path, explain_disk_errors, parse_json
from surgery.mixers import Mixer, MixerConfig, MixerState, mixer_config
from surgery.mixers.common.window_hybrid import queues_to_rings, rings_to_queues
from surgery.mixers.head_hybrid import PREFIX
from surgery.modeling.cache import MixerCacheLayer, cached_modules, innermost_model, mixer_modules, remember_decoder

DIGEST = re.compile(r"[0-9a-f]{64}")
SAMPLED = 256  # values of each tensor whose places count in the digest
SUMMED = 2**24  # values that are summed at a time
# Options of a config that change keys, values and states without changing the shape of a weight.
CONFIG_OPTIONS = (
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
)


def save_cache(cache: Cache, path: str | Path) -> None:
    """Write a dynamic cache to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    decoder = next((x.decoder for x in cache.layers if isinstance(x, MixerCacheLayer) and x.decoder is not None), None)
    digest = None if decoder is None else decoder_digest(decoder)
    layers: list[dict[str, Any]] = []
    for i in range(len(cache.layers)):
        layer: Any = cache.layers[i]
        kind = type(layer)
        if kind is MixerCacheLayer:
            config = None if layer._mixer is None else layer._mixer.config.to_dict()
            layers.append({"kind": "mixer", "seen": layer.seen, "config": config})
            state = layer.state
            held = {}
            if state is not None:
                held = {"seen_B": state.seen_B, **rings_to_queues(state.tensors, state.seen_B)}
        elif kind in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append({"kind": "softmax", "seen": int(layer.get_seq_length())})
            held = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
        else:
            raise SurgeryError(
                f"layer {i} of the cache is a {kind.__name__}; only caches whose layers hold keys and values, or the state "
                "of a mixer alone, can be saved"
            )
        tensors.update({f"{i}.{name}": t.detach().clone().contiguous() for name, t in held.items()})
    if digest is not None:  # in the one entry of the metadata: safetensors writes several in any order
        layers[0]["decoder"] = digest
    with explain_disk_errors(Path(path)), atomic_path(Path(path)) as partial:
        save_file(tensors, partial, metadata={"surgery": json.dumps(layers)})


@torch.no_grad()
def decoder_digest(decoder: nn.Module) -> str | None:
    """Return a SHA-256 of a decoder: options of its config, and of every tensor of a checkpoint of it, the sum of all
    values' bits and SAMPLED values in their order, in bfloat16.

    A model and its copy in bfloat16 have the same digest. None: some weights cannot be read here (they are offloaded,
    or quantized to a type without values).
    """
    config: Any = getattr(decoder, "config", None)
    options = {name: value for name in CONFIG_OPTIONS if (value := getattr(config, name, None)) is not None}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    sampled: list[Tensor] = []
    sums: list[int] = []
    for name, tensor in sorted(_stored_tensors(decoder), key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        count = min(SAMPLED, tensor.numel())
        try:
            flat = tensor.detach().reshape(-1)
            step = flat.numel() // max(1, count) | 1  # odd: samples of a matrix are not all of one column
            index = torch.arange(count, device=flat.device) * step % max(1, flat.numel())
            sampled.append(flat[index].to(torch.bfloat16).cpu())
            sums.append(sum(int(_bits(values).sum(dtype=torch.int64)) for values in flat.split(SUMMED)))
        except (NotImplementedError, RuntimeError, TypeError):
            return None
    digest.update(torch.cat(sampled).view(torch.int16).numpy().tobytes() if sampled else b"")
    digest.update(str(sums).encode())
    return digest.hexdigest()


def _bits(values: Tensor) -> Tensor:
    """Return the values in bfloat16, as 16-bit integers: their sum is the same in any order and on any device."""
    return values.to(torch.bfloat16).contiguous().view(torch.int16)


def _stored_tensors(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, a shared one once."""
    yield from decoder.named_parameters()
    for path, module in decoder.named_modules():
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _check_decoder(path: str | Path, saved: str | None, model: Any) -> nn.Module | None:
    """Return the model's decoder if it filled the cache.

    Raises SurgeryError if other weights did; warns and returns None if that is unknown.
    """
    attentions = (attention for attention, module in mixer_modules(model) if module.mixer.shape.causal)
    decoder = next((innermost_model(model, attention) for attention in attentions), None)
    if decoder is None:
        return None  # a cache of softmax layers alone, as transformers has it
    digest = None if saved is None else decoder_digest(decoder)
    if digest is None:
        reason = "names no weights" if saved is None else "names weights, and those of this model cannot be read"
        warnings.warn(
            f"{path} {reason}, so it may be of another model. Load it with the model that wrote it", stacklevel=3
        )
        return None
    if digest != saved:
        raise SurgeryError(
            f"{path} was filled by a model with other weights or options than this {type(decoder).__name__}, whose "
            "states it does not hold. Load "
            "it with the model that wrote it, or run the prompt again"
        )
    return decoder


def load_cache(path: str | Path, model: Any) -> DynamicCache:
    """Return the cache saved in a file, for the model that wrote it; each layer is on the device of its attention.

    Raises SurgeryError for a cache of other weights. Files of earlier versions do not name theirs: a warning says so.
    """
    layers, tensors, digest = _read(path)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    homes = {m.layer_idx: m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    mixers = {m.layer_idx: m.mixer for m in cached_modules(model)}
    for i, entry in enumerate(layers):
        mixer = mixers.get(i)
        if (entry["kind"] == "mixer") != (mixer is not None) or i >= len(cache.layers):
            raise SurgeryError(
                f"layer {i} of this cache holds the state of "
                f"{'a mixer' if entry['kind'] == 'mixer' else 'softmax attention'}, "
                f"which the model's layer {i} is not; load it with the model that wrote it"
            )
        device = next((p.device for p in homes[i].parameters()), model.device) if i in homes else model.device
        held = {n.partition(".")[2]: t.to(device) for n, t in tensors.items() if n.partition(".")[0] == str(i)}
        if mixer is not None:
            cache.layers[i] = _mixer_layer(entry, held, mixer, i)
        elif held:
            _check_same_shapes(i, held, {"keys": 4, "values": 4})
            _fill_layer(cache.layers[i], held, entry["seen"])
    decoder = _check_decoder(path, digest, model)
    if decoder is not None:
        remember_decoder(decoder, (cache,), {}, None)
    return cache


def _read(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Tensor], str | None]:
    try:
        with safe_open(str(path), framework="pt") as file:
            layers = parse_json((file.metadata() or {})["surgery"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SurgeryError(f"{path} is not a saved cache: {error}") from None
    if not isinstance(layers, list) or not all(_is_layer(entry) for entry in layers):
        raise SurgeryError(f"{path} is not a saved cache: its list of layers is damaged")
    digest = layers[0].get("decoder") if layers else None
    if digest is not None and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise SurgeryError(f"{path} is not a saved cache: its digest of the decoder is damaged")
    return layers, tensors, digest


def _is_layer(entry: Any) -> bool:
    if not isinstance(entry, dict) or type(entry.get("seen")) is not int or not 0 <= entry["seen"] < 2**40:
        return False
    return entry.get("kind") == "softmax" or (entry.get("kind") == "mixer" and "config" in entry)


def _check_same_shapes(index: int, held: dict[str, Tensor], dims: dict[str, int]) -> None:
    held_dims = {name: tensor.dim() for name, tensor in held.items()}
    if held_dims != dims:
        raise SurgeryError(
            f"layer {index} of this cache is damaged: its tensors must have the dimensions {dims} (got {held_dims})"
        )


def _check_seen(index: int, seen_B: Tensor, seen: int) -> None:
    """Raise SurgeryError unless seen_B counts the tokens of rows, at most `seen` in each."""
    if seen_B.dtype != torch.int64 or bool(((seen_B < 0) | (seen_B > seen)).any()):
        raise SurgeryError(
            f"layer {index} of this cache is damaged: seen_B must be int64, from 0 to {seen} (got "
            f"{seen_B.tolist()[:8]})"
        )


def _check_waiting_tokens(index: int, held: dict[str, Tensor], fresh: dict[str, Tensor], rows: int) -> None:
    """Raise SurgeryError unless the rings and sinks have as many rows, and the sizes of the model's own, `fresh`."""
    for name, tensor in fresh.items():
        shape = (rows, *tensor.shape[1:])
        if name.startswith(("ring.", "sink.")) and held[name].shape != shape:
            raise SurgeryError(
                f"layer {index} of this cache is damaged: {name} must have the shape {shape} (got "
                f"{tuple(held[name].shape)})"
            )
    keys = [name for name in held if name.startswith(PREFIX)]
    for name in keys:  # keys and values of softmax heads, of as many tokens as were seen
        held_shape, slots = tuple(held[name].shape), held[keys[0]].shape[2]
        shape = (rows, fresh[name].shape[1], slots, fresh[name].shape[3])
        if held_shape != shape:
            raise SurgeryError(
                f"layer {index} of this cache is damaged: {name} must have the shape {shape} (got {held_shape})"
            )


def _is_config(saved: Any, config: MixerConfig) -> bool:
    """Return whether a saved config is `config`. Options that did not exist when it was saved have their defaults."""
    if saved == json.loads(json.dumps(config.to_dict())):
        return True
    try:
        return isinstance(saved, dict) and mixer_config(saved) == config
    except SurgeryError:
        return False


def _mixer_layer(entry: dict[str, Any], held: dict[str, Tensor], mixer: Mixer, index: int) -> MixerCacheLayer:
    if entry["config"] is not None and not _is_config(entry["config"], mixer.config):
        raise SurgeryError(f"layer {index} was saved by {entry['config']}; here it is {mixer.config}")
    layer = MixerCacheLayer()
    layer.seen, layer._mixer = entry["seen"], mixer
    if held:
        fresh = mixer.empty_state(1, "cpu")
        _check_same_shapes(index, held, {"seen_B": 1, **{name: tensor.dim() for name, tensor in fresh.tensors.items()}})
        seen_B = held.pop("seen_B")
        _check_seen(index, seen_B, entry["seen"])
        _check_waiting_tokens(index, held, rings_to_queues(fresh.tensors, fresh.seen_B), len(seen_B))
        layer.state = MixerState(seen_B, queues_to_rings(held, seen_B), entry["seen"])
        layer.is_initialized = True
    return layer


def _fill_layer(layer: Any, held: dict[str, Tensor], seen: int) -> None:
    """Store saved keys and values in a layer; a sliding-window layer holds only the last ones."""
    layer.update(held["keys"], held["values"])
    if hasattr(layer, "cumulative_length"):
        layer.keys, layer.values, layer.cumulative_length = held["keys"], held["values"], seen
