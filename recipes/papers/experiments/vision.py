"""Scaling of vision transformers by structure: is the exponent of BTT larger than that of dense layers? (Qiu et al.
2024, "Compute Better Spent", Figure 4)

python -m recipes.papers.experiments.vision run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.vision show [rows.jsonl ..] [--plot vision.png]

A ViT of three blocks: patches through a dense input layer, learned positions, attention over all patches with layer
norms of queries and keys and scores divided by the size of a head, mean of the patches, dense classifier. Queries, the
outputs of attention and MLP, and the classifier are zero at first. All linears of the blocks have the structure;
`low_rank_tenth` and `tt_c2_r8` have the ranks that the paper gives ViTs, 0.1 min(in, out) and 8. The images are not the
paper's CIFAR: an image is a row of the `teacher` task of `scaling`, whose values are dealt out to the patches in turn,
so that every patch has large and small ones. Rates and verdict are those of `scaling`. MACs are those of one image with
all pairs of patches, input layer and classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.experiments import scaling
from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.scaling import make_linear, train_classifiers
from recipes.papers.experiments.sweep import Cell, Row, Setting
from recipes.papers.script import run_script
from recipes.papers.training.compute import linear_macs
from surgery.training.pretrain.initialize import zero_output

BLOCKS = 3
SIZES = {"dims": 64, "classes": 16, "teacher": 64, "held_out": 4096, "head": 16}
LARGE = {"dims": 3072, "classes": 64, "teacher": 256, "held_out": 65536, "head": 64}
SETTINGS = (
    Setting(
        "cpu", "cpu", (8, 16, 32), ("dense", "btt"), (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2, 2.43e-1), 3, 300, 64, 8, BLOCKS,
        {**SIZES, "widths": {"btt": (16, 32, 64, 80)}},
    ),
    Setting(
        "gpu_short", "gpu", (32, 64, 128, 256), ("dense", "btt"), (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), 4, 1500, 128, 16, BLOCKS,
        {**LARGE, "held_out": 16384, "widths": {"btt": (64, 128, 256, 512, 1024)}},
    ),
    Setting(
        "gpu", "gpu", (64, 128, 256, 512), ("dense", "btt", "monarch", "monarch_16"), (3e-4, 1e-3, 3e-3, 9e-3), 2, 4000, 256, 16, BLOCKS,
        {**LARGE, "widths": {"btt": (128, 256, 512, 1024, 2048), "monarch": (128, 256, 512, 1024), "monarch_16": (256, 512, 1024, 2048)}},
    ),
    Setting(
        "gpu_others", "gpu", (64, 128, 256, 512), ("dense", "btt", "btt_naive", "btt_4", "low_rank_tenth", "kronecker", "tt_c2_r8"),
        (3e-4, 1e-3, 3e-3, 9e-3), 2, 4000, 256, 16, BLOCKS,
        {**LARGE, "widths": dict.fromkeys(("btt", "btt_naive", "btt_4", "low_rank_tenth", "kronecker", "tt_c2_r8"), (128, 256, 512, 1024))},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), ("dense", "btt", "btt_naive", "btt_4", "monarch", "monarch_16", "low_rank_tenth", "kronecker", "tt_c2_r8"), (1e-2,), 1, 2, 4, 4, 1,
    {"dims": 16, "classes": 4, "teacher": 8, "held_out": 8, "head": 16},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads of 64 dimensions, by which the GPU settings are counted."""
    return max(1, cell.width // 64)


@dataclass(frozen=True)
class Shape:
    """Sizes of a ViT. attention, mlp: structures of the linears, by the names of `scaling`. patches: number of
    tokens.
    """

    attention: str
    mlp: str
    width: int
    blocks: int
    head: int
    patches: int
    values: int
    classes: int


class PatchAttention(nn.Module):
    """Attention over all patches; queries and keys are normalized by head, and scores divided by its size."""

    def __init__(self, shape: Shape):
        super().__init__()
        width = shape.width
        self.head = min(shape.head, width)
        self.query, self.key, self.value, self.output = (make_linear(shape.attention, width, width) for _ in range(4))
        self.query_norm, self.key_norm = nn.LayerNorm(self.head), nn.LayerNorm(self.head)
        for linear in (self.query, self.output):
            zero_output(linear)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the outputs (B, T, D)."""
        q_BHTF, k_BHTF, v_BHTF = (
            linear(x_BTD).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores_BHTT = self.query_norm(q_BHTF) @ self.key_norm(k_BHTF).mT / self.head
        return self.output((scores_BHTT.softmax(-1) @ v_BHTF).transpose(1, 2).flatten(2))


class PatchTransformer(nn.Module):
    """The ViT of a shape."""

    def __init__(self, shape: Shape, seed: int):
        super().__init__()
        self.shape, width, blocks = shape, shape.width, range(shape.blocks)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self.input = make_linear("dense", shape.values // shape.patches, width)
            self.position_TD = nn.Parameter(0.5 * torch.randn(shape.patches, width))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * shape.blocks + 1))
            self.attention = nn.ModuleList(PatchAttention(shape) for _ in blocks)
            self.up = nn.ModuleList(make_linear(shape.mlp, width, 4 * width) for _ in blocks)
            self.down = nn.ModuleList(make_linear(shape.mlp, 4 * width, width) for _ in blocks)
            self.classifier = nn.Linear(width, shape.classes)
            for linear in (*self.down, self.classifier):
                zero_output(linear)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return the logits (B, classes) of images (B, values)."""
        x_BTP = x_BI.unflatten(-1, (-1, self.shape.patches)).mT * self.shape.patches**0.5
        h_BTD = self.input(x_BTP) + self.position_TD
        norms = iter(self.norms)
        for attention, up, down in zip(self.attention, self.up, self.down):
            h_BTD = h_BTD + attention(next(norms)(h_BTD))
            h_BTD = h_BTD + down(nn.functional.gelu(up(next(norms)(h_BTD))))
        return self.classifier(next(norms)(h_BTD).mean(1))

    def macs(self) -> int:
        """Return the MACs of one image."""
        shape, classifier = self.shape, linear_macs(self.classifier)
        linears = sum(linear_macs(module) for module in self.modules()) - classifier
        return shape.patches * (linears + 2 * shape.blocks * shape.patches * shape.width) + classifier


def make_vit(setting: Setting, cell: Cell, seed: int, attention: str | None = None) -> PatchTransformer:
    """Return the model of a cell. attention: structure of its attention; None: that of its method."""
    sizes: dict[str, Any] = setting.options
    shape = Shape(
        attention or cell.method, cell.method, cell.width, setting.layers, sizes["head"], setting.length, sizes["dims"], sizes["classes"]
    )  # fmt: skip
    return PatchTransformer(shape, seed)


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    return train_classifiers(setting, cell, runs, device, make_vit, naive=cell.method == "btt_naive")


EXPERIMENT = Experiment(
    name="vision",
    title="Scaling of vision transformers by structure",
    source="Compute Better Spent, Figure 4",
    claim=scaling.EXPERIMENT.claim,
    rule="as for `scaling`",
    settings=SETTINGS,
    smoke=SMOKE,
    heads=heads,
    train=train,
    verdict=scaling.verdict,
    table=scaling.table,
    draw=scaling.draw,
)

if __name__ == "__main__":
    run_script(lambda: main(EXPERIMENT))
