"""The page put together: one file, its style and its script inside, nothing fetched, nothing run that is not its own."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from html import escape
from pathlib import Path

from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write, check_not_dangling, explain_disk_errors
from surgery.core.version import __version__
from surgery.publish.html import sections
from surgery.publish.html.data import PageData, load_page_data

PAGE_NAME = "report.html"
SECTIONS = (
    ("model", "The model", sections.model_section),
    ("errors", "Errors and ranks", sections.error_section),
    ("costs", "Costs", sections.cost_section),
    ("training", "Healing", sections.training_section),
    ("measured", "Before and after", sections.eval_section),
    ("matrices", "Every matrix", sections.matrix_section),
)


def write_page(converted: str, out: Path | None = None, measured: Path | None = None) -> Path:
    """OUT/report.html, or the file `out`; made beside and renamed."""
    try:
        data = load_page_data(converted, measured)
        text = render_page(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SurgeryError(
            f"the report or the results of {converted} are not as surgery writes them ({type(error).__name__}: {error}); "
            "`surgery convert` and `surgery eval` write them anew"
        ) from None
    target = out or data.folder / PAGE_NAME
    check_not_dangling(target)
    if target.is_dir():
        raise SurgeryError(f"{target} is a folder; give a file, for example {target / PAGE_NAME}")
    if not target.absolute().parent.is_dir():
        raise SurgeryError(f"{target.absolute().parent} is not a folder; make it first")
    with explain_disk_errors(target), atomic_write(target, "w") as file:
        file.write(text)
    return target


def render_page(data: PageData) -> str:
    parts = [(key, name, make(data)) for key, name, make in SECTIONS]
    top = sections.headline_figures(data)
    shown = [(key, name, text) for key, name, text in parts if text]
    title = f"{Path(data.name).name} by surgery"
    links = " · ".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, _ in shown)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in data.notes)
    script, style = _read_resource("page.js"), _read_resource("page.css")
    rules = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_csp_hash(script)}'; base-uri 'none'; form-action 'none'"
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
<h1>{escape(Path(data.name).name)}</h1>
<p class="lead">{_subtitle(data)}</p>
<nav aria-label="Sections">{links}</nav>
{top}
</header>
<main id="content">
{"".join(f"<section aria-labelledby={key}>{text}</section>" for key, _, text in shown)}
{notes}
<section aria-labelledby=recipe><h2 id=recipe>The recipe</h2>{_recipe_html(data)}</section>
</main>
<footer>Made by surgery {escape(__version__)} from surgery_report.json and what lies beside it.</footer>
<script>{script}</script>
</body>
</html>
"""


def _subtitle(data: PageData) -> str:
    report = data.report
    source = report.get("source", {})
    at = f" at {source['revision'][:10]}" if source.get("revision") else ""
    kind = f" ({report['model_type']})" if report.get("model_type") else ""
    healed = ", healed" if report.get("training") else ""
    return escape(
        f"{Path(str(source.get('name', ''))).name}{kind}{at}, converted{healed} by surgery {report.get('surgery', '')}"
    )


def _recipe_html(data: PageData) -> str:
    kept = {key: value for key, value in (data.report.get("recipe") or {}).items() if value not in (None, [], {})}
    return f"<details><summary>Keys and seed {escape(str(data.report.get('seed', '')))}</summary><pre>{escape(json.dumps(kept, indent=2))}</pre></details>"


def _read_resource(name: str) -> str:
    return importlib.resources.files("surgery.publish.html").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
