"""Training examples of fixed length from a recipe's data sources: deterministic for a seed, endless unless `epochs` is
set.

    data = make_data(DataConfig(sources="corpus.jsonl"), tokenizer, length=1024, seed=0)
    for example in data.examples(): ...            input_ids, labels, position_ids, valid: (T,) each
    state = data.state()                           JSON data; restore(state) continues with the next example

Documents are read in blocks, from each source in proportion to its weight (in tokens). A block is tokenized, packed and
shuffled as a whole, so a state is the start of the block and the position within it.

labels: the token itself, or -100 where it is not a training target: the first token of a document, padding, a user's
turn. As in transformers, the prediction of labels[t] is read at t - 1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from surgery.core.errors import SurgeryError
from surgery.training.data.chat import encode_chats
from surgery.training.data.documents import Document, Side
from surgery.training.data.generated import GeneratedData
from surgery.training.data.packing import (
    IGNORE_INDEX,
    Example,
    make_row,
    pack_best_fit,
    pack_in_order,
    pack_stream,
    split_windows,
)
from surgery.training.data.readers import derive_seed
from surgery.training.data.recipe import DataConfig, SourceConfig
from surgery.training.data.shared_tokens import SharedTokens
from surgery.training.data.sources import open_data_source
from surgery.training.data.teacher_text import TokenTable, token_sequences
from surgery.training.data.tokenize import TextEncoder, TokenSequence, tokenizer_fingerprint

__all__ = ["DataConfig", "Example", "SourceConfig", "TrainingData", "make_data"]

FIRST_BLOCK, MAX_BLOCK = (
    2**17,
    2**23,
)  # characters of the first block, so that training begins soon, and of the largest, about
BLOCK_DOCUMENTS = 1024  # of a block where they are not shuffled


def make_data(config: DataConfig, tokenizer: Any, length: int, seed: int) -> Any:
    """Open the training data of a recipe, a TrainingData or GeneratedData.

    Raises SurgeryError if a source cannot be read.
    """
    if config.generated is not None:
        return GeneratedData(config, length, seed)
    return TrainingData(config, tokenizer, length, seed, "training")


class TrainingData:
    """Examples of `length` tokens. side: which documents to read, those for training or those held out for validation.

    tokens: a SharedTokens, where several processes on one machine share tokenized blocks.
    """

    def __init__(self, config: DataConfig, tokenizer: Any, length: int, seed: int, side: Side):
        if length < 2:
            raise SurgeryError(f"data: length must be at least 2 tokens (got {length}).")
        self.config, self.tokenizer, self.length, self.seed, self.side = config, tokenizer, length, seed, side
        self.encoder = TextEncoder(tokenizer)
        share = config.validation if isinstance(config.validation, float) else 0.0
        shuffled = config.shuffle > 0
        self.readers = [
            open_data_source(source, derive_seed(seed, number), side, share, shuffled)
            for number, source in enumerate(config.sources)
        ]
        for reader in self.readers:
            if isinstance(table := getattr(reader, "table", None), TokenTable):
                table.check_tokenizer(tokenizer)
        self.tokens: SharedTokens | None = None
        self._state = self._initial_state()

    # -- examples ------------------------------------------------------------------------------------
    def examples(self, start: int | None = None) -> Iterator[Example]:
        """Iterate over examples from number `start` on; None: from the current state. Use one iterator at a time."""
        if start is not None and start != self._state["taken"]:
            round_ = start - start % (self.config.rows or start + 1)
            if round_ != self._state["round"] or start < round_ + self._state["first"]:
                self._state = {**self._initial_state(), "round": round_}
            self._state = {**self._state, "taken": start}
        return self._examples()

    def _examples(self) -> Iterator[Example]:
        """Yield examples from the current state on.

        State keys: round: number of the example at which the current pass over `rows` began; first: that of the block's
        first example, relative to round.
        """
        state, limit = self._state, self.config.rows
        self._seek(state)
        while True:
            if limit is not None and state["taken"] == state["round"] + limit:
                state = {**self._initial_state(), "round": state["taken"], "taken": state["taken"]}
                self._seek(state)
            began = {**self._cursors(), **{name: state[name] for name in ("round", "first", "number")}}
            rows = self._next_block(state["number"])
            if rows is None:
                return
            at, last = state["taken"] - state["round"] - state["first"], len(rows)
            if limit is not None:
                last = min(last, limit - state["first"])
            for i in range(at, last):
                self._state = {**began, "taken": state["round"] + state["first"] + i + 1}
                yield make_row(rows[i], self.length, self.encoder.pad)
            first = state["first"] + last
            taken = max(state["round"] + first, state["taken"])
            state = {"round": state["round"], "first": first, "taken": taken, "number": state["number"] + 1}

    def state(self) -> dict[str, Any]:
        """Return the position of the next example as JSON data; do not modify it."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        if len(state.get("readers", ())) != len(self.readers):
            raise SurgeryError(
                f"data: the saved state has {len(state.get('readers', ()))} sources, the recipe has "
                f"{len(self.readers)}. Resume with the original recipe."
            )
        self._state = state

    def count_tokens(self, examples: Example) -> int:
        """Return the number of training targets of an example, or of stacked examples."""
        return int((examples["labels"] != IGNORE_INDEX).sum())

    def source_counts(self) -> list[dict[str, int]]:
        """Return for each source the documents, characters and tokens read so far."""
        return [dict(d) for d in self._source_counts]

    # -- blocks --------------------------------------------------------------------------------------
    def _initial_state(self) -> dict[str, Any]:
        readers = [reader.initial_cursor for reader in self.readers]
        drawn = [{"documents": 0, "characters": 0, "tokens": 0} for _ in readers]
        return {"readers": readers, "drawn": drawn, "tail": None, "round": 0, "first": 0, "taken": 0, "number": 0}

    def _cursors(self) -> dict[str, Any]:
        tail = self._tail
        tail_state = (
            None if tail is None or tail.trained_T is None else [tail.ids_T.tolist(), tail.trained_T.int().tolist()]
        )
        return {"readers": [r.cursor() for r in self.readers], "drawn": self.source_counts(), "tail": tail_state}

    def _seek(self, state: dict[str, Any]) -> None:
        for reader, cursor in zip(self.readers, state["readers"]):
            reader.restore(cursor)
        self._source_counts = [dict(d) for d in state["drawn"]]
        tail_state = state["tail"]
        self._tail = (
            None
            if tail_state is None
            else TokenSequence(torch.tensor(tail_state[0]).long(), torch.tensor(tail_state[1]).bool())
        )

    def _next_block(self, number: int) -> list[list[TokenSequence]] | None:
        """Return the rows of the next non-empty block, or None at the end of the data."""
        before, had = [reader.epoch for reader in self.readers], self._pending_tokens()
        while (read := self._read_documents(min(MAX_BLOCK, FIRST_BLOCK << min(number, 20)))) is not None:
            rows = self._pack(self._encode(read), derive_seed(self.seed, "block", number))
            if rows:
                return rows
            if self._pending_tokens() > had:  # a stream of little text, which is read again until it makes a row
                before, had = [reader.epoch for reader in self.readers], self._pending_tokens()
            elif all(reader.epoch >= epoch + 2 for reader, epoch in zip(self.readers, before)):
                break
        else:
            if number > 0 or self.side == "validation":
                return None
        names = ", ".join(source.path for source in self.config.sources)
        raise SurgeryError(f"data: {names}: no {self.side} document with a token to train on")

    def _pending_tokens(self) -> int:
        return 0 if self._tail is None else len(self._tail)

    def _read_documents(self, target_characters: int) -> list[list[Document]] | None:
        """Return documents of each source, about `target_characters` characters, always taking from the source farthest
        below its share.
        """
        read: list[list[Document]] = [[] for _ in self.readers]
        ahead = [float(drawn["tokens"]) for drawn in self._source_counts]
        rates = [(d["tokens"] + 1) / (d["characters"] + 4) for d in self._source_counts]
        limit, characters = self.config.shuffle or BLOCK_DOCUMENTS, 0
        finished_readers: set[int] = set()
        while (
            sum(map(len, read)) < limit and characters < target_characters and len(finished_readers) < len(self.readers)
        ):
            index = min(range(len(read)), key=lambda i: ahead[i] / self.config.sources[i].weight)
            if self.config.epochs is not None and self.readers[index].epoch >= self.config.epochs:
                return read if any(read) else None
            document = self.readers[index].take()
            if document is None:
                finished_readers.add(index)
                continue
            read[index].append(document)
            size = document.size + 1
            self._source_counts[index]["documents"] += document.begins
            self._source_counts[index]["characters"] += size
            ahead[index], characters = ahead[index] + size * rates[index], characters + size
        return read

    def _encode(self, read: list[list[Document]]) -> list[TokenSequence]:
        pieces = self._tokenize(read) if self.tokens is None else self.tokens.get_or_tokenize(read, self._tokenize)
        for some, drawn in zip(pieces, self._source_counts):
            drawn["tokens"] += sum(map(len, some))
        return [piece for some in pieces for piece in some]

    def _tokenize(self, read: list[list[Document]]) -> list[list[TokenSequence]]:
        """Return the token sequences of each source."""
        sequences = []
        for documents, source, reader in zip(read, self.config.sources, self.readers):
            if isinstance(getattr(reader, "table", None), TokenTable):
                sequences.append(token_sequences(documents))
                continue
            text = not source.chat and all(isinstance(document.content, str) for document in documents)
            sequences.append(
                self.encoder.encode_texts(documents) if text else encode_chats(documents, source, self.encoder)
            )
        return sequences

    def _pack(self, pieces: list[TokenSequence], seed: int) -> list[list[TokenSequence]]:
        generator, shuffled = torch.Generator().manual_seed(seed), self.config.shuffle > 0
        if self.config.packing == "stream":
            rows, self._tail = pack_stream(self._tail, _shuffle(pieces, generator) if shuffled else pieces, self.length)
        else:
            sequences = list(split_windows(pieces, self.length))
            sequences = _shuffle(sequences, generator) if shuffled else sequences
            pack = {"none": lambda c, _: [[p] for p in c], "documents": pack_best_fit if shuffled else pack_in_order}
            rows = pack[self.config.packing](sequences, self.length)
        return _shuffle(rows, generator) if shuffled else rows

    # -- validation, identity ------------------------------------------------------------------------
    def validation(self) -> list[Example]:
        """Return the fixed validation examples: the first of the held-out documents or of the validation sources."""
        if not self.config.validation:
            return []
        sources = self.config.sources if isinstance(self.config.validation, float) else self.config.validation
        changed: dict[str, Any] = {"sources": sources, "shuffle": 0, "epochs": 1, "rows": None}
        if not isinstance(self.config.validation, float):
            changed["validation"] = 0.0
        side: Side = "validation" if isinstance(self.config.validation, float) else "training"
        validation_data = TrainingData(
            self.config.model_copy(update=changed), self.tokenizer, self.length, self.seed, side
        )
        held_out = [example for example, _ in zip(validation_data.examples(), range(self.config.validation_examples))]
        if not held_out and self.config.packing == "stream":  # the share of a short text is shorter than a row: padded
            padded = self.config.model_copy(update={"packing": "documents"})
            return TrainingData(padded, self.tokenizer, self.length, self.seed, self.side).validation()
        if not held_out:
            raise SurgeryError(
                f"data: a share of {self.config.validation} for validation holds no document. Give a larger share, or "
                "separate sources (validation: [{path: heldout.jsonl}])."
            )
        return held_out

    def fingerprint(self) -> str:
        """Return a SHA-256 of settings, file names and contents, tokenizer, length and seed."""
        config = self.config.model_dump(mode="json", exclude={"epochs", "rows", "validation_examples"})
        for source in (*config["sources"], *(config["validation"] if isinstance(config["validation"], list) else ())):
            source["path"] = source["path"].rstrip("/").rpartition("/")[2]  # wherever it lies
        identity = [config, [r.identity() for r in self.readers], self.length, self.seed, self.side]
        text = json.dumps([*identity, tokenizer_fingerprint(self.tokenizer)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _shuffle(items: list[Any], generator: torch.Generator) -> list[Any]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]
