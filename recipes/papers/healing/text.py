"""Make a training text for healing: documents, each followed by a line with END.

python -m surgery.recipes.papers.healing.text stories OUT.txt --characters 20000000
python -m surgery.recipes.papers.healing.text code OUT.txt --apart heldout.txt --apart calibration.txt
python -m surgery.recipes.papers.healing.text samples OUT.txt --source stories260K

    stories    generated stories, as the embedded checkpoint was trained on (eval/stories/__init__.py); half are long, with needles
    code       Python source of the installed packages. Files that share a passage with a text of --apart are left out, and so are
               packages that share several, because their files resemble each other
    samples    text sampled from a model at temperature 1
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from surgery.eval import stories

END = stories.END
PASSAGE_LINES = 6  # lines, without blanks
MAX_SHARED_PASSAGES = (
    20  # a package with this many shared passages is left out; fewer occur by chance (licenses, argument parsing)
)
MAX_FILE_CHARACTERS = 200_000  # larger files are mostly tables and generated code


def write(path: Path, documents: Iterator[str], characters: int) -> int:
    """Write whole documents until the text has at least `characters` characters; return the number written."""
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

    Files that share a passage with the texts `apart` are left out, and whole packages that share MAX_SHARED_PASSAGES or more.
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


# -- samples ---------------------------------------------------------------------------------------
def sampled_documents(source: str, seed: int, rows: int, length: int) -> Iterator[str]:
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
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("stories", "code", "samples"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--characters", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--apart", action="append", default=[], help="code: leave out files that share passages with this text."
    )
    parser.add_argument(
        "--packages", type=Path, default=Path(torch.__file__).parents[1], help="code: folder of installed packages."
    )
    parser.add_argument("--source", help="samples: checkpoint to sample from.")
    parser.add_argument("--length", type=int, default=512, help="samples: maximum tokens of a document.")
    parser.add_argument("--rows", type=int, default=256, help="samples: documents per batch.")
    arguments = parser.parse_args()
    if arguments.kind == "stories":
        documents = story_documents(arguments.seed)
    elif arguments.kind == "code":
        documents = code_documents(arguments.packages, [_read(Path(name)) for name in arguments.apart], arguments.seed)
    else:
        documents = sampled_documents(arguments.source, arguments.seed, arguments.rows, arguments.length)
    print(f"{arguments.out}: {write(arguments.out, documents, arguments.characters):,} characters")


if __name__ == "__main__":
    main()
