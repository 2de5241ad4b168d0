"""Choose the layers or key/value heads that keep softmax by gates that are trained together (FlashMorph, arXiv 2606.30562).

    out[u] = g_u out_softmax[u] + (1 - g_u) out_mixer[u]      g_u = sigmoid(a_u)      u: a layer, or a key/value head of a layer
    loss   = mean_n KL(p_n || q_n) + m (E - keep) + c / 2 (E - keep)^2                E = mean_u g_u, the expected share of softmax

p_n: the original's distribution at token n; q_n: that of the model with all gates. m is a Lagrange multiplier: after each step it grows by
PRICE_STEP L (E - keep), not below 0, with c = DAMPING L and L the first step's KL, so that E reaches the recipe's `keep` whatever the size of
the loss. At the end the units with the largest a_u keep softmax. Unlike scores of one layer at a time, the gates see the effect of
all choices together.

Gates start at a_u = 0. The mixers start from their initialization, with a share of the recipe's local steps, and are trained
with the gates by Adam; the model's own weights stay. (The paper trains the gates alone, on 20M tokens of synthetic retrieval. Here the calibration text has few
tokens, so the mixers go on learning; and a share of the rows, `repeated`, ends with a copy of an earlier part of the row, which asks for
retrieval, as in surgery.conversion.restored.) The trained mixers serve the choice only: the conversion starts anew, as always.

Evenly spaced units are scored as well, by the KL divergence on the held-out rows with gates of 0 and 1, and the better choice is kept.

A step whose graph does not fit in memory is streamed, one layer at a time, with the trained values in memory-mapped files
(surgery.conversion.refine_model). Process 0 trains alone.

OUT.partial/gates/LAYER.safetensors    a layer's mixer before the training, in float32; the journal has its SHA-256
OUT.partial/gates/step-N.safetensors   mixers, gates and Adam's moments after N steps, every SAVE_STEPS steps; only the last one is kept
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerCall, run_phases
from surgery.checkpoint.safetensors_io import TensorSource, file_digest, read_header, read_tensor, write_shard
from surgery.conversion.blended import BlendedAttention, gates_of
from surgery.conversion.context import ConversionContext, RowGroups
from surgery.conversion.hybrid import (
    Unit,
    evenly_spaced,
    evenly_spaced_heads,
    head_choice,
    heads_by_layer,
    init_trial_mixer,
)
from surgery.conversion.mixer_init.base import ERROR_CAP
from surgery.conversion.refine import Allocate, TrainedLayer
from surgery.conversion.refine_model import ModelRefinement, resident_bytes
from surgery.conversion.replacement import LayerReplacement, load_mixer
from surgery.conversion.restored import scored_rows
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal
from surgery.mixers import MIXERS, Mixer, mixer_config
from surgery.planning.attention_recipe import HybridRecipe

GATE_RATE, MIXER_RATE = 5e-2, 3e-3  # of Adam; the rates decay to zero along half a cosine
PRICE_STEP, DAMPING = 1.0, 20.0  # of the multiplier, relative to the KL of the first step
SAVE_STEPS = 25  # steps between two saved states
GATE = "logit_U"  # name of the gates' parameter


class GatedAttention(BlendedAttention):
    """Softmax attention and a mixer with trained gates. logit_U: a_u of the layer, (1,), or of its key/value heads, (G,).

    fixed_G: gates that are used instead, None while they are trained.
    """

    def __init__(self, mixer: Mixer, count: int):
        super().__init__(mixer, torch.zeros(0))
        self.logit_U = nn.Parameter(torch.zeros(count))
        self.fixed_G: Tensor | None = None

    def gates(self) -> Tensor:
        """Return the weight of softmax in each key/value head, (G,)."""
        if self.fixed_G is not None:
            return self.fixed_G
        return self.logit_U.sigmoid().expand(self.shape.groups)


class GatedLayer(TrainedLayer):
    """The trained values of one gated layer. slope: derivative of the penalty in each gate g_u."""

    slope: float = 0.0

    @torch.no_grad()
    def update(self, leaves: list[Tensor], gradients: list[Tensor | None], rate: float) -> None:
        """Make one step of Adam, with the gradient of the penalty added to that of the gates."""
        added = []
        for name, leaf, gradient in zip(self.tensors, leaves, gradients):
            if name.endswith(f".{GATE}"):
                gate_U = leaf.sigmoid()
                own_U = self.slope * gate_U * (1 - gate_U)
                gradient = own_U if gradient is None else gradient + own_U
            added.append(gradient)
        super().update(leaves, added, rate)

    @property
    def logits(self) -> Tensor:
        """The gates' values a_u on the CPU, (U,)."""
        return next(t.value for name, t in self.tensors.items() if name.endswith(f".{GATE}")).cpu()


