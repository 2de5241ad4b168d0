"""`surgery eval --verify RESULTS`: compare what a finished evaluation recorded with what is here today.

    verify(RESULTS, model, compare=.., text=.., data_root=..) -> Verification, one Check for each thing

Compared are the versions of packages, the digest of each model (weights, config, tokenizer, generation settings and
code, see `CheckpointSource.digest`), the digest and commit of each data set, the versions of the suites, and the
options.

results.json may come from someone else. It never chooses what is read: models, the text, the mirror and the folder of
tasks are those that the caller names, and a thing that the caller does not name is reported as not checked. Names of
data sets must look like `org/name` before they are looked up below the caller's mirror or on the Hub. The file has a
limited size and number of entries, and every entry has a type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError
from surgery.core.files import parse_json
from surgery.eval.model import open_model
from surgery.eval.options import ANY_TASK
from surgery.eval.results.data_read import (
    DATASET_NAME,
    PACKAGES,
    UNKNOWN,
    current_digest,
    mirror_commit,
    package_versions,
)
from surgery.eval.results.folders import RESULTS, check_file, printable
from surgery.eval.results.store import describe
from surgery.eval.suite import EvalOptions, Role, load_suites

Status = Literal["same", "different", "cannot be checked"]
Text = Annotated[str, Field(max_length=4096)]
MAX_ENTRIES = 1000
MAX_HUB_LOOKUPS = 100  # each may take ten seconds
MAX_SHOWN = 120  # characters of a value in a line
CHECKED_BY_CONTENT = ("text", "data_root", "include_path", "data")  # paths; their content is compared
WITHOUT_EFFECT = ("batch_size", "use_cache")  # options that do not change results
ROLE_OPTIONS: dict[Role, str] = {"converted": "MODEL", "base": "--compare BASE"}


@dataclass(frozen=True)
class Check:
    """One thing compared. was, now: what was recorded and what is here; why: the reason if it cannot be checked."""

    thing: str
    status: Status
    was: str = ""
    now: str = ""
    why: str = ""

    def line(self) -> str:
        """Return the check as one line of plain text."""
        if self.status == "different":
            return f"{self.thing}: different: was {_shorten(self.was)}, is {_shorten(self.now)}"
        if self.status == "same":
            return f"{self.thing}: same" + (f" ({_shorten(self.now)})" if self.now else "")
        return f"{self.thing}: cannot be checked: {self.why}"


@dataclass(frozen=True)
class Verification:
    """Result of `verify`. exit_code: 0 if all is the same, 1 if something differs or cannot be checked."""

    results: str
    checks: tuple[Check, ...]

    @property
    def exit_code(self) -> int:
        """0 if every check says "same", otherwise 1."""
        return int(any(check.status != "same" for check in self.checks))

    def count(self, status: Status) -> int:
        """Return the number of checks with this status."""
        return sum(check.status == status for check in self.checks)

    def lines(self) -> list[str]:
        """Return one line for each check, a remark, and a summary."""
        counts = [f"{self.count(status)} {status}" for status in ("same", "different", "cannot be checked")]
        remark = "The measured values themselves are not checked."
        return [*(check.line() for check in self.checks), remark, ", ".join(counts)]

    def to_dict(self) -> dict[str, Any]:
        """Return the checks as JSON data."""
        return {"results": self.results, "same": not self.exit_code, "checks": [asdict(check) for check in self.checks]}


class RecordedProvenance(BaseModel):
    """Provenance in results.json, of the command or of one suite of one model."""

    versions: dict[Text, Text] = Field(default_factory=dict, max_length=100)
    data: dict[Text, dict[Text, Any]] = Field(default_factory=dict, max_length=MAX_ENTRIES)
    suite_version: int | None = None
    include_path: Text | None = None


class RecordedRead(BaseModel):
    """Data that a suite read: a data set of a mirror or of the Hub, records of a task, a text file, or the package
    lm_eval.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["mirror", "records", "hub", "file", "package"]
    name: Text
    digest: Text


