"""Comparison, statistics, thresholds, storage, tables and plots of evaluation results."""
