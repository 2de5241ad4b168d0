"""Integration with transformers and peft: replacement modules, attention, caches, generation, loading, LoRA."""
