"""Select the files of a converted checkpoint that are uploaded, and remove local paths from them.

Working folders collect private files: caches, notes, tokens in a `.env`. Only files listed here are uploaded; any other
file is an error rather than silently left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any

from surgery.checkpoint.companions import COPIED, subfolder_files
from surgery.checkpoint.remote_code import named_code
from surgery.checkpoint.source import SAFE_WEIGHTS_INDEX_NAME, CheckpointSource
from surgery.checkpoint.table import SHIM_NAME
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, parse_json, read_json
from surgery.publish.hub.secret_scan import find_secrets, mask_secrets

CARD_NAME = "README.md"
PAGE_NAME = "report.html"
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    SAFE_WEIGHTS_INDEX_NAME,
    REPORT_NAME,
    SHIM_NAME,
    CARD_NAME,
    PAGE_NAME,
)
# Training log and curve, LoRA adapter, evaluation results. Evaluation samples are not uploaded: they quote data sets.
EXTRA_FILES = (
    *("training/log.jsonl", "training/curve.png"),
    *("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "adapter/README.md"),
    *("eval/results.json", "eval/*.png", "eval/table.md", "eval/comparison.json", "eval/table.csv", "eval/table.tex"),
)
LOCAL_FILES = (
    "eval/*/**",
    "eval/generations.json",
    "eval/lock",
    "training/tensorboard/**",
    ".cache/huggingface/**",
    ".gitattributes",
)
# What `surgery eval --out` and `surgery compare --out` write into a folder, which has one of the first two.
RESULT_NAMES = ("results.json", "comparison.json")
RESULT_FILES = (*RESULT_NAMES, "table.md", "table.csv", "table.tex", "*.png", "generations.json", "lock", "*/**")
MAX_NAMED = 8  # secrets that an error lists
MAX_HEADER = 10**8  # bytes, the limit of safetensors
LOCAL_PATH_PATTERN = re.compile(r"^(?:/|~|\.{1,2}[\\/]|[A-Za-z]:[\\/]|\\\\[\w.$-]+\\|file://)")
# A path below a home or data folder, whether it exists on this machine or not; a label like /m/09l8g does not match.
HOME_PATTERN = re.compile(
    r"^(?:file://[\w.-]*)?(?:/(?:home|Users|root|mnt|media|scratch|workspace|Volumes)/[^/]|~/|[A-Za-z]:[\\/]|/[A-Za-z]:[\\/])"
    r"|^\\\\[\w.$-]+\\[^\\]|^file://"
)

# A path below a home folder inside a chat template, where slashes also occur in other text.
HOME_IN_TEMPLATE = re.compile(
    r"(?<![\w:/.<\\-])(?:(?:file://)?/(?:home|Users|root)/[\w.@+-]+(?:/[\w.@+-]+)*|[A-Za-z]:\\Users\\[\w.@+\\-]+)"
)


def redact_secrets(value: Any) -> Any:
    """Return JSON data with everything that looks like an access token, a key or a password replaced by ***."""
    if isinstance(value, dict):
        return {redact_secrets(key): redact_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_secrets(item) for item in value]
    return mask_secrets(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class UploadFile:
    """A file to upload. name: in the repository.

    Its content is `text`, or that of the local file `path` if text is None.
    """

    name: str
    path: Path | None = None
    text: str | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.text.encode()) if self.text is not None else self.path.stat().st_size  # type: ignore[union-attr]

    def content(self) -> str:
        """Return the content as text; invalid UTF-8 is replaced."""
        return self.text if self.text is not None else self.path.read_text(encoding="utf-8", errors="replace")  # type: ignore[union-attr]


def collect_files(source: CheckpointSource, measured: Path | None = None) -> list[UploadFile]:
    """Return the files of a checkpoint to upload, sorted by name.

    measured: a folder of `surgery eval --out`, whose table, results and plots go into eval/; by default OUT/eval.
    Raises SurgeryError for files outside the known set, links out of the folder, and texts that contain a token, a key
    or a password.
    """
    folder = source.folder
    weights = {info.file.name for info in source.tensors.values()}
    code = {"*.py"} if named_code(folder, source.config) else set()
    known = {*CHECKPOINT_FILES, *weights, *COPIED, *EXTRA_FILES, *code, *_companion_files(source)}
    local = (*LOCAL_FILES, *(f"{subfolder}/{name}" for subfolder in result_folders(folder) for name in RESULT_FILES))
    files: list[UploadFile] = []
    unknown: list[str] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if matches_any(name, local):
            continue
        if not matches_any(name, known):
            unknown.append(name)
            continue
        _check_link(path, folder, source.revision)
        files.append(UploadFile(name, path))
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise SurgeryError(
            f"{source.name} holds files that do not belong to a checkpoint: {', '.join(unknown[:5])}{more}. Move them "
            "elsewhere, then push again (only weights, config, tokenizer, report, card and plots are uploaded)."
        )
    if measured is not None:
        files = [item for item in files if not item.name.startswith("eval/")] + _eval_files(measured)
    _check_secrets(files)
    _check_code(source, {item.name: item for item in files})
    return _strip_file_paths(files)


def result_folders(folder: Path) -> list[str]:
    """Return the folders inside a checkpoint, other than eval/, that hold results of `surgery eval` or `surgery
    compare`: relative paths, sorted. A push leaves their files out."""
    places = (path.parent.relative_to(folder) for name in RESULT_NAMES for path in folder.rglob(name) if path.is_file())
    subfolders = {subfolder for subfolder in places if subfolder.parts and subfolder.parts[0] != "eval"}
    return sorted(subfolder.as_posix() for subfolder in subfolders if not subfolders & set(subfolder.parents))


def _check_code(source: CheckpointSource, items: dict[str, UploadFile]) -> None:
    """Raise SurgeryError unless the shim is unmodified and all code that a config names in auto_map is in the
    folder.
    """
    from surgery.modeling.auto_classes import SHIM_TEXTS

    if SHIM_NAME in items and items[SHIM_NAME].content().replace("\r\n", "\n") not in SHIM_TEXTS:
        raise SurgeryError(
            f"{source.name}: {SHIM_NAME} was changed, and it is executed by everybody who loads the model with remote "
            "code. "
            "Copy it from a new conversion, or undo the changes."
        )
    for config, auto_map in named_code(source.folder, source.config).items():
        for named in iter_strings(auto_map):
            file = f"{named.partition('.')[0]}.py"
            if "--" not in named and file not in items:
                raise SurgeryError(
                    f"{source.name}: auto_map in {config} names {named!r}, but {file} is not in the folder. Add the "
                    "file, or remove "
                    "that auto_map."
                )


def iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings among the values of nested dicts and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from iter_strings(inner)


def _companion_files(source: CheckpointSource) -> set[str]:
    """Return files in subfolders that were copied from the source, as listed in the report."""
    path = source.folder / REPORT_NAME
    report = read_json(path) if path.is_file() else {}
    listed = report.get("companions", []) if isinstance(report, dict) else []
    copied = set(map(str, listed)) if isinstance(listed, list) else set()
    return {p.as_posix() for p in subfolder_files(source.folder).files} & copied


def _eval_files(folder: Path) -> list[UploadFile]:
    if not (folder / "results.json").is_file():
        raise SurgeryError(
            f"{folder} has no results.json. Write one with `surgery eval OUT --compare SRC --out {folder}`."
        )
    files = [folder / "results.json", folder / "table.md", *sorted(folder.glob("*.png"))]
    return [UploadFile(f"eval/{path.name}", path) for path in files if path.is_file()]


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a path matches a pattern of the same depth, or one that ends in ** (everything below)."""
    path = PurePosixPath(name)
    for pattern in patterns:
        depth = pattern.count("/")
        if pattern.endswith("/**"):
            if len(path.parts) > depth and PurePosixPath(*path.parts[:depth]).match(pattern[:-3]):
                return True
        elif len(path.parts) == depth + 1 and path.match(pattern):
            return True
    return False


