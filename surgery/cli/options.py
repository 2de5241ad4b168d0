"""Arguments and options of the commands, as annotated types that Typer turns into the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint to read: a folder, a GGUF file, or a Hub id (org/name[@revision]).",
    ),
]
Converted = Annotated[
    str,
    typer.Argument(metavar="OUT", help="Converted checkpoint: a folder or a Hub id (org/name[@revision])."),
]
RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        help="Use this recipe: a name that `surgery recipes` lists, or a .yaml file.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the recipe, e.g. seed=1. Repeatable."),
]


def _import_plugins(files: list[Path] | None) -> list[Path] | None:
    """Import the files of --plugin, before the command reads a recipe or a checkpoint."""
    if files:
        from surgery.core.plugins import load_plugin_file

        for file in files:
            load_plugin_file(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        callback=_import_plugins,
        help="Import this Python file, which registers a structure, a mixer or a family (docs/extend.md). Repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code of the checkpoint's repository. Default: refuse.",
    ),
]
Device = Annotated[str | None, typer.Option(help="Compute on cpu, cuda or cuda:1. Default: a GPU if there is one.")]
Revision = Annotated[
    str | None, typer.Option(help="Read this branch, tag or commit of the Hub repository. Default: main.")
]


def parse_tokens(raw: str) -> int:
    """Return a number of tokens; refuse anything but a whole number above 0, with k or M for 1,024 or 1,048,576."""
    from surgery.core.config import parse_length

    length = parse_length(str(raw))
    if not str(length).isdecimal() or int(length) < 1:
        raise typer.BadParameter(f"{raw!r} must be a number of tokens, at least 1, for example 32768 or 32k")
    return int(length)


Context = Annotated[
    int,
    typer.Option(
        "--context",
        parser=parse_tokens,
        metavar="TOKENS",
        help="Prompt length of the notes on speed, e.g. 32768 or 32k (32 x 1,024).",
    ),
]
PlannedContext = Annotated[
    int | None,
    typer.Option(
        "--context",
        parser=parse_tokens,
        metavar="TOKENS",
        help="Show caches and notes on speed for this length, e.g. 32768 or 32k (32 x 1,024). Default: caches at 1K, "
        "8K and 64K, speed at 4K.",
    ),
]

MeasuredTimes = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="FILE",
        help="Predict times of linears from this file of `surgery bench linear --out`. Default: included times.",
    ),
]

EstimateDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Estimate time and memory for this device: cpu (with as many threads as here) or h200. Default: the kind "
        "of this machine.",
    ),
]
Processes = Annotated[
    int,
    typer.Option("--processes", min=1, help="Estimate a conversion shared by this many processes, one device each."),
]
HealingRecipes = Annotated[
    bool,
    typer.Option("--healing", help="List the healing recipes of `surgery finetune`. Default: conversion recipes."),
]
AllRecipes = Annotated[
    bool, typer.Option("--all", help="List all conversion recipes. Default: the ones that most people need.")
]
DataFree = Annotated[
    bool,
    typer.Option(
        "--data-free", help="Estimate a conversion without calibration text. Default: with the recipe's tokens."
    ),
]

# -- short for one key of the recipe, see surgery/cli/shorthands.py
Keep = Annotated[
    float | None,
    typer.Option(
        "--keep",
        metavar="SHARE",
        help="Keep this share of the replaced linears' parameters, over 0 and at most 1. Default: the recipe's.",
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        parser=parse_tokens,
        metavar="COUNT",
        help="Read this many calibration tokens, e.g. 8192 or 8k (8 x 1,024). Default: the recipe's.",
    ),
]
CalibrationLength = Annotated[
    int | None,
    typer.Option(
        "--length",
        parser=parse_tokens,
        metavar="TOKENS",
        help="Split the calibration text into windows of this many tokens. Default: the recipe's.",
    ),
]

# -- surgery convert and demo
Calibration = Annotated[
    str | None,
    typer.Option(
        help="Calibrate on this text: a file, a folder of images, or a Hub data set (org/name[:config:split:column]). "
        "Default: the recipe's, else none."
    ),
]
CalibrationTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--calibration",
        help="Calibrate on this text: a file, a folder of images, or a Hub data set (org/name[:config:split:column]). "
        "Repeat it to mix texts in equal parts. Default: the recipe's, else none.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion into the same OUT.")]
ResultDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Store the result in bfloat16, float16 or float32. Default: as SRC stores it.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the result of an earlier conversion in OUT, once the new one is complete. Other files are never "
        "deleted.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the path of the result.")]
Seed = Annotated[
    int | None, typer.Option(help="Random seed; a seed fixes every byte of OUT on one machine. Default: the recipe's.")
]
DemoOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write the demo's files to this folder, which must not exist. Default: surgery-demo, else surgery-demo-2, "
        "and so on.",
    ),
]

# -- surgery bench
Peers = Annotated[bool, typer.Option("--peers", help="Also benchmark flash-linear-attention, if it is installed.")]
Sizes = Annotated[
    str | None,
    typer.Option(
        help="Benchmark these sizes: full, main (fewer), compressed (linears at half and a quarter), 8b (for vllm) or "
        "small (for a CPU). Default: full on a GPU, else small."
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS",
        help="Benchmark only implementations whose name contains one of these words; prefix a word with - to exclude "
        "it, e.g. kernel,-mlr.",
    ),
]
BenchDtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Compute in bfloat16, float16 or float32. Default: bfloat16 on a GPU, else float32."),
]
BenchOut = Annotated[Path | None, typer.Option("--out", "-o", help="Write the results to this JSON file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results to this PNG or SVG file.")]
TimeLimit = Annotated[
    float | None,
    typer.Option("--time-limit", metavar="SECONDS", help="Stop after this many seconds and show the results so far."),
]

BenchStage = Annotated[
    str | None,
    typer.Option(
        "--stage", help="With train: the stage to train, lm or distill (healing with a teacher). Default: lm."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SRC",
        help="With draft: the checkpoint. With linear: measure the shapes of its linears. With vllm: folders, "
        "separated by commas; the first is the base.",
    ),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="With draft: the drafter, a conversion recipe, the folder of a checkpoint, or prompt-lookup. Default: "
        "sliding-window, or prompt-lookup for a converted model with mixers.",
    ),
]
DraftText = Annotated[Path | None, typer.Option("--text", help="With draft: take the prompts from this text file.")]
DraftReplay = Annotated[
    Path | None,
    typer.Option(
        "--replay",
        metavar="FILE",
        help="With draft: time the acceptance of FILE, the --out of an earlier `bench draft`, on random weights of the "
        "--sizes, in place of --model and --text.",
    ),
]

# -- surgery finetune
HealingName = Annotated[
    str,
    typer.Option(
        "--recipe",
        "-r",
        help="Train by this recipe: auto, linears, attention, new-modules, lambda, control, or a .yaml file.",
    ),
]
TeacherName = Annotated[
    str | None,
    typer.Option(
        "--teacher",
        metavar="SRC",
        help="Distill from this checkpoint, the original: a folder, a GGUF file, or a Hub id.",
    ),
]
TrainingData = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Train on this text: a file, a folder, a Hub id, or generated, which the teacher writes. Default: the "
        "recipe's.",
    ),
]
HealedOut = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Write the trained checkpoint to this folder, which must not exist. Default: OUT-healed."
    ),
]
Tiny = Annotated[
    bool,
    typer.Option("--tiny", help="Shorten the run to minutes on two CPU cores (the recipe's `tiny` block)."),
]
ResumeTraining = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run from its last training checkpoint.")
]
SkipBadSteps = Annotated[
    bool, typer.Option("--skip-bad-steps", help="Skip steps with NaN or infinite gradients instead of stopping.")
]
Track = Annotated[
    str | None,
    typer.Option(help="Log metrics to tensorboard, wandb, trackio or none. Default: tensorboard if it is installed."),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=1,
        help="Train on this many GPUs of this machine (with --device cpu: processes). Default: one.",
    ),
]
Sharding = Annotated[
    str,
    typer.Option(
        "--sharding",
        help="With several processes: ddp (every device has all weights), fsdp2 (weights are divided), or auto: ddp up "
        "to 1.5B parameters if they fit.",
    ),
]

# -- surgery pretrain
PretrainName = Annotated[
    str, typer.Option("--recipe", "-r", help="Train by this recipe: a shipped one (gpt2, gpt2-btt) or a .yaml file.")
]
PretrainedOut = Annotated[
    Path, typer.Option("--out", "-o", help="Write the trained checkpoint to this folder, which must not exist.")
]
NewModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="CONFIG",
        help="Take the model's config from here: a config.json, a folder that contains one, or a Hub id. Default: the "
        "recipe's.",
    ),
]
NewTokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Take the tokenizer from this folder or Hub id. Default: train one on the text."),
]

# -- surgery teacher-cache
CacheOut = Annotated[Path, typer.Option("--out", "-o", help="Write the cache to this folder.")]
TopK = Annotated[
    int,
    typer.Option(
        "--top-k", min=1, help="Store the log-probabilities of this many most likely tokens at each position."
    ),
]
Examples = Annotated[
    int | None,
    typer.Option(
        min=1, help="Store this many sequences. Default: the recipe's data.rows, else all that the stage trains on."
    ),
]
ResumeCache = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run into the same --out.")]
