"""Calibration: text to token windows, windows to statistics of each layer."""
