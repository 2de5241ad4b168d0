"""`surgery bench vllm`: prefill and decoding inside vLLM, of a model and its conversions.

Each model runs in processes of its own, one after another: in every round all models take turns, so that other load and
the card's temperature affect all of them. A process starts `vllm.LLM` and measures every cell (prompt tokens, batch):

    prefill = seconds until every prompt has its first token, the median of three calls with one new token each
    decode = seconds of a step of the whole batch: mean over the steps after every prompt has its first token and before
             the first request ends

Prefill is not subtracted from a longer call: for 16 prompts of 8K tokens its noise is larger than all decoding.
Greedy, on random prompts given as token ids, without tokenizer, end of text and prefix caching. Each call is made once
before it is timed. Shown are medians and ranges over the rounds.

Without --model the models are a Llama with random weights, of 1B parameters on a GPU, and conversions of it, written to a
temporary folder: the time of a step does not depend on the weights. With --sizes 8b they are the shape of Llama 3 8B and
`fast-half` of it, each a folder with config.json alone, whose weights vLLM draws itself (`load_format="dummy"`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.progress import Progress
from surgery.core.project import install_command
from surgery.eval.speed.model import SHAPES
from surgery.eval.speed.selection import is_selected
from surgery.vllm.versions import installed_version, version_problem

if TYPE_CHECKING:
    from surgery.planning.recipe import ConversionRecipe

KIND = "vllm"
ROUNDS = {"full": 3, "main": 3, "8b": 2, "small": 1}
CELLS = {  # (prompt tokens, batch)
    "full": [*((length, batch) for length in (2048, 8192) for batch in (1, 16, 64)), (32768, 1), (32768, 8)],
    "main": [(2048, 1), (2048, 16), (2048, 64), (8192, 16)],
    "8b": [(2048, 1), (2048, 16), (2048, 64)],
    "small": [(64, 1), (64, 4)],
}
SHAPES_HERE = {**SHAPES, "small": {**SHAPES["small"], "head_dim": 32}}  # vLLM's attention on a CPU needs 32 dims
SHAPES_HERE["8b"] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
NEW_TOKENS = {"full": 128, "main": 128, "8b": 128, "small": 16}
LARGEST_BATCH, STEP_TOKENS, MEMORY_SHARE = 64, 8192, 0.85
PREFILLS, WARM_TOKENS = 3, 9  # timed calls with one new token; new tokens of the call before decoding is timed
ORIGINAL = "original"
RECIPES: dict[str, dict[str, Any]] = {  # of random models: keys that take the place of a recipe's, which need a text
    "fast-half": {"tune": None},
    "gated-deltanet": {},
    "hybrid-25": {"hybrid": {"softmax": 0.25, "choose_by": "every"}},
    "log-linear": {},
}
CONFIG_ONLY = {"8b": ("fast-half",)}  # sizes whose models are a config.json alone, and their recipes
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
WORKER = "import sys; from surgery.eval.speed.vllm_engines import run_worker; run_worker(sys.argv[1])"
RESULT = "surgery-bench-vllm:"  # begins the line of a worker's output that holds its result


def bench_vllm(
    models: str | None = None,
    sizes: str | None = None,
    *,
    only: str | None = None,
    dtype: str | None = None,
    out: Path | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure models inside vLLM. Return JSON data, written to `out` after every process.

    Args:
        models: local folders of checkpoints, separated by commas; the first is what the others are compared with. None:
            random weights.
        sizes: full, main, 8b or small: prompts and batches, and the shape of random models; None: full on a GPU, else
            small.
        only: comma-separated words; only models whose name contains one of them. The first model always runs.
        dtype: bfloat16, float16 or float32; None: bfloat16 on a GPU, else float32.
        out: JSON file. time_limit: seconds after which no further process starts. progress: progress display. command:
            the command line's arguments, recorded in the result.
    """
    from surgery.eval.speed.run import DTYPES, check_result_file, describe_environment, save_result

    check_result_file(out)
    gpu = torch.cuda.is_available()
    sizes, dtype = sizes or ("full" if gpu else "small"), dtype or ("bfloat16" if gpu else "float32")
    for what, choice, valid in (("--sizes", sizes, tuple(CELLS)), ("--dtype", dtype, DTYPES)):
        if choice not in valid:
            raise SurgeryError(f"{what} {choice!r} is not one of {', '.join(valid)}{suggestion(choice, valid)}")
    if models is not None and sizes in CONFIG_ONLY:
        raise SurgeryError(
            f"--sizes {sizes} has models of its own, without weights (got --model {models}). Leave one of the two out"
        )
    names = given_names(models, sizes)
    if not any(is_selected(name, only) for name in names):
        raise SurgeryError(f"--only {only} names no model of this benchmark. There are {', '.join(names)}")
    found = installed_version()
    missing = found is None and find_spec("vllm") is None
    problem = f"it is not installed ({install_command('vllm')})" if missing else version_problem(found)
    if problem is not None:
        raise SurgeryError(f"bench vllm measures inside vLLM, which cannot be used here: {problem}")
    progress, started = progress or Progress(), time.monotonic()
    result: dict[str, Any] = {"kind": KIND, "sizes": sizes, "dtype": dtype, "new_tokens": NEW_TOKENS[sizes]}
    result |= describe_environment(torch.device("cuda" if gpu else "cpu"), command)
    result |= {"rounds": ROUNDS[sizes], "engines": {}, "rows": [], "complete": False}
    with tempfile.TemporaryDirectory(prefix="surgery-bench-vllm-") as scratch:
        folders = _chosen_folders(models, sizes, only, dtype, Path(scratch), progress)
        for number, name in ((n, name) for n in range(ROUNDS[sizes]) for name in folders):
            if time_limit is not None and time.monotonic() - started > time_limit:
                break
            rows, about = _run_process(folders[name], sizes, dtype)
            result["engines"][name] = about
            result["rows"] += [{"model": name, "round": number, **row} for row in rows]
            progress.say(f"round {number + 1} of {ROUNDS[sizes]}: {name}")
            if out is not None:
                save_result(out, result)
        else:
            result["complete"] = True
    result["seconds"] = round(time.monotonic() - started, 1)
    if out is not None:
        save_result(out, result)
    return result


