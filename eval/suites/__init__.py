"""What is measured without lm-eval: one file for each suite."""
