"""Small plots as SVG text: lines, bars, a timeline. No script, no network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Line", "TimelineRow", "lines", "timeline"]

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#cb912f", "#787774", "#2f3437")
"""Told apart by colour-blind readers in this order; lines also differ in their dash."""
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4", "4 4", "3 1")
_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 46


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: a name and its points, by x."""

    name: str
    points: Sequence[tuple[float, float]]
    emphasis: bool = False


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw), raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}"
    if abs(value) >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max((last - first) // 6, 1)
    return [10.0**p for p in range(first, last + 1, every) if low <= 10.0**p <= high]


def lines(
    series: Sequence[Line],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    y_from_zero: bool = True,
    y_most: float | None = None,
) -> str:
    """Return a line plot with a legend; empty series are left out."""
    shown = [s for s in series if s.points]
    if not shown:
        return ""
    xs = [p[0] for s in shown for p in s.points if not log_x or p[0] > 0]
    ys = [p[1] for s in shown for p in s.points]
    if not xs:
        return ""
    x0, x1 = min(xs), max(xs)
    y0 = 0.0 if y_from_zero else min(ys)
    y1 = y_most if y_most is not None else max(ys)
    y1 = y1 if y1 > y0 else y0 + 1.0
    if log_x and x1 > 30 * x0:
        a, b = math.log10(x0), math.log10(x1)
    else:
        log_x = False
        a, b = x0, x1 if x1 > x0 else x0 + 1.0

    def px(value: float) -> float:
        at = math.log10(max(value, x0)) if log_x else value
        return _LEFT + (at - a) / (b - a) * (_WIDTH - _LEFT - _RIGHT)

    def py(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_open(title, _HEIGHT + 18 * ((len(shown) + 3) // 4))]
    parts.extend(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{py(tick):.1f}"'
        f' y2="{py(tick):.1f}"/><text class="tick" x="{_LEFT - 6}" y="{py(tick) + 4:.1f}"'
        f' text-anchor="end">{_number(tick)}</text>'
        for tick in _ticks(y0, y1)
    )
    parts.extend(
        f'<text class="tick" x="{px(tick):.1f}" y="{_HEIGHT - _BOTTOM + 16}"'
        f' text-anchor="middle">{_number(tick)}</text>'
        for tick in (_log_ticks(x0, x1) if log_x else _ticks(a, b))
    )
    for number, each in enumerate(shown):
        points = " ".join(f"{px(p[0]):.1f},{py(min(p[1], y1)):.1f}" for p in each.points)
        colour, dash = _style(number)
        width = 3 if each.emphasis else 1.8
        if len(each.points) < 8:
            parts.extend(
                f'<circle cx="{px(p[0]):.1f}" cy="{py(min(p[1], y1)):.1f}" r="4" fill="{colour}"/>'
                for p in each.points
            )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="{width}"'
            f' stroke-dasharray="{dash}" points="{points}"><title>{escape(each.name)}</title>'
            "</polyline>"
        )
    parts.append(_axes(x, y))
    parts.append(_legend([s.name for s in shown]))
    return "".join([*parts, "</svg>"])


def _style(number: int) -> tuple[str, str]:
    return COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)]


def _open(title: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    )


def _axes(x: str, y: str) -> str:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    return (
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}"'
        f' text-anchor="middle">{escape(x)}</text>'
        f'<text class="axis" transform="translate(14 {middle}) rotate(-90)"'
        f' text-anchor="middle">{escape(y)}</text>'
    )


def _legend(names: Sequence[str], colours: Sequence[str] | None = None) -> str:
    parts = []
    for number, name in enumerate(names):
        colour, dash = _style(number)
        if colours is not None:
            colour, dash = colours[number], ""
        x = _LEFT + (number % 4) * 165
        y = _HEIGHT + 8 + 18 * (number // 4)
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"'
            f' stroke-dasharray="{dash}"/><text class="tick" x="{x + 28}" y="{y + 4}">'
            f"{escape(name[:22])}</text>"
        )
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One program (or sub-agent) of a timeline: stretches of (state, start, end)."""

    name: str
    stretches: Sequence[tuple[str, float, float]]


_STATES = {
    "queued": "#c14c8a",
    "paused": "#9065b0",
    "prefill": "#d9730d",
    "decode": "#0b6e99",
    "tool": "#d3d1cb",
}


def timeline(rows: Sequence[TimelineRow], *, title: str) -> str:
    """Return one bar per row over simulated time, coloured by state."""
    rows = [row for row in rows if row.stretches]
    if not rows:
        return ""
    end = max(stop for row in rows for _, _, stop in row.stretches)
    start = min(begin for row in rows for _, begin, _ in row.stretches)
    height = 12
    tall = _TOP + len(rows) * height + _BOTTOM
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {tall + 24}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>"
    ]

    def px(value: float) -> float:
        return _LEFT + (value - start) / max(end - start, 1e-9) * (_WIDTH - _LEFT - _RIGHT)

    for number, row in enumerate(rows):
        y = _TOP + number * height
        parts.append(
            f'<text class="tick" x="{_LEFT - 4}" y="{y + 9}" text-anchor="end">'
            f"{escape(row.name[-9:])}</text>"
        )
        for state, begin, stop in row.stretches:
            wide = max(px(stop) - px(begin), 0.3)
            parts.append(
                f'<rect x="{px(begin):.1f}" y="{y + 1}" width="{wide:.1f}" height="{height - 3}"'
                f' fill="{_STATES.get(state, "#000")}"/>'
            )
    base = _TOP + len(rows) * height
    parts.extend(
        f'<text class="tick" x="{px(tick):.1f}" y="{base + 14}" text-anchor="middle">'
        f"{_number(tick)}</text>"
        for tick in _ticks(start, end)
    )
    parts.append(
        f'<text class="axis" x="{_WIDTH / 2}" y="{base + 30}" text-anchor="middle">'
        "simulated seconds</text>"
    )
    legend = _legend(list(_STATES), list(_STATES.values()))
    shift = base + 40 - _HEIGHT
    parts.append(f'<g transform="translate(0 {shift})">{legend}</g>')
    return "".join([*parts, "</svg>"])
