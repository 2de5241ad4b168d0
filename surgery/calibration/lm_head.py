"""Language-model head in slices of the vocabulary: losses and output gradients without all logits or the full matrix in
memory.

N: tokens   D: hidden size   V: vocabulary, or one slice of it
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from surgery.architectures import Architecture
from surgery.architectures.logits import find_logit_transform
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import read_rows, read_tensor

# Most elements of a slice of logits, or of the head's weight, in memory at a time.
MAX_LOGITS = {"cpu": 2**22, "cuda": 2**27}
OFFSET = "final_logits_bias"  # buffer of a model, beside the bias of its head
ROWS_PER_PASS = 8192  # hidden states per pass over the head's file


class ChunkedLMHead:
    """Head with logits = softcap(scale (W h + b)), where W (V, D) is read from the checkpoint in slices of rows.

    softcap(z) = cap tanh(z / cap) for models that have one (Gemma 2), else the identity. scale: 1 but for models that
    multiply their logits (Granite, Cohere, Falcon-H1).
    """

    def __init__(self, meta_model: MetaModel, path: str, architecture: Architecture | None, device: torch.device):
        self.weight = meta_model.tensor_info(f"{path}.weight")
        self.device = device
        self.bias = None
        if f"{path}.bias" in dict(meta_model.model.named_parameters()):
            self.bias = read_tensor(meta_model.tensor_info(f"{path}.bias"), torch.float32).to(device)
        self.offset = None  # added to the logits by the models of BART's kind
        if OFFSET in meta_model.keys:
            self.offset = read_tensor(meta_model.tensor_info(OFFSET), torch.float32).flatten().to(device)
            self.bias = self.offset if self.bias is None else self.bias + self.offset
        name = architecture.softcap if architecture else ""
        self.cap = getattr(meta_model.config.get_text_config(), name, None) if name else None
        self.scale = 1.0
        if (transform := find_logit_transform(meta_model.model)) is not None:
            self.scale, self.cap = transform.scale, transform.softcap or None

    def slices(self, rows: int) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield (first token id, weight (V, D), bias (V,) or None) of slices small enough for `rows` hidden states, times
        the scale.
        """
        vocabulary, width = self.weight.shape
        step = max(256, MAX_LOGITS.get(self.device.type, 2**22) // max(1, rows, width))
        for first in range(0, vocabulary, step):
            last = min(first + step, vocabulary)
            weight = read_tensor(self.weight.rows(first, last), torch.float32, device=self.device)
            bias = None if self.bias is None else self.bias[first:last]
            if self.scale != 1:
                weight, bias = weight * self.scale, None if bias is None else bias * self.scale
            yield first, weight, bias

    def logits(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return the logits (N, V) of a slice."""
        logits_NV = nn.functional.linear(hidden_ND, weight_VD, bias_V)
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV / self.cap)

    @torch.no_grad()
    def losses(self, hidden_ND: Tensor, labels_N: Tensor, linear: nn.Module | None = None) -> Tensor:
        """Return the negative log likelihood of each label in nats, (N,). linear: a module used instead of the stored
        head.
        """
        out = []
        rows = (
            ROWS_PER_PASS if linear is None else max(1, MAX_LOGITS.get(self.device.type, 2**22) // self.weight.shape[0])
        )
        for hidden, labels in zip(torch.split(hidden_ND, rows), torch.split(labels_N, rows)):
            out.append(self._losses(hidden.to(self.device), labels.to(self.device), linear))
        return torch.cat(out)

    def _losses(self, hidden_ND: Tensor, labels_N: Tensor, linear: nn.Module | None) -> Tensor:
        if linear is not None:
            return nn.functional.cross_entropy(self.linear_logits(linear, hidden_ND), labels_N, reduction="none")
        total_N = hidden_ND.new_full((len(hidden_ND),), -torch.inf)
        chosen_N = torch.zeros_like(total_N)
        for first, weight, bias in self.slices(len(hidden_ND)):
            logits_NV = self.logits(hidden_ND, weight, bias)
            total_N = torch.logaddexp(total_N, logits_NV.logsumexp(-1))
            inside = (labels_N >= first) & (labels_N < first + len(weight))
            index_N = (labels_N - first).clamp(0, len(weight) - 1)
            chosen_N += torch.where(inside, logits_NV.gather(1, index_N[:, None])[:, 0], 0.0)
        return total_N - chosen_N

    def linear_logits(self, linear: nn.Module, hidden_ND: Tensor) -> Tensor:
        """Return the logits (N, V) of a module used instead of the stored head."""
        logits_NV: Tensor = linear(hidden_ND)
        logits_NV = logits_NV if self.offset is None else logits_NV + self.offset
        logits_NV = logits_NV if self.scale == 1 else logits_NV * self.scale
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV / self.cap)

    @torch.no_grad()
    def divergences(self, hidden_ND: Tensor, other_ND: Tensor) -> Tensor:
        """Return KL(p || q) of each token in nats, (N,), at least 0. p, q: next-token distributions of the two hidden
        states.

        KL(p || q) = sum_v p_v (z_v - z'_v) - log sum_v exp z_v + log sum_v exp z'_v for the logits z of p and z' of q.
        The sums are accumulated over slices of the vocabulary and rescaled when the maximum of z grows.
        """
        pairs = zip(torch.split(hidden_ND, ROWS_PER_PASS), torch.split(other_ND, ROWS_PER_PASS))
        return torch.cat([self._divergences(h.to(self.device), other.to(self.device)) for h, other in pairs])

    def _divergences(self, hidden_ND: Tensor, other_ND: Tensor) -> Tensor:
        top_N = hidden_ND.new_full((len(hidden_ND),), -torch.inf)
        mass_N, difference_N, other_total_N = torch.zeros_like(top_N), torch.zeros_like(top_N), top_N.clone()
        for _, weight, bias in self.slices(len(hidden_ND)):
            logits_NV, other_NV = self.logits(hidden_ND, weight, bias), self.logits(other_ND, weight, bias)
            other_total_N = torch.logaddexp(other_total_N, other_NV.logsumexp(-1))
            higher_N = torch.maximum(top_N, logits_NV.amax(-1))
            shrink_N = (top_N - higher_N).exp()
            weight_NV = (logits_NV - higher_N[:, None]).exp()
            mass_N = mass_N * shrink_N + weight_NV.sum(-1)
            difference_N = difference_N * shrink_N + (weight_NV * (logits_NV - other_NV)).sum(-1)
            top_N = higher_N
        return (difference_N / mass_N - top_N - mass_N.log() + other_total_N).clamp_min(0.0)

    @torch.no_grad()
    def divergence_gradient(self, hidden_ND: Tensor, other_ND: Tensor) -> Tensor:
        """Return d KL(p || q) / d other of each token, (N, D), where q is the distribution of `other_ND`; see
        `divergences`.

        It is sum_v (q_v - p_v) c_v W_v, where c is the slope of the soft cap, 1 without one.
        """
        pairs = zip(torch.split(hidden_ND, ROWS_PER_PASS), torch.split(other_ND, ROWS_PER_PASS))
        return torch.cat([self._divergence_gradient(h.to(self.device), other.to(self.device)) for h, other in pairs])

    def _divergence_gradient(self, hidden_ND: Tensor, other_ND: Tensor) -> Tensor:
        top_2N = hidden_ND.new_full((2, len(hidden_ND)), -torch.inf)
        mass_2N, sum_2ND = torch.zeros_like(top_2N), hidden_ND.new_zeros(2, *hidden_ND.shape)
        for _, weight, bias in self.slices(2 * len(hidden_ND)):
            logits_2NV = torch.stack([self.logits(x, weight, bias) for x in (hidden_ND, other_ND)])
            slope_NV = 1.0 if self.cap is None else 1 - (logits_2NV[1] / self.cap).square()
            higher_2N = torch.maximum(top_2N, logits_2NV.amax(-1))
            shrink_2N = (top_2N - higher_2N).exp()
            weight_2NV = logits_2NV.sub_(higher_2N[..., None]).exp_()
            mass_2N = mass_2N * shrink_2N + weight_2NV.sum(-1)
            sum_2ND = sum_2ND * shrink_2N[..., None] + (weight_2NV * slope_NV) @ weight
            top_2N = higher_2N
        mean_2ND = sum_2ND / mass_2N[..., None]
        return mean_2ND[1] - mean_2ND[0]

    @torch.no_grad()
    def output_gradient(self, hidden_ND: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return d loss / d hidden (N, D), the log-sum-exp of the logits (N,), and the labels (N,), sampled from the
        model.

        The outer products of these gradients average to the Fisher information. The computation is one pass over the
        vocabulary: the softmax-weighted sum of rows of W is rescaled when the maximum logit grows. A label sampled from
        the current slice replaces the earlier one with a probability equal to the slice's share of the probability mass
        so far.
        """
        rows = len(hidden_ND)
        top_N, mass_N = hidden_ND.new_full((rows,), -torch.inf), hidden_ND.new_zeros(rows)
        sum_ND = torch.zeros_like(hidden_ND)
        label_N, slope_N = torch.zeros(rows, dtype=torch.int64, device=self.device), hidden_ND.new_zeros(rows)
        for first, weight, bias in self.slices(rows):
            logits_NV = self.logits(hidden_ND, weight, bias)
            slope_NV = None if self.cap is None else 1 - (logits_NV / self.cap).square()
            higher_N = torch.maximum(top_N, logits_NV.amax(-1))
            shrink_N = (top_N - higher_N).exp()
            weight_NV = logits_NV.sub_(higher_N[:, None]).exp_()
            drawn_N, share_N, part_N = sample_labels(weight_NV, mass_N * shrink_N, generator)
            taken_N = torch.rand(rows, generator=generator).to(self.device) < share_N
            label_N = torch.where(taken_N, first + drawn_N, label_N)
            ones = torch.ones_like(slope_N)
            slope_N = torch.where(
                taken_N, ones if slope_NV is None else slope_NV.gather(1, drawn_N[:, None])[:, 0], slope_N
            )
            weight_NV = weight_NV if slope_NV is None else weight_NV * slope_NV
            sum_ND = torch.addmm(sum_ND * shrink_N[:, None], weight_NV, weight)
            top_N, mass_N = higher_N, mass_N * shrink_N + part_N
        chosen_ND = slope_N[:, None] * self.weight_rows(label_N)
        return sum_ND / mass_N[:, None] - chosen_ND, top_N + mass_N.log(), label_N

    def weight_rows(self, label_N: Tensor) -> Tensor:
        """Return the rows of W for the labels, times the scale, (N, D)."""
        unique, index_N = torch.unique(label_N.cpu(), return_inverse=True)
        return self.scale * read_rows(self.weight, unique).float().to(self.device)[index_N.to(self.device)]

    @torch.no_grad()
    def logit_gradient_energy(self, hidden_ND: Tensor, total_N: Tensor, label_N: Tensor) -> Tensor:
        """Return the mean squared gradient of the loss by W h + b, (V,), the diagonal of the head's output Gram matrix; a
        soft cap is left out.
        """
        energy_V = hidden_ND.new_zeros(self.weight.shape[0])
        for first, weight, bias in self.slices(len(hidden_ND)):
            delta_NV = (self.logits(hidden_ND, weight, bias) - total_N[:, None]).exp()
            here_N = ((label_N >= first) & (label_N < first + len(weight))).nonzero()[:, 0]
            delta_NV[here_N, label_N[here_N] - first] -= 1
            energy_V[first : first + len(weight)] = self.scale**2 * delta_NV.square().mean(0)
        return energy_V


def sample_labels(weight_NV: Tensor, before_N: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each row, an index sampled by weight, this slice's share of the mass so far, and its mass; each (N,).

    before_N: the mass of earlier slices.
    """
    reached_NV = weight_NV.cumsum(-1)
    mass_N = reached_NV[:, -1]
    threshold_N1 = (torch.rand(len(weight_NV), generator=generator).to(weight_NV.device) * mass_N)[:, None]
    drawn_N = torch.searchsorted(reached_NV, threshold_N1)[:, 0].clamp_max(weight_NV.shape[1] - 1)
    return drawn_N, mass_N / (before_N + mass_N), mass_N
