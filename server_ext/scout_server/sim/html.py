"""One self-contained page of a comparison: figures, plots, settings."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from scout_server.report import versions
from scout_server.sim.record import CellRecord
from scout_server.sim.svg import Line, TimelineRow, lines, timeline
from scout_server.sim.traces.inspection import Inspection, ReusePoint

__all__ = ["inspection_html", "report_html", "write_report"]

_STYLE = """
:root{color-scheme:light dark;--ink:#2f3437;--soft:#787774;--paper:#fff;--rule:#e6e5e3}
@media(prefers-color-scheme:dark){:root{--ink:#e3e2e0;--soft:#9b9a97;--paper:#191919;--rule:#373737}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
margin:2rem auto;max-width:980px;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .5rem;border-bottom:1px solid var(--rule);text-align:right}
th:first-child,td:first-child{text-align:left}
svg{width:100%;height:auto}.tick{font-size:11px;fill:var(--soft)}
.axis{font-size:12px;fill:var(--ink)}.grid{stroke:var(--rule)}
p.note,code{color:var(--soft)}pre{overflow:auto;font-size:12px}
"""


def _figures(records: Sequence[CellRecord]) -> str:
    head = ("run", "programs", "JCT mean s", "p50", "p99", "TTFT mean s", "p99", "hit rate",
            "tokens/s", "busy", "preempted")  # fmt: skip
    rows = []
    for r in records:
        cells = (
            escape(r.label), f"{r.programs:,}", f"{r.jct_s.mean:.2f}", f"{r.jct_s.p50:.2f}",
            f"{r.jct_s.p99:.2f}", f"{r.ttft_s.mean:.3f}", f"{r.ttft_s.p99:.3f}",
            f"{r.hit_rate:.3f}", f"{r.tokens_per_s:,.0f}", f"{r.busy_fraction:.2f}",
            f"{r.preemptions:,}",
        )  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _policy(record: CellRecord) -> str:
    residency = record.settings.get("residency")
    return str(residency.get("policy")) if isinstance(residency, dict) else record.label


def _sizes(records: Sequence[CellRecord], reuse: Sequence[ReusePoint]) -> str:
    """Return the plot of hit rate against cache size, if there is more than one size."""
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        by_policy.setdefault(_policy(record), []).append((record.kv_blocks, record.hit_rate))
    series = [Line(name, sorted(points)) for name, points in by_policy.items()]
    blocks = {record.kv_blocks for record in records}
    if reuse:
        series.append(
            Line("Bélády, recorded order", [(p.blocks, p.belady) for p in reuse], emphasis=True)
        )
        series.append(Line("LRU, recorded order", [(p.blocks, p.lru) for p in reuse]))
    if len(blocks) < 2 and not reuse:
        return ""
    plot = lines(
        series, title="Hit rate against cache size", x="KV blocks of a replica", y="hit rate",
        log_x=True, y_most=1.0,
    )  # fmt: skip
    note = (
        '<p class="note">Recorded order: prompts in the order of the trace, one cache, no timing.'
        " Simulated runs are points of the policies.</p>"
    )
    return f"<h2>Hit rate against cache size</h2>{plot}{note}"


def _timeline(record: CellRecord) -> str:
    rows: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for span in record.spans:
        rows.setdefault((span.program, span.lane), []).append(
            (span.state, span.start_s, span.end_s)
        )
    made = [
        TimelineRow(name if not lane else f"{name}/{lane}", stretches)
        for (name, lane), stretches in list(rows.items())[:40]
    ]
    plot = timeline(made, title=f"Programs over time, {record.label}")
    return f"<h2>Programs over time: {escape(record.label)}</h2>{plot}" if plot else ""


def report_html(
    records: Sequence[CellRecord], command: str, reuse: Sequence[ReusePoint] = ()
) -> str:
    """Return the page; it needs no file and no network beside itself."""
    seed = records[0].settings.get("seed") if records else None
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    jct = lines(
        [Line(r.label, r.jct_points) for r in records],
        title="Job completion time", x="seconds from arrival to end", y="share of programs",
        log_x=True, y_most=1.0,
    )  # fmt: skip
    used = lines(
        [Line(r.label, [(t, u) for t, u, _ in r.occupancy]) for r in records],
        title="HBM blocks in use", x="simulated seconds", y="share of blocks", y_most=1.0,
    )  # fmt: skip
    tier = lines(
        [Line(r.label, [(t, v) for t, _, v in r.occupancy]) for r in records if r.stored_tokens],
        title="Tier blocks filled", x="simulated seconds", y="share of blocks", y_most=1.0,
    )  # fmt: skip
    # The longest-lived difference is seen where the programs are the same: first and last run.
    chosen = records if len(records) < 3 else (records[0], records[-1])
    settings = json.dumps(records[0].settings, indent=1) if records else ""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>Scout simulation</title><style>{_STYLE}</style></head><body>",
        "<h1>Scout simulation</h1>",
        f"<p class='note'><code>{escape(command)}</code> · seed {seed} · {escape(packages)}</p>",
        _figures(records),
        f"<h2>Job completion time</h2>{jct}",
        _sizes(records, reuse),
        f"<h2>HBM in use by running requests</h2>{used}" if used else "",
        f"<h2>Tiers</h2>{tier}" if tier else "",
        *[_timeline(record) for record in chosen],
        f"<h2>Settings of the first run</h2><pre>{escape(settings)}</pre>",
        "</body></html>",
    ]
    return "".join(parts)


def write_report(
    path: Path, records: Sequence[CellRecord], command: str, reuse: Sequence[ReusePoint] = ()
) -> None:
    """Write the page to *path*."""
    path.write_text(report_html(records, command, reuse), "utf-8")


def inspection_html(found: Inspection, command: str) -> str:
    """Return a page with the plots of a trace: gaps, and hit rate against cache size."""
    gaps = lines(
        [Line("all gaps", found.gap_points)],
        title="Gaps", x="seconds", y="share of gaps up to it", log_x=True, y_most=1.0,
    )  # fmt: skip
    curve = lines(
        [
            Line("Bélády", [(p.tokens, p.belady) for p in found.curve], emphasis=True),
            Line("LRU", [(p.tokens, p.lru) for p in found.curve]),
        ],
        title="Hit rate against cache size", x="tokens of cache", y="hit rate", log_x=True,
        y_most=1.0,
    )  # fmt: skip
    working = (
        f"{found.live_tokens_mean:,.0f} on average, {found.live_tokens_p90:,.0f} for nine tenths of"
        f" the time, {found.live_tokens_peak:,.0f} at most"
    )
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>Scout trace</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(found.info.source)}</h1>",
        f"<p class='note'><code>{escape(command)}</code></p>",
        f"<p>{found.programs:,} programs, {found.turns:,} turns, reuse {found.reuse:.3f}."
        f" Working set, tokens of programs under way: {working}.</p>",
        f"<h2>Hit rate against cache size</h2>{curve}" if curve else "",
        f"<h2>Gaps</h2>{gaps}" if gaps else "",
        "</body></html>",
    ]
    return "".join(parts)
