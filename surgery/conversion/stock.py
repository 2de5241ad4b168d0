"""Convert a checkpoint into a stock class of transformers: softmax attention -> Gated DeltaNet or Kimi delta attention
as transformers defines it, so that the result needs no package of its own.

Source and stock model are in memory together, in float32, and run through the layers side by side. The stock model's
hidden states pass through the layers that are finished, so that each layer is fitted to what it will read.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.load_model import load_model
from surgery.checkpoint.report import (
    AllocationReport,
    CalibrationReport,
    HeldOutReport,
    MemoryReport,
    MixerReport,
    Report,
    StockReport,
    TimeReport,
    TotalsReport,
)
from surgery.checkpoint.rewrite import rewrite_checkpoint, write_shards
from surgery.checkpoint.safetensors_io import TensorSource
from surgery.checkpoint.source import CheckpointSource
from surgery.conversion.mixer_init.linear import PROFILE_SAMPLES, map_statistics
from surgery.conversion.preflight import GIVE_CALIBRATION
from surgery.conversion.report import report_head, totals
from surgery.conversion.score import HeldOutScore
from surgery.conversion.sources import FolderSource
from surgery.conversion.stock_layer import LayerSamples, initialize_layer
from surgery.conversion.stock_modules import STOCK_MODULES
from surgery.core.device import choose_device, device_name, fast_float32_matmul, peak_rss
from surgery.core.dispatch import without_timed_choices
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, write_json
from surgery.core.journal import check_free
from surgery.core.progress import Progress
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.stock import StockPlan, layer_tensors, load_tensors, plan_stock, stock_tensors


def convert_to_stock(
    source: FolderSource,
    recipe: ConversionRecipe,
    out: Path,
    *,
    device: str | None = None,
    resumes: bool = False,
    progress: Progress | None = None,
    dist: DistContext | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint and return the report, as written to OUT/surgery_report.json.

    resumes: whether the caller asked to continue or replace a conversion, which is refused. Raises SurgeryError.
    """
    began, progress = time.perf_counter(), progress or Progress()
    if resumes:
        raise SurgeryError("stock conversions are written at their end, so --resume and --overwrite do not apply")
    if dist is not None and dist.count > 1:
        raise SurgeryError(f"stock conversions run in one process (got {dist.count}). Start one")
    check_free(out)
    if recipe.calibration is None:
        raise SurgeryError(
            f"stock: linear attention is fitted to the attention of a calibration text. {GIVE_CALIBRATION}"
        )
    opened = source.open(progress).source
    plan = plan_stock(opened, recipe, source.trust_remote_code)
    for line in plan.lines():
        progress.say(line)
    inputs = source.calibration(recipe)
    assert inputs is not None
    data = CalibrationSet.from_inputs(inputs.tensors, recipe.holdout)
    if not _scored_rows(data):
        raise SurgeryError(
            f"calibration: no row of the last {len(data.held_out)}, which are held out to score the conversion, has two "
            "tokens, one to predict the other. Give longer rows"
        )
    layer_params = sum(t.numel for name, t in opened.tensors.items() if name.startswith("model.layers.0."))
    with fast_float32_matmul(choose_device(device), layer_params), without_timed_choices():
        conversion = _StockConversion(
            opened, plan, recipe, data, choose_device(device), progress=progress, loader=source
        )
        conversion.run()
    entries = conversion.entries()
    config = json.loads(conversion.stock.config.to_json_string())
    rewrite_checkpoint(opened.original, out, lambda folder: write_shards(entries, folder), config)
    report = _report(conversion, entries, time.perf_counter() - began).to_dict()
    write_json(out / REPORT_NAME, report)
    return report


