"""Render the page of `remat report`: a self-contained HTML file for screen (light and dark) and paper."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
import markupsafe


@dataclass(frozen=True)
class Table:
    """A table with a title; every cell is text.

    `note` explains what could be misread. A `wide` table takes the full width of the page.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Picture:
    """One chart as PNG bytes for a light and a dark page; `alt` says what it shows."""

    name: str
    alt: str
    light: bytes
    dark: bytes


@dataclass(frozen=True)
class Page:
    """The content of the page. `figures` are (label, value, detail); `sources` are (file name, its text)."""

    title: str
    subtitle: str
    summary: str
    facts: list[tuple[str, str]]
    figures: list[tuple[str, str, str]]
    pictures: list[Picture]
    absent: list[str]
    tables: list[Table]
    sources: list[tuple[str, str]]
    facts_title: str = "The run"


def render(page: Page) -> str:
    """Return the page as HTML without references to other files."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = _data_uri
    count = len(page.figures)
    columns = count if count <= 5 else math.ceil(count / 2)
    return environment.from_string(TEMPLATE).render(page=page, columns=columns, style=markupsafe.Markup(STYLE))


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f6f8; --card: #ffffff; --text: #1d2530; --soft: #5a6675; --line: #dfe4ea; --accent: #2f6fc4;
}
@media screen and (prefers-color-scheme: dark) {
  :root { --page: #0f1318; --card: #171c23; --text: #dfe5ec; --soft: #98a4b3; --line: #2a323c; --accent: #6ea8f2; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
main.broad { max-width: 82rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.02rem; margin: 0 0 0.75rem; }
.subtitle { color: var(--soft); margin: 0.3rem 0 0; font-variant-numeric: tabular-nums; }
.summary { margin: 0.9rem 0 0; max-width: 46rem; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1.1rem 1.25rem;
  margin-top: 1.25rem; break-inside: avoid;
}
.figures {
  display: grid; grid-template-columns: repeat(var(--columns), minmax(0, 1fr)); gap: 0.9rem; margin: 1.75rem 0 0;
}
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.85rem 1rem; }
.figure dt { color: var(--soft); font-size: 0.82rem; }
.figure dd { margin: 0; }
.figure .value {
  font-size: 1.45rem; font-weight: 650; line-height: 1.3; font-variant-numeric: tabular-nums; white-space: nowrap;
}
.figure .detail { color: var(--soft); font-size: 0.82rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); gap: 0.15rem 2rem; margin: 0; }
.facts div { display: grid; grid-template-columns: 8.5rem 1fr; gap: 0.75rem; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.picture { padding: 0.6rem 0.7rem; }
.picture img { display: block; width: 100%; height: auto; }
.tables { columns: 25rem 2; column-gap: 1.25rem; }
.tables .card { display: inline-block; width: 100%; }
.tables .wide { display: block; column-span: all; }
.wide td:not(:first-child), .wide th:not(:first-child) { padding-left: 0.6rem; font-size: 0.88rem; }
.wide thead th { white-space: normal; vertical-align: bottom; }
.wide th[scope=row] { min-width: 9rem; overflow-wrap: anywhere; }
td.long { white-space: normal; text-align: left; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.32rem 0 0.32rem 1.1rem; border-top: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; font-weight: inherit; }
thead th { border-top: 0; color: var(--soft); font-weight: 500; font-size: 0.82rem; }
.note { color: var(--soft); font-size: 0.82rem; margin: 0.7rem 0 0; }
details { margin-top: 0.6rem; }
summary { cursor: pointer; color: var(--accent); }
pre {
  overflow-x: auto; font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  background: var(--page); border: 1px solid var(--line); border-radius: 8px; padding: 0.8rem 1rem; margin: 0.6rem 0 0;
}
@media screen and (max-width: 48rem) {
  .facts { grid-template-columns: minmax(0, 1fr); }
}
@media screen and (max-width: 60rem) {
  .figures { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
}
@media screen and (max-width: 72rem) {
  .wide thead { display: none; }
  .wide tr { display: block; border-top: 1px solid var(--line); padding: 0.4rem 0; }
  .wide th[scope=row] { display: block; font-weight: 600; border: 0; }
  .wide td { display: grid; grid-template-columns: minmax(0, 1fr) auto; gap: 1rem; border: 0; padding: 0.1rem 0; }
  .wide td:not(:first-child) { padding-left: 0; }
  .wide td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  .wide td { white-space: normal; }
  .wide td.long { display: block; }
  .wide td:empty { display: none; }
}
@media screen and (max-width: 30rem) {
  main { padding: 1.5rem 0.75rem; }
  .tables { columns: 1; }
  .card:not(.wide) td, .card:not(.wide) thead th { white-space: normal; padding-left: 0.4rem; }
  .card:not(.wide) :is(table, thead, tbody):has(tr > :nth-child(4):last-child) { display: block; }
  .card:not(.wide) tr:has(> :nth-child(4):last-child) {
    display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); border-top: 1px solid var(--line);
  }
  .card:not(.wide) tr:has(> :nth-child(4):last-child) > * { border: 0; }
  .card:not(.wide) tr:has(> :nth-child(4):last-child) > :first-child { grid-column: 1 / -1; padding-bottom: 0; }
  .card:not(.wide) thead tr:has(> :nth-child(4):last-child) { border: 0; }
  .facts div { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .figure .value { font-size: 1.2rem; }
}
@media print {
  :root { --page: #ffffff; --soft: #444c56; }
  body { font-size: 10.5pt; }
  main { max-width: none; padding: 0; }
  .card { margin-top: 0.8rem; }
  .picture img { width: auto; max-width: 100%; max-height: 9.5cm; margin: 0 auto; }
  .tables { columns: auto; }
  .tables .card { display: block; }
  .scroll { overflow: visible; }
  .sources { display: none; }
}
"""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }} {{ page.subtitle }}</title>
<style>{{ style }}</style>
</head>
<body>
<main{% if page.tables|selectattr("wide")|list %} class="broad"{% endif %}>
<header>
<h1>{{ page.title }}</h1>
<p class="subtitle">{{ page.subtitle }}</p>
{% if page.summary %}
<p class="summary">{{ page.summary }}</p>
{% endif %}
</header>
{% if page.figures %}
<dl class="figures" style="--columns: {{ columns }}">
{% for label, value, detail in page.figures %}
<div class="figure"><dt>{{ label }}</dt><dd class="value">{{ value }}</dd><dd class="detail">{{ detail }}</dd></div>
{% endfor %}
</dl>
{% endif %}
{% if page.facts %}
<section class="card">
<h2>{{ page.facts_title }}</h2>
<dl class="facts">
{% for label, value in page.facts %}
<div><dt>{{ label }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
</section>
{% endif %}
{% for picture in page.pictures %}
<section class="card picture">
<picture>
<source media="screen and (prefers-color-scheme: dark)" srcset="{{ picture.dark | data_uri }}">
<img src="{{ picture.light | data_uri }}" alt="{{ picture.alt }}">
</picture>
</section>
{% endfor %}
{% for text in page.absent %}
<p class="note">{{ text }}</p>
{% endfor %}
<div class="tables">
{% for table in page.tables %}
<section class="card{{ " wide" if table.wide }}">
<h2>{{ table.title }}</h2>
<div class="scroll">
<table>
<thead><tr>{% for name in table.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr><th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}
<td data-label="{{ table.head[loop.index] }}"{% if cell|length > 60 %} class="long"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
{% if table.note %}
<p class="note">{{ table.note }}</p>
{% endif %}
</section>
{% endfor %}
</div>
{% if page.sources %}
<section class="card sources">
<h2>Everything it was run with</h2>
{% for name, text in page.sources %}
<details><summary>{{ name }}</summary><pre>{{ text }}</pre></details>
{% endfor %}
</section>
{% endif %}
</main>
</body>
</html>
"""
