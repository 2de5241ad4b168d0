"""The embedded checkpoint: weights, tokenizer, model card, held-out and calibration text (see README.md).

`importlib.resources.files("surgery.recipes.tiny.checkpoint")` is its folder; recipes/tiny/train.py makes it.
"""
