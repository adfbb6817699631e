"""Helpers that build HTML. Text that is not marked as HTML is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:0 auto;padding:0 1.2rem 4rem;
color:#1d2530;background:#fff}
h1{font-size:1.7rem;margin:1.4rem 0 .2rem}h2{font-size:1.25rem;margin:2.2rem 0 .4rem;padding-top:.6rem;
border-top:1px solid #d9dee5}h3{font-size:1rem;margin:1.1rem 0 .3rem}p{margin:.3rem 0 .7rem;max-width:60rem}
nav{position:sticky;top:0;background:#fffffff2;padding:.5rem 0;border-bottom:1px solid #d9dee5;z-index:1}
nav a{margin-right:1.1rem;color:#1f5fa8;text-decoration:none}nav a:hover{text-decoration:underline}
table{border-collapse:collapse;margin:.4rem 0 .9rem;font-size:.92em}
td,th{padding:.14rem .65rem .14rem 0;text-align:left;vertical-align:top;border-bottom:1px solid #edf0f3}
th{font-weight:600;color:#566070}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font:.86em/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
td code{overflow-wrap:break-word}
pre{background:#f6f8fa;border:1px solid #e3e8ee;border-radius:4px;padding:.6rem .8rem;overflow:auto;max-height:34rem}
details{margin:.12rem 0}details>summary{cursor:pointer}details>div{margin:.1rem 0 .5rem 1.15rem;overflow-x:auto}
summary:hover{background:#f3f6fa}summary .dim,.dim{color:#6a7482}
.bar{display:inline-block;height:.62rem;background:#6c9bd2;min-width:1px;vertical-align:middle}
.bar.hot{background:#d98a4e}.bar.cap{background:#c9d3df}
.warn{background:#fff4d6;border:1px solid #e6c65c;border-radius:4px;padding:.5rem .8rem;margin:.8rem 0}
svg{background:#f6f8fa;border:1px solid #e3e8ee;border-radius:4px;width:100%;height:auto;display:block}
svg rect{stroke:#fff;stroke-width:.4;vector-effect:non-scaling-stroke}
.k0{fill:#4f86c6}.k1{fill:#d98a4e}.k2{fill:#5ea36f}.k3{fill:#a778b8}.k4{fill:#c65f66}.k5{fill:#4fa8a6}.k6{fill:#b0983f}
.k7{fill:#9aa5b1}.key{display:inline-block;width:.8rem;height:.8rem;vertical-align:-.08rem;margin:0 .3rem 0 .9rem}
"""
COLOURS = ("#4f86c6", "#d98a4e", "#5ea36f", "#a778b8", "#c65f66", "#4fa8a6", "#b0983f", "#9aa5b1")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # loads nothing and runs no scripts, whatever a text says


class Html(str):
    """A string that is HTML already."""

    __slots__ = ()


def text(x: Any) -> Html:
    """Convert a value to HTML, escaping it unless it is Html."""
    return x if isinstance(x, Html) else Html(escape(str(x)))


def join(parts: Iterable[Any], between: str = "\n") -> Html:
    """Concatenate values as HTML."""
    return Html(between.join(text(p) for p in parts))


def tag(name: str, *inner: Any, **attributes: Any) -> Html:
    """Return an element; a trailing underscore of an attribute name is dropped (`class_`)."""
    given = "".join(f' {k.rstrip("_")}="{escape(str(v))}"' for k, v in attributes.items())
    return Html(f"<{name}{given}>{join(inner, '')}</{name}>")


def code(x: Any) -> Html:
    """Return a code element."""
    return tag("code", x)


def dim(x: Any) -> Html:
    """Return text in a muted colour."""
    return tag("span", x, class_="dim")


def fold(summary: Any, *body: Any, open_: bool = False) -> Html:
    """Return a collapsible section; needs no script."""
    inner = join(body)
    flag = " open" if open_ else ""
    return Html(f"<details{flag}><summary>{text(summary)}</summary><div>{inner}</div></details>")


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    """Return a table, or "" without rows. Columns of `Number` are right-aligned."""
    found = [list(r) for r in rows]
    if not found:
        return Html("")
    right = [all(isinstance(r[i], Number) for r in found) for i in range(len(heads))]
    cells = "".join(tag("th", h, **({"class_": "n"} if n else {})) for h, n in zip(heads, right, strict=True))
    head = f"<tr>{cells}</tr>" if any(str(h) for h in heads) else ""
    return Html(f"<table>{head}{''.join(_row(r) for r in found)}</table>")


def _row(cells: Sequence[Any]) -> str:
    return f"<tr>{''.join(_cell(c) for c in cells)}</tr>"


class Number(str):
    """A formatted number; table cells right-align it."""

    __slots__ = ()


def number(x: float, form: str = ",") -> Number:
    """Format a number for a table, with thousands separators by default."""
    return Number(format(x, form))


def _cell(c: Any) -> str:
    return f"<td class=n>{escape(c)}</td>" if isinstance(c, Number) else f"<td>{text(c)}</td>"


def bar(share: float, width: int = 180, kind: str = "") -> Html:
    """Return a bar that fills `share` (0 to 1) of `width` pixels."""
    size = max(0.0, min(1.0, share)) * width
    return tag("span", class_=f"bar {kind}".strip(), style=f"width:{size:.0f}px")
