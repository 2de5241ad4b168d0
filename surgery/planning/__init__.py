"""Recipes and plans: what will be replaced by what, decided from the config alone."""
