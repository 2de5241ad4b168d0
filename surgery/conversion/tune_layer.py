"""Tune one converted layer: train its new parameters so that its output on the converted stream matches the original's.

    loss = sum_n (y_n - y*_n)^T G (y_n - y*_n)

y*: output of the original layer on the original's inputs. y: output of the converted layer on the outputs of the
converted layers below. G (D, D), or its diagonal: second moment of the gradient of the loss in the layer's output,
measured by the Fisher pass; the identity if there is none. n: real tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.calibration.data import unpadded_rows
from surgery.checkpoint.safetensors_io import DTYPES
from surgery.conversion.context import ConversionContext
from surgery.conversion.norms import layer_norms_and_biases, read_originals
from surgery.conversion.replacement import LayerReplacement, densify_module
from surgery.conversion.streams import Layer
from surgery.conversion.tune import TrainedLayer, Tuning, split_rows, trained_parameters
from surgery.structures.metric import damp_output_gram, spd_factor


class LayerTuning(Tuning):
    """The tuning of one layer. gram: G, its diagonal, or None."""

    unit = "relative error of the layer's output"

    def __init__(self, ctx: ConversionContext, layer: Layer, trained: TrainedLayer, gram: Tensor | None):
        self.call, self.offset, self.trained, self.layers = layer.call, layer.streams.offset, trained, [trained]
        self.samples, self.runner = ctx.samples, ctx.runner
        self.masks_BT = ctx.samples.token_masks(ctx.plan.layout.tower(layer.path))
        damped = damp_output_gram(gram)
        self.root = damped if damped is None else damped.sqrt() if damped.dim() == 1 else spd_factor(damped)
        self.original_BTD = self._original_outputs()
        self.energy = sum(
            float(self._weighted(self._original_rows(rows)).square().sum(dtype=torch.float64))
            for rows in split_rows(self.samples.held_out, self.call.hidden_BTD.shape[1])
        )
        self.scale, self.tokens = 1.0, self.samples.n_fit * self.call.hidden_BTD.shape[1]

    def batches(self) -> list[range]:
        """Return the rows of each step of an epoch: rows of the original's stream."""
        return split_rows(self.samples.fit, self.call.hidden_BTD.shape[1])

    def step(self, rows: range, rate: float) -> None:
        """Make one step on these rows."""
        leaves = self.trained.parameters(self.call.device, trained=True)
        with torch.enable_grad():
            error_NX = self._error(rows)
            loss = error_NX.square().sum() * (self.scale / len(error_NX))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        self.trained.update(leaves, list(gradients), rate)

    def held_out_loss(self) -> float:
        """Return the relative error on the held-out rows."""
        self.trained.parameters(self.call.device, trained=False)
        total, tokens = 0.0, 0
        for rows in split_rows(self.samples.held_out, self.call.hidden_BTD.shape[1]):
            error_NX = self._error(rows)
            total, tokens = total + float(error_NX.square().sum(dtype=torch.float64)), tokens + len(error_NX)
        if total > 0:  # so that Adam's epsilon is small beside the gradients of every layer
            self.scale = tokens / total
        return float((total / max(self.energy, 1e-30)) ** 0.5)

    def _error(self, rows: range) -> Tensor:
        """Return the weighted error of the converted layer's output, (N, D), N real tokens."""
        with self.trained.swapped_in():
            out = self.call.apply(rows.start + self.offset, rows.stop + self.offset)
        out_ND = self._real(out if isinstance(out, Tensor) else out[0], rows)
        return self._weighted(out_ND - self._original_rows(rows))

    def _weighted(self, error_ND: Tensor) -> Tensor:
        if self.root is None:
            return error_ND
        return error_ND * self.root if self.root.dim() == 1 else error_ND @ self.root

    def _original_rows(self, rows: range) -> Tensor:
        return self._real(self.original_BTD[rows.start : rows.stop].to(self.call.device), rows)

    def _real(self, x_BTD: Tensor, rows: range) -> Tensor:
        return unpadded_rows(x_BTD, *(mask_BT[rows.start : rows.stop] for mask_BT in self.masks_BT))

    def _original_outputs(self) -> Tensor:
        """Return the outputs of the original layer for all samples, (B, T, D)."""
        original = range(self.samples.rows)
        original_BTD = self.runner.copy_hidden(self.call.hidden_BTD[original.start : original.stop])
        for rows in split_rows(original, original_BTD.shape[1]):
            out = self.call.apply(rows.start, rows.stop)
            original_BTD[rows.start : rows.stop] = (out if isinstance(out, Tensor) else out[0]).to(original_BTD.device)
        return original_BTD


def tune_layer(
    ctx: ConversionContext,
    layer: Layer,
    replacement: LayerReplacement,
    gram: Tensor | None,
    epochs: int,
    norms: bool = False,
) -> None:
    """Train the new parameters of one layer in place. gram: of the layer's output, or its diagonal, or None. norms:
    train its norms and biases too.

    One process trains and gives the values to all others.
    """
    if not trained_parameters(ctx.model, replacement):
        return
    original_names = layer_norms_and_biases(ctx.model, layer.path) if norms else {}
    replacement.originals = read_originals(ctx.model, replacement.outside(original_names), layer.call.device)
    stored = {entry.name: DTYPES[entry.dtype] for entry in replacement.entries if entry.dtype in DTYPES}
    trained = TrainedLayer(ctx.model, layer.path, replacement, stored, original_names=original_names)
    ctx.runner.gather_rows(layer.call.hidden_BTD)
    seed = ctx.recipe.seed + ctx.plan.layout.layers.index(layer.path)

    def train() -> dict[str, object] | None:
        if not ctx.dist.main:
            return None
        return LayerTuning(ctx, layer, trained, gram).run(epochs, seed).to_dict()

    replacement.tuned = ctx.dist.on_main(train)
    tensors = trained.finish(layer.call.device)
    for name in sorted(tensors):
        ctx.dist.broadcast_(tensors[name], 0)
    replacement.set_tensors(tensors, trained.dtypes)
    replacement.modules |= {path: densify_module(module) for path, module in replacement.trained_modules().items()}
