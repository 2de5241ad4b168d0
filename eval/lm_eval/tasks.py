"""Tasks of our own, in lm-eval's form: prompts that are ready, answers that are generated, a score for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Doc = Mapping[str, Any]


@dataclass(frozen=True)
class OwnTask:
    """docs: each with `id` (the same for every model), `prompt` and `prefix`, which is the beginning of the answer and not
    asked for; group: what samples are tabulated by. until: where an answer ends; generation: more for generate()."""

    name: str
    docs: Sequence[Doc]
    score: Callable[[Doc, str], float]
    answer_tokens: int
    until: tuple[str, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = True  # asked in the chat template, where one is wanted

    def to_lm_eval(self) -> Any:
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
