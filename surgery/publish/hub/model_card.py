"""The model card of a converted checkpoint, from what its report and its measurements say; no figure is typed in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.table import read_mixers
from surgery.core.tables import format_count
from surgery.publish.hub.files import UploadFile
from surgery.publish.hub.license import License, is_hub_id, public_name
from surgery.publish.tables import format_share

GENERATED_MARK = "<!-- written by surgery push; a README.md of your own in the folder takes its place -->"
ASIDE = ("eval/", "training/")

# Whom to cite for what stands in a checkpoint: a name in its table -> the paper.
PAPERS = {
    "btt": "Qiu et al. 2024, Compute Better Spent: Replacing Dense Layers with Structured Matrices, arXiv:2406.06248",
    "monarch": "Dao et al. 2022, Monarch: Expressive Structured Matrices for Efficient and Accurate Training, arXiv:2204.00595",
    "pivoted_low_rank": "Zhao et al. 2025, Pivoting Factorization (PIFA)",
    "low_rank": "Wang et al. 2024, SVD-LLM: Truncation-aware Singular Value Decomposition for Large Language Model Compression, arXiv:2403.07378",
    "kronecker": "Van Loan and Pitsianis 1993, Approximation with Kronecker Products",
    "mlr": "Kuang et al. 2025, Customizing the Inductive Biases of Softmax Attention using Structured Matrices",
    "decay": "Sun et al. 2023, Retentive Network: A Successor to Transformer for Large Language Models, arXiv:2307.08621",
    "gates": "Dao and Gu 2024, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality, arXiv:2405.21060",
    "delta": "Yang et al. 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464",
    "hierarchical": "Guo et al. 2025, Log-Linear Attention, arXiv:2506.04761",
    "toeplitz": "Guo et al. 2025, Log-Linear Attention, arXiv:2506.04761",
    "blocks": "Zhang et al. 2026, MHLA",
    "hedgehog": "Zhang et al. 2024, The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry, arXiv:2402.04347",
}
PAPERS |= dict.fromkeys(("bilinear_mlr", "bilinear_btt"), PAPERS["mlr"])


def render_card(
    source: CheckpointSource,
    report: dict[str, Any],
    license: License,
    base: str | None,
    items: list[UploadFile],
    repo: str,
) -> str:
    """README.md: head for the Hub, then what it is, how to load it, what was measured, limits, papers."""
    name = base or report["source"]["name"]
    parts = [
        _front_matter(source, report, license, name, items),
        GENERATED_MARK,
        f"# {repo.split('/')[-1]}",
        _introduction(source, report, name),
        _replacement_section(source, report),
        _usage_section(repo),
        _eval_section(source, items, report),
        _training_section(report),
        _limits_section(report, license),
        _recipe_section(report),
        _papers_section(source),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(value: Any) -> str:
    """A text from a file, in the midst of Markdown: one line, without what could end or begin a code span, a link, a tag
    or a cell of a table."""
    return " ".join(re.sub(r"[`<>|\[\]]", " ", str(value)).split())


def _front_matter(
    source: CheckpointSource, report: dict[str, Any], license: License, name: str, items: list[UploadFile]
) -> str:
    import yaml

    data: dict[str, Any] = {**license.metadata(), "library_name": "transformers"}
    architecture = (source.config.get("architectures") or [""])[0]
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        data["pipeline_tag"] = "text-generation"
    if is_hub_id(name):
        data["base_model"] = name
        data["base_model_relation"] = "finetune" if report.get("training") else "quantized"
    data["tags"] = ["surgery", *sorted({*_count_structures(report), *_count_mixers(source)})]
    return "---\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True).strip() + "\n---"


def _count_structures(report: dict[str, Any]) -> Counter[str]:
    return Counter(record["structure"]["structure"] for record in report["modules"])


def _count_mixers(source: CheckpointSource) -> Counter[str]:
    """How many layers have which mixer: linear-hierarchical, mlr."""
    return Counter(_mixer_name(spec) for spec in read_mixers(source.config, source.name).values())


def _mixer_name(spec: dict[str, Any]) -> str:
    mask = spec["mask"]["name"] if "mask" in spec else None
    return "-".join(word for word in (spec["mixer"], mask, "delta" if spec.get("scores") == "delta" else None) if word)


def _introduction(source: CheckpointSource, report: dict[str, Any], name: str) -> str:
    revision = report["source"].get("revision")
    at = f" at revision `{plain(revision)}`" if revision else ""
    link = (
        f"[{plain(name)}](https://huggingface.co/{plain(name)})" if is_hub_id(name) else f"`{plain(public_name(name))}`"
    )
    how = "converted and healed" if report.get("training") else "converted, without training,"
    return (
        f"{link}{at}, {how} by [surgery](https://pypi.org/project/transformer-surgery/) {plain(report['surgery'])}: its "
        "expensive parts are replaced by structured ones. Architecture, tokenizer and use are those of the original."
    )


def _replacement_section(source: CheckpointSource, report: dict[str, Any]) -> str:
    total = report["totals"]
    lines = ["## What was replaced", "", "| | before | after | |", "| --- | --- | --- | --- |"]
    if total["replaced_params_before"]:
        lines.append(
            _row("numbers in replaced matrices", total["replaced_params_before"], total["replaced_params_after"])
        )
        lines.append(_row("their multiply-accumulates per token", total["macs_before"], total["macs_after"]))
    lines.append(_row("numbers in the checkpoint", total["params_before"], total["params_after"]))
    lines.append(_row("bytes on disk", total["bytes_before"], total["bytes_after"]))
    kinds = ", ".join(f"{number} linears by {plain(name)}" for name, number in _count_structures(report).items())
    swapped = ", ".join(
        f"softmax attention of {number} layers by {plain(name)}" for name, number in _count_mixers(source).items()
    )
    summary = "; ".join(part for part in (kinds, swapped) if part)
    return "\n".join([*lines, "", f"Replaced: {summary}. `surgery_report.json` has every matrix with its error."])


def _row(label: str, before: int, after: int) -> str:
    return f"| {label} | {format_count(before)} | {format_count(after)} | {format_share(after, before)} |"


def _usage_section(repo: str) -> str:
    return f"""## Use

