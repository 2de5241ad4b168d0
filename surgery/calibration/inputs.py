"""The calibration inputs of a checkpoint, from any source that --calibration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from surgery.calibration.data import calibration_inputs, load_tokenizer


def checkpoint_inputs(
    text: str,
    source_folder: Path,
    config: Any,
    tokens: int,
    length: int,
    *,
    trust_remote_code: bool = False,
    notes: list[str],
) -> dict[str, Tensor]:
    """Return the model's inputs: those of `calibration_inputs`, of the images of a folder, or of pairs of texts.

    text: also a folder of images (surgery.calibration.images), or for an encoder-decoder a .jsonl file of pairs
    (surgery.calibration.pairs). Other arguments: as in `calibration_inputs`.
    """
    path = Path(text)
    if path.is_dir():
        from surgery.calibration.images import image_inputs

        return image_inputs(path, source_folder, config, tokens, trust_remote_code=trust_remote_code, notes=notes)
    if path.suffix == ".jsonl" and path.is_file() and getattr(config, "is_encoder_decoder", False):
        from surgery.calibration.pairs import pair_inputs, read_pairs

        pairs = read_pairs(path, notes)
        if pairs is not None:
            return pair_inputs(pairs, load_tokenizer(source_folder, trust_remote_code), tokens, length, text)
    return calibration_inputs(
        text, source_folder, config, tokens, length, trust_remote_code=trust_remote_code, notes=notes
    )
