"""A converted model as drafter of its original: `generate` writes the original's own text, in fewer of its forwards.

    drafter = make_drafter(model, recipe)          window 256 and 4 sinks: the same weights, the original's own cache
    out = drafter.generate(input_ids, max_new_tokens=100)
    out.sequences, out.acceptance, out.mean_run

A drafter whose layers all have softmax over a window shares weights and cache (the idea of TriForce, Sun et al. 2024,
arXiv 2404.11912). Any other conversion shares the weights that it leaves as they were, and has a cache of its own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteriaList, StopStringCriteria

from surgery.conversion.apply import apply
from surgery.core.errors import SurgeryError
from surgery.core.files import size_text
from surgery.core.progress import Progress
from surgery.mixers import mixer_config
from surgery.mixers.sliding_window import Window
from surgery.modeling.cache import mixer_modules
from surgery.planning.recipe import ConversionRecipe
from surgery.speculation.bound import cache_bytes, weight_bytes
from surgery.speculation.decode import DraftLength, Loop, SpeculativeOutput
from surgery.speculation.lookup import LookupRunner
from surgery.speculation.mixer_target import MixerTarget
from surgery.speculation.runners import DraftRunner, OwnCacheRunner, SharedCacheRunner, Target, Verifier, check_runs
from surgery.speculation.slots import Sight, attention_windows

REFUSED = {  # settings of GenerationConfig with another way of decoding, and the values that leave it as it is
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "token_healing": (None, False),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
}
DIFFERENT = 0.05  # largest difference of logits, over the largest logit, between one forward and pieces in bfloat16


class Drafter:
    """An original and the model that drafts for it. Made by `surgery.drafter`.

    model: the original. draft_model: the drafter, the original itself where they share everything, or None: drafts are
    looked up in the text. sight: what the drafter sees of the original's cache; None: it has a cache of its own.
    extra_bytes: memory of the drafter's weights that the original does not have.
    """

    def __init__(self, model: Any, draft_model: Any, sight: Sight | None = None):
        check_original(model)
        self.model, self.draft_model, self.sight = model, draft_model, sight
        self._windows = attention_windows(model)
        self.extra_bytes = 0
        if has_mixers(model):
            check_mixers_verify(model, self._windows, sight)
        if draft_model is not None:
            check_fits(model, draft_model, sight)
            self.extra_bytes = extra_bytes(model, draft_model)
        check_verifies(model, self._target())

    def __repr__(self) -> str:
        if self.draft_model is None:
            return f"Drafter({type(self.model).__name__}; drafts looked up in the text)"
        cache = "the original's cache" if self.sight else "a cache of its own"
        seen = f", window {self.sight.window}, {self.sight.sinks} sinks" if self.sight and self.sight.window else ""
        return f"Drafter({type(self.model).__name__}{seen}; {size_text(self.extra_bytes)} of extra weights, {cache})"

    def cache_bytes(self, context: int, batch: int = 1) -> int:
        """Return the bytes of the drafter's own cache at a context of `context` tokens per row; 0 if it shares the
        original's.

        Args:
            context: tokens per row.
            batch: rows.
        """
        return (
            0 if self.sight is not None or self.draft_model is None else batch * cache_bytes(self.draft_model, context)
        )

    def step_bytes(self, context: int, batch: int = 1) -> tuple[int, int]:
        """Return the bytes that one decoding step of the original and of the drafter reads
        (`surgery.speculation.bound`).

        Args:
            context: tokens per row.
            batch: rows.
        """
        whole = weight_bytes(self.model) + batch * cache_bytes(self.model, context)
        if self.draft_model is None:
            return whole, 0
        return whole, weight_bytes(self.draft_model) + batch * cache_bytes(self.draft_model, context, self.sight)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        draft_tokens: int | str = "auto",
        streamer: Any = None,
        generation_config: Any = None,
        **options: Any,
    ) -> SpeculativeOutput:
        """Continue the prompts as `model.generate` does, with drafts. Return the tokens and the statistics.

        Greedy tokens are those of `model.generate` up to ties and rounding; samples have the distribution of the
        original's.

        Args:
            input_ids: prompts (B, L), padded on the left.
            attention_mask: 0 at padding (B, L); None: as `generate` infers it.
            draft_tokens: drafts per round; "auto" chooses the number with the highest bound on the speedup, none where
                drafting does not pay.
            streamer: receives the tokens of a single prompt, as in `generate`.
            generation_config: a GenerationConfig; None: the model's.
            options: arguments of `generate`: max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id,
                logits_processor, stopping_criteria, stop_strings with tokenizer, ..
        """
        check_options(self.model, generation_config, options)
        length = self._draft_length(draft_tokens, input_ids)
        if streamer is not None and len(input_ids) > 1:
            raise SurgeryError(
                f"a streamer takes one prompt (got {len(input_ids)}). Leave the streamer out, or pass one prompt"
            )
        target = self._target()
        loop = Loop(target, self._runner(target), length, streamer)
        if attention_mask is not None:
            options["attention_mask"] = attention_mask
        if streamer is not None:
            options["streamer"] = streamer
        _add_stop_strings(options)
        device = self.model.get_input_embeddings().weight.device
        out: SpeculativeOutput = self.model.generate(
            input_ids.to(device), generation_config=generation_config, custom_generate=_method(loop), **options
        )
        return out

    def _target(self) -> Verifier:
        return MixerTarget(self.model) if has_mixers(self.model) else Target(self.model, self._windows)

    def _runner(self, target: Verifier) -> DraftRunner:
        if self.draft_model is None:
            return LookupRunner(self.model.get_input_embeddings().weight.shape[0])
        if self.sight is None:
            return OwnCacheRunner(self.draft_model)
        assert isinstance(target, Target)
        return SharedCacheRunner(self.draft_model, target, self.sight)

    def _draft_length(self, draft_tokens: int | str, input_ids: Tensor) -> DraftLength:
        if draft_tokens == "auto":
            whole, draft = self.step_bytes(input_ids.shape[1], len(input_ids))
            return DraftLength(None, draft / whole)
        if type(draft_tokens) is not int or draft_tokens < 0:
            raise SurgeryError(f"draft_tokens must be 'auto', or 0 or more drafts per round (got {draft_tokens!r})")
        return DraftLength(draft_tokens)


def _method(loop: Loop) -> Any:
    """Return a function with the signature that generate() looks for."""

    def decode(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **inputs: Any) -> Any:  # fmt: skip
        processing = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        for name in ("synced_gpus", "streamer", "tokenizer", "assistant_model", "assistant_tokenizer"):
            inputs.pop(name, None)
        return loop.decode(model, input_ids, generation_config=generation_config, **processing, **inputs)

    return decode


def _add_stop_strings(options: dict[str, Any]) -> None:
    """Turn stop_strings into a criterion: generate() does not pass the tokenizer on to decoding methods of others."""
    strings, tokenizer = options.pop("stop_strings", None), options.pop("tokenizer", None)
    if strings is None:
        return
    if tokenizer is None:
        raise SurgeryError("stop_strings need the tokenizer: generate(.., stop_strings=.., tokenizer=tokenizer)")
    criteria = [*(options.pop("stopping_criteria", None) or []), StopStringCriteria(tokenizer, strings)]
    options["stopping_criteria"] = StoppingCriteriaList(criteria)


# -- checks ----------------------------------------------------------------------------------------------
def check_options(model: Any, generation_config: Any, options: dict[str, Any]) -> None:
    """Raise SurgeryError for ways of decoding that a draft cannot serve."""
    config = generation_config or model.generation_config
    for name, harmless in REFUSED.items():
        value = options.get(name, getattr(config, name, None))
        if not any(value is allowed or value == allowed for allowed in harmless):
            raise SurgeryError(
                f"Drafter.generate decodes greedily or by sampling, and {name}={value!r} asks for another way. Use "
                "model.generate, or leave "
                f"{name} out"
            )
    for name in (
        "inputs_embeds",
        "past_key_values",
        "cache",
        "assistant_model",
        "custom_generate",
        "negative_prompt_ids",
    ):
        if options.get(name) is not None:
            raise SurgeryError(f"Drafter.generate does not take {name}. Use model.generate")
    if getattr(config, "stop_strings", None) and "stop_strings" not in options:
        raise SurgeryError(
            "the generation config has stop_strings; pass them with their tokenizer: generate(.., stop_strings=.., "
            "tokenizer=..)"
        )


def check_original(model: Any) -> None:
    """Raise SurgeryError unless the model is a decoder whose layers keep keys and values, with masks that we can
    pass.
    """
    name, is_module = type(model).__name__, isinstance(model, nn.Module)
    if not is_module or not hasattr(model, "generate") or not hasattr(model, "config"):
        raise SurgeryError(f"surgery.drafter needs a causal language model of transformers (got a {name})")
    if getattr(model.config, "is_encoder_decoder", False):
        raise SurgeryError(f"{name} has an encoder; drafters are for decoders")
    config = model.config.get_text_config(decoder=True)
    if (kind := changing_rope(getattr(config, "rope_parameters", None))) is not None:
        raise SurgeryError(
            f"{name} has RoPE of type {kind!r}, whose frequencies change with the length of the text, so that tokens "
            "verified together differ from "
            "single steps. Use model.generate"
        )
    if any(not module.mixer.config.replaces_attention for _, module in mixer_modules(model)):
        raise SurgeryError(
            f"{name} has native linear layers with level weights, whose convolutions cannot go back by another number of "
            "tokens in each row. Use model.generate, without drafts"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise SurgeryError(
            f"attention implementation {attention!r} does not take the masks that verify drafts. Use "
            "model.set_attn_implementation('sdpa')"
        )


def has_mixers(model: nn.Module) -> bool:
    """Return whether any attention of the model has a mixer."""
    return next(mixer_modules(model), None) is not None


def check_mixers_verify(model: Any, windows: list[int | None], sight: Sight | None) -> None:
    """Raise SurgeryError if a layer without a mixer has a window, or the drafter would read the cache of a model with
    mixers.
    """
    name = type(model).__name__
    converted = {module.layer_idx for _, module in mixer_modules(model)}
    layer = next((i for i, window in enumerate(windows) if window is not None and i not in converted), None)
    if layer is not None:
        raise SurgeryError(
            f"layer {layer} of {name} has softmax with a window of {windows[layer]} tokens beside mixers, and rows of "
            "different lengths leave "
            "gaps in its cache. Use model.generate(.., assistant_model=..) for one prompt at a time"
        )
    if sight is not None:
        raise SurgeryError(f"{name} has mixers, whose cache {NO_RECIPE}")


NO_RECIPE = (
    "no drafter can read. Pass another model with the same vocabulary, the folder of a converted checkpoint, or "
    "'prompt-lookup', as in "
    "surgery.drafter(model, 'prompt-lookup')"
)


def changing_rope(parameters: Any) -> str | None:
    """Return the type of RoPE if its frequencies depend on the length; parameters may be given for each type of
    layer.
    """
    if not isinstance(parameters, dict):
        return None
    kinds = [parameters.get("rope_type"), *(p.get("rope_type") for p in parameters.values() if isinstance(p, dict))]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


@torch.no_grad()
def check_verifies(model: Any, target: Verifier) -> None:
    """Raise SurgeryError unless tokens in pieces, at slots of each row's own, have the logits of one forward."""
    training = model.training
    model.eval()
    try:
        far = check_runs(model, target)
        problem = "" if far <= DIFFERENT else f"its logits then differ by {far:.0%}"
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        model.train(training)
    if problem:
        raise SurgeryError(
            f"{type(model).__name__} cannot verify drafts, which come in pieces with a 4-D mask and positions of their "
            f"own ({problem}). "
            "Use model.generate(.., assistant_model=..)"
        )


