"""What a public repository needs: metadata that follows one constant, valid workflows and issue forms."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from surgery.core import project
from surgery.core.version import __version__

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml")
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The parts of GitHub's workflow syntax that are in use here: key -> whether it must be there.
TOP = {"name": True, "on": True, "permissions": True, "jobs": True, "concurrency": False, "env": False}
JOB = {
    "runs-on": True, "steps": True, "timeout-minutes": True, "needs": False, "strategy": False, "env": False,
    "permissions": False, "environment": False,
}  # fmt: skip
STEP = {"name": False, "uses": False, "run": False, "with": False, "env": False}
EVENTS = {
    "push": {"branches", "tags"}, "pull_request": {"branches"}, "schedule": None, "workflow_dispatch": set(),
}  # fmt: skip
ACTIONS = {
    "actions/checkout": set(),
    "actions/setup-python": {"python-version", "cache", "cache-dependency-path"},
    "actions/upload-artifact": {"name", "path", "if-no-files-found"},
    "actions/download-artifact": {"name", "path"},
    "pypa/gh-action-pypi-publish": set(),
}
SCOPES = {"contents": {"read"}, "id-token": {"write"}}
CONTEXTS = {"github.ref", "github.ref_name"}
ELEMENTS = {"markdown": {"value"}, "textarea": {"label", "description", "render", "placeholder"},
            "input": {"label", "description", "placeholder"}, "dropdown": {"label", "description", "options"}}  # fmt: skip


def check_keys(value: Any, known: dict[str, bool], where: str) -> None:
    assert isinstance(value, dict), where
    assert set(value) <= set(known), f"{where}: unknown keys {set(value) - set(known)}"
    missing = {key for key, needed in known.items() if needed} - set(value)
    assert not missing, f"{where}: {missing} missing"


def workflow(path: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads the key `on` as true."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {("on" if key is True else key): value for key, value in data.items()}


def check_permissions(value: Any, where: str) -> None:
    assert isinstance(value, dict), where
    assert all(level in SCOPES.get(scope, set()) for scope, level in value.items()), where


def check_step(step: Any, where: str) -> None:
    check_keys(step, STEP, where)
    assert ("uses" in step) != ("run" in step), f"{where}: a step has either `uses` or `run`"
    if "uses" in step:
        name, at, version = step["uses"].partition("@")
        assert at and re.fullmatch(r"v\d+|release/v\d+", version), f"{where}: {step['uses']} names no version"
        assert set(step.get("with", {})) <= ACTIONS[name], where
    else:
        assert "with" not in step and "${{" not in step["run"], f"{where}: pass values by `env`, not into the script"


def check_job(name: str, job: Any, jobs: dict[str, Any]) -> None:
    check_keys(job, JOB, name)
    assert job["runs-on"] == "ubuntu-latest" and 0 < job["timeout-minutes"] <= 360
    assert set(job.get("needs", [])) <= set(jobs) - {name}
    check_permissions(job.get("permissions", {}), name)
    matrix = job.get("strategy", {}).get("matrix", {})
    known = CONTEXTS | {f"matrix.{key}" for key in matrix}
    used = re.findall(r"\$\{\{\s*([^}]*?)\s*\}\}", yaml.safe_dump(job, width=10_000))
    assert set(used) <= known, f"{name}: unknown expressions {set(used) - known}"
    assert job["steps"]
    for number, step in enumerate(job["steps"], 1):
        check_step(step, f"{name}, step {number}")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_valid(path):
    data = workflow(path)
    check_keys(data, TOP, path.name)
    check_permissions(data["permissions"], path.name)
    for event, options in data["on"].items():
        allowed = EVENTS[event]
        if allowed is None:
            assert all(re.fullmatch(r"\d+ \d+ [\d*]+ [\d*]+ [\d*]+", entry["cron"]) for entry in options)
        else:
            assert set(options or {}) <= allowed
    for name, job in data["jobs"].items():
        check_job(name, job, data["jobs"])


@pytest.mark.parametrize(
    "step",
    [{"uses": "actions/checkout"}, {"run": "x", "uses": "actions/checkout@v4"}, {"run": "echo ${{ github.ref }}"}, {"ruN": "x"},
     {"uses": "actions/checkout@v4", "with": {"pyton": 3}}],
)  # fmt: skip
def test_the_check_finds_invalid_steps(step):
    with pytest.raises(AssertionError):
        check_step(step, "step")


def test_what_workflows_run_is_there():
    targets = re.findall(r"^([.\w/-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    made = []
    for path in WORKFLOWS:
        for job in workflow(path)["jobs"].values():
            for step in job["steps"]:
                made += [shlex.split(line)[1] for line in step.get("run", "").splitlines() if line.startswith("make ")]
                if (place := step.get("with", {}).get("cache-dependency-path")) is not None:
                    assert (ROOT / place).is_file()
    assert len(made) >= 3 and set(made) <= set(targets)


def test_releases_use_trusted_publishing():
    """No token: PyPI checks the identity of the workflow, in the one job that may ask for it."""
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        assert "secrets." not in text and "password" not in text
        for name, job in workflow(path)["jobs"].items():
            publishes = any("pypi-publish" in step.get("uses", "") for step in job["steps"])
            assert (job.get("permissions", {}).get("id-token") == "write") == publishes, name
            assert publishes == (job.get("environment") == "pypi")


def test_every_supported_python_is_tested():
    versions = [v.rsplit(" ", 1)[1] for v in METADATA["classifiers"] if re.search(r":: 3\.\d+$", v)]
    matrix = workflow(ROOT / ".github/workflows/tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == versions
    assert METADATA["requires-python"] == f">={versions[0]}"


def test_docs_are_built_with_the_extra_docs():
    text = (ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8")
    assert all(f"'{package}'" in text for package in METADATA["optional-dependencies"]["docs"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_valid(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    check_keys(form, {"name": True, "description": True, "body": True, "labels": False, "title": False}, path.name)
    ids = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 1
    for element in form["body"]:
        check_keys(element, {"type": True, "attributes": True, "id": False, "validations": False}, path.name)
        assert set(element["attributes"]) <= ELEMENTS[element["type"]]
        assert element["type"] == "markdown" or element["attributes"]["label"]
        assert set(element.get("validations", {})) <= {"required"}


def test_metadata_says_beta_and_typed():
    assert {"Development Status :: 4 - Beta", "Typing :: Typed"} <= set(METADATA["classifiers"])
    assert (ROOT / "surgery/py.typed").is_file()


def test_one_constant_holds_the_address(monkeypatch):
    """Without a repository there are no URLs of one; with it, everything that is generated names it."""
    assert "urls" not in METADATA and "urls" in METADATA["dynamic"]
    if project.REPOSITORY_URL is None:
        assert project.project_urls() == {} and project.project_link() == "surgery"
        text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
        assert not re.search(r"https?://|\S+@\S+\.\w+", text), "no contact is invented"
    monkeypatch.setattr(project, "REPOSITORY_URL", "https://example.org/o/surgery")
    assert set(project.project_urls()) == {"Repository", "Issues", "Changelog"}
    assert "git+https://example.org/o/surgery" in project.install_command()
    assert project.project_link() == "[surgery](https://example.org/o/surgery)"
    monkeypatch.setattr(project, "PACKAGE_IS_PUBLISHED", True)
    assert project.install_command() == f"pip install {project.PACKAGE_NAME}"
    assert METADATA["name"] == project.PACKAGE_NAME


def test_setup_py_takes_the_urls_from_the_constant(monkeypatch):
    import setuptools

    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    assert given == {"project_urls": project.project_urls()}


def test_the_citation_names_the_five_papers():
    data = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "type"} <= set(data) and data["license"] == METADATA[
        "license"
    ]
    assert data["version"] == __version__
    papers = data["references"]
    assert len(papers) == 5
    for paper in papers:
        assert paper["type"] in ("article", "conference-paper") and paper["title"]
        assert all({"family-names", "given-names"} <= set(author) or "name" in author for author in paper["authors"])
    if project.REPOSITORY_URL is None:
        assert "repository-code" not in data and "url" not in data


def test_no_message_names_a_package_that_is_not_published():
    """Somebody else could publish under that name. The shim of checkpoints is a fixed text."""
    shim, own = ROOT / "surgery/modeling/auto_classes.py", ROOT / "surgery/core/project.py"
    files = [p for room in ("surgery", "eval", "kernels", "recipes") for p in (ROOT / room).rglob("*.py")]
    named = [p for p in files if f"pip install '{project.PACKAGE_NAME}" in p.read_text(encoding="utf-8")]
    named += [p for p in files if f"pip install {project.PACKAGE_NAME}" in p.read_text(encoding="utf-8")]
    assert set(named) <= {shim, own}
    assert "in a clone" in project.install_command("eval") or project.PACKAGE_IS_PUBLISHED
