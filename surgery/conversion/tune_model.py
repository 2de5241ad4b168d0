"""Tune a converted model as a whole: train the new parameters of all layers towards the original's logits.

    loss = sum_n KL(p_n || q_n)      p: next-token distribution of the original, q: of the converted model, n: real tokens

A model without a language-model head is trained towards its last hidden state, sum_n |h_n - h*_n|^2. The original is
not run again: what reaches its head was computed by the conversion (B, T, D), and the head is applied to it batch by
batch.

The graph of a step is held in memory if the model fits there. Otherwise the step is streamed
(surgery.conversion.gradients): the backward pass of a layer loads it again, repeats the forward pass, and makes the
layer's step of Adam at once, so that memory holds one layer, its gradients and the inputs of all layers. The trained
values and Adam's moments then lie in memory-mapped files. Both ways compute the same numbers.

Norms outside the layers are trained if they run behind a converted layer, such as the norm before the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import unpadded_rows
from surgery.calibration.layer_runner import LayerCall
from surgery.calibration.lm_head import MAX_LOGITS, ChunkedLMHead
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import has_lm_head
from surgery.conversion.gradients import GradientPass, LayerBackward
from surgery.conversion.norms import read_originals
from surgery.conversion.replacement import LayerReplacement
from surgery.conversion.score import HeldOutScore, held_out_score
from surgery.conversion.streams import Contexts, Layer, Stream, Streams
from surgery.conversion.tune import BATCH_TOKENS, TrainedLayer, Tuning, split_rows, text_factor
from surgery.planning.targets import LinearTarget, Plan
from surgery.structures import STRUCTURES

STATES = 4  # copies of each trained tensor: its value, the saved value, Adam's two moments


class ModelTuning(Tuning, GradientPass):
    """The tuning of all layers together.

    layers: of the model's layers, in any order, and at path "" that of a replaced head. original_BTD: what reaches the
    head in the original, for all samples. streamed: whether each step is streamed. outer_norms: parameters of norms
    outside the layers that are trained too, parameter -> name in the files.
    """

    def __init__(
        self,
        ctx: ConversionContext,
        layers: list[TrainedLayer],
        original_BTD: Tensor,
        streamed: bool,
        outer_norms: Mapping[str, str] | None = None,
    ):
        self.ctx, self.original_BTD, self.streamed = ctx, original_BTD, streamed
        self.norms = OuterNorms(ctx.model, outer_norms or {}, ctx.device)
        self.layers = [*layers, self.norms]
        self.by_path = {layer.path: layer for layer in layers}
        self.runner, self.device = ctx.runner.single_process(), ctx.device
        layout, data = ctx.plan.layout, ctx.samples
        self.head: ChunkedLMHead | None = None
        if layout.head and has_lm_head(ctx.model):
            self.head = ChunkedLMHead(ctx.model, layout.head, layout.architecture, ctx.device)
        self.unit = "nats of KL divergence per token" if self.head else "relative error of the last hidden state"
        self.mask_BT = data.head_mask()
        self.length = next(iter(data.inputs.values())).shape[1] if data.inputs else 1
        if next(iter(data.inputs.values())).dim() != 2:
            self.length = original_BTD.shape[1]
        self.tokens = data.n_fit * self.length
        self.leaves: dict[str, list[Tensor]] = {}
        self.rate = 0.0
        self.ran: list[str] = []  # the converted layers that have run in the current forward pass

    # -- one step ----------------------------------------------------------------------------------
    def batches(self) -> list[range]:
        """Return the rows of each step of an epoch."""
        return split_rows(range(self.ctx.samples.n_fit), self.length)

    def step(self, rows: range, rate: float) -> None:
        """Make one step on these rows."""
        self.rate = rate
        self.leaves = (
            {} if self.streamed else {p: u.parameters(self.device, trained=True) for p, u in self.by_path.items()}
        )
        norms = self.norms.parameters(self.device, trained=True)
        with self.norms.swapped_in_behind(self.ran):
            final_BTD = self._streams(rows).run_with_gradients(self)
        _, grad_BTD, head_gradients = self._loss(final_BTD.detach(), rows, gradient=True)
        if self.streamed:
            torch.autograd.backward(final_BTD, grad_BTD)
            norm_gradients = [norm.grad for norm in norms]
        else:
            paths = [path for path in self.leaves if path]
            leaves = [leaf for path in paths for leaf in self.leaves[path]]
            gradients = iter(torch.autograd.grad(final_BTD, [*leaves, *norms], grad_BTD, allow_unused=True))
            del final_BTD
            for path in paths:
                layer_leaves = self.leaves[path]
                self.by_path[path].update(layer_leaves, [next(gradients) for _ in layer_leaves], rate)
            norm_gradients = list(gradients)
        self.norms.update(norms, norm_gradients, rate)
        if "" in self.by_path:
            self.by_path[""].update(self.leaves[""], head_gradients, rate)
            if self.streamed:
                self.by_path[""].release()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean KL divergence, or the relative error of the last hidden state, on the held-out rows."""
        data, total, tokens, energy = self.ctx.samples, 0.0, 0, 0.0
        for rows in split_rows(range(data.n_fit, data.rows), self.length):
            final_BTD = self._converted_outputs(rows)
            loss, _, _ = self._loss(final_BTD, rows, gradient=False)
            original_ND = self._original_rows(rows)
            total, tokens, energy = (
                total + loss,
                tokens + len(original_ND),
                energy + float(original_ND.double().square().sum()),
            )
        if self.head is None:
            return float((total / max(energy, 1e-30)) ** 0.5)
        return total / max(tokens, 1)

    @torch.no_grad()
    def score(self) -> HeldOutScore:
        """Return the held-out score of the model with the saved values, which `run` leaves in the layers."""
        data = self.ctx.samples
        parts = [self._converted_outputs(rows).cpu() for rows in split_rows(range(data.n_fit, data.rows), self.length)]
        original_BTD = self.original_BTD[data.n_fit : data.rows]
        module = next(iter(self.by_path[""].replacement.modules.values()), None) if "" in self.by_path else None
        if module is not None:
            self.by_path[""].parameters(self.device, trained=False)
        return held_out_score(self.ctx, original_BTD, torch.cat(parts).to(original_BTD.device), head_module=module)

    def _streams(self, rows: range) -> Streams:
        """Return the stream of one batch, which runs through each layer at once."""
        self.ran.clear()
        return Streams(self.runner, self.ctx.samples, {"converted": Stream(rows)}, rows_at_once=len(rows))

    def _converted_outputs(self, rows: range) -> Tensor:
        """Return what reaches the head in the converted model, with values rounded as they are stored, (B, T, D)."""
        self.norms.parameters(self.device, trained=False)
        with self.norms.swapped_in_behind(self.ran):
            return self._streams(rows).run(self)["converted"]

    def visit(self, layer: Layer) -> Contexts:
        """Run the layer with its trained values, rounded as they are stored."""
        return {"converted": self._swapped_in(layer.path, trained=False)}

    def run_layer(self, layer: Layer) -> Any:
        """Return the output of a layer for autograd: with its graph, or if streamed as one function."""
        if self.streamed:
            return super().run_layer(layer)
        with self._swapped_in(layer.path, trained=True):
            return layer.call.apply(0, len(layer.call.hidden_BTD))

    def forward_context(self, call: LayerCall) -> AbstractContextManager[None]:
        """Return the context in which the layer has its trained values."""
        return self._swapped_in(call.path, trained=True)

    def backward_context(self, call: LayerCall) -> LayerBackward:
        """Return the layer's step."""
        return _LayerStep(self, self.by_path.get(call.path))

    @contextmanager
    def _swapped_in(self, path: str, *, trained: bool) -> Iterator[None]:
        """Swap in the values of a layer; those of a step that is not streamed lie in the modules already."""
        layer = self.by_path.get(path)
        if layer is None:
            yield
            return
        if self.streamed or not trained:
            layer.parameters(self.device, trained=trained)
        with layer.swapped_in():
            yield
        if self.streamed:
            layer.release()
        self.ran.append(path)

    # -- the loss ----------------------------------------------------------------------------------
    def _original_rows(self, rows: range) -> Tensor:
        return self._real(self.original_BTD[rows.start : rows.stop].to(self.device), rows).flatten(0, -2).float()

    def _real(self, x_BTD: Tensor, rows: range) -> Tensor:
        return unpadded_rows(x_BTD, None if self.mask_BT is None else self.mask_BT[rows.start : rows.stop])

    def _loss(self, final_BTD: Tensor, rows: range, *, gradient: bool) -> tuple[float, Tensor, list[Tensor | None]]:
        """Return (the summed loss, its mean's gradient (B, T, D), the gradients of the head's parameters).

        Without `gradient` the gradients are empty.
        """
        original_ND = self._original_rows(rows)
        with torch.enable_grad():
            leaf_BTD = final_BTD.to(self.device).detach().requires_grad_(gradient)
            real_ND = self._real(leaf_BTD, rows).flatten(0, -2).float()
        converted_ND = real_ND.detach()
        head_gradients: list[Tensor | None] = []
        if self.head is None:
            error_ND = converted_ND - original_ND
            loss = float(error_ND.square().sum(dtype=torch.float64))
            scale = float(original_ND.square().mean().clamp_min(1e-30)) * original_ND.numel()
            grad_ND = 2 * error_ND / scale
        elif "" in self.by_path:
            loss, grad_ND, head_gradients = self._replaced_head_loss(converted_ND, original_ND, gradient)
        else:
            loss, grad_ND = divergence_gradient(self.head, converted_ND, original_ND)
            grad_ND = grad_ND / len(converted_ND)
        if not gradient:
            return loss, grad_ND, head_gradients
        (grad_BTD,) = torch.autograd.grad(real_ND, leaf_BTD, grad_ND)
        return loss, grad_BTD.to(final_BTD.device), head_gradients

    def _replaced_head_loss(
        self, converted_ND: Tensor, original_ND: Tensor, gradient: bool
    ) -> tuple[float, Tensor, list[Tensor | None]]:
        """Return (summed KL, gradient of the mean (N, D), gradients of the head's cores) with the replacement of the
        head.
        """
        assert self.head is not None
        layer, head = self.by_path[""], self.head
        module = next(iter({**layer.replacement.modules, **layer.replacement.structured}.values()))
        leaves = layer.parameters(self.device, trained=gradient)
        self.leaves[""] = leaves
        step = max(1, MAX_LOGITS.get(self.device.type, 2**22) // head.weight.shape[0])
        loss, grads, sums = 0.0, [], [torch.zeros_like(leaf) for leaf in leaves]
        for converted, original in zip(converted_ND.split(step), original_ND.split(step)):
            slices = head.slices(len(original))
            p_NV = torch.cat([head.logits(original, w, b) for _, w, b in slices], -1).log_softmax(-1)
            with torch.enable_grad():
                hidden = converted.detach().requires_grad_(gradient)
                q_NV = head.linear_logits(module, hidden).log_softmax(-1)
                kl = torch.nn.functional.kl_div(q_NV, p_NV, reduction="sum", log_target=True)
                if gradient:
                    grad, *core_gradients = torch.autograd.grad(kl / len(converted_ND), [hidden, *leaves])
                    grads.append(grad)
                    sums = [total + core_gradient for total, core_gradient in zip(sums, core_gradients)]
            loss += float(kl.detach())
        return loss, torch.cat(grads) if grads else converted_ND, list(sums)


class OuterNorms(TrainedLayer):
    """The norms outside the layers while they are trained: those that run behind a converted layer. parameters:
    parameter -> name in the files.
    """

    def __init__(self, meta_model: MetaModel, parameters: Mapping[str, str], device: torch.device):
        outside = LayerReplacement(originals=read_originals(meta_model, parameters, device))
        super().__init__(meta_model, "", outside, {}, original_names=parameters)
        self.before: set[str] = (
            set()
        )  # paths of norms that run before every converted layer, such as those of embeddings
        self.behind: set[str] = set()  # paths of all others that run

    @contextmanager
    def swapped_in_behind(self, ran: list[str]) -> Iterator[None]:
        """Swap the parameters into norms that run once `ran`, the paths of the converted layers so far, has any, inside
        the context.
        """
        by_module: dict[str, dict[str, Tensor]] = {}
        for parameter, tensor in self.originals.items():
            path, _, leaf = parameter.rpartition(".")
            by_module.setdefault(path, {})[leaf] = tensor
        swapped: list[tuple[Any, str, Any]] = []

        def swap_in(path: str, module: Any) -> None:
            if not ran:
                self.before.add(path)
            if path in self.before:
                return
            self.behind.add(path)
            for leaf, tensor in by_module[path].items():
                original = module._parameters[leaf]
                swapped.append((module, leaf, original))
                module._parameters[leaf] = tensor.to(original.device)

        handles = [
            self.meta_model.module(path).register_forward_pre_hook(lambda module, _, path=path: swap_in(path, module))
            for path in by_module
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, leaf, original in reversed(swapped):
                module._parameters[leaf] = original

    def finish(self, device: torch.device) -> dict[str, Tensor]:
        """Return the saved values of the norms that were trained, by name in the files, in float32 and on `device`."""
        tensors = super().finish(device)
        return {n: t for n, t in tensors.items() if self.tensors[n].original.rpartition(".")[0] in self.behind}


@torch.no_grad()
def divergence_gradient(head: ChunkedLMHead, converted_ND: Tensor, original_ND: Tensor) -> tuple[float, Tensor]:
    """Return (sum_n KL(p_n || q_n) in nats, its gradient (N, D) in the hidden states of q).

    converted_ND, original_ND: hidden states of q and of p. With logits z' = W h + b of q the gradient is (q - p) W,
    computed in two passes over slices of the vocabulary, or in one if there is one slice.
    """
    slices = head.slices(len(converted_ND))
    first = next(slices)
    is_one = len(first[1]) == head.weight.shape[0]

    def parts() -> Iterator[tuple[int, Tensor, Tensor | None]]:
        return iter([first]) if is_one else head.slices(len(converted_ND))

    p_total_N = converted_ND.new_full((len(converted_ND),), -torch.inf)
    q_total_N, logits = p_total_N.clone(), (converted_ND[:, :0], converted_ND[:, :0])
    for _, weight_VD, bias_V in parts():
        logits = head.logits(original_ND, weight_VD, bias_V), head.logits(converted_ND, weight_VD, bias_V)
        p_total_N = torch.logaddexp(p_total_N, logits[0].logsumexp(-1))
        q_total_N = torch.logaddexp(q_total_N, logits[1].logsumexp(-1))
    loss, grad_ND = 0.0, torch.zeros_like(converted_ND)
    for _, weight_VD, bias_V in parts():
        if not is_one:
            logits = head.logits(original_ND, weight_VD, bias_V), head.logits(converted_ND, weight_VD, bias_V)
        log_p_NV, log_q_NV = logits[0] - p_total_N[:, None], logits[1] - q_total_N[:, None]
        p_NV = log_p_NV.exp()
        loss += float((p_NV * (log_p_NV - log_q_NV)).sum(dtype=torch.float64))
        slope_NV = log_q_NV.exp() - p_NV
        if head.cap is not None:
            slope_NV = slope_NV * (1 - (logits[1] / head.cap).square())
        grad_ND = torch.addmm(grad_ND, slope_NV, weight_VD)
    return max(loss, 0.0), grad_ND


class _LayerStep(LayerBackward):
    """The backward pass of one layer of a streamed step, which updates its parameters. layer: None if nothing is
    trained in it.
    """

    def __init__(self, tuning: ModelTuning, layer: TrainedLayer | None):
        super().__init__()
        self.tuning, self.layer = tuning, layer
        self.swapped_in: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        if self.layer is not None:
            self.leaves = self.layer.parameters(self.tuning.device, trained=True)
            self.swapped_in = self.layer.swapped_in()
        self.swapped_in.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.swapped_in.__exit__(*error)

    def add(self, gradient_BTD: Tensor, of_leaves: list[Tensor | None]) -> None:
        """Make the step: the rows of a batch run at once."""
        if self.layer is not None:
            self.layer.update(self.leaves, of_leaves, self.tuning.rate)

    def finish(self) -> None:
        """Remove the layer's values from the modules."""
        if self.layer is not None:
            self.layer.release()


def resident_bytes(plan: Plan) -> int:
    """Return the estimated bytes of a step that is not streamed: weights in float32, states of the trained tensors,
    activations.
    """
    rows, trained = 0, 0
    for linear in plan.layout.linears:
        rows += linear.in_ + linear.out
    weights = sum(linear.in_ * linear.out for linear in plan.layout.linears)
    for target in plan.replaced_targets():
        if target.preview is not None:
            trained += target.params(target.preview)
    tokens = BATCH_TOKENS * text_factor(plan.recipe.fitted_tokens)
    return 4 * (weights + (STATES + 1) * trained + coordinate_values(plan) + 3 * tokens * rows)


def step_order(target: LinearTarget) -> int:
    """Return the order of the matrices of a target's `step_coordinates`, 0 if it has none."""
    return (
        0 if target.preview is None else STRUCTURES[target.preview].step_order(target.preview, target.out, target.in_)
    )


def coordinate_values(plan: Plan) -> int:
    """Return the number of elements of the matrices of all `step_coordinates`."""
    return sum(2 * step_order(target) ** 2 for target in plan.replaced_targets())