class GateTraining:
    """The training of the gates of one conversion, on process 0. Finished steps are taken from the journal's last saved state."""

    def __init__(self, ctx: ConversionContext, hybrid: HybridRecipe, journal: Journal):
        self.hybrid, self.journal = hybrid, journal
        samples, self.repeated_rows = rows_with_copies(ctx.samples, hybrid.repeated, ctx.recipe.seed)
        self.source, self.ctx = ctx, replace(ctx, data=samples, runner=ctx.runner.single_process())
        self.targets = ctx.plan.attention_targets
        self.units: list[Unit] = [
            (layer, unit)
            for layer, target in self.targets.items()
            for unit in range(target.shape.groups if hybrid.of_heads else 1)
        ]
        assert hybrid.keep is not None
        self.keep = hybrid.softmax_count(len(self.units)) / len(self.units)
        self.layers: dict[str, GatedLayer] = {}
        self.saved: dict[str, dict[str, Any]] = {}  # journal entries of intact mixers, by layer
        self.price, self.first_loss = 0.0, 0.0

    def run(self) -> dict[str, Any]:
        """Train the gates and return the report's "hybrid" entry."""
        self.ctx.gates_dir.mkdir(exist_ok=True)
        original_BTD = self._init_layers()
        refinement = GateRefinement(
            self.ctx, list(self.layers.values()), original_BTD, self.streamed, self._before_update
        )
        self.source.runner.hidden_bytes = max(self.source.runner.hidden_bytes, self.ctx.runner.hidden_bytes)
        losses = self._train(refinement)
        logits = {layer: trained.logits.tolist() for layer, trained in self.layers.items()}
        count = self.hybrid.softmax_count(len(self.units))
        chosen = sorted(self.units, key=lambda unit: -logits[unit[0]][unit[1]])[:count]
        plan = self.ctx.plan
        scores: dict[str, dict[str, Any]] = {}
        kept = {"gates": heads_by_layer(plan, chosen), "every": self._even_units()}
        for name, units in kept.items():
            self._fix_gates(units)
            loss = refinement.held_out_loss()
            scores[name] = {
                "unit": refinement.unit,
                "original": 0.0,
                "converted": min(loss, ERROR_CAP) if loss == loss else ERROR_CAP,
            }
        best = min(scores, key=lambda name: scores[name]["converted"])
        told = {
            "gate_values": {layer: [_sigmoid(a) for a in own] for layer, own in logits.items()},
            "gate_losses": losses,
            "repeated_rows": self.repeated_rows,
        }
        if self.hybrid.of_heads:
            shown = {name: {"heads": kept[name], **scores[name]} for name in kept}
            return {**head_choice(plan, best, kept[best]), **told, **shown}
        layers = {name: [layer for layer, units in kept[name].items() if units] for name in kept}
        return {"kept": best, "softmax": layers[best], **told, **{n: {"softmax": layers[n], **scores[n]} for n in kept}}

    def _even_units(self) -> dict[str, list[int]]:
        plan, hybrid = self.ctx.plan, self.hybrid
        if hybrid.of_heads:
            return evenly_spaced_heads(plan, hybrid)
        return {layer: [0] if layer in evenly_spaced(plan, hybrid) else [] for layer in self.targets}

    def _fix_gates(self, units: Mapping[str, Sequence[int]]) -> None:
        """Set gates to 1 for the given units and to 0 for all others."""
        for layer, trained in self.layers.items():
            mixer = next(iter(trained.replacement.mixers.values()))
            assert isinstance(mixer, GatedAttention)
            heads = units[layer] if self.hybrid.of_heads else range(mixer.shape.groups if units[layer] else 0)
            mixer.fixed_G = gates_of(heads, mixer.shape, self.ctx.device)

    # -- mixers before the training ----------------------------------------------------------------
    def _init_layers(self) -> Tensor:
        """Set `layers`, with mixers from their files where the journal has them; return the original's final states (B, T, D)."""
        ctx, layers = self.ctx, list(self.targets)
        # The journal is only added to here: removing entries takes all processes, and this is process 0 alone.
        self.saved = {e["piece"]: e for e in self.journal.entries if e["step"] == "gated" and self._is_intact(e)}
        groups = RowGroups.for_trial(self.source.samples, 0)
        todo = [layer for layer in layers if layer not in self.saved]
        with ctx.progress.bar("initializing the mixers of gated layers", len(ctx.plan.layout.layers)) as tick:

            def visit(call: LayerCall) -> Any:
                call.hidden_BTD = ctx.runner.writable_buffer(call.hidden_BTD)
                if call.path in todo:
                    self._save_mixer(call.path, init_trial_mixer(self.source, call, groups))
                rows = groups.original
                out = run_phases(call, [(rows.start, rows.stop, nullcontext())], ctx.runner)
                tick()
                return out

            if todo:
                ctx.runner.run(groups.inputs(self.source.samples), visit)
        original_BTD = self._original_states()
        sizes = sum(info.nbytes for layer in layers for info in read_header(self._path(layer)).values())
        self.streamed = resident_bytes(ctx.plan) + 5 * sizes > ctx.runner.limit
        allocate: Allocate = (lambda x: ctx.runner.file_tensor(x.shape)) if self.streamed else torch.empty_like
        for layer in layers:
            self.layers[layer] = self._gated_layer(layer, allocate)
            if self.streamed:
                self.layers[layer].release()
        return original_BTD

    def _original_states(self) -> Tensor:
        """Return what reaches the head in the original for all samples, those with copies included, (B, T, D)."""
        runner, data = self.ctx.runner, self.ctx.samples

        def visit(call: LayerCall) -> Any:
            call.hidden_BTD = runner.writable_buffer(call.hidden_BTD)
            return run_phases(call, [(0, data.rows, nullcontext())], runner)

        return runner.run(data.inputs, visit)

    def _gated_layer(self, layer: str, allocate: Allocate) -> GatedLayer:
        target, tensors = self.targets[layer], read_header(self._path(layer))
        mixer = load_mixer(self.saved[layer]["config"], target, tensors, self.ctx.device)
        gated = GatedAttention(mixer, target.shape.groups if self.hybrid.of_heads else 1).to(self.ctx.device)
        replacement = LayerReplacement(mixers={target.path: gated.eval()})
        stored = {f"{target.path}.mixer.{name}": torch.float32 for name, _ in gated.named_parameters()}
        trained = GatedLayer(self.ctx.model, layer, replacement, stored, allocate)
        for name, tensor in trained.tensors.items():
            tensor.scale = GATE_RATE / MIXER_RATE if name.endswith(f".{GATE}") else 1.0
        return trained

    def _path(self, layer: str) -> Path:
        return self.ctx.gates_dir / f"{layer}.safetensors"

    def _save_mixer(self, layer: str, mixer: Mixer) -> None:
        path = self.targets[layer].path
        tensors = [TensorSource.from_tensor(f"{path}.mixer.{n}", t) for n, t in mixer.state_dict().items()]
        digest = write_shard(self._path(layer), tensors)
        self.saved[layer] = {"piece": layer, "sha256": digest, "config": mixer.config.to_dict()}
        self.journal.add("gated", **self.saved[layer])

    def _is_intact(self, entry: dict[str, Any]) -> bool:
        """Return whether the layer's file has the journal's SHA-256 and the tensors of the entry's mixer."""
        target, path = self.targets[entry["piece"]], self._path(entry["piece"])
        if file_digest(path) != entry["sha256"]:
            return False
        try:
            found = {name: tuple(info.shape) for name, info in read_header(path).items()}
            config = mixer_config(entry["config"])
            MIXERS[config].check_config(config, target.shape)
        except SurgeryError:
            return False
        with torch.device("meta"):
            state = MIXERS[config](config, target.shape).state_dict()
        return found == {f"{target.path}.mixer.{name}": tuple(t.shape) for name, t in state.items()}

    # -- training ----------------------------------------------------------------------------------
    def _train(self, refinement: GateRefinement) -> list[float]:
        """Train for the recipe's steps; return the KL divergence of every SAVE_STEPS-th step."""
        steps, order = self.hybrid.gate_steps, refinement.batch_order(self.hybrid.gate_steps, self.ctx.recipe.seed)
        done, losses = self._load_state()
        with self.ctx.progress.bar("training the gates", steps) as tick:
            tick(done)
            for i in range(done, steps):
                refinement.step(order[i], MIXER_RATE * (1 + math.cos(math.pi * i / steps)) / 2)
                excess = self._expected_share() - self.keep
                self.price = max(0.0, self.price + PRICE_STEP * self.first_loss * excess)
                if (i + 1) % SAVE_STEPS == 0 or i + 1 == steps:
                    losses.append(refinement.last_loss)
                    self._save_state(i + 1, losses)
                tick()
        return losses

    def _before_update(self, loss: float) -> None:
        """Set the derivative of the penalty in each gate, for the step whose KL divergence is `loss`."""
        if not math.isfinite(loss):
            raise SurgeryError(
                f"attention.hybrid by: gates: the KL divergence of the gated model is {loss}. Use by: sensitivity or by: every"
            )
        self.first_loss = self.first_loss or max(loss, 1e-6)
        excess = self._expected_share() - self.keep
        for layer in self.layers.values():
            layer.slope = (self.price + DAMPING * self.first_loss * excess) / len(self.units)

    def _expected_share(self) -> float:
        """Return E, the mean of all gates."""
        logits = torch.cat([layer.logits for layer in self.layers.values()])
        return float(logits.double().sigmoid().mean())

    # -- saved states ------------------------------------------------------------------------------
    def _state_path(self, step: int) -> Path:
        return self.ctx.gates_dir / f"step-{step}.safetensors"

    def _save_state(self, step: int, losses: list[float]) -> None:
        """Write the state after `step` steps, then its journal entry, and remove the state before."""
        entries = [
            TensorSource.from_tensor(f"{kind}.{name}", getattr(tensor, kind))
            for layer in self.layers.values()
            for name, tensor in layer.tensors.items()
            for kind in ("value", "first", "second")
        ]
        entry = {"done": step, "sha256": write_shard(self._state_path(step), entries), "price": self.price,
                 "first_loss": self.first_loss, "losses": losses}  # fmt: skip
        self.journal.add("gates", **entry)
        for file in self.ctx.gates_dir.glob("step-*.safetensors"):
            if file != self._state_path(step):
                file.unlink()

    def _load_state(self) -> tuple[int, list[float]]:
        """Load the journal's last state, if it is intact; return (steps done, losses so far)."""
        entry = next((e for e in reversed(self.journal.entries) if e["step"] == "gates"), None)
        if entry is None or not 0 < entry["done"] <= self.hybrid.gate_steps:
            return 0, []
        path = self._state_path(entry["done"])
        names = {
            f"{kind}.{name}": getattr(tensor, kind)
            for layer in self.layers.values()
            for name, tensor in layer.tensors.items()
            for kind in ("value", "first", "second")
        }
        if file_digest(path) != entry["sha256"]:
            return 0, []
        found = read_header(path)
        if {n: tuple(t.shape) for n, t in names.items()} != {n: tuple(i.shape) for n, i in found.items()}:
            return 0, []
        for name, tensor in names.items():
            tensor.copy_(read_tensor(found[name], torch.float32))
        for layer in self.layers.values():
            layer.steps = entry["done"]
        self.price, self.first_loss = entry["price"], entry["first_loss"]
        return entry["done"], list(entry["losses"])


