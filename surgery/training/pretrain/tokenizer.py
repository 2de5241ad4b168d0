"""Tokenizers trained on the training text: one token per character, or byte-level BPE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from surgery.calibration.data import load_tokenizer
from surgery.core.config import Count, StrictModel
from surgery.core.environment import check_environment
from surgery.core.errors import SurgeryError
from surgery.core.hub_errors import explain_hub_error
from surgery.training.data.recipe import DataConfig
from surgery.training.data.sources import open_data_source

END_TOKEN, UNKNOWN_TOKEN = "<|endoftext|>", "<|unknown|>"


class TokenizerConfig(StrictModel):
    """The tokenizer of a new model.

    kind: "characters" has one token per character, "bpe" is byte-level byte-pair encoding. vocab_size: maximum number
    of BPE tokens; its former name `vocabulary` is accepted. sample: number of characters of the training text to train
    it on. path: an existing tokenizer, a folder or Hub id, used instead of training one.
    """

    kind: Literal["characters", "bpe"] = "bpe"
    vocab_size: Annotated[Count, Field(ge=300)] = 32768
    sample: Annotated[Count, Field(ge=1)] = 50_000_000
    path: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_vocabulary(cls, data: Any) -> Any:
        """Rename `vocabulary` to `vocab_size`.

        The later one of both counts: `--set` appends a key that a recipe lacks.
        """
        if not isinstance(data, dict):
            return data
        return {"vocab_size" if key == "vocabulary" else key: value for key, value in data.items()}


def make_tokenizer(config: TokenizerConfig, data: DataConfig) -> Any:
    """Load the tokenizer at `config.path`, or train one on the training text; the same text gives the same tokenizer.

    Generated rows have a tokenizer of numbers, for any `kind`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if config.path is not None:
        try:
            if Path(config.path).is_dir():
                return load_tokenizer(Path(config.path))
            return AutoTokenizer.from_pretrained(config.path, trust_remote_code=False)
        except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
            check_environment(error)
            reason = explain_hub_error(error, config.path, "give a folder") or " ".join(str(error).split())[:200]
            raise SurgeryError(
                f"--tokenizer {config.path} cannot be loaded by transformers ({reason}). Give a folder or Hub id with "
                "a tokenizer."
            ) from None
    if data.generated is not None:
        backend = make_number_tokenizer(getattr(data.generated, "vocabulary", 1))
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN)
    text = limit_characters(iter_training_texts(data), config.sample)
    backend = (
        make_character_tokenizer(text) if config.kind == "characters" else train_bpe_tokenizer(text, config.vocab_size)
    )
    unknown = {"unk_token": UNKNOWN_TOKEN} if config.kind == "characters" else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_TOKEN, **unknown)


def make_character_tokenizer(texts: Iterable[str]) -> Any:
    """Return a tokenizer with one token for each character of the texts.

    It is a BPE model without merges, which encodes twice as fast as a WordLevel model of single characters.
    """
    from tokenizers import Tokenizer, decoders, models

    characters = sorted(set().union(*(set(text) for text in texts)))
    if not characters:
        raise SurgeryError("tokenizer: the training text is empty. Give text to train on with --data.")
    vocab = {token: i for i, token in enumerate([END_TOKEN, UNKNOWN_TOKEN, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN_TOKEN))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def make_number_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer of generated rows: token i is the number i, separated by spaces; the last token ends a
    text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {**{str(i): i for i in range(vocabulary)}, END_TOKEN: vocabulary}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=END_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train byte-level BPE on the texts, with at most `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# -- the training text -------------------------------------------------------------------------------------
def iter_training_texts(data: DataConfig) -> Iterator[str]:
    """Yield each document of all sources once, one from each source in turn, without the held-out documents."""
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
    """Return the text of a document: a string, a list of messages, or a prompt with its completion."""
    if isinstance(content, str):
        return content
    return "\n".join(str(item.get("content", "")) if isinstance(item, dict) else str(item) for item in content)


def limit_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield the texts up to `limit` characters in total; the last one is cut there."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
