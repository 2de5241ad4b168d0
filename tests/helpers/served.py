"""Small checkpoints for servers, and what transformers generates from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surgery.planning.recipe import load_recipe, validate_recipe

WIDTH, HEADS, GROUPS, HEAD, MLP, LAYERS, VOCABULARY = 128, 4, 2, 32, 256, 3, 160
# Gated DeltaNet with a window in two of three layers, softmax in the other, and BTT linears
HYBRID = {
    "structure": "btt",
    "blocks": [4, 4],
    "attention": {
        "mixer": "linear",
        "mask": "gates",
        "scores": "delta",
        "output_gate": "value",
        "window": 16,
        "sinks": 4,
        "hybrid": {"softmax": 0.34, "choose_by": "every"},
    },
}


def random_checkpoint(folder: Path, family: str = "llama", **changes) -> Path:
    """Write a random float32 model of a family whose layers change the next token, with a tokenizer of single
    characters.
    """
    import transformers as t

    sizes = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"num_key_value_heads": GROUPS, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    sizes |= {"head_dim": HEAD} if family not in ("gpt_neox", "qwen2", "phi3") else {}
    sizes |= {"logits_scaling": 4.0} if family == "granite" else {}
    config_class, model_class = {
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
        "mistral": (t.MistralConfig, t.MistralForCausalLM),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM),
        "gemma2": (t.Gemma2Config, t.Gemma2ForCausalLM),
        "granite": (t.GraniteConfig, t.GraniteForCausalLM),
        "phi3": (t.Phi3Config, t.Phi3ForCausalLM),
        "gpt_neox": (t.GPTNeoXConfig, t.GPTNeoXForCausalLM),
    }[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0 if "embed" in name else 4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that maps each of the first characters behind the special tokens to a number."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(chr(32 + n) for n in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def converted(source: Path, out: Path, **recipe) -> Path:
    """Convert a checkpoint without calibration text, by a recipe given as keywords."""
    from surgery.conversion.convert import convert

    convert(str(source), validate_recipe(recipe, "test"), out)
    return out


def attention_of_recipe(name: str) -> dict[str, Any]:
    """Return the attention of a shipped recipe, with a smaller window and block, so that short prompts leave them."""
    keys = load_recipe(name, []).attention.model_dump(exclude_unset=True)
    keys |= {"window": 16} if keys.get("window") else {}
    if isinstance(keys.get("mask"), dict) and keys["mask"].get("block", 1) > 1:
        keys["mask"] = {**keys["mask"], "block": 32}
    return keys


def quantized(source: Path, out: Path, bits: int, format: str = "int") -> Path:
    """Store the linears of a converted checkpoint as integers, or in FP8."""
    from surgery.conversion.quantize_checkpoint import quantize

    quantize(str(source), out, bits, format=format)
    return out


def ragged_prompts(count: int = 8, shared: int = 0, longest: int = 120) -> list[list[int]]:
    """Return prompts of 6 to `longest` tokens behind `shared` equal ones."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.linspace(6, longest, count).int().tolist()
    first = torch.randint(4, VOCABULARY, (shared,), generator=generator).tolist()
    return [first + torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def expected(folder: Path, prompts: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
    """Return what transformers generates greedily for each prompt alone, in float32: (tokens, their log
    probabilities).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        new = out.sequences[0, len(prompt) :].tolist()
        scores = [step[0].float().log_softmax(-1)[token].item() for step, token in zip(out.logits, new)]
        found.append((new, scores))
    return found


def lora_adapter(folder: Path, out: Path, targets: tuple[str, ...], rank: int = 8) -> Path:
    """Write a random LoRA adapter of the linears of these names in a Llama."""
    import json

    from safetensors.torch import save_file

    sizes = {"q_proj": (WIDTH, HEADS * HEAD), "k_proj": (WIDTH, GROUPS * HEAD), "v_proj": (WIDTH, GROUPS * HEAD)}
    sizes |= {"o_proj": (HEADS * HEAD, WIDTH), "gate_proj": (WIDTH, MLP), "down_proj": (MLP, WIDTH)}
    generator, tensors = torch.Generator().manual_seed(5), {}
    for layer in range(LAYERS):
        for name in targets:
            path = f"model.layers.{layer}.{'mlp' if name in ('gate_proj', 'down_proj') else 'self_attn'}.{name}"
            inputs, outputs = sizes[name]
            shapes = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
            for factor, shape in shapes.items():
                tensor = 0.2 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{path}.{factor}.weight"] = tensor
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0}
    config |= {"target_modules": list(targets), "bias": "none", "base_model_name_or_path": str(folder)}
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def expected_with_adapter(folder: Path, adapter: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Return the greedy tokens of a converted model whose linears get the products of an adapter of equal rank and alpha."""
    from functools import partial

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    def add(a_RI: torch.Tensor, b_OR: torch.Tensor, module: Any, args: tuple[torch.Tensor, ...], y: torch.Tensor):
        return y + args[0] @ a_RI.T @ b_OR.T

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    factors = load_file(adapter / "adapter_model.safetensors")
    for name, a_RI in factors.items():
        if ".lora_A." in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b_OR = factors[name.replace("lora_A", "lora_B")]
            model.get_submodule(path).register_forward_hook(partial(add, a_RI, b_OR))
    found = []
    for prompt in prompts:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(out[0, len(prompt) :].tolist())
    return found
