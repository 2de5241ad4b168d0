"""The report page: its contents, its safety, and how a browser renders it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.small_mixers import MIXER_SPECS

from surgery.checkpoint.source import open_converted_checkpoint
from surgery.core.errors import SurgeryError
from surgery.mixers import mixer_config
from surgery.planning.recipe import FrontRecipe, validate_recipe
from surgery.planning.shipped import read_recipes
from surgery.publish.figures import checkpoint_figures
from surgery.publish.front import describe_front
from surgery.publish.html.page import write_page
from surgery.publish.html.sections import error_class
from surgery.publish.html.svg import (
    LETTER,
    LINE,
    WIDTH,
    Axis,
    MatrixBox,
    Point,
    Series,
    _overlap,
    heat_map,
    layer_diagram,
    line_chart,
    scatter_chart,
    ticks,
)
from surgery.publish.hub.model_card import _replacement_section
from surgery.publish.names import mixer_title
from surgery.publish.ratios import held_out_size
from surgery.publish.verdict import verdict

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

    VOID = frozenset({"meta", "link", "br", "img", "rect", "circle", "line", "polyline", "polygon"})

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
    for words in ("12,345", "x 1.25", "accuracy in percent", "Loss by position", "2.5"):
        assert words in text, words
    assert text.count("<svg") == text.count('role="img"')
    assert text.count("<svg") + text.count('class="flat"') >= 8  # flat curves are sentences
    assert (
        text.count('class="wide" tabindex="0"') == 1 and 'class="dot few' in text
    )  # the model scrolls, by keyboard too


FRONT = {
    "cost": "bytes",
    "limit": 5000,
    "original": 8000,
    "at": 4096,
    "healing": True,
    "chosen": 2,
    "points": [
        {"value": 2000, "loss": 1.5, "low": 1.0, "high": 2.5},
        {"value": 4000, "loss": 0.25, "low": 0.125, "high": 0.5},
        {"value": 8000, "loss": 0.0, "low": 0.0, "high": 0.0},
    ],
}


def with_front(out: Path, front: object) -> None:
    report = json.loads((out / "surgery_report.json").read_text())
    report["recipe"]["front"] = front
    (out / "surgery_report.json").write_text(json.dumps(report))


def test_a_recipe_of_a_search_shows_its_front(out):
    """All points as a picture and a table, and this model among them; on the card a sentence."""
    assert "front" not in parse_page(write_page(str(out)))[1].ids
    with_front(out, FRONT)
    text, reader = parse_page(write_page(str(out)))
    assert "front" in reader.ids and "this model" in text and "point 1" in text and "point 2" not in text
    words = "Point 2 of 3 of a front by surgery search, asked for at most 5.0 kB of tensors: 4.0 kB of tensors, predicted loss after healing 0.25 nats per token (0.12 to 0.5)."
    assert words in text
    source = open_converted_checkpoint(str(out))
    report = json.loads((out / "surgery_report.json").read_text())
    assert words in _replacement_section(source, report)
    assert "not healed" not in text
    del report["training"]
    assert f"{words} This model was not healed." in _replacement_section(source, report)
    (out / "surgery_report.json").write_text(json.dumps(report))
    assert f"{words} This model was not healed." in parse_page(write_page(str(out)))[0]
    assert "not healed" not in describe_front(FrontRecipe(**{**FRONT, "healing": False}), healed=False)


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": 4}, {"chosen": 0}, {"cost": EVIL}, {"points": []}, {"points": [{"value": 1, "loss": 3.0, "low": 0.0, "high": 1.0}]},
        {"points": [{"value": 1, "loss": float("nan"), "low": 0.0, "high": 1.0}]}, {"limit": -1}, {"more": EVIL}, {"at": 2.5},
    ],
)  # fmt: skip
def test_a_damaged_front_is_not_shown(change, out):
    """A report is a stranger's word; a recipe with such a front is refused."""
    with_front(out, {**FRONT, **change})
    text, reader = parse_page(write_page(str(out)))
    assert "front" not in reader.ids and "<script>alert" not in text
    assert "the front of `surgery search` in surgery_report.json is damaged" in text
    with pytest.raises(SurgeryError, match="front"):
        validate_recipe({"front": {**FRONT, **change}}, "of a test")


