"""The engine of conversions: streams of rows through the layers, and passes with gradients."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers.small import tiny_inputs
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from surgery.architectures.linears import find_linears
from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.gradients import GradientPass, LayerBackward
from surgery.conversion.streams import Stream, Streams, Visitor

CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "t5"])
def family(request):
    return request.param


@pytest.fixture
def runner(family, checkpoints):
    meta_model = MetaModel(open_checkpoint(str(checkpoints(family))))
    layout = find_linears(meta_model.model)
    return LayerRunner(meta_model, layout.layers, layout.head, CPU)


@pytest.fixture
def samples(family):
    return CalibrationSet(tiny_inputs(family, 6), 4, 6)


class Zeroed:
    """A pass that leaves the stream `original` unchanged and zeroes a linear of the layers `paths` in `other`, which
    begins at `first`.
    """

    def __init__(self, paths, first=""):
        self.paths, self.first, self.begun = paths, first, not first

    def visit(self, layer):
        if layer.path == self.first:
            layer.branch("original", "other")
            self.begun = True
        contexts = {"original": nullcontext()}
        if self.begun or layer.path.startswith("encoder"):
            contexts["other"] = self.zeroed(layer.call.layer) if layer.path in self.paths else nullcontext()
        return contexts

    @contextmanager
    def zeroed(self, layer):
        weights = [p for name, p in layer.named_parameters() if p.dim() == 2 and "norm" not in name][:1]
        before = [w.detach().clone() for w in weights]
        for w in weights:
            w.detach().zero_()
        yield
        for w, old in zip(weights, before):
            w.detach().copy_(old)


def transformers_model(family, checkpoint):
    return (AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM).from_pretrained(checkpoint).eval()


def head_input(model, inputs):
    """Return what the head reads in transformers' own model."""
    caught = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model(**inputs)
    return caught[0]


def test_each_stream_is_its_own_model(runner, samples, checkpoints, family):
    streams = {"original": Stream(samples.fit), "other": Stream(samples.held_out)}
    changed = list(runner.layers[-1:])
    ticks = []
    final = Streams(runner, samples, streams).run(Zeroed(changed), lambda: ticks.append(1))
    inputs = samples.inputs
    for name, rows, zeroed in (("original", slice(0, 4), []), ("other", slice(4, 6), changed)):
        model = transformers_model(family, checkpoints(family))
        with torch.no_grad():
            for path in zeroed:
                next(
                    p for n, p in model.get_submodule(path).named_parameters() if p.dim() == 2 and "norm" not in n
                ).zero_()
            expected = head_input(model, {k: v[rows] for k, v in inputs.items()})
        torch.testing.assert_close(final[name], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(final.through("original", "other"), final.x_BTD) and len(ticks) == len(runner.layers)


def test_a_stream_may_branch_off_later(runner, samples):
    """The rows below the branch are those of its source, so it equals a stream that ran from the start."""
    last = runner.layers[-1]
    streams = {"original": Stream(samples.held_out), "other": Stream(samples.held_out)}
    whole = Streams(runner, samples, streams).run(Zeroed([last]))
    late = Streams(runner, samples, streams).run(Zeroed([last], first=last))
    assert torch.equal(whole["other"], late["other"]) and not torch.equal(whole["other"], whole["original"])


def test_streams_beside_others_have_one_offset(runner, samples):
    pair = {"fit": Stream(samples.fit, 7), "held out": Stream(samples.held_out, 1)}
    beside = {"a": Stream(samples.fit, beside="fit"), "b": Stream(samples.held_out, beside="held out")}
    streams = Streams(runner, samples, {**pair, **beside})
    assert streams.offset == 6 and [streams.sample(row) for row in range(12)] == [*range(6), *range(6)]
    with pytest.raises(AssertionError, match="beside all others"):
        Streams(runner, samples, {**pair, "b": beside["b"], "a": beside["a"]})


class WeightGradients(GradientPass):
    """Sums the gradients of a norm's weight in each layer, chunk by chunk."""

    def __init__(self, runner):
        self.runner, self.gradients = runner, {}

    def backward_context(self, call):
        return WeightGradient(self, call)


class WeightGradient(LayerBackward):
    def __init__(self, owner, call):
        super().__init__()
        self.owner, self.call = owner, call

    def begin_rows(self, first, last):
        weight = next(p for p in self.call.layer.parameters() if p.dim() == 1)
        self.leaves = [weight.requires_grad_(True)]

    def add(self, gradient_BTD, of_leaves):
        sums = self.owner.gradients
        sums[self.call.path] = sums.get(self.call.path, 0) + of_leaves[0]


@pytest.mark.parametrize("rows_at_once", [None, 1])
def test_gradients_are_those_of_autograd(runner, samples, checkpoints, family, rows_at_once):
    measured = WeightGradients(runner)
    streams = Streams(runner, samples, {"fit": Stream(samples.fit)}, rows_at_once=rows_at_once)
    final_BTD = streams.run_with_gradients(measured)
    slope_BTD = torch.randn(final_BTD.shape, generator=torch.Generator().manual_seed(0))
    torch.autograd.backward(final_BTD, slope_BTD)

    model = transformers_model(family, checkpoints(family))
    head_input(model, {k: v[:4] for k, v in samples.inputs.items()}).backward(slope_BTD)
    assert set(measured.gradients) == set(runner.layers)
    for path, gradient in measured.gradients.items():
        weight = next(p for p in model.get_submodule(path).parameters() if p.dim() == 1)
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-3, atol=1e-4 * float(weight.grad.abs().max()))


def test_an_error_of_a_pass_is_raised_as_it_is(runner, samples):
    """The model is run again only where its forward takes no use_cache."""

    def visit(layer):
        raise TypeError("of the pass")

    with pytest.raises(TypeError, match=r"^of the pass$") as raised:
        Streams(runner, samples, {"fit": Stream(samples.fit)}).run(Visitor(visit))
    assert raised.value.__context__ is None
