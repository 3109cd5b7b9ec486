"""Pieces of HTML: escaped text in, HTML out. No scripts, and nothing that a browser must fetch."""

import base64
import html
from collections.abc import Collection, Iterable, Sequence

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #22262b; background: #fff; margin: 0 auto;
  max-width: 1400px; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 21px; margin: 44px 0 4px;
  border-top: 2px solid #e3e6e9; padding-top: 20px; } h3 { font-size: 16px; margin: 26px 0 6px; }
p { margin: 6px 0; max-width: 90ch; } .pale { color: #646b73; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; font-weight: 600; color: #646b73; } td, th { padding: 4px 14px 4px 0;
  border-bottom: 1px solid #e8eaed; vertical-align: top; white-space: nowrap; }
td.number, th.number { text-align: right; } td.words { white-space: normal; }
tr.best td { background: #eef7ee; } tr.over td { color: #8a8f98; } tr.total td { font-weight: 600; }
pre { background: #f4f5f6; padding: 10px 12px; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; }
img { max-width: 100%; height: auto; display: block; margin: 8px 0; }
.label { font-size: 12px; border-radius: 9px; padding: 1px 8px; background: #e8eaed; }
.label.compiled { background: #dcebdc; } .label.predicted { background: #dfe9f5; }
.label.estimated { background: #f6e7d3; }
.bar { display: inline-block; height: 10px; background: #2f6db3; border-radius: 2px; }
ul { margin: 4px 0; padding-left: 20px; }
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page of parts that are HTML already."""
    joined = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{joined}\n</body></html>\n"
    )


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[int] = (),
    words: Collection[int] = (),
    classes: Sequence[str] = (),
) -> str:
    """A table of cells that are HTML already.

    Args:
      numbers: columns that stand to the right.
      words: columns whose text is wrapped.
      classes: of each row.
    """

    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = [
            "number" if i in numbers else "words" if i in words else "" for i in range(len(cells))
        ]
        pairs = zip(kinds, cells, strict=True)
        return "".join(f"<{tag}{_class(kind)}>{cell}</{tag}>" for kind, cell in pairs)

    made = [f"<tr>{line('th', heads)}</tr>"]
    for number, cells in enumerate(rows):
        kind = classes[number] if classes else ""
        made.append(f"<tr{_class(kind)}>{line('td', cells)}</tr>")
    return f'<div class="wide"><table>{"".join(made)}</table></div>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def label(name: str) -> str:
    """A word on a coloured ground: `compiled`, `predicted`, `estimated`."""
    return f'<span class="label {escaped(name)}">{escaped(name)}</span>'


def bullets(lines: Iterable[str]) -> str:
    """A list of lines of text."""
    return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in lines)}</ul>"


def picture(png: bytes, words: str) -> str:
    """A PNG within the page; `words` stand for it where it is not seen."""
    coded = base64.b64encode(png).decode()
    return f'<img alt="{escaped(words)}" src="data:image/png;base64,{coded}">'


def escaped(text: str) -> str:
    """Text as it may stand in HTML."""
    return html.escape(text)
