"""Tiny random models of images, of sound, and of pairs of texts: name -> class, config, Auto class, and inputs of the
forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helpers.small import DECODER

VOCABULARY, IMAGE_TOKEN, IMAGE_SIZE = 96, 90, 16
PLAIN = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN_VISION = {"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
PAIRS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}


@dataclass(frozen=True)
class TinyFamily:
    """One family. make: returns (model class, config). auto: the Auto class that loads it. inputs: which inputs its
    forward takes.

    towers: the towers that its layers belong to. generates: whether it has `generate`.
    """

    make: Callable[[], tuple[Any, Any]]
    auto: str
    inputs: str
    towers: tuple[str, ...] = ()
    generates: bool = True


def _families() -> dict[str, TinyFamily]:
    import transformers as t

    def clip_text() -> dict[str, Any]:
        return {**PLAIN, "projection_dim": 16}

    def qwen(cls: Any, config: Any, vision: dict[str, Any], **keys: Any) -> Callable[[], tuple[Any, Any]]:
        return lambda: (cls, config(text_config={**DECODER, "rope_parameters": ROPE}, vision_config={**QWEN_VISION, **vision}, **QWEN_TOKENS, **keys))  # fmt: skip

    pairs = {**PAIRS, "vocab_size": VOCABULARY, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **TOKENS}
    t5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **TOKENS}
    both = ("text", "vision")
    return {
        "gemma3-vl": TinyFamily(
            lambda: (t.Gemma3ForConditionalGeneration, t.Gemma3Config(text_config={**DECODER, "sliding_window": 8, "query_pre_attn_scalar": 8}, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE_TOKEN, boi_token_index=92, eoi_token_index=93)),
            "AutoModelForImageTextToText", "images-4-types", both),
        "llava": TinyFamily(
            lambda: (t.LlavaForConditionalGeneration, t.LlavaConfig(text_config=t.LlamaConfig(**DECODER), vision_config=t.CLIPVisionConfig(**VISION), image_token_index=IMAGE_TOKEN)),
            "AutoModelForImageTextToText", "images-16", both),
        "qwen2-vl": TinyFamily(
            qwen(t.Qwen2VLForConditionalGeneration, t.Qwen2VLConfig, {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}),
            "AutoModelForImageTextToText", "patches-96", both),
        "qwen3-vl": TinyFamily(
            qwen(t.Qwen3VLForConditionalGeneration, t.Qwen3VLConfig, {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
            "AutoModelForImageTextToText", "patches-96", both),
        "mllama": TinyFamily(
            lambda: (t.MllamaForConditionalGeneration, t.MllamaConfig(text_config={**{k: v for k, v in DECODER.items() if k != "head_dim"}, "num_hidden_layers": 3, "cross_attention_layers": [1], "vocab_size": VOCABULARY - 8}, vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4, "image_size": IMAGE_SIZE, "patch_size": 8, "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "intermediate_layers_indices": [0], "vision_output_dim": 64}, image_token_index=VOCABULARY - 8)),
            "AutoModelForImageTextToText", "tiles", both),
        "clip": TinyFamily(
            lambda: (t.CLIPModel, t.CLIPConfig(text_config=clip_text(), vision_config={**VISION, "projection_dim": 16}, projection_dim=16)),
            "AutoModel", "image+text", both, generates=False),
        "siglip": TinyFamily(
            lambda: (t.SiglipModel, t.SiglipConfig(text_config=PLAIN, vision_config=VISION)),
            "AutoModel", "image+text", both, generates=False),
        "bart": TinyFamily(
            lambda: (t.BartForConditionalGeneration, t.BartConfig(**pairs, max_position_embeddings=64, forced_eos_token_id=None)),
            "AutoModelForSeq2SeqLM", "pairs"),
        "whisper": TinyFamily(
            lambda: (t.WhisperForConditionalGeneration, t.WhisperConfig(**pairs, num_mel_bins=8, max_source_positions=16, max_target_positions=64, begin_suppress_tokens=None)),
            "AutoModelForSpeechSeq2Seq", "sound"),
        "t5": TinyFamily(
            lambda: (t.T5ForConditionalGeneration, t.T5Config(**t5)), "AutoModelForSeq2SeqLM", "pairs"),
        "bloom": TinyFamily(
            lambda: (t.BloomForCausalLM, t.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0)),
            "AutoModelForCausalLM", "text"),
        "falcon": TinyFamily(
            lambda: (t.FalconForCausalLM, t.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2)),
            "AutoModelForCausalLM", "text"),
        "falcon-alibi": TinyFamily(
            lambda: (t.FalconForCausalLM, t.FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, bos_token_id=1, eos_token_id=2)),
            "AutoModelForCausalLM", "text"),
    }  # fmt: skip


NAMES = (
    *("gemma3-vl", "llava", "qwen2-vl", "qwen3-vl", "mllama", "clip", "siglip"),
    *("bart", "whisper", "t5", "bloom", "falcon", "falcon-alibi"),
)


def tiny_family(name: str) -> TinyFamily:
    """Return one family of NAMES."""
    return _families()[name]


def make_model(name: str) -> Any:
    """Return a random model in evaluation mode, with weights large enough that every layer matters."""
    torch.manual_seed(0)
    cls, config = tiny_family(name).make()
    model = cls(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in parameter_name and "shared" not in parameter_name:
                parameter.mul_(2.0)
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


def make_inputs(name: str, rows: int, length: int = 24, seed: int = 1) -> dict[str, Tensor]:
    """Return random inputs of the forward; equal for equal seeds."""
    kind, g = tiny_family(name).inputs, torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (rows, length), generator=g)
    pixels = torch.randn(rows, 3, IMAGE_SIZE, IMAGE_SIZE, generator=g)
    if kind == "text":
        return {"input_ids": ids}
    if kind == "pairs":
        return {"input_ids": ids, "decoder_input_ids": torch.randint(3, 80, (rows, length // 2), generator=g)}
    if kind == "sound":
        return {
            "input_features": torch.randn(rows, 8, 32, generator=g),
            "decoder_input_ids": torch.randint(3, 80, (rows, length // 2), generator=g),
        }
    if kind == "image+text":
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": pixels}
    if kind == "tiles":
        ids[:, 1] = VOCABULARY - 8
        tiles = torch.randn(rows, 1, 2, 3, IMAGE_SIZE, IMAGE_SIZE, generator=g)
        shapes = {"aspect_ratio_ids": torch.full((rows, 1), 2), "aspect_ratio_mask": torch.ones(rows, 1, 2).long()}
        return {
            "input_ids": ids,
            "pixel_values": tiles,
            **shapes,
            "cross_attention_mask": torch.ones(rows, length, 1, 2).long(),
        }
    tokens = int(kind.split("-")[1]) if kind.startswith("images") else 4
    ids[:, 2 : 2 + tokens] = IMAGE_TOKEN
    kinds = (ids == IMAGE_TOKEN).long()
    if kind.startswith("images"):
        return {"input_ids": ids, "pixel_values": pixels, **({"token_type_ids": kinds} if "types" in kind else {})}
    patches = torch.randn(16 * rows, int(kind.split("-")[1]), generator=g)
    return {
        "input_ids": ids,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": kinds,
    }


def text_inputs(name: str, rows: int, length: int = 24, seed: int = 1) -> dict[str, Tensor]:
    """Return the inputs without images or sound."""
    g = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, 80, (rows, length), generator=g)}
