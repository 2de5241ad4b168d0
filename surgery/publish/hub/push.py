"""`surgery push`: upload a converted checkpoint to the Hugging Face Hub, weights first, then one commit with
everything.

The repository is therefore always complete: the new state or the old one. After an interruption the same command
continues; the Hub recognizes uploaded weights by their hash. Files of an earlier push that this one lacks (other
shards, other measurements) are deleted in the same commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from surgery.checkpoint.source import SAFE_WEIGHTS_INDEX_NAME, CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import mixers_of, stored_size, table_of
from surgery.conversion.densify import check_openable
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME
from surgery.core.progress import Progress
from surgery.core.version import __version__
from surgery.publish.hub.card_metadata import base_model_note
from surgery.publish.hub.files import (
    CARD_NAME,
    EXTRA_FILES,
    UploadFile,
    clean_report,
    collect_files,
    matches_any,
    result_folders,
)
from surgery.publish.hub.license import License, find_license
from surgery.publish.hub.model_card import render_card
from surgery.publish.measured import EVAL_FOLDER, explain_damage, is_of, last_part, load_measurements, measured_model
from surgery.publish.summary import checkpoint_costs, read_report
from surgery.publish.verdict import verdict

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5")
REPLACED_FILES = (
    "*.safetensors",
    "*.bin",
    SAFE_WEIGHTS_INDEX_NAME,
    "*.bin.index.json",
    *EXTRA_FILES,
)  # files of an earlier push, or of the branch it starts from, that are deleted


@dataclass(frozen=True)
class Upload:
    """A prepared upload: files, license and model card. note: a remark on the card, its origin or a missing base model,
    or None. left_out: folders inside the checkpoint with results of an evaluation, which are not uploaded."""

    repo: str
    items: tuple[UploadFile, ...]
    license: License
    card: str
    note: str | None
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(item.nbytes for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """Return the upload as JSON data, for `--dry-run --json` and tables."""
        files = [{"name": item.name, "bytes": item.nbytes} for item in self.items]
        license_record = {"id": self.license.id, "origin": self.license.origin}
        record = {"repo": self.repo, "files": files, "bytes": self.nbytes, "license": license_record, "note": self.note}
        record["left_out"] = list(self.left_out)
        return {**record, "licence": license_record}  # the key until 0.1, for scripts that read it


def prepare_upload(
    converted: str, repo: str, license: str | None = None, base_model: str | None = None, measured: Path | None = None
) -> Upload:
    """Collect and check everything that a push uploads; raises SurgeryError before anything is sent.

    repo: id of the target repository; license: value of --license, None to find it; base_model: Hub id of the source,
    if it was converted from a folder; measured: folder of `surgery eval --out`.
    """
    _check_name(repo)
    source = open_converted_checkpoint(converted)
    report = read_report(source.folder, converted)
    _check_parameter_count(source, report)
    check_openable(source, converted)
    items = collect_files(source, measured)
    measured_note = _check_measured(source, items, converted)
    terms = find_license(source, report, license, base_model)
    card = next((item for item in items if item.name == CARD_NAME), None)
    if card is None or card.path is None:
        report |= _attention_costs(source)
        sentence, damaged = _verdict(source, report, measured or source.folder / EVAL_FOLDER)
        text = render_card(source, _strip_report_paths(report), terms, base_model, items, repo, sentence=sentence)
        notes = [base_model_note(report, base_model), damaged]
        items = [*items, UploadFile(CARD_NAME, text=text)]
    else:
        text = card.path.read_text(encoding="utf-8")
        notes = [f"{card.path} is used as the model card; remove it to generate one"]
    note = " ".join(text for text in (*notes, measured_note) if text) or None
    left_out = tuple(
        str(path) for path in map(source.folder.joinpath, result_folders(source.folder)) if path != measured
    )
    return Upload(repo, tuple(sorted(items, key=lambda item: item.name)), terms, text, note, left_out)


def _attention_costs(source: CheckpointSource) -> dict[str, Any]:
    """Return the costs of attention, which have the cache; {} without mixers, and for models of remote code."""
    if not mixers_of(source):
        return {}
    try:
        return checkpoint_costs(source)
    except SurgeryError:
        return {}


def _verdict(source: CheckpointSource, report: dict[str, Any], folder: Path) -> tuple[str, str | None]:
    """Return the verdict with the results in a folder; if they are damaged, without them and with a note."""
    try:
        with explain_damage(source.name):
            return verdict(report, load_measurements(source, folder).beside_original()), None
    except SurgeryError as error:
        return verdict(report), f"the verdict has no measurements: {error}"


def _check_measured(source: CheckpointSource, items: list[UploadFile], name: str) -> str | None:
    """Return a note if the checkpoint's files changed since it was measured.

    Raises SurgeryError for results of another checkpoint.
    """
    item = next((item for item in items if item.name == "eval/results.json"), None)
    results = json.loads(item.content()) if item is not None else {}
    if not isinstance(results, dict) or is_of(results, source) is not False:
        return None
    other = measured_model(results)["name"]
    if last_part(other) != last_part(name):
        raise SurgeryError(
            f"eval/results.json is of {last_part(other)}, not of {name}: the card would show its numbers as those of "
            "this model. Give the "
            f"folder of its own results (`surgery eval {name} --compare SRC --out DIR`, then --eval DIR), or move "
            "eval/ elsewhere."
        )
    return f"files of {name} changed since it was measured; measure it again if its weights, config or tokenizer did."


def push(
    upload: Upload,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Upload to the Hub and return {"url", "commit", "uploaded", "removed"}.

    The token is that of `hf auth login` or HF_TOKEN.

    private: visibility of a new repository; that of an existing one does not change. revision: branch, created if
    missing.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if get_token() is None:
        raise SurgeryError(
            "no token for the Hub. Create one with write permission at https://huggingface.co/settings/tokens, then "
            "run "
            "`hf auth login` or set HF_TOKEN."
        )
    api = HfApi(library_name="surgery", library_version=__version__)
    with (
        _explain_hub_errors(upload.repo),
        (progress or Progress()).bar(f"uploading bytes to {upload.repo}", upload.nbytes) as tick,
    ):
        repo = api.create_repo(upload.repo, private=private or None, exist_ok=True).repo_id
        if private and not api.repo_info(repo).private:
            raise SurgeryError(
                f"{repo} already exists and is public; --private applies to new repositories only. Make it private in "
                "its settings first, or push without --private."
            )
        there = set(api.list_repo_files(repo))
        _check_overwrite(repo, there, revision)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
            there = set(api.list_repo_files(repo, revision=revision))
        stale = sorted(name for name in there - {i.name for i in upload.items} if matches_any(name, REPLACED_FILES))
        additions = []
        for item in upload.items:
            content = item.path if item.path is not None else (item.text or "").encode()
            additions.append(CommitOperationAdd(item.name, content))
            if item.name.endswith(
                ".safetensors"
            ):  # uploaded one by one, so that a repeated push skips those already there
                api.preupload_lfs_files(repo, [additions[-1]], revision=revision)
            tick(item.nbytes)
        changes: list[Any] = [*additions, *(CommitOperationDelete(name) for name in stale)]
        commit_info = api.create_commit(
            repo, changes, commit_message=message or f"Converted by surgery {__version__}", revision=revision
        )
    sent = [item.name for item in upload.items]
    return {
        "url": commit_info.commit_url.split("/commit/")[0],
        "commit": commit_info.oid,
        "uploaded": sent,
        "removed": stale,
    }


def _check_overwrite(repo: str, there: set[str], revision: str | None) -> None:
    """Raise SurgeryError if the push would overwrite another model on the main branch."""
    weights = sorted(name for name in there if PurePosixPath(name).suffix in WEIGHT_SUFFIXES)
    if weights and REPORT_NAME not in there and revision in (None, "main"):
        raise SurgeryError(
            f"{repo} holds another model ({weights[0]}, and no {REPORT_NAME}), which this would overwrite. Push to "
            "another "
            f"name, for example {repo}-surgery, or to a branch: --revision surgery."
        )


def _check_name(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise SurgeryError(
            f"{repo!r} is not a valid repository name ({error}). Use for example me/llama-btt."
        ) from None


def _check_parameter_count(source: CheckpointSource, report: dict[str, Any]) -> None:
    unit, stored = stored_size(table_of(source), source.tensors)
    claimed, what = report["totals"][f"{unit}_after"], {"params": "parameters"}.get(unit, unit)
    if stored != claimed:
        raise SurgeryError(
            f"{source.name} stores {stored:,} {what}, but its report says {claimed:,}: one of the two was changed. "
            "Convert again, or push the folder that `surgery convert` or `finetune` wrote."
        )


def _strip_report_paths(report: dict[str, Any]) -> dict[str, Any]:
    """Remove local paths from the report, except the source's name, which license and base model are derived from."""
    return {**clean_report(report), "source": report["source"]}


