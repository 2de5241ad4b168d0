"""Samples for initializing a mixer in place of softmax attention, and the temporary swap of an attention module.

A mixer must reproduce the original attention on the outputs of the converted layers below it. So a sample holds the
inputs from the converted model and, as the target, the outputs of the original heads on inputs from the original model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.layer_runner import LayerCall, StopForward
from surgery.checkpoint.meta_model import MetaModel
from surgery.mixers import AttentionShape, Mixer, MixerInputs, MixerState
from surgery.planning.attention_plan import AttentionTarget

CAPTURE_NAME = "surgery-head-outputs"  # attention function that records the outputs of the function it stands for


@dataclass
class AttentionSample:
    """One calibration sample of an attention module (B = 1), without padding.

    inputs: of the mixer, with q and k after or before RoPE. teacher: of the original attention, with q and k after
    RoPE. target_BHTV: the outputs of the original heads, before the output projection.
    """

    inputs: MixerInputs
    teacher: MixerInputs
    target_BHTV: Tensor


class CapturingMixer(Mixer):
    """A mixer that stores its inputs in `captured` and stops the forward pass. rotated: read q and k after RoPE."""

    reads_mask = True

    def __init__(self, shape: AttentionShape, rotated: bool):
        super().__init__(None, shape)
        self.rotated = rotated
        self.captured: MixerInputs | None = None

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Store the inputs and raise StopForward."""
        self.captured = inputs
        raise StopForward


def without_padding(inputs: MixerInputs) -> MixerInputs:
    """Return the inputs of one row with its real tokens alone, in order, and no padding mask.

    A row of padding alone stays as it is.

    So no initialization sees padding: not in lengths, positions or means over tokens.
    """
    if inputs.valid_BT is None or not bool(inputs.valid_BT.any()):
        return inputs
    index_N = inputs.valid_BT[0].nonzero()[:, 0]
    selected = replace(inputs.at_tokens(index_N), valid_BT=None)
    if selected.mask_BHTS is not None:
        selected.mask_BHTS = selected.mask_BHTS[..., index_N]
    return selected


@contextmanager
def attention_replaced(module: Any, mixer: Mixer) -> Iterator[None]:
    """Replace the attention of `module` by `mixer` inside the context; its projections stay as they are."""
    from surgery.modeling.attention import attach_mixer

    before = type(module), module.config
    attach_mixer(module, mixer)
    try:
        yield
    finally:
        del module.mixer, module.host
        module.__class__, module.config = before


@contextmanager
def all_attention_replaced(meta_model: MetaModel, mixers: dict[str, Mixer]) -> Iterator[None]:
    """Replace the attention of several modules, by path, inside the context."""
    with ExitStack() as stack:
        for path, mixer in mixers.items():
            stack.enter_context(attention_replaced(meta_model.module(path), mixer))
        yield


class AttentionSamples:
    """A sequence of AttentionSample, computed on demand from the rows of a layer's call; an index past the end wraps.

    rows: rows of the batch that hold the original model's hidden states. converted_offset: distance from such a row to
    the row of the same sample in the converted model (0: use the original model's inputs). rotated: whether the mixer
    reads q and k after RoPE.
    """

    def __init__(
        self,
        meta_model: MetaModel,
        call: LayerCall,
        target: AttentionTarget,
        rows: range,
        *,
        converted_offset: int,
        rotated: bool,
    ):
        self.meta_model, self.call, self.target = meta_model, call, target
        self.rows, self.converted_offset, self.rotated = rows, converted_offset, rotated

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[AttentionSample]:
        return (self[i] for i in range(len(self)))

    @torch.no_grad()
    def __getitem__(self, i: int) -> AttentionSample:
        row = self.rows[i % len(self)]
        teacher = self._inputs(row + self.converted_offset, True)
        inputs = teacher if self.rotated else self._inputs(row + self.converted_offset, False)
        target_BHTV, valid_BT = self._head_outputs(row), teacher.valid_BT
        if valid_BT is not None and bool(valid_BT.any()):
            target_BHTV = target_BHTV[:, :, valid_BT[0]]
        return AttentionSample(without_padding(inputs), without_padding(teacher), target_BHTV)

    def _inputs(self, row: int, rotated: bool) -> MixerInputs:
        capture = CapturingMixer(self.target.shape, rotated)
        with attention_replaced(self.meta_model.module(self.target.path), capture):
            run_until_stop(self.call, row)
        assert capture.captured is not None
        return capture.captured

    def output_OI(self) -> Tensor:
        """Return the weight of the output projection, (O, I)."""
        module = self.meta_model.module(self.target.output)
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight if isinstance(module, nn.Linear) else weight.mT

    def _head_outputs(self, row: int) -> Tensor:
        """Return the outputs of the original heads, (1, H, T, V)."""
        captured: list[Tensor] = []
        with head_outputs_captured(self.meta_model.module(self.target.path), captured):
            run_until_stop(self.call, row)
        return captured[0].transpose(1, 2)


_captures: list[
    tuple[Any, list[Tensor]]
] = []  # (attention function, its outputs) of the contexts of head_outputs_captured


@contextmanager
def head_outputs_captured(module: Any, captured: list[Tensor]) -> Iterator[None]:
    """Append the output (B, T, H, V) of the module's attention function to `captured` inside the context, and raise
    StopForward.

    The input of the output projection is not always that: some families multiply it by a gate first.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AttentionInterface.register(CAPTURE_NAME, _capture_heads)
    before = module.config
    default = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    function = ALL_ATTENTION_FUNCTIONS.get_interface(before._attn_implementation, default)
    module.config = copy.copy(before)
    module.config._attn_implementation_internal = CAPTURE_NAME
    _captures.append((function, captured))
    try:
        yield
    finally:
        _captures.pop()
        module.config = before


def _capture_heads(*args: Any, **kwargs: Any) -> Any:
    function, captured = _captures[-1]
    captured.append(function(*args, **kwargs)[0])
    raise StopForward


def run_until_stop(call: LayerCall, row: int) -> None:
    """Run one row through the layer until a hook raises StopForward."""
    try:
        call.apply(row, row + 1)
    except StopForward:
        return
    raise AssertionError(f"the forward of {call.path} must reach the hooked module (it returned before)")
