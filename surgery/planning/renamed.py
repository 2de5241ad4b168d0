"""Old words of recipes and reports, with the words that replaced them after version 0.2.

refine: auto                                  tune: {model: 20}
refine: {..}                                  tune: {..}; epochs that it did not give were 20, and are 0 now
allocate: auto, best, spread, depth           allocate: measured
attention.hybrid keep, by, of                 attention.hybrid softmax, choose_by, unit
by: sensitivity, restored, gates              choose_by: measured
align_steps, gate_steps, weights, repeated    left out: constants of surgery.conversion.aligned and .restored
attention gate, near (mixer linear)           output_gate, near_tokens
attention kept (mixer head_hybrid)            softmax_heads; these names are in surgery.mixers.renamed
keep of a healing recipe                      checkpoints
of of a stage `align`                         modules
towards, ends of a stage `lora`               loss, adapter
eight healing recipes by name                 three, with settings (OLD_HEALING_RECIPES)
"""

from __future__ import annotations

import copy
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.core.config import apply_override
from surgery.core.errors import RenamedWarning, SurgeryError
from surgery.mixers.renamed import renamed_options, renew_options

TUNE_AUTO = {"model": 20}
OLD_EPOCHS = {"layers": 20, "model": 20}  # of a `refine` mapping that did not give them
OLD_ALLOCATIONS = ("auto", "best", "spread", "depth")
OLD_CHOICES = ("sensitivity", "restored", "gates")
HYBRID_KEYS = {"keep": "softmax", "by": "choose_by", "of": "unit"}
# Options of choices of softmax layers, and the values that have become constants.
HYBRID_CONSTANTS = {"align_steps": 100, "gate_steps": 200, "weights": "far", "repeated": 0.5}
STAGE_KEYS = {"align": {"of": "modules"}, "lora": {"towards": "loss", "ends": "adapter"}}


@dataclass(frozen=True)
class OldHealingRecipe:
    """A shipped healing recipe of version 0.2, as settings of one of today's. The training is the same.

    Attributes:
        recipe: today's recipe.
        settings: KEY=VALUE, as after --set.
        tiny: keys of the block `tiny` that differ.
    """

    recipe: str
    settings: tuple[str, ...] = ()
    tiny: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The options of `surgery finetune` that select this training."""
        return shlex.join(["--recipe", self.recipe, *(word for text in self.settings for word in ("--set", text))])

    def change(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of today's recipe with the settings applied."""
        changed = copy.deepcopy(dict(data))
        for text in self.settings:
            apply_override(changed, text)
        changed["tiny"] = {**changed["tiny"], **self.tiny}
        return changed


