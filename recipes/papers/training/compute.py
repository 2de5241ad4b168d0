"""Count the multiply-accumulates (MACs) of a model per token of a row, by one convention for all models that are
compared.

Convention, printed with the results: forward pass; a token pays for what a decoder computes at its position, so softmax
attention pays for the causal half (T + 1) / 2 of the pairs, a linear mixer for its states. Mixers count their own
projections (gates, levels, convolutions). Norms, activations, biases and the look-up of embeddings count nothing. A
backward pass costs twice as much.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from surgery.architectures.attention import attention_paths, attention_shape
from surgery.architectures.linears import is_linear
from surgery.mixers import MIXERS
from surgery.mixers.softmax import Softmax
from surgery.modeling.cache import mixer_modules
from surgery.modeling.modules import GuardedLinear
from surgery.structures import StructuredLinear

CONVENTION = "forward MACs per token, causal half of the pairs"


class Compute(NamedTuple):
    """MACs per token. linears: of the layers. mixers: scores, states and values of attention, with what the mixer
    itself projects. head: of the output layer."""

    linears: int
    mixers: int
    head: int

    @property
    def body(self) -> int:
        """MACs without the head."""
        return self.linears + self.mixers

    @property
    def total(self) -> int:
        """MACs with the head."""
        return self.body + self.head


def count_compute(model: Any, length: int) -> Compute:
    """Return the MACs per token of a causal model, averaged over the positions of a row of `length` tokens.

    Projections of queries and keys that a bilinear mixer with `base: own` does not read are left out.
    """
    head = model.get_output_embeddings()
    mixers = {path: module.mixer for path, module in mixer_modules(model)}
    unread = {f"{path}.{name}" for path, m in mixers.items() if _owns_scores(m) for name in ("q_proj", "k_proj")}
    linears = sum(
        linear_macs(module)
        for path, module in model.named_modules()
        if module is not head and ".mixer." not in path and path not in unread
    )
    costs = 0
    for path in attention_paths(model):
        mixer = mixers.get(path)
        shape = mixer.shape if mixer is not None else attention_shape(model, path)
        config = mixer.config if mixer is not None else Softmax()
        costs += mean_macs(config, shape, length)
    return Compute(linears, costs, 0 if head is None else linear_macs(head))


def mean_macs(config: Any, shape: Any, length: int) -> int:
    """Return the MACs of a mixer per token, averaged over eight evenly spaced contexts of 1 to `length` tokens."""
    contexts = sorted({max(1, round(length * (2 * i + 1) / 16)) for i in range(8)})
    return round(sum(MIXERS[config].cost(config, shape, n).macs for n in contexts) / len(contexts))


def state_size(model: Any, length: int) -> int:
    """Return the numbers that all layers cache for one row after `length` tokens."""
    mixers = {path: module.mixer for path, module in mixer_modules(model)}
    total = 0
    for path in attention_paths(model):
        mixer = mixers.get(path)
        config = mixer.config if mixer is not None else Softmax()
        shape = mixer.shape if mixer is not None else attention_shape(model, path)
        total += MIXERS[config].cost(config, shape, length).cache
    return total


def _owns_scores(mixer: Any) -> bool:
    return getattr(mixer.config, "base", None) == "own"


def linear_macs(module: nn.Module) -> int:
    """Return the MACs of one input row of a linear, dense or structured; 0 of other modules."""
    if isinstance(module, StructuredLinear):
        return module.macs()
    if isinstance(module, GuardedLinear) or is_linear(module) or isinstance(module, nn.Linear):
        weight: Any = module.weight
        return int(weight.numel())
    return 0
