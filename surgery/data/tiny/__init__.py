"""The embedded checkpoint: weights, tokenizer, model card, held-out and calibration text (see README.md).

`importlib.resources.files("surgery.data.tiny")` is its folder; recipes/papers/tiny.py makes it.
"""
