"""Calibration samples of a live model: texts, a data set, batches of inputs, or a function that runs the model.

Every form becomes keyword arguments of the model's forward with the batch as first axis, as `surgery convert` reads
them from a text or from a .safetensors file.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import (
    CALIBRATION_SUFFIXES,
    HUB_DATASET,
    count_rows,
    document_stream,
    load_input_tensors,
    text_inputs,
)
from surgery.calibration.pairs import pair_inputs, read_pairs
from surgery.conversion.sources import CalibrationInputs
from surgery.conversion.whole_module import forward_parameters
from surgery.core.errors import SurgeryError
from surgery.planning.recipe import ConversionRecipe

FORMS = (
    "texts, a datasets.Dataset, batches of inputs (dicts of tensors), a function of the model, or the path of a file"
)
IGNORED = ("labels", "label", "label_ids", "use_cache", "return_dict", "output_attentions", "output_hidden_states")


def live_inputs(
    model: nn.Module, calibration: Any, recipe: ConversionRecipe, config: Any, tokenizer: Any
) -> CalibrationInputs:
    """Return the calibration samples of any form (FORMS). config: the model's.

    A path or Hub id is read as `surgery convert` reads it. A function is called with the model, or without arguments if
    it takes none; it returns any other form, or nothing: then the inputs that it called the model with are used.
    """
    if isinstance(calibration, (str, os.PathLike)):
        return _from_path(os.fspath(calibration), recipe, config, tokenizer)
    if callable(calibration) and not isinstance(calibration, (Iterable, Mapping)):
        returned, recorded = call_and_record(model, calibration)
        if returned is None:
            return CalibrationInputs(join_batches(recorded, "calibration function"), "(inputs of a function)", False)
        if callable(returned) and not isinstance(returned, (Iterable, Mapping)):
            raise _form_error(returned)
        return live_inputs(model, returned, recipe, config, tokenizer)
    if isinstance(calibration, Mapping):
        if any(hasattr(value, "column_names") for value in calibration.values()):
            names = ", ".join(map(repr, list(calibration)[:5]))
            raise SurgeryError(
                f"calibration is a dict of data sets ({names}). Give one of them, for example data['train']"
            )
        batch = _batch_tensors(model, calibration, "calibration")
        return CalibrationInputs(join_batches([batch], "calibration"), "(batches)", False)
    if isinstance(calibration, Tensor):
        calibration = [calibration]
    if isinstance(getattr(calibration, "column_names", None), (list, type(None))) and hasattr(calibration, "features"):
        return _from_dataset(model, calibration, recipe, config, tokenizer)
    if not isinstance(calibration, Iterable):
        raise _form_error(calibration)
    items = iter(calibration)
    first = next(items, None)
    if first is None:
        raise SurgeryError(f"calibration is empty (a {type(calibration).__name__} without items). Give {FORMS}")
    items = chain([first], items)
    if isinstance(first, str):
        return _from_texts(items, "(texts)", recipe, config, tokenizer)
    return CalibrationInputs(_read_batches(model, items, calibration, recipe), "(batches)", False)


def _form_error(value: Any) -> SurgeryError:
    return SurgeryError(f"calibration must be {FORMS} (got a {type(value).__name__}: {str(value)[:80]!r})")


# -- text ------------------------------------------------------------------------------------------
def _from_path(text: str, recipe: ConversionRecipe, config: Any, tokenizer: Any) -> CalibrationInputs:
    is_name = len(text) < 1000 and "\n" not in text
    if is_name and Path(text).suffix == ".safetensors":
        return CalibrationInputs(load_input_tensors(Path(text)), text, False)
    if not is_name or not (Path(text).is_file() or HUB_DATASET.fullmatch(text) or text.endswith(CALIBRATION_SUFFIXES)):
        raise SurgeryError(
            f"calibration {text[:60]!r} is neither a file nor a Hub data set (org/name). To calibrate on a text "
            "itself, put it into a "
            "list: calibration=[text]"
        )
    notes: list[str] = []
    if text.endswith(".jsonl") and getattr(config, "is_encoder_decoder", False) and tokenizer is not None:
        pairs = read_pairs(Path(text), notes)
        if pairs is not None:
            return CalibrationInputs(
                pair_inputs(pairs, tokenizer, recipe.tokens, recipe.length, text), text, True, notes
            )
    return _from_texts(document_stream(text, notes, tokenizer), text, recipe, config, tokenizer, notes=notes)


def _from_texts(
    texts: Iterable[Any],
    label: str,
    recipe: ConversionRecipe,
    config: Any,
    tokenizer: Any,
    *,
    notes: list[str] | None = None,
) -> CalibrationInputs:
    if tokenizer is None:
        raise SurgeryError(
            "calibration texts need the model's tokenizer: surgery.apply(model, recipe, calibration=texts, "
            "tokenizer=tokenizer)"
        )
    if not callable(tokenizer):
        raise SurgeryError(
            f"tokenizer must be a tokenizer of transformers (got a {type(tokenizer).__name__}: "
            f"{str(tokenizer)[:80]!r}). Load it with "
            "AutoTokenizer.from_pretrained"
        )
    notes = [] if notes is None else notes
    tensors = text_inputs(
        _check_texts(texts), tokenizer, config, recipe.tokens, recipe.length, where=label, notes=notes
    )
    return CalibrationInputs(tensors, label, True, notes)


def _check_texts(texts: Iterable[Any]) -> Iterator[str]:
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise SurgeryError(f"calibration: item {i} must be a text like the first one (got a {type(text).__name__})")
        yield text


def _from_dataset(
    model: nn.Module, rows: Any, recipe: ConversionRecipe, config: Any, tokenizer: Any
) -> CalibrationInputs:
    """Read the column "text", else the first column of texts; without one, columns that the model's forward takes."""
    items = iter(rows)
    first = next(items, None)
    if not isinstance(first, Mapping):
        raise SurgeryError(f"calibration: the {type(rows).__name__} has no rows. Give {FORMS}")
    items = chain([first], items)
    texts = [name for name, value in first.items() if isinstance(value, str)]
    if texts:
        column = "text" if "text" in texts else texts[0]
        column_texts = (row[column] for row in items if isinstance(row.get(column), str))
        return _from_texts(column_texts, "(data set)", recipe, config, tokenizer)
    taken = {p.name for p in forward_parameters(model)}
    names = [name for name in first if name in taken and name not in IGNORED]
    if not names:
        raise SurgeryError(
            f"calibration: the data set has no column of texts and none that {type(model).__name__} takes; its "
            "columns: "
            f"{', '.join(map(str, first))}"
        )
    batches = ({name: _to_tensor(row[name], name)[None] for name in names} for row in items)
    return CalibrationInputs(_read_batches(model, batches, rows, recipe), "(data set)", False)


