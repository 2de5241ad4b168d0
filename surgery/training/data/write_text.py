"""Let a teacher write its own training text (`--data generated`).

A base model samples rows of `length` tokens from the start of a document; a row goes on with the next document, as
windows of text do. A chat model samples a user's turn after the beginning of one in its template, then the answer. Xu
et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing" (arXiv 2406.08464).
On such text the teacher's logits are those that the text was drawn from: Liu et al. 2023, "LLM-QAT: Data-Free
Quantization Aware Training" (arXiv 2305.17888).

Batch n is a function of the settings and n, and is written as shard n at once. An interrupted text therefore goes on
with equal tokens, and several processes write every other batch each. They wait for each other's files, not in a
collective operation, whose time would run out.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from surgery.architectures.positions import longest_input
from surgery.calibration.data import document_tokens, end_token, load_tokenizer
from surgery.calibration.sampling import sample_continuations
from surgery.checkpoint.safetensors_io import TensorSource, write_shard
from surgery.checkpoint.source import open_checkpoint
from surgery.core.device import choose_device
from surgery.core.digests import file_digest
from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write
from surgery.core.progress import Progress
from surgery.training.data.readers import derive_seed
from surgery.training.data.recipe import GeneratedText
from surgery.training.data.teacher_text import (
    INDEX_NAME,
    SHARD_NAME,
    TextIndex,
    TextSettings,
    TextShard,
    check_shard,
    is_teacher_text,
    read_index,
)
from surgery.training.data.tokenize import tokenizer_fingerprint

CACHE_BYTES = {"cpu": 2**28, "cuda": 2**34}  # of keys and values of the rows that are sampled together
MAX_ROWS = 512  # sampled together
USER_TOKENS = 512  # of a user's turn at most, and at most half of a conversation
WAIT_SECONDS = 4 * 3600.0  # for a batch of another process

# prompts of token ids, new tokens at most, seed, tokens that end a row -> new tokens of each row, its last one included
Sampler = Callable[[list[list[int]], int, int, list[int]], list[list[int]]]


def write_teacher_text(
    folder: Path,
    teacher: str,
    config: GeneratedText,
    tokens: int,
    length: int,
    *,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write text of the teacher to `folder`, or finish it; do nothing if it is complete.

    tokens, length: used where the config names none. Every process of a run calls this function. Raises SurgeryError if
    the folder holds text of other settings or something else, or if the teacher cannot write.
    """
    rank = int(os.environ.get("RANK", "0"))
    progress = progress if progress is not None and rank == 0 else Progress()
    source = open_checkpoint(teacher, trust_remote_code)
    tokenizer = load_tokenizer(source.folder, trust_remote_code)
    settings = TextSettings(
        teacher_digest=source.weights_digest(),
        tokens=config.tokens or tokens,
        length=config.length or length,
        temperature=config.temperature,
        seed=config.seed,
        chat=config.chat if config.chat is not None else bool(tokenizer.chat_template),
    )
    begun = read_index(folder) if is_teacher_text(folder) else None
    if begun is not None:
        _check_settings(folder, begun, settings)
        if begun.shards:
            return
    elif rank == 0 and folder.exists() and any(folder.iterdir()):
        raise SurgeryError(f"{folder} is no folder of a teacher's text. Give another path to the generated source.")
    compose = _conversations(tokenizer, settings, teacher) if settings.chat else _documents(tokenizer, settings)
    local = os.environ.get("LOCAL_RANK") if device is None and torch.cuda.is_available() else None
    target = choose_device(f"cuda:{local}" if local else device)
    engine = _choose_engine(config.engine if begun is None else begun.engine, target)
    progress.say(f"writing {settings.tokens:,} tokens of text with {teacher} ({engine}) to {folder}")
    sampler, model_config = _open_sampler(engine, source, settings, target, trust_remote_code)
    if begun is None and rank == 0:
        rows = _rows_together(model_config, settings, target.type)
        vocabulary, fingerprint = model_config.vocab_size, tokenizer_fingerprint(tokenizer)
        begun = TextIndex(
            teacher=teacher, settings=settings, rows=rows, engine=engine, vocabulary=vocabulary, tokenizer=fingerprint
        )
        folder.mkdir(parents=True, exist_ok=True)
        _write_index(folder, begun)
    _wait_for(folder / INDEX_NAME)
    index = read_index(folder)
    compose_batch = partial(compose, sampler, index.rows)
    try:
        shards = _write_shards(folder, index, compose_batch, progress)
    except torch.OutOfMemoryError:
        raise SurgeryError(
            f"generated: {teacher} and the keys of {index.rows} rows of {settings.length} tokens do not fit on "
            f"{target}. Remove {folder} and set a smaller length."
        ) from None
    if rank == 0:
        _write_index(folder, index.model_copy(update={"shards": shards}))
    del sampler, compose_batch
    if target.type == "cuda":  # the teacher's weights, its cache, and the graphs of the compiled step
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _write_shards(
    folder: Path, index: TextIndex, compose: Callable[[int], list[list[int]]], progress: Progress
) -> list[TextShard]:
    """Write the missing batches, each process every other one, and return the shards that have the asked tokens."""
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shards: list[TextShard] = []
    written, asked = 0, index.settings.tokens
    with progress.bar("sampling training text", asked) as tick:
        while written < asked:
            first = len(shards)
            _write_batch(folder, first + rank, index, compose)
            for number in range(first, first + processes):
                path = folder / SHARD_NAME.format(number)
                _wait_for(path)
                ids, lengths = check_shard(path)
                if written < asked:
                    sha256 = file_digest(path)
                    shards.append(TextShard(file=path.name, documents=lengths.numel, tokens=ids.numel, sha256=sha256))
                    tick(min(ids.numel, asked - written))
                    written += ids.numel
    return shards


