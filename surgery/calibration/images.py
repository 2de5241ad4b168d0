"""A folder of images, with captions, as calibration inputs, made by the processor of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.calibration.data import decode_text, placeholder_tokens
from surgery.checkpoint.remote_code import check_code_trusted
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CAPTIONS = "metadata.jsonl"  # as in image folders of `datasets`: one {"file_name": .., "text": ..} a line
PROMPT = "Describe this image."
IMAGE_TOKENS = 64  # tokens that one image counts for, where the model reads no text


def image_inputs(
    folder: Path, source_folder: Path, config: Any, tokens: int, *, trust_remote_code: bool = False, notes: list[str]
) -> dict[str, Tensor]:
    """Return the model's inputs for the images of a folder: what the checkpoint's processor returns, one row for each
    image.

    A model that generates text reads each image in a chat of PROMPT and the caption as answer, if there is one. A model
    of image and text (CLIP) reads the caption. Images are read in the order of their names until there are `tokens`
    tokens. config: the model's. notes: list for notes. Raises SurgeryError if the checkpoint has no processor, or a
    file is not an image.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    if len(files) < 2:
        raise SurgeryError(
            f"calibration folder {folder} must hold at least two images ({', '.join(SUFFIXES)}; got {len(files)})"
        )
    captions = read_captions(folder / CAPTIONS)
    if captions and (missing := [path.name for path in files if path.name not in captions]):
        raise SurgeryError(f"{folder / CAPTIONS} has no text for {missing[0]}; every image needs one, or none")
    processor = load_processor(source_folder, trust_remote_code)
    size: tuple[int, int] | None = None
    rows = _read_rows(processor, config, files, captions, tokens, size)
    if len({tuple((name, tuple(x.shape)) for name, x in row.items() if not _is_text(name)) for row in rows}) > 1:
        size = _open(files[0]).size
        notes.append(f"images of {folder} were resized to {size[0]} x {size[1]}, the size of {files[0].name}")
        rows = _read_rows(processor, config, files, captions, tokens, size)
    return join_rows(rows)


def read_captions(path: Path) -> dict[str, str]:
    """Return the caption of each image by file name; {} without the file.

    Raises SurgeryError for a line of another form.
    """
    if not path.is_file():
        return {}
    captions: dict[str, str] = {}
    for number, line in enumerate(decode_text(path)[0].split("\n"), start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = 0
        if row is None:
            continue
        name, text = (row.get("file_name"), row.get("text")) if isinstance(row, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise SurgeryError(f'{path}, line {number} must be {{"file_name": "..", "text": ".."}} (got {line[:80]!r})')
        captions[name] = text.encode("utf-8", "replace").decode()  # tokenizers take no lone surrogates
    return captions


def load_processor(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the processor of a checkpoint, or its image processor.

    Raises SurgeryError if it has none that reads images.
    """
    from transformers import AutoImageProcessor, AutoProcessor

    known = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    check_code_trusted(folder, str(folder), known if isinstance(known, dict) else {}, trust_remote_code)
    reasons = []
    kinds: tuple[Any, ...] = (AutoProcessor, AutoImageProcessor)
    for auto in kinds:
        try:
            processor = auto.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
            check_environment(error)
            reasons.append(" ".join(str(error).split())[:200])
            continue
        if hasattr(processor, "image_processor") or hasattr(processor, "image_mean"):
            return processor
    raise SurgeryError(
        f"{folder} has no processor of images that transformers can load ({'; '.join(reasons) or 'only a tokenizer'}). "
        "Put "
        "preprocessor_config.json or processor_config.json beside the weights, or give model inputs in a .safetensors "
        "file"
    )


def _open(path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SurgeryError(f"{path} is not an image that can be read ({' '.join(str(error).split())[:120]})") from None


def _read_rows(
    processor: Any,
    config: Any,
    files: list[Path],
    captions: Mapping[str, str],
    tokens: int,
    size: tuple[int, int] | None,
) -> list[dict[str, Tensor]]:
    rows: list[dict[str, Tensor]] = []
    count = 0
    for path in files:
        image = _open(path)
        if size is not None:
            image = image.resize(size)
        rows.append(_process(processor, config, image, captions.get(path.name, ""), path))
        count += rows[-1]["input_ids"].shape[1] if "input_ids" in rows[-1] else IMAGE_TOKENS
        if count >= tokens and len(rows) > 1:
            break
    return rows


def _process(processor: Any, config: Any, image: Any, caption: str, path: Path) -> dict[str, Tensor]:
    """Return the model's inputs for one image."""
    arguments: dict[str, Any] = {"images": [image], "return_tensors": "pt"}
    if getattr(processor, "tokenizer", None) is not None:
        reads_image = bool(placeholder_tokens(config)) or getattr(processor, "image_token", None) is not None
        if not reads_image and not caption:
            raise SurgeryError(
                f"{path}: this model reads an image and a text. Write the texts into {CAPTIONS} beside the images, one "
                "line each: "
                '{"file_name": "..", "text": ".."}'
            )
        arguments["text"] = [_chat(processor, caption) if reads_image else caption]
        if not reads_image:
            arguments |= {"padding": "max_length", "truncation": True}
    try:
        features = processor(**arguments)
    except Exception as error:  # processors raise errors of many kinds
        check_environment(error)
        raise SurgeryError(
            f"{path}: {type(processor).__name__} cannot read it ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). Give model "
            "inputs in a .safetensors file"
        ) from None
    return {name: value for name, value in features.items() if isinstance(value, Tensor) and value.dim()}


def _chat(processor: Any, caption: str) -> str:
    """Return the text of a chat about one image, by the processor's template; without one, its image token and the
    caption.
    """
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
        answer = [{"role": "assistant", "content": [{"type": "text", "text": caption}]}] if caption else []
        text: str = processor.apply_chat_template([{"role": "user", "content": content}, *answer], tokenize=False)
        return text
    token = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None) or "<image>"
    return f"{token}\n{caption or PROMPT}"


def _is_text(name: str) -> bool:
    return name.endswith(("input_ids", "attention_mask", "token_type_ids"))


def join_rows(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate rows along the first axis; token ids, masks and types of tokens are padded at the end with 0."""
    texts = [name for name in rows[0] if _is_text(name)]
    length = max((row[name].shape[1] for row in rows for name in texts), default=0)
    if texts and "attention_mask" not in rows[0]:
        rows = [{**row, "attention_mask": torch.ones_like(row[texts[0]])} for row in rows]
        texts.append("attention_mask")
    joined = {}
    for name in sorted(rows[0], key=lambda name: name != "input_ids"):
        parts = [row[name] for row in rows]
        if name in texts:
            parts = [nn.functional.pad(x, (0, length - x.shape[1])) for x in parts]
        joined[name] = torch.cat(parts).contiguous()
    return joined
