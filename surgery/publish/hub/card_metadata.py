"""Front matter of a model card: license, base model, tags, widget example and the measured metrics (`model-index`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from surgery.checkpoint.source import CheckpointSource
from surgery.publish.hub.files import UploadFile
from surgery.publish.hub.license import License, is_hub_id, public_name

MAX_RESULTS = 100  # rows of results.json that model-index lists; the Hub shows a few
WIDGET_TEXT = "The most important thing to know about the ocean is"


def front_matter(
    source: CheckpointSource,
    report: dict[str, Any],
    license: License,
    name: str,
    *,
    tags: Iterable[str],
    items: list[UploadFile],
    repo: str,
) -> str:
    """Return the YAML front matter of a card, with its `---` lines.

    name: the original model, a Hub id or a path; `base_model` is given for Hub ids only. tags: structures and mixers.
    items: uploaded files, of which eval/results.json is read. repo: id of the target repository.
    """
    import yaml

    data: dict[str, Any] = {**license.metadata(), "library_name": "transformers"}
    generates = _generates_text(source)
    if generates:
        data["pipeline_tag"] = "text-generation"
    if is_hub_id(name):
        data["base_model"] = name
        data["base_model_relation"] = "finetune" if report.get("training") else "quantized"
    data["tags"] = ["surgery", *sorted(tags)]
    if generates:
        data["widget"] = [{"text": WIDGET_TEXT}]
        if results := _model_index_results(items):
            data["model-index"] = [{"name": repo.split("/")[-1], "results": results}]
    return "---\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True).strip() + "\n---"


def base_model_note(report: dict[str, Any], base_model: str | None) -> str | None:
    """Return the request for --base-model if the source is a folder, whose name is no `base_model` on the Hub; else
    None.
    """
    name = base_model or str(report["source"]["name"])
    if is_hub_id(name):
        return None
    return (
        f"the card has no base_model, because {public_name(name)} is a local path. If the original is on the Hub, name it: "
        "--base-model org/name."
    )


def _generates_text(source: CheckpointSource) -> bool:
    architecture = (source.config.get("architectures") or [""])[0]
    return str(architecture).endswith(("ForCausalLM", "LMHeadModel"))


def _model_index_results(items: list[UploadFile]) -> list[dict[str, Any]]:
    """Return the entries of `model-index` for the converted model: one per task of eval/results.json, without
    groups.
    """
    item = next((item for item in items if item.name == "eval/results.json"), None)
    if item is None:
        return []
    rows = _checked_rows(json.loads(item.content()))
    tasks: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows[:MAX_RESULTS]:
        tasks.setdefault((str(row["suite"]), str(row["task"])), []).append(_metric(row))
    return [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": _one_line(task), "type": _one_line(suite)},
            "metrics": metrics,
        }
        for (suite, task), metrics in tasks.items()
    ]


def _checked_rows(data: Any) -> list[dict[str, Any]]:
    """Return the rows of a results file that summarize a task and have a finite value of the converted model."""
    rows = data.get("rows") if isinstance(data, dict) else None
    return [row for row in rows if _is_summary(row)] if isinstance(rows, list) else []


def _is_summary(row: Any) -> bool:
    if not (isinstance(row, dict) and isinstance(row.get("values"), dict) and isinstance(row.get("metric"), dict)):
        return False
    value = row["values"].get("converted")
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return known and not row.get("group") and {"suite", "task"} <= row.keys() and "name" in row["metric"]


def _metric(row: dict[str, Any]) -> dict[str, Any]:
    """Return a metric with the value of the converted model; the Hub's type of a perplexity is "perplexity"."""
    metric = row["metric"]
    title = _one_line(metric.get("title") or metric["name"])
    kind = "perplexity" if metric.get("kind") == "ppl" else _one_line(metric["name"])
    return {"type": kind, "name": title, "value": round(float(row["values"]["converted"]), 6)}


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())[:200]
