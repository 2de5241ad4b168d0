"""vLLM's metadata of a step for mixers: buffers of a fixed address, in which padding belongs to no request."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from serving.engines import engine, generate, needs_vllm

pytestmark = needs_vllm


def test_buffers_keep_their_address_and_mark_padding():
    from surgery.vllm.backend import MixerMetadataBuilder

    builder = MixerMetadataBuilder.__new__(MixerMetadataBuilder)
    builder.rows_R, builder.seen_R = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    cache = SimpleNamespace(mamba_cache_mode="none")
    builder.vllm_config = SimpleNamespace(cache_config=cache)
    builder.kv_cache_spec = SimpleNamespace(block_size=4)
    table = torch.tensor([[7, 70, 700], [3, 30, 300], [5, 50, 500], [9, 90, 900]], dtype=torch.int32)
    lengths, starts = torch.tensor([10, 3, 1, 0]), torch.tensor([0, 1, 4, 5, 5])
    builder.write_rows(table, lengths, starts)
    assert builder.rows_R.tolist() == [7, 3, 5, 0, 0, 0, 0, 0] and builder.seen_R.tolist() == [9, 0, 0, *[-1] * 5]
    builder.write_rows(table[3:], torch.tensor([4]), torch.tensor([0, 1]))
    assert builder.rows_R.tolist() == [9, *[0] * 7] and builder.seen_R.tolist() == [3, *[-1] * 7]
    cache.mamba_cache_mode = "align"  # the block of the last token
    builder.write_rows(table, lengths, starts)
    assert builder.rows_R.tolist() == [700, 3, 5, 0, 0, 0, 0, 0]


def test_decodes_are_what_vllm_counts(hybrid, monkeypatch):
    from surgery.vllm.backend import MixerMetadataBuilder

    seen, decodes = [], MixerMetadataBuilder.decodes

    def compared(self, common):
        metadata = decodes(self, common)
        by_vllm = super(MixerMetadataBuilder, self).build(0, common)
        counts = ["num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens", "num_reqs"]
        assert [getattr(metadata, name) for name in counts] == [getattr(by_vllm, name) for name in counts]
        seen.append(metadata.num_decodes)
        return metadata

    monkeypatch.setattr(MixerMetadataBuilder, "decodes", compared)
    with engine(hybrid) as llm:
        generate(llm, [[5], [5, 6, 7]], 4)
    assert 2 in seen


def test_layers_of_an_engine_get_lengths_from_the_cpu_and_rows_at_one_address(hybrid, monkeypatch):
    from surgery.vllm.backend import MixerMetadataBuilder

    batches, addresses, build = [], set(), MixerMetadataBuilder.build

    def recorded(self, *args, **kwargs):
        metadata = build(self, *args, **kwargs)
        addresses.add((id(self), metadata.batch.rows_R.data_ptr()))
        batches.append((metadata.batch, metadata.batch.seen_R.tolist()))
        return metadata

    monkeypatch.setattr(MixerMetadataBuilder, "build", recorded)
    with engine(hybrid) as llm:
        generate(llm, [[5], [5, 6, 7]], 4)
    assert len(addresses) == len({builder for builder, _ in addresses})
    for batch, seen in batches:
        counts = [stop - start for start, stop in zip(batch.starts, batch.starts[1:], strict=False)]
        assert seen == [length - count for length, count in zip(batch.lengths, counts, strict=True)]
        assert all(count == 1 for count in counts[: batch.decodes])
    assert any(batch.decodes == 2 for batch, _ in batches)


class Layer:
    def __init__(self, steps_in_place: bool):
        self.steps_in_place = steps_in_place


@pytest.mark.parametrize(
    ("layers", "support"),
    [
        ([Layer(True), object(), Layer(True)], "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([Layer(True), Layer(False), object()], "NEVER"),
    ],
)
def test_whole_decoding_steps_are_captured_where_a_kernel_computes_every_mixer(layers, support):
    from surgery.vllm.backend import MixerMetadataBuilder

    compilation = SimpleNamespace(static_forward_context=dict(enumerate(layers)))
    config = SimpleNamespace(compilation_config=compilation)
    assert MixerMetadataBuilder.get_cudagraph_support(config, None).name == support


def test_without_a_gpu_no_kernel_computes_a_mixer(hybrid):
    with engine(hybrid) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert [layer.steps_in_place for layer in layers if hasattr(layer, "steps_in_place")] == [False, False]


def test_cuda_graphs_without_compilation_end_at_a_mixer():
    """In a process of its own: vLLM reads the variable when a module with such an operator is imported."""
    if find_spec("vllm.compilation.breakable_cudagraph") is None:
        pytest.skip("this version has no such graphs")
    code = "from surgery.vllm.mixer_layer import surgery_mixer as f; print(hasattr(f, '__wrapped__'))"
    variables = {**os.environ, "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert done.stdout.split()[-1:] == ["True"], done.stderr
