"""Model families as data, one file each: the lists of layers, and the role of each linear in a layer."""

from surgery.architectures.base import ROLES, Architecture, FusedLinear, get_architecture, known_families

__all__ = ["ROLES", "Architecture", "FusedLinear", "get_architecture", "known_families"]