def test_the_verdict_comes_before_any_chart_and_numbers_agree(out):
    """One sentence of measured values; the page and the table of `surgery eval` tell the same change as the same
    ratio.
    """
    results = json.loads((out / "eval" / "results.json").read_text())
    first = results["rows"][0]
    first |= {"suite": "ppl", "ratio": {"change": 1.2161, "low": 1.1, "high": 1.4}}
    first["metric"]["kind"] = "ppl"
    found = {**row("needle", "accuracy", {}, 100.0, 97.5), "suite": "needle"}
    timed = [row("speed", name, {"length": 4096}, *values) | {"suite": "speed"}
             for name, values in (("prefill_ms", (140.0, 100.0)), ("decode_ms", (10.0, 17.0)), ("cache_mb", (4.0, 2.0)))]  # fmt: skip
    results["rows"] += [found, *timed]
    (out / "eval" / "results.json").write_text(json.dumps(results))
    text, _ = parse_page(write_page(str(out)))
    sentence = re.search(r'<p class="verdict">(.*?)</p>', text)[1].replace("&#x27;", "'")
    figures = checkpoint_figures(json.loads((out / "surgery_report.json").read_text()))
    assert sentence == (
        f"{figures['replaced'].share} of the weights of the replaced linears, perplexity x 1.216 [1.1, 1.4], needles "
        "97.5% of 40 (original 100%), prefill of 4K tokens 1.4x faster, decoding 1.7x slower, "
        f"{figures['bytes'].share} of the bytes; healed on 12.3k tokens."
    )
    assert text.index('class="verdict"') < text.index("<svg") and text.count("x 1.216") == 3  # verdict, card, table
    assert (
        text.count("[1.1, 1.4]") == 2 and text.count("1.1 to 1.4") == 1 and "+0.5<" not in text
    )  # not also as a difference of perplexities


def test_what_was_not_measured_is_not_in_the_verdict():
    totals = {"bytes_before": 100, "bytes_after": 100, "params_before": 50, "params_after": 50}
    totals |= {"replaced_params_before": 0, "replaced_params_after": 0}
    assert verdict({"totals": totals}) == "Same bytes, quality not measured; not healed."
    held = {"original": 1.0, "converted": 1.5, "unit": "nats per token"}
    assert (
        verdict({"totals": totals, "held_out": held}) == "Same bytes, perplexity x 1.649 on held-out text; not healed."
    )
    stored = verdict({"totals": totals, "held_out": held, "storage": {"bits": 4, "group": 64}})
    assert "x 1.649 on held-out text, before its linears were stored in 4 bits" in stored
    held |= {"difference_se": 0.1, "tokens": 640, "samples": 5}
    assert "perplexity x 1.649 [1.355, 2.006] on held-out text;" in verdict({"totals": totals, "held_out": held})
    assert held_out_size(held) == ", 640 tokens in 5 samples"
    held |= {"tokens": 254, "samples": 2}  # two samples estimate their own errors badly
    assert "perplexity x 1.649 on held-out text;" in verdict({"totals": totals, "held_out": held})
    assert held_out_size(held) == ", 254 tokens in 2 samples, too few for an interval"
    held["unit"] = "relative error"
    assert "quality not measured" in verdict({"totals": totals, "held_out": held})
    guessed = {**row("needle", "accuracy", {}, 10.0, 0.0), "suite": "needle", "flags": ["no better than guessing"]}
    assert "needles" not in verdict({"totals": totals}, {"rows": [guessed]})


def test_flat_and_identical_curves_are_sentences():
    flat = [Series("a", "base", [(1, 3), (2, 3)]), Series("b", "converted", [(1, 4), (2, 4)])]
    said = line_chart("Rank by layer", flat, Axis("layer"), Axis("rank"))
    assert "<svg" not in said and "rank: a 3, b 4; the same at every layer" in said
    same = [Series(name, "base", [(1, 3), (2, 5)]) for name in ("a", "b")]
    said = line_chart("Loss", same, Axis("step"), Axis("loss"))
    assert "<svg" not in said and "a and b are identical: loss from 3 to 5" in said
    assert "<svg" not in line_chart("Loss", [Series("a", "base", [(1, 3)])], Axis("step"), Axis("loss"))
    drawn = line_chart("Loss", same[:1], Axis("step"), Axis("loss"))
    assert '<p class="chart">Loss</p>' in drawn and "<svg" in drawn


