"""The bridge to lm-eval: a model behind its interface, its tasks, its data offline, its answers kept."""
