"""Teacher caches: the teacher's top-k log-probabilities of a training text, written once and read by many runs."""
