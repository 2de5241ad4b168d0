"""Tuning: train the new parameters of converted layers by Adam, on the calibration text alone (block reconstruction).

    surgery.conversion.tune_layer     one layer, towards the output of the original layer (AA-SVD, arXiv 2604.02119)
    surgery.conversion.tune_model     all layers, towards the original's logits

Trained are the cores of structured linears and the parameters of mixers, and if asked for, norms and biases of the
original (surgery.conversion.norms). A step of Adam moves a tensor by at most about `rate` times its root mean square,
so that one scale of rates suits cores of every structure and size. Pivoted low rank makes its steps in the coordinates
of two balanced factors (`step_coordinates`), since its stored values are badly scaled for them. The rate is found for
each tuning: every rate of RATES runs a short trial, and the one with the lowest loss on the held-out rows is used. It
falls with a cosine over the epochs. After an epoch that does not lower the held-out loss, the values return to those of
the best epoch and the rate is halved. If no trial lowers the loss, the values stay as they were.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from surgery.calibration.attention_samples import all_attention_replaced
from surgery.checkpoint.meta_model import MetaModel, set_module_tensor
from surgery.checkpoint.safetensors_io import DTYPES
from surgery.checkpoint.table import is_pruned
from surgery.conversion.norms import swapped_parameters, weight_offset
from surgery.conversion.replacement import LayerReplacement, stored_module_name, swapped_modules
from surgery.modeling.joined import JoinedLinear
from surgery.structures import StructuredLinear
from surgery.structures.coordinates import Coordinates

RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # movement of a tensor per step, relative to its root mean square
TRIAL_STEPS = 8  # Adam steps of the trial of one rate
BATCH_TOKENS = 1024  # tokens of one step, in whole rows
# From so many tokens on, a step has LARGE_FACTOR times as many, and a trial as many more steps: a short one tells
# little about a long training.
LARGE_TEXT, LARGE_FACTOR = 2**16, 4
MIN_STEPS = 4  # fewest steps of an epoch: a short text is cut into smaller batches
MIN_SCALE = (
    1e-3  # root mean square that a tensor counts with at least, for those that start at zero; but see `step_scale`
)
FAILED_FACTOR = 0.5  # on the rate after an epoch that did not lower the held-out loss
MAX_FAILED = 4  # such epochs in a row that end a tuning
BETAS, EPSILON = (0.9, 0.95), 1e-12

Allocate = Callable[[Tensor], Tensor]  # returns an uninitialized tensor like its argument, in memory or in a file


@dataclass(frozen=True)
class TuningRecord:
    """The report's entry of one tuning.

    unit: of `start` and `end`, the losses on the held-out rows before and after it. rate: the rate of the trial that
    won, 0 if none lowered the loss. epoch: the epoch whose values were kept, 0 for the values before it. epochs: of the
    training.
    """

    unit: str
    start: float
    end: float
    rate: float
    epoch: int
    epochs: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in the report; numbers that are not finite become None."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass
class _TrainedTensor:
    """One trained tensor. module, leaf: where it belongs. original: its name in the original model, "" if its module is
    a new one. stored: dtype in the files. value: in float32. saved: the values to return to. coordinates: in which
    steps are made, None if in the values. first, second: Adam's moments, and scale: root mean square of the values
    before the training, in the coordinates. parameter: of an original's tensor the parameter that is swapped in, None
    outside of steps.
    """

    module: nn.Module
    leaf: str
    original: str
    stored: torch.dtype
    value: Tensor
    saved: Tensor
    first: Tensor
    second: Tensor
    scale: float
    coordinates: Coordinates | None = None
    parameter: nn.Parameter | None = None


class TrainedLayer:
    """The new parameters of one converted layer (or of the head) while they are trained.

    stored: dtype of each tensor in the files, by name; that of the source for others. kept: norms and biases of the
    original that are trained too, parameter -> name in the files. tensors: by the same names.
    """

    def __init__(
        self,
        meta_model: MetaModel,
        path: str,
        replacement: LayerReplacement,
        stored: Mapping[str, torch.dtype],
        allocate: Allocate = torch.empty_like,
        original_names: Mapping[str, str] | None = None,
    ):
        self.meta_model, self.path, self.replacement, self.steps = meta_model, path, replacement, 0
        self.tensors: dict[str, _TrainedTensor] = {}
        by_module: dict[nn.Module, dict[str, Coordinates]] = {}
        for name, (module, leaf, original) in trained_parameters(meta_model, replacement, original_names or {}).items():
            if module not in by_module:
                by_module[module] = _step_coordinates(module, allocate)
            value = replacement.originals[original] if original else module.get_parameter(leaf).detach()
            current, saved = (allocate(value).copy_(value) for _ in range(2))
            first, second = (allocate(value).zero_() for _ in range(2))
            coordinates = by_module[module].get(leaf)
            stepped = value if coordinates is None else coordinates.to(value.device).of(value)
            if original and leaf == "weight":
                stepped = stepped + weight_offset(module)
            scale = step_scale(module, leaf, stepped)
            dtype = stored[name] if name in stored else DTYPES[meta_model.source.tensors[name].dtype]
            self.tensors[name] = _TrainedTensor(
                module, leaf, original, dtype, current, saved, first, second, scale, coordinates
            )

    @property
    def count(self) -> int:
        """The number of trained values."""
        return sum(tensor.value.numel() for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the tensors in the files, by name."""
        return {name: tensor.stored for name, tensor in self.tensors.items()}

    def parameters(self, device: torch.device, *, trained: bool) -> list[Tensor]:
        """Put the values into the modules, on `device`, and return them as leaves of autograd.

        Tensors of the original are put there by `swapped_in`.

        trained: whether they require gradients; if not, they are rounded to the dtype of the files, as they will be
        loaded.
        """
        leaves: list[Tensor] = []
        for tensor in self.tensors.values():
            value = tensor.value if trained else tensor.value.to(tensor.stored).float()
            if tensor.original:
                tensor.parameter = nn.Parameter(value.to(device), requires_grad=trained)
                leaves.append(tensor.parameter)
                continue
            set_module_tensor(tensor.module, tensor.leaf, value.to(device))
            leaves.append(tensor.module.get_parameter(tensor.leaf).requires_grad_(trained))
        return leaves

    @property
    def originals(self) -> dict[str, Tensor]:
        """The tensors of the original as `parameters` returned them last, by parameter."""
        return {t.original: t.parameter for t in self.tensors.values() if t.parameter is not None}

    def release(self) -> None:
        """Remove the values from the modules."""
        for tensor in self.tensors.values():
            if tensor.original:
                tensor.parameter = None
                continue
            set_module_tensor(tensor.module, tensor.leaf, torch.empty_like(tensor.value, device="meta"))

    @torch.no_grad()
    def update(self, leaves: list[Tensor], gradients: list[Tensor | None], rate: float) -> None:
        """Make one step of Adam. leaves: of `parameters`. rate: of this step, relative to the root mean square."""
        self.steps += 1
        for tensor, leaf, gradient in zip(self.tensors.values(), leaves, gradients):
            if gradient is None:
                continue
            device, steps = leaf.device, [torch.tensor(float(self.steps - 1))]
            first, second = tensor.first.to(device), tensor.second.to(device)
            coordinates = None if tensor.coordinates is None else tensor.coordinates.to(device)
            stepped = leaf if coordinates is None else torch.zeros_like(leaf)
            adam(
                [stepped], [gradient if coordinates is None else coordinates.gradient(gradient)], [first], [second], [], steps,
                foreach=False, amsgrad=False, maximize=False, weight_decay=0.0,
                beta1=BETAS[0], beta2=BETAS[1], lr=rate * tensor.scale, eps=EPSILON,
            )  # fmt: skip
            if coordinates is not None:
                leaf += coordinates.core(stepped)
            for stored, new in ((tensor.value, leaf), (tensor.first, first), (tensor.second, second)):
                if stored.data_ptr() != new.data_ptr():
                    stored.copy_(new)

    @torch.no_grad()
    def save(self) -> None:
        """Save the values, rounded to the dtype of the files."""
        for tensor in self.tensors.values():
            tensor.saved.copy_(tensor.value.to(tensor.stored))

    @torch.no_grad()
    def reset(self) -> None:
        """Return to the saved values, and forget Adam's moments."""
        self.steps = 0
        for tensor in self.tensors.values():
            tensor.value.copy_(tensor.saved)
            tensor.first.zero_()
            tensor.second.zero_()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the layer's replacement into the model inside the context."""
        layer, modules = (
            self.meta_model.module(self.path),
            {**self.replacement.modules, **self.replacement.trained_modules()},
        )
        with (
            swapped_modules(layer, self.path, modules),
            all_attention_replaced(self.meta_model, self.replacement.mixers),
            swapped_parameters(self.meta_model, self.originals),
        ):
            yield

    def finish(self, device: torch.device) -> dict[str, Tensor]:
        """Put the saved values into the modules and the replacement, frozen and on `device`; return them by name, in
        float32.
        """
        self.reset()
        leaves = self.parameters(device, trained=False)
        self.replacement.originals |= {name: tensor.detach() for name, tensor in self.originals.items()}
        return {name: leaf.detach() for name, leaf in zip(self.tensors, leaves)}


