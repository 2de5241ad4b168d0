"""RULER's longer list of words, which `cwe` draws from beyond the 8,166 words of wonderwords; `surgery fetch-eval-data`
downloads it.

The list is scripts/data/synthetic/json/english_words.json of NVIDIA/RULER, a JSON object of 8,564,991 bytes whose
values are words. It is not part of this package because of its size. The file lies in the repository's Git LFS storage,
under the SHA-256 below.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from surgery.core.errors import SurgeryError
from surgery.core.files import parse_json
from surgery.core.progress import Progress
from surgery.eval.fetch import MirrorReadme, dataset_sources, fetch, replace_folder, write_commits
from surgery.eval.long_context import WORD_LIST
from surgery.eval.upstream import UPSTREAM

NAME = WORD_LIST[0]
COMMIT = UPSTREAM["ruler"].commit
FILE = "scripts/data/synthetic/json/english_words.json"
URL = f"https://media.githubusercontent.com/media/{NAME}/{COMMIT}/{FILE}"
SHA256 = "affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca"  # of Git LFS's pointer at COMMIT
SIZE = 8_564_991  # bytes
TIMEOUT = 60  # seconds


def fetch_suites(
    root: Path,
    suites: Sequence[str],
    tasks: Sequence[str],
    progress: Progress,
    commits: Mapping[str, str] | None = None,
) -> dict[str, list[str]]:
    """Download all that suites read: the data sets of the Hub, and for ruler this list. See `fetch.fetch`."""
    done = fetch(root, dataset_sources(suites, tasks), progress, commits)
    words = fetch_word_list(root, progress, commits) if "ruler" in suites else {}
    return {key: names + words.get(key, []) for key, names in done.items()}


def fetch_word_list(root: Path, progress: Progress, commits: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Download the list into the mirror `root`, unless it is there; return {"fetched": [..], "kept": [..]}.

    Raises SurgeryError if the download fails, is not the file of COMMIT, or if `commits` names another commit.
    """
    commit = (commits or {}).get(NAME, COMMIT)
    if commit != COMMIT:
        raise SurgeryError(
            f"the words of {NAME} are those of commit {COMMIT}, not {commit}. Remove {NAME} from the commits."
        )
    folder = root / NAME
    if folder.is_dir():
        return {"fetched": [], "kept": [NAME]}
    progress.say(f"{NAME}: {FILE}")
    words = read_words(_download())
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with open(partial / "words.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"word": word}, ensure_ascii=False) + "\n" for word in words)
        head = MirrorReadme(
            [{"config_name": "default", "data_files": [{"split": "train", "path": "words.jsonl"}]}], ["default"]
        )
        (partial / "README.md").write_text(head.text(NAME, COMMIT), encoding="utf-8")
        replace_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    write_commits(root)
    return {"fetched": [NAME], "kept": []}


def read_words(data: bytes) -> list[str]:
    """Return the words of english_words.json in their order.

    Raises SurgeryError unless it is the file that COMMIT names.
    """
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256:
        raise SurgeryError(
            f"{URL} must have the SHA-256 {SHA256} (got {digest}, {len(data):,} bytes). Run the same command again; if "
            "that does not help, the file "
            "was replaced."
        )
    read = parse_json(data.decode("utf-8"))
    return [str(word) for word in read.values()]


def _download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as answer:
            return bytes(answer.read(SIZE + 1))
    except (OSError, ValueError) as error:
        raise SurgeryError(
            f"{URL} could not be fetched ({type(error).__name__}: {' '.join(str(error).split())[:200]}). Data sets "
            "fetched before it are kept; run the "
            "same command again to continue"
        ) from None
