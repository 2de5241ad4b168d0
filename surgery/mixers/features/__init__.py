"""Feature maps of kernel scores, one file for each kind."""