def _check_link(path: Path, folder: Path, revision: str | None) -> None:
    """Raise SurgeryError for a link out of a local folder. A Hub cache (revision is set) consists of links."""
    if path.is_symlink() and revision is None and not path.resolve().is_relative_to(folder.resolve()):
        raise SurgeryError(
            f"{path} is a link to {path.resolve()}, outside the checkpoint. Replace it by a copy of the file."
        )


def _check_secrets(items: list[UploadFile]) -> None:
    """Raise SurgeryError, with files and lines, if a text or the header of a weights file seems to contain a secret.

    Never names its value.
    """
    secrets = [
        f"{item.name}, line {finding.line} ({finding.kind})"
        for item in items
        for finding in find_secrets(_scanned(item))
    ]
    if secrets:
        more = f" and {len(secrets) - MAX_NAMED} more" if len(secrets) > MAX_NAMED else ""
        count = "a secret" if len(secrets) == 1 else f"{len(secrets)} secrets"
        raise SurgeryError(
            f"the upload seems to contain {count}: {'; '.join(secrets[:MAX_NAMED])}{more}. Nothing was sent. Replace "
            "the value by *** in these files, "
            "revoke it if others could read them, then push again."
        )


def _scanned(item: UploadFile) -> bytes:
    """Return the bytes of a file that may hold text: of weights the header, of pictures none."""
    if item.path is None or item.name.endswith(".png"):
        return b""
    if not item.name.endswith(".safetensors"):
        return item.path.read_bytes()
    with open(item.path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, MAX_HEADER))


