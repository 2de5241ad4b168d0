"""The page put together: one file, its style and its script inside, nothing fetched, nothing run that is not its own."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from html import escape
from pathlib import Path

from surgery.core.errors import SurgeryError
from surgery.core.files import disk_errors, whole
from surgery.core.version import __version__
from surgery.publish.html import sections
from surgery.publish.html.data import Facts, gather

PAGE = "report.html"
PARTS = (
    ("model", "The model", sections.picture),
    ("errors", "Errors and ranks", sections.errors),
    ("costs", "Costs", sections.costs),
    ("training", "Healing", sections.training),
    ("measured", "Before and after", sections.measured),
    ("matrices", "Every matrix", sections.matrices),
)


def write_page(converted: str, out: Path | None = None, measured: Path | None = None) -> Path:
    """OUT/report.html, or the file `out`; made beside and renamed."""
    try:
        facts = gather(converted, measured)
        text = page(facts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SurgeryError(
            f"the report or the results of {converted} are not as surgery writes them ({type(error).__name__}: {error}); "
            "`surgery convert` and `surgery eval` write them anew"
        ) from None
    target = out or facts.folder / PAGE
    if target.is_dir():
        raise SurgeryError(f"{target} is a folder; give a file, for example {target / PAGE}")
    if not target.absolute().parent.is_dir():
        raise SurgeryError(f"{target.absolute().parent} is not a folder; make it first")
    with disk_errors(target), whole(target, "w") as file:
        file.write(text)
    return target


def page(facts: Facts) -> str:
    parts = [(key, name, make(facts)) for key, name, make in PARTS]
    top = sections.figures(facts)
    shown = [(key, name, text) for key, name, text in parts if text]
    title = f"{Path(facts.name).name} by surgery"
    links = " · ".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, _ in shown)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in facts.notes)
    script, style = _file("page.js"), _file("page.css")
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{rules}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escape(Path(facts.name).name)}</h1>
<p class="lead">{_lead(facts)}</p>
<nav aria-label="Sections">{links}</nav>
{top}
</header>
<main id="content">
{"".join(f"<section aria-labelledby={key}>{text}</section>" for key, _, text in shown)}
{notes}
<section aria-labelledby=recipe><h2 id=recipe>The recipe</h2>{_recipe(facts)}</section>
</main>
<footer>Made by surgery {escape(__version__)} from surgery_report.json and what lies beside it.</footer>
<script>{script}</script>
</body>
</html>
"""


def _lead(facts: Facts) -> str:
    report = facts.report
    source = report.get("source", {})
    at = f" at {source['revision'][:10]}" if source.get("revision") else ""
    kind = f" ({report['model_type']})" if report.get("model_type") else ""
    healed = ", healed" if report.get("training") else ""
    return escape(
        f"{Path(str(source.get('name', ''))).name}{kind}{at}, converted{healed} by surgery {report.get('surgery', '')}"
    )


def _recipe(facts: Facts) -> str:
    kept = {key: value for key, value in (facts.report.get("recipe") or {}).items() if value not in (None, [], {})}
    return f"<details><summary>Keys and seed {escape(str(facts.report.get('seed', '')))}</summary><pre>{escape(json.dumps(kept, indent=2))}</pre></details>"


def _file(name: str) -> str:
    return importlib.resources.files("surgery.publish.html").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
