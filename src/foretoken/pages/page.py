"""What pages have in common: skeleton, colours, layout."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { --ink: #1c2330; --soft: #5b6575; --line: #dfe3ea; --paper: #fff; --panel: #f6f7f9; --band: #c9d3e3;
  --blue: #2f6fde; --red: #d0342c; --green: #1b7f4b; --amber: #a86400; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --soft: #9aa4b4; --line: #2c3442; --paper: #12161d;
  --panel: #1a2029; --band: #3a4658; --blue: #74a5ff; --red: #ff7a70; --green: #5cc98d; --amber: #e8b04b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 22px; margin: 0 0 8px; } h2 { font-size: 18px; margin: 36px 0 6px; } h3 { font-size: 15px; margin: 0; }
p { margin: 4px 0; max-width: 84ch; } .soft { color: var(--soft); } .small { font-size: 13px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 14px 0; } dt { color: var(--soft); }
dd { margin: 0; } .wide { overflow-x: auto; } table { border-collapse: collapse; margin: 10px 0 18px; font-size: 14px; }
th, td { text-align: right; border-bottom: 1px solid var(--line); padding: 4px 12px; white-space: pre-line;
  font-variant-numeric: tabular-nums; vertical-align: top; } th { color: var(--soft); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 16px; align-items: start; }
figure { margin: 0; background: var(--panel); border-radius: 6px; padding: 14px 16px; } figure p { margin: 2px 0 8px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .axis { stroke: var(--line); } .key { max-width: none; } .key span { margin-right: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--soft); }
@media (max-width: 560px) { .plots { grid-template-columns: 1fr; } main { padding: 20px 14px; } }
"""


def whole(title: str, body: str, style: str = "") -> str:
    """A page.

    Args:
        title: of the window.
        body: HTML.
        style: CSS besides the common one.
    """
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body><main>
{body}
</main></body></html>
"""


def facts(known: list[tuple[str, str]]) -> str:
    """Names and values as a list of two columns."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in known) + "</dl>"


def figure(title: str, note: str, picture: str) -> str:
    """A plot with its title and a note; both are HTML already where they carry marks, see `html.escape`."""
    return f'<figure><h3>{title}</h3><p class="small soft">{note}</p>{picture}</figure>'
