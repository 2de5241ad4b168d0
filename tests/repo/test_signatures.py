"""No function takes more than six arguments by position."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 6
# Typer passes the options of a command by name. A @dispatched function takes the operands of its formula, and its kernels
# take the same: their signatures are those of kernels/.
FILES = [path for package in ("surgery", "eval", "recipes") for path in sorted((ROOT / package).rglob("*.py"))]
COMMANDS = ROOT / "surgery" / "cli"


def is_exempt(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return path.is_relative_to(COMMANDS) or any("dispatched" in ast.unparse(each) for each in function.decorator_list)


def count_positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many arguments a caller may pass by position."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_functions_take_at_most_six_arguments_by_position() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count_positional(node)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and count_positional(node) > MOST
        and not is_exempt(path, node)
    ]
    assert not wrong, "\n".join(["make the last of these arguments keyword-only (put * before them):", *wrong])
