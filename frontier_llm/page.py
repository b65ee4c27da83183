"""The look of every HTML page that the package writes: one style, and tables of texts."""

from __future__ import annotations

import html
from collections.abc import Iterable

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")
CSS = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6b7b; --line: #d9e0e7; --card: #fff; --page: #f5f7f9 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --soft: #9aa8b5; --line: #33404c; --card: #1b232b; --page: #12181e } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto; max-width: 1080px; padding: 2rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem } p.sub { color: var(--soft); margin: .2rem 0 1.5rem }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem }
.tile, figure, table, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px }
.tile { padding: .7rem 1rem } .tile b { display: block; font-size: 1.35rem } .tile span { color: var(--soft); font-size: .85rem }
figure { margin: 0; padding: .6rem; background: #fff } figure svg { width: 100%; height: auto }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: .8rem }
table { border-collapse: collapse; width: 100% } td, th { padding: .35rem .8rem; text-align: left; border-top: 1px solid var(--line) }
tr:first-child td, tr:first-child th { border-top: 0 }
pre { padding: .8rem 1rem; overflow-x: auto; white-space: pre-wrap }
.mesh { display: flex; gap: .5rem; overflow-x: auto } .stage { flex: 1; border: 1px solid var(--line); border-radius: 8px; padding: .5rem;
 background: var(--card) }
.rank { display: inline-block; border-radius: 5px; padding: .1rem .5rem; margin: .12rem; color: #fff; font-size: .85rem }
"""


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """An HTML table of texts."""

    def row(tag: str, cells: Iterable[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row('th', head)}{''.join(row('td', cells) for cells in rows)}</table>"


def tiles(numbers: Iterable[tuple[object, object]]) -> str:
    """(value, what it is), each in a box."""
    boxes = "".join(
        f"<div class=tile><b>{html.escape(str(value))}</b><span>{html.escape(str(what))}</span></div>" for value, what in numbers
    )
    return f"<div class=tiles>{boxes}</div>"


def page(title: str, body: str) -> str:
    """A whole page, self-contained; the title is a text, the body is HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{CSS}</style></head>\n<body>{body}</body></html>\n'
