"""`surgery search`: measure the choices of a model, solve for the limits, and write table, front and recipes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
    expert_kinds,
    find_choices,
    kind_recipe,
    with_bits,
)
from surgery.budget.damage import Damage, DamagePass, pass_size, steps
from surgery.budget.front import Front, find_front
from surgery.budget.gains import read_gains
from surgery.budget.limits import MEASURES, parse_limit
from surgery.budget.picture import draw_front
from surgery.budget.predict import Predictor
from surgery.budget.recipes import bits_of, recipe_of, recipe_text, yaml_text
from surgery.budget.solver import Solution
from surgery.budget.table import (
    TABLE_NAME,
    PlanKey,
    Row,
    measured_damages,
    plan_key,
    read_table,
    table_start,
    write_table,
)
from surgery.budget.times import PHASES, find_device
from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.context import ConversionContext
from surgery.conversion.fewer_experts import ExpertScores, fewer_model
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
from surgery.structures.quantized import BITS

FRONT_NAME, PICTURE_NAME, WORK_NAME, LOCK_NAME = "front.json", "front.png", "work", "lock"
RECIPE_NAME, BITS_NAME = "recipe-{}.yaml", "bits-{}.yaml"  # by number of the point
KNOWN_FILES = (
    *(TABLE_NAME, FRONT_NAME, PICTURE_NAME, RECIPE_NAME.format("*"), BITS_NAME.format("*")),
    *(f"{WORK_NAME}/**", LOCK_NAME),
)
POINTS = 8  # of the front, beside the one at the limits
AT = 4096  # tokens of the sequence whose cache counts
MOST_AT = 2**26  # the most such tokens


@dataclass(frozen=True)
class SearchSettings:
    """What a search reads and where it runs. calibration, tokens, length, seed: as in a conversion recipe; None: the
    recipe's default. at: tokens of a sequence whose cache and multiply-accumulates count. points: of the front. bits: in which parts of linears may be stored beside their dtype, 8 and 4. only:
    words of the kinds of choices, comma-separated (surgery.eval.speed.selection). healing: whether the loss after
    healing is predicted, and not that of the conversion itself. check: whether the points of the front are measured as a whole. gains: a file of gains; None: those of this package.
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
    check: bool = True
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
        return choice.is_change and (choice.name == AS_IS or self.selects_title(choice.title))

    def selects_title(self, title: str) -> bool:
        """Return whether `only` selects the title of a kind of choices."""
        return is_selected(title, self.only)

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
    if not 1 <= settings.at <= MOST_AT:
        raise SurgeryError(f"search: at must be 1 to {MOST_AT} tokens (got {settings.at})")
    if wrong := [number for number in settings.bits if number not in BITS]:
        raise SurgeryError(f"search: bits must be 8 or 4 (got {wrong[0]})")
    gains = read_gains(settings.gains) if settings.healing else {}
    folder = FolderSource(source, settings.trust_remote_code, settings.revision)
    model = folder.open(progress)
    counting = settings.counting(limits)
    kinds = [*default_kinds(), *expert_kinds(model)]
    choices = find_choices(model, settings.keys(), kinds, counting, settings.selects_title)
    if not any(settings.selects(choice) for choice in choices.choices):
        names = ", ".join(dict.fromkeys(choice.title for choice in choices.choices if choice.is_change))
        raise SurgeryError(f"search: --only {settings.only!r} selects no kind of choice; kinds are {names}")
    wanted = {name: parse_limit(MEASURES[name], text, choices.base[name]) for name, text in limits.items()}
    check_not_link(out)
    out.mkdir(parents=True, exist_ok=True)
    with _removed_if_empty(out), exclusive_lock(out, "search"):
        check_no_unknown_files(out, KNOWN_FILES)
        for note in choices.notes:
            progress.say(f"note: {note}")
        measuring = Measuring(folder, model, choices, out, settings, counting, progress=progress)
        predictor = Predictor(measuring.run(), gains, measuring.plans)
        every = with_bits(choices, model, settings.bits, measuring.counting)
        usable = [choice for choice in every if not choice.is_change or settings.selects(choice)]
        families = {choice.key: choice.families for choice in usable if settings.check}
        front = find_front(predictor.problem(usable, choices.base), wanted, settings.points, families)
        by_key = {choice.key: choice for choice in usable}
        if settings.check:
            solutions = [front.asked, *front.others, *front.rivals.values()]
            measuring.measure_plans([[by_key[option.name] for option in s.options] for s in solutions])
        result = write_result(out, replace(choices, choices=usable), front, predictor, settings, wanted)
        result["source"] = source
        result["times"] = counting.device.describe() if counting.device is not None else ""
        result |= {"binds": front.binds, "excess": dict(front.asked.excess), "notes": choices.notes}
        write_json(out / FRONT_NAME, result)
        draw_front(result, out / PICTURE_NAME)
        shutil.rmtree(out / WORK_NAME, ignore_errors=True)
    return {"out": str(out), **result}


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Remove a folder afterwards in which nothing was written, because of an error."""
    try:
        yield
    finally:
        with suppress(OSError):  # it holds files
            folder.rmdir()


class Measuring:
    """The measurement of all damages of a model, in steps that are written to SEARCH/table.json one by one.

    choices: with final costs after `run`: those of MLR attention follow from measurements. inputs, samples, start: set
    by `run`: the calibration text, and what must be equal when a search goes on.
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
        self.ctx: ConversionContext | None = None
        self.has_grams = False
        self.fewer: dict[int, MetaModel] = {}  # the model with fewer experts, by their number
        self.experts: ExpertScores | None = None
        self.damages: dict[str, Damage] = {}
        self.plans: dict[PlanKey, Damage] = {}  # damages of plans measured as a whole

    def run(self) -> dict[str, Damage]:
        """Return the damage of each choice that changes the model, by its name."""
        recipe = validate_recipe({"structure": "low_rank", **self.settings.keys()}, "of the search")
        inputs = self.source.calibration(recipe)
        if inputs is None:
            raise SurgeryError("search: give --calibration, a text on which choices are measured")
        samples = CalibrationSet.from_inputs(inputs.tensors, recipe.holdout)
        self._leave_out_wide_windows(samples)
        self.inputs, self.samples = inputs, samples
        self.start = table_start(self.model, self.settings.keys(), samples.digest())
        every = with_bits(self.choices, self.model, BITS, self.counting)
        changes = [choice for choice in every if choice.is_measured]
        stored = read_table(
            self.out,
            self.start,
            {choice.key for choice in changes},
            {choice.key for choice in every if choice.is_change},
        )
        self.damages, self.plans = measured_damages(stored.rows, changes), stored.plans
        self._restore_mixers(stored.rows)
        missing = [choice for choice in changes if choice.key not in self.damages and self.settings.selects(choice)]
        if missing:
            self._measure(missing)
        self._write()
        return self.damages

    def measure_plans(self, plans: Iterable[Sequence[Choice]]) -> None:
        """Measure plans as a whole, those that were not, and write the table after each pass. `run` was called."""
        missing = {plan_key(chosen): [choice for choice in chosen if choice.is_change] for chosen in plans}
        missing = {key: chosen for key, chosen in missing.items() if chosen and key not in self.plans}
        if not missing:
            return
        with self._fast_matmul():
            ctx = self._prepare([choice for chosen in missing.values() for choice in chosen])
            most, keys = pass_size(ctx), list(missing)
            groups = [keys[first : first + most] for first in range(0, len(keys), most)]
            for number, group in enumerate(groups, 1):
                found = self._run_pass(
                    {" + ".join(key): missing[key] for key in group},
                    f"measuring {len(keys)} whole plans, step {number} of {len(groups)}",
                )
                self.plans |= {key: found[" + ".join(key)] for key in group}
                self._write()

    def _write(self) -> None:
        every = with_bits(self.choices, self.model, BITS, self.counting)
        choices = replace(self.choices, choices=[choice for choice in every if choice.is_measured])
        write_table(self.out, self.start, choices, self.damages, self.mixers, plans=self.plans, at=self.settings.at)

    def _leave_out_wide_windows(self, samples: CalibrationSet) -> None:
        """Leave out mixers whose window holds whole samples: nothing shows what they lose."""
        length = samples.tokens() // samples.rows
        for kind in [kind for kind in self.choices.kinds if kind.part == ATTENTION]:
            window = kind.settings.get("window", 0) + kind.settings.get("sinks", 0)
            if window >= length:
                if self.settings.selects_title(kind.title):
                    self.choices.notes.append(
                        f"{kind.title} is left out: its window of {window} tokens holds whole samples of {length} "
                        "tokens, so that nothing shows what it loses. Give a larger --length"
                    )
                    self.progress.say(f"note: {self.choices.notes[-1]}")
                self.choices.choices = [choice for choice in self.choices.choices if choice.kind != kind]
                self.choices.kinds.remove(kind)

    # -- measuring ---------------------------------------------------------------------------------
    def _measure(self, missing: list[Choice]) -> None:
        """Measure the damages of the missing choices, and write the table after each step."""
        with self._fast_matmul():
            groups = list(steps(self._prepare(missing), missing))
            for number, group in enumerate(groups, 1):
                title = f"measuring choices, step {number} of {len(groups)}"
                self.damages |= self._run_pass({choice.key: [choice] for choice in group}, title)
                self._write()

    def _run_pass(self, variants: Mapping[str, Sequence[Choice]], title: str) -> dict[str, Damage]:
        """Return the damage of variants that one pass measures, by name. `_prepare` was called for their choices."""
        ctx = self._prepare([])
        with self.progress.bar(title, len(ctx.plan.layout.layers)) as tick:
            return DamagePass(ctx, variants, self.choices.plans, self.contexts, self.fewer, tick).run()

    def _fast_matmul(self) -> AbstractContextManager[None]:
        device = choose_device(self.settings.device)
        return fast_float32_matmul(device, self.model.most_parameters(self.choices.layers))

    def _prepare(self, choices: Iterable[Choice]) -> ConversionContext:
        """Return the context in which these choices can be measured, which is made once."""
        if self.ctx is None:
            self.ctx = self._context(self.samples)
            score = score_text(self.ctx)
            for warning in [*self.inputs.notes, *(score.warnings if score else [])]:
                self.progress.say(f"warning: {warning}")
        kinds = {choice.kind for choice in choices if choice.kind is not None}
        self._set_contexts(self.ctx, {kind for kind in kinds if (kind.part, kind.name) not in self.contexts})
        self._set_fewer_experts(self.ctx, [kind.number for kind in kinds if kind.number is not None])
        if not self.has_grams and any(kind.part != ATTENTION and kind.number is None for kind in kinds):
            measure_rank_errors(self.ctx)  # writes the Gram matrices of the output gradients
            self.has_grams = True
        return self.ctx

    def _context(self, samples: CalibrationSet) -> ConversionContext:
        """Return the context of all linears: their targets, and pruned MLPs beside them, as a quick trial fits them."""
        linears = [
            (kind, self.choices.plans[kind.part, kind.name])
            for kind in self.choices.kinds
            if kind.part != ATTENTION and kind.number is None
        ]
        plan = self.choices.plan
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

    def _set_fewer_experts(self, ctx: ConversionContext, numbers: Iterable[int]) -> None:
        """Set the models with these numbers of experts; all experts are measured once, in the original."""
        missing = [number for number in numbers if number not in self.fewer]
        plans = {plan.experts.number: plan.experts for plan in self.choices.plans.values() if plan.experts is not None}
        if missing and self.experts is None:
            self.experts = ExpertScores(ctx, plans[missing[0]])
            self.experts.run()
        for number in missing:
            assert self.experts is not None
            plan, scores = plans[number], self.experts.scores
            kept = {path: plan.stack.select(scores(path), number) for path in plan.stack.paths}
            file = self.out / WORK_NAME / f"experts-{number}.safetensors"
            self.fewer[number], _ = fewer_model(ctx.model, plan.with_kept(kept), file)

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
def write_result(
    out: Path, choices: Choices, front: Front, predictor: Predictor, settings: SearchSettings, limits: Mapping[str, int]
) -> dict[str, Any]:
    """Write the recipe of each solution; return what front.json holds of them. The first point is the one within the
    limits with the lowest predicted loss, a rival among them; without measured plans it is the solver's.
    """
    by_key = {choice.key: choice for choice in choices.choices}

    def entry(solution: Solution) -> dict[str, Any]:
        chosen = [by_key[option.name] for option in solution.options]
        costs = {cost: int(value) for cost, value in solution.costs.items()}
        return {**predictor.losses(chosen), "gap": solution.gap, "costs": costs, "choices": counts(chosen)}

    for old in [*out.glob(RECIPE_NAME.format("*")), *out.glob(BITS_NAME.format("*"))]:
        old.unlink()
    solutions = [front.asked, *front.others]
    rivals = {family: entry(solution) for family, solution in front.rivals.items()}
    if settings.check and not front.asked.excess:
        within = [s for s in solutions if all(s.costs[name] <= limit for name, limit in limits.items())]
        best = min([*within, *front.rivals.values()], key=lambda solution: float(entry(solution)["loss"]))
        solutions = [best, *(solution for solution in solutions if solution is not best)]
    entries = [entry(solution) for solution in solutions]
    points: list[dict[str, Any]] = []
    for number, (solution, found) in enumerate(zip(solutions, entries), 1):
        chosen = [by_key[option.name] for option in solution.options]
        name = RECIPE_NAME.format(number) if any(choice.family for choice in chosen) else None
        rules, bits = bits_of(choices, chosen), BITS_NAME.format(number)
        points.append({"recipe": name, "bits": bits if rules else None, **found})
        if name is not None:
            data = recipe_of(choices, chosen, settings.keys(), "chosen by surgery search")
            front_data = front_of(entries, number, limits, choices.base, settings)
            write_text(out / name, recipe_text({**data, "front": front_data}))
        if rules is not None:
            write_text(out / bits, yaml_text(rules))
    names = dict.fromkeys(choice.family for choice in choices.choices if choice.family)
    return {
        "at": settings.at,
        "limits": dict(limits),
        "original": choices.base,
        "healing": settings.healing,
        "not_fitted": [family for family in names if family not in predictor.gains] if settings.healing else [],
        "points": points,
        "rivals": rivals,
    }


def front_of(
    entries: Sequence[Mapping[str, Any]],
    number: int,
    limits: Mapping[str, int],
    original: Mapping[str, int],
    settings: SearchSettings,
) -> dict[str, Any]:
    """Return the key `front` of the recipe of a point. number: of the point, from 1."""
    swept, limit = next(iter(limits.items()))
    points = [
        {"value": entry["costs"][swept], **{key: float(f"{entry[key]:.4g}") for key in ("loss", "low", "high")}}
        for entry in entries
    ]
    order = sorted(range(len(points)), key=lambda index: int(points[index]["value"]))
    return {
        "cost": swept,
        "limit": limit,
        "original": original[swept],
        "at": settings.at,
        "healing": settings.healing,
        "chosen": order.index(number - 1) + 1,
        "points": [points[index] for index in order],
    }


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path, "w") as file:
        file.write(text)


def counts(chosen: Sequence[Choice]) -> dict[str, int]:
    """Return how often each choice that changes the model was taken, such as {"mlp pruned 50%": 4}."""
    return dict(Counter(choice.title for choice in chosen if choice.is_change).most_common())
