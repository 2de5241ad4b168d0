"""What a family's file holds. Paths are relative to a layer; a tuple lists places in order of sublayers.

ARCHITECTURE = Architecture(model_types=("qwen3",), layers="layers", attention="self_attn", mlp="mlp",
                  query="q_proj", key="k_proj", value="v_proj", output="o_proj", ...)
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Literal

from surgery.core.registry import load_plugins

ROLES = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "head",
)


@dataclass(frozen=True)
class FusedLinear:
    """One linear that computes several roles: their output rows stand one after the other ("stacked"), or
    head by head, each head's roles one after the other ("per_head": GPT-NeoX)."""

    path: str
    roles: tuple[str, ...]
    layout: Literal["stacked", "per_head"] = "stacked"


@dataclass(frozen=True)
class Architecture:
    """layers: the end of the path of each ModuleList of layers.
    attention, mlp: the sublayers' paths in a layer; query .. down: linears below them, "" where absent.
    residual_attention, residual_mlp: for each sublayer the module whose input is the residual stream to
        which the sublayer's last linear is added unchanged; () where a norm stands between.
    softcap: config name of the cap on the head's logits; logit_scale: a factor on them, likewise.
    core: path below the first attention sublayer of the module that computes the scores, "" for the sublayer itself.
    head_dim: that module's name for K. rotary: which dims of a head turn together, (f, f + half) or (2 f, 2 f + 1),
        "none" where no RoPE is used; how many turn is read from the config.
    score_softcap: config name of the cap on attention scores. unmixable: why its attention cannot be given a mixer.
    """

    model_types: tuple[str, ...]
    layers: tuple[str, ...]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    query: str = ""
    key: str = ""
    value: str = ""
    output: str = ""
    gate: str = ""
    up: str = ""
    down: str = ""
    fused: tuple[FusedLinear, ...] = ()
    residual_attention: tuple[str, ...] = ()
    residual_mlp: tuple[str, ...] = ()
    head: str = "lm_head"
    qk_norm: bool = False
    softcap: str = ""
    core: str = ""
    head_dim: str = "head_dim"
    rotary: Literal["halves", "pairs", "none"] = "halves"
    score_softcap: str = ""
    unmixable: str = ""

    def linears(self) -> list[tuple[str, tuple[str, ...], FusedLinear | None, str]]:
        """(path in the layer, roles, how they are fused or None, path of the residual's reader or "")."""
        found: list[tuple[str, tuple[str, ...], FusedLinear | None, str]] = []
        sublayers = (
            ("attention", self.attention, ("query", "key", "value", "output"), self.residual_attention),
            ("mlp", self.mlp, ("gate", "up", "down"), self.residual_mlp),
        )
        for kind, places, roles, residuals in sublayers:
            for i, place in enumerate(places):
                last = residuals[i] if residuals else ""
                for fused in self.fused:
                    if fused.roles[0].startswith(kind):
                        found.append((_join(place, fused.path), fused.roles, fused, ""))
                for role in roles:
                    for path in filter(None, getattr(self, role).split("|")):
                        residual = last if role in ("output", "down") else ""
                        found.append((_join(place, path), (f"{kind}.{role}",), None, residual))
        return found


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


_plugin_families: dict[str, Architecture] = {}


def add_family(architecture: Architecture) -> None:
    """For a family that is not in this folder: a plugin calls it as it is imported. It goes before ours."""
    _plugin_families.update(dict.fromkeys(architecture.model_types, architecture))


@cache
def _builtin_families() -> dict[str, Architecture]:
    package = importlib.import_module("surgery.architectures")
    families: dict[str, Architecture] = {}
    for info in pkgutil.iter_modules(package.__path__):
        architecture = getattr(importlib.import_module(f"surgery.architectures.{info.name}"), "ARCHITECTURE", None)
        if architecture is not None:
            families.update(dict.fromkeys(architecture.model_types, architecture))
    return families


def _families() -> dict[str, Architecture]:
    load_plugins()
    return {**_builtin_families(), **_plugin_families}


def get_architecture(model_type: str) -> Architecture | None:
    """The family's architecture, or None: then every nn.Linear goes by its path."""
    return _families().get(model_type)


def known_families() -> list[str]:
    return sorted(_families())