class RecordedSuite(BaseModel):
    """A suite of one model in results.json. reads: None if the version that wrote it did not record them."""

    provenance: RecordedProvenance = Field(default_factory=RecordedProvenance)
    reads: list[RecordedRead] | None = Field(None, max_length=MAX_ENTRIES)

    def has_read(self, kind: str, name: str) -> bool:
        """Return whether this data is recorded."""
        return any((read.kind, read.name) == (kind, name) for read in self.reads or ())


class RecordedModel(BaseModel):
    """A model in results.json."""

    name: Text
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RecordedResults(BaseModel):
    """What is read from results.json. all_options: None if the version that wrote it recorded only those that were
    set.
    """

    provenance: RecordedProvenance = Field(default_factory=RecordedProvenance)
    models: dict[Role, RecordedModel]
    suites: dict[Text, dict[Role, RecordedSuite]] = Field(max_length=MAX_ENTRIES)
    options: dict[Text, Any] = Field(max_length=MAX_ENTRIES)
    all_options: dict[Text, Any] | None = Field(None, max_length=MAX_ENTRIES)

    def each_suite(self) -> list[tuple[str, str, RecordedSuite]]:
        """Return (suite, role, what was recorded) of every suite of every model."""
        return [
            (suite, role, suite_record)
            for suite, by_role in self.suites.items()
            for role, suite_record in by_role.items()
        ]


def read_results(path: Path) -> RecordedResults:
    """Read results.json, or that of a folder. Raises SurgeryError if it is missing, too large or damaged."""
    path = path / RESULTS if path.is_dir() else path
    if path.parent.is_dir() and not path.exists() and not path.is_symlink():
        raise SurgeryError(
            f"{path} does not exist. Give the folder or the {RESULTS} that `surgery eval MODEL --out DIR` wrote; "
            "of several models each has one in its own folder, DIR/MODEL-1a2b3c4d"
        )
    check_file(path, RESULTS)
    try:
        results = RecordedResults.model_validate(parse_json(path.read_text(encoding="utf-8")), strict=True)
    except ValidationError as error:
        raise SurgeryError(
            f"{path} is damaged, or not written by `surgery eval`: {printable(describe(error))}"
        ) from None
    except (ValueError, OSError) as error:
        raise SurgeryError(f"{path} is damaged: {printable(str(error))[:200]}") from None
    names = set()
    for suite, _, recorded in results.each_suite():
        for read in recorded.reads or ():
            if read.kind in ("mirror", "hub") and not DATASET_NAME.fullmatch(read.name):
                raise SurgeryError(
                    f"{path} is damaged: {printable(suite)} names the data {printable(read.name)[:100]!r}"
                )
            names |= {read.name} if read.kind == "hub" else set()
    if len(names) > MAX_HUB_LOOKUPS:
        raise SurgeryError(
            f"{path} is damaged: it names {len(names):,} data sets of the Hub, more than {MAX_HUB_LOOKUPS}"
        )
    return results


def verify(
    results: Path,
    model: str | None = None,
    *,
    compare: str | None = None,
    text: str | None = None,
    data_root: Path | None = None,
    include_path: Path | None = None,
    data: Mapping[str, Path] | None = None,
    suites: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Verification:
    """Compare what `results` recorded with what is here; measures nothing, and loads no weights.

    Args:
        results: results.json of a finished evaluation, or its folder.
        model, compare: the checkpoints to compare with those recorded: local folders or Hub ids. Only their files are
            hashed.
        text, data_root, include_path, data: as for the evaluation; their contents are compared.
        suites: if given, compared with the recorded suites.
        options: fields of EvalOptions, compared with those recorded. Options not named have to be today's defaults or
            recorded.

    Raises SurgeryError if results.json is missing or damaged, or if a checkpoint cannot be opened.
    """
    recorded = read_results(results)
    choices = EvalOptions(text=text, data_root=data_root, include_path=include_path, data=dict(data or {}))
    checks = [
        *_check_packages(recorded),
        *_check_models(recorded, {"converted": model, "base": compare}),
        *_check_data(recorded, choices),
        *_check_suites(recorded, suites),
        *_check_options(recorded, dict(options or {})),
    ]
    return Verification(str(results), tuple(checks))


def _compare(thing: str, was: Any, now: Any) -> Check:
    was, now = printable(str(was)), printable(str(now))
    return Check(printable(thing), "same" if was == now else "different", was, now)


def _unchecked(thing: str, why: str, was: str = "") -> Check:
    return Check(printable(thing), "cannot be checked", was=printable(was), why=printable(why))


def _shorten(value: str) -> str:
    """Return the first 12 digits of a digest or commit, and the beginning of a long text."""
    if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value[:12]
    return value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]} [..]"


