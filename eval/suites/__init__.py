"""Suites that do not use lm-eval, and harness.py with those that do: one file per suite."""
