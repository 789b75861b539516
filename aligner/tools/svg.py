"""Small charts as inline SVG: enough for a report that must open anywhere, with nothing to load and nothing to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 24
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#bab0ac")
MAX_POINTS = 400

Curve = Sequence[tuple[float, float | None]]  # (x, y); None is a gap


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def number(value: float) -> str:
    """At most four digits, large ones with k, M, G or T."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


class _Axes:
    def __init__(self, xs: Sequence[float], ys: Sequence[float]):
        self.x0, self.x1 = min(xs), max(xs)
        self.y0, self.y1 = min(ys), max(ys)
        if self.x1 == self.x0:
            self.x1 += 1
        if self.y1 == self.y0:
            margin = abs(self.y0) * 0.1 or 1.0
            self.y0, self.y1 = self.y0 - margin, self.y1 + margin

    def point(self, x: float, y: float) -> str:
        px = LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)
        return f"{px:.1f},{py:.1f}"

    def frame(self) -> str:
        parts = []
        for y in _ticks(self.y0, self.y1):
            _, py = self.point(self.x0, y).split(",")
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py}" y2="{py}"/>')
            parts.append(f'<text x="{LEFT - 4}" y="{py}" text-anchor="end" dy="4">{number(y)}</text>')
        for x in _ticks(self.x0, self.x1):
            px, _ = self.point(x, self.y0).split(",")
            parts.append(f'<text x="{px}" y="{HEIGHT - 8}" text-anchor="middle">{number(x)}</text>')
        return "".join(parts)


def _ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) within [low, high]."""
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin[T: Sequence](points: T) -> T:
    """At most MAX_POINTS of them, at even distances; the last one is kept."""
    stride = -(-len(points) // MAX_POINTS)
    return points[::-stride][::-1] if stride > 1 else points  # type: ignore[return-value]


def _svg(title: str, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'


def lines(title: str, curves: Sequence[tuple[int, Curve]]) -> str:
    """A chart of (colour index, curve) pairs; empty text if there is no point at all."""
    curves = [(index, thin(curve)) for index, curve in curves]
    points = [(x, y) for _, curve in curves for x, y in curve if y is not None]
    if not points:
        return ""
    axes = _Axes([x for x, _ in points], [y for _, y in points])
    body = axes.frame()
    for index, curve in curves:
        for run in _runs(curve):
            if len(run) == 1:
                px, py = axes.point(*run[0]).split(",")
                body += f'<circle cx="{px}" cy="{py}" r="2.5" fill="{color(index)}"/>'
            else:
                path = " ".join(axes.point(x, y) for x, y in run)
                body += f'<polyline points="{path}" fill="none" stroke="{color(index)}" stroke-width="1.6"/>'
    return _svg(title, body)


def _runs(curve: Curve) -> list[list[tuple[float, float]]]:
    """The stretches between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in curve:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def stacked(title: str, xs: Sequence[float], layers: Sequence[Sequence[float]]) -> str:
    """Layers on top of each other, each in the colour of its index; all of len(xs) values >= 0."""
    if not xs or not layers:
        return ""
    keep = thin(range(len(xs)))
    kept_xs = [xs[i] for i in keep]
    base = [0.0] * len(keep)
    tops = []
    for layer in layers:
        top = [b + layer[i] for b, i in zip(base, keep, strict=True)]
        tops.append((base, top))
        base = top
    axes = _Axes(kept_xs, [0.0, *base])
    body = ""
    for index, (low, high) in enumerate(tops):
        there = [axes.point(x, y) for x, y in zip(kept_xs, high, strict=True)]
        back = [axes.point(x, y) for x, y in zip(kept_xs, low, strict=True)][::-1]
        body += f'<polygon points="{" ".join(there + back)}" fill="{color(index)}" stroke="{color(index)}"/>'
    return _svg(title, body + axes.frame())