def step_scale(module: nn.Module, leaf: str, value: Tensor) -> float:
    """Return the size of a tensor, to which the steps of its training are relative: its root mean square, at least
    MIN_SCALE.

    A core of a structured linear has no least size, if it is not zero: cores of a matrix of small weights are small
    themselves.
    """
    size = float(value.double().square().mean().sqrt())
    is_core = isinstance(module, StructuredLinear) and leaf != "bias"
    return size if is_core and size else max(size, MIN_SCALE)


def _step_coordinates(module: nn.Module, allocate: Allocate) -> dict[str, Coordinates]:
    """Return the coordinates of a structured linear's cores, by core, in tensors of `allocate`; none for other
    modules.
    """
    coordinates = module.step_coordinates() if isinstance(module, StructuredLinear) else {}
    copies: dict[int, Tensor] = {}
    for matrix in (matrix for c in coordinates.values() for matrix in (c.matrix, c.inverse)):
        if id(matrix) not in copies:
            copies[id(matrix)] = allocate(matrix).copy_(matrix)
    return {n: Coordinates(copies[id(c.matrix)], copies[id(c.inverse)], c.on_rows) for n, c in coordinates.items()}


def trained_parameters(
    meta_model: MetaModel, replacement: LayerReplacement, original_names: Mapping[str, str] | None = None
) -> dict[str, tuple[nn.Module, str, str]]:
    """Return the parameters that a tuning trains: name in the files -> (module, name in the module, name in the
    original model).

    original_names: norms and biases of the original that are trained too, parameter -> name in the files. The last name
    is "" for parameters of modules that replace others, biases included.
    """
    original_names = original_names or {}
    parameters: dict[str, tuple[nn.Module, str, str]] = {}
    for path, module in replacement.structured.items():
        base = stored_module_name(meta_model, path)
        for inner, submodule in module.named_modules():
            if isinstance(submodule, (StructuredLinear, JoinedLinear)) or is_pruned(replacement.table.get(path, {})):
                names = [name for name, _ in submodule.named_parameters(recurse=False)]
                names = [name for name in names if name != "bias" or f"{path}.bias" in original_names]
                parameters |= {".".join(filter(None, (base, inner, name))): (submodule, name, "") for name in names}
    for path, mixer in replacement.mixers.items():
        parameters |= {f"{path}.mixer.{name}": (mixer, name, "") for name, _ in mixer.named_parameters()}
    for parameter, stored in original_names.items():
        path, _, leaf = parameter.rpartition(".")
        if path in replacement.structured:
            continue
        if path in replacement.modules:
            parameters[stored] = (replacement.modules[path], leaf, "")
        else:
            parameters[stored] = (meta_model.module(path), leaf, parameter)
    return parameters


