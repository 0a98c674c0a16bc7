"""Who wants room, and where there is room: what a decision is made over."""

from collections.abc import Sequence
from dataclasses import dataclass

from scout_server.policy.books import Session, SessionState
from scout_server.policy.discretise import cold
from scout_server.policy.ledger import Ledger
from scout_server.policy.placement import Candidate, Room
from scout_server.policy.readiness import Readiness
from scout_server.policy.turns import TaoSettings, Turn

__all__ = ["Held", "Offers", "gap_key"]


@dataclass(slots=True)
class Held:
    """A request that waits."""

    turn: Turn
    session: Session
    arrived: float
    kept: bool = False
    """Its session kept its room when the request came."""
    cold: tuple[int, Candidate] | None = None
    """What it is while its session has no credit, and the session's version then."""


class Offers:
    """Reads the ledger and the readiness of sessions; lets gaps go that hold nothing any more."""

    def __init__(self, ledger: Ledger, readiness: Readiness, settings: TaoSettings) -> None:
        self.ledger = ledger
        self.readiness = readiness
        self.settings = settings

    def waiting(self, held: Held, *, now: float) -> Candidate:
        """Return the candidate that a waiting request is."""
        turn = held.turn
        session = held.session
        if held.cold is not None and held.cold[0] == session.version:
            return held.cold[1]
        credits = self.ledger.credits(session, now=now)
        homes = frozenset(
            name
            for name, k in credits.items()
            if k >= self.settings.origin_share * turn.tokens
            and not self.ledger.nodes[name].draining
            and name not in turn.avoid
        )
        nodes = turn.nodes
        if turn.avoid:
            up = {n.name for n in self.ledger.nodes.values() if n.up and not n.draining}
            others = (up if nodes is None else nodes & up) - turn.avoid
            nodes = frozenset(others) or nodes
        candidate = Candidate(
            key=turn.key,
            session=turn.session,
            tenant=turn.tenant,
            footprint=max(1, turn.tokens - turn.prefix_tokens),
            prefix=turn.prefix,
            prefix_tokens=turn.prefix_tokens,
            arrived=held.arrived,
            credits=credits,
            nodes=nodes,
            homes=homes or None,
            origin=session.origin,
            turns=session.turns,
            attained=session.attained,
            expected=max(0, turn.tokens - max(credits.values(), default=0)),
        )
        if not credits and not turn.avoid:
            held.cold = session.version, candidate  # credit only fades: it stays what it is
        return candidate

    def kept(self, only: str | None = None, *, now: float) -> dict[str, int]:
        """Return node -> tokens of the rooms that gaps keep there (on *only* one node)."""
        taken: dict[str, int] = {}
        for session in self.ledger.gaps.values():
            if session.origin is not None and only in (None, session.origin):
                _, room = self.ledger.gap_room(session, now=now)
                taken[session.origin] = taken.get(session.origin, 0) + room
        return taken

    def gaps(self, *, now: float) -> list[Candidate]:
        """Return the candidates that gaps are; those that hold nothing any more are let go."""
        found: list[Candidate] = []
        for key, session in list(self.ledger.gaps.items()):
            gap = self._gap(session, now=now)
            if gap is not None:
                found.append(gap)
            elif not self.ledger.credits(session, now=now):
                session.state = SessionState.PAUSED
                del self.ledger.gaps[key]
        return found

    def _gap(self, session: Session, *, now: float) -> Candidate | None:
        """Return the candidate that a session in a gap is; None: it holds nothing any more."""
        if session.origin is None:
            return None
        k, room = self.ledger.gap_room(session, now=now)
        if k <= 0:
            return None
        tenant, name = session.id
        ready = False
        if self.settings.use_readiness:
            forecast = self.readiness.assess(name, tenant=tenant, now=now)
            ready = forecast is not None and forecast.ready
        return Candidate(
            key=gap_key(session),
            session=name,
            tenant=tenant,
            footprint=room,
            waiting=False,
            ready=ready,
            arrived=session.seen,
            credits={session.origin: k},
            nodes=frozenset((session.origin,)),
            turns=session.turns,
            attained=session.attained,
        )

    def rooms(self, only: str | None = None, *, now: float) -> list[Room]:
        """Return what is left on nodes that take turns (on *only* one), beside what runs."""
        rooms = []
        waits = self.settings.idle_waits
        resident: dict[str, int] = {}
        for session in self.ledger.gaps.values():
            if session.origin is not None:
                resident[session.origin] = resident.get(session.origin, 0) + 1
        for node in self.ledger.by_name():
            if not node.up or node.draining or (only is not None and node.name != only):
                continue
            tokens, requests = self.ledger.used(node.name)
            residents = requests + resident.get(node.name, 0)
            reserve = int(self.settings.growth_turns * self.ledger.growth * residents)
            slots = node.slots - requests
            if node.pressed and requests:
                slots = 0
            rooms.append(
                Room(
                    node=node.name,
                    tokens=max(0, node.capacity - tokens),
                    slots=max(0, slots),
                    prefixes=self.ledger.prefixes(node.name),
                    running=requests,
                    capacity=node.capacity,
                    forced=self.ledger.forced(node.name),
                    reserve=min(reserve, node.capacity // 4) if requests else 0,
                    resident=resident.get(node.name, 0),
                    served=node.served,
                    spare=node.pace.spare(now=now) if waits and not requests else None,
                )
            )
        return rooms

    def any_fits(self, looked: Sequence[Held], rooms: Sequence[Room], *, now: float) -> bool:
        """Whether any waiting request may go to any node as it is now; never wrongly no."""
        open_rooms = [room for room in rooms if room.slots > 0 and room.tokens > 0]
        if not open_rooms:
            return False
        if any(room.tokens >= room.capacity for room in open_rooms):
            return True
        most = max(room.tokens for room in open_rooms)
        most_cold = max(room.tokens - room.reserve for room in open_rooms)
        most_late = max((room.tokens for room in open_rooms if not room.forced), default=0)
        late = now - self.settings.admission.max_hold_s
        warm: list[Held] = []
        for held in looked:
            need = held.turn.tokens - held.turn.prefix_tokens
            is_cold = held.cold is not None and held.cold[0] == held.session.version
            if need <= most_cold and is_cold:
                return True
            if need <= most_late and held.arrived <= late:
                return True
            if need <= most and not is_cold:
                warm.append(held)
        return any(self._may_go(held, open_rooms, now=now) for held in warm)

    def _may_go(self, held: Held, rooms: Sequence[Room], *, now: float) -> bool:
        """Whether a request fits a node that it would go to."""
        candidate = self.waiting(held, now=now)
        return any(
            (candidate.homes is None or room.node in candidate.homes)
            and candidate.footprint + (room.reserve if cold(candidate, room) else 0) <= room.tokens
            for room in rooms
        )


def gap_key(session: Session) -> str:
    """Return the key of the candidate that a session in a gap is."""
    return f"gap:{session.id[0]}:{session.id[1]}"
