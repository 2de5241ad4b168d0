"""Training: healing (recovery distillation) of converted checkpoints and pretraining; data, stages, the loop."""
