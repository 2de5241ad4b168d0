"""Code shared by several mixers: padding, key/value caches, softmax attention, hybrids with a window, packed
documents.
"""
