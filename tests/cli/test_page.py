"""The report page: its contents, its safety, and how a browser renders it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from surgery.core.errors import SurgeryError
from surgery.publish.html.page import write_page
from surgery.publish.html.svg import Axis, Series, heat_map, line_chart, ticks

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>"


@pytest.fixture
def out(converted, tmp_path) -> Path:
    """With a healing and an evaluation beside it."""
    folder = tmp_path / "OUT"
    shutil.copytree(converted("llama"), folder)
    (folder / "training").mkdir()
    log = [{"stage": 0, "kind": "distill", "step": k, "loss": 3 / k} for k in range(1, 30)]
    log.append({"stage": 0, "kind": "distill", "step": 29, "validation": 1.5})
    lines = [json.dumps(line) for line in log]
    (folder / "training" / "log.jsonl").write_text("\n".join([*lines, "{broken"]))
    report = json.loads((folder / "surgery_report.json").read_text())
    scores = {"original": {"perplexity": 2.0}, "before": {"perplexity": 4.0}, "after": {"perplexity": 2.5}}
    report["training"] = [{"stages": [{"kind": "distill", "tokens": 12345}], "validation": scores}]
    (folder / "surgery_report.json").write_text(json.dumps(report))
    (folder / "eval").mkdir()
    rows = [row("ppl", "nll", {}, 2.0, 2.5)]
    rows += [row("needle", "accuracy", {"length": n, "depth": d}, 100, 50) for n in (512, 1024) for d in (0.0, 1.0)]
    rows += [row("per-position", "nll", {"position": n}, 1.0, 1.2) for n in (64, 128, 256)]
    (folder / "eval" / "results.json").write_text(json.dumps({"rows": rows}))
    return folder


def row(task: str, metric: str, group: dict, base: float, converted: float) -> dict:
    scale = 100.0 if metric == "accuracy" else 1.0
    return {
        "task": task, "group": group, "samples": 40, "flags": [], "p": None,
        "metric": {"name": metric, "title": metric, "scale": scale},
        "values": {"base": base, "converted": converted}, "errors": {"base": 0.1, "converted": None},
        "difference": {"change": converted - base, "low": -1.0, "high": 1.0},
    }  # fmt: skip


class Reader(HTMLParser):
    """Tags that were opened and not closed, ids, links within, and what would be fetched."""

    VOID = frozenset({"meta", "link", "br", "img", "rect", "circle", "line", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.fetched: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.scripts += tag == "script"
        self.targets += [given["href"][1:]] if tag == "a" else []
        self.fetched += [v for k, v in attrs if k in ("src", "href") and tag != "a" and not v.startswith("data:")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        if tag not in self.VOID:
            raise AssertionError(tag)


def parse_page(path: Path) -> tuple[str, Reader]:
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert not reader.open and reader.fetched == [] and reader.scripts == 1
    assert set(reader.targets) <= set(reader.ids) and len(reader.ids) == len(set(reader.ids))
    return text, reader


def test_everything_is_on_it(out):
    text, reader = parse_page(write_page(str(out)))
    assert {"model", "errors", "costs", "training", "measured", "matrices", "recipe"} <= set(reader.ids)
    report = json.loads((out / "surgery_report.json").read_text())
    for record in report["modules"]:
        assert record["name"] in text
    for words in ("12,345", "1.250 x", "accuracy in percent", "Loss by position", "2.5"):
        assert words in text, words
    assert text.count("<svg") == text.count('role="img"') >= 8
    assert (
        text.count('class="wide" tabindex="0"') == 1 and 'class="dot few' in text
    )  # the model scrolls, by keyboard too


def test_without_healing_and_measurements(converted, tmp_path):
    _, reader = parse_page(write_page(str(converted("llama")), tmp_path / "page.html"))
    assert not {"training", "measured"} & set(reader.ids) and "matrices" in reader.ids
    assert not list(tmp_path.glob(".*"))


def test_what_a_file_says_is_text(out):
    report = json.loads((out / "surgery_report.json").read_text())
    report["modules"][0]["name"] = report["modules"][0]["roles"][0] = EVIL
    report["source"]["name"] = report["model_type"] = EVIL
    report["recipe"]["description"] = EVIL
    (out / "surgery_report.json").write_text(json.dumps(report))
    results = json.loads((out / "eval" / "results.json").read_text())
    for each in results["rows"]:
        each["task"] = each["metric"]["title"] = EVIL
    (out / "eval" / "results.json").write_text(json.dumps(results))
    text, _ = parse_page(write_page(str(out)))
    assert "<img" not in text and text.count("<script") == 1


@pytest.mark.parametrize("broken", [{"modules": [{}]}, {"totals": {}}, {"modules": [{"name": 3}]}, {"training": [3]}])
def test_a_damaged_report_is_said(out, broken):
    report = json.loads((out / "surgery_report.json").read_text())
    (out / "surgery_report.json").write_text(json.dumps({**report, **broken}))
    with pytest.raises(SurgeryError, match=r"is not a valid surgery report|are damaged"):
        write_page(str(out))
    assert not (out / "report.html").exists()


def test_results_that_are_none_are_refused(out, tmp_path):
    with pytest.raises(SurgeryError, match="has no results"):
        write_page(str(out), measured=tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(SurgeryError, match="not a results file of `surgery eval`"):
        write_page(str(out), measured=tmp_path)


def test_outside_d16_a_link_to_nothing_is_refused(out, tmp_path):
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "gone" / "page.html")
    with pytest.raises(SurgeryError, match="symbolic link"):
        write_page(str(out), link)
    assert link.is_symlink()


def test_charts():
    assert ticks(0, 10, False) == [0, 2, 4, 6, 8, 10] and ticks(1, 1000, True) == [1, 10, 100, 1000]
    axis, log = Axis("x"), Axis("y", log=True)
    assert line_chart("t", [Series("s", "base", [(1, -1), (2, float("nan"))])], axis, log) == ""
    drawn = line_chart("t", [Series("s", "base", [(float(k), 5.0) for k in range(1000)])], axis, log)
    assert drawn.count("<circle") <= 301
    assert "50 %" in heat_map("t", ["a"], ["0", "1"], [[0.5, None]])


# -- in a browser ------------------------------------------------------------------------------------
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt install chromium)")


def browse(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *words],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@needs_browser
def test_a_browser_shows_it_without_a_complaint(out, tmp_path):
    page = write_page(str(out))
    shot = tmp_path / "shot.png"
    done = browse("--window-size=390,1200", f"--screenshot={shot}", page.as_uri())
    assert shot.stat().st_size > 20_000
    assert "CONSOLE" not in done.stderr, done.stderr


@needs_browser
def test_a_browser_sorts_its_tables(out):
    """A copy of the page with a second script, which the policy of the page itself would not let run."""
    page = write_page(str(out))
    text = page.read_text(encoding="utf-8")
    clicks = """<script>
      const table = document.querySelector("#matrices ~ .scroll table");
      const button = table.querySelectorAll("thead button")[6];
      button.click(); button.click();
      document.title = [...table.tBodies[0].rows].map((row) => row.cells[6].textContent).join(" ") + " " +
        button.closest("th").getAttribute("aria-sort");
    </script></body>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", clicks)
    page.write_text(text, encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", browse("--dump-dom", page.as_uri()).stdout)
    *values, order = title[1].split()
    assert order == "descending" and len(values) > 5
    assert [float(v) for v in values] == sorted(map(float, values), reverse=True)
