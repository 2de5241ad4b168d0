"""`surgery search`: measure the choices of a model, solve for the limits, and write table, front and recipes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surgery.budget.choices import (
    AS_IS,
    ATTENTION,
    FULL_BITS,
    Choice,
    Choices,
    Counting,
    Kind,
    LayerCosts,
    default_kinds,
    find_choices,
    kind_recipe,
    with_bits,
)
from surgery.budget.damage import Damage, DamagePass, steps
from surgery.budget.front import find_front
from surgery.budget.gains import Gain, Term, interval, read_gains
from surgery.budget.limits import MEASURES, parse_limit
from surgery.budget.picture import draw_front
from surgery.budget.recipes import bits_of, recipe_of, recipe_text, yaml_text
from surgery.budget.solver import Option, Problem, Solution
from surgery.budget.table import TABLE_NAME, Row, measured_damages, read_table, table_start, write_table
from surgery.budget.times import PHASES, find_device
from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.context import ConversionContext
from surgery.conversion.mixer_init.mlr_allocation import MeasuredScoreDims
from surgery.conversion.sources import FolderSource
from surgery.conversion.text_check import score_text
from surgery.conversion.trial import measure_rank_errors
from surgery.core.device import choose_device, fast_float32_matmul
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write, check_no_unknown_files, check_not_link, exclusive_lock, write_json
from surgery.core.progress import Progress
from surgery.eval.speed.selection import is_selected
from surgery.mixers import MIXERS, mixer_config
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.recipe import validate_recipe
from surgery.planning.targets import Plan
from surgery.structures.quantized import BITS

FRONT_NAME, PICTURE_NAME, WORK_NAME, LOCK_NAME = "front.json", "front.png", "work", "lock"
RECIPE_NAME, BITS_NAME = "recipe-{}.yaml", "bits-{}.yaml"  # by number of the point
KNOWN_FILES = (
    *(TABLE_NAME, FRONT_NAME, PICTURE_NAME, RECIPE_NAME.format("*"), BITS_NAME.format("*")),
    *(f"{WORK_NAME}/**", LOCK_NAME),
)
POINTS = 8  # of the front, beside the one at the limits
AT = 4096  # tokens of the sequence whose cache counts


@dataclass(frozen=True)
class SearchSettings:
    """What a search reads and where it runs. calibration, tokens, length, seed: as in a conversion recipe; None: the
    recipe's default. at: tokens of a sequence whose cache and multiply-accumulates count. points: of the front. bits: in which parts of linears may be stored beside their dtype, 8 and 4. only:
    words of the kinds of choices, comma-separated (surgery.eval.speed.selection). healing: whether the loss after
    healing is predicted, and not that of the conversion itself. gains: a file of gains; None: those of this package.
    on, measured: the device whose times count, and a file of `surgery bench linear --out` (surgery/budget/times.py).
    """

    calibration: Any
    tokens: int | None = None
    length: int | None = None
    seed: int | None = None
    at: int = AT
    points: int = POINTS
    bits: tuple[int, ...] = ()
    only: str | None = None
    healing: bool = True
    gains: Path | None = None
    on: str | None = None
    measured: Path | None = None
    device: str | None = None
    trust_remote_code: bool = False
    revision: str | None = None

    def counting(self, limits: Mapping[str, str]) -> Counting:
        """Return what is counted: times only where they are limited, or a device is named."""
        needed = self.on is not None or self.measured is not None or any(phase in limits for phase in PHASES)
        return Counting(self.at, find_device(self.on, self.measured, self.at) if needed else None)

    def selects(self, choice: Choice) -> bool:
        """Return whether a choice changes the model and `only` selects its kind; fewer bits are selected by `bits`."""
        if choice.bits not in (FULL_BITS, *self.bits):
            return False
        return choice.is_change and (choice.name == AS_IS or is_selected(choice.title, self.only))

    def keys(self) -> dict[str, Any]:
        """Return the keys that all recipes of the search have."""
        given = {"calibration": self.calibration, "tokens": self.tokens, "length": self.length, "seed": self.seed}
        # Uniform: a rule's `keep` is the share of each matrix. The choice of ranks among them is the solver's.
        return {"allocate": "uniform", **{key: value for key, value in given.items() if value is not None}}


def search(
    source: str,
    out: Path,
    limits: Mapping[str, str],
    settings: SearchSettings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Search for the best choices within limits; return what front.json holds, with "out".

    limits: by name of the cost, as on the command line (surgery.budget.limits). A search that was interrupted goes on in
    `out`; one that is finished is solved for other limits without measuring again.

    Raises SurgeryError for limits, options or files that do not suit the model or each other.
    """
    progress = progress or Progress()
    if not limits:
        options = ", ".join(measure.option for measure in MEASURES.values())
        raise SurgeryError(f"search: give at least one limit ({options})")
    if wrong := [number for number in settings.bits if number not in BITS]:
        raise SurgeryError(f"search: bits must be 8 or 4 (got {wrong[0]})")
    gains = read_gains(settings.gains) if settings.healing else {}
    folder = FolderSource(source, settings.trust_remote_code, settings.revision)
    model = folder.open(progress)
    counting = settings.counting(limits)
    choices = find_choices(model, settings.keys(), default_kinds(), counting)
    if not any(settings.selects(choice) for choice in choices.choices):
        names = ", ".join(dict.fromkeys(choice.title for choice in choices.choices if choice.is_change))
        raise SurgeryError(f"search: --only {settings.only!r} selects no kind of choice; kinds are {names}")
    wanted = {name: parse_limit(MEASURES[name], text, choices.base[name]) for name, text in limits.items()}
    check_not_link(out)
    out.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(out, "search"):
        check_no_unknown_files(out, KNOWN_FILES)
        for note in choices.notes:
            progress.say(f"note: {note}")
        measuring = Measuring(folder, model, choices, out, settings, counting, progress=progress)
        predictor = Predictor(measuring.run(), gains)
        every = with_bits(choices, model, settings.bits, measuring.counting)
        usable = [choice for choice in every if not choice.is_change or settings.selects(choice)]
        front = find_front(predictor.problem(usable, choices.base), wanted, settings.points)
        result = write_result(
            out, replace(choices, choices=usable), [front.asked, *front.others], predictor, settings, wanted
        )
        result["times"] = counting.device.describe() if counting.device is not None else ""
        result |= {"binds": front.binds, "excess": dict(front.asked.excess), "notes": choices.notes}
        write_json(out / FRONT_NAME, result)
        draw_front(result, out / PICTURE_NAME)
        shutil.rmtree(out / WORK_NAME, ignore_errors=True)
    return {"out": str(out), **result}