def check_fits(model: Any, draft_model: Any, sight: Sight | None) -> None:
    """Raise SurgeryError unless both have one vocabulary and device, and keys of one shape where they share the
    cache.
    """
    sizes = [m.get_input_embeddings().weight.shape[0] for m in (model, draft_model)]
    if sizes[0] != sizes[1]:
        raise SurgeryError(
            f"the drafter's vocabulary has {sizes[1]} tokens, the original's {sizes[0]}; they must be the same"
        )
    if sight is None:
        attention_windows(draft_model)
    devices = [m.get_input_embeddings().weight.device for m in (model, draft_model)]
    if devices[0] != devices[1]:
        raise SurgeryError(f"the drafter is on {devices[1]}, the original on {devices[0]}; move one of them")


# -- weights -----------------------------------------------------------------------------------------------
def storages(model: nn.Module) -> dict[int, int]:
    """Return address -> bytes of every storage that holds parameters or buffers."""
    every = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in every if t.device.type != "meta"}


def extra_bytes(model: nn.Module, draft_model: nn.Module) -> int:
    """Return the bytes of the drafter's weights and buffers that are not the original's."""
    shared = storages(model)
    return sum(nbytes for storage, nbytes in storages(draft_model).items() if storage not in shared)


def twin_of(model: nn.Module) -> Any:
    """Return a copy of the modules that holds the same parameters and buffers."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def share_equal_weights(model: nn.Module, draft_model: nn.Module) -> None:
    """Let the drafter's tensors that equal the original's of the same name use its memory."""
    originals = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, t in (*draft_model.named_parameters(), *draft_model.named_buffers()):
        other = originals.get(name)
        if other is None or t.numel() != other.numel() or t.dtype != other.dtype or t.device != other.device:
            continue
        if tuple(t.shape)[-other.dim() :] == tuple(other.shape) and torch.equal(t.reshape(other.shape), other):
            t.data = other.data.view(t.shape)


# -- making one ---------------------------------------------------------------------------------------------
def window_sight(recipe: ConversionRecipe) -> Sight | None:
    """Return the window of a recipe that changes nothing but the attention of all layers to one window; None for
    others.
    """
    attention = recipe.attention
    if attention is None or attention.mixer != Window.name or recipe.structure != "dense" or recipe.rules:
        return None
    if attention.hybrid is not None or attention.rules or attention.layers != ":":
        return None
    config = mixer_config({"mixer": attention.mixer, **(attention.model_extra or {})})
    assert isinstance(config, Window)
    return Sight(config.window, config.sinks)


def make_drafter(
    model: Any,
    recipe: ConversionRecipe | nn.Module | Path | None,
    calibration: Any = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Drafter:
    """Return a drafter of `model`. recipe: of the conversion, another model, or the folder of one; None: drafts from
    the text.
    """
    check_original(model)
    if recipe is None or isinstance(recipe, nn.Module):
        return Drafter(model, recipe)
    if isinstance(recipe, Path):
        return Drafter(model, _load_sharing(model, recipe))
    if has_mixers(model):
        raise SurgeryError(f"{type(model).__name__} has mixers, whose cache {NO_RECIPE}")
    if calibration is None and (sight := window_sight(recipe)) is not None:
        return Drafter(model, model, sight)
    twin = apply(twin_of(model), recipe, calibration, tokenizer=tokenizer, device=device, progress=progress)
    return Drafter(model, twin)


def _load_sharing(model: Any, folder: Path) -> Any:
    from surgery.checkpoint.load_model import load_model
    from surgery.checkpoint.source import open_converted_checkpoint

    loaded = load_model(open_converted_checkpoint(str(folder)), model.dtype).to(model.device)
    share_equal_weights(model, loaded)
    return loaded