# -- batches ---------------------------------------------------------------------------------------
def _read_batches(model: nn.Module, items: Iterable[Any], source: Any, recipe: ConversionRecipe) -> dict[str, Tensor]:
    """Join batches. Lists and tuples are used whole; of other iterables as many batches as give `tokens` of the
    recipe.
    """
    batches: list[dict[str, Tensor]] = []
    tokens = 0
    for i, item in enumerate(items):
        batches.append(_batch_tensors(model, item, f"calibration batch {i}"))
        first = next(iter(batches[-1].values()))
        tokens += first.shape[0] * (first.shape[1] if first.dim() == 2 and not first.is_floating_point() else 1)
        if tokens >= recipe.tokens and not isinstance(source, (list, tuple)):
            break
    return join_batches(batches, "calibration")


def _batch_tensors(model: nn.Module, item: Any, where: str) -> dict[str, Tensor]:
    """Return one batch by argument name.

    A tensor, or a tuple of tensors, is passed to the first parameters of the forward.
    """
    if isinstance(item, (Tensor, tuple, list)):
        values = [item] if isinstance(item, Tensor) else list(item)
        names = [p.name for p in forward_parameters(model)]
        if len(values) > len(names):
            raise SurgeryError(
                f"{where} has {len(values)} tensors, the forward of {type(model).__name__} takes {len(names)} "
                "arguments by name "
                f"({', '.join(names) or 'none'}). Give dicts of tensors"
            )
        item = dict(zip(names, values))
    if not isinstance(item, Mapping):
        raise SurgeryError(f"{where} must be a dict of tensors (got a {type(item).__name__}: {str(item)[:80]!r})")
    tensors: dict[str, Tensor] = {}
    reads_labels = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    for name, value in item.items():
        if value is None or (name in IGNORED and not (name == "labels" and reads_labels)):
            continue
        if name in ("past_key_values", "cache", "encoder_outputs"):
            raise SurgeryError(f"{where} has {name!r}: calibration needs whole inputs, not the steps of generate()")
        tensors[name] = _to_tensor(value, f"{where}: {name!r}")
    if not tensors or not _has_rows(tensors):
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        raise SurgeryError(f"{where}: every tensor needs the batch as its first axis, of one length (got {shapes})")
    return tensors


