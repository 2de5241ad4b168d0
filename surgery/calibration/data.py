"""Calibration samples: text to token windows, divided into samples to fit to and held-out samples.

A window is a row of token ids of fixed length. Ready input tensors (images, sound) are read from safetensors instead.
"""

from __future__ import annotations

import codecs
import hashlib
import inspect
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.chats import CHAT_COLUMNS, apply_chat_template, chat_template, parse_messages
from surgery.checkpoint.remote_code import check_code_trusted
from surgery.core.digests import check_no_outside_files
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import read_json
from surgery.core.hub_errors import explain_hub_error


@dataclass(frozen=True)
class CalibrationSet:
    """Inputs of the model for calibration.

    inputs: keyword arguments of the model's forward, batch axis first. Rows 0:n_fit are fitted to, rows n_fit:rows are
    held out for measuring the error. packed: names of inputs of which the model takes several entries in sequence for
    each row, such as the patches of an image; they are stored as (rows, entries, ..) and passed to the model as (rows
    entries, ..).
    """

    inputs: dict[str, Tensor]
    n_fit: int
    rows: int
    packed: frozenset[str] = frozenset()

    @classmethod
    def from_inputs(cls, inputs: dict[str, Tensor], holdout: float) -> CalibrationSet:
        """Return the set with a share `holdout` of the rows held out: at least one row, and at least two if there are
        four.

        inputs: as the model takes them; see `count_rows` for the number of rows.
        """
        rows = count_rows(inputs, "calibration")
        packed = frozenset(name for name, x in inputs.items() if len(x) != rows)
        inputs = {name: x.unflatten(0, (rows, -1)) if name in packed else x for name, x in inputs.items()}
        if rows < 2:
            raise SurgeryError(f"calibration: {rows} window; at least two are needed, one to fit and one to check")
        # Two if possible: a standard error cannot be estimated from one.
        held = min(max(2 if rows >= 4 else 1, round(rows * holdout)), rows - 1)
        mask = inputs.get("attention_mask")
        for part, what in ((slice(rows - held), "to fit"), (slice(rows - held, None), "to check")):
            if mask is not None and not mask[part].any():
                raise SurgeryError(
                    f"calibration: the attention_mask is 0 in all rows {what} (the last {held} of {rows} rows are to "
                    "check), so they hold no token. Leave out empty texts"
                )
        return cls(inputs, rows - held, rows, packed)

    @property
    def fit(self) -> range:
        """The samples that are fitted to."""
        return range(self.n_fit)

    @property
    def held_out(self) -> range:
        """The samples that are held out."""
        return range(self.n_fit, self.rows)

    def mask(self) -> Tensor | None:
        """Return the attention mask (rows, T), nonzero at real tokens; None if the inputs are not padded."""
        return self.inputs.get("attention_mask")

    def token_masks(self, tower: str = "") -> tuple[Tensor, ...]:
        """Return the masks (rows, T) of the tokens that layers of a tower read: of the input, and of the decoder's
        input.

        Layers that read images or sound have none.
        """
        names = ("attention_mask", "decoder_attention_mask") if tower in ("", "text", "encoder", "decoder") else ()
        return tuple(self.inputs[name] for name in names if name in self.inputs)

    def head_mask(self) -> Tensor | None:
        """Return the mask of the tokens that reach the head: the decoder's if the model has one."""
        return self.inputs.get("decoder_attention_mask" if "decoder_input_ids" in self.inputs else "attention_mask")

    def tokens(self) -> int:
        """Return the number of tokens of the first input, or of its rows if it holds no token ids."""
        first = next(iter(self.inputs.values()))
        return first.shape[0] * (first.shape[1] if first.dim() == 2 else 1)

    def fit_tokens(self) -> float:
        """Return the number of tokens of the rows to fit to, padding left out."""
        mask_BT, first = self.mask(), next(iter(self.inputs.values()))
        if mask_BT is not None and mask_BT.dim() == 2 and mask_BT.shape == first.shape:
            return float(mask_BT[: self.n_fit].ne(0).sum())
        return self.tokens() * self.n_fit / self.rows

    def digest(self) -> str:
        """Return the SHA-256 of the inputs and of their division, which identifies the set in the journal."""
        digest = hashlib.sha256(str((self.n_fit, self.rows)).encode())
        for name in sorted(self.inputs):
            digest.update(name.encode() + self.inputs[name].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def unpadded_rows(x_BTX: Tensor, *masks_BT: Tensor | None) -> Tensor:
    """Return the rows of real tokens, (N, X), by the first mask of the shape (B, T); all rows if there is none."""
    for mask_BT in masks_BT:
        if mask_BT is not None and x_BTX.shape[:2] == mask_BT.shape:
            return x_BTX[mask_BT.to(x_BTX.device).bool()]
    return x_BTX.flatten(0, -2)


# -- inputs of the model ---------------------------------------------------------------------------
TOKEN_INPUTS = ("input_ids", "decoder_input_ids", "labels")
IGNORED_LABEL = -100  # transformers computes no loss there


def count_rows(inputs: Mapping[str, Tensor], where: str) -> int:
    """Return the number of rows of inputs: that of the token ids, else of all tensors.

    Raises SurgeryError if the first axis of a tensor is not a multiple of it, or empty. where: names the inputs in the
    message.
    """
    sizes = {name: len(x) if x.dim() else 0 for name, x in inputs.items()}
    rows = next((sizes[name] for name in TOKEN_INPUTS if name in sizes), None)
    rows = min(sizes.values(), default=0) if rows is None else rows
    several = rows and not any(name in sizes for name in TOKEN_INPUTS) and len(set(sizes.values())) > 1
    if not rows or several or any(size % rows or not size for size in sizes.values()):
        raise SurgeryError(
            f"{where}: every tensor needs the same number of rows, for example pixel_values (64, 3, 224, 224); beside "
            "token ids (rows, "
            f"length), the first axis of images may be a multiple of it (got {sizes})"
        )
    return rows


def align_left(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs of a model of transformers with the padding at the start of each row moved to its end.

    Called without position_ids, transformers counts positions from the start of a row, padding included. A converted
    model counts them from the first real token, as generation does (surgery.modeling.padding_positions). So rows are
    fitted at the positions of later calls, and rows padded on the left, on the right and not at all give the same
    conversion. Columns that are padding in every row are left out, except for encoder-decoders, whose masks are told
    apart by their length. Padding inside of a row keeps its place.
    """
    aligned, has_decoder = dict(inputs), any(name.startswith("decoder_") for name in inputs)
    for prefix in ("", "decoder_"):
        mask_BT = inputs.get(f"{prefix}attention_mask")
        has_tokens = any(f"{prefix}{name}" in inputs for name in ("input_ids", "inputs_embeds"))
        if mask_BT is None or mask_BT.dim() != 2 or not has_tokens:
            continue
        real_BT, length = mask_BT.ne(0).long(), mask_BT.shape[1]
        start_B, last_B = real_BT.argmax(1), real_BT.cumsum(1).argmax(1)  # both 0 for a row of padding alone
        columns = length if has_decoder else int((last_B - start_B).max()) + 1
        if columns == length and not bool(start_B.any()):
            continue
        index_BT = (start_B[:, None] + torch.arange(columns)) % length
        for name, x in inputs.items():
            of_mask = name.startswith("decoder_") == bool(prefix) and not name.startswith(("labels", "pixel_values"))
            if of_mask and x.shape[:2] == mask_BT.shape:
                aligned[name] = x[torch.arange(len(x))[:, None], index_BT]
    return aligned


def read_labels(inputs: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return the inputs of an encoder-decoder with decoder_input_ids in the place of labels; others unchanged.

    decoder_input_ids are the start token and the labels before each position; padded labels (-100) are masked. If both
    masks or ids have one length, the last position of the decoder is dropped, because padding is found by length.
    """
    config = model.config
    if not getattr(config, "is_encoder_decoder", False):
        return inputs
    inputs = dict(inputs)
    labels_BT = inputs.pop("labels", None)
    if "decoder_input_ids" not in inputs:
        if labels_BT is None:
            raise SurgeryError(
                f"calibration inputs: {type(model).__name__} is an encoder-decoder and needs labels or "
                "decoder_input_ids (got "
                f"{', '.join(sorted(inputs))}). Give pairs of texts (.jsonl with input and target), or add labels "
                "(rows, length)"
            )
        if labels_BT.dim() != 2 or labels_BT.is_floating_point():
            raise SurgeryError(
                f"calibration inputs: labels must hold token ids, (rows, length) int64 (got {labels_BT.dtype} "
                f"{list(labels_BT.shape)})"
            )
        start, pad = _decoder_token(model, "decoder_start_token_id"), _decoder_token(model, "pad_token_id")
        real_BT = labels_BT != IGNORED_LABEL
        first_B1 = torch.full_like(labels_BT[:, :1], start)
        inputs["decoder_input_ids"] = torch.cat([first_B1, labels_BT.masked_fill(~real_BT, pad)[:, :-1]], dim=1)
        if not bool(real_BT.all()):
            ones_B1 = torch.ones_like(first_B1)
            inputs.setdefault("decoder_attention_mask", torch.cat([ones_B1, real_BT[:, :-1].to(ones_B1)], dim=1))
    masks = [inputs[name] for name in ("attention_mask", "decoder_attention_mask") if name in inputs]
    length = inputs["decoder_input_ids"].shape[-1]
    if masks and "input_ids" in inputs and inputs["input_ids"].shape[-1] == length > 2:
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            if name in inputs:
                inputs[name] = inputs[name][:, :-1].contiguous()
    return inputs


def _decoder_token(model: Any, key: str) -> int:
    """Return a token id of the model's config or generation config; 0 without one."""
    places = (model.config, getattr(model, "generation_config", None), model.config.get_text_config())
    token = next((getattr(config, key) for config in places if getattr(config, key, None) is not None), 0)
    return int(token)


def token_embedding(model: Any) -> Any:
    """Return the embedding of a model's input ids, or None if it is not known."""
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # models of two towers
        tokens = [m for path, m in model.named_modules() if path.endswith(("token_embedding", "embed_tokens"))]
        embedding = tokens[0] if tokens else None
    return embedding if isinstance(embedding, torch.nn.Embedding) else None


PLACEHOLDER_KEYS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")


def placeholder_tokens(config: Any) -> set[int]:
    """Return the token ids of a config that stand for images, videos or sound, and are replaced by their features."""
    tokens = {getattr(config, key, None) for key in (*PLACEHOLDER_KEYS, "audio_token_index")}
    return {token for token in tokens if isinstance(token, int)}


def check_model_inputs(inputs: dict[str, Tensor], model: Any) -> None:
    """Raise SurgeryError if the model's forward lacks one of these arguments, or its embedding one of the token ids."""
    taken = [name for name in inspect.signature(model.forward).parameters if name not in ("labels", "kwargs")]
    for name in inputs:
        if name not in taken:
            main = getattr(model, "main_input_name", None)
            rule = (
                f"; it reads {main}: give model inputs in a .safetensors file" if name == "input_ids" and main else ""
            )
            raise SurgeryError(
                f"calibration inputs: {type(model).__name__} takes no {name!r}{suggestion(name, taken)}{rule}"
            )
    vocabulary = getattr(token_embedding(model), "num_embeddings", None)
    for name, ids in inputs.items():
        if name.endswith("input_ids") and vocabulary is not None:
            real_ids = ids
            for token in placeholder_tokens(model.config):
                real_ids = real_ids[real_ids != token]
            low, high = (int(real_ids.min()), int(real_ids.max())) if real_ids.numel() else (0, 0)
            if ids.dim() != 2 or ids.is_floating_point() or low < 0 or high >= vocabulary:
                raise SurgeryError(
                    f"calibration inputs: {name} holds {ids.dtype} {list(ids.shape)} from {low} to {high}; it must "
                    "hold "
                    f"token ids, (rows, length) int64, from 0 to {vocabulary - 1}"
                )


# -- text ------------------------------------------------------------------------------------------
def calibration_inputs(
    text: str,
    source_folder: Path,
    config: Any,
    tokens: int,
    length: int,
    *,
    trust_remote_code: bool = False,
    notes: list[str] | None = None,
) -> dict[str, Tensor]:
    """Return the model's inputs: `tokens` tokens of the text in windows of `length` tokens, special tokens included.

    An encoder-decoder gets the first half of a window as the encoder's input and the second half as the decoder's.
    Pairs and folders of images are read by surgery.calibration.inputs.

    text: a file (.txt, .md, .json, .jsonl, .parquet, .csv; .safetensors with ready inputs, for models of images or
    sound) or a Hub data set, "org/name" or "org/name:config:split:column". Conversations are rendered by the chat
    template. notes: list to which notes about the text
    are appended, such as a converted encoding or too few tokens.
    """
    path = Path(text)
    if path.suffix == ".safetensors":
        return load_input_tensors(path)
    _check_is_text(text)
    tokenizer = load_tokenizer(source_folder, trust_remote_code)
    documents = document_stream(text, notes, tokenizer)
    return text_inputs(documents, tokenizer, config, tokens, length, where=text, notes=notes)


def text_inputs(
    documents: Iterator[str],
    tokenizer: Any,
    config: Any,
    tokens: int,
    length: int,
    *,
    where: str,
    notes: list[str] | None = None,
) -> dict[str, Tensor]:
    """Return the model's inputs for a stream of documents, see `calibration_inputs`. where: names the text in
    messages.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or length
    windows_NT = text_windows(documents, tokenizer, tokens, min(length, limit), where)
    if notes is not None and windows_NT.numel() < 0.9 * tokens:
        notes.append(f"{where} gives {windows_NT.numel():,} tokens in whole windows, where {tokens:,} were asked for")
    if getattr(config, "is_encoder_decoder", False):
        half = windows_NT.shape[1] // 2
        start = torch.full((len(windows_NT), 1), config.decoder_start_token_id)
        answers = torch.cat([start, windows_NT[:, half : 2 * half - 1]], dim=1)
        return {"input_ids": windows_NT[:, :half].contiguous(), "decoder_input_ids": answers}
    return {"input_ids": windows_NT}


def interleave(several: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of several texts as one set of inputs, evenly mixed: each text has its share in every part.

    Raises SurgeryError if their rows differ in names or lengths.
    """
    shapes = [{name: x.shape[1:] for name, x in inputs.items()} for inputs in several]
    if any(shape != shapes[0] for shape in shapes):
        raise SurgeryError(
            "calibration: several texts must have rows of one length (got "
            f"{'; '.join(str({name: list(size) for name, size in shape.items()}) for shape in shapes)}). Give pairs of "
            "texts in one file"
        )
    counts = [len(next(iter(inputs.values()))) for inputs in several]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    places = sorted(((i + 0.5) / count, start + i) for start, count in zip(starts, counts) for i in range(count))
    order = torch.tensor([index for _, index in places])
    return {name: torch.cat([inputs[name] for inputs in several])[order] for name in several[0]}


def load_input_tensors(path: Path) -> dict[str, Tensor]:
    """Return ready inputs of the model from a safetensors file, by argument name; all must have the same number of
    rows.
    """
    from surgery.checkpoint.safetensors_io import read_header, read_tensor

    if not path.is_file():
        raise SurgeryError(f"calibration file {path} does not exist")
    inputs = {name: read_tensor(info) for name, info in read_header(path).items()}
    count_rows(inputs, str(path))
    _check_masks(inputs, path)
    first = [name for name in TOKEN_INPUTS if name in inputs]
    return {name: inputs[name] for name in (*first, *(name for name in inputs if name not in first))}


def _check_masks(inputs: Mapping[str, Tensor], path: Path) -> None:
    """Raise SurgeryError for a mask that has another shape than its token ids, or a row without any token."""
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids not in inputs or mask not in inputs or inputs[mask].dim() > 2:
            continue
        if inputs[mask].shape != inputs[ids].shape:
            raise SurgeryError(
                f"{path}: {mask} must have the shape of {ids}, {tuple(inputs[ids].shape)} (got "
                f"{tuple(inputs[mask].shape)})"
            )
        empty = (inputs[mask] == 0).all(dim=-1)
        if empty.any():
            raise SurgeryError(
                f"{path}: {mask} leaves row {int(empty.nonzero()[0])} without a token. Leave out the row."
            )


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a checkpoint.

    trust_remote_code is always passed on, because transformers asks on the terminal if it is not given.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    config = folder / "config.json"
    known = read_json(config) if config.is_file() else {}
    check_code_trusted(folder, str(folder), known if isinstance(known, dict) else {}, trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        check_environment(error)
        raise SurgeryError(
            f"{folder} has no tokenizer that transformers can load ({' '.join(str(error).split())[:200]}); "
            "put its tokenizer files beside the weights"
        ) from None


CALIBRATION_SUFFIXES = (".txt", ".md", ".json", ".jsonl", ".parquet", ".csv", ".safetensors")


MIN_LENGTH = 8  # shortest window that is advised, tokens
HUB_DATASET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:]*){0,3}")


def detect_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32, detected by a byte order mark or the positions of zero bytes; None if it may be
    UTF-8.
    """
    for mark, name in MARKS:
        if start.startswith(mark):
            return name
    if len(start) < 8 or 0 not in start:
        return None
    even, odd = start[::2].count(0), start[1::2].count(0)
    share = max(even, odd) / max(1, len(start) // 2)
    return ("utf-16-le" if odd > even else "utf-16-be") if share > 0.2 and min(even, odd) < max(even, odd) / 4 else None


# UTF-32 before UTF-16, because its byte order mark begins with that of UTF-16.
MARKS = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16")),
    *((codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig")),
)
UNREADABLE = 0.1  # fraction of undecodable characters above which a file is refused


def unify_line_ends(text: str) -> str:
    """Return the text with CRLF and CR line ends as LF, as Python's `open` reads a text file."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def decode_text(path: Path) -> tuple[str, str | None]:
    """Return (text, note or None) of a text file in UTF-8, UTF-16 or UTF-32, with LF line ends.

    Raises SurgeryError for other encodings.
    """
    text, note = _decode(path)
    return unify_line_ends(text), note


def _decode(path: Path) -> tuple[str, str | None]:
    """Return (text, note or None) as in `decode_text`, with the line ends of the file."""
    data = path.read_bytes()
    name = detect_encoding(data[:4096])
    if name is not None:
        note = None if name == "utf-8-sig" else f"{path} is {name.upper()}, not UTF-8, and was read as that"
        return data.decode(name, errors="replace"), note
    text, bad = decode_utf8(path, data)
    return text, f"{path}: {bad:,} of {len(text):,} characters are not UTF-8 and were replaced" if bad else None


def decode_utf8(path: Path, data: bytes) -> tuple[str, int]:
    """Return (text, number of replaced characters) of bytes of the file `path`.

    Raises SurgeryError if more than UNREADABLE are not UTF-8.
    """
    text = data.decode("utf-8", errors="replace")
    bad = text.count("\ufffd") - data.count("\ufffd".encode())
    if bad > UNREADABLE * len(text):
        raise SurgeryError(
            f"{path} is not text in UTF-8: {bad:,} of {len(text):,} characters cannot be read; save it as UTF-8 "
            "(for example: iconv -f LATIN1 -t UTF-8)"
        )
    return text, bad


def document_stream(text: str, notes: list[str] | None = None, tokenizer: Any = None) -> Iterator[str]:
    """Yield the documents of a file or of a Hub data set.

    notes: list for notes about the decoding of a file; they are printed to standard error if it is None. tokenizer:
    whose chat template renders conversations, the rows of a table with a column `messages` or `conversations` and no
    `text`; None: such tables are read as texts.
    """
    path = Path(text)
    if path.is_file():
        if path.suffix in (".json", ".jsonl", ".parquet", ".csv"):
            kind = path.suffix[1:].replace("jsonl", "json")
            if kind != "parquet" and _is_utf16(path):
                return _stream_decoded(path, kind, notes, tokenizer)
            return _stream_texts(kind, None, "train", None, {"data_files": str(path)}, tokenizer)
        read, note = decode_text(path)
        _report_note(note, notes)
        return iter([read])
    _check_is_text(text)
    name, _, rest = text.partition(":")
    config, split, column = ([*rest.split(":"), "", "", ""])[:3]
    return _stream_texts(name, config or None, split or "train", column or None, {}, tokenizer)


def _check_is_text(text: str) -> None:
    """Raise SurgeryError unless this is a file or may be the name of a Hub data set."""
    path = Path(text)
    if not path.is_file() and (not HUB_DATASET.fullmatch(text) or path.suffix in CALIBRATION_SUFFIXES):
        raise SurgeryError(f"calibration text {text!r} is not a file; give a text file, or a Hub data set as org/name")


def _report_note(note: str | None, notes: list[str] | None) -> None:
    if note and notes is None:
        print(f"note: {note}", file=sys.stderr)
    elif note and notes is not None:
        notes.append(note)


def _is_utf16(path: Path) -> bool:
    with open(path, "rb") as file:
        return detect_encoding(file.read(4096)) not in (None, "utf-8-sig")


def _stream_decoded(path: Path, kind: str, notes: list[str] | None, tokenizer: Any) -> Iterator[str]:
    """Yield the texts of a table in UTF-16 or UTF-32, from a temporary copy in UTF-8."""
    text, note = _decode(path)
    _report_note(note, notes)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(text.removeprefix("\ufeff").encode())
        yield from _stream_texts(kind, None, "train", None, {"data_files": str(copy)}, tokenizer)


def _stream_texts(
    name: str, config: str | None, split: str, column: str | None, options: dict[str, Any], tokenizer: Any
) -> Iterator[str]:
    import datasets

    # `datasets` caches the columns of local files by path and mtime, and casts rows of changed files to them, so local
    # files are read with an empty cache.
    local = "data_files" in options or Path(name).is_dir()
    if Path(name).is_dir() and not options:
        check_no_outside_files(Path(name))
    try:
        with tempfile.TemporaryDirectory() if local else nullcontext() as cache:
            rows = iter(
                datasets.load_dataset(
                    name, config, split=split, streaming=True, trust_remote_code=False, cache_dir=cache, **options
                )
            )
        first = next(rows)
    except StopIteration:
        raise SurgeryError(f"calibration data {options.get('data_files', name)} has no rows") from None
    except Exception as error:  # `datasets` raises errors of many libraries
        raise _unreadable_error(options.get("data_files", name), error) from None
    where = options.get("data_files", name)
    chats = [key for key in CHAT_COLUMNS if isinstance(first.get(key), list) and column in (None, key)]
    is_chat = tokenizer is not None and bool(chats) and (column is not None or not isinstance(first.get("text"), str))
    for row in _all_rows(first, rows, where) if is_chat else ():
        if row.get(chats[0]):  # rows without messages are skipped
            messages = parse_messages(row[chats[0]], f"calibration data {where}")
            chat_template(tokenizer, f"calibration data {where}")
            yield apply_chat_template(tokenizer, messages, f"calibration data {where}", tokenize=False)
    if is_chat:
        return
    texts = [key for key, value in first.items() if isinstance(value, str)]
    fields = ", ".join(f"{key} ({type(value).__name__})" for key, value in first.items()) or "none"
    if column is None and not texts:
        raise SurgeryError(f"calibration data {where} has no field with text; its fields: {fields}")
    column = column or ("text" if "text" in texts else texts[0])
    if column not in texts:
        raise SurgeryError(f"calibration data {where} has no text field {column!r}; its fields: {fields}")
    for row in _all_rows(first, rows, where):
        if isinstance(row.get(column), str):  # rows without a text are skipped
            yield row[column]


def _all_rows(first: dict[str, Any], rows: Iterator[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Yield the first row of a table and those after it."""
    row: dict[str, Any] | None = first
    while row is not None:
        yield row
        try:
            row = next(rows, None)
        except Exception as error:  # `datasets` raises errors of many libraries
            raise _unreadable_error(where, error) from None


def _unreadable_error(where: str, error: Exception) -> SurgeryError:
    kinds = ("a local file or folder", "a Hub data set")
    reason = explain_hub_error(error, "it", "give a local text or table", kinds=kinds)
    return SurgeryError(f"cannot read calibration data {where}: {reason or ' '.join(str(error).split())[:200]}")


def text_windows(
    documents: Iterator[str], tokenizer: Any, tokens: int, length: int, where: str, *, option: str = "--set length="
) -> Tensor:
    """Return token ids (N, length): the documents as one stream, cut into windows, each with the tokenizer's special
    tokens.

    Between two documents stand the tokens that end and begin a document, see `document_tokens`. Empty documents are
    skipped. where, option: the text and the caller's option for the length, for the message of a SurgeryError about too
    short a text.
    """
    prefix, suffix = special_tokens(tokenizer)
    before, after = document_tokens(tokenizer)
    body, windows = length - len(prefix) - len(suffix), max(1, tokens // length)
    ids: list[int] = []
    for document in filter(None, documents):
        ids += [*after, *before] if ids else []
        for passage in _split_document(document):
            ids += tokenizer(passage, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= windows * body:
                break
        if len(ids) >= windows * body:
            break
    count = min(windows, len(ids) // body)
    if windows < 2:
        shorter = f", or a length of {tokens // 4} or less" if tokens >= 4 * MIN_LENGTH else ""
        raise SurgeryError(
            f"{tokens:,} tokens make {windows} window of {length}; at least two are needed. Set more tokens{shorter}"
        )
    if count < 2:
        shorter = f", or {option}{len(ids) // 4}" if len(ids) >= 4 * MIN_LENGTH else ""
        raise SurgeryError(
            f"{where} has {len(ids):,} tokens; at least two windows of {length} are needed. Give a longer text{shorter}"
        )
    rows = [prefix + ids[i * body : (i + 1) * body] + suffix for i in range(count)]
    return torch.tensor(rows, dtype=torch.int64)


def _split_document(document: str, size: int = 2**20) -> Iterator[str]:
    """Yield parts of about `size` characters, cut at line ends, so that only the needed part of a book is tokenized."""
    start = 0
    while start < len(document):
        stop = document.find("\n", start + size) + 1 or len(document)
        yield document[start:stop]
        start = stop


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text ([CLS] and [SEP], <s>)."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


def end_token(tokenizer: Any) -> int | None:
    """Return the token that ends a document: the tokenizer's end of text, or its separator ([SEP])."""
    ids = (getattr(tokenizer, name, None) for name in ("eos_token_id", "sep_token_id"))
    return next((int(token) for token in ids if token is not None), None)


def document_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids before and after each document of a stream: the special tokens, and the end of text after
    it.
    """
    before, after = special_tokens(tokenizer)
    end = end_token(tokenizer)
    return before, after if end is None or after[-1:] == [end] else [*after, end]
