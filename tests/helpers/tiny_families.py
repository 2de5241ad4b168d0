"""Tiny random models of the families of transformers, made from configs: the table of the shared suite
(tests/architectures).

A family is one entry of TINY_FAMILIES. To add one, write its model class, its config and what is expected of it:

    "mine": TinyFamily("MineForCausalLM", "MineConfig", DECODER),

The suite then includes it; `python tests/helpers/tiny_families.py --write` enters it into docs/models.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from helpers import tiny_multimodal
from helpers.small_experts import KINDS

VOCABULARY = 96
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
NO_HEAD_DIM = {key: value for key, value in DECODER.items() if key != "head_dim"}
ENCODER = {key: value for key, value in NO_HEAD_DIM.items() if key != "num_key_value_heads"}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
WAVEFORM = {
    **{key: IMAGES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
GPT2 = {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
LOCAL_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
DELTA_NET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MAMBA2 = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
STATES_ONLY = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


UNNAMED = "config.json may lack `architectures`"
OWN_CODE = "computes attention in its own forward, without transformers' attention functions"


# -- inputs ------------------------------------------------------------------------------------------
def text(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random token ids, (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(3, VOCABULARY, (rows, length), generator=generator)}


def images(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random images, (rows, 3, 16, 16)."""
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


def pairs(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random token ids for an encoder, (rows, length), and a decoder, (rows, length / 2)."""
    decoder = text(rows, length // 2, seed + 1)["input_ids"]
    return {**text(rows, length, seed), "decoder_input_ids": decoder}


def waveforms(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random waveforms, (rows, 10 length + 15): `length` frames of WAVEFORM's convolutions."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_values": torch.randn(rows, 10 * length + 15, generator=generator)}


def multimodal_inputs(name: str, rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random inputs of a family of helpers/tiny_multimodal.py, those of its images, sound and pairs included."""
    return tiny_multimodal.make_inputs(name, rows, length, seed)


def spectrograms(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random spectrograms, (rows, 8, 32): bins, frames."""
    return {"input_features": torch.randn(rows, 8, 32, generator=torch.Generator().manual_seed(seed))}


# -- the table ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TinyFamily:
    """One family.

    model_class, config_class: names in transformers. options: of the config. inputs: function (rows, length, seed) that
    returns the model's keyword arguments, batch first. linears, mixers: "" if linears can be replaced, and attention by
    a mixer; otherwise a part of the error message that says which property forbids it. generates: whether the model has
    generate(). named: whether config.json of its checkpoint has `architectures`. resized: vocabulary to which the
    embeddings are resized after the model was built, 0: unchanged. note: a sentence for docs/models.md. in_ci: whether
    CI runs this family (all others only run with -m slow). mixer_inputs: the inputs that a model with mixers reads, if
    it does not read all.
    """

    model_class: str
    config_class: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[int, int, int], dict[str, torch.Tensor]] = text
    linears: str = ""
    mixers: str = ""
    generates: bool = True
    named: bool = True
    resized: int = 0
    note: str = ""
    in_ci: bool = False
    mixer_inputs: Callable[[int, int, int], dict[str, torch.Tensor]] | None = None

    def roles(self) -> str:
        """Return whether the linears have roles, for docs/models.md."""
        from surgery.architectures import get_architecture

        config = self.config()
        text = config.get_text_config()
        if getattr(config, "vision_config", None) is not None and get_architecture(text.model_type):
            return "of the text tower"
        return "yes" if get_architecture(config.model_type) else "by path"

    def config(self) -> Any:
        """Return the config."""
        import transformers

        return getattr(transformers, self.config_class)(**dict(self.options))

    def build(self, seed: int = 0) -> Any:
        """Return the model in float32 and eval mode, with random weights large enough that each layer matters."""
        import transformers

        from helpers.small_mixers import enlarge_parameters

        torch.manual_seed(seed)
        model = getattr(transformers, self.model_class)(self.config()).float().eval()
        if self.resized:
            model.resize_token_embeddings(self.resized)
        return enlarge_parameters(model)


@dataclass(frozen=True)
class MultimodalFamily(TinyFamily):
    """A family of helpers/tiny_multimodal.py. source: its name there."""

    source: str = ""

    def config(self) -> Any:
        """Return the config."""
        return tiny_multimodal.tiny_family(self.source).make()[1]

    def build(self, seed: int = 0) -> Any:
        """Return the model in float32 and eval mode, with random weights large enough that each layer matters."""
        return tiny_multimodal.make_model(self.source)


LATENT_KEYS = "its attention is multi-head latent attention (MLA)"
MERGED_EXPERTS = "experts, which the files hold in 3-D tensors"


def moe(model_class: str, config_class: str, kind: str, note: str = "experts", **keys: Any) -> TinyFamily:
    """Return a mixture of experts of helpers/small_experts.py."""
    return TinyFamily(model_class, config_class, {**DECODER, **KINDS[kind]}, note=note, **keys)


def multimodal(name: str, note: str = "", **keys: Any) -> TinyFamily:
    """Return a model of images, sound or pairs of texts of helpers/tiny_multimodal.py."""
    family = tiny_multimodal.tiny_family(name)
    model_class, config = family.make()
    return MultimodalFamily(
        model_class.__name__,
        type(config).__name__,
        inputs=functools.partial(multimodal_inputs, name),
        generates=family.generates,
        note=note,
        source=name,
        **keys,
    )


TINY_FAMILIES: dict[str, TinyFamily] = {
    # Decoders
    "llama": TinyFamily("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-tied": TinyFamily(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DECODER, "tie_word_embeddings": True},
        resized=103,
        note="tied and resized embeddings",
    ),
    "llama-llama3-rope": TinyFamily(
        "LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": LLAMA3}, note="RoPE scaling: llama3"
    ),
    "llama-yarn-rope": TinyFamily(
        "LlamaForCausalLM", "LlamaConfig", {**DECODER, "rope_parameters": YARN}, note="RoPE scaling: YaRN"
    ),
    "mistral": TinyFamily("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 8}),
    "ministral": TinyFamily("MinistralForCausalLM", "MinistralConfig", {**DECODER, **LOCAL_AND_FULL}),
    "ministral3": TinyFamily("Ministral3ForCausalLM", "Ministral3Config", DECODER, note="queries scaled by position"),
    "qwen2": TinyFamily("Qwen2ForCausalLM", "Qwen2Config", NO_HEAD_DIM),
    "qwen3": TinyFamily("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "qwen3_5": TinyFamily(
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**DECODER, **DELTA_NET, "layer_types": ["linear_attention", "full_attention"]},
        in_ci=True,
        note="mixers in the layers with softmax attention; gated heads",
    ),
    "qwen3_next": TinyFamily(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**DECODER, **DELTA_NET, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        note="mixers in the layers with softmax attention; gated heads; experts",
    ),
    "qwen3_5_moe": TinyFamily(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {**DECODER, **DELTA_NET, **EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        note="mixers in the layers with softmax attention; gated heads; experts",
    ),
    "mamba2": TinyFamily(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**STATES_ONLY, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
        mixers=OWN_CODE,
    ),
    "bamba": TinyFamily(
        "BambaForCausalLM",
        "BambaConfig",
        {**NO_HEAD_DIM, **MAMBA2, "attn_layer_indices": [1]},
        note="mixers in the layers with softmax attention",
    ),
    "falcon_h1": TinyFamily(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        {**DECODER, **MAMBA2, "mamba_d_ssm": 64},
        in_ci=True,
        note="mixers for softmax attention, Mamba-2 stays beside them",
    ),
    "granitemoehybrid": TinyFamily(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **NO_HEAD_DIM,
            **MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
        note=f"mixers in the layers with softmax attention; {MERGED_EXPERTS}",
    ),
    "nemotron_h": TinyFamily(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{key: value for key, value in DECODER.items() if key != "num_hidden_layers"},
            "layers_block_type": ["mamba", "attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 16,
        },
        note="mixers in the layers with softmax attention",
    ),
    "zamba2": TinyFamily(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **ENCODER,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 2,
            "chunk_size": 16,
        },
        mixers="several layers share it",
        note="the blocks that layers share stay as they are",
    ),
    "jamba": TinyFamily(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **NO_HEAD_DIM,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        note=f"mixers in the layers with softmax attention; {MERGED_EXPERTS}",
    ),
    "mamba": TinyFamily("MambaForCausalLM", "MambaConfig", STATES_ONLY, mixers=OWN_CODE),
    "falcon_mamba": TinyFamily("FalconMambaForCausalLM", "FalconMambaConfig", STATES_ONLY, mixers=OWN_CODE),
    "gemma": TinyFamily("GemmaForCausalLM", "GemmaConfig", DECODER),
    "gemma2": TinyFamily(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, **LOCAL_AND_FULL, "query_pre_attn_scalar": 8},
        note="soft caps, sliding windows",
    ),
    "gemma3": TinyFamily(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, **LOCAL_AND_FULL, "query_pre_attn_scalar": 8}
    ),
    "gemma4": TinyFamily(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **DECODER,
            **LOCAL_AND_FULL,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 16,
        },
        note="leave layers that share keys and values out: attention.layers",
    ),
    "phi": TinyFamily("PhiForCausalLM", "PhiConfig", NO_HEAD_DIM),
    "phi3": TinyFamily("Phi3ForCausalLM", "Phi3Config", NO_HEAD_DIM),
    "olmo": TinyFamily("OlmoForCausalLM", "OlmoConfig", NO_HEAD_DIM),
    "olmo2": TinyFamily("Olmo2ForCausalLM", "Olmo2Config", NO_HEAD_DIM),
    "olmo3": TinyFamily("Olmo3ForCausalLM", "Olmo3Config", {**NO_HEAD_DIM, **LOCAL_AND_FULL}),
    "glm": TinyFamily("GlmForCausalLM", "GlmConfig", DECODER),
    "glm4": TinyFamily("Glm4ForCausalLM", "Glm4Config", DECODER),
    "smollm3": TinyFamily(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**NO_HEAD_DIM, "no_rope_layer_interval": 2},
        note="some layers without RoPE",
    ),
    "granite": TinyFamily("GraniteForCausalLM", "GraniteConfig", {**NO_HEAD_DIM, "attention_multiplier": 0.3}),
    "lfm2": TinyFamily(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**NO_HEAD_DIM, "layer_types": ["conv", "full_attention"]},
        note="mixers in the layers with softmax attention, not in convolutions",
    ),
    "cohere": TinyFamily("CohereForCausalLM", "CohereConfig", NO_HEAD_DIM),
    "cohere2": TinyFamily(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**NO_HEAD_DIM, **LOCAL_AND_FULL},
        in_ci=True,
        note="sliding windows with RoPE, full attention without",
    ),
    "exaone4": TinyFamily("Exaone4ForCausalLM", "Exaone4Config", {**NO_HEAD_DIM, **LOCAL_AND_FULL}),
    "ernie4_5": TinyFamily("Ernie4_5ForCausalLM", "Ernie4_5Config", DECODER),
    "seed_oss": TinyFamily("SeedOssForCausalLM", "SeedOssConfig", DECODER),
    "arcee": TinyFamily("ArceeForCausalLM", "ArceeConfig", DECODER),
    "apertus": TinyFamily("ApertusForCausalLM", "ApertusConfig", NO_HEAD_DIM),
    "helium": TinyFamily("HeliumForCausalLM", "HeliumConfig", DECODER),
    "hunyuan_v1_dense": TinyFamily("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", DECODER),
    "nemotron": TinyFamily("NemotronForCausalLM", "NemotronConfig", NO_HEAD_DIM),
    "starcoder2": TinyFamily("Starcoder2ForCausalLM", "Starcoder2Config", NO_HEAD_DIM),
    "stablelm": TinyFamily("StableLmForCausalLM", "StableLmConfig", NO_HEAD_DIM),
    "persimmon": TinyFamily("PersimmonForCausalLM", "PersimmonConfig", ENCODER),
    "opt": TinyFamily(
        "OPTForCausalLM",
        "OPTConfig",
        {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True},
    ),
    "gpt2": TinyFamily("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_bigcode": TinyFamily("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2, in_ci=True, note="one key/value head"),
    "gpt_neox": TinyFamily("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER),
    "biogpt": TinyFamily("BioGptForCausalLM", "BioGptConfig", ENCODER),
    "bitnet": TinyFamily("BitNetForCausalLM", "BitNetConfig", NO_HEAD_DIM, note="a norm between heads and projection"),
    "diffllama": TinyFamily(
        "DiffLlamaForCausalLM", "DiffLlamaConfig", DECODER, mixers="calls its attention function 2 times"
    ),
    # Mixtures of experts
    "mixtral": moe("MixtralForCausalLM", "MixtralConfig", "mixtral", in_ci=True),
    "qwen2_moe": moe("Qwen2MoeForCausalLM", "Qwen2MoeConfig", "qwen2_moe"),
    "qwen3_moe": moe("Qwen3MoeForCausalLM", "Qwen3MoeConfig", "qwen3_moe"),
    "olmoe": moe("OlmoeForCausalLM", "OlmoeConfig", "olmoe"),
    "glm4_moe": moe("Glm4MoeForCausalLM", "Glm4MoeConfig", "glm4_moe"),
    "deepseek_v2": moe("DeepseekV2ForCausalLM", "DeepseekV2Config", "deepseek_v2", mixers=LATENT_KEYS),
    "deepseek_v3": moe("DeepseekV3ForCausalLM", "DeepseekV3Config", "deepseek_v3", mixers=LATENT_KEYS),
    "granitemoe": moe("GraniteMoeForCausalLM", "GraniteMoeConfig", "granitemoe", note=MERGED_EXPERTS),
    "gpt_oss": moe(
        "GptOssForCausalLM",
        "GptOssConfig",
        "gpt_oss",
        mixers="learned sink in each head (s_aux)",
        in_ci=True,
        note=MERGED_EXPERTS,
    ),
    "llama4": moe(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        "llama4_text",
        mixers="its mask is neither causal nor full",
        note=MERGED_EXPERTS,
    ),
    # Encoders
    "bert": TinyFamily("BertForMaskedLM", "BertConfig", ENCODER, generates=False),
    "roberta": TinyFamily("RobertaForMaskedLM", "RobertaConfig", {**ENCODER, "pad_token_id": 1}, generates=False),
    "xlm-roberta": TinyFamily(
        "XLMRobertaForMaskedLM", "XLMRobertaConfig", {**ENCODER, "pad_token_id": 1}, generates=False
    ),
    "camembert": TinyFamily("CamembertForMaskedLM", "CamembertConfig", {**ENCODER, "pad_token_id": 1}, generates=False),
    "distilbert": TinyFamily(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {**TOKENS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
        generates=False,
    ),
    "electra": TinyFamily("ElectraForMaskedLM", "ElectraConfig", {**ENCODER, "embedding_size": 16}, generates=False),
    "modernbert": TinyFamily(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **ENCODER,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
            "layer_types": LOCAL_AND_FULL["layer_types"],
        },
        generates=False,
        in_ci=True,
        note="sliding windows to both sides",
    ),
    "deberta-v2": TinyFamily(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        ENCODER,
        generates=False,
        mixers=f"{OWN_CODE}; it adds scores of relative positions (disentangled attention)",
    ),
    "mpnet": TinyFamily(
        "MPNetForMaskedLM",
        "MPNetConfig",
        {**ENCODER, "pad_token_id": 1},
        generates=False,
        mixers=f"{OWN_CODE}; it adds a position bias to the scores",
    ),
    "vit": TinyFamily("ViTForImageClassification", "ViTConfig", IMAGES, images, generates=False),
    "dinov2": TinyFamily("Dinov2ForImageClassification", "Dinov2Config", IMAGES, images, generates=False, in_ci=True),
    # Towers that were saved on their own, without `architectures` in config.json
    "clip_vision_model": TinyFamily(
        "CLIPVisionModel", "CLIPVisionConfig", IMAGES, images, generates=False, named=False, in_ci=True, note=UNNAMED
    ),
    "siglip_vision_model": TinyFamily(
        "SiglipVisionModel", "SiglipVisionConfig", IMAGES, images, generates=False, named=False, note=UNNAMED
    ),
    "vit-unnamed": TinyFamily(
        "ViTForImageClassification", "ViTConfig", IMAGES, images, generates=False, named=False, note=UNNAMED
    ),
    "whisper-encoder": TinyFamily(
        "WhisperForAudioClassification",
        "WhisperConfig",
        WHISPER,
        spectrograms,
        generates=False,
        named=False,
        note=UNNAMED,
    ),
    "wav2vec2": TinyFamily(
        "Wav2Vec2ForCTC", "Wav2Vec2Config", WAVEFORM, waveforms, generates=False, named=False, note=UNNAMED
    ),
    "hubert": TinyFamily(
        "HubertModel", "HubertConfig", WAVEFORM, waveforms, generates=False, named=False, note=UNNAMED
    ),
    # Attention code of their own
    "bloom": TinyFamily(
        "BloomForCausalLM",
        "BloomConfig",
        {**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        mixers=f"{OWN_CODE}; it adds ALiBi biases to the scores",
    ),
    "falcon-alibi": TinyFamily(
        "FalconForCausalLM",
        "FalconConfig",
        {**ENCODER, "alibi": True},
        mixers=f"{OWN_CODE}; it adds ALiBi biases to the scores",
    ),
    "falcon": TinyFamily("FalconForCausalLM", "FalconConfig", ENCODER, mixers=OWN_CODE, in_ci=True),
    "gptj": TinyFamily("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}, mixers=OWN_CODE),
    "t5": TinyFamily(
        "T5ForConditionalGeneration",
        "T5Config",
        {**TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        pairs,
        mixers="adds a learned position bias to its scores",
    ),
    # Text with images or sound, and pairs
    "gemma3-vl": multimodal(
        "gemma3-vl",
        note="with mixers text alone: the tokens of an image see each other in both directions",
        mixer_inputs=text,
    ),
    "llava": multimodal("llava"),
    "qwen2_vl": multimodal("qwen2-vl"),
    "qwen3_vl": multimodal("qwen3-vl"),
    "mllama": multimodal("mllama", note="mixers in self-attention, not in cross-attention", in_ci=True),
    "clip": multimodal("clip"),
    "siglip": multimodal("siglip"),
    "bart": multimodal("bart", note="calibrated with pairs; mixers in self-attention"),
    "whisper": multimodal("whisper", note="calibrated with pairs; mixers in self-attention", in_ci=True),
}


# -- the page ----------------------------------------------------------------------------------------
OWN_FORWARD = "computes attention in its own forward, without transformers' attention functions"


def models_table() -> str:
    """Return the table of docs/models.md: families with the same answers share a row."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for name, family in TINY_FAMILIES.items():
        reason = family.mixers.replace(OWN_FORWARD, "attention code of its own")
        refused = f"linears refused: {family.linears}" if family.linears else ""
        note = "; ".join(text for text in (refused, family.note) if text)
        names.setdefault((family.roles(), f"no: {reason}" if reason else "yes", note), []).append(name)
    rows = ["| family | roles | mixers | note |", "| --- | --- | --- | --- |"]
    rows += [f"| {', '.join(group)} | {' | '.join(answers)} |" for answers, group in names.items()]
    return "\n".join(rows)


def write_page() -> None:
    """Write the table into docs/models.md, in place of the table there."""
    page = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    text = page.read_text(encoding="utf-8")
    head, table = text.split("| family |", 1)
    rest = table[table.index("\n\n") :] if "\n\n" in table else "\n"
    page.write_text(head + models_table() + rest, encoding="utf-8")


if __name__ == "__main__":
    write_page() if "--write" in sys.argv else print(models_table())
