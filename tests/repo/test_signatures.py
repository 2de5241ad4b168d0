"""No function takes more than six arguments by position."""

import ast
from pathlib import Path

from helpers.syntax import statements

ROOT = Path(__file__).resolve().parents[2]
MOST = 6
PACKAGES = ("surgery", "kernels", "eval", "recipes")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
COMMANDS = ROOT / "surgery" / "cli"  # Typer passes the options of a command by name


def is_exempt(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Typer calls the function, or Triton compiles it, which reads positional arguments only."""
    is_triton = any(ast.unparse(each).startswith("triton.jit") for each in function.decorator_list)
    return path.is_relative_to(COMMANDS) or is_triton


def count_positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many arguments a caller may pass by position. torch passes the `ctx` of an autograd.Function."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"], ["ctx"]))


def test_functions_take_at_most_six_arguments_by_position() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count_positional(node)}"
        for path in FILES
        for node in statements(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and count_positional(node) > MOST
        and not is_exempt(path, node)
    ]
    assert not wrong, "\n".join(["make the last of these arguments keyword-only (put * before them):", *wrong])
