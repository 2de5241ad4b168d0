"""DeepSeek-V2 and V3: experts and shared experts, after some layers with an ordinary MLP; multi-head latent attention
(MLA).
"""

from dataclasses import replace

from surgery.architectures.llama import ARCHITECTURE as LLAMA

ARCHITECTURE = replace(
    LLAMA,
    model_types=("deepseek_v2", "deepseek_v3"),
    query="q_proj|q_a_proj|q_b_proj",
    key="kv_a_proj_with_mqa|kv_b_proj",  # both compute keys and values
    value="",
    mlp=("mlp", "mlp.shared_experts"),
    residual_mlp=("post_attention_layernorm", ""),
    unmixable=(
        "its attention is multi-head latent attention (MLA), whose keys and values come from one latent vector, which "
        "is also its "
        "cache; a mixer would need keys and values per head. Its linears can be replaced"
    ),
    outline=None,
)
