"""A run resumes only with the texts that it was started with."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.small_training import LM, healing_recipe

from surgery.core.errors import SurgeryError
from surgery.core.journal import CHECKSUM_KEY, JOURNAL_NAME
from surgery.training.finetune import _open_journal
from surgery.training.models import open_trainable


@pytest.mark.parametrize("changed", ["train.txt", "held.txt"])
def test_outside_d3_another_text_under_the_same_path_is_refused(student, words, tmp_path, changed):
    for name in ("train.txt", "held.txt"):
        shutil.copy(words, tmp_path / name)
    data = {"sources": [str(tmp_path / "train.txt")], "validation": [{"path": str(tmp_path / "held.txt")}]}
    recipe, source = healing_recipe(words, LM, data=data), open_trainable(str(student), False)
    work = tmp_path / "out.partial"
    with _open_journal(source, recipe, work, False):
        pass
    with _open_journal(source, recipe, work, True):
        pass
    (tmp_path / changed).write_text("Another text.\n", encoding="utf-8")
    with pytest.raises(SurgeryError, match="begun with another data digest"), _open_journal(source, recipe, work, True):
        pass


def test_outside_d3_a_journal_without_digests_goes_on(student, words, tmp_path):
    recipe, source = healing_recipe(words, LM), open_trainable(str(student), False)
    work = tmp_path / "out.partial"
    with _open_journal(source, recipe, work, False) as journal:
        old = {k: v for k, v in journal.entries[0].items() if k not in ("weights_digest", "data_digest", CHECKSUM_KEY)}
        (work / JOURNAL_NAME).unlink()
        journal.add(**json.loads(json.dumps(old)))
    with _open_journal(source, recipe, work, True) as journal:
        assert journal.entries == [old]


@pytest.mark.parametrize("damage", ["removed", "first line"])
def test_checkpoints_of_unknown_settings_are_refused(damage, student, words, tmp_path):
    """Without the first line of the journal, another recipe would go on from the checkpoints of the first."""
    recipe, source = healing_recipe(words, LM), open_trainable(str(student), False)
    work = tmp_path / "out.partial"
    with _open_journal(source, recipe, work, False):
        pass
    journal = work / JOURNAL_NAME
    journal.unlink() if damage == "removed" else journal.write_bytes(journal.read_bytes().replace(b"start", b"stbrt"))
    state = work / "checkpoints" / "stage-00-step-0000002" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    with pytest.raises(SurgeryError, match="is missing or damaged, so nothing says with which recipe"):
        _open_journal(source, recipe, work, True)
    shutil.rmtree(state.parent)
    with _open_journal(source, recipe, work, True) as again:  # nothing was trained yet
        assert len(again.entries) == 1


def test_a_refusal_names_the_key_that_differs(student, words, tmp_path):
    source, work = open_trainable(str(student), False), tmp_path / "out.partial"
    with _open_journal(source, healing_recipe(words, {**LM, "rate": 1e-4}), work, False):
        pass
    again = _open_journal(source, healing_recipe(words, {**LM, "rate": 2e-4}), work, True)
    with pytest.raises(SurgeryError, match=r"another recipe \(stages\.0\.rate: 0\.0001, now 0\.0002\)"), again:
        pass
