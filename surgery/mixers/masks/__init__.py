"""Structured masks M of O = (A . M) V, one file for each kind."""
