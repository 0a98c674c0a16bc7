"""The retention bench as a picture."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["draw"]


class _Cell(Protocol):
    level: float

    def share(self, policy: str, *, after: int = 0) -> float: ...


def draw(path: Path, cells: Sequence[_Cell], policies: Sequence[str]) -> list[str]:
    """Write *path* as .html, and as .png where matplotlib is installed; return the names."""
    levels = sorted({cell.level for cell in cells})
    means = {
        policy: [
            sum(cell.share(policy) for cell in cells if cell.level == level)
            / sum(1 for cell in cells if cell.level == level)
            for level in levels
        ]
        for policy in policies
    }
    page = path.with_suffix(".html")
    page.write_text(_page(levels, means), encoding="utf-8")
    written = [page.name]
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return written
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (policy, values) in enumerate(means.items()):
        # ten colours, then the same again with another line and mark
        line, mark = (("-", "o"), ("--", "s"), (":", "^"))[number // 10 % 3]
        axes.plot(levels, values, line, color=f"C{number % 10}", marker=mark, label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [f"{level:g}x" for level in levels])
    axes.set_xlabel("cache, in sizes of all anchors")
    axes.set_ylabel("share of the gap from LRU to Bélády")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    image = path.with_suffix(".png")
    figure.savefig(image, dpi=120)
    written.append(image.name)
    return written


def _page(levels: Sequence[float], means: dict[str, list[float]]) -> str:
    width, row, left = 640, 22, 120
    low = min(0.0, *(min(values) for values in means.values()))
    scale = (width - left - 60) / (1.0 - low)
    zero = left - low * scale
    parts = []
    for at, level in enumerate(levels):
        bars = []
        ranked = sorted(means, key=lambda policy: (-means[policy][at], policy))
        for place, policy in enumerate(ranked):
            share = means[policy][at]
            y = place * row
            x, length = min(zero, zero + share * scale), abs(share) * scale
            fill = "#2563eb" if policy.startswith("scout") else "#94a3b8"
            bars.append(
                f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{html.escape(policy)}</text>'
                f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="15" fill="{fill}"/>'
                f'<text x="{max(zero, x + length) + 6:.1f}" y="{y + 15}">{share:.2f}</text>'
            )
        height = row * len(ranked)
        parts.append(
            f"<h2>Cache {level:g}x all anchors</h2>"
            f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
            + "".join(bars)
            + "</svg>"
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>scout bench retention</title>'
        "<style>body{font:14px system-ui;margin:2em;max-width:44em}svg text{font:13px system-ui}"
        "</style><h1>Share of the gap from LRU to Bélády</h1>" + "".join(parts) + "</html>\n"
    )
