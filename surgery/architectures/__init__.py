"""Model families as data: where the layers are and which linears play which role. One file a family."""

from surgery.architectures.base import ROLES, Architecture, FusedLinear, get_architecture, known_families

__all__ = ["ROLES", "Architecture", "FusedLinear", "get_architecture", "known_families"]
