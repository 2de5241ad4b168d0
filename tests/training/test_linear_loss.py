"""Losses from hidden states are those of the whole logits: values, gradients, memory, and what models do with logits."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers.loss_definitions import kl_divergence, top_k_kl_divergence
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surgery.core.dispatch import record_dispatch, use_kernels
from surgery.core.logit_rows import LogitTransform
from surgery.training import linear_loss, output_head
from surgery.training.stages import STAGES, StageModels
from surgery.training.stages.distill import DistillConfig
from surgery.training.stages.lm import LMConfig, next_token_loss
from surgery.training.top_k import TopK, top_k_divergence, top_k_log_probs

VOCABULARY = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", 7)


def llama(seed=0, **keys):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **keys}))
    for parameter in model.parameters():
        parameter.data.mul_(8) if parameter.ndim > 1 else None
    return model


def batch(rows=2, length=12):
    ids_BT = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))
    labels_BT = ids_BT.clone()
    labels_BT[0, 7:] = -100
    return {"input_ids": ids_BT, "labels": labels_BT}


def counted(data):
    next_BT = pad(data["labels"][:, 1:], (0, 1), value=-100)
    return (next_BT != -100).float(), next_BT


def stage_losses(config, student, teacher, data, run=None):
    """Return (losses, gradients by name) of a stage."""
    stage = STAGES[config](config)
    losses = stage.losses(StageModels(student, run or student, teacher), data)
    (3.0 * losses["total"]).backward()
    grads = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    return losses, grads


def by_definition(config, student, teacher, data):
    """Return (total, gradients) from the whole logits."""
    weight_BT, next_BT = counted(data)
    logits, temperature, total = student(data["input_ids"]).logits, getattr(config, "temperature", 1.0), 0.0
    if config.kind == "distill":
        with torch.no_grad():
            theirs = teacher(data["input_ids"]).logits
        size = min(theirs.shape[-1], logits.shape[-1])
        if config.top_k:
            top = top_k_log_probs(theirs, config.top_k, temperature)
            if config.direction == "forward":
                kl_BT = top_k_kl_divergence(logits, *top, temperature)
            else:
                log_q = (logits / temperature).log_softmax(-1).gather(-1, top.tokens_NK)
                kl_BT = top_k_divergence(log_q, top, "reverse")
        elif config.direction == "forward":
            kl_BT = kl_divergence(logits[..., :size], theirs[..., :size], temperature)
        else:
            q, p = ((x[..., :size] / temperature).log_softmax(-1) for x in (logits, theirs))
            kl_BT = (q.exp() * (q - p)).sum(-1)
        total = config.kl_weight * temperature**2 * (kl_BT * weight_BT).sum()
    ce_weight = getattr(config, "ce_weight", 1.0)
    total = total + ce_weight * cross_entropy(logits.flatten(0, 1), next_BT.flatten(), reduction="sum")
    (3.0 * total).backward()
    grads = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    return total, grads


def distill(**keys):
    return DistillConfig(kind="distill", tokens=64, rate=1e-3, **keys)


def check(config, student, teacher=None, data=None, tolerance=1e-5, whole=None):
    """Compare losses from hidden states with the definitions, and expect no warning."""
    data = data or batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        losses, grads = stage_losses(config, student, teacher, data)
    total, exact = by_definition(config, whole or student, teacher, data)
    torch.testing.assert_close(losses["total"].float(), total.float(), rtol=tolerance, atol=tolerance)
    assert grads.keys() == exact.keys()
    for name, grad in exact.items():
        limit = tolerance * max(float(grad.norm()), 1.0)
        assert float((grads[name] - grad).norm()) <= limit, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"temperature": 2.0, "ce_weight": 0.3, "kl_weight": 0.5},
        {"kl_weight": 0.0, "ce_weight": 1.0},
        {"direction": "reverse", "temperature": 1.5, "ce_weight": 0.3},
        {"top_k": 5},
        {"top_k": 5, "temperature": 2.0, "ce_weight": 0.3},
        {"top_k": 5, "direction": "reverse", "ce_weight": 0.3},
        {"top_k": VOCABULARY + 9, "ce_weight": 0.3},
    ],
    ids=str,
)
def test_distillation_is_the_definition(keys, tied):
    student, teacher = llama(tie_word_embeddings=tied).double(), llama(1).double().eval().requires_grad_(False)
    check(distill(**keys), student, teacher, tolerance=1e-5)


def test_a_teacher_in_inference_mode():
    student, teacher, config = llama(), llama(1).eval().requires_grad_(False), distill(ce_weight=0.5)
    expected = stage_losses(config, student, teacher, batch())
    plain = teacher.forward
    teacher.forward = torch.inference_mode()(lambda *args, **keys: plain(*args, **keys))
    torch.testing.assert_close(stage_losses(config, student, teacher, batch()), expected, rtol=0, atol=0)
    torch.testing.assert_close(stage_losses(config, with_head(Adapted), teacher, batch())[0]["total"].isfinite().float(), torch.ones(()))  # fmt: skip


@pytest.mark.parametrize("keys", [{}, {"ce_weight": 0.5, "direction": "reverse"}, {"top_k": 4}], ids=str)
@pytest.mark.parametrize("sizes", [(VOCABULARY, VOCABULARY + 8), (VOCABULARY + 8, VOCABULARY)], ids=str)
def test_vocabularies_may_be_padded_differently(keys, sizes):
    student, teacher = llama(vocab_size=sizes[0]), llama(1, vocab_size=sizes[1]).eval().requires_grad_(False)
    if keys.get("top_k"):  # the teacher's padding is never likely
        teacher.lm_head.weight.data[VOCABULARY:] = 0
    check(distill(**keys), student, teacher)


def test_language_modelling_is_cross_entropy():
    check(LMConfig(kind="lm", tokens=64, rate=1e-3), llama())
    check(LMConfig(kind="lm", tokens=64, rate=1e-3), llama().train())
    nothing = batch()
    nothing["labels"][:] = -100
    losses, grads = stage_losses(LMConfig(kind="lm", tokens=64, rate=1e-3), llama(), None, nothing)
    assert losses["total"] == 0 and not any(bool(g.any()) for g in grads.values())


# -- heads -----------------------------------------------------------------------------------------
class Adapted(nn.Module):
    """A linear with an adapter, as PEFT wraps it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(16, 3, bias=False), nn.Linear(3, VOCABULARY)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Doubling(nn.Linear):
    """A linear with another forward."""

    def forward(self, x):
        return super().forward(2 * x)