@contextmanager
def _explain_hub_errors(repo: str) -> Iterator[None]:
    """Turn errors of the Hub into SurgeryErrors whose text cannot contain a token."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    network: Any = HfHubHTTPError.__bases__[0]  # base class of the HTTP library, which differs between releases
    try:
        yield
    except OfflineModeIsEnabled:
        raise SurgeryError("HF_HUB_OFFLINE is set. Unset it to push.") from None
    except HfHubHTTPError as error:
        raise SurgeryError(_hub_error_message(repo, error.response.status_code, error.server_message or "")) from None
    except (network, OSError, RuntimeError, ValueError) as error:
        raise SurgeryError(
            f"the upload to {repo} was interrupted ({type(error).__name__}); nothing of it is visible there yet. Run "
            "the same "
            "command again to continue: uploaded weights are not sent again."
        ) from None


def _hub_error_message(repo: str, status: int, reason: str) -> str:
    reason = " ".join(reason.split())[:200]
    if status == 401:
        return (
            f"the Hub rejects the token (401) for {repo}. Run `hf auth login` again, or set HF_TOKEN to a token with "
            "write permission."
        )
    if status == 403:
        return (
            f"the token may not write to {repo} (403{': ' + reason if reason else ''}); it needs write permission for "
            "that user or organization"
        )
    if status == 404:
        return f"{repo} does not exist, or this token cannot see it (404)"
    return f"the Hub failed for {repo} ({status}{': ' + reason if reason else ''}). Run the same command to try again."