_DOCUMENTS = ("data.packing=documents", "data.validation_examples=64")
_WITHOUT_GRAPH = ("cuda_graph=false", "log=10")
OLD_HEALING_RECIPES = {
    "small-linears": OldHealingRecipe("linears"),
    "small-attention": OldHealingRecipe(
        "attention",
        (
            "common.length=1024",
            "common.batch=8",
            "common.rows=8",
            "stages=[{kind: align, modules: [attention], tokens: 600k, trains: [attention, mixers], rate: 1e-3, "
            "rates: {mixers: 3e-3}}, {kind: distill, tokens: 2M, trains: [all], rate: 1e-3, rates: {mixers: 2e-3}}]",
            "cuda_graph=false",
        ),
    ),
    "attention-large": OldHealingRecipe(
        "attention",
        (
            *_DOCUMENTS,
            "data.validation=0.001",
            "common.length=4096",
            "common.batch=64",
            "common.rows=1",
            "common.memory=checkpoint",
            "stages.0.tokens=500M",
            "stages.0.rate=3e-5",
            "stages.0.rates.mixers=2e-4",
            *_WITHOUT_GRAPH,
            "evaluate=200",
            "checkpoint=200",
        ),
        {"stages.*.memory": "keep"},
    ),
    "quick": OldHealingRecipe(
        "attention",
        (
            *_DOCUMENTS,
            "common={length: 1024, batch: 8, rows: 2, memory: checkpoint, schedule: {name: cosine, floor: 0.1}}",
            "stages=[{kind: align, modules: [attention], tokens: 20M, trains: [mixers], rate: 1e-2, memory: keep}, "
            "{kind: lora, tokens: 20M, targets: [attention], rank: 8, alpha: 16, rate: 1e-4}]",
            *_WITHOUT_GRAPH,
            "evaluate=500",
            "checkpoint=500",
        ),
        {"stages.*.tokens": "256k", "stages.*.memory": "keep", "stages.1.rate": 1e-3},
    ),
    "standard": OldHealingRecipe(
        "attention",
        (
            *_DOCUMENTS,
            "common={schedule: {name: cosine, floor: 0.1}, memory: checkpoint, optimiser: {weight_decay: 0.0}}",
            "stages=[{kind: align, length: 512, batch: 64, rows: 8, tokens: 100M, trains: [new], rate: 1e-4, "
            "rates: {mixers: 1e-3}, memory: keep}, {kind: distill, length: 4096, batch: 96, rows: 1, tokens: 600M, "
            "trains: [all], rate: 7e-6, rates: {mixers: 1e-4}}]",
            *_WITHOUT_GRAPH,
            "evaluate=500",
            "checkpoint=500",
        ),
        {
            "stages.*.tokens": "256k",
            "stages.*.memory": "keep",
            "stages.*.rates": {"mixers": 1e-3},
            "stages.1.rate": 1e-4,
        },
    ),
    "long": OldHealingRecipe(
        "attention",
        (
            *_DOCUMENTS,
            "common={schedule: {name: cosine, floor: 0.1}, memory: checkpoint}",
            "stages=[{kind: align, length: 512, batch: 64, rows: 8, tokens: 100M, trains: [new], rate: 1e-4, "
            "rates: {mixers: 1e-3}, memory: keep}, {kind: distill, length: 4096, batch: 96, rows: 1, tokens: 600M, "
            "trains: [all], rate: 7e-6, rates: {mixers: 1e-4}}, {kind: lm, length: 16384, batch: 24, rows: 1, "
            "tokens: 100M, trains: [all], rate: 1e-5, data: {packing: stream}}]",
            *_WITHOUT_GRAPH,
            "evaluate=500",
            "checkpoint=250",
        ),
        {
            "stages.*.tokens": "192k",
            "stages.*.memory": "keep",
            "stages.0.rates": {"mixers": 1e-3},
            "stages.1.rates": {"mixers": 1e-3},
            "stages.1.rate": 1e-4,
            "stages.2.rate": 3e-5,
            "stages.2.length": 512,
            "stages.2.batch": 2,
            "stages.2.rows": 2,
        },
    ),
    "weights-only": OldHealingRecipe(
        "new-modules",
        (
            *_DOCUMENTS,
            "common.length=1024",
            "common.batch=32",
            "common.schedule.warmup=0.02",
            "stages=[{kind: distill, tokens: 20M, trains: [structured], rate: 2e-5, ce_weight: 0.1}]",
            "evaluate=100",
            "checkpoint=200",
        ),
        {"stages.*.tokens": "512k", "stages.*.rate": 1e-4},
    ),
}