def with_head(change):
    model = llama()
    model.lm_head = change(model.lm_head)
    return model


def frozen_body(model):
    model.model.requires_grad_(False)
    return model


def with_bias(linear):
    new = nn.Linear(16, VOCABULARY)
    new.weight = linear.weight
    return new


def hooked(linear):
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return linear


MODELS = {
    "bias": lambda: with_head(with_bias),
    "frozen": lambda: with_head(lambda head: head.requires_grad_(False)),
    "only head": lambda: frozen_body(llama()),
    "adapter": lambda: with_head(Adapted),
    "only adapter": lambda: frozen_body(with_head(lambda head: Adapted(head.requires_grad_(False)))),
    "subclass": lambda: with_head(lambda head: Doubling(16, VOCABULARY)),
    "hook": lambda: with_head(hooked),
    "parametrized": lambda: with_head(nn.utils.parametrizations.weight_norm),
}


@pytest.mark.parametrize("name", MODELS)
def test_heads(name):
    teacher = MODELS[name]().eval().requires_grad_(False)
    for p in teacher.parameters():
        p.data.mul_(1.1)
    student = MODELS[name]()
    check(distill(ce_weight=0.5), student, teacher)
    check(distill(top_k=4), student, teacher)


def test_a_structured_head(tmp_path):
    from surgery.structures import STRUCTURES
    from surgery.structures.low_rank import LowRank

    torch.manual_seed(0)
    structured = STRUCTURES[LowRank](16, VOCABULARY, LowRank(rank=4), bias=False)
    for p in structured.parameters():
        nn.init.normal_(p)
    student = with_head(lambda head: structured)
    check(distill(ce_weight=0.5), student, llama(1).eval().requires_grad_(False))


