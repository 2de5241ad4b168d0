"""Bridge to lm-eval: model adapter, tasks, conversion of its results, and a cache of answers."""
