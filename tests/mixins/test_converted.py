"""transformers' own ModelTesterMixin and GenerationTesterMixin over converted models: llama and qwen3, six recipes.

`make test-mixins` fetches the mixins and runs this file; without them it is skipped. Every class of a run converts
itself as it is made from a config, and is otherwise the library's class. A test that fails is listed in EXPECTED with
its reason; any other failure is a defect. One run takes about half a minute of one core, a minute with the tests of
generation, which need a checkout (see fetch.py). `python tests/mixins/table.py` makes a table of the
results, which docs/models.md sums up.
"""

from __future__ import annotations

import copy
import sys
import unittest
from typing import Any

import pytest
import torch
import transformers
from helpers.small import DECODER

import surgery
from mixins.fetch import FOLDER
from surgery.core.progress import Progress
from surgery.modeling.cache import CACHE_NAME
from surgery.modeling.generation import MixerGenerationMixin
from surgery.planning.recipe import load_recipe

sys.path.insert(0, str(FOLDER))
pytest.importorskip("parameterized")
ModelTesterMixin = pytest.importorskip("transformers_mixins.test_modeling_common").ModelTesterMixin
GenerationTesterMixin = pytest.importorskip("transformers_mixins.generation.test_utils").GenerationTesterMixin

pytestmark = pytest.mark.slow
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaModel", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3Model", "Qwen3ForCausalLM"),
}
RECIPES = ("low-rank-half", "btt-half", "monarch-half", "mlr-cache-60", "gated-deltanet", "log-linear")
MIXERS = ("mlr-cache-60", "gated-deltanet", "log-linear")
NO_WEIGHTS = "a mixer has no attention weights, so its entry of `attentions` is None, and the test reads a tensor there"
NO_KEYS = "a mixer's layer of the cache holds a state instead of keys and values, whose shapes the test reads"
STRUCTURES = tuple(recipe for recipe in RECIPES if recipe not in MIXERS)
GENERATED_WEIGHTS = (  # tests of GenerationTesterMixin that ask for attention weights
    "test_greedy_generate_dict_outputs",
    "test_greedy_generate_dict_outputs_use_cache",
    "test_sample_generate_dict_output",
    "test_beam_search_generate_dict_output",
    "test_beam_search_generate_dict_outputs_use_cache",
    "test_beam_sample_generate_dict_output",
    "test_generate_compilation_all_outputs",
    "test_assisted_decoding_matches_greedy_search_0_random",
    "test_assisted_decoding_matches_greedy_search_1_same",
    "test_assisted_decoding_sample",
)
# Test -> (recipes with which it fails, reason).
EXPECTED: dict[str, tuple[tuple[str, ...], str]] = {
    "test_from_pretrained_no_checkpoint": (
        RECIPES,
        "it gives from_pretrained the converted model's state dict with the config from before the conversion, which "
        "has no table",
    ),
    "test_model_weights_reload_no_missing_tied_weights": (
        RECIPES,
        "it expects random weights for missing tensors; a converted checkpoint without its tensors is refused",
    ),
    "test_can_init_all_missing_weights": (
        RECIPES,
        "it compares with a model that from_pretrained makes from the config from before the conversion, which is not "
        "converted (skipped for llama)",
    ),
    "test_sliding_window_mask": (MIXERS, f"{NO_WEIGHTS} (skipped for llama)"),
    "test_attention_outputs": (MIXERS, NO_WEIGHTS),
    "test_retain_grad_hidden_states_attentions": (MIXERS, NO_WEIGHTS),
    "test_init_weights_can_init_buffers": (
        ("mlr-cache-60",),
        "it compares with a model made from a config without values, which the classes of this file cannot convert: "
        "mixers' buffers are missing",
    ),
    "test_sdpa_can_dispatch_non_composite_models": (
        ("mlr-cache-60",),
        "it reads `config._attn_implementation` of modules named ..Attention; the config of MLRAttention is the "
        "mixer's own",
    ),
    **dict.fromkeys(GENERATED_WEIGHTS, (MIXERS, NO_WEIGHTS)),
    "test_past_key_values_format": (MIXERS, NO_KEYS),
    "test_custom_4d_attention_mask": (
        ("gated-deltanet", "log-linear"),
        "it gives a mask that is not causal, for which linear attention has no state; an error says so",
    ),
    "test_inherits_generation_mixin": (
        STRUCTURES,
        "it reads the direct bases of the model's class, which in this file is a subclass of the library's",
    ),
}


# Tests of GenerationTesterMixin that compare a static cache with a dynamic one after they have read the shapes of keys
# and values, or asked for a compiled step, neither of which mixers have: what they compare would stay untested behind
# an expected failure. These take their place.
def static_cache_cases(self):
    """Yield (model, ids, mask) of every class that generates: a batch, with and without padding on the left, and one
    row.
    """
    for cls in self.all_model_classes:
        if issubclass(cls, transformers.GenerationMixin):
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model, ids, mask = cls(config).eval(), inputs["input_ids"], inputs["attention_mask"]
            padded = mask.clone()
            padded[1, :3] = 0
            for rows, its in ((ids, mask), (ids, padded), (ids[:1], mask[:1])):
                yield model, rows, its


