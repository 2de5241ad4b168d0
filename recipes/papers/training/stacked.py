"""Many training runs of one architecture at once: parameters stacked, one vmapped model, one AdamW.

    stack = StackedTraining(models, rates, optimiser, clip=1.0, device=device)   rates: M dicts {parameter: peak rate}
    losses_M = stack.step(batch, factor)                                         batch: tensors (M, B, ..), of one run and row each
    outputs = stack.map(function, batch)                                         function(call, batch) of every run, without gradients

`loss(call, batch)` is any function of one run's batch; `call` runs the model with that run's parameters. The default is
next-token cross-entropy. Mixers compute their quadratic definition (`Mixer.dense`), the cheapest form for rows of a few
hundred tokens.

A run of a small model keeps a GPU waiting for kernel launches; M stacked runs cost little more than one. Each run has
its own parameters, learning rates, weight decay and clipping, so its result is that of a separate run, and a diverging
run does not affect the others. On a GPU the step is a CUDA graph, which needs eager attention
(attn_implementation="eager"). M: runs, N: parameters of one run, B: rows, T: tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from surgery.core.dispatch import use_kernels
from surgery.mixers import Mixer
from surgery.mixers.common.packed_documents import one_document_per_row
from surgery.training.optim import OptimizerConfig
from surgery.training.stages.base import next_token_targets
from surgery.training.stages.lm import cross_entropy

WARM_UP = 3  # steps before a graph is recorded, undone afterwards
Batch = dict[str, Tensor]
RunFunction = Callable[[Callable[..., Any], Batch], Tensor]


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return the additive causal mask (1, 1, T, T); transformers' own construction copies from the CPU, which a CUDA
    graph cannot contain.
    """
    lowest = torch.full((1, 1, length, length), torch.finfo(torch.float32).min, device=device)
    return lowest.triu(1)


def next_token_loss(call: Callable[..., Any], batch: Batch) -> Tensor:
    """Return one run's mean loss in nats per counted token. batch: input_ids and labels (B, T)."""
    ids_BT = batch["input_ids"]
    _, next_BT = next_token_targets(batch)
    output = call(ids_BT, attention_mask=causal_mask(ids_BT.shape[1], ids_BT.device), use_cache=False)
    return cross_entropy(output.logits, next_BT) / (next_BT >= 0).sum()


