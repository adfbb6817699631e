"""Plot the share of the floor by batch size, ours and vLLM's, as an SVG.

python -m bench.gpu.plot RESULTS.json|ROWS.jsonl ... [-o docs/share-of-floor.svg]

Of several rows for the same measurement, the last one is plotted.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from bench.gpu.rows import Row, read

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 62, 190, 46, 52
COLOURS = ("#1f5fbf", "#c2571a", "#2f8a4e", "#7a4fb0", "#8a6d1f")
Point = tuple[int, float]


def load(path: Path) -> list[Row]:
    """Return the rows of a run's results.json or rows.jsonl."""
    if path.suffix == ".jsonl":
        return read(path)
    rows = json.loads(path.read_text())["rows"]
    return [Row(**{k: v for k, v in r.items() if k not in ("share", "verdict")}) for r in rows]


def lines(rows: Iterable[Row]) -> dict[str, tuple[list[Point], list[Point]]]:
    """Return model -> our points and vLLM's: (batch, share of the floor)."""
    out: dict[str, tuple[list[Point], list[Point]]] = {}
    for row in sorted((r for r in rows if r.suite == "decode"), key=lambda r: int(r.case)):
        ours, peer = out.setdefault(row.model, ([], []))
        if row.share is not None:
            ours.append((int(row.case), row.share))
        if row.peer_share is not None:
            peer.append((int(row.case), row.peer_share))
    return out


def svg(rows: Sequence[Row]) -> str:
    """Return the SVG; raises ValueError if there is no decode row."""
    lines_of = lines(rows)
    batches = sorted({b for pair in lines_of.values() for points in pair for b, _ in points})
    if not batches:
        raise ValueError("there is no decode row to draw")
    high = max(1.0, max(s for pair in lines_of.values() for points in pair for _, s in points))
    x = {b: LEFT + i * (WIDTH - LEFT - RIGHT) / max(1, len(batches) - 1) for i, b in enumerate(batches)}
    parts = [*_frame(batches, x, high)]
    for i, (model, (ours, peer)) in enumerate(lines_of.items()):
        colour = COLOURS[i % len(COLOURS)]
        parts += _line(ours, x, high, colour, "")
        parts += _line(peer, x, high, colour, ' stroke-dasharray="5 4"')
        parts += _legend(model, i, colour)
    body = "\n".join(f"  {p}" for p in parts)
    box, font = f'viewBox="0 0 {WIDTH} {HEIGHT}"', 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>\n{body}\n</svg>\n'


def _y(share: float, high: float) -> float:
    return HEIGHT - BOTTOM - share / high * (HEIGHT - TOP - BOTTOM)


def _frame(batches: Sequence[int], x: dict[int, float], high: float) -> list[str]:
    """Return the background, the grid, and the axes with their labels."""
    right = WIDTH - RIGHT
    out = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for step in range(math.ceil(high * 5) + 1):
        share = step / 5
        if share <= high + 1e-9:
            y = _y(share, high)
            out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    out += [f'<text x="{x[b]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{b}</text>' for b in batches]
    middle = (LEFT + right) / 2
    out.append(f'<text x="{middle:.1f}" y="{HEIGHT - 12}" text-anchor="middle">sequences that decode at once</text>')
    title = "Decode: share of the roofline floor (100 % is the floor; higher is better)"
    out.append(f'<text x="{LEFT}" y="24" font-size="14">{title}</text>')
    return out


def _line(points: Sequence[Point], x: dict[int, float], high: float, colour: str, dash: str) -> list[str]:
    if not points:
        return []
    at = [(x[b], _y(s, high)) for b, s in points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in at)
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>']
    for (px, py), (b, s) in zip(at, points):
        out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"><title>{b}: {s:.1%}</title></circle>')
    return out


def _legend(model: str, index: int, colour: str) -> list[str]:
    out = []
    for j, (who, dash) in enumerate((("llmc", ""), ("vLLM", ' stroke-dasharray="5 4"'))):
        x, y = WIDTH - RIGHT + 14, TOP + 12 + (2 * index + j) * 20
        line = f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
        out += [line, f'<text x="{x + 32}" y="{y}">{escape(model)} {who}</text>']
    return out


def main(argv: Sequence[str]) -> None:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.plot", description="draw the share of the floor by batch")
    ap.add_argument("rows", type=Path, nargs="+")
    ap.add_argument("-o", "--output", type=Path, default=Path("docs/share-of-floor.svg"))
    args = ap.parse_args(argv)
    latest = {(r.suite, r.model, r.case): r for path in args.rows for r in load(path)}
    args.output.write_text(svg(list(latest.values())))
    print(args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
