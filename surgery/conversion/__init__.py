"""Conversion: statistics and a plan to a structured checkpoint."""
