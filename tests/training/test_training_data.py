"""Training data: sources, order, packing, and resuming at the same position."""

from __future__ import annotations

import codecs
import gzip
import importlib.resources
import itertools
import json
import random
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from conversion.test_calibrate import words_tokenizer
from helpers.hub_standin import FakeHub
from helpers.small import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from surgery.calibration.data import document_stream, special_tokens, text_windows
from surgery.core.errors import SurgeryError
from surgery.training.data import documents
from surgery.training.data.dataset import DataConfig, SourceConfig, make_data
from surgery.training.data.packing import IGNORE_INDEX, pack_best_fit, pack_in_order, pack_stream, split_windows
from surgery.training.data.tokenize import TokenSequence
from surgery.training.validation import Validation

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def texts():
    """Two hundred documents of very different lengths."""
    whole, chance = (EMBEDDED / "calibration.txt").read_text(encoding="utf-8"), random.Random(0)
    lengths = [chance.choice((5, 40, 200, 900)) for _ in range(200)]
    starts = [chance.randrange(len(whole) - n) for n in lengths]
    return [f"{i} " + whole[start : start + n] for i, (start, n) in enumerate(zip(starts, lengths))]


@pytest.fixture(scope="module")
def files(texts, tmp_path_factory):
    """The same documents in every kind of file."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"id": i, "body": text} for i, text in enumerate(texts)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress((folder / "lines.jsonl").read_bytes()))
    (folder / "array.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "columns.parquet")
    (folder / "plain.txt").write_text("<END>".join(texts))
    (folder / "many").mkdir()
    for part in range(4):
        lines = [json.dumps(row) + "\n" for row in rows[50 * part : 50 * part + 50]]
        (folder / "many" / f"{part}.jsonl").write_text("".join(lines))
    return folder


def source(files, name="lines.jsonl", **options):
    if name.endswith(".txt"):
        return {"path": str(files / name), "separator": "<END>", **options}
    return {"path": str(files / name), "text": "body", **options}


def data_of(tokenizer, sources, length=LENGTH, seed=0, **options):
    return make_data(DataConfig(sources=sources, **options), tokenizer, length, seed)


def first(data, count, start=None):
    return list(itertools.islice(data.examples(start), count))


def same(some, others):
    assert len(some) == len(others)
    return all(torch.equal(a[name], b[name]) for a, b in zip(some, others) for name in a)


def documents_in(example):
    """The ids of each packed document, by its positions; padding is none."""
    ids, starts = example["input_ids"], (example["position_ids"] == 0).nonzero().flatten().tolist()
    spans = zip(starts, [*starts[1:], len(ids)])
    return [ids[a:b].tolist() for a, b in spans if example["valid"][a]]


def windows_of(tokenizer, text):
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    return [ids[i : i + LENGTH] for i in range(0, len(ids), LENGTH) if len(ids) - i > 1]


KINDS = ["lines.jsonl", "lines.jsonl.gz", "array.json", "columns.parquet", "plain.txt", "many"]


# -- what is read ----------------------------------------------------------------------------------
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_read_once(kind, streaming, files, texts, tokenizer):
    data = data_of(tokenizer, source(files, kind, streaming=streaming), packing="documents", epochs=1)
    read = sorted(tuple(d) for e in data.examples() for d in documents_in(e))
    assert read == sorted(tuple(w) for text in texts for w in windows_of(tokenizer, text))


@pytest.mark.parametrize("packing", ["documents", "stream", "none"])
def test_labels_are_what_follows_inside_a_document(packing, files, tokenizer):
    data = data_of(tokenizer, source(files), packing=packing, epochs=1)
    examples = list(data.examples())
    for example in examples:
        ids, labels, position = (example[name] for name in ("input_ids", "labels", "position_ids"))
        learnt = example["valid"] & (position > 0)
        assert torch.equal(labels, ids.where(learnt, IGNORE_INDEX))
        assert torch.equal(example["valid"], torch.arange(LENGTH) < int(example["valid"].sum()))
        assert data.count_tokens(example) == int(learnt.sum())
        assert all(example[name].shape == (LENGTH,) for name in example)
    if packing != "stream":
        read = sum(int(e["valid"].sum()) for e in examples)
        (drawn,) = data.source_counts()
        assert drawn["documents"] == 200 and read <= drawn["tokens"] <= read + 200  # a window's lone last token


def test_a_stream_loses_nothing(files, texts, tokenizer):
    data = data_of(tokenizer, source(files), packing="stream", shuffle=0, epochs=1)
    joined = torch.cat([e["input_ids"] for e in data.examples()]).tolist()
    wanted = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert joined == wanted[: len(wanted) - len(wanted) % LENGTH]


def test_packing_fills_the_rows(files, tokenizer):
    packed = list(data_of(tokenizer, source(files), packing="documents", epochs=1).examples())
    alone = list(data_of(tokenizer, source(files), packing="none", epochs=1).examples())
    assert sum(int(e["valid"].sum()) for e in packed) == sum(int(e["valid"].sum()) for e in alone)
    assert sum(float(e["valid"].float().mean()) for e in packed) / len(packed) > 0.97
    assert len(packed) < 0.75 * len(alone)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=60), length=st.integers(2, 24))
def test_packing_by_any_lengths(lengths, length):
    """Every window is in one row, none is cut again, and rows of best fit are few."""
    pieces, at = [], 0
    for n in lengths:
        pieces.append(TokenSequence(torch.arange(at, at + n)))
        at += n
    cut = list(split_windows(pieces, length))
    kept = sorted(i for piece in cut for i in piece.ids_T.tolist())
    lone = sum(1 for n in lengths if n % length == 1)
    assert all(2 <= len(piece) <= length for piece in cut) and len(kept) == sum(lengths) - lone
    for rows in (pack_best_fit(cut, length), pack_in_order(cut, length)):
        assert sorted(i for row in rows for piece in row for i in piece.ids_T.tolist()) == kept
        assert all(0 < sum(map(len, row)) <= length for row in rows)
    assert len(pack_best_fit(cut, length)) <= 11 / 9 * -(-len(kept) // length) + len(cut) * 0.5 + 1
    rows, tail = pack_stream(None, pieces, length)
    whole = [i for row in rows for i in row[0].ids_T.tolist()]
    assert [*whole, *(tail.ids_T.tolist() if tail else [])] == list(range(sum(lengths)))


def test_a_long_text_is_read_in_parts(tmp_path, tokenizer, monkeypatch):
    """The parts are one document again; characters of several bytes are not cut."""
    text = "straße naïve 東京 \U0001f600 " * 400
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(documents, "CHUNK_BYTES", 1001)
    data = data_of(tokenizer, str(tmp_path / "long.txt"), packing="stream", epochs=1)
    ids = sorted(tuple(e["input_ids"].tolist()) for e in data.examples())
    assert all("�" not in tokenizer.decode(row[3:-3]).strip("�") for row in ids)
    table = documents.TextFiles([tmp_path / "long.txt"], None, "training", 0.0)
    parts = list(table.document_parts(0))
    assert len(parts) > 5 and "".join(part.content for part in parts) == text
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]


LINE_ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}


@pytest.mark.parametrize("end", LINE_ENDS)
def test_line_ends_and_separators_are_those_of_python_s_open(tmp_path, monkeypatch, end):
    """Calibration, evaluation and healing read one text.

    A chunk ends inside no CRLF, and a separator inside none begins.
    """
    monkeypatch.setattr(documents, "CHUNK_BYTES", 16)
    lines = "".join(
        random.Random(0).choices(["words of a line", "x" * 40, "", "ß", "---"], k=300)[i] + "\n" for i in range(300)
    )
    path = tmp_path / "text.txt"
    path.write_bytes(codecs.BOM_UTF8 + lines.replace("\n", LINE_ENDS[end]).encode())
    with open(path, encoding="utf-8-sig") as file:
        assert file.read() == lines
    assert next(document_stream(str(path), [])) == lines

    def read(separator, share=0.0, side="training"):
        table = documents.TextFiles([path], separator, side, share)
        parts = [list(table.document_parts(i)) for i in range(len(table))]
        return ["".join(part.content for part in each) for each in parts]

    assert read(None) == [lines]
    assert "".join(read(None, 0.25) + read(None, 0.25, "validation")) == lines
    for separator in ("\n\n", "\r\n\r\n", "\n---\n", "---"):
        wanted = [part for part in lines.split(separator.replace("\r\n", "\n")) if part.strip()]
        assert read(separator) == wanted


def test_a_mix_of_line_ends_is_read_as_by_python_s_open(tmp_path, monkeypatch):
    choose = random.Random(0).choices
    for size in (7, 16, 2**20):
        monkeypatch.setattr(documents, "CHUNK_BYTES", size)
        path = tmp_path / "mixed.txt"
        path.write_bytes("".join(choose(["\r", "\n", "\r\n", "a", "é"], k=2000)).encode())
        text = path.read_text(encoding="utf-8")
        table = documents.TextFiles([path], "\n\n", "training", 0.0)
        found = ["".join(p.content for p in table.document_parts(i)) for i in range(len(table))]
        assert found == [part for part in text.split("\n\n") if part.strip()]


@pytest.mark.parametrize("specials", ["none", "end", "around"])
def test_a_table_is_one_stream_of_documents_for_calibration_and_healing(tmp_path, specials):
    """Both put the same tokens between two documents, and skip empty ones."""
    words, path = words_tokenizer(specials == "around"), tmp_path / "some.jsonl"
    if specials == "end":
        words = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, eos_token="w9", bos_token="w8")
    texts = ["w1 w2 w3", "", "w4 w5", "w1", "w2 w2 w2 w2", "w3 w5"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = text_windows(document_stream(str(path)), words, 1000, 5, "a table").tolist()
    before, after = special_tokens(words)
    body = [i for row in rows for i in row[len(before) : len(row) - len(after)]]
    healed = data_of(words, str(path), 200, packing="stream", shuffle=0).examples()
    stream = next(healed)["input_ids"].tolist()
    assert len(body) >= 9 and stream[len(before) :][: len(body)] == body
    assert words("w1 w2 w3", add_special_tokens=False)["input_ids"] == body[:3]


FROM_THE_HUB = """
import itertools, json, sys
from transformers import AutoTokenizer
from surgery.core.errors import SurgeryError
from surgery.training.data.dataset import DataConfig, SourceConfig, make_data