# -- what models do with logits ---------------------------------------------------------------------
def of_transformers(name, **keys):
    import transformers

    kind, config = getattr(transformers, f"{name}ForCausalLM", None), getattr(transformers, f"{name}Config", None)
    if kind is None or config is None:
        pytest.skip(f"this version of transformers has no {name}")
    torch.manual_seed(0)
    model = kind(config(**{**SHAPE, **keys}))
    for parameter in model.parameters():
        parameter.data.mul_(8) if parameter.ndim > 1 else None
    return model.eval()


@pytest.mark.parametrize(
    "name, keys, expected",
    [
        ("Gemma2", {"final_logit_softcapping": 4.0, "head_dim": 8}, LogitTransform(1.0, 4.0)),
        ("Granite", {"logits_scaling": 4.0}, LogitTransform(0.25)),
        ("Granite", {}, LogitTransform()),
        ("Cohere", {"logit_scale": 0.3}, LogitTransform(0.3)),
        ("HyperCLOVAX", {"logits_scaling": 0.5}, LogitTransform(0.5)),
        ("NanoChat", {"final_logit_softcapping": 3.0}, LogitTransform(1.0, 3.0)),
    ],
)
def test_transforms_of_models(name, keys, expected):
    student = of_transformers(name, **keys)
    teacher = copy.deepcopy(student).requires_grad_(False)
    for p in teacher.parameters():
        p.data.mul_(1.2)
    for config in (distill(ce_weight=0.5), distill(top_k=4, ce_weight=0.5), distill(direction="reverse")):
        check(config, student, teacher, tolerance=2e-5)
    assert output_head._transforms[student.lm_head] == output_head._transforms[teacher.lm_head] == expected