class _StockConversion:
    """One conversion. stock: the result; errors: by path of the converted layer; change: of the kept layers."""

    def __init__(
        self,
        source: CheckpointSource,
        plan: StockPlan,
        recipe: ConversionRecipe,
        data: CalibrationSet,
        device: torch.device,
        *,
        progress: Progress,
        loader: FolderSource,
    ):
        assert recipe.stock is not None
        self.source, self.plan, self.recipe, self.settings = source, plan, recipe, recipe.stock
        self.data, self.device, self.progress = data, device, progress
        self.errors: dict[str, dict[str, float]] = {}
        self.seconds: dict[str, float] = {}
        self.change = 0.0
        torch.manual_seed(recipe.seed)
        self.original: Any = (
            load_model(source, torch.float32, loader.trust_remote_code).to(device).requires_grad_(False)
        )
        self.original.set_attn_implementation("eager")  # which returns the attention map
        self.tensors: dict[str, Tensor] = self.original.state_dict()
        self.stock: Any = plan.stock_class.build(plan.config)
        self.stock.float().to(device).eval().requires_grad_(False)
        self.stock.set_attn_implementation("eager")

    @torch.no_grad()
    def run(self) -> None:
        """Map the kept layers, fit the others one after the other, and score the held-out rows."""
        plan, count = self.plan, self.plan.config.num_hidden_layers
        kept = tuple(index for index in range(count) if index not in plan.converted)
        load_tensors(self.stock, stock_tensors(self.tensors, plan, kept))
        ids_NT = self.data.inputs["input_ids"]
        mask = self.data.mask()
        valid_NT = torch.ones_like(ids_NT, dtype=torch.bool) if mask is None else mask.bool()
        before, after = (
            [model.model.embed_tokens(ids_NT[row : row + 1].to(self.device))[0] for row in range(len(ids_NT))]
            for model in (self.original, self.stock)
        )
        with self.progress.bar("layers", count) as tick:
            for index in range(count):
                began = time.perf_counter()
                layer, stock_layer = self.original.model.layers[index], self.stock.model.layers[index]
                if index in plan.converted:
                    self._fit(index, before, after, valid_NT)
                else:
                    self._measure(layer, stock_layer, before[0])
                is_linear = index in plan.converted
                before = [self._call(self.original, layer, x_TD) for x_TD in before]
                after = [self._call(self.stock, stock_layer, x_TD, is_linear) for x_TD in after]
                self.seconds[f"model.layers.{index}"] = round(time.perf_counter() - began, 3)
                tick()
        self.score = self._score(before, after, ids_NT, valid_NT)

    def _arguments(self, model: Any, x_TD: Tensor) -> dict[str, Any]:
        length = len(x_TD)
        positions_BT = torch.arange(length, device=x_TD.device)[None]
        rope = model.model.rotary_emb(x_TD[None], positions_BT)
        mask_TT = torch.full((length, length), torch.finfo(x_TD.dtype).min, device=x_TD.device).triu(1)
        return {"position_embeddings": rope, "attention_mask": mask_TT[None, None], "position_ids": positions_BT}

    def _call(self, model: Any, layer: Any, x_TD: Tensor, is_linear: bool = False) -> Tensor:
        """Return the output of a layer for one row. Padding stands behind the text, where causal layers ignore it."""
        arguments = self._arguments(model, x_TD)
        if is_linear:
            arguments["attention_mask"] = None
        out = layer(x_TD[None], **arguments)
        out_TD: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return out_TD

    def _measure(self, layer: Any, stock_layer: Any, x_TD: Tensor) -> None:
        """Update the largest change of a kept layer's output / its largest entry."""
        out_TD, stock_TD = self._call(self.original, layer, x_TD), self._call(self.stock, stock_layer, x_TD)
        self.change = max(self.change, float((stock_TD - out_TD).abs().max() / out_TD.abs().max().clamp_min(1e-30)))

    def _fit(self, index: int, before: list[Tensor], after: list[Tensor], valid_NT: Tensor) -> None:
        """Fit linear attention to the attention of a layer. before, after: hidden states in source and stock model."""
        layer, stock_layer = self.original.model.layers[index], self.stock.model.layers[index]
        tensors = layer_tensors(self.tensors, index)
        stock_class = self.plan.stock_class
        scale_D, mapped = stock_class.mlp(tensors, self.plan.dtype)
        load_tensors(stock_layer, mapped)
        targets: list[Tensor] = []
        distances: list[Tensor] = []
        entropies: list[Tensor] = []
        for row, x_TD in enumerate(before):
            arguments = self._arguments(self.original, x_TD)
            out, map_BHTT = layer.self_attn(hidden_states=layer.input_layernorm(x_TD[None]), **arguments)[:2]
            targets.append(out[0])
            if row < min(PROFILE_SAMPLES, self.data.n_fit):
                for means, values_BHT in zip((distances, entropies), map_statistics(map_BHTT)):
                    means.append(values_BHT[0][:, valid_NT[row]].mean(1))
        samples = LayerSamples(
            torch.stack([stock_layer.input_layernorm(x_TD) for x_TD in after]),
            torch.stack(targets),
            valid_NT.to(self.device),
            self.data.n_fit,
        )
        profile = torch.stack(distances).mean(0), torch.stack(entropies).mean(0)
        self.errors[f"model.layers.{index}.{stock_class.linear}"] = initialize_layer(
            STOCK_MODULES[self.plan.linear](getattr(stock_layer, stock_class.linear)),
            tensors,
            scale_D,
            self.plan.sizes,
            samples,
            profile=profile,
            steps=self.settings.steps,
        )

    def _score(self, before: list[Tensor], after: list[Tensor], ids_NT: Tensor, valid_NT: Tensor) -> HeldOutScore:
        losses: list[list[Tensor]] = [[], []]
        rows = _scored_rows(self.data)
        for kind, (model, states) in enumerate(((self.original, before), (self.stock, after))):
            for row in rows:
                real_T = (valid_NT[row][1:] & valid_NT[row][:-1]).to(self.device)
                logits_TO = model.lm_head(model.model.norm(states[row][:-1][real_T]))
                labels_T = ids_NT[row][1:].to(self.device)[real_T]
                losses[kind].append(torch.nn.functional.cross_entropy(logits_TO, labels_T).double().cpu())
        first_N, second_N = (torch.stack(values) for values in losses)
        difference_N = second_N - first_N
        error = float(difference_N.std() / len(difference_N) ** 0.5) if len(difference_N) > 1 else None
        tokens = int((valid_NT[rows, 1:] & valid_NT[rows, :-1]).sum())
        return HeldOutScore("nats per token", float(first_N.mean()), float(second_N.mean()), error, tokens, len(rows))

    def entries(self) -> list[TensorSource]:
        """Return the tensors of the result in the dtype of the source, by their names in a checkpoint."""
        self.stock.config.dtype = self.plan.dtype
        files = self.plan.stock_class.files(self.stock, self.plan.dtype)
        return [TensorSource.from_tensor(name, tensor) for name, tensor in files.items()]


