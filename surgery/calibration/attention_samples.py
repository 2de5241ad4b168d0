"""Attention modules in a stream of layers: a mixer in one's place for a while, and what it is fitted to.

The mixer must make up for the softmax it replaces on the inputs that the converted layers below give, so a window
holds those inputs and, as the target, what the original heads wrote on the original's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.layer_runner import LayerCall, StopForward
from surgery.checkpoint.meta_model import MetaModel
from surgery.mixers import AttentionShape, Mixer, MixerInputs, MixerState
from surgery.modeling.attention import attach_mixer
from surgery.planning.attention_plan import AttentionTarget


@dataclass
class AttentionSample:
    """inputs: q and k as the mixer wants them, after RoPE or before. teacher: after RoPE, always. target_BHTV: what
    the original's heads wrote."""

    inputs: MixerInputs
    teacher: MixerInputs
    target_BHTV: Tensor


class CapturingMixer(Mixer):
    """Keeps what a mixer would be given and leaves the forward."""

    reads_mask = True

    def __init__(self, shape: AttentionShape, rotated: bool):
        super().__init__(None, shape)
        self.rotated = rotated
        self.captured: MixerInputs | None = None

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        self.captured = inputs
        raise StopForward


@contextmanager
def attention_replaced(module: Any, mixer: Mixer) -> Iterator[None]:
    """The attention with that mixer. Its projections stay where and what they are."""
    before = type(module), module.config
    attach_mixer(module, mixer)
    try:
        yield
    finally:
        del module.mixer, module.host
        module.__class__, module.config = before


@contextmanager
def all_attention_replaced(meta_model: MetaModel, mixers: dict[str, Mixer]) -> Iterator[None]:
    with ExitStack() as stack:
        for path, mixer in mixers.items():
            stack.enter_context(attention_replaced(meta_model.module(path), mixer))
        yield


class AttentionSamples:
    """Rows first:last of a layer's call, one after the other, as often as asked; `behind` rows further on lies the
    converted stream (0: the original's inputs)."""

    def __init__(
        self,
        meta_model: MetaModel,
        call: LayerCall,
        target: AttentionTarget,
        first: int,
        last: int,
        converted_offset: int,
        rotated: bool,
    ):
        self.meta_model, self.call, self.target = meta_model, call, target
        self.first, self.last, self.converted_offset, self.rotated = first, last, converted_offset, rotated

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[AttentionSample]:
        return (self[i] for i in range(len(self)))

    @torch.no_grad()
    def __getitem__(self, i: int) -> AttentionSample:
        row = self.first + i % len(self)
        teacher = self._inputs(row + self.converted_offset, True)
        inputs = teacher if self.rotated else self._inputs(row + self.converted_offset, False)
        return AttentionSample(inputs, teacher, self._head_outputs(row))

    def _inputs(self, row: int, rotated: bool) -> MixerInputs:
        capture = CapturingMixer(self.target.shape, rotated)
        with attention_replaced(self.meta_model.module(self.target.path), capture):
            run_until_stop(self.call, row)
        assert capture.captured is not None
        return capture.captured

    def output_OI(self) -> Tensor:
        """The output projection's weight."""
        module: Any = self.meta_model.module(self.target.output)
        return module.weight if isinstance(module, nn.Linear) else module.weight.mT

    def _head_outputs(self, row: int) -> Tensor:
        """(1, H, T, V)"""
        captured: list[Tensor] = []

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            captured.append(args[0])
            raise StopForward

        handle = self.meta_model.module(self.target.output).register_forward_pre_hook(hook)
        try:
            run_until_stop(self.call, row)
        finally:
            handle.remove()
        return captured[0].unflatten(-1, (self.target.shape.heads, -1)).transpose(1, 2)


def run_until_stop(call: LayerCall, row: int) -> None:
    """Run a row until somebody has seen enough."""
    try:
        call.apply(row, row + 1)
    except StopForward:
        return
    raise AssertionError(f"{call.path} never came by")
