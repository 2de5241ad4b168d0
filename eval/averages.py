"""Averages over tasks as papers report them, declared as data; eval/results/averages.py computes them.

RULER       Hsieh et al. 2024, arXiv:2404.06654, section 4: the mean of the thirteen tasks at each length, its means over 4K to 128K
            with linearly increasing or decreasing weights, and the effective length: the longest at which the mean reaches a threshold.
LongBench   Bai et al. 2024, arXiv:2308.14508, section 4: a mean for each of the six categories; "overall" is the mean of those six.
            Code tasks belong to both languages. Log-Linear Attention (arXiv:2506.04761), table 8, has fourteen of the English tasks.
Zero-shot   Log-Linear Attention, table 6: acc_norm of HellaSwag and ARC challenge, acc of the others. LoLCATs (arXiv:2410.10254), whose
            average "no MMLU" has no LAMBADA.
Retrieval   the mean at each length, of the six tasks of Just Read Twice (arXiv:2407.05483) and of the three of Based (arXiv:2402.18668).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
RULER_THRESHOLD = 0.856  # of Llama 2 7B at 4K, the paper's threshold of the effective length
RULER_TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
# category: (English tasks, Chinese tasks)
LONGBENCH = {
    "single-document QA": (("narrativeqa", "qasper", "multifieldqa_en"), ("multifieldqa_zh",)),
    "multi-document QA": (("hotpotqa", "2wikimqa", "musique"), ("dureader",)),
    "summarization": (("gov_report", "qmsum", "multi_news"), ("vcsum",)),
    "few-shot learning": (("trec", "triviaqa", "samsum"), ("lsht",)),
    "synthetic tasks": (("passage_count", "passage_retrieval_en"), ("passage_retrieval_zh",)),
    "code completion": (("lcc", "repobench-p"), ("lcc", "repobench-p")),
}
ACCURACIES = {
    "lambada_openai": "acc",
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
}
RETRIEVAL_TASKS = ("swde", "squad", "fda", "triviaqa", "drop", "nq")


@dataclass(frozen=True)
class Member:
    """One term of an average: the mean of a task's samples, of those with `length` if it is given."""

    task: str
    metric: str
    length: int | None = None
    weight: float = 1.0

    @property
    def label(self) -> str:
        """Name of the term, for messages."""
        return self.task + (f" at {self.length:,}" if self.length is not None else "")


@dataclass(frozen=True)
class Average:
    """A weighted mean of means over tasks.

    Attributes:
        length: the length of its tasks, if all have the same.
        partial: whether a mean of the tasks that are there is shown, under another name, if others are missing.
        source: the paper that reports it.
    """

    name: str
    members: tuple[Member, ...]
    length: int | None = None
    partial: bool = False
    source: str = ""


@dataclass(frozen=True)
class EffectiveLength:
    """The longest length whose average reaches a threshold.

    Attributes:
        averages: one average for each length, ascending.
        threshold: fixed threshold, before scaling; None: the base's average at the shortest of the lengths.
    """

    name: str
    averages: tuple[Average, ...]
    threshold: float | None = None
    source: str = ""


@dataclass(frozen=True)
class SuiteAverages:
    """Averages of a suite."""

    averages: tuple[Average, ...] = ()
    effective: tuple[EffectiveLength, ...] = field(default=())


Lengths = Sequence[int | None]  # lengths of a result's samples, ascending; None where samples have no length
Declare = Callable[[Lengths], SuiteAverages]