def _check_packages(recorded: RecordedResults) -> list[Check]:
    """Compare the versions of the command and of every suite, which an earlier run may have measured."""
    now = package_versions()
    recorded_versions: dict[str, dict[str, list[str]]] = {}  # package -> version -> where it was recorded
    places = [("the command", recorded.provenance)]
    places += [(f"{suite} of {role}", one.provenance) for suite, role, one in recorded.each_suite()]
    for where, provenance in places:
        for package, version in provenance.versions.items():
            recorded_versions.setdefault(package, {}).setdefault(version, []).append(where)
    if not recorded_versions:
        return [_unchecked("packages", "their versions were not recorded")]
    checks = []
    for package, versions in recorded_versions.items():
        if package not in ("python", *PACKAGES):
            checks.append(_unchecked(f"package {package}", "this version of surgery does not record it"))
            continue
        for version, named in versions.items():
            label = f"package {package}" + (f" ({', '.join(named[:4])})" if len(versions) > 1 else "")
            checks.append(_compare(label, version, now.get(package, "absent")))
    return checks


def _check_models(recorded: RecordedResults, names: Mapping[Role, str | None]) -> list[Check]:
    checks = []
    for role, name in names.items():
        there = recorded.models.get(role)
        label = f"model ({role})"
        if there is None and name is not None:
            checks.append(Check(label, "different", "none", printable(name)))
        elif there is not None and name is None:
            why = (
                f"give {ROLE_OPTIONS[role]}; it was recorded as {there.name!r}, a name that is not opened unless you "
                "give it"
            )
            checks.append(_unchecked(label, why, there.fingerprint))
        elif there is not None and name is not None:
            opened = open_model(role, name)
            checks.append(_compare(f"{label} {name}", there.fingerprint, opened.fingerprint))
    return checks


def _check_data(recorded: RecordedResults, options: EvalOptions) -> list[Check]:
    """Compare every data set that a suite read: below the mirror, the text file, or the Hub's commit."""
    checks: dict[Any, Check] = {}
    for suite, role, one in recorded.each_suite():
        if one.reads is None:
            checks[suite, role] = _unchecked(f"data of {suite} of {role}", "it was not recorded")
            continue
        for read in one.reads:
            if read not in checks and read.kind != "package":
                checks[read] = _check_read(read, recorded, options)
        read_names = {read.name for read in one.reads}
        for name in one.provenance.data.keys() - read_names:
            checks.setdefault(("unread", name), _unchecked(f"data {name}", "the results do not say how it was read"))
        commits = {name: told.get("commit") for name, told in one.provenance.data.items() if "sha256" in told}
        for name, commit in commits.items():
            if isinstance(commit, str) and options.data_root is not None and one.has_read("mirror", name):
                now = mirror_commit(options.data_root / name) or "absent"
                checks.setdefault((f"commit {name}", commit), _compare(f"commit of {name}", commit, now))
        was = one.provenance.include_path
        if was is not None or options.include_path is not None:
            checks[f"include_path {was}", ""] = _check_tasks(was, options.include_path)
    for task in options.data:
        if task != ANY_TASK and not any(one.has_read("records", task) for *_, one in recorded.each_suite()):
            checks["records", task] = Check(
                printable(f"records of {task}"), "different", "none", str(options.data[task])
            )
    told = str(recorded.options.get("text") or "")
    if options.text is not None and not any(one.has_read("file", told) for *_, one in recorded.each_suite()):
        checks["text", ""] = _compare("text", told or "none", options.text)
    return list(checks.values())


