"""Warnings about a healing recipe that runs on a model it was not made for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from surgery.core.errors import SurgeryError
from surgery.mixers.native import NativeMixer
from surgery.modeling.cache import mixer_modules
from surgery.modeling.modules import is_new
from surgery.planning.stock_classes import frozen_modules, tiny_modules
from surgery.training.stages import STAGES
from surgery.training.stages.base import StageConfig

# Largest value of a query projection that stands before a QK norm with large weights (surgery.planning.stock).
TINY = 1e-6


def is_converted(model: nn.Module) -> bool:
    """Return whether any linear or attention of the model was replaced."""
    return any(map(is_new, model.modules())) or any(True for _ in mixer_modules(model))


def recipe_warnings(
    name: str,
    model: nn.Module,
    stages: Iterable[StageConfig],
    *,
    converted_whole: bool = False,
    stock: bool = False,
) -> list[str]:
    """Return warnings about stages that run on the model, but were made for another kind.

    An unconverted model has nothing to recover from a teacher. A recipe that gives mixers a rate of their own and has
    no stage for whatever is `new` was made for replaced attention. Level weights that rows do not reach stay at 1 while
    the others move. name: of the checkpoint. converted_whole: whether its conversion removed layers or wrote a stock
    class, which the modules do not show. stock: whether it wrote one, whose attention was replaced.
    """
    configs: list[Any] = list(stages)
    if converted_whole and (tiny := _tiny_projection(model, configs)):
        return [
            f"{tiny} of {name} has values below {TINY:g}, as conversions into a stock class write it where the source has no "
            "QK norm: a step of training makes it NaN. Leave out q_proj, k_proj, q_norm and k_norm in `trains`, as the "
            "recipe in docs/stock.md does"
        ]
    if not is_converted(model) and not converted_whole:
        if all(STAGES[config](config).needs_teacher == "nothing" for config in configs):
            return []
        return [
            f"{name} is not a converted checkpoint: no linear and no attention in it was replaced, so there is nothing "
            "to recover from a "
            f"teacher. Convert it first: surgery convert {name} --recipe btt-half --out OUT, then train OUT"
        ]
    has_mixers = any(True for _ in mixer_modules(model))
    for_mixers = any("mixers" in config.rates for config in configs)
    if has_mixers or stock or not for_mixers or any("new" in config.trains for config in configs):
        return _unreached_levels(name, model, configs)
    return [
        f"this recipe is made for replaced attention, and the attention of {name} is as it was. For replaced linears "
        "use the recipe linears"
    ]


def check_kept_frozen(name: str, stock: Any, changed: Iterable[str]) -> None:
    """Raise SurgeryError if stages change projections that make a norm of a stock class linear by being tiny, or that
    norm.

    name: of the checkpoint. stock: entry of its report (surgery.checkpoint.report.StockReport), None without one. changed:
    names of the parameters that any stage changes.
    """
    names, tiny = frozen_modules(stock), set(tiny_modules(stock))
    wrong = sorted(parameter for parameter in changed if parameter.rpartition(".")[0] in names)
    if not wrong:
        return
    first = next((parameter for parameter in wrong if parameter.rpartition(".")[0] in tiny), wrong[0])
    leaves = list(dict.fromkeys(path.rpartition(".")[2] for path in names))
    layers = list(dict.fromkeys(path.split(".")[2] for path in names))
    reason = (
        "its values are tiny, so that the norm behind it is linear, and one step makes the model NaN"
        if first.rpartition(".")[0] in tiny
        else "its large weights undo the factor of the tiny projection in front of it, which does not change"
    )
    raise SurgeryError(
        f"{name}: training must leave {first} as it is: {reason}. Leave {', '.join(leaves[:-1])} and {leaves[-1]} of the "
        f"layers {', '.join(layers)} out of `trains`, `targets` and `unfrozen`, as the recipe in docs/stock.md does"
    )


def _tiny_projection(model: nn.Module, configs: list[Any]) -> str | None:
    """Return the name of a query projection that stages train and whose values are tiny, None without one."""
    if not any("all" in config.trains for config in configs):
        return None
    projections = ((name, p) for name, p in model.named_parameters() if name.endswith(".q_proj.weight"))
    return next((name for name, p in projections if not p.is_meta and 0 < float(p.detach().abs().max()) < TINY), None)


def _unreached_levels(name: str, model: nn.Module, configs: list[Any]) -> list[str]:
    """Return a warning if the longest rows on which level weights of native layers are trained do not reach all."""
    mixers = [module for module in model.modules() if isinstance(module, NativeMixer)]
    words = {"mixers", "new", "all"}
    lengths = [c.length for c in configs if words & {*c.trains, *getattr(c, "unfrozen", ())}]
    if not mixers or not lengths:
        return []
    config, longest = mixers[0].config, max(lengths)
    reached = 1 + max(0, (longest - 1).bit_length() - (config.block.bit_length() - 1))
    if reached >= config.levels:
        return []
    return [
        f"rows of {longest:,} tokens reach {reached} of the {config.levels} level weights of {name}. The others stay at 1 "
        "while these move, so that texts beyond this length become worse. Convert the original again with "
        f"--set native.levels={max(2, reached)}, or train on longer rows"
    ]
