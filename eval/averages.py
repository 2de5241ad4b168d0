"""Averages over tasks as papers report them, declared as data; eval/results/averages.py computes them.

RULER       Hsieh et al. 2024, arXiv:2404.06654, section 4: the mean of the thirteen tasks at each length, its means over 4K to 128K
            with linearly increasing or decreasing weights, and the effective length: the longest at which the mean
            reaches a threshold.
LongBench   Bai et al. 2024, arXiv:2308.14508, section 4: a mean for each of the six categories; "overall" is the mean of those six.
            Code tasks belong to both languages. Log-Linear Attention (arXiv:2506.04761), table 8, has fourteen of the
            English tasks.
Zero-shot   Log-Linear Attention, table 6: acc_norm of HellaSwag and ARC challenge, acc of the others. LoLCATs (arXiv:2410.10254), whose
            average "no MMLU" has no LAMBADA.
LongBench-E the mean of its thirteen tasks and of their six categories, for documents of 0 to 4K, 4K to 8K and more than
            8K words.
LongBench 2 Bai et al. 2024, arXiv:2412.15204: the share of all questions answered correctly, of short, medium and long
            documents, of easy and hard questions, and of each category. Every question counts the same.
BABILong    Kuratov et al. 2024, arXiv:2406.10149: the mean of qa1 to qa5 at each length.
InfiniteBench   Zhang et al. 2024, arXiv:2402.13718: the mean over tasks; lm-eval has eleven of the twelve.
Retrieval   the mean at each length, of the six tasks of Just Read Twice (arXiv:2407.05483) and of the three of Based (arXiv:2402.18668).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
LONGBENCH_E_TASKS = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum"),
    *("passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
LONGBENCH_E_RANGES = ("0-4k", "4-8k", "8k+")  # words of a document
LONGBENCH2_RANGES = ("short", "medium", "long")
LONGBENCH2 = {
    "single-document QA": (
        *("govt_single", "legal_single", "lit_single", "fin_single", "academic_single"),
        *("detective", "event_order"),
    ),
    "multi-document QA": ("govt_multi", "academic_multi", "fin_multi", "news_multi", "legal_multi"),
    "long in-context learning": ("user_guide", "translate", "many_shot"),
    "long-dialogue history": ("agent_history", "dialogue_history"),
    "code repositories": ("code",),
    "long structured data": ("graph", "table"),
}
BABILONG_TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
INFINITEBENCH_TASKS = (
    *("passkey", "kv_retrieval", "number_string", "code_run", "code_debug", "math_find", "longdialogue_qa_en"),
    *("longbook_qa_en", "longbook_sum_en", "longbook_choice_en", "longbook_qa_chn"),
)
RETRIEVAL_TASKS = ("swde", "squad", "fda", "triviaqa", "drop", "nq")


@dataclass(frozen=True)
class Member:
    """One term of an average: the mean of a task's samples, of those with `length` and in the group `where` if they are
    given.
    """

    task: str
    metric: str
    length: int | None = None
    weight: float = 1.0
    where: tuple[str, str] | None = None

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
        by_size: whether every sample counts the same, instead of every task. Tasks without samples in the group are
            then no loss.
    """

    name: str
    members: tuple[Member, ...]
    length: int | None = None
    partial: bool = False
    source: str = ""
    by_size: bool = False


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
    means = tuple(_mean("average of the 13 tasks", RULER_TASKS, "score", n, "RULER, table 3") for n in known)
    weighted = tuple(
        Average(
            name,
            tuple(Member(t, "score", n, w) for n, w in zip(RULER_LENGTHS, weights) for t in RULER_TASKS),
            source="RULER, table 3",
        )
        for name, weights in (("wAvg (inc), 4K to 128K", range(1, 7)), ("wAvg (dec), 4K to 128K", range(6, 0, -1)))
    )
    effective = (
        EffectiveLength("effective length, threshold 85.6", means, RULER_THRESHOLD, "RULER, table 3"),
        EffectiveLength("effective length, threshold of the base", means, None),
    )
    return SuiteAverages((*means, *weighted), effective if means else ())


