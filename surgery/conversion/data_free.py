"""Data-free conversion of layers: weights are projected in the Frobenius norm, and mixers keep their untrained
initialization."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from surgery.conversion.context import ConversionContext
from surgery.conversion.fit import FitContext, FitResult, fit_linear
from surgery.conversion.fit_shared import fit_shared, targets_by_basis
from surgery.conversion.mixer_init.base import InitializedMixer, build_mixer
from surgery.conversion.replacement import (
    LayerReplacement,
    add_level_weights,
    add_linear,
    add_mixer,
    fold_output,
    stored_dtype,
)
from surgery.core.device import side_stream
from surgery.planning.weights import target_weight


def convert_layers_data_free(
    ctx: ConversionContext, budgets: dict[str, float], layers: list[str]
) -> Iterator[tuple[str, LayerReplacement, float]]:
    """Yield (layer, its replacement, seconds) in order. budgets: parameters for each target, by name.

    On a GPU three layers are converted at a time, because each waits for file reads and for the eigensolver.
    """
    ahead = 3 if ctx.device.type == "cuda" else 1
    with ThreadPoolExecutor(ahead) as pool:
        waiting = deque(pool.submit(_convert_layer, ctx, budgets, path) for path in layers[:ahead])
        for i, path in enumerate(layers):
            yield path, *waiting.popleft().result()
            if i + ahead < len(layers):
                waiting.append(pool.submit(_convert_layer, ctx, budgets, layers[i + ahead]))


def _convert_layer(ctx: ConversionContext, budgets: dict[str, float], path: str) -> tuple[LayerReplacement, float]:
    began, replacement = time.perf_counter(), LayerReplacement()
    model, plan, device = ctx.model, ctx.plan, ctx.device
    with side_stream(device):
        layer_targets = plan.targets_in_layer(path)
        shared: dict[str, FitResult] = {}
        for members in targets_by_basis([targets[0] for targets in layer_targets.values()]).values():
            contexts = [FitContext(stored_dtype=stored_dtype(model, target)) for target in members]
            shared |= fit_shared(members, [target_weight(model, target, device) for target in members], contexts)
        for targets in layer_targets.values():
            fitted = []
            for target in targets:
                if target.basis:
                    fitted.append(shared.pop(target.name))
                    continue
                fit_context = FitContext(stored_dtype=stored_dtype(model, target))
                weight_OI = target_weight(model, target, device)
                fitted.append(fit_linear(target, budgets[target.name], weight_OI, fit_context))
            add_linear(model, list(targets), fitted, device, replacement)
        if attention_target := plan.attention_targets.get(path):
            add_mixer(model, attention_target, InitializedMixer(build_mixer(attention_target, device), {}), replacement)
            fold_output(model, plan, attention_target, device, replacement)
        if native_target := plan.native_targets.get(path):
            add_level_weights(model, native_target, replacement)
    return replacement, time.perf_counter() - began
