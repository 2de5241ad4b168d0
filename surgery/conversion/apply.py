"""Convert a model in memory: `surgery.apply`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from surgery.conversion.convert import Conversion
from surgery.conversion.live_sink import LiveSink
from surgery.conversion.live_source import LiveSource
from surgery.core.device import choose_device
from surgery.core.progress import Progress
from surgery.modeling.live import model_device
from surgery.planning.recipe import ConversionRecipe


def apply(
    model: Any,
    recipe: ConversionRecipe,
    calibration: Any = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Convert a model in place and return it; the report is its attribute `surgery_report`.

    calibration: any form that `live_inputs` reads. device: where layers run; None: that of the weights. scratch: folder
    of temporary files; None: the system's. Raises SurgeryError, and leaves the model as it was.
    """
    began, device = time.perf_counter(), device or str(model_device(model))
    source, sink = LiveSource(model, calibration, tokenizer), LiveSink(model, tokenizer, scratch)
    conversion = Conversion(source, sink, recipe, device=device, progress=progress)
    with _kept_random_state(choose_device(device)):
        conversion.run(began)
    return model


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the global random state afterwards: a conversion sets its own seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
