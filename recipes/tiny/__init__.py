"""The embedded tiny checkpoint and the scripts that train it."""