class Measuring:
    """The measurement of all damages of a model, in steps that are written to SEARCH/table.json one by one.

    choices: with final costs after `run`: those of MLR attention follow from measurements.
    """

    def __init__(
        self,
        source: FolderSource,
        model: MetaModel,
        choices: Choices,
        out: Path,
        settings: SearchSettings,
        counting: Counting,
        *,
        progress: Progress,
    ):
        self.counting = counting
        self.source, self.model, self.choices, self.out = source, model, choices, out
        self.settings, self.progress = settings, progress
        self.mixers: dict[str, dict[str, Any]] = {}  # configs that measurements chose, by name of the choice
        self.contexts: dict[tuple[str, str], ConversionContext] = {}  # of the kinds of attention

    def run(self) -> dict[str, Damage]:
        """Return the damage of each choice that changes the model, by its name."""
        recipe = validate_recipe({"structure": "low_rank", **self.settings.keys()}, "of the search")
        inputs = self.source.calibration(recipe)
        if inputs is None:
            raise SurgeryError("search: give --calibration, a text on which choices are measured")
        samples = CalibrationSet.from_inputs(inputs.tensors, recipe.holdout)
        self._leave_out_wide_windows(samples)
        start = table_start(self.model, self.settings.keys(), samples.digest())
        changes = self._measured_choices()
        rows = read_table(self.out, start, {choice.key for choice in changes})
        damages = measured_damages(rows, changes)
        self._restore_mixers(rows)
        missing = [choice for choice in changes if choice.key not in damages and self.settings.selects(choice)]
        if missing:
            self._measure(samples, start, missing, damages, [*inputs.notes])
        self._write(start, damages)
        return damages

    def _measured_choices(self) -> list[Choice]:
        """Return the choices that have rows in the table, with their costs."""
        every = with_bits(self.choices, self.model, BITS, self.counting)
        return [choice for choice in every if choice.is_measured]

    def _write(self, start: Mapping[str, Any], damages: Mapping[str, Damage]) -> None:
        choices = replace(self.choices, choices=self._measured_choices())
        write_table(self.out, start, choices, damages, self.mixers, self.settings.at)

    def _leave_out_wide_windows(self, samples: CalibrationSet) -> None:
        """Leave out mixers whose window holds whole samples: nothing shows what they lose."""
        length = samples.tokens() // samples.rows
        for kind in [kind for kind in self.choices.kinds if kind.part == ATTENTION]:
            window = kind.settings.get("window", 0) + kind.settings.get("sinks", 0)
            if window >= length:
                self.choices.notes.append(
                    f"attention {kind.name} is left out: its window of {window} tokens holds whole samples of {length} "
                    "tokens, so that nothing shows what it loses. Give a larger --length"
                )
                self.choices.choices = [choice for choice in self.choices.choices if choice.kind != kind]
                self.choices.kinds.remove(kind)
                self.progress.say(f"note: {self.choices.notes[-1]}")

    # -- measuring ---------------------------------------------------------------------------------
    def _measure(
        self,
        samples: CalibrationSet,
        start: Mapping[str, Any],
        missing: list[Choice],
        damages: dict[str, Damage],
        warnings: list[str],
    ) -> None:
        """Add the damages of the missing choices, and write the table after each step."""
        device = choose_device(self.settings.device)
        with fast_float32_matmul(device, self.model.most_parameters(self.choices.layers)):
            ctx = self._context(samples)
            score = score_text(ctx)
            for warning in [*warnings, *(score.warnings if score else [])]:
                self.progress.say(f"warning: {warning}")
            self._set_contexts(ctx, {choice.kind for choice in missing if choice.kind is not None})
            if any(choice.kind is not None and choice.kind.part != ATTENTION for choice in missing):
                measure_rank_errors(ctx)  # writes the Gram matrices of the output gradients
            groups = list(steps(ctx, missing))
            for number, group in enumerate(groups, 1):
                title = f"measuring choices, step {number} of {len(groups)}"
                with self.progress.bar(title, len(ctx.plan.layout.layers)) as tick:
                    damages |= DamagePass(ctx, group, self.choices.plans, self.contexts, tick).run()
                self._write(start, damages)

    def _context(self, samples: CalibrationSet) -> ConversionContext:
        """Return the context of all linears: their targets, and pruned MLPs beside them, as a quick trial fits them."""
        linears = [
            (kind, self.choices.plans[kind.part, kind.name]) for kind in self.choices.kinds if kind.part != ATTENTION
        ]
        plan: Plan = next(iter(self.choices.plans.values()))
        targets: dict[str, Any] = {}
        pruned: dict[str, Any] = {}
        for _, of_kind in linears:
            for path, slices in of_kind.targets.items():
                kept = pruned if any(target.neurons for target in slices) else targets
                kept.setdefault(path, slices)
        layout = plan.layout
        order = [linear.path for linear in layout.linears]
        targets = {path: targets[path] for path in sorted(targets, key=order.index)}
        recipe = validate_recipe({"structure": "low_rank", **self.settings.keys()}, "of the search")
        plan = replace(plan, recipe=recipe, targets=targets, pruned_targets=pruned, attention_targets={})
        device, work = choose_device(self.settings.device), self.out / WORK_NAME
        work.mkdir(exist_ok=True)
        runner = LayerRunner(self.model, layout.layers, layout.head, device, scratch=work)
        runner.packed = samples.packed
        plan, runner = self.source.keep_reached(plan, runner, samples)
        return ConversionContext(self.model, plan, recipe, samples, runner, work, DistContext(), device, self.progress)

    def _set_contexts(self, ctx: ConversionContext, missing: Collection[Kind]) -> None:
        """Set the contexts of the kinds of attention among `missing`, and the costs of MLR attention, whose ranks are
        measured.
        """
        measured: MeasuredScoreDims | None = None
        for kind in [kind for kind in missing if kind.part == ATTENTION]:
            plan = self.choices.plans[kind.part, kind.name]
            plan = replace(plan, targets={}, layout=ctx.plan.layout)
            recipe = kind_recipe(kind, self.settings.keys())
            if "cache" in kind.settings:
                measured = measured or MeasuredScoreDims(replace(ctx, plan=plan, recipe=recipe))
                chosen = {
                    layer: measured.allocate([layer], kind.settings["cache"])[layer] for layer in plan.attention_targets
                }
                self._set_mixers(kind, {layer: entry["config"] for layer, entry in chosen.items()})
                plan = self.choices.plans[kind.part, kind.name]
                fixed = {
                    layer: replace(target, fixed=chosen[layer]["fixed"])
                    for layer, target in plan.attention_targets.items()
                }
                plan = replace(plan, targets={}, layout=ctx.plan.layout, attention_targets=fixed)
            self.contexts[kind.part, kind.name] = replace(ctx, plan=plan, recipe=recipe)

    def _set_mixers(self, kind: Kind, configs: Mapping[str, Any]) -> None:
        """Give the targets of a kind these configs, by layer, and count their costs."""
        plan = self.choices.plans[kind.part, kind.name]
        targets: dict[str, AttentionTarget] = {}
        for layer, target in plan.attention_targets.items():
            config = mixer_config(configs[layer])
            MIXERS[config].check_config(config, target.shape)
            targets[layer] = replace(target, config=config)
        self.choices.plans[kind.part, kind.name] = replace(plan, attention_targets=targets)
        counted = LayerCosts(self.model, plan.dtype, self.counting)
        for number, choice in enumerate(self.choices.choices):
            if choice.kind == kind:
                self.choices.choices[number] = replace(choice, costs=counted.of_mixer(targets[choice.layer]))
                self.mixers[choice.key] = dict(configs[choice.layer])

    def _restore_mixers(self, rows: Mapping[str, Row]) -> None:
        """Take the configs that measurements chose from the table, of kinds that are measured in all layers."""
        for kind in [kind for kind in self.choices.kinds if "cache" in kind.settings]:
            of_kind = [choice for choice in self.choices.choices if choice.kind == kind]
            configs = {}
            for choice in of_kind if all(choice.key in rows for choice in of_kind) else ():
                mixer = rows[choice.key].mixer
                if mixer is None or mixer.get("mixer") != kind.settings["mixer"]:
                    raise SurgeryError(
                        f"{self.out / TABLE_NAME}: {choice.key!r} has no mixer {kind.settings['mixer']!r}. Remove the "
                        "file to measure again"
                    )
                configs[choice.layer] = mixer
            try:
                if configs:
                    self._set_mixers(kind, configs)
            except (SurgeryError, TypeError, ValueError) as error:
                raise SurgeryError(f"{self.out / TABLE_NAME}: {error}. Remove the file to measure again") from None