def _chosen_folders(
    models: str | None, sizes: str, only: str | None, dtype: str, scratch: Path, progress: Progress
) -> dict[str, Path]:
    """Return name -> folder of the models that are measured, the first one included."""
    given = {} if models is None else {Path(name).name: Path(name) for name in models.split(",")}
    for name, folder in given.items():
        if not (folder / "config.json").is_file():
            raise SurgeryError(f"--model: {folder} is no checkpoint ({name}: there is no config.json in it)")
    names = given_names(models, sizes)
    chosen = [name for n, name in enumerate(names) if n == 0 or is_selected(name, only)]
    if given:
        return {name: given[name] for name in chosen}
    if sizes in CONFIG_ONLY:
        return write_config_only_models(chosen, SHAPES_HERE[sizes], dtype, scratch)
    return write_random_models(chosen, sizes, dtype, scratch, progress)


def given_names(models: str | None, sizes: str) -> list[str]:
    """Return the names of all models of the benchmark, the one that the others are compared with first."""
    if models is not None:
        return list(dict.fromkeys(Path(name).name for name in models.split(",")))
    return [ORIGINAL, *CONFIG_ONLY.get(sizes, RECIPES)]


def write_random_models(
    names: Sequence[str], sizes: str, dtype: str, folder: Path, progress: Progress | None = None
) -> dict[str, Path]:
    """Write a Llama with random weights and its conversions by the recipes of that name; return their folders."""
    from surgery.conversion.convert import convert
    from surgery.eval.speed.model import make_llama

    torch.manual_seed(0)
    folders = {ORIGINAL: folder / ORIGINAL}
    make_llama(SHAPES_HERE[sizes], "cpu", getattr(torch, dtype)).save_pretrained(folders[ORIGINAL])
    for name in names:
        if name == ORIGINAL:
            continue
        folders[name] = folder / name
        convert(str(folders[ORIGINAL]), recipe_without_text(name), folders[name], progress=progress)
    return folders


