"""Weights of tokens by how much their prediction needs distant context.

    w_t = (1 + a KL(p_t || r_t)) / mean over the row of (1 + a KL(p || r))

p_t: the original's distribution of the next token. r_t: the same with the attention of every layer cut to the last
`window` and the first `sinks` tokens of the document. A token that the near context predicts has the lowest weight. The
mean is taken over the counted positions of a row, so that weights do not depend on how rows are divided into
micro-batches and over devices.

The cut is an additive mask, given to every attention module of the original by a hook: the weights are not copied.
`choose_by: measured` of hybrids weights tokens by the same divergence (surgery.conversion.restored), computed layer by
layer.

B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.attention import attention_paths, attention_shape
from surgery.core.errors import SurgeryError
from surgery.modeling.cache import mixer_modules

MASKED_IMPLEMENTATIONS = ("sdpa", "eager")  # attention implementations that add a mask (B, 1, T, T) to the scores


def near_tokens(position_BT: Tensor, window: int, sinks: int, own_window: int | None = None) -> Tensor:
    """Return which tokens s are visible to token t, (B, 1, T, T) bool: those of its document among the last `window`, t
    included, and the first `sinks`.

    position_BT: positions, which restart at 0 in each document of a row. own_window: the module's own sliding window in
    tokens, which limits both.
    """
    document_BT = (position_BT == 0).cumsum(1)
    place_T = torch.arange(position_BT.shape[1], device=position_BT.device)
    distance_TT = place_T[:, None] - place_T
    seen_TT = distance_TT >= 0
    if own_window is not None:
        seen_TT = seen_TT & (distance_TT < own_window)
    near_BTT = (distance_TT < window) | (position_BT[:, None] < sinks)
    return (seen_TT & near_BTT & (document_BT[:, :, None] == document_BT[:, None]))[:, None]


class NearTeacher:
    """The original with its attention cut to the last `window` and the first `sinks` tokens.

    Raises SurgeryError if the original cannot be given a mask: it has mixers, or an attention implementation without
    masks.
    """

    def __init__(self, teacher: Any, window: int, sinks: int):
        self.teacher, self.window, self.sinks = teacher, window, sinks
        if any(True for _ in mixer_modules(teacher)):
            raise SurgeryError(
                "stage distill: far_weight cuts the teacher's softmax attention, and this teacher has mixers. Give the "
                "checkpoint that the student was converted from, or set far_weight to 0."
            )
        implementation = teacher.config._attn_implementation
        if implementation not in MASKED_IMPLEMENTATIONS:
            raise SurgeryError(
                f"stage distill: far_weight needs a teacher with attention {' or '.join(MASKED_IMPLEMENTATIONS)} "
                f"(got {implementation}), which reads a mask. Set far_weight to 0 with this implementation."
            )
        self.own_windows = {path: attention_shape(teacher, path).window for path in attention_paths(teacher)}

    @contextmanager
    def cut(self, position_BT: Tensor) -> Iterator[None]:
        """Within the context, the teacher's attention modules see near tokens only. position_BT: as in
        `near_tokens`.
        """
        masks = {
            model_window: near_tokens(position_BT, self.window, self.sinks, model_window)
            for model_window in dict.fromkeys(self.own_windows.values())
        }
        handles = [
            self.teacher.get_submodule(path).register_forward_pre_hook(
                self._hook(masks[model_window]), with_kwargs=True
            )
            for path, model_window in self.own_windows.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _hook(visible_B1TT: Tensor) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "attention_mask" not in kwargs:
                raise SurgeryError(
                    f"stage distill: far_weight cannot cut {type(module).__name__}, which gets no argument "
                    "attention_mask by "
                    "name. Set far_weight to 0."
                )
            x_BTD = args[0] if args else kwargs["hidden_states"]
            visible = visible_B1TT.to(x_BTD.device)
            least = torch.finfo(x_BTD.dtype).min
            mask = torch.zeros(visible.shape, dtype=x_BTD.dtype, device=x_BTD.device).masked_fill(~visible, least)
            return args, {**kwargs, "attention_mask": mask}

        return hook


def token_weights(gap_BT: Tensor, counts_BT: Tensor, far_weight: float) -> Tensor:
    """Return the weights of the counted positions, 0 at others, (B, T) float32; their mean over a row's counted
    positions is 1.

    gap_BT: KL(p || r) in nats. counts_BT: whether a position is counted. far_weight: `a` of the module's formula.
    """
    counts_BT = counts_BT.float()
    weight_BT = (1 + far_weight * gap_BT.clamp_min(0)) * counts_BT
    return weight_BT * counts_BT.sum(1, keepdim=True) / weight_BT.sum(1, keepdim=True).clamp_min(1e-12)