TEMPLATE_FILES = ("*.jinja", "*/*.jinja", "chat_template*")
# Files about a run: any text in them may quote a local path.
FREE_TEXT_FILES = (
    REPORT_NAME,
    PAGE_NAME,
    "training/*.jsonl",
    "adapter/README.md",
    "eval/results.json",
    "eval/table.md",
    "eval/comparison.json",
    "eval/table.csv",
    "eval/table.tex",
)
# Configs of the model and its tokenizer: strings are labels, tokens and templates; only some keys hold paths.
CONFIG_FILES = (
    "config.json",
    "*_config.json",
    "config_*.json",
    "modules.json",
    "special_tokens_map.json",
    "adapter/adapter_config.json",
    "*/*config.json",
)
PATH_KEYS = re.compile(r"(?:^|_)(?:name_or_path|path|file|dir|folder|directory)s?$")
ROOT_FOLDERS = (  # top-level folders whose paths are shortened, besides those of this machine
    "home",
    "Users",
    "root",
    "tmp",
    "mnt",
    "media",
    "scratch",
    "data",
    "workspace",
    "content",
    "private",
    "Volumes",
)


def _strip_file_paths(items: list[UploadFile]) -> list[UploadFile]:
    """Shorten local paths to their last part, in configs, reports and logs."""
    read: dict[str, Any] = {}
    for item in items:
        if (
            item.path is not None
            and item.name.endswith((".json", ".jsonl"))
            and matches_any(item.name, (*FREE_TEXT_FILES, *CONFIG_FILES))
        ):
            read[item.name] = _read_jsonl(item.path) if item.name.endswith(".jsonl") else read_json(item.path)
    paths = {
        path
        for name, data in read.items()
        for path in find_local_paths(data, everywhere=matches_any(name, FREE_TEXT_FILES))
    }
    return [_clean_item(item, read.get(item.name), paths) for item in items]


