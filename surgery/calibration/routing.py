"""Calibration rows of routed experts: which tokens an expert computes, and with which weight.

An expert's output is multiplied by its routing weight w and added to the layer's output, so the error of its matrices
counts w^2:

    C = sum w^2 x x^T    K = sum w^2 y* x^T    over the tokens that the router of the converted model sends to the expert

x is the token's vector in the converted model and y* the output of the original matrix on its vector in the original
model. Both are known for every token, because they are recorded before the tokens are divided among the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from surgery.architectures.experts import RoutedExperts
from surgery.architectures.linears import LinearInfo


@dataclass(frozen=True)
class RoutedTokens:
    """The arguments of a RoutedExperts module for some tokens, without padding.

    x_ND, x0_ND: input in the converted and in the original model (one tensor before the first converted matrix).
    index_Nk, weight_Nk: the experts selected for each token in the converted model, and their weights.
    """

    x_ND: Tensor
    x0_ND: Tensor
    index_Nk: Tensor
    weight_Nk: Tensor

    def rows_of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x (M, D), x0 (M, D), weight (M, 1)) of the M tokens that an expert computes."""
        mine_Nk = self.index_Nk == expert
        chosen_N = mine_Nk.any(1)
        weight_M1 = (self.weight_Nk * mine_Nk).sum(1, keepdim=True)[chosen_N].float()
        x_MD = self.x_ND[chosen_N]
        return x_MD, x_MD if self.x0_ND is self.x_ND else self.x0_ND[chosen_N], weight_M1

    def rows_of_all(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x (N, D), x0 (N, D), sqrt(sum_j w_j^2) (N, 1)): the sums over their rows are those over all experts'
        rows.
        """
        return self.x_ND, self.x0_ND, self.weight_Nk.float().square().sum(1, keepdim=True).sqrt()


class RoutingRecord:
    """Hooks on the RoutedExperts of a layer that keep the last call's selected experts, to find the padding among an
    expert's rows.

    linears: linears of the layer. Used as a context manager.
    """

    def __init__(self, layer: nn.Module, prefix: str, linears: Iterable[LinearInfo]):
        self.linears = {linear.path: linear for linear in linears}
        self.selected: dict[str, Tensor] = {}
        self.modules = {
            f"{prefix}.{name}": module for name, module in layer.named_modules() if isinstance(module, RoutedExperts)
        }
        self._handles: list[Any] = []

    def __enter__(self) -> RoutingRecord:
        for path, module in self.modules.items():
            self._handles.append(module.register_forward_pre_hook(self._hook(path), with_kwargs=True))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self.selected.clear()

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.selected[path] = routed_arguments(args, kwargs)[1]

        return hook

    def is_routed(self, path: str) -> bool:
        """Return whether the linear belongs to a routed expert."""
        return bool(self.linears[path].experts)

    def unpadded_expert_rows(self, path: str, x_MX: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Return the rows of real tokens among the rows of an expert's linear.

        mask_BT: mask of the call's samples, which may be followed by those of others.
        """
        linear = self.linears[path]
        if mask_BT is None:
            return x_MX
        chosen_N = (self.selected[linear.experts] == linear.expert).any(1)
        real_N = mask_BT.to(chosen_N.device).bool().flatten()[: len(chosen_N)]
        return x_MX if len(real_N) != len(chosen_N) else x_MX[real_N[chosen_N]]


def routed_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (hidden_states (N, D), top_k_index (N, k), top_k_weights (N, k)) of a call of RoutedExperts."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    x, index, weight = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names))
    return x, index, weight


def shared_weight(size: int, like: Tensor) -> Tensor:
    """Return a weight (size + 1, size) without memory, for moments of an input that belong to no single matrix."""
    return like.new_zeros(1, 1).expand(size + 1, size)


def scale_rows(rows_MX: Tensor, other_MX: Tensor, weight_M1: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors times the weights; the same tensor twice if they are the same."""
    scaled_MX = rows_MX * weight_M1
    return scaled_MX, scaled_MX if other_MX is rows_MX else other_MX * weight_M1


def real_tokens(rows_NX: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Return the rows of real tokens of a tensor (N, ..) whose rows are the tokens of (B, T), N = B T."""
    if mask_BT is None or len(rows_NX) != mask_BT.numel():
        return rows_NX
    return rows_NX[mask_BT.to(rows_NX.device).bool().flatten()]