class Tuning(ABC):
    """One tuning: trained layers, batches, a loss on each batch, and the loss on the held-out rows.

    layers: what is trained. unit: of the held-out loss. tokens: of the rows that are trained on.
    """

    layers: list[TrainedLayer]
    unit: str
    tokens: int

    @abstractmethod
    def batches(self) -> list[range]:
        """Return the rows of each step of an epoch."""

    @abstractmethod
    def step(self, rows: range, rate: float) -> None:
        """Make one step on these rows."""

    @abstractmethod
    def held_out_loss(self) -> float:
        """Return the loss on the held-out rows with values rounded as they are stored."""

    def run(self, epochs: int, seed: int, done: Callable[[], None] = lambda: None) -> TuningRecord:
        """Find the rate, train, and leave the best values saved in the layers. done: called after each epoch."""
        start = self.held_out_loss()
        rate, trial = 0.0, start
        for candidate in RATES:
            self._train(candidate, TRIAL_STEPS * text_factor(self.tokens), seed)
            if (loss := self.held_out_loss()) < trial:
                rate, trial = candidate, loss
            self._reset()
        best, epoch, failed, in_a_row, order = start, 0, 0, 0, self._order(epochs, seed)
        per_epoch = len(self.batches())
        for i, rows in enumerate(order if rate else []):
            self.step(rows, rate * FAILED_FACTOR**failed * _cosine(i, len(order)))
            if (i + 1) % per_epoch:
                continue
            if (loss := self.held_out_loss()) < best:
                best, epoch, in_a_row = loss, (i + 1) // per_epoch, 0
                for layer in self.layers:
                    layer.save()
            else:
                failed, in_a_row = failed + 1, in_a_row + 1
                self._reset()
            done()
            if in_a_row == MAX_FAILED:
                break
        self._reset()
        return TuningRecord(self.unit, start, best, rate, epoch, epochs)

    def _reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def _train(self, rate: float, steps: int, seed: int) -> None:
        per_epoch = len(self.batches())
        order = self._order(-(-steps // per_epoch), seed)
        for i, rows in enumerate(order[:steps]):
            self.step(rows, rate * _cosine(i, steps))

    def _order(self, epochs: int, seed: int) -> list[range]:
        """Return the batches of all steps: each epoch has every batch once, in an order drawn with the seed."""
        generator, batches = torch.Generator().manual_seed(seed), self.batches()
        return [batches[i] for _ in range(epochs) for i in torch.randperm(len(batches), generator=generator).tolist()]


def _cosine(step: int, steps: int) -> float:
    """Return the factor on the rate: it falls from 1 towards 0."""
    return (1 + math.cos(math.pi * step / steps)) / 2


def split_rows(rows: range, length: int) -> list[range]:
    """Return `rows` in batches of about BATCH_TOKENS tokens, of a large text four times as many; at least MIN_STEPS
    batches if there are as many rows.
    """
    tokens = BATCH_TOKENS * text_factor(len(rows) * length)
    size = max(1, min(tokens // max(1, length), len(rows) // MIN_STEPS))
    return [range(first, min(first + size, rows.stop)) for first in range(rows.start, rows.stop, size)]


def text_factor(tokens: int) -> int:
    """Return the factor on the tokens of a step and on the steps of a trial, for a text of so many tokens."""
    return LARGE_FACTOR if tokens >= LARGE_TEXT else 1