```python
import surgery  # pip install transformer-surgery; teaches transformers what these weights are
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```

Where surgery is installed but not imported, `trust_remote_code=True` does the same (two lines that import it). Without surgery,
transformers stops at the first replaced weight; `surgery densify {repo} --out DENSE` makes structured linears an ordinary
checkpoint for it."""


def _eval_section(source: CheckpointSource, items: list[UploadFile], report: dict[str, Any]) -> str:
    table = next((item for item in items if item.name == "eval/table.md"), None)
    lines = ["## Before and after", ""]
    if table is not None:
        lines.append(table.content().strip())
        lines += [
            "",
            *(
                f"![{Path(i.name).stem}]({i.name})"
                for i in items
                if i.name.startswith("eval/") and i.name.endswith(".png")
            ),
        ]
    if held := report.get("held_out"):
        error = f" ± {held['difference_se']:.4f} (standard error)" if held.get("difference_se") is not None else ""
        lines.append(
            f"\nOn the {held['tokens']:,} held-out tokens of the conversion, before any training: {held['original']:.4f} -> "
            f"{held['converted']:.4f} {plain(held['unit'])}, a difference of {held['converted'] - held['original']:.4f}{error}."
        )
    if len(lines) == 2:
        lines.append("Not measured: it was converted without a text. `surgery eval` measures it beside the original.")
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _training_section(report: dict[str, Any]) -> str:
    runs = report.get("training") or []
    if not runs:
        return ""
    lines = ["## Healing", ""]
    lines += [
        "| run | stages | tokens | perplexity: original | converted | healed | state handed back |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, run in enumerate(runs, 1):
        stages = run.get("stages", [])
        kinds = ", ".join(plain(stage["kind"]) for stage in stages)
        tokens = sum(int(stage["tokens"]) for stage in stages)
        scores = run.get("validation", {})
        shown_scores = ((scores.get(key) or {}).get("perplexity") for key in ("original", "before", "after"))
        cells = " | ".join("-" if score is None else f"{score:.3f}" for score in shown_scores)
        summary = run.get("delivered") or {"state": "last"}
        state = {"last": "after the last step", "start": "the start, unchanged"}.get(summary["state"], summary["state"])
        state += ", worse than the start" if summary.get("worse") else ""
        lines.append(f"| {number} | {kinds} | {tokens:,} | {cells} | {state} |")
    return "\n".join(
        [*lines, "", "Recipes, seeds and losses of every run are in `surgery_report.json` under `training`."]
    )


def _limits_section(report: dict[str, Any], license: License) -> str:
    text = report.get("calibration")
    fitted = f"fitted to {text['tokens']:,} tokens of a calibration text" if text else "fitted to the weights alone"
    return (
        "## Limits\n\n"
        f"It answers as the original does only as far as the figures above say; it was {fitted}, and texts unlike that "
        "(other languages, longer contexts, code) may lose more than is shown. What the original is not for, this is not for "
        f"either. Licence: {plain(license.id)} ({plain(license.origin)})."
    )


def _recipe_section(report: dict[str, Any]) -> str:
    import yaml

    recipe = {key: value for key, value in report["recipe"].items() if value not in (None, [], {})}
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).strip()
    versions = ", ".join(plain(f"{name} {version}") for name, version in report.get("versions", {}).items())
    summary = ", ".join(part for part in (f"surgery {plain(report['surgery'])}", versions) if part)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))  # longer than any in the recipe's texts
    return f"## Recipe\n\n{fence}yaml\n{text}\n{fence}\n\nSeed {plain(report['seed'])}; {summary}."


def _papers_section(source: CheckpointSource) -> str:
    named = set(_iter_strings(source.config["quantization_config"]))
    cited = dict.fromkeys(paper for word, paper in PAPERS.items() if word in named)
    return "\n".join(["## Papers", "", *(f"- {paper}" for paper in cited)]) if cited else ""


def _iter_strings(value: Any) -> Iterator[str]:
    """Every text that a table holds, without its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _iter_strings(inner)
