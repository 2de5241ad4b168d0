"""Saving a cache to disk: mixer states, and the keys and values of softmax layers.

A file holds the rings of linear mixers with a window in order of position (`rings_to_queues`).

save_cache(output.past_key_values, "prompt.safetensors")
cache = load_cache("prompt.safetensors", model)             generate(..., past_key_values=cache) continues from it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_path, explain_disk_errors, parse_json
from surgery.mixers import Mixer, MixerConfig, MixerState, mixer_config
from surgery.mixers.common.window_hybrid import queues_to_rings, rings_to_queues
from surgery.mixers.head_hybrid import PREFIX
from surgery.modeling.cache import MixerCacheLayer, cached_modules


def save_cache(cache: Cache, path: str | Path) -> None:
    """Write a dynamic cache to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for i in range(len(cache.layers)):
        layer: Any = cache.layers[i]
        kind = type(layer)
        if isinstance(layer, MixerCacheLayer):
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
            raise SurgeryError(f"layer {i} of the cache is a {kind.__name__}; only dynamic caches can be saved")
        tensors.update({f"{i}.{name}": t.detach().clone().contiguous() for name, t in held.items()})
    with explain_disk_errors(Path(path)), atomic_path(Path(path)) as partial:
        save_file(tensors, partial, metadata={"surgery": json.dumps(layers)})


def load_cache(path: str | Path, model: Any) -> DynamicCache:
    """Return the cache saved in a file, for the model that wrote it; each layer is on the device of its attention."""
    layers, tensors = _read(path)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    homes = {m.layer_idx: m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    mixers = {m.layer_idx: m.mixer for m in cached_modules(model)}
    for i, entry in enumerate(layers):
        mixer = mixers.get(i)
        if (entry["kind"] == "mixer") != (mixer is not None) or i >= len(cache.layers):
            raise SurgeryError(
                f"layer {i} of this cache holds the state of {'a mixer' if entry['kind'] == 'mixer' else 'softmax attention'}, "
                f"which the model's layer {i} is not; load it with the model that wrote it"
            )
        device = next((p.device for p in homes[i].parameters()), model.device) if i in homes else model.device
        held = {n.partition(".")[2]: t.to(device) for n, t in tensors.items() if n.partition(".")[0] == str(i)}
        if mixer is not None:
            cache.layers[i] = _mixer_layer(entry, held, mixer, i)
        elif held:
            _check_same_shapes(i, held, {"keys": 4, "values": 4})
            _fill_layer(cache.layers[i], held, entry["seen"])
    return cache


def _read(path: str | Path) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            layers = parse_json((file.metadata() or {})["surgery"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise SurgeryError(f"{path} is not a saved cache: {error}") from None
    if not isinstance(layers, list) or not all(_is_layer(entry) for entry in layers):
        raise SurgeryError(f"{path} is not a saved cache: its list of layers is damaged")
    return layers, tensors


def _is_layer(entry: Any) -> bool:
    if not isinstance(entry, dict) or type(entry.get("seen")) is not int or not 0 <= entry["seen"] < 2**40:
        return False
    return entry.get("kind") == "softmax" or (entry.get("kind") == "mixer" and "config" in entry)


def _check_same_shapes(index: int, held: dict[str, Tensor], dims: dict[str, int]) -> None:
    found = {name: tensor.dim() for name, tensor in held.items()}
    if found != dims:
        raise SurgeryError(
            f"layer {index} of this cache is damaged: its tensors must have the dimensions {dims} (got {found})"
        )


def _check_seen(index: int, seen_B: Tensor, seen: int) -> None:
    """Raise SurgeryError unless seen_B counts the tokens of rows, at most `seen` in each."""
    if seen_B.dtype != torch.int64 or bool(((seen_B < 0) | (seen_B > seen)).any()):
        raise SurgeryError(
            f"layer {index} of this cache is damaged: seen_B must be int64, from 0 to {seen} (got {seen_B.tolist()[:8]})"
        )


def _check_waiting_tokens(index: int, held: dict[str, Tensor], fresh: dict[str, Tensor], rows: int) -> None:
    """Raise SurgeryError unless the rings and sinks have as many rows, and the sizes of the model's own, `fresh`."""
    for name, tensor in fresh.items():
        shape = (rows, *tensor.shape[1:])
        if name.startswith(("ring.", "sink.")) and held[name].shape != shape:
            raise SurgeryError(
                f"layer {index} of this cache is damaged: {name} must have the shape {shape} (got {tuple(held[name].shape)})"
            )
    keys = [name for name in held if name.startswith(PREFIX)]
    for name in keys:  # keys and values of softmax heads, of as many tokens as were seen
        found, slots = tuple(held[name].shape), held[keys[0]].shape[2]
        shape = (rows, fresh[name].shape[1], slots, fresh[name].shape[3])
        if found != shape:
            raise SurgeryError(
                f"layer {index} of this cache is damaged: {name} must have the shape {shape} (got {found})"
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
