"""Structured matrices: one file each. `STRUCTURES[config]` is the linear module of that config."""

from surgery.structures.base import STRUCTURES, Cost, StructureConfig, StructuredLinear
from surgery.structures.metric import Metric, add_damping

__all__ = ["STRUCTURES", "Cost", "Metric", "StructureConfig", "StructuredLinear", "add_damping"]
