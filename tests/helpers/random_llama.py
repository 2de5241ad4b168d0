"""A random Llama, or a random Qwen3-MoE, of a real one's shape, written a tensor at a time, for measuring conversions.

python tests/helpers/random_llama.py OUT --shape 1b        also OUT-calibration.safetensors with 8,192 tokens
python tests/helpers/random_llama.py OUT --shape 30b-a3b --layers 1        one layer of a mixture of experts
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from surgery.checkpoint.safetensors_io import TensorSource, write_shard
from surgery.checkpoint.source import SAFE_WEIGHTS_INDEX_NAME
from surgery.core.files import write_json

# layers, width, MLP width, heads, key/value heads, vocabulary, tied
SHAPES = {
    "tiny": (2, 256, 512, 8, 4, 1000, True),
    "1b": (16, 2048, 8192, 32, 8, 128256, True),
    "7b": (32, 4096, 11008, 32, 32, 32000, False),
    "30b-a3b": (48, 2048, 6144, 32, 4, 151936, False),
}
EXPERTS = {"30b-a3b": (128, 8, 768)}  # experts, experts of a token, width of an expert; heads have 128 dimensions


def make_config(shape: str) -> dict:
    """Return the config of a shape."""
    layers, width, mlp, heads, groups, vocabulary, tied = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if shape in EXPERTS:
        experts, selected, inner = EXPERTS[shape]
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128}
        config |= {"num_experts": experts, "num_experts_per_tok": selected, "moe_intermediate_size": inner}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def layer_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a layer's tensors."""
    width, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    if "num_experts" not in config:
        return shapes
    inner = config["moe_intermediate_size"]
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")}
    for i in range(config["num_experts"]):
        shapes |= {f"mlp.experts.{i}.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes[f"mlp.experts.{i}.down_proj"] = (width, inner)
    norms = {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    return {**shapes, **norms, "mlp.gate": (config["num_experts"], width)}


def shard_shapes(config: dict) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield name -> shape for each shard: one per layer, one for the other tensors."""
    for i in range(config["num_hidden_layers"]):
        yield {f"model.layers.{i}.{name}.weight": shape for name, shape in layer_shapes(config).items()}
    table = (config["vocab_size"], config["hidden_size"])
    rest = {"model.embed_tokens.weight": table, "model.norm.weight": table[1:]}
    yield rest if config["tie_word_embeddings"] else {**rest, "lm_head.weight": table}


def write_checkpoint(
    out: Path, shape: str, tokens: int = 8192, length: int = 1024, seed: int = 0, layers: int = 0
) -> None:
    """Weights of variance 1/in with a spectrum that decays, as trained ones do; norms of one. layers: other
    than the shape's."""
    config = make_config(shape)
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    out.mkdir(parents=True)
    weight_map: dict[str, str] = {}

    def write(i: int, shapes: dict[str, tuple[int, ...]]) -> int:
        generator = torch.Generator().manual_seed(seed * 1000 + i)
        entries = [TensorSource.from_tensor(k, random_weight(s, generator)) for k, s in shapes.items()]
        write_shard(out / shard_name(i), entries)
        return sum(e.nbytes for e in entries)

    def shard_name(i: int) -> str:
        return f"model-{i + 1:05d}-of-{config['num_hidden_layers'] + 1:05d}.safetensors"

    every = list(shard_shapes(config))
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        total = sum(pool.map(write, range(len(every)), every))
    for i, shapes in enumerate(every):
        weight_map.update(dict.fromkeys(shapes, shard_name(i)))
    write_json(out / SAFE_WEIGHTS_INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config["vocab_size"], (tokens // length, length), generator=generator)
    write_shard(out.with_name(f"{out.name}-calibration.safetensors"), [TensorSource.from_tensor("input_ids", ids)])


def random_weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return a weight of variance 1/in with a decaying spectrum."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    weight = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)
    weight *= torch.linspace(2.0, 0.25, shape[1])
    return weight.to(torch.bfloat16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=0, help="other than the shape's")
    arguments = parser.parse_args()
    write_checkpoint(arguments.out, arguments.shape, arguments.tokens, layers=arguments.layers)
