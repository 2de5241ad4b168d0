"""Find the results of one checkpoint among those in a folder of `surgery eval --out` or `surgery compare --out`.

Results name every model by its fingerprint, the SHA-256 over all files that determine its output (`CheckpointSource.digest`). A folder may hold
    results.json              one model, beside the original
    OUT-1a2b3c4d/             the same of each of several models, with the first eight digits of its fingerprint
    comparison.json           the comparison of several models
Files without fingerprints, written by hand or by early versions, do not say whose rows they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import CheckpointSource
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json

RESULTS_NAME, COMPARISON_NAME = "results.json", "comparison.json"
EVAL_FOLDER = "eval"  # of a checkpoint, whose results are taken where no folder is given
MAX_BYTES = 64 * 2**20  # largest results file that is read


@dataclass
class Measurements:
    """The results in a folder, as those of one checkpoint.

    results: results.json of the checkpoint; None without. comparison: comparison.json. own: the checkpoint's name in
    the comparison; None if it is not there. others: names of the models in the folder if none of them is the
    checkpoint. remark: what a reader must know of whose results these are, "" if nothing.
    """

    results: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    own: str | None = None
    others: tuple[str, ...] = ()
    remark: str = ""

    def beside_original(self) -> dict[str, Any] | None:
        """Return the checkpoint's rows beside the base as in results.json, from the comparison if there is no
        results.json; None without.
        """
        base = None if self.comparison is None else self.comparison["base"]
        if self.results is not None or self.comparison is None or None in (self.own, base) or self.own == base:
            return self.results
        names = {"base": base, "converted": self.own}
        rows = [row for row in self.comparison["rows"] if self.own in row["values"]]
        shown = [
            {
                **{key: row[key] for key in ("suite", "task", "metric", "group", "samples", "flags")},
                "values": {role: row["values"][name] for role, name in names.items() if name in row["values"]},
                "ratio": row["ratios"].get(self.own),
            }
            for row in rows
        ]
        return {"rows": shown, "models": {"base": {"name": base}, "converted": {"name": self.own}}}

    def check(self, name: str, folder: Path) -> None:
        """Raise SurgeryError if the folder that these were read from has no results, or only those of other
        checkpoints. name: of the checkpoint.
        """
        if self == Measurements():
            raise SurgeryError(
                f"{folder} has no results.json. Write one with `surgery eval {name} --compare SRC --out {folder}`."
            )
        if self.others:
            raise SurgeryError(
                f"{folder} has no row of {name} with its present files: its results are of {in_words(self.others)}. "
                f"Measure it with `surgery eval {name} --compare SRC --out DIR`, or give the folder of its results."
            )


def load_measurements(source: CheckpointSource, folder: Path) -> Measurements:
    """Return the results in a folder that are of a checkpoint.

    Raises SurgeryError for a file that is none of `surgery eval`.
    """
    measurements, others, top, several = (
        Measurements(),
        dict[str, None](),
        folder / RESULTS_NAME,
        folder / COMPARISON_NAME,
    )
    unnamed = []
    if top.is_file():
        read = read_results(top)
        if (is_own := is_of(read, source)) is False:
            others[last_part(measured_model(read)["name"])] = None
        else:
            measurements.results = read
            unnamed += [RESULTS_NAME] if is_own is None else []
    if measurements.results is None and any(folder.glob(f"*-????????/{RESULTS_NAME}")):
        for path in sorted(folder.glob(f"*-{source.digest()[:8]}/{RESULTS_NAME}")):
            if is_of(read := read_results(path), source):
                measurements.results = read
    if several.is_file():
        measurements.comparison = read = read_results(several)
        prints = {str(model["name"]): model.get("fingerprint") for model in read["models"]}
        measurements.own = next((name for name, digest in prints.items() if digest and digest == source.digest()), None)
        others |= dict.fromkeys(prints)
        unnamed += [COMPARISON_NAME] if None in prints.values() and measurements.own is None else []
    if measurements.results is None and measurements.own is None and others and not unnamed:
        measurements.others = tuple(others)
        measurements.remark = (
            f"The results in {folder.name} are of {in_words(others)}. None of them is this checkpoint with its present "
            "files, so its quality is "
            "not shown here."
        )
    elif unnamed:
        measurements.remark = f"{unnamed[0]} in {folder.name} does not say which checkpoint it is of"
        measurements.remark += "." if measurements.results is None else "; its rows are shown as those of this one."
    return measurements


@contextmanager
def explain_damage(name: str) -> Iterator[None]:
    """Raise SurgeryError in place of errors from a report or results whose keys or values are not as surgery writes
    them. name: of the checkpoint.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise SurgeryError(
            f"the report or the results of {name} are damaged ({type(error).__name__}: {error}). Write them again "
            "with `surgery convert` and `surgery eval`."
        ) from None


def _check_ratio(row: Mapping[str, Any], ratio: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a ratio outside of its interval, or of perplexities and not positive. row: its row."""
    if ratio is None:
        return
    numbers = [ratio[key] for key in ("low", "change", "high") if ratio.get(key) is not None]
    of_perplexities = (row.get("metric") or {}).get("kind") == "ppl"
    if sorted(numbers) != numbers or (of_perplexities and not 0 < ratio["change"] < math.inf):
        raise ValueError(f"{row.get('suite')} has the ratio {ratio['change']} with the interval {numbers}")


def read_results(path: Path) -> dict[str, Any]:
    """Read results.json or comparison.json. Raises SurgeryError for other content, or a file larger than MAX_BYTES."""
    if path.stat().st_size > MAX_BYTES:
        raise SurgeryError(f"{path} must have at most {MAX_BYTES:,} bytes (got {path.stat().st_size:,})")
    read = read_json(path)
    if not isinstance(read, dict) or not isinstance(read.get("rows"), list):
        raise SurgeryError(f"{path} is not a results file of `surgery eval`")
    with explain_damage(str(path)):
        for row in read["rows"]:
            for ratio in (row.get("ratio"), *(row.get("ratios") or {}).values()):
                _check_ratio(row, ratio)
    return read


def measured_model(results: Mapping[str, Any], role: str = "converted") -> dict[str, str]:
    """Return {"name", "fingerprint"} of a role's model in results.json, "" each where it does not say."""
    models = results.get("models")
    model = models.get(role) if isinstance(models, dict) else None
    model = model if isinstance(model, dict) else {}
    return {key: str(model.get(key) or "") for key in ("name", "fingerprint")}


def is_of(results: Mapping[str, Any], source: CheckpointSource) -> bool | None:
    """Return whether results.json is of this checkpoint as it is now; None if it does not say."""
    fingerprint = measured_model(results)["fingerprint"]
    return fingerprint == source.digest() if fingerprint else None


def other_base(report: Mapping[str, Any], results: Mapping[str, Any] | None) -> str:
    """Return the name of the model that results compare with, if it is another than the original of the report; else
    "".
    """
    name = measured_model(results or {}, "base")["name"]
    original = str((report.get("source") or {}).get("name") or "")
    return "" if not name or not original or last_part(name) == last_part(original) else last_part(name)


def last_part(name: str) -> str:
    """Return the last part of a folder or Hub id, without the revision: org/name@v1 -> name."""
    return Path(name).name.partition("@")[0] or name


def in_words(names: Iterable[str], most: int = 6) -> str:
    """Return names as a list in words, the first `most` of them: a, b and 3 more."""
    texts = [str(name) for name in names]
    shown = texts[:most] if len(texts) > most else texts[:-1]
    last = f"{len(texts) - most} more" if len(texts) > most else texts[-1]
    return f"{', '.join(shown)} and {last}" if shown else last
