"""Gemma 3."""

from dataclasses import replace

from surgery.architectures.gemma2 import ARCHITECTURE as GEMMA2
from surgery.architectures.gemma2 import OUTLINE as GEMMA2_OUTLINE

OUTLINE = replace(
    GEMMA2_OUTLINE,
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    head_norms="head",
    nested_rope=True,
    optional=("final_logit_softcapping", "use_bidirectional_attention", "_sliding_window_pattern"),
)
ARCHITECTURE = replace(GEMMA2, model_types=("gemma3_text", "gemma3"), qk_norm=True, outline=OUTLINE)