def _check_settings(folder: Path, index: TextIndex, settings: TextSettings) -> None:
    had, asked = index.settings.model_dump(), settings.model_dump()
    if different := [name for name in asked if had[name] != asked[name]]:
        name = different[0]
        raise SurgeryError(
            f"{folder} holds text of other settings ({name} is {had[name]}, asked for is {asked[name]}). Remove it to "
            "write the text again, give another path, or read it as it is with --data " + str(folder)
        )


def _write_batch(folder: Path, number: int, index: TextIndex, compose: Callable[[int], list[list[int]]]) -> None:
    path = folder / SHARD_NAME.format(number)
    if path.is_file():
        try:
            check_shard(path)
            return
        except SurgeryError:
            path.unlink()
    documents = compose(derive_seed(index.settings.seed, "teacher text", number))
    ids = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
    lengths = torch.tensor([len(document) for document in documents], dtype=torch.int32)
    write_shard(path, [TensorSource.from_tensor("ids", ids), TensorSource.from_tensor("lengths", lengths)])


def _write_index(folder: Path, index: TextIndex) -> None:
    with atomic_write(folder / INDEX_NAME, "w") as file:
        json.dump(index.model_dump(), file, indent=1)


def _wait_for(path: Path) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not path.is_file():
        if time.monotonic() > until:
            raise SurgeryError(
                f"{path}: no process wrote it within {WAIT_SECONDS:,.0f} seconds. All must see the folder."
            )
        time.sleep(0.05)


# -- documents and conversations -------------------------------------------------------------------
def _documents(tokenizer: Any, settings: TextSettings) -> Callable[[Sampler, int, int], list[list[int]]]:
    """Return a function that samples rows of `length` tokens from the start of a document."""
    before, _ = document_tokens(tokenizer)
    start = before or [token for token in (tokenizer.bos_token_id, end_token(tokenizer)) if token is not None][:1]
    if not start:
        raise SurgeryError("generated text begins with the token that begins documents, and the tokenizer has none")

    def compose(sampler: Sampler, rows: int, seed: int) -> list[list[int]]:
        new = sampler([start] * rows, settings.length - len(start), seed, [])
        return [[*start, *row] for row in new]

    return compose


TURN = "\u2063turn\u2063"  # stands for the text of a turn, to find what the template writes around it