def renew_recipe(
    data: Mapping[str, Any], *, is_whole: bool = True, base: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return (a conversion recipe in today's words, a line for each old word in it).

    is_whole: whether a `refine` mapping had its old defaults; a single epoch of an override leaves the other one to the
    recipe. base: the recipe that `data` is put over, which names the mixer if `data` does not.

    Raises SurgeryError for a key that is given under both names.
    """
    notes: list[str] = []
    renewed: dict[str, Any] = {}
    for key, value in data.items():
        if key == "refine":
            key, value = "tune", _tune(value, notes, is_whole)
        elif key == "allocate" and value in OLD_ALLOCATIONS:
            reason = ": moving parameters between early and late layers is gone" if value == "depth" else ""
            notes.append(f"allocate: {value} is now allocate: measured{reason}")
            value = "measured"
        elif key == "attention" and isinstance(value, Mapping):
            value, lines = renew_attention(value, (base or {}).get("attention"))
            notes += lines
        _add(renewed, key, value, "refine", "")
    return renewed, notes


def renew_attention(data: Mapping[str, Any], base: Any = None) -> tuple[dict[str, Any], list[str]]:
    """Return (the `attention` section of a recipe in today's words, a line for each old word in it).

    base: the section that it is put over, which names the mixer if `data` does not.
    """
    notes: list[str] = []
    base = base if isinstance(base, Mapping) else {}
    mixer = data.get("mixer", base.get("mixer"))
    renewed = _options(mixer, data, "attention", notes)
    if isinstance(renewed.get("hybrid"), Mapping):
        renewed["hybrid"] = _hybrid(renewed["hybrid"], notes)
    rules, base_rules = data.get("rules"), base.get("rules")
    if isinstance(rules, Mapping):  # of an override: number -> options
        base_mixers = {
            str(n): rule.get("mixer") for n, rule in enumerate(base_rules or ()) if isinstance(rule, Mapping)
        }
        renewed["rules"] = {n: _rule(rule, base_mixers.get(n) or mixer, n, notes) for n, rule in rules.items()}
    elif isinstance(rules, Sequence) and not isinstance(rules, str):
        renewed["rules"] = [_rule(rule, mixer, n, notes) for n, rule in enumerate(rules)]
    return renewed, notes


def renew_override(path: Sequence[str], value: Any, base: Mapping[str, Any]) -> tuple[list[str], Any, list[str]]:
    """Return (path, value, lines on old words) of an override such as `refine.model=3`.

    The path is empty if its key is gone. base: the recipe that the override is put over.
    """
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    nested, notes = renew_recipe(nested, is_whole=len(path) == 1, base=base)
    renewed: list[str] = []
    while len(renewed) < len(path):
        if not nested:
            return [], None, notes
        ((key, nested),) = nested.items()
        renewed.append(key)
    return renewed, nested, notes


def renew_healing_recipe(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return (the keys of a healing recipe in today's words, a line for each old word in it)."""
    renewed: dict[str, Any] = {}
    notes: list[str] = []
    stages = data.get("stages")
    for key, value in data.items():
        if key == "keep":
            notes.append("keep is now checkpoints")
            key = "checkpoints"
        elif key == "stages" and isinstance(value, list):
            value = [renew_stage(stage, notes) for stage in value]
        elif key == "common" and isinstance(value, Mapping):
            value = _renamed_keys(value, _stage_keys(stages), "common", notes)
        _add(renewed, key, value, "keep", "")
    return renewed, list(dict.fromkeys(notes))


def renew_stage(stage: Any, notes: list[str]) -> Any:
    """Return the keys of a training stage in today's words; anything but a mapping is returned unchanged.

    notes: gets a line for each old word.
    """
    return _renamed_keys(stage, _stage_keys([stage]), "stage", notes) if isinstance(stage, Mapping) else stage


def renew_healing_path(path: str, data: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return (the path of an override such as `stages.0.of` in today's words, lines on old words).

    data: the recipe that the override is put over.
    """
    first, *rest = path.split(".")
    stages = data.get("stages")
    if first == "keep" and not rest:
        return "checkpoints", ["keep is now checkpoints"]
    if first == "stages" and len(rest) > 1 and isinstance(stages, list):
        number, key = rest[:2]
        at = [stage for n, stage in enumerate(stages) if number in ("*", str(n))]
        if new := _stage_keys(at).get(key):
            return ".".join([first, number, new, *rest[2:]]), [f"stage: {key} is now {new}"]
    if first == "common" and rest and (new := _stage_keys(stages).get(rest[0])):
        return ".".join([first, new, *rest[1:]]), [f"common: {rest[0]} is now {new}"]
    return path, []


def warn_renamed(notes: Sequence[str]) -> None:
    """Warn of the old words in a recipe."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "surgery":
        frame, level = frame.f_back, level + 1
    for note in notes:  # the warning names the line of the user's program, not one of ours
        warnings.warn(f"recipe: {note}", RenamedWarning, stacklevel=level)


def changed_choice(data: Mapping[str, Any]) -> str | None:
    """Return the setting of an old recipe whose choice today's conversion would make in another way, None if there is
    none.
    """
    if data.get("refine") == "auto":
        return "refine: auto"
    if data.get("allocate") in OLD_ALLOCATIONS:
        return f"allocate: {data['allocate']}"
    attention = data.get("attention") or {}
    hybrid = attention.get("hybrid") or {}
    if hybrid.get("keep") is None or hybrid.get("by") == "every":
        return None
    by, of_heads = hybrid.get("by", "sensitivity"), hybrid.get("of") == "heads"
    unchanged = by == ("sensitivity" if of_heads else "restored")
    unchanged &= all(hybrid.get(key, value) == value for key, value in HYBRID_CONSTANTS.items())
    return None if unchanged else f"attention.hybrid by: {by}"


def renew_report(report: dict[str, Any]) -> dict[str, Any]:
    """Return a surgery_report.json in today's words. Scores of ways that are gone are left out."""
    renewed = {("tune" if key == "refine" else key): value for key, value in report.items()}
    if isinstance(recipe := report.get("recipe"), dict):
        renewed["recipe"] = renew_recipe(recipe)[0]
    if isinstance(allocation := report.get("allocation"), dict):
        renewed["allocation"] = _chosen(allocation, ("spread", "depth"), ("expected", "tilt", "tilts"))
    if isinstance(hybrid := report.get("hybrid"), dict):
        renewed["hybrid"] = _chosen(hybrid, OLD_CHOICES, ("alone", "gate_values", "gate_losses"))
    return renewed


def _tune(value: Any, notes: list[str], is_whole: bool) -> Any:
    if value == "auto":
        notes.append("refine: auto is now tune: {model: 20}, epochs in place of a budget of time")
        return dict(TUNE_AUTO)
    if isinstance(value, Mapping) and is_whole:
        value = {**OLD_EPOCHS, **value}
        epochs = f"{{layers: {value['layers']}, model: {value['model']}}}"
        notes.append(f"refine is now tune: write {epochs}; epochs that tune does not give are 0")
        return value
    notes.append("refine is now tune" if is_whole else "refine is now tune, whose epochs are 0 unless they are given")
    return value


def _hybrid(hybrid: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    renewed: dict[str, Any] = {}
    for key, value in hybrid.items():
        if key in HYBRID_CONSTANTS:
            notes.append(f"attention.hybrid.{key} is gone; choose_by: measured works as with its default")
            continue
        new = HYBRID_KEYS.get(key, key)
        if key == "by" and value in OLD_CHOICES:
            notes.append(f"attention.hybrid by: {value} is now choose_by: measured")
            value = "measured"
        elif new != key:
            notes.append(f"attention.hybrid.{key} is now attention.hybrid.{new}")
        _add(renewed, new, value, key, "attention.hybrid.")
    return renewed


def _options(mixer: Any, options: Mapping[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    """Return a mixer's options in today's words. where: the section of the recipe."""
    notes += [f"{where}.{old} is now {where}.{new}" for old, new in renamed_options(mixer, options).items()]
    return renew_options(mixer, options)


def _rule(rule: Any, mixer: Any, number: Any, notes: list[str]) -> Any:
    """Return a rule of the attention section in today's words. mixer: of the layers, unless the rule names another."""
    if not isinstance(rule, Mapping):
        return rule
    return _options(rule.get("mixer") or mixer, rule, f"attention.rules.{number}", notes)


def _stage_keys(stages: Any) -> dict[str, str]:
    """Return {old key: new key} of the kinds of some stages."""
    kinds = [stage.get("kind") for stage in stages or () if isinstance(stage, Mapping)]
    return {old: new for kind in kinds if isinstance(kind, str) for old, new in STAGE_KEYS.get(kind, {}).items()}


def _renamed_keys(data: Mapping[str, Any], names: Mapping[str, str], where: str, notes: list[str]) -> dict[str, Any]:
    renewed: dict[str, Any] = {}
    for key, value in data.items():
        if key in names:
            notes.append(f"{where}: {key} is now {names[key]}")
        _add(renewed, names.get(key, key), value, key, f"{where} ")
    return renewed


def _add(renewed: dict[str, Any], key: str, value: Any, old: str, where: str) -> None:
    if key in renewed:
        raise SurgeryError(f"{where}{old} is the old name of {where}{key}, and both are given. Leave out {where}{old}")
    renewed[key] = value


def _chosen(entry: dict[str, Any], old: Sequence[str], gone: Sequence[str]) -> dict[str, Any]:
    """Return a report's entry of a choice. old: names of ways that are `measured` today. gone: keys that are left
    out.
    """
    renewed = {("measured" if key in old else key): value for key, value in entry.items() if key not in gone}
    return {**renewed, "kept": "measured"} if renewed.get("kept") in old else renewed