def generate_both(model, static=None, **inputs):
    """Return the results of generate() with a static cache and with a dynamic one."""
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**inputs, **options, cache_implementation="static", **(static or {}))
    return found, model.generate(**inputs, **options)


def assert_same(self, found, expected):
    self.assertTrue(torch.equal(found.sequences, expected.sequences))
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def generate_with_static_cache(self):
    for model, ids, mask in static_cache_cases(self):
        found, expected = generate_both(model, input_ids=ids, attention_mask=mask)
        cache = found[CACHE_NAME]
        self.assertIsInstance(cache, transformers.StaticCache)
        self.assertEqual(len(cache.layers), model.config.num_hidden_layers)
        self.assertEqual(int(cache.get_seq_length()), ids.shape[1] + 19)
        assert_same(self, found, expected)


def generate_from_inputs_embeds_with_static_cache(self):
    for model, ids, mask in static_cache_cases(self):
        embeds = model.get_input_embeddings()(ids)
        found, expected = generate_both(model, inputs_embeds=embeds, attention_mask=mask)
        assert_same(self, found, expected)


def generate_compile_model_forward_fullgraph(self):
    """A compiled step is asked for and is not used."""
    asked = transformers.CompileConfig()
    asked._compile_all_devices = True
    for model, ids, mask in static_cache_cases(self):
        with pytest.warns(UserWarning, match="compile_config is not used"):
            found, expected = generate_both(model, {"compile_config": asked}, input_ids=ids, attention_mask=mask)
        self.assertFalse(hasattr(model, "_compiled_call"))
        assert_same(self, found, expected)


def static_cache_no_recompile_with_smaller_length(self):
    """Later static caches of a model are as long as its longest one so far."""
    for model, ids, mask in static_cache_cases(self):
        for tokens in (ids.shape[1], 3):
            found, expected = generate_both(model, input_ids=ids[:, :tokens], attention_mask=mask[:, :tokens])
            assert_same(self, found, expected)


IN_PLACE = (
    generate_with_static_cache,
    generate_from_inputs_embeds_with_static_cache,
    generate_compile_model_forward_fullgraph,
    static_cache_no_recompile_with_smaller_length,
)


def converting(cls: type, recipe: str) -> type:
    """Return a class of the same name whose instances are converted without calibration text when they are made from a
    config.
    """

    def __init__(self, config, *args, **kwargs):
        if torch.empty(0).is_meta:  # from_pretrained: surgery's quantizer replaces the modules
            cls.__init__(self, config, *args, **kwargs)
            return
        config = copy.deepcopy(config)
        if hasattr(config, "quantization_config"):  # of a model that was made from this config before
            del config.quantization_config
        cls.__init__(self, config, *args, **kwargs)
        self.__class__ = cls  # the conversion makes a copy of the class without weights
        surgery.apply(self, load_recipe(recipe, ["calibration=null"]), progress=Progress())
        self.__class__ = made

    generates = issubclass(cls, transformers.GenerationMixin)
    bases = (
        (MixerGenerationMixin, cls) if generates and recipe in MIXERS else (cls,)
    )  # as the class of a converted model
    made: Any = type(cls.__name__, bases, {"__init__": __init__, "__module__": cls.__module__})
    return made


class ModelTester:
    """What the mixin asks of a model: its config and inputs."""

    batch_size, seq_length, is_training = 4, 7, True
    num_hidden_layers, hidden_size, num_attention_heads = 2, DECODER["hidden_size"], DECODER["num_attention_heads"]

    def __init__(self, config: str):
        self.config = config

    def get_config(self):
        return getattr(transformers, self.config)(**DECODER)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, DECODER["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def case(family: str, recipe: str) -> type:
    """Return the TestCase of one run."""
    config, *classes = FAMILIES[family]

    def setUp(self):
        self.model_tester = ModelTester(config)

    models = tuple(converting(getattr(transformers, name), recipe) for name in classes)
    made = type(
        f"{family}_{recipe}",
        (ModelTesterMixin, GenerationTesterMixin, unittest.TestCase),
        {"setUp": setUp, "all_model_classes": models},
    )
    if recipe in MIXERS:
        for test in IN_PLACE:
            setattr(made, f"test_{test.__name__}", test)
    for name, (recipes, reason) in EXPECTED.items():
        if recipe in recipes and hasattr(made, name):
            setattr(made, name, pytest.mark.xfail(reason=reason, strict=True)(getattr(made, name)))
    return made


for _family in FAMILIES:
    for _recipe in RECIPES:
        globals()[f"Test_{_family}_{_recipe.replace('-', '_')}"] = case(_family, _recipe)
