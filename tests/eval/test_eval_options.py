"""EvalOptions is the one declaration of the options of an evaluation: the command line, Python and the types follow
it.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from surgery.api import EvalKeywords
from surgery.cli.main import app, main
from surgery.cli.model_options import ModelCommand, options_of
from surgery.core.config import CommandLine
from surgery.core.errors import SurgeryError
from surgery.eval.options import EvalOptions, PairSettings, parse_options

GROUP: Any = typer.main.get_command(app)
DIGESTS = (
    "4765813728547dd535db5d0879c7626d1d9501fc2ac974b4bb17fbe396596974",
    "9cb53a2cf6aa8b6bd4862b698044771087d67f94db27cc36c19d247365035e4f",
)
EVAL = {parameter.name: parameter for parameter in GROUP.commands["eval"].params}


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize("name", EvalOptions.model_fields)
def test_each_field_is_an_option(name):
    field, option = EvalOptions.model_fields[name], EVAL[name]
    assert option.opts == [option_name(name)] and option.help == field.description and field.description.endswith(".")
    default = field.get_default(call_default_factory=True)
    assert option.default == (None if default in ((), {}) else default)
    assert option.multiple == (name == "data")
    for least in (item.ge for item in field.metadata if hasattr(item, "ge")):
        assert CliRunner().invoke(app, ["eval", "M", option_name(name), str(least - 1)]).exit_code == 2


def test_no_other_option_of_eval_is_hidden_or_lost():
    written = {"converted", "suite", "compare", "out", "fail_below", "verify", "device", "dtype"}
    assert set(EVAL) - {"help"} == {
        *EvalOptions.model_fields,
        *written,
        "trust_remote_code",
        "plugins",
        "list_suites",
        "as_json",
    }
    run = {parameter.name: parameter for parameter in GROUP.commands["run"].params}
    for name in ("limit", "tokens", "length", "lengths"):
        assert (run[name].opts, run[name].help) == (EVAL[name].opts, EVAL[name].help)


def test_the_keywords_of_python_are_the_fields():
    assert set(typing.get_type_hints(EvalKeywords)) == set(EvalOptions.model_fields)
    hints = typing.get_type_hints(EvalKeywords)
    for name in ("prompts", "fill"):
        assert hints[name] == EvalOptions.model_fields[name].annotation


def test_the_settings_of_papers_are_those_of_mqar():
    from surgery.eval.suites.mqar import PAPER_SETTINGS

    assert set(typing.get_args(PairSettings)) == set(PAPER_SETTINGS)


class Garden(BaseModel):
    """A model with every kind of field."""

    rows: int = Field(3, ge=1, description="Plant this many rows.")
    bed_name: str | None = Field(None, description="Plant in this bed.")
    shed: Annotated[Path | None, CommandLine(metavar="DIR")] = Field(None, description="Keep tools there.")
    tools: Annotated[tuple[str, ...], CommandLine(metavar="TOOL", is_repeatable=True)] = Field(
        (), description="Use it."
    )
    light: typing.Literal["sun", "shade"] = Field("sun", description="Plant in sun or shade.")
    wet: bool = Field(False, description="Water it.")


def test_a_field_of_any_model_is_an_option_without_a_second_edit():
    seen: dict[str, Any] = {}

    @options_of(lambda: Garden)
    def plant(name: str, out: str = "here", *, as_json: bool = False, **asked: Any) -> None:
        """Plant a garden."""
        seen.update(asked, name=name, out=out)

    own = typer.Typer()
    own.command(cls=ModelCommand)(plant)
    words = [
        "x",
        "--rows",
        "2",
        "--bed-name",
        "b",
        "--shed",
        "s",
        "--tools",
        "a",
        "--tools",
        "b",
        "--light",
        "shade",
        "--wet",
    ]
    assert CliRunner().invoke(own, words).exit_code == 0
    assert seen == {"name": "x", "out": "here", "rows": 2, "bed_name": "b", "shed": Path("s"), "tools": ["a", "b"], "light": "shade", "wet": True}  # fmt: skip
    seen.clear()
    assert CliRunner().invoke(own, ["x"]).exit_code == 0
    assert seen["rows"] == 3 and seen["wet"] is False and seen["bed_name"] is seen["tools"] is None
    assert CliRunner().invoke(own, ["x", "--rows", "0"]).exit_code == 2
    shown = CliRunner().invoke(own, ["--help"]).output
    assert "Plant a garden." in shown and shown.index("--out") < shown.index("--rows") < shown.index("--as-json")


def test_words_are_completed():
    """--prompts completes its two values, and --batch_size is --batch-size."""
    environment = {"_SURGERY_COMPLETE": "complete_bash", "COMP_WORDS": "surgery eval --prompts j", "COMP_CWORD": "3"}
    assert CliRunner().invoke(app, [], prog_name="surgery", env=environment).output.split() == ["jrt"]
    context = GROUP.commands["eval"].make_context(
        "eval", ["M", "--batch-size", "4"], parent=GROUP.make_context("surgery", ["eval"])
    )
    assert context.params["batch_size"] == "4" and context.command.params[0].name == "converted"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": "many"}, "--batch-size 'many': "),
        ({"batch_size": "0"}, "--batch-size '0': "),
        ({"lengths": "x"}, "--lengths 'x': "),
        ({"lengths": "0"}, "--lengths '0': "),
        ({"depths": "1.5"}, "--depths '1.5': "),
        ({"metadata": "["}, r"--metadata '\[': is not JSON"),
        ({"samples": "[1]"}, r"--samples '\[1\]': must be a JSON object"),
        ({"gen_kwargs": "top_p"}, "--gen-kwargs 'top_p': must be name=value pairs"),
        ({"pairs": "zoologi"}, "--pairs 'zoologi': must be whole numbers .* did you mean 'zoology'"),
        ({"prompts": "jtr"}, "--prompts 'jtr': input should be 'based' or 'jrt'"),
    ],
)
def test_options_are_said_as_options(given, said):
    with pytest.raises(SurgeryError, match=said):
        parse_options(given, "surgery eval", option_name)


def test_python_takes_the_text_of_the_command_line_too():
    text = {"lengths": "4k,8192", "depths": "0,0.5", "tasks": "a, b", "batch_size": "4", "pairs": "4,16", "gen_kwargs": "top_p=0.9", "samples": '{"a": [1]}'}  # fmt: skip
    plain = {"lengths": (4096, 8192), "depths": (0, 0.5), "tasks": ("a", "b"), "batch_size": 4, "pairs": (4, 16), "gen_kwargs": {"top_p": 0.9}, "samples": {"a": (1,)}}  # fmt: skip
    assert parse_options(text, "evaluate") == EvalOptions(**plain)
    with pytest.raises(SurgeryError, match="evaluate has no option 'token'; did you mean 'tokens'"):
        parse_options({"token": 3}, "evaluate")


def test_the_digest_of_the_defaults_is_that_of_version_0_2():
    """Stored results stay valid."""
    assert EvalOptions().digest() == DIGESTS[0]
    chosen = {"lengths": (64,), "depths": (0.5,), "tasks": ("a",), "gen_kwargs": {"top_p": 0.5}, "samples": {"a": (1,)}, "seed": 2}  # fmt: skip
    assert EvalOptions(**chosen).digest() == DIGESTS[1]


def test_a_wrong_value_ends_the_command(capsys):
    with pytest.raises(SystemExit) as left:
        main(["eval", "M", "--gen-kwargs", "x"])
    assert left.value.code == 2 and "--gen-kwargs 'x': must be name=value pairs" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(SystemExit):
        main(["eval", "--list-suites"])
    assert "needle" in capsys.readouterr().out
