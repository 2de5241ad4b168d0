"""Towers of a model: the parts that read text, images or sound, each with a config of its own (text_config,
vision_config, ..).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from surgery.architectures.base import Architecture, get_architecture
from surgery.core.errors import SurgeryError, suggestion

TEXT = "text"


def owner_config(model: Any, path: str) -> Any:
    """Return the config of the innermost model of transformers that contains the module at `path`."""
    config, module = model.config, model
    for name in path.split(".")[:-1]:
        module = getattr(module, name)
        if hasattr(module, "get_input_embeddings") and getattr(module, "config", None) is not None:  # a PreTrainedModel
            config = module.config
    return config


def tower_name(model: Any, path: str) -> str:
    """Return the tower that the module at `path` belongs to: "text" for text_config, "vision" for vision_config and so
    on.

    Returns "" for a model whose config has no configs of parts.
    """
    config, owner = model.config, owner_config(model, path)
    if owner is config:
        return ""
    parts = list(_parts(config))
    exact = next((name for name, tower in parts if tower is owner), None)
    return exact or next((name for name, tower in parts if type(tower) is type(owner)), "")


def tower_names(model: Any) -> list[str]:
    """Return the names of all towers of a model, [] without towers."""
    return list(dict.fromkeys(name for name, _ in _parts(model.config)))


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, config) of the parts of a config, and of their parts."""
    for key in getattr(type(config), "sub_configs", None) or ():
        inner = getattr(config, key, None)
        if inner is not None and not isinstance(inner, dict):
            yield key.removesuffix("_config"), inner
            yield from _parts(inner)


def architecture_at(model: Any, path: str) -> Architecture | None:
    """Return the architecture of the layers in the list at `path`, or None if their model type has none."""
    architecture = get_architecture(getattr(owner_config(model, path), "model_type", ""))
    return (
        architecture
        if architecture is not None or tower_name(model, path)
        else get_architecture(model.config.model_type)
    )


def text_config(model: Any) -> Any:
    """Return the config of the model's text tower, or of the whole model if it has no towers."""
    return model.config.get_text_config() if getattr(type(model.config), "sub_configs", None) else model.config


def text_architecture(model: Any) -> Architecture | None:
    """Return the architecture of the model's text tower, or of the whole model if it has no towers."""
    return get_architecture(text_config(model).model_type)


def default_towers(model: Any, towers: Iterable[str]) -> set[str]:
    """Return the towers that a recipe with `towers: auto` converts.

    For a model that generates text from text and images or sound, these are the text tower; for all others, every
    tower.
    """
    names = set(towers)
    generates = hasattr(model, "can_generate") and model.can_generate()
    return {TEXT} if generates and TEXT in names and len(names) > 1 else names


def select_towers(model: Any, towers: Iterable[str], asked: str | tuple[str, ...]) -> set[str]:
    """Return the towers that a recipe converts. asked: "auto", "all", or names.

    Raises SurgeryError for a name that the model does not have.
    """
    known_towers = list(dict.fromkeys(towers))
    if asked == "all":
        return set(known_towers)
    if asked == "auto":
        return default_towers(model, known_towers)
    names = (asked,) if isinstance(asked, str) else asked
    for name in names:
        if name not in known_towers or not name:
            known = [tower for tower in known_towers if tower]
            rule = f"{suggestion(name, known)}, or all" if known else "; it has no towers, so leave the key out"
            raise SurgeryError(f"towers: {type(model).__name__} has no tower {name!r}{rule}")
    return set(names)


def is_repeated_layer(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' layers that take hidden states and return hidden states."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)
