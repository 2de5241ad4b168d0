"""The teacher's top logits of a training text, written once and read by many runs."""
