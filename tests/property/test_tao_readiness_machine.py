"""Readiness against a reference that keeps everything and computes from scratch."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scout_sdk import Evidence, ToolEvent, ToolState
from scout_server.policy.readiness import Readiness, ReadinessSettings, Source

SESSIONS = st.sampled_from(["s0", "s1", "s2"])
TOOLS = st.sampled_from(["a", "b"])
CALLS = st.sampled_from(["c0", "c1", "c2"])
SECONDS = st.integers(0, 100).map(float)
EVIDENCE = st.sampled_from(list(Evidence))


@dataclass
class Call:
    tool: str
    started: float
    done: bool = False
    hints: tuple[tuple[Evidence, float, float], ...] = ()


class ReadinessMachine(RuleBasedStateMachine):
    """Drives the predictor and the reference with the same facts."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = ReadinessSettings(samples=1000)
        self.readiness = Readiness(self.settings)
        self.calls: dict[str, dict[str, Call]] = {}
        self.durations: list[tuple[str, float, bool]] = []
        self.beaten: dict[str, list[bool]] = {}
        self.now = 0.0

    @rule(seconds=st.integers(0, 40).map(lambda n: n / 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(session=SESSIONS, tool=TOOLS, call=CALLS, remaining=st.none() | SECONDS, kind=EVIDENCE)
    def start(
        self, session: str, tool: str, call: str, remaining: float | None, kind: Evidence
    ) -> None:
        event = ToolEvent(
            name=tool,
            state=ToolState.STARTED,
            call_id=call,
            remaining_s=remaining,
            evidence=kind if remaining is not None else None,
        )
        self.readiness.tool(session, event, now=self.now)
        known = self.calls.setdefault(session, {}).setdefault(call, Call(tool, self.now))
        if remaining is not None and not known.done:
            known.hints = (*known.hints, (kind, self.now + remaining, self.now))

    @rule(session=SESSIONS, tool=TOOLS, call=CALLS, failed=st.booleans())
    def end(self, session: str, tool: str, call: str, failed: bool) -> None:
        state = ToolState.FAILED if failed else ToolState.ENDED
        event = ToolEvent(name=tool, state=state, call_id=call)
        self.readiness.tool(session, event, now=self.now)
        calls = self.calls.setdefault(session, {})
        if call not in calls:
            calls[call] = Call(tool, self.now, done=True)
        elif not calls[call].done:
            calls[call].done = True
            self.returned(calls[call])

    def returned(self, call: Call) -> None:
        self.durations.append((call.tool, self.now - call.started, False))
        ends = [end for kind, end, _ in call.hints if kind is Evidence.DEADLINE]
        if ends:
            self.beaten.setdefault(call.tool, []).append(self.now < ends[-1] - 1)

    @rule(session=SESSIONS)
    def turn(self, session: str) -> None:
        self.readiness.turn(session, now=self.now)
        self.close(session, censored=False)

    @rule(session=SESSIONS)
    def forget(self, session: str) -> None:
        self.readiness.forget(session, now=self.now)
        self.close(session, censored=True)

    def close(self, session: str, *, censored: bool) -> None:
        for call in self.calls.pop(session, {}).values():
            if not call.done and censored:
                self.durations.append((call.tool, self.now - call.started, True))
            elif not call.done:
                self.returned(call)

    def median(self, tool: str | None) -> float | None:
        """Product-limit median, straight from the definition."""
        rows = [(d, c) for t, d, c in self.durations if tool is None or t == tool]
        ends = sorted({d for d, censored in rows if not censored})
        alive = 1.0
        for end in ends:
            at_risk = sum(d >= end for d, _ in rows)
            alive *= 1 - sum(d == end and not c for d, c in rows) / at_risk
            if alive <= 0.5 + 1e-12:
                return end
        return ends[-1] if ends else None

    def expected_end(self, call: Call) -> tuple[float, Source]:
        latest = {kind: (end, at) for kind, end, at in call.hints}
        own = [
            (at, end)
            for kind, end, at in call.hints
            if kind in (Evidence.PROGRESS, Evidence.DECLARED)
        ]
        deadline = latest.get(Evidence.DEADLINE)
        if own and self.now - own[-1][0] <= 30:
            if deadline is not None and deadline[0] < own[-1][1]:
                return deadline[0], Source.DEADLINE
            return own[-1][1], Source.PROGRESS
        bound = float("inf")
        if deadline is not None and self.now - deadline[1] <= 30:
            beaten = self.beaten.get(call.tool, [])
            if len(beaten) < 4 or 2 * sum(beaten) <= len(beaten):
                return deadline[0], Source.DEADLINE
            bound = deadline[0]
        if Evidence.SLEEP in latest:
            return min(bound, latest[Evidence.SLEEP][0]), Source.SLEEP
        if (median := self.median(call.tool)) is not None:
            return min(bound, call.started + median), Source.TOOL
        if (median := self.median(None)) is not None:
            return min(bound, call.started + median), Source.GLOBAL
        return min(bound, call.started + 5.0), Source.DEFAULT

    @invariant()
    def agrees(self) -> None:
        for session in ("s0", "s1", "s2"):
            forecast = self.readiness.forecast(session, now=self.now)
            calls = self.calls.get(session, {})
            if not calls:
                assert forecast is None
                continue
            assert forecast is not None
            ends = [self.expected_end(c) for c in calls.values() if not c.done]
            if not ends:
                assert forecast.ready
                assert forecast.source is Source.COMPLETED
                continue
            last = max(end for end, _ in ends)
            assert forecast.remaining_s == max(0.0, last - self.now)
            assert forecast.source in {s for end, s in ends if end == last}
            assert forecast.ready == all(0 <= end - self.now <= 1 for end, _ in ends)


TestReadinessMachine = ReadinessMachine.TestCase
TestReadinessMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


class BoundsMachine(RuleBasedStateMachine):
    """Hostile names and numbers never grow the tables or the probes past their bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = ReadinessSettings(
            max_sessions=3, max_calls=2, max_tools=2, samples=4, max_probing=2, probes=1
        )
        self.readiness = Readiness(self.settings)
        self.now = 0.0
        self.probed: dict[str, float] = {}

    @rule(
        session=st.text(max_size=2),
        tenant=st.sampled_from(["", "t", "u", "v"]),
        tool=st.text(max_size=2),
        call=st.none() | st.text(max_size=2),
        state=st.sampled_from(list(ToolState)),
        elapsed=st.none() | st.floats(),
        remaining=st.none() | st.floats(),
        age=st.floats(0, 100),
    )
    def event(
        self,
        session: str,
        tenant: str,
        tool: str,
        call: str | None,
        state: ToolState,
        elapsed: float | None,
        remaining: float | None,
        age: float,
    ) -> None:
        event = ToolEvent(
            name=tool, state=state, call_id=call, elapsed_s=elapsed, remaining_s=remaining
        )
        self.readiness.tool(session, event, age_s=age, tenant=tenant, now=self.now)
        forecast = self.readiness.assess(session, tenant=tenant, now=self.now)
        assert forecast is not None
        assert forecast.remaining_s >= 0

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def bounded(self) -> None:
        assert len(self.readiness) <= self.settings.max_sessions
        assert len(self.readiness._tools) <= self.settings.max_tools
        assert len(self.readiness._global) <= self.settings.max_tools
        assert all(len(g.calls) <= self.settings.max_calls for g in self.readiness._gaps.values())
        probing = sum(g.probe_until > self.now for g in self.readiness._gaps.values())
        assert probing <= self.settings.max_probing


TestBoundsMachine = BoundsMachine.TestCase
TestBoundsMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
