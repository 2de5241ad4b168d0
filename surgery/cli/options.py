"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Checkpoint: a local folder or a Hub id, org/name or org/name@revision.")
]
Converted = Annotated[
    str,
    typer.Argument(
        metavar="OUT", help="A converted checkpoint: a local folder or a Hub id, org/name or org/name@revision."
    ),
]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="A shipped recipe (`surgery recipes`) or a .yaml file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, e.g. keep=0.75; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code from the checkpoint's own repository.")
]
Device = Annotated[Optional[str], typer.Option(help="cpu, cuda, cuda:1; default: a GPU where there is one.")]  # noqa: UP045
Revision = Annotated[Optional[str], typer.Option(help="Branch, tag or commit of a Hub id.")]  # noqa: UP045

Context = Annotated[
    int, typer.Option("--context", min=1, metavar="TOKENS", help="Length of prompts that notes on speed are for.")
]

# -- of surgery convert and demo
Calibration = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="Text to calibrate on: a file (.txt, .jsonl, .parquet; .safetensors of ready inputs) or a Hub data set org/name[:config:split:column]."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted conversion into the same OUT.")]
Seed = Annotated[int | None, typer.Option(help="Seed; the same seed gives the same bytes on the same machine.")]
DemoOut = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--out", "-o", help="Folder for the demo's files; must not exist. Default: surgery-demo, or surgery-demo-2 .."
    ),
]

# -- of surgery bench
Peers = Annotated[bool, typer.Option("--peers", help="flash-linear-attention as well, where it is installed.")]
Sizes = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="full, main (fewer), small (a CPU's); default: full on a GPU, else small."),
]
Only = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="WORDS", help="Rivals whose names have one of these words; -word leaves out, e.g. kernel,-mlr."
    ),
]
BenchDtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--dtype", help="bfloat16, float16 or float32; default: bfloat16 on a GPU, else float32."),
]
BenchOut = Annotated[Optional[Path], typer.Option("--out", "-o", help="JSON file for the results.")]  # noqa: UP045
Plot = Annotated[Optional[Path], typer.Option(help="PNG or SVG file for a plot; needs matplotlib.")]  # noqa: UP045
TimeLimit = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--time-limit", metavar="SECONDS", help="Stop after this many; what is measured is shown."),
]

# -- of surgery finetune
HealingName = Annotated[
    str, typer.Option("--recipe", "-r", help="A healing recipe (quick, standard, long, weights-only) or a .yaml file.")
]
TeacherName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--teacher", metavar="SRC", help="What OUT was converted from: a local folder or a Hub id."),
]
TrainingData = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--data", help="Text to train on: a file (.txt, .jsonl, .parquet), a folder or a Hub id."),
]
HealedOut = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", "-o", help="Folder of the healed checkpoint; must not exist. Default: OUT-healed."),
]
Tiny = Annotated[bool, typer.Option("--tiny", help="With the recipe's block `tiny`: minutes on two CPU cores.")]
ResumeTraining = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
SkipBadSteps = Annotated[
    bool, typer.Option("--skip-bad-steps", help="Leave out steps whose gradient is no number, instead of stopping.")
]
Track = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="tensorboard (the default, where installed), wandb, trackio or none."),
]

# -- of surgery pretrain
PretrainName = Annotated[
    str, typer.Option("--recipe", "-r", help="A recipe for training from scratch (gpt2, gpt2-btt, ..) or a .yaml file.")
]
PretrainedOut = Annotated[Path, typer.Option("--out", "-o", help="Folder of the trained checkpoint; must not exist.")]
NewModel = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", metavar="CONFIG", help="Shape: a config.json, a folder with one, or a Hub id."),
]
NewTokenizer = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--tokenizer", help="A folder or a Hub id; default: one made from the text."),
]

# -- of surgery teacher-cache
CacheOut = Annotated[Path, typer.Option("--out", "-o", help="Folder for the cache.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Tokens kept of every prediction, the likeliest.")]
Examples = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, help="Rows of the data; default: data.rows, or all that the stage trains on."),
]
ResumeCache = Annotated[bool, typer.Option("--resume", help="Finish the cache in --out.")]
