"""Training over several processes: Accelerate, FSDP2, DeepSpeed."""