class StackedTraining:
    """M training runs of one architecture with stacked parameters.

    clip: maximum gradient norm of each run. loss: of one run, a scalar. decays: names of the parameters with weight
    decay; None: all with two or more dimensions. precision: of autocast; weights and optimizer stay in float32. held:
    names of parameters that do not change before `release`.
    """

    def __init__(
        self,
        models: list[nn.Module],
        rates: list[dict[str, float]],
        optimiser: OptimizerConfig,
        clip: float | None,
        device: torch.device,
        graph: bool = True,
        *,
        loss: RunFunction = next_token_loss,
        decays: set[str] | None = None,
        precision: Literal["float32", "bf16"] = "float32",
        held: Collection[str] = (),
    ):
        assert optimiser.name == "adamw", "only AdamW is implemented"
        self.optimiser, self.clip, self.device = optimiser, clip, device
        self.loss, self.precision = loss, precision
        self.names = [name for name, p in models[0].named_parameters()]
        shapes = [p.shape for p in models[0].parameters()]
        self.model = copy.deepcopy(models[0]).to(device).train()
        for module in self.model.modules():
            if isinstance(module, Mixer):
                module.by_definition = True
        self.buffers = dict(self.model.named_buffers())
        self.flat_MN = _flatten_parameters([[p.detach() for p in model.parameters()] for model in models], device)
        self.rates_MN = torch.cat(
            [torch.tensor([r[n] for r in rates])[:, None].expand(-1, s.numel()) for n, s in zip(self.names, shapes)], 1
        ).to(device)
        self.sizes = [shape.numel() for shape in shapes]
        decayed = {n for n, s in zip(self.names, shapes) if len(s) >= 2} if decays is None else decays
        shares = [torch.full((s.numel(),), float(n in decayed)) for n, s in zip(self.names, shapes)]
        moves = [torch.full((s.numel(),), float(n not in held)) for n, s in zip(self.names, shapes)]
        self.moves_N = torch.cat(moves).to(device) if held else None
        self.decay_N = torch.cat(shares).to(device) * optimiser.weight_decay if optimiser.weight_decay else None
        parts = self.flat_MN.detach().split(self.sizes, dim=1)  # views: the optimizer's update changes them
        self.leaves = [p.unflatten(1, s).requires_grad_() for p, s in zip(parts, shapes)]
        self.mean_MN, self.square_MN = torch.zeros_like(self.flat_MN), torch.zeros_like(self.flat_MN)
        self.steps, self.factor = torch.zeros((), device=device), torch.zeros((), device=device)
        self.use_graph = graph and device.type == "cuda"
        self.graph: torch.cuda.CUDAGraph | None = None
        self.static_inputs: dict[str, Tensor] = {}

    # -- forward ---------------------------------------------------------------------------------------
    def _map(self, function: RunFunction, batch: Batch) -> Tensor:
        """Return function(call, batch) of every run.

        The reference implementations compute it, because Triton does not support vmap.
        """

        def one(values: list[Tensor], own: Batch) -> Tensor:
            parameters = dict(zip(self.names, values))

            def call(*args: Any, **options: Any) -> Any:
                return functional_call(self.model, (parameters, self.buffers), args, options)

            return function(call, own)

        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with use_kernels("reference"), one_document_per_row(), autocast:
            return torch.vmap(one)(self.leaves, batch)

    def losses(self, batch: Batch) -> Tensor:
        """Return the losses (M,)."""
        return self._map(self.loss, batch)

    @torch.no_grad()
    def map(self, function: RunFunction, batch: Batch) -> Tensor:
        """Return function(call, batch) of every run, (M, ..), in evaluation mode."""
        self.model.eval()
        found = self._map(function, batch)
        self.model.train()
        return found

    def evaluate(self, batches: list[Batch]) -> Tensor:
        """Return the mean losses (M,) over batches of equal size."""
        return torch.stack([self.map(self.loss, batch) for batch in batches]).mean(0)

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

    def release(self) -> None:
        """Train the held parameters too, from the next step on."""
        if self.moves_N is not None:
            self.moves_N.fill_(1.0)

    def _step(self, batch: dict[str, Tensor]) -> Tensor:
        losses_M = self.losses(batch)
        gradients = torch.autograd.grad(losses_M.sum(), self.leaves, allow_unused=True, materialize_grads=True)
        gradient_MN = torch.cat([g.flatten(1) for g in gradients], dim=1)
        if self.moves_N is not None:
            gradient_MN *= self.moves_N
        if self.clip is not None:
            norm_M1 = torch.linalg.vector_norm(gradient_MN, dim=1, keepdim=True)
            gradient_MN *= (self.clip / (norm_M1 + 1e-6)).clamp(max=1.0)
        self._adam_step(gradient_MN)
        return losses_M.detach()

    @torch.no_grad()
    def _adam_step(self, gradient_MN: Tensor) -> None:
        """AdamW (Loshchilov and Hutter 2019) as in torch.optim."""
        (first, second), settings = self.optimiser.betas, self.optimiser
        self.steps += 1
        rates_MN = self.rates_MN * self.factor
        self.mean_MN.lerp_(gradient_MN, 1 - first)
        self.square_MN.mul_(second).addcmul_(gradient_MN, gradient_MN, value=1 - second)
        root_MN = (self.square_MN / (1 - second**self.steps)).sqrt_().add_(settings.eps)
        if self.decay_N is not None:
            decay_N = self.decay_N if self.moves_N is None else self.decay_N * self.moves_N
            self.flat_MN.mul_(1 - rates_MN * decay_N)
        self.flat_MN.sub_(rates_MN.mul_(self.mean_MN).div_(root_MN) / (1 - first**self.steps))

    def _record(self, batch: dict[str, Tensor]) -> None:
        """Capture the step as a CUDA graph, and undo what the warm-up changed.

        It is captured on a stream of its own: graphs captured on one stream share the workspaces of cuBLAS, so that
        those of two stacks could not be replayed at the same time.
        """
        self.static_inputs = {name: tensor.clone() for name, tensor in batch.items()}
        kept_MN, stream = self.flat_MN.clone(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step(self.static_inputs)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.answer = self._step(self.static_inputs)
        self.flat_MN.copy_(kept_MN)
        for tensor in (self.mean_MN, self.square_MN, self.steps):
            tensor.zero_()


def _flatten_parameters(parameters: list[list[Tensor]], device: torch.device) -> Tensor:
    return torch.stack([torch.cat([p.flatten() for p in own]) for own in parameters]).to(device)
