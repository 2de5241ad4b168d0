"""Structured masks M of linear attention O = (A . M) V, one file for each kind."""