def _clean_item(item: UploadFile, data: Any, paths: set[str]) -> UploadFile:
    if item.path is not None and matches_any(item.name, TEMPLATE_FILES):
        before = item.path.read_bytes().decode("utf-8", "surrogateescape")
        after = HOME_IN_TEMPLATE.sub(_last_part_of_match, before)
        return item if after == before else UploadFile(item.name, text=after)
    has_free_text = matches_any(item.name, FREE_TEXT_FILES)
    if item.path is None or not (has_free_text or data is not None):
        return item
    if data is None:
        text = item.path.read_text(encoding="utf-8", errors="replace")
        cleaned_text = shorten_paths(text, paths)
        return item if cleaned_text == text else UploadFile(item.name, text=cleaned_text)
    cleaned = clean_report(data, paths) if has_free_text else clean_config(data)
    if cleaned == data:
        return item
    if item.name.endswith(".jsonl"):
        return UploadFile(item.name, text="".join(json.dumps(line) + "\n" for line in cleaned))
    return UploadFile(item.name, text=json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n")


def _read_jsonl(path: Path) -> list[Any]:
    """Return the entries of a JSON-lines log, without a line that a killed run left incomplete."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(parse_json(line))
        except ValueError:
            continue
    return lines


def _is_local(text: str) -> bool:
    return bool(LOCAL_PATH_PATTERN.match(text)) and "\n" not in text


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def _last_part_of_match(match: re.Match[str]) -> str:
    """Shorten a matched path, keeping punctuation that follows it."""
    path = match[0].rstrip(".:")
    return _last_part(path) + match[0][len(path) :]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string in the data, keys included."""
    if isinstance(value, dict):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(v, change) for v in value]
    return change(value) if isinstance(value, str) else value


def strip_local_paths(value: Any) -> Any:
    """Shorten every string that is a local path: /home/me/models/llama -> llama."""
    return _map_strings(value, lambda text: _last_part(text) if _is_local(text) else text)


def clean_report(value: Any, paths: Iterable[str] = ()) -> Any:
    """Shorten local paths in a report or log, also inside sentences. paths: known paths."""
    return _map_strings(value, lambda text: shorten_paths(strip_local_paths(text), paths))


def clean_config(value: Any, key: str = "") -> Any:
    """Shorten local paths in a config: values of path-like keys, and paths that exist on this machine.

    A label like /m/09l8g or a token like /think stays.
    """
    if isinstance(value, dict):
        return {k: clean_config(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [clean_config(v, key) for v in value]
    return _last_part(value) if isinstance(value, str) and _is_config_path(value, key) else value


def _is_config_path(text: str, key: str) -> bool:
    if key.endswith("name_or_path") and "\n" not in text and (text.count("/") > 1 or "\\" in text):
        return True  # a relative path: an id of the Hub is org/name
    if not _is_local(text):
        return False
    return bool(PATH_KEYS.search(key) or HOME_PATTERN.match(text)) or (
        text.count("/") > 1 and len(text) < 4096 and os.path.exists(text)
    )


def find_local_paths(data: Any, everywhere: bool, key: str = "") -> Iterator[str]:
    """Yield the absolute paths that cleaning removes from this data."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from find_local_paths(value, everywhere, str(name))
    elif isinstance(data, list):
        for value in data:
            yield from find_local_paths(value, everywhere, key)
    elif isinstance(data, str) and data.count("/") + data.count("\\") > 1:
        yield from [data] if (_is_local(data) if everywhere else _is_config_path(data, key)) else []


def shorten_paths(text: str, paths: Iterable[str] = ()) -> str:
    """Shorten local paths in prose, tables or HTML: known paths, plain or escaped, and anything below a top-level
    folder of this machine."""
    inside = r"[^\s\"'`<>|;,()\[\]{}*?&\\]"
    for path in sorted(paths, key=len, reverse=True):
        for written in {path, escape(path)}:
            if written in text:
                text = re.sub(rf"{re.escape(written)}(?:/{inside}+)*", _last_part_of_match, text)
    roots = (
        {*ROOT_FOLDERS, *(name for name in os.listdir("/") if re.fullmatch(r"\w+", name))}
        if os.sep == "/"
        else set(ROOT_FOLDERS)
    )
    posix = rf"(?:file://)?/(?:{'|'.join(sorted(roots))})/{inside}+|~/{inside}+|file:///{inside}+"
    windows = r"[A-Za-z]:\\(?:[^\s\"'`<>|;,]+)|\\\\[\w.$-]+\\(?:[^\s\"'`<>|;,]+)"
    return re.sub(rf"(?<![\w:/.<\\-])(?:{posix}|{windows})", _last_part_of_match, text)
