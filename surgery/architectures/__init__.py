"""Model families as data: where the layers are and which linears play which role. One file a family."""

from surgery.architectures.base import ROLES, Anatomy, Fused, anatomy_of, known_families

__all__ = ["ROLES", "Anatomy", "Fused", "anatomy_of", "known_families"]