def _scored_rows(data: CalibrationSet) -> list[int]:
    """Return the held-out rows with a token that predicts the next one."""
    mask_NT, length = data.mask(), data.inputs["input_ids"].shape[1]
    if mask_NT is None:
        return list(data.held_out) if length > 1 else []
    real_NT = mask_NT.bool()
    return [row for row in data.held_out if bool((real_NT[row, 1:] & real_NT[row, :-1]).any())]


def _report(conversion: _StockConversion, entries: list[TensorSource], seconds: float) -> Report:
    source, plan, data = conversion.source.original, conversion.plan, conversion.data
    before = after = 0
    for index in plan.converted:
        before += sum(p.numel() for p in conversion.original.model.layers[index].self_attn.parameters())
        linear = getattr(conversion.stock.model.layers[index], plan.stock_class.linear)
        after += sum(p.numel() for p in linear.parameters())
    record = {"params_before": before, "params_after": after, "macs_before": before, "macs_after": after}
    return Report(
        **report_head(source, conversion.recipe),
        model_type=plan.model_type,
        calibration=CalibrationReport(
            tokens=data.tokens(), held_out_windows=len(data.held_out), windows=data.rows, warnings=[]
        ),
        allocation=AllocationReport(),
        held_out=HeldOutReport.model_validate(conversion.score.to_dict()),
        totals=TotalsReport.model_validate(totals([record], source, entries)),
        modules=[],
        mixers=[MixerReport(name=name, errors=errors) for name, errors in conversion.errors.items()],
        time=TimeReport(
            seconds={"total": round(seconds, 3)},
            layers=conversion.seconds,
            device=device_name(conversion.device),
            threads=torch.get_num_threads(),
        ),
        memory=MemoryReport(peak_rss=peak_rss()),
        stock=StockReport(**plan.to_dict() | {"change": conversion.change}),
    )
