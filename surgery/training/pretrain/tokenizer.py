"""Tokenizers made from the text that a model is to be trained on: its characters, or byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from surgery.calibration.data import load_tokenizer
from surgery.core.config import Count, StrictModel
from surgery.core.errors import SurgeryError
from surgery.training.data.recipe import DataConfig
from surgery.training.data.sources import open_data_source

END_TOKEN, UNKNOWN_TOKEN = "<|endoftext|>", "<|unknown|>"


class TokenizerConfig(StrictModel):
    """characters: a token each; bpe: byte-level byte-pair encoding, `vocabulary` tokens at most. sample: characters of
    the text that are looked at. path: a tokenizer that is there already, a folder or a Hub id."""

    kind: Literal["characters", "bpe"] = "bpe"
    vocabulary: Annotated[Count, Field(ge=300)] = 32768
    sample: Annotated[Count, Field(ge=1)] = 50_000_000
    path: str | None = None


def make_tokenizer(config: TokenizerConfig, data: DataConfig) -> Any:
    """The tokenizer that is named, or one made from the text to train on; the same text makes the same one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if config.path is not None:
        try:
            if Path(config.path).is_dir():
                return load_tokenizer(Path(config.path))
            return AutoTokenizer.from_pretrained(config.path, trust_remote_code=False)
        except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SurgeryError(
                f"--tokenizer {config.path} is no tokenizer that transformers can load ({reason})"
            ) from None
    text = limit_characters(iter_training_texts(data), config.sample)
    backend = (
        make_character_tokenizer(text) if config.kind == "characters" else train_bpe_tokenizer(text, config.vocabulary)
    )
    unknown = {"unk_token": UNKNOWN_TOKEN} if config.kind == "characters" else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN, **unknown)


def make_character_tokenizer(texts: Iterable[str]) -> Any:
    """BPE that never merges, which reads twice as fast as words of one character each."""
    from tokenizers import Tokenizer, decoders, models

    seen = sorted(set().union(*(set(text) for text in texts)))
    if not seen:
        raise SurgeryError("tokenizer: the text to train on has no characters")
    words = {token: i for i, token in enumerate([END_TOKEN, UNKNOWN_TOKEN, *seen])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token=UNKNOWN_TOKEN))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def train_bpe_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# -- the text --------------------------------------------------------------------------------------------
def iter_training_texts(data: DataConfig) -> Iterator[str]:
    """The documents of all sources, turn about, once; nothing of what is held out."""
    share = data.validation if isinstance(data.validation, float) else 0.0
    readers = [open_data_source(source, seed, "training", share, False) for seed, source in enumerate(data.sources)]
    while readers:
        for reader in list(readers):
            document = reader.take()
            if document is None:
                readers.remove(reader)
            else:
                yield _content_text(document.content)


def _content_text(content: Any) -> str:
    """Of a text, a list of turns, or a prompt and its completion."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("content", "")) if isinstance(part, dict) else str(part) for part in content)


def limit_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
