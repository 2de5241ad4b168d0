"""What other engines read and write: the densified checkpoint (llama.cpp, MLX, vLLM) and ONNX."""

from __future__ import annotations

import collections
import json
import math

import pytest
import torch
from helpers.small import Logits, model_outputs, tiny_config, tiny_inputs
from safetensors.torch import load_file

import surgery
from surgery.conversion.densify import densify
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


@pytest.mark.parametrize("recipe", ["low-rank-half", "btt-half", "monarch-half", "mlr-half", "tensor-train-half"])
def test_onnx_keeps_the_factors_of_structured_linears(recipe):
    """The whole model is exported with torch.onnx: each factor stays a tensor of its own, and the graph computes the
    same.
    """
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
