"""The head, a slice of the vocabulary at a time: losses, and the curvature's cotangent, without ever holding
all logits or the whole matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from surgery.anatomy import Anatomy
from surgery.shards import read_tensor
from surgery.skeleton import Skeleton

LOGITS = {"cpu": 2**22, "cuda": 2**27}  # numbers of logits held at a time, in a few copies
ROWS = 8192  # hidden states for which the head is read from the file once


class Head:
    """logits = softcap(W h + b), W (V, D) read from the file in slices of rows."""

    def __init__(self, skeleton: Skeleton, path: str, anatomy: Anatomy | None, device: torch.device):
        self.weight = skeleton.info(f"{path}.weight")
        self.device = device
        self.bias = None
        if f"{path}.bias" in dict(skeleton.model.named_parameters()):
            self.bias = read_tensor(skeleton.info(f"{path}.bias"), torch.float32).to(device)
        name = anatomy.softcap if anatomy else ""
        self.cap = getattr(skeleton.config.get_text_config(), name, None) if name else None

    def slices(self, rows: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        vocabulary = self.weight.shape[0]
        step = max(256, LOGITS.get(self.device.type, 2**22) // max(1, rows))
        for first in range(0, vocabulary, step):
            last = min(first + step, vocabulary)
            weight = read_tensor(self.weight.rows(first, last), torch.float32).to(self.device)
            yield first, weight, None if self.bias is None else self.bias[first:last]

    def logits(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        logits_NV = nn.functional.linear(hidden_ND, weight_VD, bias_V)
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV / self.cap)

    @torch.no_grad()
    def normaliser(self, hidden_ND: Tensor) -> Tensor:
        """log sum exp of the logits, (N,)."""
        total_N = hidden_ND.new_full((len(hidden_ND),), -torch.inf)
        for _, weight, bias in self.slices(len(hidden_ND)):
            total_N = torch.logaddexp(total_N, self.logits(hidden_ND, weight, bias).logsumexp(-1))
        return total_N

    @torch.no_grad()
    def losses(self, hidden_ND: Tensor, labels_N: Tensor, linear: nn.Module | None = None) -> Tensor:
        """Negative log likelihood of each label, (N,); `linear` stands in for the stored head."""
        out = []
        rows = ROWS if linear is None else max(1, LOGITS.get(self.device.type, 2**22) // self.weight.shape[0])
        for hidden, labels in zip(hidden_ND.split(rows), labels_N.split(rows)):
            out.append(self._losses(hidden.to(self.device), labels.to(self.device), linear))
        return torch.cat(out)

    def _losses(self, hidden_ND: Tensor, labels_N: Tensor, linear: nn.Module | None) -> Tensor:
        if linear is not None:
            return nn.functional.cross_entropy(self.logits_of(linear, hidden_ND), labels_N, reduction="none")
        total_N = hidden_ND.new_full((len(hidden_ND),), -torch.inf)
        chosen_N = torch.zeros_like(total_N)
        for first, weight, bias in self.slices(len(hidden_ND)):
            logits_NV = self.logits(hidden_ND, weight, bias)
            total_N = torch.logaddexp(total_N, logits_NV.logsumexp(-1))
            inside = (labels_N >= first) & (labels_N < first + len(weight))
            place = (labels_N - first).clamp(0, len(weight) - 1)
            chosen_N += torch.where(inside, logits_NV.gather(1, place[:, None])[:, 0], 0.0)
        return total_N - chosen_N

    def logits_of(self, linear: nn.Module, hidden_ND: Tensor) -> Tensor:
        logits_NV = linear(hidden_ND)
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV / self.cap)

    @torch.no_grad()
    def cotangent(self, hidden_ND: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(d loss / d hidden (N, D), mean squared d loss / d logits (V,)) with labels drawn from the model
        itself: the outer products of such gradients average to the Fisher information."""
        total_N = self.normaliser(hidden_ND)
        threshold_N = torch.rand(len(hidden_ND), generator=generator).to(self.device)
        grad_ND, below_N = torch.zeros_like(hidden_ND), torch.zeros_like(total_N)
        energy_V = hidden_ND.new_zeros(self.weight.shape[0])
        for first, weight, bias in self.slices(len(hidden_ND)):
            logits_NV = self.logits(hidden_ND, weight, bias)
            delta_NV = (logits_NV - total_N[:, None]).exp()
            # Inverse transform sampling: the label is where the cumulative probability passes the threshold.
            reached_NV = below_N[:, None] + delta_NV.cumsum(-1)
            drawn_N = (reached_NV < threshold_N[:, None]).sum(-1)
            here_N = (below_N <= threshold_N) & (drawn_N < len(weight))
            below_N = reached_NV[:, -1].clone()
            delta_NV[here_N, drawn_N[here_N]] -= 1
            if self.cap is not None:
                delta_NV *= 1 - (logits_NV / self.cap).square()
            energy_V[first : first + len(weight)] = delta_NV.square().mean(0)
            grad_ND += delta_NV @ weight
        return grad_ND, energy_V
