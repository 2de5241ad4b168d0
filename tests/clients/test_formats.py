"""What other engines read and write: the densified checkpoint (llama.cpp, MLX, vLLM), ONNX and GGUF."""

from __future__ import annotations

import collections
import json
import math

import numpy as np
import pytest
import torch
from helpers.small import Logits, model_outputs, tiny_config, tiny_inputs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import surgery
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.densify import densify
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.structures import StructuredLinear


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_densified_checkpoint_has_the_files_of_the_original(family, checkpoints, converted, tmp_path):
    """Converters go by the config and by tensor names, shapes and dtypes. Nothing of surgery is left in either."""
    densify(str(converted(family)), tmp_path / "dense")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (checkpoints(family), tmp_path / "dense")]
    assert configs[0] == configs[1] and not (tmp_path / "dense" / "surgery_shim.py").exists()
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoints(family), tmp_path / "dense"))
    assert {name: (x.shape, x.dtype) for name, x in before.items()} == {
        name: (x.shape, x.dtype) for name, x in after.items()
    }


def write_gguf(gguf, path, layers=1, vocab=300, dim=64, inner=128):
    """Write a Llama of one layer with four heads, its linears in 8 bits, and a tokenizer of bytes."""
    writer, generator = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for add, value in (
        (writer.add_block_count, layers), (writer.add_context_length, 64), (writer.add_embedding_length, dim), (writer.add_feed_forward_length, inner),
        (writer.add_head_count, 4), (writer.add_head_count_kv, 2), (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 1e4),
        (writer.add_vocab_size, vocab), (writer.add_bos_token_id, 0), (writer.add_eos_token_id, 0), (writer.add_tokenizer_model, "gpt2"),
    ):  # fmt: skip
        add(value)
    tokens = ["<|end|>", *bytes_to_unicode().values(), "ab"]
    writer.add_token_list([*tokens, *(f"<|{i}|>" for i in range(vocab - len(tokens)))])
    writer.add_token_types([3, *[1] * (vocab - 1)])
    writer.add_token_merges(["a b"])
    linears = {"attn_q": (dim, dim), "attn_k": (dim // 2, dim), "attn_v": (dim // 2, dim), "attn_output": (dim, dim)}
    linears |= {"ffn_gate": (inner, dim), "ffn_up": (inner, dim), "ffn_down": (dim, inner)}
    shapes = {"token_embd": (vocab, dim), "output": (vocab, dim), **{f"blk.0.{n}": each for n, each in linears.items()}}
    for name, shape in shapes.items():
        values, kind = 0.1 * generator.standard_normal(shape).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(dim, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_advice_for_a_gguf_file_writes_a_checkpoint(tmp_path, monkeypatch):
    """The lines of the error are run as they are, in the user's folder."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    write_gguf(gguf, tmp_path / "tiny.gguf")
    with pytest.raises(SurgeryError, match="is a GGUF file") as refused:
        open_checkpoint(str(tmp_path / "tiny.gguf"))
    monkeypatch.chdir(tmp_path)
    exec(str(refused.value).partition("\n\n")[2], {})
    source = open_checkpoint("tiny")
    assert source.config["model_type"] == "llama" and "model.layers.0.mlp.down_proj.weight" in source.tensors
    model, tokenizer = AutoModelForCausalLM.from_pretrained("tiny"), AutoTokenizer.from_pretrained("tiny")
    assert model.dtype == torch.bfloat16 and tokenizer("ab").input_ids and tokenizer.eos_token == "<|end|>"


@pytest.mark.parametrize("recipe", ["low-rank-half", "btt-half", "monarch-half", "mlr-half", "tensor-train-half"])
def test_onnx_keeps_the_factors_of_structured_linears(recipe):
    """The whole model is exported with torch.onnx: each factor stays a tensor of its own, and the graph computes the same."""
    pytest.importorskip("onnxscript")
    onnx_reference = pytest.importorskip("onnx.reference")
    torch.manual_seed(0)
    cls, config = tiny_config("llama")
    dense = cls(config)
    model = surgery.apply(dense.eval(), recipe, calibration=None, progress=Progress())
    linears = [m for m in model.modules() if isinstance(m, StructuredLinear)]
    assert len(linears) == 14

    inputs = tiny_inputs("llama", 2)
    exported = torch.onnx.export(Logits(model).eval(), (inputs["input_ids"],), dynamo=True, verbose=False).model_proto
    stored = sum(math.prod(tensor.dims) for tensor in exported.graph.initializer)
    ours = sum(tensor.numel() for tensor in model.state_dict().values())
    dense = sum(m.in_features * m.out_features for m in linears)
    assert (
        stored < ours + 0.25 * dense
    )  # no matrix was multiplied out; masks and tables of positions are constants of the graph
    if recipe == "low-rank-half":
        shapes = collections.Counter(tuple(sorted(tensor.dims)) for tensor in exported.graph.initializer)
        for shape, count in collections.Counter(
            tuple(sorted(x.shape)) for m in linears for x in m.parameters()
        ).items():
            assert shapes[tuple(n for n in shape if n > 1)] + shapes[shape] >= count, shape
    session = onnx_reference.ReferenceEvaluator(exported)
    (found,) = session.run(None, {exported.graph.input[0].name: inputs["input_ids"].numpy()})
    assert float((torch.tensor(found) - model_outputs(model, inputs)).abs().max()) < 1e-5
