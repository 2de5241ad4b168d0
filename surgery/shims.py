"""Old address of surgery.modeling.auto_classes, which checkpoints converted before version 0.2 import by this name."""

from surgery.modeling.auto_classes import *  # noqa: F403
