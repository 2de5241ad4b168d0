"""Hugging Face checkpoint folders: reading, checking and writing them."""
