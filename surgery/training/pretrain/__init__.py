"""Training structured models from scratch."""