def recipe_without_text(name: str) -> ConversionRecipe:
    """Return the recipe of that name, without what needs a calibration text."""
    from surgery.planning.recipe import load_recipe, validate_recipe

    keys = load_recipe(name, []).model_dump(exclude_unset=True)
    changed = RECIPES[name]
    if "hybrid" in changed:
        keys["attention"] = {**keys["attention"], **changed}
    else:
        keys |= changed
    return validate_recipe(keys, name)


def write_config_only_models(names: Sequence[str], shape: dict[str, Any], dtype: str, folder: Path) -> dict[str, Path]:
    """Write the config.json of a Llama of that shape, and of what the recipes of linears plan for it; return the folders.

    The table of a conversion has the ranks of its plan, so nothing is computed and nothing else is written.
    """
    from transformers import LlamaConfig

    from surgery.checkpoint.outline import describe_checkpoint
    from surgery.checkpoint.source import open_checkpoint
    from surgery.checkpoint.table import quantization_table
    from surgery.planning.plan import make_plan
    from surgery.planning.weights import table_entry

    keys = {**shape, "architectures": ["LlamaForCausalLM"], "dtype": dtype, "tie_word_embeddings": False}
    folders = {ORIGINAL: folder / ORIGINAL}
    LlamaConfig(**keys, max_position_embeddings=2**18).save_pretrained(folders[ORIGINAL])
    described = describe_checkpoint(open_checkpoint(str(folders[ORIGINAL]), weights=False))
    config = json.loads((folders[ORIGINAL] / "config.json").read_text())
    for name in names:
        if name == ORIGINAL:
            continue
        plan = make_plan(described, recipe_without_text(name))
        table = {path: table_entry(target, target.preview) for path, (target,) in plan.targets.items()}
        folders[name] = folder / name
        folders[name].mkdir(parents=True)
        converted = {**config, "quantization_config": quantization_table(table, {}, [])}
        (folders[name] / "config.json").write_text(json.dumps(converted, indent=2) + "\n")
    return folders


