"""The model classes that serve checkpoints with mixers: vLLM's Transformers backend with states in place of key caches,
and with sliding windows; and one for models that cap their logits.

Linear mixers become layers with a state (`MixerLayer`). Window mixers become vLLM's own attention with a sliding window:
their keys are those of the model, so that vLLM has a cache for them, in pages that it frees behind the window.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.transformers import TransformersForCausalLM

from surgery.architectures.attention import attention_shape
from surgery.checkpoint.table import read_mixers
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, AttentionShape, MixerConfig, mixer_config
from surgery.mixers.linear import LinearMixer
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.sliding_window import Window, windowed_shape
from surgery.vllm.mixer_layer import ATTENTION_NAME, OPERATOR, MixerLayer
from surgery.vllm.mixer_slices import MixerSlices, slice_shape
from surgery.vllm.mixer_state import StateLayout, row_size
from surgery.vllm.servable import SOFTCAP, check_mixer, logit_scale


class AttentionLayers(Protocol):
    """vLLM's attention layers of a model."""

    def take(self, module: Any) -> Any:
        """Return the layer of an attention module, and remove it."""

    def put(self, module: Any, layer: Any) -> None:
        """Make this the layer of an attention module."""


class LayersByNumber(AttentionLayers):
    """Attention layers as vLLM 0.26 has them: in a dict by layer number, which is passed to the attention function."""

    def __init__(self, layers: dict[int, Any]):
        self.layers = layers

    def take(self, module: Any) -> Any:
        """Return the layer of an attention module, and remove it."""
        return self.layers.pop(module.layer_idx)

    def put(self, module: Any, layer: Any) -> None:
        """Make this the layer of an attention module."""
        self.layers[module.layer_idx] = layer


class LayersInModules(AttentionLayers):
    """Attention layers as vLLM 0.32 has them: each the child `attn` of its module."""

    def take(self, module: Any) -> Any:
        """Return the layer of an attention module."""
        return module.attn

    def put(self, module: Any, layer: Any) -> None:
        """Make this the layer of an attention module."""
        module.attn = layer


class SurgeryLogitsForCausalLM(TransformersForCausalLM):
    """Any causal model of transformers, whose logits are capped (vLLM 0.26 leaves that out) and scaled as its config says.

    Structured linears are served too.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.logits_processor.soft_cap = getattr(self.text_config, SOFTCAP, None)
        self.logits_processor.scale *= logit_scale(self.text_config.to_dict())


class SurgeryWindowForCausalLM(SurgeryLogitsForCausalLM):
    """Any causal model of transformers, with sliding windows where the checkpoint's table has them.

    Structured linears are served too.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        self.vllm_config = vllm_config  # vLLM 0.26 does not keep it
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Make vLLM's attention layers, and replace those of the table. vLLM 0.32 calls this."""
        super()._create_attention_instances(prefix)
        self.replace_layers(LayersInModules())

    def create_attention_instances(self) -> Any:
        """Return vLLM's attention layers, by layer number, with those of the table replaced. vLLM 0.26 calls this."""
        layers = super().create_attention_instances()
        self.replace_layers(LayersByNumber(layers))
        return layers

    def replace_layers(self, layers: AttentionLayers) -> None:
        """Replace vLLM's attention layers that have a window mixer by layers of that window."""
        for path, (config, shape) in served_mixers(self.vllm_config).items():
            if not isinstance(config, Window):
                continue
            module = self.get_submodule(path)
            layer = layers.take(module)
            del self.compilation_config.static_forward_context[layer.layer_name]
            windowed = type(layer)(
                num_heads=layer.num_heads,
                head_size=layer.head_size,
                scale=layer.impl.scale,
                num_kv_heads=layer.num_kv_heads,
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                logits_soft_cap=getattr(self.text_config, "attn_logit_softcapping", None),
                per_layer_sliding_window=windowed_shape(shape, config.window).window,
                prefix=layer.layer_name,
            )
            layers.put(module, windowed)


