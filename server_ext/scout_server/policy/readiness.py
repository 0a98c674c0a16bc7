"""When does a session's tool return? Readiness of sessions in a tool gap (issue 2, section 4)."""

import enum
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from scout_sdk._hints import HUMAN, Evidence, SessionEvent, ToolEvent, ToolState
from scout_server.policy.durations import DurationHistory

__all__ = ["Forecast", "Readiness", "ReadinessSettings", "Source"]

_CLOSED = frozenset({ToolState.ENDED, ToolState.FAILED})


class Source(enum.Enum):
    """What a forecast rests on, strongest first."""

    COMPLETED = "completed"
    PROGRESS = "progress"
    """A client's own estimate: extrapolated progress, or declared."""
    DEADLINE = "deadline"
    SLEEP = "sleep"
    TOOL = "tool-history"
    GLOBAL = "global-history"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessSettings:
    """Settings of the readiness predictor."""

    window_s: Annotated[float, Ge(0)] = 1.0
    """A session is ready this long before its predicted return."""
    refresh_s: Annotated[float, Gt(0)] = 30.0
    """A client's predicted time counts only this long after it was last sent."""
    default_s: Annotated[float, Ge(0)] = 5.0
    """Expected duration of a tool when nothing at all is known."""
    probes: Annotated[int, Ge(0)] = 3
    """How often one gap's overdue session may be taken for ready."""
    probe_s: Annotated[float, Gt(0)] = 1.0
    """How long a probe lasts; the pause after the n-th one is 2^n times as long."""
    max_probing: Annotated[int, Ge(0)] = 16
    """Sessions that may be probed at the same time."""
    max_sessions: Annotated[int, Ge(1)] = 4096
    """Sessions remembered; the one heard of longest ago is forgotten first."""
    max_calls: Annotated[int, Ge(1)] = 64
    """Tool calls remembered per session."""
    max_tools: Annotated[int, Ge(1)] = 1024
    """Tools with a history of their own, over all tenants."""
    samples: Annotated[int, Ge(1)] = 64
    """Latest durations kept per tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of one session's return."""

    ready: bool
    remaining_s: float
    """Expected seconds until the last of its tools returns; 0 when overdue or done."""
    source: Source
    """Evidence behind the tool that is expected last."""
    overdue_s: float
    """Seconds since the session should have been back; 0 when it is not overdue."""
    recheck_s: float | None
    """Seconds until this forecast may change by itself; None: only an event changes it."""


@dataclass(slots=True)
class _Call:
    """One tool call; times are absolute on the caller's clock."""

    name: str
    agent: str | None
    started: float
    presumed: bool = False
    """Opened from the model's output; the client has not spoken of it yet."""
    done: bool = False
    progress: tuple[float, float] | None = None
    """(predicted end, when it was sent)."""
    deadline: tuple[float, float] | None = None
    sleep_until: float | None = None


@dataclass(slots=True)
class _Gap:
    calls: OrderedDict[str, _Call] = field(default_factory=OrderedDict)
    anonymous: int = 0
    probes: int = 0
    probe_until: float = -math.inf
    probe_next: float = -math.inf


def _seconds(value: float | None) -> float | None:
    """Return *value* if it is a usable duration, else None."""
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return value


