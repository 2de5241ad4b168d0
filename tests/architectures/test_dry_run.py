"""The dry run of attention modules: what it finds, what it refuses by name, and that it leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
import transformers
from helpers.small import FAMILIES, tiny_config
from helpers.small_mixers import ExactConfig, register_test_mixers
from helpers.tiny_families import DECODER, ENCODER, NO_HEAD_DIM, TINY_FAMILIES
from torch import nn

from surgery.architectures.attention import attention_paths, attention_shape, output_path, require_architecture
from surgery.architectures.dry_run import RECORDER, observe_attention, rotate
from surgery.architectures.linears import is_linear
from surgery.calibration.attention_samples import head_outputs_captured
from surgery.calibration.layer_runner import StopForward
from surgery.core.errors import SurgeryError
from surgery.modeling.attention import install

KNOWN = [family for family in FAMILIES if not family.startswith("t5")]
EXPERTS = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}


def on_meta(model_class: str, config_class: str, **options):
    """A model without memory: dry runs read its class and config only."""
    with torch.device("meta"):
        return getattr(transformers, model_class)(getattr(transformers, config_class)(**options))


@pytest.mark.parametrize("family", KNOWN)
def test_known_families_are_found_as_described(family):
    """Every Architecture agrees with the dry run: paths, output projections and shapes."""
    cls, config = tiny_config(family)
    model = cls(config)
    found = observe_attention(model)
    assert list(found) == attention_paths(model)
    for path, observed in found.items():
        assert observed.refusal == "" and observed.output == output_path(model, path)
        described = attention_shape(model, path)
        assert observed.shape.window in (described.window, None)
        assert observed.shape == type(described)(**{**described.__dict__, "window": observed.shape.window})


def gemma4(layers: int, shared: int):
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    small = {
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "sliding_window": 8,
    }
    options = {**DECODER, "num_hidden_layers": layers, "layer_types": kinds, **small, "num_kv_shared_layers": shared}
    return on_meta("Gemma4ForCausalLM", "Gemma4TextConfig", **options)


@pytest.mark.parametrize(
    "build, property",
    [
        (lambda: on_meta("GptOssForCausalLM", "GptOssConfig", **EXPERTS), r"learned sink in each head \(s_aux\)"),
        (lambda: on_meta("AlbertForMaskedLM", "AlbertConfig", **ENCODER, embedding_size=16), "calls its attention function 2 times"),
        (lambda: on_meta("Llama4ForCausalLM", "Llama4TextConfig", **EXPERTS, intermediate_size_mlp=48), "mask is neither causal nor full"),
        (lambda: gemma4(4, 2), "shares its keys and values with model.layers.2.self_attn"),
        (lambda: on_meta("Speech2TextForConditionalGeneration", "Speech2TextConfig", encoder_layers=1, decoder_layers=1), "reads input_features"),
        (lambda: on_meta("XCLIPModel", "XCLIPConfig"), "could not be run on placeholder inputs"),
    ],
)  # fmt: skip
def test_refusals_name_the_property(build, property):
    with pytest.raises(SurgeryError, match=property):
        attention_paths(build())


@pytest.mark.parametrize(
    "version, property",
    [("V3", "rotates queries and keys in a layout"), ("V2", "depend on the position in a way of their own")],
)
def test_latent_attention_is_refused_by_the_dry_run_too(version, property):
    """A description of the family refuses it first; the dry run sees that RoPE rotates the last dims of a head."""
    model = on_meta(f"Deepseek{version}ForCausalLM", f"Deepseek{version}Config", **NO_HEAD_DIM, **LATENT)
    assert all(property in found.refusal for found in observe_attention(model).values())
    with pytest.raises(SurgeryError, match="cannot be given mixers"):
        attention_paths(model)


def test_some_modules_of_a_model_are_refused():
    """Six layers, the last two of which read keys of the two before: the first two can have mixers, the others say why
    not.
    """
    model = gemma4(6, 2)
    paths = attention_paths(model)
    assert (
        len(paths) == 6 and attention_shape(model, paths[0]).window == 8 and attention_shape(model, paths[1]).key == 16
    )
    for path in paths[2:]:
        with pytest.raises(SurgeryError, match=r"shares its keys and values.*Leave its layer out"):
            attention_shape(model, path)
    with pytest.raises(SurgeryError, match=r"no attention at 'model\.layers\.9\.self_attn'"):
        attention_shape(model, "model.layers.9.self_attn")


def test_mixtures_of_experts_have_mixers():
    model = on_meta("MixtralForCausalLM", "MixtralConfig", **EXPERTS)
    shape = attention_shape(model, attention_paths(model)[1])
    assert (shape.heads, shape.groups, shape.key, shape.rotary, shape.norm) == (4, 2, 8, 8, False)


def test_encoders_and_decoders_without_their_cross_attention():
    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("ffn_dim", 48), ("attention_heads", 4))
    }
    model = on_meta("BartForConditionalGeneration", "BartConfig", vocab_size=96, d_model=32, **sizes)
    paths = attention_paths(model)
    assert paths == ["model.encoder.layers.0.self_attn", "model.decoder.layers.0.self_attn"]
    assert [attention_shape(model, path).causal for path in paths] == [False, True]


def test_nothing_is_left_behind():
    """Defaults, random numbers and the model are as before, also where models are built on meta; a model with mixers is
    read the same.
    """
    model = TINY_FAMILIES["olmo3"].build()
    paths = attention_paths(model)
    shapes = [attention_shape(model, path) for path in paths]
    with register_test_mixers():
        install(model, dict.fromkeys(paths, ExactConfig()))
        model.config.vocab_size += 1  # another config: the dry run is repeated
        torch.set_default_dtype(torch.float64)
        try:
            state = torch.random.get_rng_state()
            with torch.device("meta"):
                assert [attention_shape(model, path) for path in attention_paths(model)] == shapes
            assert torch.equal(torch.random.get_rng_state(), state) and torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
    assert model.config._attn_implementation != RECORDER


def test_heads_are_read_before_their_gate(tmp_path):
    """Qwen 3.5 multiplies the heads by a gate before the output projection; fits need the heads themselves."""
    model = TINY_FAMILIES["qwen3_5"].build()
    module, inputs = model.model.layers[1].self_attn, TINY_FAMILIES["qwen3_5"].inputs(1, 6, 1)
    read, heads, gates = [], [], []
    module.o_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    module.q_proj.register_forward_hook(
        lambda _, __, out: gates.append(out.unflatten(-1, (4, 2, 8))[..., 1, :].flatten(-2))
    )
    with torch.no_grad():
        model(**inputs)
        with head_outputs_captured(module, heads), pytest.raises(StopForward):
            model(**inputs)
        assert torch.allclose(heads[0].flatten(2) * gates[0].sigmoid(), read[0])
        assert model(**inputs)[0].isfinite().all() and len(heads) == 1


def test_rotations():
    """Both layouts are complex products: (a + i b) e^{i x}."""
    angle = torch.tensor([0.3, 1.1])
    x = torch.randn(1, 1, 1, 6)
    for interleaved, order in ((False, [0, 2, 1, 3]), (True, [0, 1, 2, 3])):
        table = angle.repeat_interleave(2) if interleaved else angle.repeat(2)
        out = rotate(x, table.cos()[None, None, None], table.sin()[None, None, None], interleaved)
        pairs, turned = (torch.view_as_complex(t[0, 0, 0, :4][order].view(2, 2)) for t in (x, out))
        assert torch.allclose(turned, pairs * torch.polar(torch.ones(2), angle)) and torch.equal(
            out[..., 4:], x[..., 4:]
        )


def test_linears_are_judged_by_what_they_compute():
    from transformers.models.falcon.modeling_falcon import FalconLinear
    from transformers.models.llama4.modeling_llama4 import Llama4Router

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    router = Llama4Router(transformers.Llama4TextConfig(**EXPERTS))
    assert is_linear(FalconLinear(4, 3)) and is_linear(nn.Linear(4, 3))
    assert (
        not is_linear(router)
        and not is_linear(Doubled(4, 3))
        and not is_linear(nn.modules.linear.NonDynamicallyQuantizableLinear(4, 3))
    )


def test_a_matrix_loss_needs_a_described_family():
    with pytest.raises(
        SurgeryError, match="no architecture of 'granite', so it is not known which linear computes its values"
    ):
        require_architecture(TINY_FAMILIES["granite"].build())
