"""Generate training text for healing; documents are separated by the line END.

python -m recipes.papers.healing.text stories OUT.txt --characters 20000000
python -m recipes.papers.healing.text code OUT.txt --apart heldout.txt --apart calibration.txt
python -m recipes.papers.healing.text repeats OUT.txt --lines OTHER.txt
python -m recipes.papers.healing.text pairs OUT.txt --lines OTHER.txt
python -m recipes.papers.healing.text samples OUT.txt --source stories260K

    stories    the training text of the embedded checkpoint (eval/stories/__init__.py), half of it long documents with needles
    code       Python source of the installed packages. Files that share a passage with a text of --apart are left out, and
               packages that share many, because files of a package resemble each other
    repeats    lines of --lines in random order, of which many come again far behind their first place: what a model can predict
               only by looking it up, so that distillation trains far attention
    pairs      lines of --lines, among them short ones that bind a name to a value and come again: few tokens to recognise and few
               to look up
    samples    text sampled from a model, starting from its first special token
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from recipes.papers.script import run_script
from surgery.core.errors import SurgeryError
from surgery.eval import stories

END = stories.END
PASSAGE_LINES = 6  # nonblank lines in a passage
MAX_SHARED_PASSAGES = 20  # below this number, shared passages of a package are chance: licenses, loops over arguments
MAX_FILE_CHARACTERS = 200_000  # longer files are mostly tables and generated code


def write(path: Path, documents: Iterator[str], characters: int) -> int:
    """Write documents until the text has at least that many characters; return its number of characters."""
    size = 0
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w", encoding="utf-8") as file:
        for document in documents:
            size += file.write(f"{document}\n{END}\n")
            if size >= characters:
                break
    partial.replace(path)
    return size


# -- stories ---------------------------------------------------------------------------------------
def story_documents(seed: int) -> Iterator[str]:
    """Yield generated stories."""
    rng = Random(f"healing {seed}")
    while True:
        yield stories.document(rng)
        yield stories.needle_document(rng, 60 + int(rng.random() * 840), early=1)


# -- code ------------------------------------------------------------------------------------------
def passage_hashes(text: str) -> set[int]:
    """Return hashes of all passages of PASSAGE_LINES nonblank lines."""
    lines = [stripped for piece in text.splitlines() if (stripped := piece.strip())]
    return {hash("\n".join(lines[i : i + PASSAGE_LINES])) for i in range(len(lines) - PASSAGE_LINES + 1)}


def package_files(folder: Path) -> Iterator[list[Path]]:
    """Yield the Python files of each installed package."""
    for place in sorted(folder.iterdir()):
        if place.is_dir() and not place.name.startswith((".", "_")) and (files := sorted(place.rglob("*.py"))):
            yield files


def code_documents(folder: Path, apart: list[str], seed: int) -> Iterator[str]:
    """Yield Python files of packages in random order, of 200 to MAX_FILE_CHARACTERS characters.

    Files that share a passage with the texts `apart` are left out, and whole packages that share MAX_SHARED_PASSAGES or
    more.
    """
    known = set().union(*(passage_hashes(text) for text in apart)) if apart else set()
    kept: list[Path] = []
    for files in package_files(folder):
        shared = (
            {file: len(passage_hashes(_read(file)) & known) for file in files} if known else dict.fromkeys(files, 0)
        )
        if sum(shared.values()) < MAX_SHARED_PASSAGES:
            kept += [file for file in files if not shared[file]]
    order = sorted(kept)
    Random(f"code {seed}").shuffle(order)
    texts = (_read(file) for file in order)
    return (text for text in texts if 200 < len(text) < MAX_FILE_CHARACTERS)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


# -- repeats ---------------------------------------------------------------------------------------
REPEAT_SHARE = 0.5  # of the lines of a document, once enough lines precede
MIN_LINES_BETWEEN = 8  # between a line and its repetition
MIN_LINE_CHARACTERS, MAX_LINE_CHARACTERS = 12, 200


def _usable_lines(text: str, kind: str) -> list[str]:
    """Return the text's different lines of usual length, sorted."""
    usable = {line for line in text.splitlines() if MIN_LINE_CHARACTERS <= len(line.strip()) <= MAX_LINE_CHARACTERS}
    if len(usable) < 1000:
        raise SurgeryError(
            f"{kind}: the text has {len(usable)} different lines of {MIN_LINE_CHARACTERS} to {MAX_LINE_CHARACTERS} "
            "characters, "
            "and 1,000 are needed. Give a longer --lines."
        )
    return sorted(usable)


def repeat_documents(text: str, seed: int, characters: int = 8000) -> Iterator[str]:
    """Yield documents of about that many characters: lines of the text in random order, half of them repetitions.

    Raises SurgeryError if the text has fewer than 1,000 usable lines.
    """
    lines = _usable_lines(text, "repeats")
    rng = Random(f"repeats {seed}")
    while True:
        document: list[str] = []
        size = 0
        while size < characters:
            earlier = len(document) - MIN_LINES_BETWEEN
            repeated = earlier > 0 and rng.random() < REPEAT_SHARE
            document.append(
                document[int(rng.random() * earlier)] if repeated else lines[int(rng.random() * len(lines))]
            )
            size += len(document[-1]) + 1
        yield "\n".join(document)