class GateRefinement(ModelRefinement):
    """Steps of all gated layers together. before_update: called with the loss of a step, before its backward pass: the KL
    divergence in nats per token, or the squared error of the last hidden state relative to its energy."""

    def __init__(
        self,
        ctx: ConversionContext,
        layers: list[GatedLayer],
        original_BTD: Tensor,
        streamed: bool,
        before_update: Callable[[float], None],
    ):
        super().__init__(ctx, list(layers), original_BTD, streamed)
        self.before_update, self.last_loss = before_update, 0.0

    def batch_order(self, steps: int, seed: int) -> list[range]:
        """Return the rows of each step, in an order drawn with the seed."""
        return self._order(-(-steps // max(1, len(self.batches()))), seed)[:steps]

    def _loss(self, final_BTD: Tensor, rows: range, *, gradient: bool) -> tuple[float, Tensor, list[Tensor | None]]:
        loss, grad_BTD, head = super()._loss(final_BTD, rows, gradient=gradient)
        if gradient:
            wanted_ND = self._wanted(rows)  # the gradients are those of a mean, or of an error relative to the energy
            scale = len(wanted_ND) if self.head is not None else float(wanted_ND.double().square().sum())
            self.last_loss = loss / max(scale, 1e-30)
            self.before_update(self.last_loss)
        return loss, grad_BTD, head


def rows_with_copies(samples: CalibrationSet, repeated: float, seed: int) -> tuple[CalibrationSet, int]:
    """Return (samples in which a share of the rows to fit, and of the held-out rows, ends with a copy of an earlier part; their number)."""
    parts, changed = [], 0
    for first, stop in ((0, samples.n_fit), (samples.n_fit, samples.rows)):
        part = CalibrationSet({name: x[first:stop] for name, x in samples.inputs.items()}, 0, stop - first)
        found, count = scored_rows(part, repeated, seed)
        parts.append(found.inputs)
        changed += count
    return replace(
        samples, inputs={name: torch.cat([part[name] for part in parts]) for name in samples.inputs}
    ), changed


def _sigmoid(a: float) -> float:
    return 1 / (1 + math.exp(-a)) if a > -700 else 0.0


def choose_by_gates(ctx: ConversionContext, hybrid: HybridRecipe, journal: Journal) -> dict[str, Any]:
    """Return the report's "hybrid" entry; its "softmax", or "heads", lists what keeps softmax attention."""
    told: dict[str, Any] = ctx.dist.on_main(lambda: GateTraining(ctx, hybrid, journal).run())
    return told
