"""Tiny random mixtures of experts, one for each family."""

from __future__ import annotations

from pathlib import Path

import torch

from helpers.small import DECODER

ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **ROUTED,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
}
KINDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 24, **ROUTED},
    "qwen3_moe": {"num_experts": 6, **ROUTED},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": SHARED,
    "deepseek_v2": {**SHARED, **LATENT},
    "deepseek_v3": {**SHARED, **LATENT},
    "qwen3_next": {**DELTA, **ROUTED},
    "qwen3_5_moe_text": {**DELTA, **ROUTED},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m3_vl_text": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
}
STORED_MERGED = ("granitemoe", "llama4_text", "gpt_oss")  # families whose files hold 3-D tensors
MERGED = ("minimax_m3_vl_text",)  # families whose experts stay dense
SPLIT = tuple(kind for kind in KINDS if kind not in MERGED)


def write_experts(kind: str, folder: Path, **options) -> Path:
    """Write a tiny random mixture of experts. options: of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**DECODER, **KINDS[kind], **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder
