"""Whatever order a server feeds, rejects, copies, reorders and stores tokens in, the logits are those of one forward
without a cache.

A schedule is drawn as a list of steps on one batch; hypothesis shrinks a failing one to the shortest. Everything is
float64.

    SURGERY_SCHEDULES=10000 pytest tests/checkpoint/test_schedules.py      more of them, at random; CI takes the same few each time
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
from helpers.small_mixers import MIXER_SPECS, random_model_with_mixers
from helpers.tiny_families import TINY_FAMILIES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from surgery.architectures.native import native_core, native_paths
from surgery.mixers import mixer_config
from surgery.mixers.native_config import Native
from surgery.modeling.cache import record_past
from surgery.modeling.cache_io import load_cache, save_cache
from surgery.modeling.native import add_level_weights

LIMIT = 64  # tokens of a row, mhla's longest
COUNT = int(os.environ.get("SURGERY_SCHEDULES", "0"))


@functools.cache
def model_with(name: str, hybrid: bool) -> Any:
    """A two-layer model in float64; in a hybrid the first layer keeps softmax."""
    model = random_model_with_mixers("llama", mixer_config(MIXER_SPECS[name]), [1] if hybrid else None)
    return model.double().eval()


class Session:
    """A batch fed in steps. Tables ids, mask and positions (B, S) hold what the cache has seen. limit: of the difference of
    the logits / the largest.
    """

    def __init__(self, model: Any, rows: int, seed: int, folder: Any, limit: float = 1e-9):
        self.model, self.folder, self.limit = model, folder, limit
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = DynamicCache(config=model.config)
        self.ids = self.mask = self.positions = torch.zeros(rows, 0, dtype=torch.long)

    def feed(self, tokens: int, pads: list[int], left: bool) -> None:
        """Append tokens to every row, the first or last few of them padding, and compare the logits of the real ones.

        Rows that have had only padding so far join the batch with their first real token; one row has a real token in
        every feed.
        """
        rows, seen = self.ids.shape
        tokens = min(tokens, LIMIT - seen)
        if tokens < 1:
            return
        place_T = torch.arange(tokens)
        pad_B1 = torch.tensor([(pads * rows)[:rows]]).mT.clamp(max=tokens)
        pad_B1[-1].clamp_(max=tokens - 1)
        new_mask = (place_T >= pad_B1 if left else place_T < tokens - pad_B1).long()
        new_ids = torch.randint(3, 96, (rows, tokens), generator=self.generator)
        self.ids = torch.cat([self.ids, new_ids], 1)
        self.mask = torch.cat([self.mask, new_mask], 1)
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        found = self.model(
            new_ids,
            attention_mask=self.mask,
            position_ids=self.positions[:, seen:],
            past_key_values=self.cache,
        ).logits
        expected = self.model(self.ids, attention_mask=self.mask, position_ids=self.positions, use_cache=False).logits[
            :, seen:
        ]
        real = new_mask.bool()
        far = (found - expected)[real].abs().max() / expected[real].abs().max()
        assert far < self.limit, f"tokens {seen} to {seen + tokens}: logits differ by {far:.1e} of the largest"

    def draft(self, tokens: int, rejected: int) -> None:
        """Feed a draft and remove its last tokens again, as speculative decoding does."""
        before = self.ids.shape[1]
        if not before:
            return
        record_past(self.cache, self.model)
        self.feed(tokens, [0], left=True)
        rejected = min(rejected, self.ids.shape[1] - before)
        if rejected:
            self.cache.crop(-rejected)
        kept = self.ids.shape[1] - rejected
        self.ids, self.mask, self.positions = self.ids[:, :kept], self.mask[:, :kept], self.positions[:, :kept]

    def rows(self, choice: list[int], beams: bool) -> None:
        """Let rows leave, change places or be copied: a beam search, or a batch whose members change."""
        if not self.ids.shape[1]:
            return
        index = torch.tensor(choice) % len(self.ids)
        (self.cache.reorder_cache if beams else self.cache.batch_select_indices)(index)
        self.ids, self.mask, self.positions = self.ids[index], self.mask[index], self.positions[index]

    def repeat(self, times: int) -> None:
        """Several continuations of every row."""
        if self.ids.shape[1] and len(self.ids) * times <= 6:
            self.cache.batch_repeat_interleave(times)
            self.ids, self.mask, self.positions = (
                table.repeat_interleave(times, 0) for table in (self.ids, self.mask, self.positions)
            )

    def fork(self, tokens: int) -> None:
        """A copy of the cache goes on by itself, as another request with the same prefix; the first must not notice."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        twin.feed(tokens, [0], left=True)

    def store(self) -> None:
        """Evict the cache to a file, and go on from there."""
        if self.ids.shape[1]:
            save_cache(self.cache, self.folder / "cache")
            self.cache = load_cache(self.folder / "cache", self.model)


tokens_of = st.one_of(st.integers(1, 3), st.integers(1, 24))
pads_of = st.lists(st.integers(0, 12), min_size=1, max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("feed"), tokens_of, pads_of, st.booleans()),
    st.tuples(st.just("feed"), st.just(1), st.just([0]), st.just(True)),
    st.tuples(st.just("draft"), st.integers(1, 8), st.integers(0, 8)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("repeat"), st.integers(2, 3)),
    st.tuples(st.just("fork"), tokens_of),
    st.tuples(st.just("store")),
)
SCHEDULES = st.lists(STEPS, min_size=1, max_size=10)


@pytest.mark.parametrize("name", MIXER_SPECS)
@settings(
    max_examples=max(1, COUNT // len(MIXER_SPECS)) if COUNT else 12,
    derandomize=not COUNT,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    hybrid=st.booleans(),
    rows=st.integers(1, 3),
    seed=st.integers(0, 9),
    first=st.tuples(tokens_of, pads_of, st.booleans()),
    schedule=SCHEDULES,
)
@torch.no_grad()
def test_any_schedule_gives_the_logits_of_one_forward(name, tmp_path, hybrid, rows, seed, first, schedule):
    session = Session(model_with(name, hybrid), rows, seed, tmp_path)
    session.feed(*first)
    for step, *arguments in schedule:
        getattr(session, step)(*arguments)
    session.feed(1, [0], left=True)


UNPADDED = st.one_of(
    st.tuples(st.just("feed"), tokens_of, st.just([0]), st.just(True)),
    st.tuples(st.just("draft"), st.integers(1, 8), st.integers(0, 8)),
    st.tuples(st.just("rows"), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("repeat"), st.integers(2, 3)),
    st.tuples(st.just("fork"), tokens_of),
)


@functools.cache
def native_model() -> Any:
    """A hybrid of Gated DeltaNet and softmax with random level weights."""
    model = TINY_FAMILIES["qwen3_5"].build()
    if not any(native_core(module) for module in model.modules()):
        pytest.skip("this version of transformers has no core functions by the names that level weights need")
    for path in native_paths(model):
        add_level_weights(model, path, Native(levels=5, block=4))
        torch.nn.init.normal_(model.get_submodule(path).mixer.level.weight)
    return model.double().eval()


@settings(
    max_examples=COUNT or 8,
    derandomize=not COUNT,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.integers(1, 3),
    seed=st.integers(0, 9),
    first=st.tuples(st.integers(2, 24), pads_of),  # transformers does not look for padding in a single token
    schedule=st.lists(UNPADDED, min_size=1, max_size=10),
)
@torch.no_grad()
def test_level_weights_of_native_layers_follow_any_schedule(tmp_path, rows, seed, first, schedule):
    """With padding on the left of the first tokens: the convolution of transformers' own layer counts it anywhere else."""
    session = Session(native_model(), rows, seed, tmp_path, limit=1e-5)  # the library norms in float32
    session.feed(*first, True)
    for step, *arguments in schedule:
        getattr(session, step)(*arguments)
    session.feed(1, [0], left=True)
