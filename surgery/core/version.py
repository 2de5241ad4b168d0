"""The version of the package, defined here only."""

__version__ = "0.3.0"
WORK_VERSION = "0.1.0"  # the oldest version whose interrupted conversions and trainings this one continues