def test_matrices_are_colored_by_error_and_the_title_is_the_converted_model_with_its_recipe(out):
    text, _ = parse_page(write_page(str(out)))
    report = json.loads((out / "surgery_report.json").read_text())
    worst = {error_class(record["error"]) for record in report["modules"]}
    assert worst == set(re.findall(r'class="kept (e\d)"', text)) and "error under 0.05" in text
    assert [error_class(e) for e in (0.0, 0.05, 0.3, 9.0)] == ["e0", "e1", "e3", "e4"]
    assert "<h1>OUT</h1>" in text and f'<p class="lead">{Path(report["source"]["name"]).name} (' in text
    report["recipe"]["description"] = read_recipes()["pruned-half"]["description"]
    (out / "surgery_report.json").write_text(json.dumps(report))
    text = parse_page(write_page(str(out)))[0]
    assert "<h1>OUT: pruned-half</h1>" in text and "<title>OUT: pruned-half</title>" in text


def test_matrices_that_nothing_replaced_are_grey_and_every_color_is_in_the_legend(out):
    report = json.loads((out / "surgery_report.json").read_text())
    report["modules"] = [record for record in report["modules"] if "mlp.down" not in record["roles"]]
    (out / "surgery_report.json").write_text(json.dumps(report))
    text, _ = parse_page(write_page(str(out)))
    section = text[text.index("<h2 id=model>") : text.index("<h2 id=errors>")]
    assert ">mlp down</text>" in section and "mlp.down: not replaced" in section
    drawn = set(re.findall(r'<rect class="(?:kept )?(\w+)"', section))
    assert drawn >= {"unchanged", "softmax", "e4"} and drawn <= set(re.findall(r'class="key (\w+)"', section))
    style = text[: text.index("</style>")]
    assert "fill-opacity" not in style.replace(".band{fill-opacity:.15}", "")  # bands: the caption says what they are


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (MIXER_SPECS["log-linear"], "log-linear GDN + window 5"),
        (MIXER_SPECS["log-linear mamba-2"], "log-linear Mamba-2"),
        (MIXER_SPECS["gated deltanet"], "Gated DeltaNet + window 5"),
        (MIXER_SPECS["ssd"], "Mamba-2"),
        (MIXER_SPECS["retnet"], "RetNet"),
        (MIXER_SPECS["window"], "window 6"),
        (MIXER_SPECS["mlr"], "MLR 4|2|2"),
        (MIXER_SPECS["none"], "no attention"),
        (MIXER_SPECS["toeplitz behind chunks"], "linear, toeplitz mask + window 3"),
        (MIXER_SPECS["heads, gates"], "Mamba-2, softmax in 1 head"),
    ],
)
def test_mixers_are_named_as_people_say_them(spec, name):
    assert mixer_title(mixer_config(spec)) == name


def test_the_diagram_has_the_short_name_of_a_mixer_and_the_whole_on_hovering():
    box = MatrixBox(0.5, "e0", "q")
    drawn = layer_diagram("t", ["q"], [("0", ("log-linear GDN + window 64", "linear: hierarchical mask"), [box])])
    assert ">log-linear GDN + window 64</text>" in drawn and "layer 0: linear: hierarchical mask</title>" in drawn


def test_no_card_is_empty_and_no_row_of_maps_is_all_zero(out):
    report = json.loads((out / "surgery_report.json").read_text())
    for record in report["modules"]:
        record["error"] = None
        record["structure"].pop("rank", None)
    (out / "surgery_report.json").write_text(json.dumps(report))
    results = json.loads((out / "eval" / "results.json").read_text())
    for each in results["rows"]:
        each["values"] = dict.fromkeys(each["values"], 0.0) if each["task"] == "needle" else each["values"]
    (out / "eval" / "results.json").write_text(json.dumps(results))
    found = comparison(["a", "b"])
    for each in found["rows"]:
        each["values"] = dict.fromkeys(each["values"], 0.0) if each["task"] == "needle" else each["values"]
    (out / "eval" / "comparison.json").write_text(json.dumps(found))
    text, reader = parse_page(write_page(str(out)))
    assert "errors" not in reader.ids and text.count("No model found anything") == 2 and 'class="cell"' not in text
    assert '<div class="pair"></div>' not in text and "<figure></figure>" not in text