# -- the result ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Predictor:
    """Predicted losses. damages: of the choices, by name. gains: of families; a family without one has the gain 1."""

    damages: Mapping[str, Damage]
    gains: Mapping[str, Gain]

    def terms(self, choice: Choice) -> list[Term]:
        """Return the damage of a choice with its gain, and that of its bits, which are chosen after healing."""
        terms = []
        if choice.name != AS_IS:
            damage = self.damages[replace(choice, bits=FULL_BITS).key]
            gain = self.gains.get(choice.family, Gain())
            terms.append(Term(choice.family, damage.nats, damage.error or 0.0, gain))
        if choice.bits != FULL_BITS:
            damage = self.damages[choice.rounding]
            terms.append(Term("bits", damage.nats, damage.error or 0.0, Gain()))
        return terms

    def problem(self, choices: Sequence[Choice], base: Mapping[str, int]) -> Problem:
        """Return the problem of the solver: an option for each choice, with its predicted loss. base: costs of the
        original.
        """
        options = tuple(
            Option(c.key, c.covers, sum(term.healed for term in self.terms(c)), dict(c.costs)) for c in choices
        )
        return Problem(options, base)

    def losses(self, chosen: Sequence[Choice]) -> dict[str, float]:
        """Return the predicted loss of a whole plan with its interval, and that of the conversion before healing."""
        terms = [term for choice in chosen for term in self.terms(choice)]
        low, high = interval(terms)
        damage = sum(term.damage for term in terms)
        return {"loss": sum(term.healed for term in terms), "low": low, "high": high, "damage": damage}


