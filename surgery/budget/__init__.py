"""One budget over weights, attention and cache: a table of choices, a solver, and recipes (docs/search.md)."""
