"""Opens this checkpoint, whose weights are structured, with the package transformer-surgery."""

try:
    from surgery.shims import *  # noqa: F403
except ImportError as error:
    raise ImportError("this checkpoint needs `pip install transformer-surgery`") from error