def write_result(
    out: Path,
    choices: Choices,
    solutions: Sequence[Solution],
    predictor: Predictor,
    settings: SearchSettings,
    limits: Mapping[str, int],
) -> dict[str, Any]:
    """Write the recipe of each solution; return what front.json holds of them."""
    by_key = {choice.key: choice for choice in choices.choices}
    for old in [*out.glob(RECIPE_NAME.format("*")), *out.glob(BITS_NAME.format("*"))]:
        old.unlink()
    points: list[dict[str, Any]] = []
    for number, solution in enumerate(solutions, 1):
        chosen = [by_key[option.name] for option in solution.options]
        name = RECIPE_NAME.format(number) if any(choice.family for choice in chosen) else None
        rules, bits = bits_of(choices, chosen), BITS_NAME.format(number)
        costs = {cost: int(value) for cost, value in solution.costs.items()}
        points.append(
            {
                "recipe": name,
                "bits": bits if rules else None,
                **predictor.losses(chosen),
                "gap": solution.gap,
                "costs": costs,
                "choices": counts(chosen),
            }
        )
        if name is not None:
            data = recipe_of(choices, chosen, settings.keys(), "chosen by surgery search")
            write_text(out / name, recipe_text(data))
        if rules is not None:
            write_text(out / bits, yaml_text(rules))
    families = dict.fromkeys(choice.family for choice in choices.choices if choice.family)
    return {
        "at": settings.at,
        "limits": dict(limits),
        "original": choices.base,
        "healing": settings.healing,
        "not_fitted": [family for family in families if family not in predictor.gains] if settings.healing else [],
        "points": points,
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path, "w") as file:
        file.write(text)


def counts(chosen: Sequence[Choice]) -> dict[str, int]:
    """Return how often each choice that changes the model was taken, such as {"mlp pruned 50%": 4}."""
    return dict(Counter(choice.title for choice in chosen if choice.is_change).most_common())
