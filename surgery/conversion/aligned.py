"""An all-linear student, aligned briefly: the attention of every layer with a mixer, trained towards the original's.

    loss = |y - y*|^2 / |y*|^2        y, y*: output of the output projection (B, T, D), with the mixer and with softmax

Every layer reads the original's hidden states, so that the layers are independent, as in the first stages of LoLCATs
(Zhang et al. 2025) and MOHAWK (Bick et al. 2024). The mixer starts from its initialization, with a share of the
recipe's local steps; then Adam trains the mixer and the attention projections together. A layer whose held-out error
did not fall keeps the start. The result serves the choice of softmax layers only (surgery.conversion.restored); the
conversion does not use it.

OUT.partial/aligned/LAYER.safetensors    mixer and projections of a layer, in float32; the journal has their SHA-256
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from surgery.calibration.attention_samples import attention_replaced
from surgery.calibration.data import unpadded_rows
from surgery.calibration.layer_runner import LayerCall, StopForward
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import (
    DTYPES,
    TensorSource,
    file_digest,
    read_header,
    read_tensor,
    write_shard,
)
from surgery.conversion.context import ConversionContext
from surgery.conversion.hybrid import init_trial_mixer
from surgery.conversion.mixer_init.base import ERROR_CAP
from surgery.conversion.replacement import load_mixer
from surgery.conversion.streams import Contexts, Layer, Streams
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal
from surgery.mixers import MIXERS, Mixer, mixer_config
from surgery.planning.attention_plan import AttentionTarget

ALIGN_STEPS = 100  # Adam steps of each layer
ALIGN_TOKENS = 1024  # tokens of one step
MIXER_RATE = 3e-3  # of Adam; rates decay to zero along half a cosine
PROJECTION_RATE = 0.25  # divided by the model's width, as muP does for Adam (Yang et al. 2022): 1e-3 at a width of 256


@dataclass
class AlignedAttention:
    """The aligned attention of one layer. parameters: projections (and norms of q and k) by the name of the
    parameter.
    """

    mixer: Mixer
    parameters: dict[str, nn.Parameter]


def projection_parameters(meta_model: MetaModel, target: AttentionTarget) -> dict[str, nn.Parameter]:
    """Return the parameters of the attention module and of its output projection, by full name."""
    return {
        f"{path}.{name}": parameter
        for path in (target.path, target.output)
        for name, parameter in meta_model.module(path).named_parameters()
    }


@contextmanager
def aligned_attention(meta_model: MetaModel, target: AttentionTarget, aligned: AlignedAttention) -> Iterator[None]:
    """Replace the attention of a layer, projections included, inside the context."""
    with ExitStack() as stack:
        for name, parameter in aligned.parameters.items():
            path, _, leaf = name.rpartition(".")
            owner = meta_model.module(path)._parameters
            stack.callback(owner.__setitem__, leaf, owner[leaf])
            owner[leaf] = parameter
        stack.enter_context(attention_replaced(meta_model.module(target.path), aligned.mixer))
        yield


class AlignedStudent:
    """The aligned layers of one conversion: `align` trains those that the journal lacks, `load` reads one of them.

    Layers are dealt out to the processes; each writes its own, and all read all of them.
    """

    def __init__(self, ctx: ConversionContext, journal: Journal):
        self.ctx, self.journal = ctx, journal
        self.runner = ctx.runner.single_process()
        self.todo: set[str] = set()  # layers that this process aligns

    def align(self) -> dict[str, dict[str, float]]:
        """Align all layers; return the held-out errors |y - y*| / |y*| of each layer: "start" and "aligned"."""
        ctx, layers = self.ctx, list(self.ctx.plan.attention_targets)
        usable = ctx.dist.on_main(lambda: [entry for entry in self._entries() if self._is_intact(entry)])
        self.journal.keep([e for e in self.journal.entries if e["step"] != "aligned" or e in usable])
        missing = [layer for layer in layers if self.journal.find("aligned", piece=layer) is None]
        self.todo = set(missing[ctx.dist.index :: ctx.dist.count])
        if missing:
            ctx.dist.on_main(lambda: ctx.aligned_dir.mkdir(exist_ok=True))
            with ctx.progress.bar("aligning the attention of each layer", len(ctx.plan.layout.layers)) as tick:
                ctx.dist.together_or_raise(partial(self._run, tick))
            self.journal.merge()
        return {layer: self._entry(layer)["errors"] for layer in layers}

    def load(self, layer: str) -> AlignedAttention:
        """Return the aligned attention of a layer, on the device of the conversion.

        The layer's weights must be loaded.
        """
        target, device, tensors = (
            self.ctx.plan.attention_targets[layer],
            self.runner.device,
            read_header(self._path(layer)),
        )
        mixer = load_mixer(self._entry(layer)["config"], target, tensors, device)
        names = projection_parameters(self.ctx.model, target)
        parameters = {
            name: nn.Parameter(read_tensor(tensors[name], torch.float32, device=device), requires_grad=False)
            for name in names
        }
        return AlignedAttention(mixer, parameters)

    # -- files and journal -------------------------------------------------------------------------
    def _path(self, layer: str) -> Path:
        return self.ctx.aligned_dir / f"{layer}.safetensors"

    def _entries(self) -> list[dict[str, Any]]:
        return [entry for entry in self.journal.entries if entry["step"] == "aligned"]

    def _entry(self, layer: str) -> dict[str, Any]:
        entry = self.journal.find("aligned", piece=layer)
        assert entry is not None
        return entry

    def _is_intact(self, entry: dict[str, Any]) -> bool:
        """Return whether the layer's file has the journal's SHA-256 and the tensors that the plan expects."""
        target, path = self.ctx.plan.attention_targets[entry["piece"]], self._path(entry["piece"])
        if file_digest(path) != entry["sha256"]:
            return False
        try:
            tensors = {name: (DTYPES.get(info.dtype), tuple(info.shape)) for name, info in read_header(path).items()}
            config = mixer_config(entry["config"])
            MIXERS[config].check_config(config, target.shape)
        except SurgeryError:
            return False
        with torch.device("meta"):
            mixer = MIXERS[config](config, target.shape).float()
        expected = {f"{target.path}.mixer.{name}": (t.dtype, tuple(t.shape)) for name, t in mixer.state_dict().items()}
        for name in projection_parameters(self.ctx.model, target):
            expected[name] = torch.float32, tuple(self.ctx.model.tensor_info(name).shape)
        return tensors == expected

    def _save(self, layer: str, aligned: AlignedAttention, errors: dict[str, float]) -> None:
        """Write the layer's file, then its journal entry."""
        path = self.ctx.plan.attention_targets[layer].path
        tensors = {f"{path}.mixer.{name}": tensor for name, tensor in aligned.mixer.state_dict().items()}
        tensors |= {name: parameter.detach() for name, parameter in aligned.parameters.items()}
        digest = write_shard(self._path(layer), [TensorSource.from_tensor(n, t.cpu()) for n, t in tensors.items()])
        config = aligned.mixer.config.to_dict()
        self.journal.add("aligned", piece=layer, sha256=digest, config=config, errors=errors)

    # -- training ----------------------------------------------------------------------------------
    def _run(self, done: Callable[[], None]) -> None:
        """Run the original on all samples, and align this process's layers on the way. done: called after each
        layer.
        """
        if self.todo:
            Streams.of_trial(self.runner, self.ctx.samples).run(self, done)

    def visit(self, layer: Layer) -> Contexts:
        """Align the layer; the original goes on unchanged."""
        if layer.path in self.todo:
            self._align_layer(layer.call)
        return {"original": nullcontext()}

    def _align_layer(self, call: LayerCall) -> None:
        target = self.ctx.plan.attention_targets[call.path]
        mixer = init_trial_mixer(self.ctx, call)
        copies = {n: nn.Parameter(p.detach().clone()) for n, p in projection_parameters(self.ctx.model, target).items()}
        aligned, start = AlignedAttention(mixer, copies), _snapshot(mixer, copies)
        errors = {"start": self._held_out_error(call, target, aligned)}
        self._train(call, target, aligned)
        errors["aligned"] = self._held_out_error(call, target, aligned)
        if not errors["aligned"] < errors["start"]:
            mixer.load_state_dict(start[0])
            for name, parameter in copies.items():
                parameter.data.copy_(start[1][name])
        self._save(call.path, aligned, errors)

    def _train(self, call: LayerCall, target: AttentionTarget, aligned: AlignedAttention) -> None:
        """Train the mixer and the projections on the rows to fit, in an order drawn with the recipe's seed."""
        projections, mixer = list(aligned.parameters.values()), list(aligned.mixer.parameters())
        rates = (PROJECTION_RATE / target.shape.dim, MIXER_RATE)
        groups = [{"params": p, "lr": rate} for p, rate in zip((projections, mixer), rates) if p]
        parameters = [p.requires_grad_(True) for p in (*projections, *mixer)]
        adam = torch.optim.Adam(groups, betas=(0.9, 0.95))
        peaks = [group["lr"] for group in adam.param_groups]
        generator = torch.Generator().manual_seed(self.ctx.recipe.seed)
        order: list[int] = []
        for step in range(ALIGN_STEPS):
            for group, peak in zip(adam.param_groups, peaks):
                group["lr"] = peak * (1 + math.cos(math.pi * step / ALIGN_STEPS)) / 2
            if not order:
                order = torch.randperm(len(self._chunks(call, self.ctx.samples.fit)), generator=generator).tolist()
            first, last = self._chunks(call, self.ctx.samples.fit)[order.pop()]
            wanted_NO = self._outputs(call, target, first, last)
            with torch.enable_grad(), aligned_attention(self.ctx.model, target, aligned):
                difference_NO = self._outputs(call, target, first, last) - wanted_NO
                loss = difference_NO.square().sum() / wanted_NO.square().sum().clamp_min(1e-30)
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            adam.step()
        aligned.mixer.requires_grad_(False)
        for parameter in projections:
            parameter.requires_grad_(False)

    def _held_out_error(self, call: LayerCall, target: AttentionTarget, aligned: AlignedAttention) -> float:
        """Return |y - y*| / |y*| on the held-out rows, at most ERROR_CAP."""
        difference = norm = 0.0
        for first, last in self._chunks(call, self.ctx.samples.held_out):
            wanted_NO = self._outputs(call, target, first, last)
            with aligned_attention(self.ctx.model, target, aligned):
                out_NO = self._outputs(call, target, first, last)
            difference += float((out_NO - wanted_NO).square().sum(dtype=torch.float64))
            norm += float(wanted_NO.square().sum(dtype=torch.float64))
        error = (difference / max(norm, 1e-30)) ** 0.5
        return error if error < ERROR_CAP else ERROR_CAP  # NaN compares false, so it becomes ERROR_CAP

    def _chunks(self, call: LayerCall, rows: range) -> list[tuple[int, int]]:
        """Return (first, last) of chunks of `rows` with about ALIGN_TOKENS tokens each."""
        step = max(1, ALIGN_TOKENS // max(1, call.hidden_BTD.shape[1]))
        return [(first, min(first + step, rows.stop)) for first in range(rows.start, rows.stop, step)]

    def _outputs(self, call: LayerCall, target: AttentionTarget, first: int, last: int) -> Tensor:
        """Return the outputs of the output projection for rows first:last, (N, O), N real tokens."""
        caught: list[Tensor] = []

        def hook(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> NoReturn:
            caught.append(out)
            raise StopForward

        handle = self.ctx.model.module(target.output).register_forward_hook(hook)
        try:
            call.apply(first, last)
        except StopForward:
            pass
        finally:
            handle.remove()
        mask_BT = self.ctx.samples.mask()
        return unpadded_rows(caught[0], None if mask_BT is None else mask_BT[first:last]).float()


def _snapshot(mixer: Mixer, parameters: dict[str, nn.Parameter]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of the mixer's state and of the parameters."""
    state = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    return state, {name: parameter.detach().clone() for name, parameter in parameters.items()}