class Readiness:
    """
    Predicts when sessions in a tool gap come back, and which are ready now.

    Evidence, strongest first: completion; progress or deadline hint; parsed sleep; the tool's
    history; all tools' history; a constant. A deadline is only a bound for a tool that was seen to
    end before most of its deadlines. Histories are per tenant. All tables are bounded, the least
    recently used entry is forgotten; a call forgotten while open is a censored duration. `now`
    never goes back. A parsed sleep does not go stale, because the command does not change.
    """

    def __init__(self, settings: ReadinessSettings | None = None) -> None:
        self.settings = settings or ReadinessSettings()
        self._gaps: OrderedDict[tuple[str, str], _Gap] = OrderedDict()
        self._tools: OrderedDict[tuple[str, str], DurationHistory] = OrderedDict()
        self._global: OrderedDict[str, DurationHistory] = OrderedDict()
        self._probing: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        """Return the number of sessions in a tool gap."""
        return len(self._gaps)

    # ---- facts -----------------------------------------------------------------------------

    def gap(
        self,
        session: str,
        tools: Iterable[tuple[str, float | None]] = (),
        *,
        agent: str | None = None,
        tenant: str = "",
        now: float,
    ) -> None:
        """
        A turn ended and the session went off to run *tools* (name, parsed sleep seconds).

        Without tools the session waits for something unknown, under the empty name. A call that the
        client has told of by now is not a second one, and what the client said of it counts.
        """
        named = list(tools) or [("", None)]
        gap = self._open(tenant, session, now=now)
        told = [call.name for call in gap.calls.values() if not call.presumed]
        for name, sleep_s in named:
            if name in told:
                told.remove(name)
                continue
            sleep = _seconds(sleep_s)
            self._add(
                gap,
                self._anonymous(gap, name),
                _Call(
                    name=name,
                    agent=agent,
                    started=now,
                    presumed=True,
                    sleep_until=None if sleep is None else now + sleep,
                ),
                tenant=tenant,
                now=now,
            )

    def event(self, event: SessionEvent, *, tenant: str = "", now: float) -> None:
        """Learn from the side channel; a final event ends the session."""
        if event.tool is not None:
            self.tool(
                event.session,
                event.tool,
                agent=event.agent,
                age_s=event.age_s,
                tenant=tenant,
                now=now,
            )
        if event.final:
            self.forget(event.session, tenant=tenant, now=now)

    def tool(
        self,
        session: str,
        event: ToolEvent,
        *,
        agent: str | None = None,
        age_s: float = 0.0,
        tenant: str = "",
        now: float,
    ) -> None:
        """
        Learn one tool event that happened *age_s* seconds ago.

        The times of a call that runs are as of *now*, those of an ended one as of its end.
        """
        at = now - (_seconds(age_s) or 0.0)
        elapsed = _seconds(event.elapsed_s)
        remaining = _seconds(event.remaining_s)
        closed = event.state in _CLOSED
        began = at if elapsed is None else (at if closed else now) - elapsed
        gap = self._open(tenant, session, now=now)
        key = self._find(gap, event)
        call = gap.calls.get(key)
        if call is not None and call.done:
            return  # late or repeated news of a call that has ended
        if call is None:
            call = _Call(name=event.name, agent=agent, started=began)
            known = elapsed is not None
            self._add(gap, key, call, tenant=tenant, now=now)
        else:
            known = True
            if elapsed is not None or (call.presumed and event.state is ToolState.STARTED):
                call.started = began
            call.presumed = False
            call.agent = agent if agent is not None else call.agent
        if closed:
            call.done = True
            if known:
                duration = elapsed if elapsed is not None else max(0.0, at - call.started)
                self._learn(tenant, call.name, duration, censored=False)
                self._note_deadline(tenant, call, call.started + duration)
        elif remaining is not None:
            if event.evidence is Evidence.SLEEP:
                call.sleep_until = now + remaining
            elif event.evidence is Evidence.DEADLINE:
                call.deadline = (now + remaining, now)
            else:
                call.progress = (now + remaining, now)

    def turn(
        self,
        session: str,
        tools: Iterable[ToolEvent] = (),
        *,
        agent: str | None = None,
        tenant: str = "",
        now: float,
    ) -> None:
        """
        Learn that the session's next request arrived, with *tools* as its hints.

        Calls that are still open have returned by now, unless the request says otherwise or comes
        from another agent of the session.
        """
        tools = tuple(tools)
        for event in tools:
            self.tool(session, event, agent=agent, tenant=tenant, now=now)
        gap = self._gaps.get((tenant, session))
        if gap is None:
            return
        running = {self._find(gap, e) for e in tools if e.state not in _CLOSED}
        for key, call in list(gap.calls.items()):
            if not call.done:
                other = agent is not None and call.agent is not None and call.agent != agent
                if key in running or other:
                    continue
                self._learn(tenant, call.name, max(0.0, now - call.started), censored=False)
                self._note_deadline(tenant, call, now)
            del gap.calls[key]
        if not gap.calls:
            self._close((tenant, session))

    def forget(self, session: str, *, tenant: str = "", now: float) -> None:
        """Drop a session that ended; its open calls count as censored. Unknown: ignored."""
        gap = self._gaps.get((tenant, session))
        if gap is not None:
            self._censor(gap, tenant, now=now)
            self._close((tenant, session))

    # ---- questions -------------------------------------------------------------------------

    def forecast(self, session: str, *, tenant: str = "", now: float) -> Forecast | None:
        """Return what is known of the session's return, None outside a tool gap; change nothing."""
        gap = self._gaps.get((tenant, session))
        if gap is None:
            return None
        last, source = -math.inf, Source.COMPLETED
        overdue = False
        for call in gap.calls.values():
            if call.done:
                continue
            end, kind = self._expected_end(call, tenant, now=now)
            overdue = overdue or end < now
            if end > last:
                last, source = end, kind
        if source is Source.COMPLETED:
            return Forecast(
                ready=True, remaining_s=0.0, source=source, overdue_s=0.0, recheck_s=None
            )
        window = self.settings.window_s
        remaining = max(0.0, last - now)
        probing = now < gap.probe_until
        ready = remaining <= window and (not overdue or probing)
        recheck: float | None
        if remaining > window:
            recheck = remaining - window
        elif not overdue:
            recheck = remaining
        elif probing:
            recheck = gap.probe_until - now
        elif gap.probes < self.settings.probes:
            recheck = max(0.0, gap.probe_next - now)
        else:
            recheck = None
        return Forecast(
            ready=ready,
            remaining_s=remaining,
            source=source,
            overdue_s=max(0.0, now - last),
            recheck_s=recheck,
        )

    def assess(self, session: str, *, tenant: str = "", now: float) -> Forecast | None:
        """Return the forecast after granting an overdue session a probe, if one is due."""
        forecast = self.forecast(session, tenant=tenant, now=now)
        if forecast is None or forecast.ready or forecast.remaining_s > self.settings.window_s:
            return forecast
        key = (tenant, session)
        gap = self._gaps[key]
        if gap.probes >= self.settings.probes or now < gap.probe_next:
            return forecast
        self._probing = {k: until for k, until in self._probing.items() if until > now}
        if len(self._probing) >= self.settings.max_probing:
            return forecast
        gap.probes += 1
        gap.probe_until = now + self.settings.probe_s
        gap.probe_next = gap.probe_until + self.settings.probe_s * 2**gap.probes
        self._probing[key] = gap.probe_until
        return self.forecast(session, tenant=tenant, now=now)

    def expected_s(self, tool: str, *, tenant: str = "") -> tuple[float, Source]:
        """Return how long *tool* is expected to take when only its name is known."""
        history = self._tools.get((tenant, tool))
        if history is not None and (median := history.median_s()) is not None:
            return median, Source.TOOL
        overall = self._global.get(tenant)
        if overall is not None and (median := overall.median_s()) is not None:
            return median, Source.GLOBAL
        return self.settings.default_s, Source.DEFAULT

    # ---- inside ----------------------------------------------------------------------------

    def _expected_end(self, call: _Call, tenant: str, *, now: float) -> tuple[float, Source]:
        fresh = now - self.settings.refresh_s
        if call.progress is not None and call.progress[1] >= fresh:
            if call.deadline is not None and call.deadline[0] < call.progress[0]:
                return call.deadline[0], Source.DEADLINE
            return call.progress[0], Source.PROGRESS
        bound = math.inf
        if call.deadline is not None and call.deadline[1] >= fresh:
            history = self._tools.get((tenant, call.name))
            if history is None or not history.beats_deadlines:
                return call.deadline[0], Source.DEADLINE
            bound = call.deadline[0]  # this tool is seldom stopped by its deadline
        if call.sleep_until is not None:
            return min(call.sleep_until, bound), Source.SLEEP
        expected, source = self.expected_s(call.name, tenant=tenant)
        return min(call.started + expected, bound), source

    def _open(self, tenant: str, session: str, *, now: float) -> _Gap:
        key = (tenant, session)
        gap = self._gaps.get(key)
        if gap is None:
            if len(self._gaps) >= self.settings.max_sessions:
                old, lost = next(iter(self._gaps.items()))
                self._censor(lost, old[0], now=now)
                self._close(old)
            gap = self._gaps[key] = _Gap()
        else:
            self._gaps.move_to_end(key)
        return gap

    def _close(self, key: tuple[str, str]) -> None:
        del self._gaps[key]
        self._probing.pop(key, None)

    def _censor(self, gap: _Gap, tenant: str, *, now: float) -> None:
        for call in gap.calls.values():
            if not call.done:
                self._learn(tenant, call.name, max(0.0, now - call.started), censored=True)

    def _add(self, gap: _Gap, key: str, call: _Call, *, tenant: str, now: float) -> None:
        if len(gap.calls) >= self.settings.max_calls:
            oldest = next((k for k, c in gap.calls.items() if c.done), next(iter(gap.calls)))
            lost = gap.calls.pop(oldest)
            if not lost.done:
                self._learn(tenant, lost.name, max(0.0, now - lost.started), censored=True)
        gap.calls[key] = call

    def _anonymous(self, gap: _Gap, name: str) -> str:
        gap.anonymous += 1
        return f"?{gap.anonymous}:{name}"

    def _find(self, gap: _Gap, event: ToolEvent) -> str:
        """Return the key of the call that *event* speaks of, a new one when it is news."""
        if event.call_id is not None:
            key = f"={event.call_id}"
            if key in gap.calls:
                return key
            for old, call in gap.calls.items():  # the model's output announced it before
                if call.presumed and not call.done and call.name in (event.name, ""):
                    call.name = event.name
                    gap.calls[key] = gap.calls.pop(old)
                    return key
            return key
        for old, call in gap.calls.items():
            if not call.done and old[0] == "?" and call.name in (event.name, ""):
                if event.state is ToolState.STARTED and not call.presumed:
                    continue  # a second, parallel call of the same tool
                call.name = event.name
                return old
        return self._anonymous(gap, event.name)

    def _note_deadline(self, tenant: str, call: _Call, end: float) -> None:
        history = self._tools.get((tenant, call.name))
        if call.deadline is not None and history is not None:
            history.note_deadline(beaten=end < call.deadline[0] - self.settings.window_s)

    def _learn(self, tenant: str, tool: str, duration_s: float, *, censored: bool) -> None:
        key = (tenant, tool)
        history = self._tools.get(key)
        if history is None:
            if len(self._tools) >= self.settings.max_tools:
                self._tools.popitem(last=False)
            history = self._tools[key] = DurationHistory(self.settings.samples)
        else:
            self._tools.move_to_end(key)
        history.add(duration_s, censored=censored)
        if tool == HUMAN:
            return  # a person's pace says nothing about tools
        overall = self._global.get(tenant)
        if overall is None:
            if len(self._global) >= self.settings.max_tools:
                self._global.popitem(last=False)
            overall = self._global[tenant] = DurationHistory(self.settings.samples)
        else:
            self._global.move_to_end(tenant)
        overall.add(duration_s, censored=censored)