@pytest.mark.parametrize("count", [3, 4])
def test_a_table_of_more_than_three_models_becomes_rows_on_small_screens(out, count):
    names = [f"model {i}" for i in range(count)]
    (out / "eval" / "comparison.json").write_text(json.dumps(comparison(names)))
    text, _ = parse_page(write_page(str(out)))
    assert ('<table class="sorts stacked">' in text) == (count > 3) == ('data-label="model 0 (base)"' in text)
    assert "@media (max-width:560px){.stacked" in text


def test_the_sentence_of_a_flat_chart_names_a_unit_behind_the_value():
    flat = [Series(name, "base", [(1, 0), (2, 0)]) for name in ("a", "b")]
    said = line_chart("t", flat, Axis("length, tokens"), Axis("accuracy, %"))
    assert "a and b: accuracy 0 % at every length<" in said
    assert "training loss: 0.5<" in line_chart(
        "t", [Series("training loss", "m0", [(1, 0.5)])], Axis("step"), Axis("loss")
    )


def test_labels_of_a_scatter_chart_do_not_overlap():
    points = [Point(f"a model with name {i}", f"m{i}", 1.0 + 0.01 * i, 1.0 + 0.001 * (i % 3)) for i in range(7)]
    points.append(Point("far", "base", 2.0, 1.2))
    drawn = scatter_chart("t", points, [], Axis("bytes"), Axis("ratio"), False)
    found = re.findall(r'r="5"/><text x="([\d.]+)" y="([\d.]+)">([^<]*)<', drawn)
    boxes = [(float(x), float(y) - LINE + 3, float(x) + LETTER * len(name), float(y) + 3) for x, y, name in found]
    assert len(boxes) == 8 and not any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(left >= 0 and right <= WIDTH for left, _, right, _ in boxes)