class SurgeryForCausalLM(SurgeryWindowForCausalLM, IsHybrid):
    """Any causal model of transformers, with mixers where the checkpoint's table has them, linear ones among them."""

    is_hybrid = True

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        check_engine(vllm_config)
        operators = vllm_config.compilation_config.splitting_ops
        if operators is not None and f"vllm::{OPERATOR}" not in operators:
            operators.append(f"vllm::{OPERATOR}")  # compiled graphs end at a mixer, as at attention
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def replace_layers(self, layers: AttentionLayers) -> None:
        """Replace vLLM's attention layers that have a mixer of the table."""
        super().replace_layers(layers)
        context, dtype = self.compilation_config.static_forward_context, self.model_config.dtype
        size = self.get_mamba_state_shape_from_config(self.vllm_config)[0][0]
        host = copy.copy(self.text_config)
        host._attn_implementation_internal = ATTENTION_NAME
        for path, mixer in build_mixers(self.vllm_config).items():
            module = self.get_submodule(path)
            del context[layers.take(module).layer_name]
            module.config, module.mixer = (
                host,
                mixer.to(device=self.device_config.device, dtype=dtype).requires_grad_(False),
            )
            self.cut_heads(path, module.mixer)
            module.attn = MixerLayer(module.mixer, f"{path}.attn", size)
            module.register_forward_pre_hook(pass_mixer_inputs, with_kwargs=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the checkpoint's tensors and return their names. Raises SurgeryError if a mixer's are not all among them:
        vLLM checks that of unquantized models only, and the files of a Hub id were not checked before (`check_files`)."""
        loaded: set[str] = super().load_weights(weights)
        mixers = tuple(f"{path}.mixer." for path in build_mixers(self.vllm_config))
        if missing := sorted({name for name, _ in self.named_parameters() if name.startswith(mixers)} - loaded):
            raise SurgeryError(
                f"{self.vllm_config.model_config.model} lacks {len(missing)} tensors of its mixers, such as {missing[0]!r}. "
                "Download or convert it again"
            )
        return loaded

    def cut_heads(self, path: str, mixer: LinearMixer) -> None:
        """Make vLLM load this process's heads of a mixer, if there are several processes."""
        count = self.vllm_config.parallel_config.tensor_parallel_size
        if count == 1:
            return
        config, shape = served_mixers(self.vllm_config)[path]
        assert isinstance(config, LinearAttention)
        slices = MixerSlices(config, shape, get_tensor_model_parallel_rank(), count)
        for name, tensor in mixer.state_dict(keep_vars=True).items():
            tensor.weight_loader = partial(slices.copy, name)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a request's row: the largest of all layers, because vLLM allocates one size."""
        longest = vllm_config.model_config.max_model_len
        return ((row_size([StateLayout(mixer, longest) for mixer in build_mixers(vllm_config).values()]),),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Return the dtype of a request's row."""
        return (torch.float32,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """Return the functions with which prefix caching copies the states."""
        return (get_temporal_copy_spec,)


def check_engine(vllm_config: Any) -> None:
    """Raise SurgeryError for options of the engine with which mixers would give wrong tokens."""
    if vllm_config.speculative_config is not None:
        raise SurgeryError(
            "speculative decoding is refused for checkpoints with mixers: vLLM would leave rejected draft tokens in "
            "their states, and the "
            "output would be wrong. Leave out --speculative-config"
        )
    if (mode := vllm_config.cache_config.mamba_cache_mode) not in ("none", "align"):
        raise SurgeryError(f"--mamba-cache-mode must be none or align for checkpoints with mixers (got {mode})")


def served_mixers(vllm_config: Any) -> dict[str, tuple[MixerConfig, AttentionShape]]:
    """Return the mixers of the checkpoint's table and the shapes of their attention, by attention path."""
    model_config = vllm_config.model_config
    table = model_config.hf_config.quantization_config
    data = table if isinstance(table, dict) else table.to_dict()
    config = copy.deepcopy(model_config.hf_config)
    del config.quantization_config
    config._attn_implementation = "sdpa"
    from transformers import AutoModelForCausalLM

    # The Transformers backend decorates the model's class, which from then on asks for the current config.
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    found: dict[str, tuple[MixerConfig, AttentionShape]] = {}
    with torch.device("cpu"):
        for path, entry in read_mixers({"quantization_config": data}, str(model_config.model)).items():
            mixer, shape = check_mixer(mixer_config(entry), path), attention_shape(skeleton, path)
            MIXERS[mixer].check_config(mixer, shape)
            found[path] = mixer, shape
    return found


def build_mixers(vllm_config: Any) -> dict[str, LinearMixer]:
    """Return the untrained linear mixers of the checkpoint's table, on the CPU in float32, by attention path, with the
    heads of one process.
    """
    mixers: dict[str, LinearMixer] = {}
    processes = vllm_config.parallel_config.tensor_parallel_size
    for path, (config, shape) in served_mixers(vllm_config).items():
        if not isinstance(config, LinearAttention):
            continue
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                built: Any = MIXERS[config](config, slice_shape(shape, processes, path))
        finally:
            torch.set_default_dtype(dtype)
        mixers[path] = built
    return mixers


def pass_mixer_inputs(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before an attention module's forward: hand hidden states and rotation on to the mixer, and withhold RoPE if it
    wants none.
    """
    rope = kwargs.get("position_embeddings")
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    kwargs = {**kwargs, "surgery": (hidden_states, rope)}
    if rope is not None and not module.mixer.rotated:
        kwargs["position_embeddings"] = (torch.ones_like(rope[0]), torch.zeros_like(rope[1]))
    return args, kwargs
