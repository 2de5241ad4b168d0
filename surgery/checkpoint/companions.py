"""The files of a checkpoint besides its weights that are copied to every checkpoint made from it.

These are the tokenizer, processor, generation settings, chat templates and license, and subfolders of small files that
belong to the model (1_Pooling/ of sentence-transformers, additional_chat_templates/).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from surgery.core.errors import SurgeryError
from surgery.core.files import read_json

# Patterns of file names in the folder itself.
COPIED = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("*_config.json", "config_*.json", "normalizer.json", "modules.json", "chat_template*", "*.jinja", "tekken.json"),
    *("*.spm", "dict.txt", "entity_vocab.json", "prophetnet.tokenizer", "emoji.json", "*.bpe", "*.codes"),
    *("byte_maps.json", "target_vocab.json", "word_pronunciation.json", "word_shape.json"),
    *("spiece*", "sentencepiece*", "bpe*", "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*"),
)
# File types copied from subfolders, unless the subfolder holds weights of another format (FOREIGN).
SMALL_FILES = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".spm", ".vocab")
FOREIGN = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".gguf", ".ggml", ".onnx"),
    *(".onnx_data", ".h5", ".keras", ".msgpack", ".tflite", ".pb", ".mlmodel", ".mlpackage", ".xml", ".engine", ".ot"),
    *(".so", ".dll"),
)
# Skipped folders: other weight formats, training runs, and results that surgery writes beside the weights.
SKIPPED_FOLDERS = (
    *(
        "onnx*",
        "openvino*",
        "coreml*",
        "gguf*",
        "tflite*",
        "tensorrt*",
        "flax*",
        "tf*",
        "original",
        "runs",
        "logs",
        "log",
    ),
    *("wandb", "mlruns", "tensorboard*", "checkpoint*", "global_step*", "__pycache__", "eval", "training", "adapter"),
    *("pieces", "curvature", "venv", "node_modules", "data", "datasets", "samples"),
)
MODULES = "modules.json"  # lists the module folders of sentence-transformers, whose weights are part of the model
LISTED = 8  # files that a note names
MAX_BYTES, MAX_FILES, MAX_DEPTH = 64 * 2**20, 1000, 2  # per file, files, nesting of folders


# Files of the folder itself that are not copied and not mentioned: they are written anew, or describe a training run.
UNMENTIONED = (
    *("config.json", "*.index.json", "surgery_report.json", "training_log.json", "trainer_state.json"),
    *("*_results.json", "requirements*.txt", "README*"),
)


class CompanionFiles(NamedTuple):
    """Files of the subfolders.

    files: relative paths, sorted. left: "name: reason" for files, also of the folder itself, that are not copied
    although the user may expect it.
    """

    files: list[Path]
    left: list[str]


def subfolder_files(folder: Path) -> CompanionFiles:
    """Return the small files of the subfolders, at most MAX_DEPTH levels down.

    A link to a file of the folder or of the Hub's cache counts as a file; a link to a folder is not followed.
    Raises SurgeryError if there are more than MAX_FILES.
    """
    files: list[Path] = []
    left_out = _left_in_folder(folder)
    modules = module_folders(folder)
    for here in _folders(folder, folder, modules, left_out):
        name = here.relative_to(folder).as_posix()
        entries = sorted(p for p in here.iterdir() if p.is_file() or p.is_symlink())
        module = any(name == m or name.startswith(f"{m}/") for m in modules)
        foreign = [p for p in entries if p.suffix.lower() in FOREIGN]
        if foreign and not module:
            left_out.append(f"{name}/: it holds weights of another format, {foreign[0].name}")
            continue
        left_out += [f"{name}/{p.name}: {_why_foreign(p, entries)}" for p in foreign if _why_foreign(p, entries)]
        for path in entries:
            if path.name.startswith(".") or not path.name.endswith(
                (*SMALL_FILES, ".safetensors") if module else SMALL_FILES
            ):
                continue
            if path.is_file() and path.stat().st_size > MAX_BYTES:
                left_out.append(
                    f"{name}/{path.name}: {path.stat().st_size / 2**20:,.0f} MB, over {MAX_BYTES // 2**20} MB"
                )
                continue
            files.append(path.relative_to(folder))
    if len(files) > MAX_FILES:
        raise SurgeryError(
            f"{folder} has {len(files):,} small files in subfolders, more than {MAX_FILES:,}. Move files that are not "
            "part of the "
            "model elsewhere"
        )
    return CompanionFiles(sorted(files), left_out)


def companion_notes(folder: Path, out: Path, *, chats: bool) -> list[str]:
    """Return notes for the user about files of a checkpoint that its conversion `out` does not have: those that are not
    copied, by reason, and the chat template. chats: whether the model could use one."""
    by_reason: dict[str, list[str]] = {}
    for line in subfolder_files(folder).left:
        name, _, reason = line.partition(": ")
        by_reason.setdefault(reason, []).append(name)
    notes = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        notes.append(f"not copied to {out}: {', '.join(names[:LISTED])}{more} ({reason})")
    if chats and lacks_chat_template(folder):
        notes.append(
            "the tokenizer has no chat template. Text completion works; to chat with the model, put a "
            f"chat_template.jinja into {out}"
        )
    return notes


def lacks_chat_template(folder: Path) -> bool:
    """Return whether a folder has a tokenizer, and no chat template in any of the places where transformers looks for
    one.
    """
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or settings.stat().st_size > MAX_BYTES:
        return False
    if any(
        (folder / name).exists() for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return False
    table = read_json(settings)
    return isinstance(table, dict) and not table.get("chat_template")


def _left_in_folder(folder: Path) -> list[str]:
    """Return "name: reason" for each small file of the folder itself that is not in COPIED."""
    names = sorted(
        p.name for p in folder.iterdir() if p.suffix in SMALL_FILES and p.is_file() and not p.name.startswith(".")
    )
    known = (*COPIED, *UNMENTIONED)
    return [
        f"{name}: surgery does not know such files as part of a model; copy what the model needs"
        for name in names
        if not any(fnmatch(name, pattern) for pattern in known)
    ]


def _why_foreign(path: Path, entries: list[Path]) -> str:
    """Return why the weights of another format are a problem; empty if the same weights lie beside them as
    safetensors.
    """
    if any(other.suffix == ".safetensors" for other in entries):
        return ""
    return (
        "pickled or foreign weights of a module, without which it does not load; save the module as safetensors first"
    )


def _folders(folder: Path, here: Path, modules: set[str], left_out: list[str]) -> Iterator[Path]:
    """Yield the subfolders whose files are copied; links to folders are added to `left_out`."""
    for path in sorted(here.iterdir()):
        name, depth = path.relative_to(folder).as_posix(), len(path.relative_to(folder).parts)
        if path.name.startswith(".") or not path.is_dir():
            continue
        if path.is_symlink():
            left_out.append(f"{name}/: a link to a folder")
            continue
        if name not in modules and any(fnmatch(path.name, pattern) for pattern in SKIPPED_FOLDERS):
            continue
        yield path
        if depth < MAX_DEPTH:
            yield from _folders(folder, path, modules, left_out)


def module_folders(folder: Path) -> set[str]:
    """Return the subfolders named in modules.json, without paths that lead outside the checkpoint."""
    path = folder / MODULES
    listed = read_json(path) if path.is_file() else []
    named = {str(m.get("path", "")) for m in listed if isinstance(m, dict)} if isinstance(listed, list) else set()
    return {
        Path(name).as_posix()  # 2_Dense/ and ./2_Dense are 2_Dense
        for name in named
        if name
        and not os.path.isabs(name)
        and ".." not in Path(name).parts
        and not Path(name).as_posix().startswith(".")
    }


def check_link(path: Path, folder: Path) -> None:
    """Raise SurgeryError if a file is a link that leads outside its folder and the Hub cache's blobs."""
    home = folder.resolve()
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in homes):
        raise SurgeryError(f"{path} is a link to {path.resolve()}, outside the checkpoint; put the file itself there")


def folder_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of the folder itself that match the patterns, except weights of other formats."""
    paths = {p.relative_to(folder) for pattern in patterns for p in folder.glob(pattern) if p.is_file()}
    return sorted(p for p in paths if p.suffix.lower() not in FOREIGN and not p.name.startswith("."))
