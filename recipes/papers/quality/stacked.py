"""Train M models of one architecture at once: stacked parameters, one vmapped forward, one Adam.

    stack = StackedTraining(models, rates, optimiser, clip=1.0, device=device)     rates: M x {parameter: peak learning rate}
    losses_M = stack.step(batch, factor)                                           batch: tensors (M, B, T)

Training a small model is bound by kernel launches, so M runs cost little more than one. Each run has its own parameters, learning
rates and clipping, so its losses are those of a run on its own, and a diverging run does not affect the others. On a GPU the step
is a CUDA graph, which requires eager attention (attn_implementation="eager"). Shapes: M runs, N parameters of a model, B rows, T tokens.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from surgery.core.dispatch import use_kernels
from surgery.training.optim import OptimizerConfig
from surgery.training.stages.base import next_token_targets
from surgery.training.stages.lm import cross_entropy

WARM_UP = 3  # steps before a graph is recorded, undone afterwards


class StackedTraining:
    """M training runs of one architecture with stacked parameters."""

    def __init__(
        self,
        models: list[nn.Module],
        rates: list[dict[str, float]],
        optimiser: OptimizerConfig,
        clip: float | None,
        device: torch.device,
        graph: bool = True,
    ):
        assert optimiser.name == "adamw" and not optimiser.weight_decay, (
            "StackedTraining supports AdamW without weight decay only"
        )
        self.optimiser, self.clip, self.device = optimiser, clip, device
        self.names = [name for name, p in models[0].named_parameters()]
        shapes = [p.shape for p in models[0].parameters()]
        self.model = copy.deepcopy(models[0]).to(device).train()
        self.buffers = dict(self.model.named_buffers())
        self.flat_MN = _flatten_parameters([[p.detach() for p in model.parameters()] for model in models], device)
        self.rates_MN = torch.cat(
            [torch.tensor([r[n] for r in rates])[:, None].expand(-1, s.numel()) for n, s in zip(self.names, shapes)], 1
        ).to(device)
        self.sizes = [shape.numel() for shape in shapes]
        parts = self.flat_MN.detach().split(self.sizes, dim=1)
        self.leaves = [p.unflatten(1, s).requires_grad_() for p, s in zip(parts, shapes)]
        self.mean_MN, self.square_MN = torch.zeros_like(self.flat_MN), torch.zeros_like(self.flat_MN)
        self.steps, self.factor = torch.zeros((), device=device), torch.zeros((), device=device)
        self.use_graph = graph and device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static_inputs: dict[str, Tensor] = {}

    # -- forward ---------------------------------------------------------------------------------------
    def _loss(self, numbers: list[Tensor], ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return one run's mean loss in nats per counted token."""
        _, next_BT = next_token_targets({"labels": labels_BT})
        parameters, length = dict(zip(self.names, numbers)), ids_BT.shape[1]
        given = {"attention_mask": self._mask(length), "use_cache": False}
        answer = functional_call(self.model, (parameters, self.buffers), (ids_BT,), given)
        return cross_entropy(answer.logits, next_BT) / (next_BT >= 0).sum()

    def _mask(self, length: int) -> Tensor:
        """Return the causal mask (1, 1, T, T); transformers' own construction copies from the CPU, which a CUDA graph
        cannot contain.
        """
        lowest = torch.full((1, 1, length, length), torch.finfo(torch.float32).min, device=self.device)
        return lowest.triu(1)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Return losses (M,). The reference implementations compute them, because Triton does not support vmap."""
        with use_kernels("reference"):
            return torch.vmap(self._loss)(self.leaves, batch["input_ids"], batch["labels"])

    @torch.no_grad()
    def evaluate(self, batches: list[dict[str, Tensor]]) -> Tensor:
        """Return the mean losses (M,) over batches of equal size."""
        self.model.eval()
        found = torch.stack([self.losses(batch) for batch in batches]).mean(0)
        self.model.train()
        return found

    # -- a step ----------------------------------------------------------------------------------------
    def step(self, batch: dict[str, Tensor], factor: float) -> Tensor:
        """Take a step and return the losses (M,) before it. factor: the schedule's factor on all peak rates."""
        self.factor.fill_(factor)
        if not self.use_graph:
            return self._step(batch).clone()
        if self.graph is None:
            self._record(batch)
        for name, tensor in self.static_inputs.items():
            tensor.copy_(batch[name])
        assert self.graph is not None
        self.graph.replay()
        return self.answer.clone()

    def _step(self, batch: dict[str, Tensor]) -> Tensor:
        losses_M = self.losses(batch)
        gradients = torch.autograd.grad(losses_M.sum(), self.leaves)
        gradient_MN = torch.cat([g.flatten(1) for g in gradients], dim=1)
        if self.clip is not None:
            norm_M1 = torch.linalg.vector_norm(gradient_MN, dim=1, keepdim=True)
            gradient_MN *= (self.clip / (norm_M1 + 1e-6)).clamp(max=1.0)
        self._adam_step(gradient_MN)
        return losses_M.detach()

    @torch.no_grad()
    def _adam_step(self, gradient_MN: Tensor) -> None:
        """Adam (Kingma and Ba 2015) as in torch.optim."""
        (first, second), settings = self.optimiser.betas, self.optimiser
        self.steps += 1
        rates_MN = self.rates_MN * self.factor
        self.mean_MN.lerp_(gradient_MN, 1 - first)
        self.square_MN.mul_(second).addcmul_(gradient_MN, gradient_MN, value=1 - second)
        root_MN = (self.square_MN / (1 - second**self.steps)).sqrt_().add_(settings.eps)
        self.flat_MN.sub_(rates_MN.mul_(self.mean_MN).div_(root_MN) / (1 - first**self.steps))

    def _record(self, batch: dict[str, Tensor]) -> None:
        """Capture the step as a CUDA graph, and undo what the warm-up changed."""
        self.static_inputs = {name: batch[name].clone() for name in ("input_ids", "labels")}
        kept_MN, stream = self.flat_MN.clone(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step(self.static_inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.answer = self._step(self.static_inputs)
        self.flat_MN.copy_(kept_MN)
        for tensor in (self.mean_MN, self.square_MN, self.steps):
            tensor.zero_()


def _flatten_parameters(parameters: list[list[Tensor]], device: torch.device) -> Tensor:
    return torch.stack([torch.cat([p.flatten() for p in own]) for own in parameters]).to(device)
