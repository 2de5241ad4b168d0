"""Models of recipes/papers/mup/run.py: GPT-2 decoders of one depth and several widths whose layers have structured
linears, and the learning rates that a recipe assigns to their parameters.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.papers.quality.mlr_linear import MLRLinear, MLRLinearConfig, zero_output
from surgery.planning.recipe import validate_recipe
from surgery.structures import StructuredLinear
from surgery.training.optim import make_groups
from surgery.training.pretrain.initialize import RESIDUAL_ROLES, make_model, plan_new_model
from surgery.training.recipe import parse_healing_recipe

BASE = 64  # width at which rates equal the base rate


@dataclass(frozen=True)
class SweepSizes:
    """Settings that all runs share. head: dimension of an attention head, so wider models have more heads."""

    layers: int = 2
    head: int = 32
    length: int = 64
    rows: int = 16
    steps: int = 384
    embedding_std: float = 0.5
    seeds: int = 3
    rates: tuple[float, float, float] = (-8.5, -2.5, 0.75)  # log2: from, to, step

    @property
    def log2_rates(self) -> list[float]:
        """Return log2 of the base rates."""
        first, last, step = self.rates
        return [first + i * step for i in range(round((last - first) / step) + 1)]


def structure_keys(name: str, width: int) -> dict[str, Any] | None:
    """Return the recipe keys of a structure at a width.

    Ranks grow as the square root of the width, as in the paper, so fan-ins of cores grow slower than those of their
    layers; this is where the rules differ.
    """
    root = round(width**0.5)
    return {
        "dense": None,
        "btt": {"structure": "btt", "blocks": "sqrt", "rank": 2},
        "monarch": {"structure": "monarch", "blocks": "sqrt"},
        "low_rank": {"structure": "low_rank", "rank": 2 * root},
        "mlr": {"structure": "low_rank", "rank": 2 * root},  # make_gpt2 replaces it by four levels of rank root / 2
    }[name]


STRUCTURE_NAMES = ("dense", "btt", "monarch", "low_rank", "mlr")


def make_config(width: int, vocabulary: int, sizes: SweepSizes) -> Any:
    """Return the GPT-2 config of a width."""
    from transformers import GPT2Config

    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_embd": width, "n_layer": sizes.layers, "n_head": width // sizes.head, "n_positions": sizes.length}
    tokens = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    keys: dict[str, Any] = {**no_dropout, **shape, **tokens}
    config = GPT2Config(architectures=["GPT2LMHeadModel"], **keys)
    config._attn_implementation = "eager"  # see stacked.py
    return config


def make_gpt2(
    name: str, width: int, vocabulary: int, sizes: SweepSizes, seed: int, keys: dict[str, Any] | None = None
) -> Any:
    """Return a GPT-2 with structured linears. keys: of a recipe for its layers; None: `structure_keys`."""
    config, keys = make_config(width, vocabulary, sizes), keys or structure_keys(name, width)
    plan = None
    if keys is not None:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            plan = plan_new_model(Path(folder), validate_recipe(keys, name))
    model = make_model(config, plan, sizes.embedding_std, seed)
    if name == "mlr":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            install_mlr(model, MLRLinearConfig(ranks=(max(1, round(width**0.5 / 2)),) * 4), set(residual_paths(plan)))
    return model


def residual_paths(plan: Any) -> Iterator[str]:
    """Yield the paths of the replaced linears that write into the residual stream."""
    return (path for path, targets in plan.targets.items() if set(RESIDUAL_ROLES) & set(targets[0].linear.roles))


def install_mlr(model: Any, config: MLRLinearConfig, zero_paths: set[str]) -> None:
    """Replace low-rank linears by multi-level low-rank ones, with zero output at `zero_paths`."""
    for path, module in list(model.named_modules()):
        if isinstance(module, StructuredLinear):
            linear = MLRLinear(module.in_features, module.out_features, config, bias=True)
            if path in zero_paths:
                zero_output(linear)
            model.set_submodule(path, linear)


# -- rates ------------------------------------------------------------------------------------------------
def make_stage(sizes: SweepSizes, rule: str, structured: float = 1.0) -> Any:
    """Return the recipe stage of a run at base rate 1. structured: base rate of the cores."""
    keys: dict[str, Any] = {"kind": "lm", "trains": ["all"], "rate": 1.0, "rates": {"structured": structured}}
    keys |= {"length": sizes.length, "batch": sizes.rows, "rows": sizes.rows}
    keys |= {"tokens": sizes.steps * sizes.rows * sizes.length, "optimiser": {"base_width": BASE, "rates": rule}}
    keys |= {"schedule": {"name": "cosine", "warmup": 0.1, "floor": 0.0}}
    return parse_healing_recipe({"stages": [keys]}).stages[0]


def rate_factors(model: Any, stage: Any) -> dict[str, float]:
    """Return parameter -> learning rate, as a recipe would group them."""
    groups = make_groups(model, {name for name, _ in model.named_parameters()}, stage)
    return {name: group.rate for group in groups for name in group.names}


def matching_core_rate(name: str, vocabulary: int, sizes: SweepSizes) -> float:
    """Return the base rate of the cores under rule `mup` that matches rule `dense` at the base width.

    The geometric mean of the learning rates over all parameters of cores is then equal. muP leaves such constants open.
    With this one the rules differ in their dependence on the width and in the distribution over cores, not in the
    learning rate of cores relative to embeddings.
    """
    if name == "dense":
        return 1.0
    model = make_gpt2(name, BASE, vocabulary, sizes, seed=0)
    aware, naive = (rate_factors(model, make_stage(sizes, rule)) for rule in ("mup", "dense"))
    counts = {n: p.numel() for n, p in model.named_parameters() if aware[n] != naive[n]}
    logs = sum(count * math.log(naive[n] / aware[n]) for n, count in counts.items())
    return math.exp(logs / sum(counts.values()))
