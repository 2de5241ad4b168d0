"""Every figure and table of the five papers: what it shows, the command or the tests that show it here, and the
verdict.

Where an experiment names a figure or table in its source, command and verdict are the experiment's. The others have
theirs in PLACES: formulas with the tests that check them, drawings, measurements on other pages, and what is not shown
here.
OUT_OF_REACH lists what takes data or hours of GPU that are not here, with the cost counted from the paper's sizes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from recipes.papers.experiments.driver import Experiment, markdown

DRAWING = "a drawing, no claim"
HOLDS = "holds"
FORMULA = f"{HOLDS} (tests)"
NO_SCRIPT = "undecided: no script here"
FAR = "out of reach: [why](#out-of-reach)"
LARGE = "undecided: GPU time, [counted](#out-of-reach)"

CUSTOMIZING, BETTER, LOG_LINEAR = "Customizing", "Compute Better Spent", "Log-Linear Attention"
TBM, SMA = "Toeplitz Block Mixing", "Structured Masked Attention"

CHARACTERS = "surgery pretrain --recipe gpt2 --data TEXT --out MODEL --set 'tokenizer={kind: characters}' --set "


@dataclass(frozen=True)
class Place:
    """A figure or table, or several. name: "Table 1" or "Figures 6 to 12". what: what it shows. how: a command, or
    tests. verdict: used if no experiment names the place in its source."""

    name: str
    what: str
    how: str = ""
    verdict: str = NO_SCRIPT


PLACES: dict[str, tuple[Place, ...]] = {
    CUSTOMIZING: (
        Place("Figure 1", "low-rank and structured scores", "", DRAWING),
        Place("Table 1", "numbers and rank of each family", "`tests/structures/test_mlbtc.py::test_numbers_and_ranks_are_those_of_table_1`", FORMULA),
        Place("Figures 2, 3", "regression fails where heads are narrower than the inputs; bilinear BTT and MLR do not"),
        Place("Figure 4", "character model: MLR attention below softmax and windows", f"`{CHARACTERS}layers=mlr-nested`"),
        Place("Tables 2, 3", "multiplications of bilinear scores", "`tests/mixers/test_bilinear_mixers.py::test_costs_are_those_of_tables_2_and_3`", FORMULA),
        Place("Figure 5", "MLR attention: one best rate at all widths"),
        Place("Figures 6 to 12", "regression at other sizes, with error bars and times"),
        Place("Figure 13", "as Figure 4, at four widths", f"`{CHARACTERS}'layers={{structure: dense, attention: {{mixer: window, window: 128, hybrid: {{layers: [0, 3]}}}}}}'`"),
        Place("Figure 14", "ETTh1: MLR attention about 1% better, more so at long horizons"),
        Place("Figure 15", "Chronos: the same loss for less compute", "", FAR),
    ),
    BETTER: (
        Place("Figure 1", "compute and width of MLPs; rates that ignore the structure"),
        Place("Table 1", "numbers and multiplications of each structure", "`tests/mixers/test_as_printed.py::test_costs_are_table_1_of_compute_better_spent`", FORMULA),
        Place("Figure 2", "a: size of feature updates; b: best rates at all widths", "`python -m recipes.papers.mup.run run`", "a: undecided, no script here; b: [reproduced](measurements/learning_rates.md) on GPT-2"),
        Place("Figure 3", "ViT with BTT in its MLPs: rates that know the structure stay ahead after tuning"),
        Place("Figures 4 to 6", "scaling of MLPs and ViTs by structure, BTT rank and Monarch blocks"),
        Place("Figure 7", "GPT-2 with BTT needs the bound on the norms of cores", "`surgery pretrain --recipe gpt2-btt --data TEXT --out MODEL --set common.weight_norm=none`"),
        Place("Figure 8", "ViT on ImageNet", "", FAR),
        Place("Figure 9", "GPT-2 with BTT in all layers and the head: below dense at equal compute with the head, equal without it"),
        Place("Figure 10", "time against multiplications of structures", "`surgery bench linear`", "[measured](measurements/performance.md#linear), no verdict"),
        Place("Table 2", "rates of the factors of each structure", "`tests/mixers/test_as_printed.py::test_rates_are_table_2_without_its_half`", f"{FORMULA}, without the factor 1/2"),
        Place("Figures 11, 12", "BTT of three and four cores is no better than of two"),
    ),
    LOG_LINEAR: (
        Place("Table 1", "attention mechanisms as A . M", "`tests/mixers/test_masks_oracles.py`", FORMULA),
        Place("Figure 1", "linear and log-linear attention", "", DRAWING),
        Place("Figure 2", "buckets of the Fenwick tree", "`tests/mixers/test_masks_oracles.py::test_hierarchical_entries_are_lambdas_of_fenwick_buckets`", FORMULA),
        Place("Figure 3", "chunked algorithm", "`tests/mixers/test_masks.py::test_chunked_is_the_definition`", FORMULA),
        Place("Figure 4", "throughput of training, and time of the kernels", "`surgery bench attention`, `surgery bench train`, `python -m recipes.papers.experiments.speed show`", "[measured](measurements/performance.md#attention)"),
        Place("Table 2", "MQAR"),
        Place("Figure 5", "loss by position", "", FAR),
        Place("Tables 3, 4", "perplexity, zero-shot tasks and needles of 800M models", "", FAR),
        Place("Table 5", "structure of time and of the hidden dimension", "`tests/mixers/test_level_weights.py`", FORMULA),
        Place("Figures 6 to 8", "weak and strong admissibility", "`tests/mixers/test_masks_oracles.py::test_strong_levels_are_the_recursion_s`", FORMULA),
        Place("Figure 9", "MQAR by width"),
        Place("Figure 10", "needles", "", FAR),
        Place("Tables 6 to 8", "zero-shot tasks, retrieval and LongBench of 800M models", "", FAR),
    ),
    TBM: (
        Place("Figure 1", "overview", "", DRAWING),
        Place("Table 1", "cost of the mixing, linear in the number of blocks", "`python tests/helpers/mask_slopes.py`", f"{HOLDS}: [slope 0.97](measurements/performance.md#mixers-by-sequence-length)"),
        Place("Table 2", "MQAR with scattered pairs: frozen and dense MHLA, TBM", "", LARGE),
        Place("Figure 2", "learned MHLA matrices are nearly Toeplitz", "`surgery inspect MODEL`"),
        Place("Figure 3", "time against the number of blocks", "`surgery bench attention`, `python tests/helpers/mask_slopes.py`, `python -m recipes.papers.experiments.speed show`", "[measured](measurements/performance.md#mixers-by-sequence-length); the paper's text and caption disagree"),
        Place("Table 3", "number of exponentials, frozen and learned", "", LARGE),
    ),
    SMA: (
        Place("Figure 3", "causal, decay, semiseparable, Toeplitz and Fourier masks", "`tests/mixers/test_masks_oracles.py`, `tests/mixers/test_reference_attention.py::test_both_orders_are_the_contraction`", FORMULA),
    ),
}  # fmt: skip

FLOPS = 0.4 * 990e12  # of an H200 in bfloat16, as docs/finetune.md counts


@dataclass(frozen=True)
class Cost:
    """What no hour of one GPU shows. place: figures and tables. lacks: what is not here. command: a command that trains
    one of the models, "" if there is none. parameters, tokens: of the largest dense model of the paper, 0 if the paper
    does not say. models: how many it trains, 0 if it does not say."""

    place: str
    lacks: str
    command: str
    parameters: float = 0.0
    tokens: float = 0.0
    models: int = 0

    def hours(self) -> float:
        """Return the hours of one H200 for the largest model: 6 FLOP for each parameter and token."""
        return 6 * self.parameters * self.tokens / FLOPS / 3600


LLAMA_800M = (
    "{model_type: llama, hidden_size: 1536, intermediate_size: 4096, num_hidden_layers: 21, num_attention_heads: 24, "
    "num_key_value_heads: 24, "
    "max_position_embeddings: 16384}"
)
BTT_HEAD = (
    "{structure: btt, blocks: sqrt, rank: 4, fused: split, rules: [{match: head, structure: btt, blocks: sqrt, rank: "
    "4}]}"
)
REGRESSION = "{generated: {task: regression, dims: 128, grow: 1920000}}"

OUT_OF_REACH: tuple[Cost, ...] = (
    Cost(
        f"{LOG_LINEAR}, Tables 3, 4, 6 to 8, Figures 5, 10",
        "50B tokens of long texts; LongBench, SWDE, FDA and NQ",
        f"surgery pretrain --recipe gpt2 --data TEXTS --set 'model={LLAMA_800M}' --set layers=log-linear-mamba2 --set "
        "'stages.*.length=16384' "
        "--set 'stages.*.tokens=50B' --out LM && surgery eval LM --suite longbench --data-root DATA",
        0.8e9, 50e9, 6,
    ),
    Cost(
        f"{BETTER}, Figure 8",
        "ImageNet; `surgery pretrain` reads no images",
        "",
        22.8e6, 1.281e6 * 300 * 50, 0,
    ),
    Cost(
        f"{BETTER}, Figure 9, at the paper's size",
        "OpenWebText",
        "surgery pretrain --recipe gpt2-btt --data OPENWEBTEXT --set model.n_embd=1536 --set model.n_head=6 --set "
        f"model.n_positions=512 --set 'layers={BTT_HEAD}' "
        "--set 'stages.*.length=512' --set 'stages.*.batch=480' --set 'stages.*.tokens=147B' --out GPT",
        124e6, 600_000 * 480 * 512, 7,
    ),
    Cost(
        f"{CUSTOMIZING}, Figures 4, 13",
        "OpenWebText",
        "surgery pretrain --recipe gpt2 --data OPENWEBTEXT --set 'tokenizer={kind: characters}' --set model.n_layer=6 "
        "--set layers=mlr-nested --set 'stages.*.batch=4' --set "
        "'stages.*.rows=4' --set 'stages.*.tokens=410M' --out CHARACTERS",
        42.5e6, 100_000 * 4 * 1024, 16,
    ),
    Cost(
        f"{CUSTOMIZING}, Figures 3, 7 to 11, at the paper's size",
        "hours",
        "python -m recipes.papers.training.pretrain --recipe gpt2 --set 'model={model_type: llama, hidden_size: 512, "
        "intermediate_size: 2048, num_hidden_layers: 6, num_attention_heads: 8, "
        f"num_key_value_heads: 8}}' --set 'data={REGRESSION}' --set 'stages=[{{kind: regress, inputs: 128, tokens: "
        f"16B, rate: 5e-4}}]' --set 'stages.*.length=512' --set 'stages.*.batch=64' "
        "--set 'stages.*.rows=64' --out REGRESSION",
        18.9e6, 500_000 * 64 * 512, 96,
    ),
    Cost(
        f"{CUSTOMIZING}, Figure 15, with Chronos itself",
        "the data of Chronos; T5 has position biases that mixers do not take; the paper does not say the number of "
        "tokens",
        "",
    ),
    Cost(
        f"{TBM}, Tables 2, 3, at the paper's size",
        "hours",
        "surgery pretrain --recipe gpt2 --set model.n_positions=8192 --set layers=tbm-elu --set "
        "'data={generated: {task: mqar, vocabulary: 8192, pairs: [64], layout: scattered}, validation: 0.1, "
        "validation_examples: 64}' --set 'stages.*.length=8192' --set 'stages.*.batch=32' --set 'stages.*.tokens=2.1B' "
        "--out RECALL",
        97e6, 8_000 * 32 * 8192, 7,
    ),
)  # fmt: skip


def places_in(text: str) -> set[str]:
    """Return the single figures and tables of a source: "Figures 2, 3, 6 to 8" -> {"Figure 2", "Figure 3", "Figure 6",
    ..}. Panels are left out.
    """
    found: set[str] = set()
    for kind, numbers in re.findall(r"(Figure|Table)s? ((?:\d+[a-z]?(?:, (?=\d)| to )?)+)", text):
        for first, last in re.findall(r"(\d+)[a-z]?(?: to (\d+))?", numbers):
            found |= {f"{kind} {n}" for n in range(int(first), int(last or first) + 1)}
    return found


def other_places(experiments: Iterable[Experiment]) -> list[tuple[str, Place]]:
    """Return (paper, place) of all places that no experiment repeats, and of formulas, which tests check besides."""
    known = [(experiment.source, places_in(experiment.source)) for experiment in experiments]
    return [
        (paper, place)
        for paper, places in PLACES.items()
        for place in places
        if place.verdict.startswith(FORMULA)
        or not any(source.startswith(paper) and own & places_in(place.name) for source, own in known)
    ]


def figures_section(experiments: Iterable[Experiment]) -> str:
    """Return the Markdown table of the places that no experiment repeats. Drawings, what is out of reach (in
    costs_section) and times (in the results) have no row.
    """
    lines = [["figure or table", "what it shows", "command or test", "verdict"]]
    for paper, place in other_places(experiments):
        if place.verdict not in (DRAWING, FAR) and "speed show" not in place.how:
            lines.append([f"{paper}, {place.name}", place.what, place.how or "-", place.verdict])
    return markdown(lines)


def costs_section() -> str:
    """Return OUT_OF_REACH as a list in Markdown."""
    lines = []
    for cost in OUT_OF_REACH:
        lacks = "" if cost.lacks == "hours" else f"{cost.lacks}; "
        lines.append(f"- {cost.place}: {lacks}{f'{cost.hours():.1f} hours' if cost.tokens else 'hours not counted'}")
    return "\n".join(lines)