# -- pairs -----------------------------------------------------------------------------------------
PAIR_FORMS = (
    "{a} = {b}", "self.{a} = {b}", '    "{a}": "{b}",', "{a}: {b}", "    {a}={b},", "{a} -> {b}", "from {a} import {b}", "{a}({b})",
    "# {a} means {b}", "The {a} of it was {b}.", "- {a}, {b}", "class {a}({b}):",
)  # fmt: skip
PAIR_COUNTS = (4, 8, 16, 32, 64)  # pairs of a document
PAIR_SHARES = (0.1, 0.3, 0.6)  # of the lines of a document that are pairs


def pair_documents(text: str, seed: int, characters: int = 8000) -> Iterator[str]:
    """Yield documents of about that many characters: lines of the text, and between them pairs of names of the text in
    up to three forms, each of which comes again at random.

    Raises SurgeryError if the text has fewer than 1,000 names or usable lines.
    """
    names = sorted(set(re.findall(r"[A-Za-z_]{3,14}", text)))
    lines = _usable_lines(text, "pairs")
    if len(names) < 1000:
        raise SurgeryError(
            f"pairs: the text has {len(names)} different names, and 1,000 are needed. Give a longer --lines."
        )
    rng = Random(f"pairs {seed}")
    while True:
        forms, chosen = rng.sample(PAIR_FORMS, 3), rng.sample(names, rng.choice(PAIR_COUNTS))
        pairs = [rng.choice(forms).format(a=name, b=rng.choice(names)) for name in chosen]
        share, document, size = rng.choice(PAIR_SHARES), list[str](), 0
        while size < characters:
            document.append(rng.choice(pairs if rng.random() < share else lines))
            size += len(document[-1]) + 1
        yield "\n".join(document)


# -- samples ---------------------------------------------------------------------------------------
def sample_documents(source: str, seed: int, rows: int, length: int) -> Iterator[str]:
    """Sample documents of at most `length` tokens at temperature 1, the model's own distribution, `rows` at a time."""
    from surgery.core.device import choose_device
    from surgery.training import models as opening

    opened, device = opening.open_trainable(source), choose_device(None)
    model = opening.load_causal_lm(opened, torch.float32 if device.type == "cpu" else torch.bfloat16).to(device).eval()
    tokenizer = opening.load_source_tokenizer(opened)
    first = next(t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None)
    torch.manual_seed(seed)
    while True:
        yield from _sample_batch(model, tokenizer, torch.full((rows, 1), first, device=device), length)


def _sample_batch(model: Any, tokenizer: Any, begun_B1: torch.Tensor, length: int) -> list[str]:
    ids_BT = model.generate(
        begun_B1, attention_mask=torch.ones_like(begun_B1), max_length=length,
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=int(begun_B1[0, 0]),
    )  # fmt: skip
    return tokenizer.batch_decode(ids_BT, skip_special_tokens=True)


def main() -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kind", choices=("stories", "code", "repeats", "pairs", "samples"), help="Kind of text, see above."
    )
    parser.add_argument("out", type=Path, help="File to write.")
    parser.add_argument("--characters", type=int, default=20_000_000, help="Length of the text. Default: 20,000,000.")
    parser.add_argument("--seed", type=int, default=0, help="Random seed. Default: 0.")
    parser.add_argument(
        "--apart", action="append", default=[], help="code: Exclude what shares passages with this text. Repeatable."
    )
    parser.add_argument(
        "--packages",
        type=Path,
        default=Path(torch.__file__).parents[1],
        help="code: Folder of packages. Default: the installed ones.",
    )
    parser.add_argument("--lines", type=Path, help="repeats, pairs: Text whose lines are used.")
    parser.add_argument("--source", help="samples: Checkpoint to sample from.")
    parser.add_argument("--length", type=int, default=512, help="samples: Maximum tokens of a document. Default: 512.")
    parser.add_argument("--rows", type=int, default=256, help="samples: Batch size. Default: 256.")
    arguments = parser.parse_args()
    if arguments.kind == "stories":
        documents = story_documents(arguments.seed)
    elif arguments.kind == "code":
        documents = code_documents(arguments.packages, [_read(Path(name)) for name in arguments.apart], arguments.seed)
    elif arguments.kind in ("repeats", "pairs"):
        if arguments.lines is None:
            parser.error(f"{arguments.kind} needs --lines, a text whose lines are used")
        make = repeat_documents if arguments.kind == "repeats" else pair_documents
        documents = make(_read(arguments.lines), arguments.seed)
    else:
        documents = sample_documents(arguments.source, arguments.seed, arguments.rows, arguments.length)
    print(f"{arguments.out}: {write(arguments.out, documents, arguments.characters):,} characters")


if __name__ == "__main__":
    run_script(main)
