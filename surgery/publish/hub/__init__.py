"""Sharing a converted checkpoint: what goes up, its card, and the upload."""
