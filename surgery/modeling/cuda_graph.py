"""Decoding steps captured in one CUDA graph: each token then costs a single launch.

    model.generate(**prompt, cache_implementation="static", max_new_tokens=500)

This needs one GPU, and a linear mixer with a bounded state in every attention module, with or without a sliding window:
state shapes stay constant, and no value is read back to the CPU. (With `near_tokens: chunks` a step reads back whether
a block is complete.) transformers calls `capture_decode_step` where it would compile a model for a static cache;
disable_compile=True turns the graph off too. All other steps call the model itself. See GenerationMixin._sample in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation/utils.py
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers import Mixer
from surgery.mixers.linear import LinearMixer
from surgery.modeling.cache import CACHE_NAME, MixerCacheLayer, mixer_modules

PLAIN_INPUTS = {
    "input_ids",
    "position_ids",
    CACHE_NAME,
    "attention_mask",
    "use_cache",
    "logits_to_keep",
    "return_dict",
}


def capture_decode_step(model: Any, cache: Any, generation_config: Any) -> CapturedDecodeStep | None:
    """Return a callable that replaces the model's forward during generation, or None if graphs do not apply."""
    asked = generation_config.cache_implementation == "static" and not generation_config.disable_compile
    layers = getattr(cache, "layers", [])
    linear = [can_capture(module.mixer) for _, module in mixer_modules(model)]
    has_mixers_alone = (
        linear and all(linear) and len(linear) == len(layers) and all(type(x) is MixerCacheLayer for x in layers)
    )
    recording = any(getattr(x, "record_past", False) for x in layers)
    if not (asked and has_mixers_alone and is_on_one_gpu(model)) or recording:
        return None
    return CapturedDecodeStep(model, int(generation_config.max_length))


def can_capture(mixer: Mixer) -> bool:
    """Return whether a decoding step of the mixer reads no value back to the CPU and leaves a state of the same
    size.
    """
    return isinstance(mixer, LinearMixer) and mixer.mask.has_bounded_state and mixer.config.near_tokens == "sliding"


def is_on_one_gpu(model: Any) -> bool:
    """Return whether all parameters are on one GPU."""
    return not hasattr(model, "hf_device_map") and all(p.is_cuda for p in model.parameters())


def record_graph(
    step: Callable[[], None], warmups: int = 0, stream: torch.cuda.Stream | None = None
) -> Callable[[], None]:
    """Capture `step` in a CUDA graph and return a function that replays it on the same tensors.

    warmups: runs of `step` before the capture, on a stream of their own, as backward passes need it. stream: on which
    to capture; where `step` ran before on this stream, no warm-up is needed, and no memory beside that of those runs.
    Other threads may use the GPU meanwhile, for example to copy the next batch to pinned memory.
    """
    if warmups:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(warmups):
                step()
        torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # releases cached memory first
        step()
    return graph.replay


@dataclass
class CapturedDecodeStep:
    """A captured decoding step, called like the model. The first step runs normally; the second is captured.

    reach: the maximum length of the rows, for which log-linear states reserve memory at once.
    """

    model: Any
    reach: int
    replay: Callable[[], None] | None = None
    disabled: bool = False
    static_tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: list[MixerCacheLayer] = field(default_factory=list)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model, or replay the captured step for a single new token."""
        layers = inputs[CACHE_NAME].layers
        plain = (
            set(inputs) <= PLAIN_INPUTS and inputs["input_ids"].shape[1] == 1 and inputs.get("position_ids") is not None
        )
        if self.disabled or not plain:
            return self.model(**inputs)
        if not self.layers:
            self.layers = layers
            for layer in layers:
                reserve_buckets(layer, self.reach)
            out = self.model(**inputs)
            self.static_tensors = {name: inputs[name].clone() for name in ("input_ids", "position_ids")}
            self.static_tensors["logits"] = out.logits.clone()
            return out
        if self.replay is None:
            self._record(inputs[CACHE_NAME])
        return self.model(**inputs) if self.replay is None else self._replay_step(inputs)

    def _record(self, cache: Any) -> None:
        states, seen = [layer.state for layer in self.layers], [layer.seen for layer in self.layers]
        max_seen = [state.max_seen for state in states if state is not None]

        def step() -> None:
            ids, places = self.static_tensors["input_ids"], self.static_tensors["position_ids"]
            out = self.model(
                input_ids=ids, position_ids=places, use_cache=True, return_dict=True, **{CACHE_NAME: cache}
            )
            self.static_tensors["logits"].copy_(out.logits)
            for layer, state in zip(self.layers, states):
                state_after = layer.state
                assert state_after is not None and state is not None
                state.seen_B.copy_(state_after.seen_B)
                for name, tensor in state.tensors.items():
                    if state_after.tensors[name] is not tensor:  # the step may have overwritten the state in place
                        tensor.copy_(state_after.tensors[name])

        try:
            self.replay = record_graph(step)
        except RuntimeError as error:
            self.disabled = True
            warnings.warn(
                f"this model's decoding steps cannot be captured in a CUDA graph, so they run one by one: {error}",
                stacklevel=3,
            )
        for layer, state, tokens, bound in zip(self.layers, states, seen, max_seen):
            assert state is not None
            layer.state, layer.seen, state.max_seen = state, tokens, bound

    def _replay_step(self, inputs: dict[str, Any]) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        assert self.replay is not None
        states, seen = [layer.state for layer in self.layers], [layer.seen for layer in self.layers]
        for name in ("input_ids", "position_ids"):
            self.static_tensors[name].copy_(inputs[name])
        self.replay()
        for layer, state, tokens in zip(self.layers, states, seen):
            assert state is not None
            layer.state, layer.seen = state, tokens + 1
            state.max_seen = None if state.max_seen is None else state.max_seen + 1
        return CausalLMOutputWithPast(logits=self.static_tensors["logits"].clone(), **{CACHE_NAME: inputs[CACHE_NAME]})


def reserve_buckets(layer: MixerCacheLayer, reach: int) -> None:
    """Enlarge a log-linear state to the buckets of `reach` tokens; unused buckets are zero."""
    state = layer.state
    if state is not None and "mask.buckets" in state.tensors:
        buckets = state.tensors["mask.buckets"]
        more = max(0, reach.bit_length() - buckets.shape[1])
        state.tensors["mask.buckets"] = F.pad(buckets, (0, 0, 0, 0, 0, 0, 0, more))
