"""Conversion of a checkpoint into a structured one, from a plan and calibration statistics."""