def ruler_averages(lengths: Lengths) -> SuiteAverages:
    """Return RULER's averages at the measured lengths."""
    known = [n for n in lengths if n is not None]
    each = tuple(_mean("average of the 13 tasks", RULER_TASKS, "score", n, "RULER, table 3") for n in known)
    weighted = tuple(
        Average(
            name,
            tuple(Member(t, "score", n, w) for n, w in zip(RULER_LENGTHS, weights) for t in RULER_TASKS),
            source="RULER, table 3",
        )
        for name, weights in (("wAvg (inc), 4K to 128K", range(1, 7)), ("wAvg (dec), 4K to 128K", range(6, 0, -1)))
    )
    effective = (
        EffectiveLength("effective length, threshold 85.6", each, RULER_THRESHOLD, "RULER, table 3"),
        EffectiveLength("effective length, threshold of the base", each, None),
    )
    return SuiteAverages((*each, *weighted), effective if each else ())


def longbench_averages(lengths: Lengths) -> SuiteAverages:
    """Return LongBench's category means, overall scores and the mean of the paper's fourteen tasks, at each maximum length."""
    found: list[Average] = []
    for n in lengths or (None,):
        english = {name: tasks[0] for name, tasks in LONGBENCH.items()}
        chinese = {name: tasks[1] for name, tasks in LONGBENCH.items()}
        both = {name: tuple(dict.fromkeys(en + zh)) for name, (en, zh) in LONGBENCH.items()}
        for name, tasks in english.items():
            found.append(_longbench(name, {name: tasks}, n))
        for name, tasks in both.items():
            if tasks != english[name]:
                found.append(_longbench(f"{name}, English and Chinese", {name: tasks}, n))
        fourteen = {name: tasks for name, tasks in english.items() if name != "synthetic tasks"}
        found.append(
            _mean(
                "average of the 14 tasks of Log-Linear Attention",
                [f"longbench_{task}" for tasks in fourteen.values() for task in tasks],
                "score",
                n,
                "Log-Linear Attention, table 8",
            )
        )
        for name, categories in (("English", english), ("Chinese", chinese), ("all", both)):
            found.append(_longbench(f"overall ({name}), mean of the 6 categories", categories, n))
    return SuiteAverages(tuple(found))


def zeroshot_averages(lengths: Lengths) -> SuiteAverages:
    """Return the averages of zero-shot accuracies; acc_norm where papers report it."""
    without = {task: metric for task, metric in ACCURACIES.items() if task != "lambada_openai"}
    plain = dict.fromkeys(ACCURACIES, "acc")
    return SuiteAverages(
        (
            _accuracies(
                "average of 6 (acc_norm of HellaSwag and ARC-c)", ACCURACIES, "Log-Linear Attention, table 6", True
            ),
            _accuracies("average of 5, without LAMBADA (acc_norm of HellaSwag and ARC-c)", without, "LoLCATs"),
            _accuracies("average acc of 6", plain, ""),
        )
    )


def retrieval_averages(lengths: Lengths) -> SuiteAverages:
    """Return the averages of the retrieval tasks at each length."""
    known = [n for n in lengths if n is not None]
    return SuiteAverages(
        (
            *(_mean("average of the 6 tasks", RETRIEVAL_TASKS, "score", n, "Just Read Twice") for n in known),
            *(
                Average(
                    "average of SWDE, SQuAD and FDA",
                    tuple(Member(t, "score", n) for t in RETRIEVAL_TASKS[:3]),
                    n,
                    source="Based",
                )
                for n in known
            ),
        )
    )


def _mean(name: str, tasks: Iterable[str], metric: str, length: int | None, source: str) -> Average:
    return Average(name, tuple(Member(task, metric, length) for task in tasks), length, True, source)


def _accuracies(name: str, metrics: dict[str, str], source: str, partial: bool = False) -> Average:
    return Average(
        name, tuple(Member(task, metric) for task, metric in metrics.items()), partial=partial, source=source
    )


def _longbench(name: str, categories: dict[str, tuple[str, ...]], length: int | None) -> Average:
    """Return the mean of the means of categories."""
    members = tuple(
        Member(f"longbench_{task}", "score", length, 1 / len(tasks)) for tasks in categories.values() for task in tasks
    )
    return Average(name, members, length, source="LongBench")
