"""Generation tasks with prepared prompts and their own score, converted to lm-eval tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Doc = Mapping[str, Any]


@dataclass(frozen=True)
class OwnTask:
    """A task of generated answers.

    Attributes:
        docs: documents with `id` (the same for every model), `prompt` and `prefix`, the given beginning of the answer.
        score: (document, answer) -> score.
        answer_tokens: maximum tokens of an answer.
        until: stop strings.
        generation: further arguments of generate().
        chat: whether the chat template applies, if requested.
    """

    name: str
    docs: Sequence[Doc]
    score: Callable[[Doc, str], float]
    answer_tokens: int
    until: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True

    def to_lm_eval(self) -> Any:
        """Return the task as lm-eval's ConfigurableTask."""
        from datasets import Dataset

        from lm_eval.api.task import ConfigurableTask

        def process_results(doc: Doc, results: list[str]) -> dict[str, float]:
            return {"score": self.score(doc, results[0])}

        return ConfigurableTask(
            config={
                "task": self.name,
                "custom_dataset": lambda **_: {"test": Dataset.from_list([dict(doc) for doc in self.docs])},
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": lambda doc: doc["prompt"],
                "doc_to_target": lambda doc: str(doc["answers"]),
                "gen_prefix": "{{prefix}}",
                "target_delimiter": "",
                "num_fewshot": 0,
                "generation_kwargs": {
                    "do_sample": False,
                    "max_gen_toks": self.answer_tokens,
                    "until": list(self.until),
                    **self.generation,
                },
                "process_results": process_results,
                "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
                "metadata": {"version": 1},
            }
        )
