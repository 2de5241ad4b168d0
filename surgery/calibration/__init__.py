"""Calibration: from text to token windows, and from those to statistics of each layer's inputs, outputs and
gradients.
"""
