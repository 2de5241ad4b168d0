"""The version of the package, defined here only."""

__version__ = "0.1.0"