def _run_process(folder: Path, sizes: str, dtype: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure one model in a process of its own; return (a row for each cell, what the engine chose)."""
    asked = json.dumps({"folder": str(folder), "sizes": sizes, "dtype": dtype})
    done = subprocess.run(
        [sys.executable, "-c", WORKER, asked],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**ENVIRONMENT, **os.environ},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-20:])
        raise SurgeryError(f"vLLM could not measure {folder} (exit code {done.returncode}). Its last lines:\n{said}")
    found = json.loads(lines[-1].removeprefix(RESULT))
    return found["rows"], found["engine"]


def run_worker(asked: str) -> None:
    """Measure the model that the JSON text names, and print the result as a line of JSON."""
    found = measure_engine(**json.loads(asked))
    print(f"\n{RESULT}{json.dumps(found)}", flush=True)


def measure_engine(folder: str, sizes: str, dtype: str) -> dict[str, Any]:
    """Return {"rows": seconds of every cell, "engine": version, graph mode and blocks} of a checkpoint in vLLM."""
    import vllm

    cells, new = CELLS[sizes], NEW_TOKENS[sizes]
    options: dict[str, Any] = {"gpu_memory_utilization": MEMORY_SHARE} if torch.cuda.is_available() else {}
    if sizes in CONFIG_ONLY:
        options["load_format"] = "dummy"
        _skip_weight_checks()
    llm = vllm.LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max(length for length, _ in cells) + new + 1,
        max_num_seqs=LARGEST_BATCH,
        max_num_batched_tokens=STEP_TOKENS,
        enforce_eager=sizes == "small",  # to compile takes a minute
        **options,
    )
    config = llm.llm_engine.vllm_config
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length, batch in cells:
        shape = (batch, length)
        ids = torch.randint(4, config.model_config.get_vocab_size(), shape, generator=generator).tolist()
        prefills = [run_requests(llm.llm_engine, ids, 1)[0] for _ in range(1 + PREFILLS)][1:]
        decode = [run_requests(llm.llm_engine, ids, count)[1] for count in (WARM_TOKENS, 1 + new)][1]
        rows.append(
            {
                "prompt": length,
                "batch": batch,
                "prefill_s": round(median(prefills), 6),
                "decode_ms": None if decode is None else round(decode * 1e3, 5),
            }
        )
    about = {
        "vllm": vllm.__version__,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "eager": bool(config.model_config.enforce_eager),
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        **_power_limit(),
    }
    return {"rows": rows, "engine": about}


def _skip_weight_checks() -> None:
    """Let the plugin serve a folder without weights: in this process it no longer asks for the tensors of its table."""
    from surgery.vllm import linear
    from surgery.vllm.packed_linear import PackedLinear

    plugin: Any = linear
    layers: Any = PackedLinear
    plugin.check_checkpoint = lambda name: None
    layers.check_complete = lambda self, path, flats: None


def run_requests(engine: Any, prompts: list[list[int]], tokens: int) -> tuple[float, float | None]:
    """Let vLLM write that many tokens behind every prompt. Return (seconds until every prompt has its first token, mean
    seconds of a step from then on until a request ends; None without such a step).

    Prompts that are read in several steps have their first tokens at different times, so the earliest ones end first.
    There is no such step with one token, or where the cache holds some requests only after others have ended.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    begun: set[str] = set()
    ends: list[float] = []  # of the step that completes the first tokens, and those in which every request wrote
    has_ended = False
    while engine.has_unfinished_requests():
        outputs = engine.step()
        begun |= {output.request_id for output in outputs if output.outputs[0].token_ids}
        has_ended |= any(output.finished for output in outputs)
        if len(begun) == len(prompts) and not (ends and has_ended):
            ends.append(time.perf_counter())
    steps = len(ends) - 1
    return ends[0] - start, (ends[-1] - ends[0]) / steps if steps else None


def _power_limit() -> dict[str, str]:
    """Return {"power_limit": watts} of the first card, or {} where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"power_limit": done.stdout.strip()} if done.returncode == 0 else {}


def vllm_tables(result: dict[str, Any]) -> list[Any]:
    """Return the result as rich tables and lines: medians, the range over the rounds, and the speed relative to the
    first model.
    """
    from rich.table import Table

    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    cells = list(dict.fromkeys((row["prompt"], row["batch"]) for row in result["rows"]))
    tables: list[Any] = []
    for key, title, scale in (("decode_ms", "decoding, ms a step", 1.0), ("prefill_s", "prefill, ms", 1e3)):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("prompt x batch")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for cell in cells:
            found = {name: _values(result, name, cell, key) for name in names}
            first = median(found[names[0]]) if found[names[0]] else None
            shown = []
            for name in names:
                values = [value * scale for value in found[name]]
                if not values:
                    shown.append("do not fit at once")
                    continue
                ratio = "" if name == names[0] or first is None else f", {first * scale / median(values):.2f}x"
                spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
                shown.append(f"{median(values):.2f}{spread}{ratio}")
            table.add_row(f"{cell[0]:,} x {cell[1]}", *shown)
        tables.append(table)
    engine: dict[str, Any] = next(iter(result["engines"].values()), {})
    tables.append(f"vLLM {engine.get('vllm')} on {result['device']}, {result['dtype']}, {result['rounds']} rounds")
    for name, about in result["engines"].items():
        graphs = "eager" if about["eager"] else f"graphs {about['cudagraph_mode']}"
        tables.append(f"{name}: {graphs}; {about['blocks']} blocks of {about['block_size']} tokens")
    if not result["complete"]:
        tables.append("stopped by --time-limit before all rounds were measured")
    return tables


def _values(result: dict[str, Any], name: str, cell: tuple[int, int], key: str) -> list[float]:
    """Return a model's measurements of a cell in all rounds, without those that could not be made."""
    rows = [r for r in result["rows"] if r["model"] == name and (r["prompt"], r["batch"]) == cell]
    return [r[key] for r in rows if r[key] is not None]
