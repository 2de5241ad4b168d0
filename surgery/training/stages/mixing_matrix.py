"""Distance between the student's token-mixing matrices and the teacher's softmax(Q K^T), in squared Frobenius norm.

    loss = mean over heads of |W - W*|_F^2 / |W*|_F^2        W: A . M of a mixer, softmax's for layers that were not converted

This is MOHAWK's first stage, "matrix orientation" (Bick et al. 2024, section 4.1: min |TeacherMixer(u) -
StudentMixer(u)|_F over the same inputs u), squared and relative like the losses it is added to. The input of an
attention module's output projection is linear in the values, O = W V. For any mixer, W is therefore applied to chosen
values V by replacing the values in the forward pass of the module; neither matrix is materialized:

    columns     columns of the identity, V at a time: the exact loss, T / V calls
    probes      random signs z: E |(W - W*) z|^2 = |W - W*|_F^2 (Hutchinson 1989), probes / V calls

A norm over a head's output is not linear and is left out of W. With a convolution of the values or a gate, W differs
from value to value; the loss is the mean over them.

B: batch, T: tokens, H: heads, G: value heads, V: dimension of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.attention import attention_shape, output_path, require_architecture
from surgery.core.errors import SurgeryError
from surgery.training.data.readers import derive_seed
from surgery.training.stages.base import Batch

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a module's call


@dataclass(frozen=True)
class MixingProbe:
    """Applies the token-mixing matrix of one attention module to chosen values.

    source: path of the linear that computes the values; reader: path of the output projection; heads, groups: number of
    query and of value heads; value: dimension of a value; layout: position of the values in the output of `source`.
    """

    model: Any
    path: str
    source: str
    reader: str
    heads: int
    groups: int
    value: int
    layout: str

    @classmethod
    def from_model(cls, model: Any, path: str) -> MixingProbe:
        """Find the projections of the attention module at `path`."""
        shape, architecture = attention_shape(model, path), require_architecture(model)
        modules = dict(model.named_modules())
        layouts = {f"{path}.{end}": "whole" for end in architecture.value.split("|") if end}
        layouts |= {f"{path}.{f.path}": f.layout for f in architecture.fused if f.roles[-1] == "attention.value"}
        source = next((path for path in layouts if path in modules), None)
        if source is None:
            raise SurgeryError(
                f"stage align: matrix_weight needs a projection that computes values, which {path} lacks. Set it to 0."
            )
        reader = output_path(model, path)
        return cls(
            model,
            path,
            source,
            reader,
            heads=shape.heads,
            groups=shape.groups,
            value=shape.value,
            layout=layouts[source],
        )

    def mix_values(self, call: CallArguments, given_BTV: Tensor) -> Tensor:
        """Return W V of every head, (B, T, H, V), for the values given (B, T, V). call: arguments of the module's
        call.
        """
        read: list[Tensor] = []

        def values(_: Any, args: Any, out: Tensor) -> Tensor:
            return self._replace_values(given_BTV.to(out.device, out.dtype), out)

        def record_input(_: Any, args: tuple[Any, ...]) -> None:
            read.append(args[0])

        module = self.model.get_submodule(self.path)
        with ExitStack() as stack:
            stack.callback(self.model.get_submodule(self.source).register_forward_hook(values).remove)
            stack.callback(self.model.get_submodule(self.reader).register_forward_pre_hook(record_input).remove)
            stack.enter_context(norm_disabled(getattr(module, "mixer", None)))
            module.forward(*call[0], **call[1])
        return read[0].unflatten(-1, (self.heads, self.value))

    def _replace_values(self, given_BTV: Tensor, out_BTX: Tensor) -> Tensor:
        """Return the output of the linear with its values replaced by the given ones."""
        every_BTGV = given_BTV.unsqueeze(2).expand(-1, -1, self.groups, -1)
        if self.layout == "whole":
            return every_BTGV.flatten(2)
        if self.layout == "per_head":  # q, k, v of a head side by side
            projected = out_BTX.unflatten(-1, (self.groups, -1))
            return torch.cat([projected[..., : -self.value], every_BTGV], dim=-1).flatten(2)
        return torch.cat([out_BTX[..., : -self.groups * self.value], every_BTGV.flatten(2)], dim=-1)


@contextmanager
def norm_disabled(mixer: Any) -> Iterator[None]:
    """Remove the mixer's output norm, if it has one, for the duration of the context."""
    norm = getattr(mixer, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        yield
        return
    mixer.norm = None
    try:
        yield
    finally:
        mixer.norm = norm


class MatrixComparison:
    """Compares the mixing matrices of student and teacher modules. probes: number of random sign vectors; None: all
    columns.
    """

    def __init__(self, student: Any, teacher: Any, paths: list[str], probes: int | None, seed: int = 0):
        self.pairs = {
            path: (MixingProbe.from_model(student, path), MixingProbe.from_model(teacher, path)) for path in paths
        }
        self.probes, self.seed = probes, seed
        self._indices: tuple[Any, list[int]] = (None, [])

    def value_factories(self, batch: Batch, value: int) -> list[Callable[[], Tensor]]:
        """Return one function per call that makes its values (B, T, V) on the CPU; they depend only on the example's
        index.
        """
        B, T = batch["input_ids"].shape
        if self.probes is None:
            return [partial(_identity_columns, B, T, first, value) for first in range(0, T, value)]
        if self._indices[0] is not batch["index"]:  # tolist() synchronizes: once per batch, not per layer
            self._indices = batch["index"], batch["index"].tolist()
        indices = self._indices[1]
        calls = range(-(-self.probes // value))
        return [partial(self._signs, indices, T, value, call) for call in calls]

    def _signs(self, indices: list[int], T: int, value: int, call: int) -> Tensor:
        rows = []
        for index in indices:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "probes", index, call))
            rows.append(torch.randint(0, 2, (T, value), generator=generator, dtype=torch.int8) * 2 - 1)
        return torch.stack(rows).float()

    def _call_weight(self, value: int) -> float:
        """Return the weight of one call's sum of squares in |W|_F^2."""
        return 1.0 if self.probes is None else 1.0 / (-(-self.probes // value) * value)

    @torch.no_grad()
    def mean_squares(self, path: str, call: CallArguments, batch: Batch, valid_BT1: Tensor) -> Tensor:
        """Return the mean over tokens and heads of |W*_t|^2, the squared norm of a row of the teacher's matrix (a
        scalar).
        """
        _, theirs = self.pairs[path]
        total = torch.zeros((), device=valid_BT1.device)
        for make_values in self.value_factories(batch, theirs.value):
            wide = theirs.mix_values(call, make_values()).float().square().sum(-1).mean(-1, keepdim=True)
            total += (wide.to(valid_BT1.device) * valid_BT1).sum() * self._call_weight(theirs.value)
        return (total / valid_BT1.sum()).clamp_min(1e-12)

    def relative_error_sum(
        self, path: str, call: CallArguments, teacher_call: CallArguments, batch: Batch, valid_BT1: Tensor, size: Tensor
    ) -> Tensor:
        """Return the sum over tokens of |W_t - W*_t|^2 / size.

        Each call is checkpointed: one at a time is held in memory.
        """
        from torch.utils.checkpoint import checkpoint

        ours, theirs = self.pairs[path]
        device = valid_BT1.device

        def of_call(make_values: Callable[[], Tensor]) -> Tensor:
            values = make_values().to(device)
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                target = theirs.mix_values(teacher_call, values).to(device)
            gap = ours.mix_values(call, values).float() - target.float()
            return (gap.square().sum(-1).mean(-1, keepdim=True) * valid_BT1).sum()

        sums = [
            checkpoint(of_call, make_values, use_reentrant=False)
            for make_values in self.value_factories(batch, ours.value)
        ]
        return torch.stack(sums).sum() * self._call_weight(ours.value) / size.to(device)


def _identity_columns(B: int, T: int, first: int, value: int) -> Tensor:
    """Return columns first .. first + value of the T x T identity, zero padded, (B, T, V)."""
    given_TV = torch.zeros(T, value)
    count = min(value, T - first)
    given_TV[first : first + count, :count] = torch.eye(count)
    return given_TV.expand(B, -1, -1)