def _has_rows(batch: dict[str, Tensor]) -> bool:
    """Return whether the first axis of every tensor is the batch, or (patches of images beside token ids) a multiple of
    it.
    """
    try:
        return count_rows(batch, "") > 0
    except SurgeryError:
        return False


def _to_tensor(value: Any, where: str) -> Tensor:
    """Return a tensor on the CPU: integers as int64, floating point as float32.

    Raises SurgeryError for other values.
    """
    if isinstance(value, Tensor) and value.is_meta:
        raise SurgeryError(f"{where} is on the meta device and holds no values")
    try:
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise SurgeryError(
            f"{where} must be a tensor (got a {type(value).__name__}: {str(value)[:80]!r}); tokenizers return tensors "
            "with "
            "return_tensors='pt', padding=True"
        ) from None
    if tensor.is_floating_point():
        if not bool(torch.isfinite(tensor).all()):
            raise SurgeryError(f"{where} holds NaN or Inf; calibration inputs must be finite")
        return tensor.float()
    return tensor if tensor.dtype == torch.bool else tensor.long()


def join_batches(batches: Sequence[dict[str, Tensor]], where: str) -> dict[str, Tensor]:
    """Concatenate batches along the first axis. Batches of token ids of several lengths are padded at the end.

    Padding needs an attention mask, which is 0 there.
    """
    if not batches:
        raise SurgeryError(f"{where}: the model was not called. Call model(**batch) in it, or return the batches")
    names = set(batches[0])
    for i, batch in enumerate(batches):
        if set(batch) != names:
            raise SurgeryError(f"{where}: batch {i} has the inputs {sorted(batch)}, batch 0 has {sorted(names)}")
    shapes = {name: {tuple(batch[name].shape[1:]) for batch in batches} for name in names}
    unequal = {name: sorted(row_shapes) for name, row_shapes in shapes.items() if len(row_shapes) > 1}
    if unequal and not _can_pad(batches[0], unequal):
        name = sorted(unequal)[0]
        raise SurgeryError(
            f"{where}: {name!r} has rows of shapes {', '.join(map(str, unequal[name][:4]))}; they must be equal, or "
            "token ids with "
            "an attention_mask, which are then padded"
        )
    if unequal:
        length = max(shape[0] for shape in shapes["attention_mask"])
        batches = [{name: _pad(x, length) if name in unequal else x for name, x in batch.items()} for batch in batches]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _can_pad(batch: dict[str, Tensor], unequal: Mapping[str, Any]) -> bool:
    mask = batch.get("attention_mask")
    whole = mask is not None and all(batch[n].dim() == 2 and not batch[n].is_floating_point() for n in unequal)
    return whole and "attention_mask" in unequal and all(batch[n].shape == mask.shape for n in unequal)  # type: ignore[union-attr]


def _pad(x_BT: Tensor, length: int) -> Tensor:
    return nn.functional.pad(x_BT, (0, length - x_BT.shape[1]))


# -- functions -------------------------------------------------------------------------------------
def call_and_record(model: nn.Module, function: Callable[..., Any]) -> tuple[Any, list[dict[str, Tensor]]]:
    """Call the function with the model; return (its result, the inputs of each call of the model's forward)."""
    recorded: list[dict[str, Tensor]] = []
    names = [p.name for p in forward_parameters(model)]

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > len(names):
            raise SurgeryError(
                f"calibration function: {type(model).__name__} takes {len(names)} arguments by name, got {len(args)}"
            )
        recorded.append(_batch_tensors(model, {**dict(zip(names, args)), **kwargs}, "calibration function"))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad():
            returned = function(model) if _takes_argument(function) else function()
    finally:
        handle.remove()
    return returned, recorded


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a function without a signature
        return True
    return True
