"""Hooks of GenerationMixin that make `generate` work for models with mixers."""

from __future__ import annotations

import warnings
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.modeling.attention_weights import placeholders, remove_placeholders
from surgery.modeling.cache import CACHE_NAME, MixerCacheLayer, cached_modules, record_past


class MixerGenerationMixin:
    """Mixin of the class of a model that generates."""

    _decode_step: Any = None

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Insert mixer layers into the cache before generate() turns on past recording or asks for its length."""
        done = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, *args, **kwargs
        )
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None:
            for module in cached_modules(self):  # type: ignore[arg-type]
                module.cache_layer(cache)
            assisted = getattr(generation_mode, "value", "") == "assisted_generation"
            if assisted or getattr(generation_config, "is_assistant", False):
                record_past(cache, self, _draft_tokens(generation_config))  # type: ignore[arg-type]
        return done

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Return whether generate() takes its steps from `get_compiled_call`: with mixers only if they are captured in
        a CUDA graph.

        A compiled step would be compiled again whenever the states of mixers grow.
        """
        from surgery.modeling.cuda_graph import capture_decode_step

        cache = model_kwargs.get(CACHE_NAME)
        self._decode_step = capture_decode_step(self, cache, generation_config)
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
        if not any(isinstance(layer, MixerCacheLayer) or hasattr(layer, "native") for layer in layers):
            return super()._valid_auto_compile_criteria(model_kwargs, generation_config)  # type: ignore[misc]
        if generation_config.compile_config is not None and self._decode_step is None:
            warnings.warn("compile_config is not used: generate does not compile the steps of mixers", stacklevel=2)
        return self._decode_step is not None

    def get_compiled_call(self, compile_config: Any) -> Any:
        """Return the captured decoding step if there is one, else the compiled forward."""
        step, self._decode_step = self._decode_step, None
        return super().get_compiled_call(compile_config) if step is None else step  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """Decode with an assistant; attention weights of mixers are None."""
        assistant, cache = kwargs.get("assistant_model"), kwargs.get(CACHE_NAME)
        if assistant is not None and cache is not None:
            record_past(cache, self, _draft_tokens(assistant.generation_config))  # type: ignore[arg-type]
        with placeholders():
            generated = super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
        return remove_placeholders(generated)

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Raise SurgeryError: continuous batching is not supported."""
        raise SurgeryError(
            "continuous batching stores keys and values in pages, which cannot hold mixer states; "
            "use model.generate(**tokenizer(prompts, padding=True, return_tensors='pt')) in batches"
        )


def _draft_tokens(generation_config: Any) -> int:
    """Return how many tokens the first draft may have that a config asks for: of prompt lookup, or of an assistant."""
    names = ["prompt_lookup_num_tokens", "num_assistant_tokens"]
    names += ["max_new_tokens"] if getattr(generation_config, "is_assistant", False) else []
    return 1 + max(int(getattr(generation_config, name, None) or 0) for name in names)
