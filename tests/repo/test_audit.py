"""Dependencies (licenses, declarations, imports), and no code that could run untrusted code."""

from __future__ import annotations

import ast
import functools
import importlib.metadata as metadata
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("surgery", "kernels", "eval", "recipes")
FILES = sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))
# Permissive, or (MPL) without a claim on what merely imports it. Written as SPDX and as in older metadata.
ALLOWED = {
    *("Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Apache", "Apache 2.0", "Apache 2.0 License"),
    *("Apache License 2.0", "Apache License, Version 2.0", "Apache Software License", "Apache Software License 2.0"),
    *("MIT", "MIT License", "BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "BSL-1.0", "ISC", "Zlib"),
    *("3-Clause BSD License", "ISC License (ISCL)", "MIT-CMU", "CNRI-Python"),
    *("PSF-2.0", "Python Software Foundation License", "CC0-1.0", "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),
}
# Whose metadata says it otherwise, or lists licenses without saying whether one or all hold: looked up.
READ = {
    "hjson": "MIT or AFL-2.1, in its LICENSE",
    "torchao": "BSD-3-Clause, in its LICENSE",
    "rouge": "Apache-2.0, in its LICENSE",
    "word2number": "MIT, its whole text",
}
# What lm-eval asks for, of the extras `eval` and `test` alone: we import none of it (SECURITY.md says so).
COPYLEFT = {"fuzzywuzzy", "dominate", "chardet"}
# NVIDIA's libraries, which torch brings on Linux (SECURITY.md says so).
CUDA = ("nvidia-", "cuda-")
# Timed beside ours, or taken in their place, where a person has them (the extra gpu-fast).
PEERS = {"fla", "flashinfer"}


def declared_requirements(table: str) -> list[Requirement]:
    """The requirements of pyproject's `dependencies`, or of all its extras (read as text: tomllib is 3.11's)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    start = (
        r"^dependencies = \[$(.*?)^\]$" if table == "dependencies" else r"^\[project\.optional-dependencies\]$(.*?)^\["
    )
    (block,) = re.findall(start, text, re.M | re.S)
    quoted = re.findall(r'^(?:\s+|[a-z]+ = \[)"(.+?)",?\]?$', block, re.M)
    return [Requirement(line.replace('\\"', '"')) for line in quoted]


EVERY = {
    canonicalize_name(r.name): r for r in [*declared_requirements("dependencies"), *declared_requirements("extras")]
}


def test_the_lists_are_read():
    assert {"torch", "typer", "matplotlib"} <= {r.name for r in declared_requirements("dependencies")}
    assert {"lm-eval", "triton", "pytest", "types-pyyaml"} <= set(EVERY)


def licences_of(distribution: str) -> set[str]:
    """As its metadata says: an SPDX expression, else classifiers, else the old free text."""
    about = metadata.metadata(distribution)
    if expression := about.get("License-Expression"):
        return _parts(expression)
    classified = {c.split("::")[-1].strip() for c in about.get_all("Classifier") or [] if c.startswith("License ::")}
    classified -= {"OSI Approved", "DFSG approved"}
    return classified or _parts((about.get("License") or "none").strip())


def _parts(expression: str) -> set[str]:
    return {part.strip(" ()") for part in re.split(r" (?:AND|OR) ", expression)}


def licences_not_allowed(distribution: str) -> set[str]:
    """Its licenses that we do not allow: none if they were looked up."""
    return set() if distribution in READ else licences_of(distribution) - ALLOWED


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_dependency_has_a_licence_we_allow(name):
    try:
        wrong = licences_not_allowed(name)
    except metadata.PackageNotFoundError:
        assert EVERY[name].marker or name in {canonicalize_name(r.name) for r in declared_requirements("extras")}, name
        pytest.skip(f"{name} is of an extra that is not installed here")
    assert not wrong, f"{name}: {wrong}"


METADATA = {
    "torchao": "",
    "deepspeed": "License: Apache Software License 2.0\n",
    "hjson": "Classifier: License :: OSI Approved :: MIT License\nClassifier: License :: OSI Approved :: Academic Free License (AFL)\n",
    "ninja": "License-Expression: Apache-2.0\n",
    "copyleft": "License-Expression: GPL-3.0-only\n",
    "unlicensed": "",
}


def test_licences_of_extras_that_are_not_installed_here(tmp_path, monkeypatch):
    """As the metadata of their releases says it: torchao has none, deepspeed free text, hjson two classifiers."""
    for name, lines in METADATA.items():
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        text = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{lines}"
        (tmp_path / f"{name}-1.0.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    wrong = {name: licences_not_allowed(name) for name in METADATA}
    assert {name: found for name, found in wrong.items() if found} == {
        "copyleft": {"GPL-3.0-only"},
        "unlicensed": {"none"},
    }


def test_security_names_what_is_not_permissive():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (named,) = re.findall(r"The extras ((?:`\w+`(?: and |, )?)+)", text)
    extras = re.findall(r"`(\w+)`", named)
    bringing = {
        name for name, asked in re.findall(r"^(\w+) = \[(.*?)\]$", pyproject, re.M | re.S) if '"lm_eval' in asked
    }
    assert set(extras) == bringing == {"eval", "test"}
    assert all(name in text for name in COPYLEFT) and all(f"`{prefix}*`" in text for prefix in CUDA)


def closure(first: Iterable[Requirement]) -> set[str]:
    """All that these bring along on this machine, themselves included; of what is not installed nothing is known."""
    found: set[str] = set()
    left = [(r, extra) for r in first for extra in ("", *r.extras)]
    seen = set()
    while left:
        one, extra = left.pop()
        name = canonicalize_name(one.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for each in map(Requirement, lines):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                left += [(each, more) for more in ("", *each.extras)]
    return found


def test_what_they_bring_along_has_one_too():
    plain, every = closure(declared_requirements("dependencies")), closure(EVERY.values())
    assert {"torch", "jinja2"} <= plain <= every
    of_torch = closure([requirement for requirement in EVERY.values() if requirement.name == "torch"])
    cuda = {name for name in of_torch if name.startswith(CUDA)}
    wrong = {name: licences_not_allowed(name) for name in every - COPYLEFT - cuda}
    assert not {name: licences for name, licences in wrong.items() if licences}
    assert not COPYLEFT & plain, "a plain install has none of it"


def test_what_has_a_claim_on_us_is_not_imported():
    for path in FILES:
        assert not third_parties(ast.walk(tree(path))) & COPYLEFT, path


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def third_parties(nodes: Iterator[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"surgery", "recipes", "__future__"}


def through_extras() -> set[str]:
    """What an extra that we ask of a dependency brings: lm_eval[longbench] brings rouge and jieba."""
    brought = set()
    for requirement in EVERY.values():
        for line in (metadata.requires(requirement.name) or []) if requirement.extras else []:
            one = Requirement(line)
            if one.marker and any(one.marker.evaluate({"extra": extra}) for extra in requirement.extras):
                brought.add(canonicalize_name(one.name))
    return brought


def test_every_import_is_declared():
    """Of a distribution in pyproject, or of an extra that pyproject asks for."""
    named, known = metadata.packages_distributions(), set(EVERY) | through_extras()
    for path in FILES:
        for module in third_parties(ast.walk(tree(path))) - PEERS:
            sold_as = {canonicalize_name(d) for d in named.get(module, [module])}
            assert sold_as & known, f"{path.relative_to(ROOT)} imports {module}, which pyproject.toml does not declare"


def test_what_is_imported_at_once_is_no_extra():
    """Outside eval/ and the kernels, a module's own imports are there after a plain `pip install`.

    Subclasses of vLLM's classes, in surgery/vllm, are imported by vLLM alone.
    """
    named, plain = (
        metadata.packages_distributions(),
        {canonicalize_name(r.name) for r in declared_requirements("dependencies")},
    )
    for path in [p for p in FILES if p.relative_to(ROOT).parts[0] in ("surgery", "recipes")]:
        plugin_of = {"vllm"} if path.is_relative_to(ROOT / "surgery" / "vllm") else set()
        for module in third_parties(iter(tree(path).body)) - plugin_of:
            sold_as = {canonicalize_name(d) for d in named.get(module, [module])}
            assert sold_as & plain, f"{path.relative_to(ROOT)} imports {module} at once, which only an extra brings"


UNPICKLERS = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
UNSAFE_YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}


def dangers(tree: ast.AST) -> list[str]:
    """Every way by which a file or a string would become code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [f"imports {m}" for m in modules if m.split(".")[0] in UNPICKLERS]
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        owner, name = _called_name(node.func)
        if owner is None and name in ("eval", "exec", "compile", "__import__"):
            found.append(f"calls {name}")
        if owner == "torch" and name == "load" and given.get("weights_only") is not True:
            found.append("torch.load without weights_only=True")
        if owner == "yaml" and name in UNSAFE_YAML:
            found.append(f"yaml.{name}")
        if (owner, name) in SHELLS or given.get("shell", False) is not False:
            found.append(f"a shell ({owner}.{name})")
        if given.get("allow_pickle", False) is not False:
            found.append("numpy's allow_pickle")
    return found


def _called_name(func: ast.expr) -> tuple[str | None, str]:
    if isinstance(func, ast.Attribute):
        return (func.value.id if isinstance(func.value, ast.Name) else ""), func.attr
    return None, func.id if isinstance(func, ast.Name) else ""


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_runs_what_it_reads(room):
    found = [
        f"{path.relative_to(ROOT)}: {danger}"
        for path in FILES
        if path.relative_to(ROOT).parts[0] == room
        for danger in dangers(tree(path))
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        *(
            "import pickle",
            "from dill import loads",
            "import torch\ntorch.load(f)",
            "torch.load(f, weights_only=False)",
        ),
        *("yaml.load(t, Loader=yaml.Loader)", "eval('1')", "exec(t)", "os.system(c)", "subprocess.run(c, shell=True)"),
        *("np.load(f, allow_pickle=True)", "subprocess.run(c, shell=flag)", "torch.load(f, weights_only=flag)"),
    ],
)
def test_the_audit_sees(code):
    assert dangers(ast.parse(code))


def test_the_audit_lets_pass():
    fine = "model.eval()\nyaml.safe_load(t)\ntorch.load(f, weights_only=True)\nre.compile(p)\ntorch.compile(m)"
    assert not dangers(ast.parse(fine))
