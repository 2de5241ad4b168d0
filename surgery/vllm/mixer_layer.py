"""A mixer as a layer of vLLM with a state of its own, hidden from compilation behind one custom operator."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from surgery.mixers.linear import LinearMixer
from surgery.vllm.backend import register_mixer_backend
from surgery.vllm.mixer_state import Batch, StateLayout, Tokens, mix_batch, steps_in_place
from surgery.vllm.warm_up import warm_up_once

ATTENTION_NAME = "surgery_vllm"
OPERATOR = "surgery_mixer"


class MixerLayer(nn.Module, MambaBase):
    """The state of one mixer, in vLLM's cache, and its output for vLLM's batches.

    `row_size`: numbers that the cache has for a request, the same in every layer.

    The mixer is a child of the attention module, where the loader finds its parameters, and not of this layer.
    """

    mixer: LinearMixer

    def __init__(self, mixer: LinearMixer, prefix: str, row_size: int):
        super().__init__()
        config = get_current_vllm_config()
        self.prefix, self.row_size = prefix, row_size
        self.layout = StateLayout(mixer, config.model_config.max_model_len)
        object.__setattr__(self, "mixer", mixer)
        self.kv_cache: tuple[Tensor, ...] = ()
        config.compilation_config.static_forward_context[prefix] = self

    # One state for all that the mixer remembers: prefix caching copies state by state, and how many there are vLLM asks
    # of the model's class, before it knows the checkpoint.
    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a request's row."""
        return ((self.row_size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of a request's row."""
        return (torch.float32,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The kind of metadata that vLLM makes for this layer."""
        return MambaAttentionBackendEnum.CUSTOM

    @property
    def steps_in_place(self) -> bool:
        """Whether a CUDA graph may hold a step of one token for each request."""
        parameter = next(self.mixer.parameters())
        return steps_in_place(self.mixer, self.layout, parameter.dtype, parameter.device)

    def mix(self, tokens: Tokens, out_NHV: Tensor) -> None:
        """Write the outputs of a call's tokens to `out_NHV`, and the states to the cache.

        Padding, and profiling runs, get zeros. The first of these compiles the kernels.
        """
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:
            warm_up_once(self.mixer, self.layout, tokens, self.row_size)
            out_NHV.zero_()
            return
        batch: Batch = metadata[self.prefix].batch
        count = batch.starts[-1]
        out_NHV[count:].zero_()
        rope = None if tokens.rope is None else (tokens.rope[0][:count], tokens.rope[1][:count])
        q_NHK, k_NGK, v_NGV, x_ND = (t[:count] for t in tokens[:4])
        real = Tokens(q_NHK, k_NGK, v_NGV, x_ND, rope)
        cache_SN = self.kv_cache[0][:, : self.layout.size]
        out_NHV[:count] = mix_batch(self.mixer, self.layout, cache_SN, batch, real).to(out_NHV.dtype)


def surgery_mixer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    output: Tensor,
    layer_name: str,
) -> None:
    """Run the mixer of a layer: query (N, H, K), key (N, G, K), value (N, G, V), x (N, D), cos and sin (N, rotary);
    output (N, H, V).
    """
    layer = get_forward_context().no_compile_layers[layer_name]
    rope = None if cos is None or sin is None else (cos, sin)
    layer.mix(Tokens(query, key, value, x, rope), output)


if find_spec("vllm.compilation.breakable_cudagraph"):  # CUDA graphs without torch.compile, of newer versions
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    # A graph ends at a mixer, if the user has chosen these. Torch reads annotations of a wrapped function as types only.
    surgery_mixer.__annotations__ = {**get_type_hints(surgery_mixer), "return": None}
    surgery_mixer = eager_break_during_capture(surgery_mixer)

register_mixer_backend()
direct_register_custom_op(op_name=OPERATOR, op_func=surgery_mixer, mutates_args=["output"])


def mixer_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, surgery: Any, **_: Any
) -> tuple[Tensor, None]:
    """Attention function of modules with a mixer; query (1, H, N, K). Returns (1, N, H, V)."""
    hidden_states, rope = surgery
    cos, sin = (None, None) if rope is None else (rope[0][0], rope[1][0])
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
    output = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=query.dtype, device=query.device)
    torch.ops.vllm.surgery_mixer(q, k, v, hidden_states[0], cos, sin, output=output, layer_name=module.attn.prefix)
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, mixer_attention)
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