def _conversations(
    tokenizer: Any, settings: TextSettings, teacher: str
) -> Callable[[Sampler, int, int], list[list[int]]]:
    """Return a function that samples conversations of one turn each and an answer, at most `length` tokens long."""
    try:
        messages = [{"role": "user", "content": TURN}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template can raise any exception
        raise SurgeryError(
            f"{teacher}: its chat template writes no user turn ({' '.join(str(error).split())[:160]}). Set "
            "generated: {chat: false} to write documents"
        ) from None
    if text.count(TURN) != 1:
        raise SurgeryError(
            f"{teacher}: its chat template changes the text of a user turn. Set generated: {{chat: false}} to write "
            "documents"
        )
    prefix, between = (
        tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in text.split(TURN)
    )
    stops = sorted({*between[:1], *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])})
    room = settings.length - len(prefix) - len(between)
    user = min(USER_TOKENS, room // 2)
    if user < 1:
        raise SurgeryError(
            f"generated: length must leave room for a turn and an answer beside {len(prefix) + len(between)} tokens of "
            f"the chat template (got {settings.length}). Set a larger length."
        )

    def compose(sampler: Sampler, rows: int, seed: int) -> list[list[int]]:
        turns = sampler([prefix] * rows, user, derive_seed(seed, "user"), stops)
        turns = [turn[:-1] if turn[-1:] and turn[-1] in stops else turn for turn in turns]
        prompts = [[*prefix, *turn, *between] for turn in turns]
        answers = sampler(prompts, room - max(map(len, turns)), derive_seed(seed, "answer"), stops)
        return [[*prompt, *answer] for prompt, answer in zip(prompts, answers)]

    return compose


# -- engines ---------------------------------------------------------------------------------------
def _choose_engine(name: str, device: torch.device) -> Any:
    installed = importlib.util.find_spec("vllm") is not None
    if name == "vllm" and not installed:
        raise SurgeryError("generated: engine vllm is not installed. Install vllm, or set engine: transformers.")
    return name if name != "auto" else "vllm" if installed and device.type == "cuda" else "transformers"


def _rows_together(config: Any, settings: TextSettings, device: str) -> int:
    """Return how many rows are sampled together: as many as CACHE_BYTES of keys and values hold, all with text of few
    tokens.
    """
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width *= getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    row = 2 * config.num_hidden_layers * width * (4 if device == "cpu" else 2) * settings.length
    needed = -(-settings.tokens // settings.length)
    return int(max(1, min(MAX_ROWS, needed, CACHE_BYTES.get(device, CACHE_BYTES["cpu"]) // row)))


def _open_sampler(
    engine: str, source: Any, settings: TextSettings, device: torch.device, trust: bool
) -> tuple[Sampler, Any]:
    """Return a function that continues prompts, and the config of the text model."""
    if engine == "vllm":
        return _vllm_sampler(source, settings, trust)
    from surgery.training.models import load_causal_lm

    model = load_causal_lm(source, torch.float32 if device.type == "cpu" else torch.bfloat16, trust)
    limit = longest_input(model)
    if limit is not None and settings.length > limit:
        raise SurgeryError(f"generated: length must be at most {limit}, the teacher's longest (got {settings.length}).")
    model = model.to(device).eval().requires_grad_(False)

    def sample(prompts: list[list[int]], new: int, seed: int, stops: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids_NP = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask_NP = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows_NT = sample_continuations(
            model, ids_NP, new, seed, temperature=settings.temperature, mask_NP=mask_NP, stops=stops,
            static=device.type == "cuda" and not stops,
        )  # fmt: skip
        return [_until(row, stops) for row in rows_NT[:, longest:].tolist()]

    return sample, model.config.get_text_config()


def _until(row: list[int], stops: list[int]) -> list[int]:
    """Return a row up to its first stop, which is included."""
    ends = (i + 1 for i, token in enumerate(row) if token in stops)
    return row[: next(ends, len(row))]


def _vllm_sampler(source: Any, settings: TextSettings, trust: bool) -> tuple[Sampler, Any]:
    import vllm

    engine: Any = vllm
    model = engine.LLM(
        model=str(source.folder), max_model_len=settings.length, trust_remote_code=trust, gpu_memory_utilization=0.8
    )

    def sample(prompts: list[list[int]], new: int, seed: int, stops: list[int]) -> list[list[int]]:
        params = [
            engine.SamplingParams(
                temperature=settings.temperature, top_p=1.0, top_k=-1, max_tokens=new, ignore_eos=not stops,
                min_tokens=0 if stops else new, stop_token_ids=stops or None, seed=derive_seed(seed, row) % 2**63,
                detokenize=False,
            )
            for row in range(len(prompts))
        ]  # fmt: skip
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [_until(list(out.outputs[0].token_ids), stops) for out in model.generate(asked, params, use_tqdm=False)]

    return sample, model.llm_engine.model_config.hf_text_config
