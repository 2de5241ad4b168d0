"""Suites `niah` (needle in a haystack by length and depth) and `ruler` (the thirteen tasks of RULER by length)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval import offline_data as mirror
from surgery.eval.lm_eval.adapter import check_chat_template
from surgery.eval.lm_eval.bridge import run_own_tasks
from surgery.eval.lm_eval.tasks import OwnTask
from surgery.eval.long_context.ruler import TASKS, LengthTooShortError, RulerTask, TaskContext
from surgery.eval.long_context.ruler.prompt import Count, prompt_counter
from surgery.eval.long_context.ruler.qa import hotpot, squad
from surgery.eval.long_context.ruler.scores import score_answers
from surgery.eval.long_context.story_needles import StoryNeedles
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, SuiteResult, select_tasks

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
SHORT_LENGTHS = (512, 1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SAMPLES, SAMPLES_PER_DEPTH = 500, 25
NEEDLES: dict[str, RulerTask] = {
    **{name: task for name, task in TASKS.items() if name.startswith("niah")},
    "niah_story": StoryNeedles(),
}
SCORE = EvalMetric("score", "mean", True, scale=100.0, top=1.0, floor=0.0)

ESSAYS = ("baber/paul_graham_essays", None, "train")
SQUAD = ("rajpurkar/squad_v2", None, "validation")
WORD_LIST = ("NVIDIA/RULER", None, "train")  # of GitHub; see eval/word_list.py
HOTPOT = ("hotpotqa/hotpot_qa", "distractor", "validation")


def ruler_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of the suite `ruler` that are run."""
    return select_tasks("ruler", options, tuple(TASKS), TASKS)


def niah_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of the suite `niah` that are run: needles in essays if the mirror has them, otherwise in
    noise.
    """
    return select_tasks("niah", options, ["niah_single_1" if options.data_root is None else "niah_single_2"], NEEDLES)


def run_ruler(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `ruler`."""
    return _run_suite(
        "ruler",
        TASKS,
        ruler_tasks(options),
        eval_model,
        options,
        samples=options.limit or SAMPLES,
        depths=options.depths,
    )


def run_niah(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `niah`."""
    depths = options.depths or DEPTHS
    return _run_suite(
        "niah",
        NEEDLES,
        niah_tasks(options),
        eval_model,
        options,
        samples=options.limit or SAMPLES_PER_DEPTH,
        depths=depths,
    )


def _run_suite(
    suite: str,
    known: Mapping[str, RulerTask],
    names: tuple[str, ...],
    eval_model: EvalModel,
    options: EvalOptions,
    *,
    samples: int,
    depths: tuple[float, ...],
) -> SuiteResult:
    lengths = options.lengths or default_lengths(eval_model.longest)
    texts = load_texts((known[name] for name in names), suite, options)
    count = prompt_token_counter(eval_model.tokenizer, options.apply_chat_template)
    notes: list[str] = []

    def make_task(name: str, length: int) -> OwnTask | None:
        ctx = TaskContext(count, length, options.seed, texts, fill=options.fill)
        try:
            docs = [question.to_dict() for question in known[name].make_questions(ctx, samples, depths)]
        except LengthTooShortError as error:
            notes.append(f"{name} at {length:,} tokens was left out: it {error}")
            return None
        if note := next((doc["note"] for doc in docs if doc["note"]), None):
            notes.append(f"{name} at {length:,} tokens: {note}")
        return make_own_task(known[name], docs, length)

    tasks = [(f"{name}_{n}", partial(make_task, name, n)) for n in lengths for name in names]
    asked = options.model_copy(update={"limit": None})
    result = run_own_tasks(eval_model, tasks, asked, SCORE, max(*lengths, eval_model.longest or 0))
    result.samples = [replace(sample, shown=_shorten_prompt(sample.shown)) for sample in result.samples]
    result.notes += notes
    if not result.samples:
        raise SurgeryError(f"--suite {suite}: nothing fits; {'; '.join(notes)}")
    return result


def make_own_task(task: RulerTask, docs: list[dict[str, Any]], length: int) -> OwnTask:
    """Return the lm-eval task of RULER questions of one length."""
    until = ("\n",) if isinstance(task, StoryNeedles) else ()
    docs = [{**doc, "task": task.name} for doc in docs]
    return OwnTask(f"{task.name}_{length}", docs, _score, task.answer_tokens, until)


def _score(doc: Mapping[str, Any], output: str) -> float:
    return score_answers(output, doc["answers"], doc["rule"])


def _shorten_prompt(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the ends of a long prompt; the whole can be regenerated from task, length, seed and index."""
    prompt = shown["prompt"]
    return {**shown, "prompt": prompt if len(prompt) <= 4000 else f"{prompt[:1000]} [..] {prompt[-2000:]}"}


def default_lengths(longest: int | None) -> tuple[int, ...]:
    """Return RULER's lengths up to the model's longest input; shorter ones for a small model."""
    reach = longest or LENGTHS[-1]
    return tuple(n for n in LENGTHS if n <= reach) or tuple(n for n in SHORT_LENGTHS if n <= reach) or (reach,)


def prompt_token_counter(tokenizer: Any, chat: bool) -> Count:
    """Return a function prompt -> tokens; with the chat template's own tokens if `chat`."""
    plain = prompt_counter(tokenizer)
    if not chat:
        return plain
    check_chat_template(tokenizer)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    added = plain(asked) - plain("x")
    return lambda text: plain(text) + added


def load_texts(tasks: Iterable[RulerTask], suite: str, options: EvalOptions) -> dict[str, Any]:
    """Load the texts that the tasks need from the mirror: essays, squad, hotpot."""
    needs = {task.needs for task in tasks if task.needs}
    sources = {"essays": ESSAYS, "squad": SQUAD, "hotpot": HOTPOT}
    mirror_check = partial(mirror.check_datasets, options.data_root, suite)
    if needs:
        mirror_check([sources[need][0] for need in sorted(needs)])
    words = {"english_words": cache(partial(_english_words, options, suite))} if _has_word_list(options) else {}
    readers = {"essays": _join_essays, "squad": squad, "hotpot": hotpot}
    read = {need: readers[need](mirror.load_rows(options.data_root, suite, *sources[need])) for need in sorted(needs)}
    return words | read


def _has_word_list(options: EvalOptions) -> bool:
    return options.data_root is not None and (options.data_root / WORD_LIST[0]).is_dir()


def _english_words(options: EvalOptions, suite: str) -> tuple[str, ...]:
    """Return RULER's longer list of words, read when a task needs it."""
    return tuple(mirror.load_rows(options.data_root, suite, *WORD_LIST)["word"])


def _join_essays(rows: Any) -> str:
    """Join all essays with single spaces, as RULER reads them."""
    return " ".join(" ".join(rows["text"]).split()) + " "