def longbench_averages(lengths: Lengths) -> SuiteAverages:
    """Return LongBench's category means, overall scores and the mean of the paper's fourteen tasks, at each maximum
    length.
    """
    averages: list[Average] = []
    for n in lengths or (None,):
        english = {name: tasks[0] for name, tasks in LONGBENCH.items()}
        chinese = {name: tasks[1] for name, tasks in LONGBENCH.items()}
        both = {name: tuple(dict.fromkeys(en + zh)) for name, (en, zh) in LONGBENCH.items()}
        for name, tasks in english.items():
            averages.append(_longbench(name, {name: tasks}, n))
        for name, tasks in both.items():
            if tasks != english[name]:
                averages.append(_longbench(f"{name}, English and Chinese", {name: tasks}, n))
        fourteen = {name: tasks for name, tasks in english.items() if name != "synthetic tasks"}
        averages.append(
            _mean(
                "average of the 14 tasks of Log-Linear Attention",
                [f"longbench_{task}" for tasks in fourteen.values() for task in tasks],
                "score",
                n,
                "Log-Linear Attention, table 8",
            )
        )
        for name, categories in (("English", english), ("Chinese", chinese), ("all", both)):
            averages.append(_longbench(f"overall ({name}), mean of the 6 categories", categories, n))
    return SuiteAverages(tuple(averages))


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


def longbench_e_averages(lengths: Lengths) -> SuiteAverages:
    """Return the means of LongBench-E's thirteen tasks and of their six categories, by range of the documents'
    length.
    """
    categories = {name: tuple(t for t in tasks[0] if t in LONGBENCH_E_TASKS) for name, tasks in LONGBENCH.items()}
    averages = []
    for n in lengths or (None,):
        for words in LONGBENCH_E_RANGES:
            members = [
                Member(f"longbench_e_{task}", "score", n, 1 / len(tasks), ("words", words))
                for tasks in categories.values()
                for task in tasks
            ]
            equal = tuple(replace(member, weight=1.0) for member in members)
            averages.append(Average(f"average of the 13 tasks, {words} words", equal, n, source="LongBench"))
            name = f"mean of the 6 categories, {words} words"
            averages.append(Average(name, tuple(members), n, source="LongBench"))
    return SuiteAverages(tuple(averages))


def longbench2_averages(lengths: Lengths) -> SuiteAverages:
    """Return LongBench v2's overall accuracy, and those of each range of length, difficulty and category."""
    tasks = [task for group in LONGBENCH2.values() for task in group]
    averages = []
    for n in lengths or (None,):

        def average(
            name: str, chosen: Sequence[str], where: tuple[str, str] | None = None, n: int | None = n
        ) -> Average:
            members = tuple(Member(f"longbench2_{task}", "acc", n, where=where) for task in chosen)
            return Average(name, members, n, source="LongBench v2", by_size=True)

        averages.append(average("overall", tasks))
        averages += [average(words, tasks, ("words", words)) for words in LONGBENCH2_RANGES]
        averages += [average(group, tasks, ("difficulty", group)) for group in ("easy", "hard")]
        averages += [average(name, group) for name, group in LONGBENCH2.items()]
    return SuiteAverages(tuple(averages))


def babilong_averages(lengths: Lengths) -> SuiteAverages:
    """Return BABILong's mean of qa1 to qa5 at each length."""
    tasks = [f"babilong_{task}" for task in BABILONG_TASKS]
    return SuiteAverages(
        tuple(_mean("average of qa1 to qa5", tasks, "acc", n, "BABILong") for n in lengths if n is not None)
        or (_mean("average of qa1 to qa5", tasks, "acc", None, "BABILong"),)
    )


def infinitebench_averages(lengths: Lengths) -> SuiteAverages:
    """Return the mean of InfiniteBench's eleven tasks of lm-eval, at each maximum length."""
    tasks = [f"infinitebench_{task}" for task in INFINITEBENCH_TASKS]
    name = "average of 11 tasks, without math_calc"
    return SuiteAverages(tuple(_mean(name, tasks, "score", n, "InfiniteBench") for n in lengths or (None,)))