def _check_read(read: RecordedRead, recorded: RecordedResults, options: EvalOptions) -> Check:
    kind, name, digest = read.kind, read.name, read.digest
    if digest == UNKNOWN:
        return _unchecked(f"data {name}", "its content was unknown when it was read")
    if kind == "file":
        if name != recorded.options.get("text"):
            return _unchecked(f"text {name}", "it is not the text that the options name")
        if options.text is None:
            return _unchecked("text", f"give --text FILE; it was recorded as {name!r}", digest)
        return _compare(f"text {options.text}", digest, _content(Path(options.text)))
    if kind == "records":
        path = options.find_records(name)
        if path is None:
            return _unchecked(f"records of {name}", f"give --data {name}=FILE, from which they were read", digest)
        return _compare(f"records of {name} in {path}", digest, _content(path))
    if kind == "mirror":
        if options.data_root is None:
            return _unchecked(f"data {name}", "give --data-root DIR, the mirror that it was read from", digest)
        return _compare(f"data {name}", digest, _content(options.data_root / name))
    now = current_digest("hub", name, None)
    if now == UNKNOWN:
        return _unchecked(
            f"data {name}", "the Hub cannot be reached, and the data set is not in its local cache", digest
        )
    return _compare(f"data {name} (commit)", digest, now)


def _check_tasks(was: str | None, now: Path | None) -> Check:
    if now is None:
        return _unchecked("folder of lm-eval tasks", "give --include-path DIR", was or "")
    return _compare(f"folder of lm-eval tasks {now}", was or "none", _content(now))


def _content(path: Path) -> str:
    """Return the digest of a file or folder that the caller named, or "absent"."""
    try:
        return content_digest(path) if path.exists() else "absent"
    except OSError as error:
        raise SurgeryError(f"cannot read {path}: {error.strerror}") from None


def _check_suites(recorded: RecordedResults, suites: tuple[str, ...]) -> list[Check]:
    """Compare the version of each suite: it is raised when the same options give other prompts or scores."""
    known, checks = load_suites(), []
    if suites:
        checks.append(_compare("suites", ", ".join(sorted(recorded.suites)), ", ".join(sorted(set(suites)))))
    for name, by_role in recorded.suites.items():
        versions = {one.provenance.suite_version for one in by_role.values()}
        is_task = any(one.has_read("package", "lm_eval") for one in by_role.values())
        for version in sorted(versions, key=str):
            if version is None:
                checks.append(_unchecked(f"suite {name}", "its version was not recorded"))
            elif name in known:
                checks.append(_compare(f"suite {name}", f"version {version}", f"version {known[name].version}"))
            elif is_task:  # a task of lm-eval by name; the package's version is compared above
                checks.append(_compare(f"suite {name}", f"version {version}", "version 1"))
            else:
                checks.append(Check(printable(f"suite {name}"), "different", f"version {version}", "absent"))
    return checks


def _check_options(recorded: RecordedResults, options: Mapping[str, Any]) -> list[Check]:
    """Compare the options that are given with those recorded, and the others with today's defaults where they were not
    set.
    """
    left_out = (*CHECKED_BY_CONTENT, *WITHOUT_EFFECT)
    told = recorded.all_options
    if told is None:
        return [_unchecked("options", "the defaults of that version were not recorded")]
    defaults = EvalOptions().model_dump(mode="json")
    asked = EvalOptions(**options).model_dump(mode="json")
    checks, same = [], 0
    for name in dict.fromkeys([*told, *defaults]):
        if name in left_out:
            continue
        if name not in defaults:
            checks.append(_unchecked(f"option {name}", "this version of surgery does not have it"))
            continue
        was = told.get(name, defaults[name])
        now = asked[name] if name in options else was if name in recorded.options else defaults[name]
        if was == now:
            same += 1
        else:
            checks.append(_compare(f"option {name}", was, now))
    assumed_names = sorted(
        name for name in told if name in recorded.options and name in defaults and name not in (*options, *left_out)
    )
    assumed = f"not given here, so taken as recorded: {', '.join(assumed_names)}" if assumed_names else ""
    return [*checks, *([Check(f"options ({same})", "same", now=assumed)] if same else [])]
