"""Structures of several cores: is a block tensor train of three or four cores better than BTT, which has two? (Qiu et
al. 2024, "Compute Better Spent", Figures 11, 12)

python -m recipes.papers.experiments.cores run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.cores show [rows.jsonl ..] [--plot cores.png]

The MLPs, the task and the rates of `scaling`. A method's name holds its structure (btt: block tensor train, tt: tensor
train), the number of cores and the rank. The held-out loss is compared at equal MACs: for each seed, on the line
between the measured widths of the rival in loss against log MACs, as a share of the rival's loss; points outside of the
measured range are left out.
"""

from __future__ import annotations

from recipes.papers.experiments.characters import at_equal_macs
from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.scaling import BLOCKS, PAPER, draw, heads, table, train
from recipes.papers.experiments.sweep import Row, Setting, best_rows
from recipes.papers.experiments.verdicts import DIVERGED, Comparison, Verdict, above, decide, has_diverged
from recipes.papers.script import run_script

CLOSE = 0.02  # share of the rival's loss within which losses count as equal
TWO, THREE, FOUR, RANK = "btt_c2_r1", "btt_c3_r1", "btt_c4_r1", "btt_c3_r2"
PAIRS = ((THREE, TWO), (FOUR, TWO), (RANK, THREE))  # (more cores or rank, rival)
WIDE = (256, 512, 1024, 2048, 4096)
SETTINGS = (
    Setting(
        "cpu", "cpu", (64,), (TWO, THREE, FOUR, RANK, "tt_c2_r4"), (4e-3, 1.2e-2, 3.6e-2, 1.08e-1), 3, 300, 128, 1, BLOCKS,
        {"dims": 64, "classes": 16, "teacher": 64, "held_out": 4096, "widths": {"tt_c2_r4": (16, 32, 64), TWO: (32, 64, 128), THREE: (64, 128), RANK: (32,)}},
    ),
    Setting(
        "gpu_short", "gpu", (512, 1024, 2048), (TWO, THREE, FOUR, RANK), (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), 4, 1500, 512, 1, BLOCKS,
        {"dims": 3072, "classes": 64, "teacher": 256, "held_out": 32768, "widths": {TWO: (256, 512, 1024, 2048), RANK: (256, 512)}},
    ),
    Setting(
        "gpu", "gpu", WIDE, (TWO, THREE, FOUR, RANK, "btt_c3_r4", "tt_c2_r16"), (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), 2, 4000, 1024, 1, BLOCKS,
        {"dims": 3072, "classes": 64, "teacher": 256, "held_out": 65536, "widths": {"tt_c2_r16": (64, 128, 256, 512, 1024)}},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), (TWO, THREE, FOUR, RANK, "tt_c2_r4"), (1e-2,), 1, 2, 8, 1, 1,
    {"dims": 16, "classes": 4, "teacher": 8, "held_out": 16},
)  # fmt: skip


# -- results --------------------------------------------------------------------------------------------
def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "more cores than two, or a higher rank, give no lower loss at equal compute"."""
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    comparisons = [Comparison(f"{a} - {b}", at_equal_macs(best, a, b, relative=True), above(-CLOSE)) for a, b in PAIRS]
    return decide(setting, best, comparisons, {name for pair in PAIRS for name in pair}, missed=[PAPER])


EXPERIMENT = Experiment(
    name="cores",
    title="MLPs with block tensor trains of two, three and four cores",
    source="Compute Better Spent, Figures 11, 12",
    claim="three or four cores are no better than two at equal compute, and for three cores rank 2 is no better than "
    "rank 1",
    rule=(
        "losses at equal MACs, by seed, as shares of the rival's: three minus two cores > -2%, four minus two > "
        "-2%, rank 2 minus rank 1 > -2%"
    ),
    settings=SETTINGS,
    smoke=SMOKE,
    heads=heads,
    train=train,
    verdict=verdict,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    run_script(lambda: main(EXPERIMENT))