folder, *cases = json.loads(sys.stdin.read())
tokenizer, told = AutoTokenizer.from_pretrained(folder), []
for case in cases:
    try:
        data = make_data(DataConfig(sources=case, epochs=1, packing="none", shuffle=0), tokenizer, 64, 0)
        examples = data.examples()
        rows = [e["input_ids"].tolist() for e, _ in zip(examples, range(40))]
        later = make_data(DataConfig(sources=case, epochs=1, packing="none", shuffle=0), tokenizer, 64, 0)
        later.restore(json.loads(json.dumps(data.state())))
        told.append([rows, [e["input_ids"].tolist() for e in examples] == [e["input_ids"].tolist() for e in later.examples()]])
    except SurgeryError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_hub_ids(files, texts, tokenizer, tmp_path):
    """Whole and as streams, by revision; from endpoints that stand on this machine."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "train.parquet").write_bytes((files / "columns.parquet").read_bytes())
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "train.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in texts[::-1]))
    both = [{"path": "org/texts", "text": "body", "streaming": streaming} for streaming in (False, True)]
    cases = [*both, *({**case, "revision": "v2"} for case in both)]
    wrong = [{"path": "org/nothing"}, {"path": "org/texts", "text": "boy"}, {"path": "org/texts", "split": "dev"}]
    with FakeHub() as hub:
        hub.add("datasets", "org/texts", tmp_path / "first")
        hub.add("datasets", "org/texts", tmp_path / "second", branch="v2")
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        done = run_python(FROM_THE_HUB, stdin=json.dumps([str(EMBEDDED), *cases, *wrong]), **environment)
    assert done.returncode == 0, done.stderr
    *found, nothing, column, split = json.loads(done.stdout)
    local = [e["input_ids"].tolist() for e in first(data_of(tokenizer, source(files), packing="none", shuffle=0), 40)]
    assert found[0] == found[1] == [local, True]
    assert found[2] == found[3] and found[2][1] and found[2][0] != local
    assert "data source org/nothing cannot be read" in nothing and "did you mean 'body'" in column
    assert "data source org/texts cannot be read" in split and "dev" in split


@pytest.mark.parametrize("specials", [False, True])
def test_tokenizers_of_every_kind(specials, tmp_path):
    """Without a beginning, an end and padding; and with what one puts around every text."""
    (tmp_path / "some.jsonl").write_text('{"text": "w1 w2 w3"}\n{"text": "w4 w5"}\n')
    tokenizer = words_tokenizer(specials)
    one, two = ([*tokenizer("w1 w2 w3")["input_ids"]], [*tokenizer("w4 w5")["input_ids"]])
    assert (one[0] == 1) == specials
    for packing, wanted in {"documents": [one, two], "stream": [(one + two)[:5]]}.items():
        length = 5 if packing == "stream" else 9
        data = data_of(tokenizer, str(tmp_path / "some.jsonl"), length, packing=packing, shuffle=0, epochs=1)
        assert documents_in(next(data.examples())) == wanted
    end = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="w9", bos_token="w8")
    data = data_of(end, str(tmp_path / "some.jsonl"), 11, shuffle=0, epochs=1)
    (example,) = data.examples()
    assert documents_in(example) == [[*one, 13], [*two, 13]] and set(
        example["input_ids"][~example["valid"]].tolist()
    ) <= {13}


# -- order -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("packing", ["documents", "stream", "none"])
def test_a_seed_is_an_order_and_a_state_a_place_in_it(packing, streaming, files, tokenizer):
    """Over the ends of blocks and epochs; a state is JSON and small."""
    make = lambda seed=0: data_of(  # noqa: E731
        tokenizer, source(files, "many", streaming=streaming), packing=packing, shuffle=60, seed=seed
    )
    wanted = first(make(), 400)
    assert same(first(make(), 400), wanted)
    assert not same(first(make(1), 20), wanted[:20])
    for taken in (0, 1, 37, 150, 333):
        data = make()
        assert len(first(data, taken)) == taken
        state = json.dumps(data.state())
        assert json.loads(state)["taken"] == taken and len(state) < 4000
        other = make()
        other.restore(json.loads(state))
        assert same(first(other, 40), wanted[taken : taken + 40])
        assert same(first(make(), 40, start=taken), wanted[taken : taken + 40])
    data = make()
    first(data, 90)
    assert same(first(data, 20, start=5), wanted[5:25])  # back again
    assert same(first(data, 20), wanted[25:45])  # and on


def test_epochs_differ_in_order_alone(files, tokenizer):
    data = data_of(tokenizer, source(files), packing="none", shuffle=500)
    count = len(list(data_of(tokenizer, source(files), packing="none", epochs=1).examples()))
    both = [tuple(e["input_ids"].tolist()) for e in first(data, 2 * count)]
    assert sorted(both[:count]) == sorted(both[count:]) and both[:count] != both[count:]


def test_without_shuffling_the_order_is_the_files(files, texts, tokenizer):
    data = data_of(tokenizer, source(files, "many"), packing="documents", shuffle=0, epochs=1)
    read = [i for e in data.examples() for d in documents_in(e) for i in d]
    cut = [w for text in texts for w in windows_of(tokenizer, text)]
    assert read == [i for w in cut for i in w]


def test_weights_are_shares_of_the_tokens(files, tokenizer):
    """Though one source has long documents and the other short ones, and is read more often."""
    few = files / "few.txt"
    few.write_text((EMBEDDED / "heldout.txt").read_text(encoding="utf-8")[:20000])
    sources = [source(files, weight=3), {"path": str(few), "weight": 1}]
    data = data_of(tokenizer, sources, packing="stream", shuffle=32)
    first(data, 3000)
    drawn = data.source_counts()
    assert 2.7 < drawn[0]["tokens"] / drawn[1]["tokens"] < 3.3


# -- validation ------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["lines.jsonl", "plain.txt"])
def test_what_is_held_out_is_not_trained_on(kind, files, tokenizer):
    data = data_of(tokenizer, source(files, kind), packing="none", validation=0.2, epochs=1)
    held = {tuple(d) for e in data.validation() for d in documents_in(e)}
    seen = {tuple(d) for e in data.examples() for d in documents_in(e)}
    beginnings = lambda some: {d[:4] for d in some if len(d) > 4}  # noqa: E731
    assert held and seen and not beginnings(held) & beginnings(seen)
    other = data_of(tokenizer, source(files, kind), packing="none", validation=0.2, seed=7)
    assert same(data.validation(), other.validation())  # whatever the seed


def test_a_text_file_holds_out_its_last_lines(tmp_path, tokenizer):
    lines = [f"line {i} of a text\n" for i in range(1000)]
    (tmp_path / "text.txt").write_text("".join(lines))
    data = data_of(tokenizer, str(tmp_path / "text.txt"), packing="stream", shuffle=0, validation=0.1, epochs=1)
    trained = tokenizer.decode(torch.cat([e["input_ids"] for e in data.examples()]))
    held = tokenizer.decode(torch.cat([e["input_ids"] for e in data.validation()]))
    assert "line 0 of" in trained and "line 899 of" not in held and "line 950 of" in held and "line 950" not in trained


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("a word or two\n" * 100, 140),  # lines: from the start of one
        ("a word or two " * 100 + "\n<end>\n", 147),  # a long line and a short one: between two words of the long line
        ("short\n" + "a word or two " * 100, 140),
        ("a word or two " * 100, 140),
        ("a word or two\n" * 90 + "a line of its own " * 8 + "\n<end>\n", 141),  # a long line at the end
    ],
)
def test_a_share_of_a_text_holds_about_that_share(text, held, tmp_path):
    """Between half and twice the share, and never a last short line alone."""
    path = tmp_path / "text.txt"
    path.write_text(text)
    tables = [documents.TextFiles([path], None, side, 0.1) for side in ("training", "validation")]
    (kept,), (out,) = (list(table.document_parts(0)) for table in tables)
    assert kept.content + out.content == text and abs(len(out.content) - held) <= 14


def test_a_validation_text_of_few_tokens_is_warned_of():
    def warning(rows, counted):
        labels = torch.full((64,), IGNORE_INDEX)
        labels[1 : counted + 1] = 7
        return Validation(rows * [{"labels": labels}], 4, None).warning()

    assert warning(0, 1) is None and warning(20, 50) is None
    assert "has 950 tokens" in warning(19, 50) and "--set data.validation=FILE" in warning(1, 2)


def test_validation_holds_no_more_tokens_than_a_step():
    validation = Validation(4 * [{"input_ids": torch.zeros(64), "labels": torch.zeros(64)}], 4, None)
    for tokens, rows in ((1024, 4), (128, 2), (63, 1), (200, 3)):
        validation.limit_tokens(tokens)
        assert validation.rows == rows


def test_validation_sources_of_their_own(files, tokenizer):
    data = data_of(tokenizer, source(files), validation=source(files, "plain.txt"), validation_examples=7)
    assert len(data.validation()) == 7


# -- people's mistakes -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"path": "nowhere.jsonl"}, "must be a local file or folder"),
        ({"path": "{files}/lines.jsonl", "text": "bdy"}, "no column 'bdy'; did you mean 'body'"),
        ({"path": "{files}/plain.txt", "text": "body"}, "is plain text and has no columns"),
        ({"path": "{files}"}, "several kinds"),
        (
            {"path": "{files}/lines.jsonl", "text": "body", "split": "dev"},
            "is a local file; split applies to Hub data sets only",
        ),
        ({"path": "{files}/many", "text": "body", "revision": "v2"}, "is a local folder; revision applies to Hub"),
        ({"path": "{files}/lines.jsonl", "text": "body", "separator": "x"}, "separator applies to text files only"),
        ({"path": "{files}/lines.jsonl", "tex": "body"}, "tex"),
        ({"path": "{files}/lines.jsonl", "prompt": "body"}, "prompt and completion"),
        ({"path": "{files}/lines.jsonl", "text": "body", "messages": "body"}, "a row is one thing"),
        ({"path": "{files}/broken.jsonl"}, r"cannot be read: .*JSON parse error: .* in row 1"),
        ({"path": "{files}/empty.jsonl"}, "cannot be read: it has no rows"),
        ({"path": "{files}/empty.txt"}, "no training document"),
        (
            {"path": "{files}/broken-type.parquet", "text": "count"},
            "column 'count' must hold texts .a row has '7', int",
        ),
        (
            {"path": "{files}/broken.txt"},
            r"broken.txt is not text in UTF-8: 1,200 of 5,400 characters .*iconv -f LATIN1",
        ),
    ],
)
def test_people_s_mistakes(wrong, said, files, tokenizer, tmp_path):
    place = tmp_path if "broken" in wrong["path"] or "empty" in wrong["path"] else files
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"count": 7}] * 2), tmp_path / "broken-type.parquet")
    (tmp_path / "broken.txt").write_bytes("café naïve résumé ".encode("latin-1") * 300)
    wrong = {**wrong, "path": wrong["path"].format(files=place)}
    with pytest.raises((SurgeryError, ValidationError), match=said):  # the recipe explains what pydantic says
        first(data_of(tokenizer, wrong), 1)


def test_a_share_that_holds_nothing(tmp_path, tokenizer):
    (tmp_path / "two.jsonl").write_text('{"text": "one two three"}\n{"text": "four five six"}\n')
    with pytest.raises(SurgeryError, match="holds no document"):
        data_of(tokenizer, str(tmp_path / "two.jsonl"), validation=1e-9).validation()


def test_a_state_of_other_sources(files, tokenizer):
    state = data_of(tokenizer, source(files)).state()
    with pytest.raises(SurgeryError, match="1 sources, the recipe has 2"):
        data_of(tokenizer, [source(files), source(files)]).restore(state)


# -- identity --------------------------------------------------------------------------------------
def test_fingerprints(files, tokenizer, tmp_path):
    """Of contents, wherever they lie; another length, seed, packing or text is another."""
    (tmp_path / "lines.jsonl").write_bytes((files / "lines.jsonl").read_bytes())
    one = data_of(tokenizer, source(files)).fingerprint()
    assert data_of(tokenizer, source(tmp_path)).fingerprint() == one
    others = [
        data_of(tokenizer, source(files), length=32),
        data_of(tokenizer, source(files), seed=1),
        data_of(tokenizer, source(files), packing="stream"),
        data_of(tokenizer, source(files, "plain.txt")),
    ]
    (tmp_path / "lines.jsonl").write_text((files / "lines.jsonl").read_text() + '{"body": "x y z"}\n')
    others.append(data_of(tokenizer, source(tmp_path)))
    assert len({one, *(other.fingerprint() for other in others)}) == 6


def test_every_key_is_documented():
    """With its default."""
    page = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)`(?:, `\w+`)* \| (.*?) \|", page, re.M))
    keys = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.M))))
    assert {*SourceConfig.model_fields, *DataConfig.model_fields} - {"sources"} <= keys
    for key in ("packing", "validation", "validation_examples", "shuffle"):
        assert float(told[key]) == DataConfig.model_fields[key].default if told[key][0].isdigit() else (
            told[key].strip("`") == DataConfig.model_fields[key].default
        )  # fmt: skip


def test_tokens_that_are_shared_are_the_same(tmp_path):
    """Texts and chats, whole pieces and marked ones; old files go."""
    from surgery.training.data import shared_tokens
    from surgery.training.data.documents import Document
    from surgery.training.data.shared_tokens import SharedTokens
    from surgery.training.data.tokenize import TokenSequence

    marks = torch.tensor([False, True, True])
    pieces = [
        [TokenSequence(torch.arange(4)), TokenSequence(torch.arange(3), marks, indivisible=True)],
        [],
        [TokenSequence(torch.arange(2))],
    ]
    read = [[Document("a"), Document([{"role": "user", "content": "b"}])], [], [Document("c", ends=False)]]
    writer, reader = (SharedTokens(tmp_path / "tokens", writes) for writes in (True, False))
    assert writer.get_or_tokenize(read, lambda _: pieces) is pieces
    again = reader.get_or_tokenize(read, lambda _: pytest.fail("was to be read"))
    assert [len(some) for some in again] == [2, 0, 1]
    for ours, theirs in zip((p for some in again for p in some), (p for some in pieces for p in some)):
        assert torch.equal(ours.ids_T, theirs.ids_T) and ours.indivisible == theirs.indivisible
        assert (ours.trained_T is None) == (theirs.trained_T is None)
    assert torch.equal(again[0][1].trained_T, marks)
    other = [[Document("a, but longer")], [], []]
    kept, shared_tokens.KEPT_TOKENS = shared_tokens.KEPT_TOKENS, 1
    try:
        writer.get_or_tokenize(other, lambda _: pieces)
    finally:
        shared_tokens.KEPT_TOKENS = kept
    assert len(list((tmp_path / "tokens").iterdir())) == 1
