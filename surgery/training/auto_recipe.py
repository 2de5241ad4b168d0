"""The healing recipe `auto`: rates, tokens, length and batch from a model's size and what was replaced in it.

Between measured models a value is interpolated, log(value) over log(parameters); below the smallest it stays. Above the
largest it is extrapolated: rates fall as parameters^(-1/3), which is muP's 1/width for models of one aspect (Yang et al.
2022, "Tensor Programs V", arXiv 2203.03466), and tokens grow as parameters^(3/4), which leads from 20M at 135M to the
350M to 700M that RADLADS takes for 7B to 72B (Goldstein et al. 2025, arXiv 2505.03005). Parameters are those of the
original without embeddings and head.

The 27M model was trained on 16 tokens a parameter, the 135M one, a public model, on 15,000. The fall of the rates between
them is therefore one of overtraining as well as of size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from surgery.architectures.positions import longest_input
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.table import read_mixers, read_table
from surgery.core.errors import SurgeryError
from surgery.training.models import open_trainable, pruned_linears, stock_layers
from surgery.training.recipe import HealingRecipe, load_healing_recipe

AUTO = "auto"
Kind = Literal["linears", "attention"]


@dataclass(frozen=True)
class MeasuredRecipe:
    """Values that a model was healed best with. name: of the model; parameters: without embeddings; rate: of all
    weights; mixers: rate of the mixers' parameters, None where there are none; tokens: of a run.
    """

    name: str
    parameters: int
    rate: float
    mixers: float | None
    tokens: int


# 8,192 tokens a step. 18M and 27M: recipes linears and attention (docs/measurements/quality.md). 135M:
# SmolLM2-135M-Instruct on Python source. After linears were replaced (low-rank-half, 1M tokens, held-out perplexity over
# the original's): 1e-4 1.538, 3e-4 1.505, 1e-3 2.052. After attention was: these rates worked on up to 4M tokens and 1e-3
# was too large. Its tokens are set by the literature, not measured.
MEASURED: dict[Kind, tuple[MeasuredRecipe, ...]] = {
    "linears": (
        MeasuredRecipe("18M", 14_630_000, 3e-4, None, 3_000_000),
        MeasuredRecipe("27M", 22_550_000, 3e-4, None, 3_000_000),
        MeasuredRecipe("135M", 106_200_000, 3e-4, None, 20_000_000),
    ),
    "attention": (
        MeasuredRecipe("18M", 14_630_000, 1e-3, 6e-3, 10_000_000),
        MeasuredRecipe("27M", 22_550_000, 1e-3, 6e-3, 10_000_000),
        MeasuredRecipe("135M", 106_200_000, 3e-4, 6e-3, 20_000_000),
    ),
}
RATE_EXPONENT, TOKEN_EXPONENT = -1 / 3, 3 / 4  # of the parameters, above the largest measured model
STEP_TOKENS, MAX_STEP_TOKENS = 8192, 65536  # of a step of the measured models, and of the largest ones
FORWARD_TOKENS = 8192  # of one forward pass
LENGTHS: dict[Kind, int] = {"linears": 1024, "attention": 2048}  # tokens of a row
LONG_ROWS = 1_000_000_000  # parameters from which rows have 4,096 tokens, after attention was replaced


@dataclass(frozen=True)
class ModelFacts:
    """What the rule reads of a conversion. parameters: of the original, without embeddings and head. width: of hidden
    states. longest: tokens of the longest row, None without a limit. linears, mixers: how many were replaced. stock: how
    many attention modules a conversion into a stock class replaced, whose layers have no rate of their own.
    """

    parameters: int
    width: int
    longest: int | None
    linears: int
    mixers: int
    stock: int = 0

    @property
    def kind(self) -> Kind:
        """What decides the recipe: attention, where any was replaced."""
        return "attention" if self.mixers or self.stock else "linears"

    @property
    def replaced(self) -> str:
        """What was replaced, in words."""
        words = [
            f"{count} {name}"
            for count, name in ((self.linears, "linears"), (self.mixers + self.stock, "attention modules"))
            if count
        ]
        return " and ".join(words) or "nothing"


@dataclass(frozen=True)
class AutoChoice:
    """What the rule chose. settings: recipe keys by dotted path. reasons: lines (key, value, reason)."""

    settings: dict[str, Any]
    reasons: tuple[tuple[str, str, str], ...]
    extrapolated: bool


def interpolate(points: Sequence[tuple[int, float]], parameters: int, exponent: float) -> float:
    """Return the value at a number of parameters: log-log interpolation between the points (parameters, value), which
    are sorted; the first value below them; the last one times (parameters / its parameters)^exponent above.
    """
    if parameters <= points[0][0]:
        return points[0][1]
    last = points[-1]
    if parameters >= last[0]:
        return last[1] * (parameters / last[0]) ** exponent
    (n0, v0), (n1, v1) = next(pair for pair in itertools.pairwise(points) if parameters < pair[1][0])
    share = math.log(parameters / n0) / math.log(n1 / n0)
    return v0 * (v1 / v0) ** share


def choose_recipe(facts: ModelFacts) -> AutoChoice:
    """Return rates, tokens, length, batch and rows for healing, with their reasons."""
    n, kind = facts.parameters, facts.kind
    measured = MEASURED[kind]
    extrapolated = n > 1.05 * measured[-1].parameters

    def chosen(value: Callable[[MeasuredRecipe], float | None], exponent: float) -> float:
        points = [(point.parameters, v) for point in measured if (v := value(point)) is not None]
        return float(f"{interpolate(points, n, exponent):.2g}")

    def source(value: Callable[[MeasuredRecipe], float | None]) -> str:
        every = ", ".join(f"{value(point):.2g} at {point.name}" for point in measured)
        return f"measured: {every}" + ("; extrapolated" if extrapolated else "")

    rate = chosen(lambda point: point.rate, RATE_EXPONENT)
    tokens = round(chosen(lambda point: point.tokens, TOKEN_EXPONENT))
    length = 4096 if n >= LONG_ROWS and kind == "attention" else LENGTHS[kind]
    length = min(length, facts.longest or length)
    rows = max(1, FORWARD_TOKENS // length)
    growth = round(math.log2(max(1.0, math.sqrt(n / measured[-1].parameters))))
    steps = min(STEP_TOKENS * 2**growth, MAX_STEP_TOKENS) // FORWARD_TOKENS  # forward passes of a step
    settings = {"rate": rate, "tokens": tokens, "length": length, "batch": rows * steps, "rows": rows}
    reasons = [("rate", f"{rate:g}", source(lambda point: point.rate))]
    if facts.mixers:
        mixers = chosen(lambda point: point.mixers, RATE_EXPONENT)
        settings["rates"] = {"mixers": mixers}
        reasons.append(("rates.mixers", f"{mixers:g}", source(lambda point: point.mixers)))
    in_rows = f"a step of {rows * steps * length:,} tokens" + ("" if steps == 1 else ", more for larger models")
    reasons += [
        (
            "tokens",
            f"{tokens:,}",
            f"of recipes {kind}: {', '.join(f'{p.tokens / 1e6:g}M at {p.name}' for p in measured)}",
        ),
        ("length", f"{length:,}", "tokens of a row" + (", the model's longest" if length == facts.longest else "")),
        ("batch", f"{rows * steps}", in_rows),
        ("rows", f"{rows}", f"{rows * length:,} tokens in one forward pass; fewer where memory: auto finds no room"),
    ]
    return AutoChoice({f"stages.0.{key}": value for key, value in settings.items()}, tuple(reasons), extrapolated)


def read_facts(source: Any, linears: int | None = None, mixers: int | None = None) -> ModelFacts:
    """Return what the rule reads of an opened checkpoint. linears, mixers: how many will be replaced; None: those that
    were, by the checkpoint's table.
    """
    converted = "quantization_config" in source.config
    if linears is None:
        linears = len(read_table(source.config, source.name) if converted else pruned_linears(source))
    stock = len(stock_layers(source)) if mixers is None else 0
    if mixers is None:
        mixers = len(read_mixers(source.config, source.name)) if converted else 0
    model = build_unconverted_model(source)
    outside = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    if (head := model.get_output_embeddings()) is not None:
        outside |= {id(p) for p in head.parameters()}
    parameters = sum(p.numel() for p in model.parameters() if id(p) not in outside)
    width = int(model.config.get_text_config().hidden_size)
    return ModelFacts(parameters, width, longest_input(model), linears, mixers, stock)


def load_recipe_for(
    name: str | Mapping[str, Any], facts: Callable[[], ModelFacts], overrides: Sequence[str] = (), tiny: bool = False
) -> tuple[HealingRecipe, list[str]]:
    """Return a healing recipe, and for `auto` lines that say what was chosen and why.

    facts: read only for `auto`. The block `tiny` and the overrides replace what the rule chose.
    """
    if name != AUTO:
        return load_healing_recipe(name, list(overrides), tiny), []
    found = facts()
    choice = choose_recipe(found)
    recipe = load_healing_recipe(name, list(overrides), tiny, choice.settings)
    largest = MEASURED[found.kind][-1]
    heading = (
        f"recipe auto for {found.parameters / 1e6:,.1f}M parameters without embeddings (width {found.width}), "
        f"{found.replaced} replaced"
    )
    lines = [heading, *(f"  {key:<12} {value:<12} {reason}" for key, value, reason in choice.reasons)]
    if choice.extrapolated:
        lines.append(
            f"  above {largest.parameters / 1e6:,.0f}M parameters (the {largest.name} model) the rule is extrapolated, "
            "not measured: rates as parameters^-1/3, tokens as parameters^3/4"
        )
    if replaced := _replaced_values(choice.settings, recipe):
        lines.append(f"  --set and --tiny replace these values: {', '.join(replaced)}")
    return recipe.model_copy(update={"description": "\n".join(lines)}), lines


def _replaced_values(settings: Mapping[str, Any], recipe: HealingRecipe) -> list[str]:
    """Return "tokens 10,000,000 -> 128,000" for each chosen setting that the recipe of the run has another value of."""
    found, whole = [], recipe.model_dump()
    for key, chosen in settings.items():
        value: Any = whole
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, (list, tuple)) else value.get(part) if value else None
        if value != chosen:
            found.append(f"{key.removeprefix('stages.0.')} {_plain(chosen)} -> {_plain(value)}")
    return found


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def load_recipe_of_run(
    name: str | Mapping[str, Any],
    converted: str,
    overrides: Sequence[str] = (),
    tiny: bool = False,
    trust_remote_code: bool = False,
) -> tuple[HealingRecipe, list[str]]:
    """`load_recipe_for` of a converted checkpoint, a folder or Hub id."""
    return load_recipe_for(name, lambda: read_facts(open_trainable(converted, trust_remote_code)), overrides, tiny)


def refuse_auto(name: str) -> None:
    """Raise SurgeryError for `auto` where there is no converted checkpoint to choose by."""
    if name == AUTO:
        raise SurgeryError(
            "recipe auto chooses by a converted checkpoint, and a teacher cache is of the original. Give the recipe "
            "linears or attention, with the values that `surgery finetune --recipe auto` prints as --set"
        )