def test_generations_stand_side_by_side(out):
    entry = {"prompt": "Once", "original": "upon a time", "converted": EVIL}
    (out / "eval" / "generations.json").write_text(json.dumps({"generations": [entry] * 3}))
    text, reader = parse_page(write_page(str(out)))
    assert "generations" in reader.ids and text.count('<div class="samples">') == 3 and "upon a time" in text
    (out / "eval" / "generations.json").write_text(json.dumps({"generations": [3]}))
    with pytest.raises(SurgeryError, match="list of generations"):
        write_page(str(out))


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
    row = {"suite": "ppl", "metric": {"kind": "ppl"}}
    for low, change, high in ((1.0, 0.5, 1.1), (None, -5, None), (None, float("inf"), None)):
        rows = [{**row, "ratio": {"low": low, "change": change, "high": high}}]
        (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
        with pytest.raises(SurgeryError, match=f"damaged .*ppl has the ratio {change}"):
            write_page(str(out), measured=tmp_path)


def comparison(names: list[str]) -> dict:
    """The content of comparison.json for models of these names, the first of which is the base."""

    def line(task: str, group: dict, **more) -> dict:
        metric = {
            "name": "accuracy",
            "title": "",
            "kind": "accuracy",
            "scale": 100.0,
            "top": None,
            "pooled": True,
            "unit": "%",
        }
        return {
            "suite": "s", "task": task, "group": group, "samples": 40, "metric": {**metric, **more},
            "values": {name: 90.0 - 10 * i for i, name in enumerate(names)}, "errors": dict.fromkeys(names, 0.5),
            "intervals": {name: [50.0, 95.0] for name in names}, "ratios": {}, "flags": [] if group else ["a base that guesses"],
            "differences": {name: {"change": -10.0, "low": -12.0, "high": -8.0} for name in names[1:]},
        }  # fmt: skip

    points = {
        name: {"cost": 3.0 - i, "cost_interval": None, "quality": 90.0 - 10 * i, "quality_interval": [50, 95]}
        for i, name in enumerate(names)
    }
    rows = [line("needle", {})]
    rows += [line("needle", {"length": n, "depth": d}) for n in (4096, 8192) for d in (0.0, 0.5)]
    rows += [line("per-position", {"position": n}, kind="mean") for n in (64, 1024, 8192)]
    average = {
        "suite": "ruler",
        "name": "average of the 13 tasks",
        "length": 8192,
        "unit": "",
        "missing": [],
        "samples": 130,
    }
    average |= {"values": dict.fromkeys(names, 91.6), "intervals": {name: [90, 93] for name in names}}
    return {
        "models": [{"name": name, "parameters": 1_500_000} for name in names], "base": names[0], "rows": rows,
        "averages": [average], "refused": ["ppl of x: other samples"], "notes": ["a remark"],
        "charts": [
            {"cost": "stored parameters", "quality": "needle", "higher_is_better": True, "points": points, "front": names}
        ],
    }  # fmt: skip


def test_many_models_are_on_it(out):
    names = ["original", *(f"model {i}" for i in range(8))]
    found = comparison(names)
    found["rows"][-1]["values"] = {name: value + 1 for name, value in found["rows"][-1]["values"].items()}
    (out / "eval" / "comparison.json").write_text(json.dumps(found))
    text, reader = parse_page(write_page(str(out)))
    assert "models" in reader.ids and text.count('class="point') == 9 and 'class="front"' in text
    words = (
        "original (base)",
        "1.50M",
        "80 [50, 95] (-10*)",
        "91.6 [90, 93]",
        "8K tokens",
        ">4K<",
        ">50%<",
        "Refused: ppl of x",
    )
    for word in words:
        assert word in text, word
    assert "a base that guesses: needle accuracy" in text and text.count('class="band ') == 9  # of loss by position
    assert text.count('class="front" points="') == 1 and "* if its 95% interval excludes no change" in text
    assert 'class="line m6"' in text and text.count("accuracy in percent by length in tokens and depth") == 2 + 9


def test_a_front_of_several_models_is_on_it(out):
    """A comparison of models from one search has the front with both of them, and what was measured."""
    found = comparison(["original", "half", "quarter"])
    shared = {key: value for key, value in FRONT.items() if key != "chosen"}
    entry = {"front": shared, "chosen": {"half": 2, "quarter": 1}, "measured": {"half": 0.375}, "quantity": "KL"}
    (out / "eval" / "comparison.json").write_text(json.dumps({**found, "fronts": [entry]}))
    text, _ = parse_page(write_page(str(out)))
    assert "Points of a front of surgery search" in text and ">0.38<" in text and "measured (KL)" in text
    assert "half: 0.25 at 4k" in text and "quarter: 1.5 at 2k" in text and "point 3: 0 at 8k" in text
    for change in ({"front": {**shared, "points": []}}, {"chosen": {"half": 4}}, {"chosen": {"half": EVIL}}):
        (out / "eval" / "comparison.json").write_text(json.dumps({**found, "fronts": [{**entry, **change}]}))
        with pytest.raises(SurgeryError, match=r"front|damaged"):
            write_page(str(out))


def test_a_comparison_of_a_stranger_is_text_or_damaged(out):
    place = out / "eval" / "comparison.json"
    evil = comparison(["a", EVIL])
    for row in evil["rows"]:
        row["task"] = row["metric"]["title"] = row["metric"]["unit"] = EVIL
    evil["charts"][0]["cost"] = evil["charts"][0]["quality"] = evil["averages"][0]["name"] = EVIL
    evil["notes"] = [EVIL]
    place.write_text(json.dumps(evil))
    text, _ = parse_page(write_page(str(out)))
    assert "<img" not in text and text.count("<script") == 1
    broken = ({"models": 3}, {"charts": [{}]}, {"averages": [{"length": float("inf")}]}, {"rows": [3]})
    for each in broken:
        place.write_text(json.dumps({**comparison(["a", "b"]), **each}))
        with pytest.raises(SurgeryError, match="are damaged"):
            write_page(str(out))


def measured_row(base: float, converted: float) -> dict:
    found = row("ppl", "perplexity", {}, base, converted)
    return {
        **found,
        "suite": "ppl",
        "metric": {**found["metric"], "kind": "ppl"},
        "ratio": {"change": converted / base},
    }


def original_of(out: Path) -> str:
    return Path(json.loads((out / "surgery_report.json").read_text())["source"]["name"]).name


def results_of(name: str, fingerprint: str, base: float, converted: float, original: str) -> dict:
    """The content of results.json of a model of this name, beside its original."""
    models = {
        "base": {"name": original, "fingerprint": "0" * 64},
        "converted": {"name": name, "fingerprint": fingerprint},
    }
    return {"models": models, "rows": [measured_row(base, converted)]}


def comparison_of(models: dict[str, str], values: list[float]) -> dict:
    """comparison.json of models (name -> fingerprint), the first of which is the base, with their perplexities."""
    found = comparison(list(models))
    line = measured_row(1.0, 1.0) | {
        "values": dict(zip(models, values)),
        "errors": {},
        "intervals": {},
        "differences": {},
    }
    line["metric"] |= {"top": None, "pooled": True, "unit": ""}
    line["ratios"] = {
        name: {"change": value / values[0], "low": None, "high": None} for name, value in zip(models, values)
    }
    models_list = [{"name": name, "fingerprint": each, "parameters": 5} for name, each in models.items()]
    return {**found, "models": models_list, "rows": [line], "averages": [], "charts": []}


def verdict_of(text: str) -> str:
    return re.search(r'<p class="verdict">(.*?)</p>', text)[1]


@pytest.fixture
def several(out, tmp_path) -> Path:
    """A folder of `surgery eval OUT OTHER --compare SRC --out`, in which OUT has 1.5 times its original's perplexity
    and OTHER 3 times.
    """
    own, folder = open_converted_checkpoint(str(out)).digest(), tmp_path / "RESULTS"
    shutil.rmtree(out / "eval")
    for name, print_, value in (("OUT", own, 3.0), ("OTHER", "f" * 64, 6.0)):
        place = folder / f"{name}-{print_[:8]}"
        place.mkdir(parents=True)
        (place / "results.json").write_text(
            json.dumps(results_of(f"/home/me/{name}", print_, 2.0, value, original_of(out)))
        )
    found = comparison_of({original_of(out): "0" * 64, "OTHER": "f" * 64, "OUT": own}, [2.0, 6.0, 3.0])
    (folder / "comparison.json").write_text(json.dumps(found))
    return folder


@pytest.mark.parametrize("alone", [False, True], ids=["with each model's results", "comparison alone"])
def test_of_several_models_the_page_tells_the_numbers_of_its_own(out, several, tmp_path, alone):
    """Verdict, headline and tables tell one number for one model; the comparison marks its column."""
    if alone:  # as `surgery compare --out` writes it
        for place in several.glob("*-*"):
            shutil.rmtree(place)
    text, reader = parse_page(write_page(str(out), tmp_path / "page.html", several))
    assert "perplexity x 1.5" in verdict_of(text) and "held-out" not in verdict_of(text)
    assert "<b>x 1.5</b>" in text and "x 3</b>" not in text and "OUT (this one)" in text
    assert ("measured" in reader.ids) is not alone
    assert alone or (f"original: {original_of(out)}" in text and "converted: OUT" in text)
    assert "/home/me" not in text


def test_results_of_others_alone_are_refused_or_named(out, several, tmp_path):
    for folder in (several, several / "OTHER-ffffffff"):
        (several / "comparison.json").write_text(
            json.dumps(comparison_of({"llama": "0" * 64, "OTHER": "f" * 64}, [2.0, 6.0]))
        )
        for place in several.glob("OUT-*"):
            shutil.rmtree(place)
        with pytest.raises(
            SurgeryError, match=r"has no row of .*OUT with its present files: its results are of .*OTHER"
        ):
            write_page(str(out), tmp_path / "page.html", folder)
    shutil.copytree(several / "OTHER-ffffffff", out / "eval")
    text, reader = parse_page(write_page(str(out)))
    assert "measured" not in reader.ids and "are of OTHER. None of them is this checkpoint" in text
    assert "x 3" not in verdict_of(text) and "<b>x 3</b>" not in text


def test_results_from_before_the_files_changed_are_not_shown(out, tmp_path):
    before = results_of("OUT", open_converted_checkpoint(str(out)).digest(), 2.0, 3.0, original_of(out))
    (out / "eval" / "results.json").write_text(json.dumps(before))
    assert "perplexity x 1.5" in verdict_of(parse_page(write_page(str(out)))[0])
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    text, _ = parse_page(write_page(str(out)))
    assert "perplexity x 1.5" not in text and "None of them is this checkpoint with its present files" in text


def test_a_base_that_is_not_the_original_is_named(out):
    own = open_converted_checkpoint(str(out)).digest()
    (out / "eval" / "results.json").write_text(json.dumps(results_of("OUT", own, 2.0, 3.0, original="runs/low-rank")))
    text, _ = parse_page(write_page(str(out)))
    assert "measured against low-rank, not the original" in verdict_of(text)
    assert "relative to low-rank" in text and "base: low-rank" in text


def test_results_that_name_no_model_are_said_to(out):
    assert "results.json in eval does not say which checkpoint it is of" in parse_page(write_page(str(out)))[0]


def test_a_folder_of_a_comparison_alone_is_enough(out, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(comparison(["a", "b"])))
    _, reader = parse_page(write_page(str(out), tmp_path / "page.html", tmp_path / "c"))
    assert "models" in reader.ids and "measured" not in reader.ids


def test_the_command_of_an_evaluation_is_on_it(out):
    results = json.loads((out / "eval" / "results.json").read_text())
    results["provenance"] = {"command": ["surgery", "eval", "<b>my model</b>"]}
    (out / "eval" / "results.json").write_text(json.dumps(results))
    text, _ = parse_page(write_page(str(out)))
    assert "reproduce with: surgery eval &#x27;&lt;b&gt;my model&lt;/b&gt;&#x27;</p>" in text


def test_averages_of_an_evaluation_are_on_it(out):
    results = json.loads((out / "eval" / "results.json").read_text())
    average = comparison(["base", "converted"])["averages"][0]
    average |= {"differences": {"converted": {"change": -1.5, "low": -2.0, "high": -1.0}}, "source": "RULER, table 3"}
    length = average | {
        "name": "effective length",
        "length": None,
        "unit": "tokens",
        "values": {"base": 8192, "converted": 0},
    }
    results["averages"] = [
        average,
        length | {"intervals": {"base": [4096, 8192], "converted": None}, "differences": {}},
    ]
    (out / "eval" / "results.json").write_text(json.dumps(results))
    text, _ = parse_page(write_page(str(out)))
    for word in (
        "average of the 13 tasks, 8K tokens",
        "91.6 [90, 93]",
        "-1.5",
        "RULER, table 3",
        "8K [4K, 8K]",
        ">none<",
    ):
        assert word in text, word


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
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off(out, width, dark):
    """The page is no wider than the window; what is wider scrolls in a box of its own."""
    page = write_page(str(out))
    text = page.read_text(encoding="utf-8")
    measure = "<script>parent.postMessage(document.documentElement.scrollWidth + ' ' + innerWidth, '*')</script></body>"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", measure)
    page.write_text(text, encoding="utf-8")
    frame = page.with_name("frame.html")  # Chromium opens no window of less than 500 pixels
    frame.write_text(
        "<title></title><script>onmessage = (event) => { document.title = event.data }</script>"
        f'<iframe src="{page.name}" style="width:{width}px;height:1200px;border:0"></iframe>'
    )
    words = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    done = browse(*words, "--window-size=1400,1300", "--dump-dom", frame.as_uri())
    wide, window = map(int, re.search(r"<title>(.*?)</title>", done.stdout)[1].split())
    assert window == width and wide <= window


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])  # 500 pixels is the narrowest window that Chromium opens
def test_tables_show_all_columns_on_a_desk_and_say_that_they_scroll_on_a_phone(out, width):
    page = write_page(str(out))
    boxes = """<script>document.title = [...document.querySelectorAll(".scroll")].map((box) => Number(box.classList.contains("over"))).join("")</script></body>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    page.write_text(text.replace("</body>", boxes), encoding="utf-8")
    done = browse(f"--window-size={width},1200", "--dump-dom", page.as_uri())
    wide = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    assert wide and ("1" in wide) == (width == 500), wide


@needs_browser
@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no pdftotext here (apt install poppler-utils)")
def test_printed_tables_repeat_their_heads_on_every_page(out, tmp_path):
    page, pdf = write_page(str(out)), tmp_path / "page.pdf"
    text = page.read_text(encoding="utf-8")
    row = re.search(r'<tr><th scope="row"[^>]*>[^<]*mlp\.down_proj</th>.*?</tr>', text)[0]
    page.write_text(text.replace(row, 80 * row), encoding="utf-8")
    browse("--no-pdf-header-footer", f"--print-to-pdf={pdf}", page.as_uri())
    printed = subprocess.run(["pdftotext", "-layout", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    pages = [text for text in printed.split("\f") if text.count("mlp.down") > 5]
    assert len(pages) > 1 and all("structure" in text.split("mlp.down")[0] for text in pages)


@needs_browser
def test_it_can_be_printed(out, tmp_path):
    pdf = tmp_path / "page.pdf"
    browse("--no-pdf-header-footer", f"--print-to-pdf={pdf}", write_page(str(out)).as_uri())
    assert pdf.read_bytes().startswith(b"%PDF") and pdf.stat().st_size > 20_000


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
