"""Tiny GGUF files, written with the package gguf."""

from __future__ import annotations

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

DIM, INNER, VOCAB, HEADS, KV_HEADS = 64, 128, 300, 4, 2


def write_gguf(gguf, path, kind="Q8_0", layers=1, values=None, rope_divisors=None, skip=(), **metadata):
    """Write a Llama with four heads, its linears in a ggml type, and a tokenizer of bytes.

    Returns the values of its tensors.

    values: tensor name -> array, instead of random ones. skip: names of tensors to leave out. metadata: further
    entries, a dot in a key written as __.
    """
    writer, generator = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    for add, value in (
        (writer.add_name, "../a stranger's <b>word</b>"),
        (writer.add_block_count, layers), (writer.add_context_length, 64), (writer.add_embedding_length, DIM), (writer.add_feed_forward_length, INNER),
        (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS), (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_freq_base, 1e4),
        (writer.add_rope_dimension_count, DIM // HEADS), (writer.add_bos_token_id, 0), (writer.add_eos_token_id, 0), (writer.add_tokenizer_model, "gpt2"),
    ):  # fmt: skip
        add(value)
    writer.add_vocab_size(metadata.pop("vocab_size", VOCAB))
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key.replace("__", "."), value)
    tokens = ["<|end|>", *bytes_to_unicode().values(), "ab"]
    writer.add_token_list([*tokens, *(f"<|{i}|>" for i in range(VOCAB - len(tokens)))])
    writer.add_token_types([3, *[1] * (VOCAB - 1)])
    writer.add_token_merges(["a b"])
    half = DIM * KV_HEADS // HEADS
    linears = {"attn_q": (DIM, DIM), "attn_k": (half, DIM), "attn_v": (half, DIM), "attn_output": (DIM, DIM)}
    linears |= {"ffn_gate": (INNER, DIM), "ffn_up": (INNER, DIM), "ffn_down": (DIM, INNER)}
    shapes = {"token_embd": (VOCAB, DIM), "output": (VOCAB, DIM)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(layers) for name, shape in linears.items()}
    written = {}
    for name, shape in shapes.items():
        drawn = 0.1 * generator.standard_normal(shape).astype(np.float32)
        stored = (values or {}).get(name, drawn)
        if name not in skip:
            number = gguf.GGMLQuantizationType[kind]
            data = gguf.quantize(stored, number)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=number)
            written[name] = gguf.dequantize(data, number)
    norms = ("output_norm", *(f"blk.{layer}.{name}" for layer in range(layers) for name in ("attn_norm", "ffn_norm")))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(DIM, np.float32))
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written
