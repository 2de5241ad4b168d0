"""Healing a converted checkpoint: data, stages, the loop."""