def cubic(model, change):
    """Return the model with another forward after its head."""
    plain = type(model).forward

    class Changed(type(model)):
        def forward(self, *args, **kwargs):
            output = plain(self, *args, **kwargs)
            output.logits = change(output.logits)
            return output

    model.__class__ = Changed
    return model


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda z: z**3 / 50, "are not the product of its head"),
        (lambda z: z[..., :-3], "are not the product of its head"),
        (lambda z: z.view(-1, 12, VOCABULARY), "invalid for input of size"),
    ],
)
def test_what_is_not_known_is_computed_from_whole_logits(change, why):
    student, teacher = cubic(llama(), change), cubic(llama(1), change).eval().requires_grad_(False)
    config, data = distill(ce_weight=0.5), batch()
    data["labels"].clamp_(max=VOCABULARY - 4)
    with pytest.warns(UserWarning, match=f"losses of Changed are computed from whole logits.*{why}"):
        losses, grads = stage_losses(config, student, teacher, data)
    total, exact = by_definition(config, student, teacher, data)
    torch.testing.assert_close(losses["total"], total)
    torch.testing.assert_close(grads, exact, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(stage_losses(config, student, teacher, data)[0]["total"], total)


def test_a_head_called_in_parts_is_left_alone():
    class Halves(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def get_output_embeddings(self):
            return self.base.lm_head

        @property
        def config(self):
            return self.base.config

        def forward(self, input_ids, **keys):
            output = self.base.model(input_ids=input_ids)
            parts = [self.base.lm_head(x) for x in output.last_hidden_state.split(6, dim=1)]
            output.logits = torch.cat(parts, 1)
            return output

    model = Halves(llama())
    with pytest.warns(UserWarning, match="does not call its head once with all hidden states"):
        loss = next_token_loss(model, batch())
    torch.testing.assert_close(loss, next_token_loss(model.base, batch()))


def test_an_error_of_the_model_is_not_hidden():
    model = llama()
    with pytest.raises(IndexError):
        next_token_loss(model, {**batch(), "input_ids": batch()["input_ids"] + VOCABULARY})
    assert model.lm_head not in output_head._transforms and "forward" not in vars(model.lm_head)
    check(LMConfig(kind="lm", tokens=64, rate=1e-3), model)


# -- precision, memory, order ------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [{}, {"temperature": 2.0, "ce_weight": 0.5}, {"top_k": 8, "ce_weight": 0.5}], ids=str)
def test_products_are_those_of_autocast(keys):
    """Under bfloat16 autocast: the loss of bfloat16 logits, with gradients in float32 for float32 weights."""
    student, teacher, data = llama(), llama(1).bfloat16().eval().requires_grad_(False), batch(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        losses, grads = stage_losses(distill(**keys), student, teacher, data)
        total, exact = by_definition(distill(**keys), student, teacher, data)
    torch.testing.assert_close(losses["total"], total, rtol=1e-4, atol=1e-4)
    for name, grad in exact.items():
        assert grads[name].dtype == torch.float32
        assert float((grads[name] - grad).norm() / grad.norm()) < 2e-2, name


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize(
    "keys", [{}, {"ce_weight": 0.5, "temperature": 2.0}, {"top_k": 8, "ce_weight": 0.5}, {"far_weight": 1.0}], ids=str
)
@pytest.mark.parametrize("head", [None, Adapted])
def test_no_tensor_has_the_logits_of_the_batch(keys, head, monkeypatch):
    monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", 32)
    student, teacher = llama() if head is None else with_head(head), llama(1).eval().requires_grad_(False)
    if "far_weight" in keys:
        keys = {**keys, "far_window": 8}
    config, data = distill(**keys), batch(8, 64)
    stage, saved = STAGES[config](config), []
    models = StageModels(student, student, teacher)
    stage.prepare(models, {})
    stage.losses(models, data)  # learns transforms
    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # fmt: skip
        stage.losses(models, data)["total"].backward()
    assert largest.elements < 512 * 80  # the body's largest tensors are masks of 8 x 64 x 64
    assert max(saved) < 512 * 80 < 512 * VOCABULARY


def test_a_loss_is_differentiated_once():
    loss = next_token_loss(llama(), batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be computed once"):
        loss.backward()


def test_equal_runs_are_equal():
    config, student, teacher = distill(ce_weight=0.5), llama(), llama(1).eval().requires_grad_(False)
    first, second = (stage_losses(config, student, teacher, batch()) for _ in range(2))
    assert first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_no_random_number_is_drawn_by_the_first_call():
    student, teacher = llama(attention_dropout=0.0), llama(1).eval().requires_grad_(False)
    torch.manual_seed(0)
    stage_losses(distill(), student, teacher, batch())
    after = torch.rand(1)
    torch.manual_seed(0)
    assert after == torch.rand(1)


@pytest.mark.usefixtures("loops_of_tensors")
@pytest.mark.parametrize(
    "keys", [{"ce_weight": 0.5}, {"top_k": 4, "temperature": 2.0}, {"direction": "reverse"}], ids=str
)
def test_kernels_compute_the_stage(keys):
    pytest.importorskip("triton")
    student, teacher, data = llama(), llama(1).eval().requires_grad_(False), batch(1, 10)
    losses, grads = stage_losses(distill(**keys), student, teacher, data)
    with use_kernels("kernel"), record_dispatch() as taken:
        ours, found = stage_losses(distill(**keys), student, teacher, data)
    assert taken >= {"row_stats", "row_gradient_"}
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, grads, rtol=1e-4, atol=1e-5)


def test_the_usual_direction_is_not_written():
    assert (
        "direction" not in distill().model_dump()
        and distill(direction="reverse").model_dump()["direction"] == "reverse"
    )


def test_reverse_divergence_of_events():
    """The whole divergence where k is the vocabulary."""
    torch.manual_seed(0)
    q, p = torch.randn(2, 4, 9).log_softmax(-1)
    top = TopK(*top_k_log_probs(p, 9))
    whole = (q.exp() * (q - p)).sum(-1)
    torch.testing.assert_close(
        top_k_divergence(q.gather(-1, top.tokens_NK), top, "reverse"), whole, rtol=1e-3, atol=1e-4
    )
