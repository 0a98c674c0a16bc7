"""Which sessions get KV room now, and on which node: one decision over the whole pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from annotated_types import Ge, Gt

from scout_server.policy.discretise import cold, discretise, worth_table
from scout_server.policy.placement import Candidate, Evaluator, Placement, Planner, Room

__all__ = ["AdmissionSettings", "Plan", "best_room", "decide"]


_QUANTA = 64
"""Pieces of which the smallest node has at least so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Settings of the admission decision."""

    quantum_tokens: Annotated[int, Ge(1)] = 1024
    """Room is planned in pieces of this size, or of a 64th of the smallest node where that is less;
    the loss from rounding is in every plan."""
    max_hold_s: Annotated[float, Gt(0)] = 120.0
    """
    A request held longer goes to the front, oldest first, and a node is kept free for it.

    One such request runs on a node at a time. It waits for the longest turn that runs on its node,
    and for those of the ones before it, so the r-th of them on n nodes is admitted within
    max_hold_s + 2 * ceil(r / n) * longest turn, whatever its size.
    """
    max_pool: Annotated[int, Ge(1)] = 256
    """Sessions that enter one decision; the oldest requests first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was decided. Keys that are in none of the lists were not part of it."""

    placements: tuple[Placement, ...]
    """Requests that get room now."""
    kept: tuple[Placement, ...]
    """Sessions in a gap that keep their room; the others lose it softly."""
    deferred: tuple[str, ...]
    """Requests that wait on, in order of arrival."""
    forced: frozenset[str] = frozenset()
    """Requests among the placements that were held too long."""
    reserved: Mapping[str, str] = field(default_factory=dict)
    """Request -> node that admits nobody else until the request fits."""
    objective: tuple[int, ...] = ()
    """Sums of the evaluator's integers over placements and kept rooms."""
    exact: bool
    method: str
    states: int
    rounding_tokens: int
    """Room that rounding to whole quanta hid from the planner."""


@dataclass(slots=True)
class _Left:
    """Room left on one node, in tokens, while a plan is put together."""

    room: Room
    tokens: int
    slots: int
    prefixes: set[str]
    taken: int = 0
    """Sessions placed by this plan."""

    def crowd(self) -> tuple[int, int, int, int, str]:
        """Return how full the node is; less is emptier, and no two nodes are equal."""
        room = self.room
        return (
            -self.tokens,
            -self.slots,
            room.resident + self.taken,
            room.served + self.taken,
            room.node,
        )

    def size(self, candidate: Candidate) -> int:
        """Return the tokens *candidate* would take here."""
        if candidate.prefix is None or candidate.prefix in self.prefixes:
            return candidate.footprint
        return candidate.footprint + candidate.prefix_tokens

    def fits(self, candidate: Candidate, *, anywhere: bool = False) -> bool:
        """Whether there is room (*anywhere*: also away from home); large ones get a whole node."""
        if candidate.nodes is not None and self.room.node not in candidate.nodes:
            return False
        if not anywhere and candidate.homes is not None and self.room.node not in candidate.homes:
            return False
        if candidate.waiting and self.slots < 1:
            return False
        size = self.size(candidate)
        if not anywhere and cold(candidate, self.room):
            size += self.room.reserve
        capacity = max(self.room.capacity, self.room.tokens)
        return 0 < min(size, capacity) <= self.tokens

    def take(self, candidate: Candidate) -> None:
        """Place *candidate* here."""
        self.tokens -= min(self.size(candidate), max(self.room.capacity, self.room.tokens))
        self.slots -= int(candidate.waiting)
        self.taken += int(candidate.waiting)
        if candidate.prefix is not None:
            self.prefixes.add(candidate.prefix)


def decide(
    candidates: Sequence[Candidate],
    rooms: Sequence[Room],
    *,
    evaluator: Evaluator,
    planner: Planner,
    settings: AdmissionSettings | None = None,
    reserved: Mapping[str, str] | None = None,
    now: float,
) -> Plan:
    """
    Return who gets room on which node. Equal inputs, in any order, give equal plans.

    First the requests that were held too long; then the planner's optimum; then whatever still
    fits in real tokens, so that no node idles while a request waits that would fit. Placements of
    equal worth are spread over the nodes.
    """
    settings = settings or AdmissionSettings()
    nodes = sorted(rooms, key=lambda r: r.node)
    pool = sorted(candidates, key=lambda c: (not c.waiting, c.arrived, c.key))[: settings.max_pool]
    left = {r.node: _Left(r, r.tokens, r.slots, set(r.prefixes)) for r in nodes}
    chosen: dict[str, str] = {}
    held = [c for c in pool if c.waiting and now - c.arrived >= settings.max_hold_s]
    # One at a time on every node: were all of them forced, order of arrival would be all there is.
    turns = [r.node for r in nodes if not r.forced]
    forced = held[: len(turns)]
    kept_free = _place_held(forced, {n: left[n] for n in turns}, chosen, evaluator, reserved or {})
    placed_late = frozenset(chosen)
    open_nodes = [n.node for n in nodes if n.node not in kept_free.values()]
    rest = [c for c in pool if c.key not in chosen and c.key not in kept_free]
    table = worth_table(rest, open_nodes, evaluator)
    problem, hidden = discretise(
        rest,
        [
            Room(
                node=name,
                tokens=left[name].tokens,
                slots=left[name].slots,
                prefixes=frozenset(left[name].prefixes),
                capacity=left[name].room.capacity,
                reserve=left[name].room.reserve,
            )
            for name in open_nodes
        ],
        evaluator,
        quantum=_quantum(settings, nodes),
        table=table,
    )
    solution = planner.solve(problem)
    planned = {c.key: open_nodes[i] for c, i in zip(rest, solution.nodes, strict=True) if i >= 0}
    worth = dict(zip((c.key for c in rest), table.tolist(), strict=True))
    _spread(rest, planned, left, open_nodes, worth)
    chosen.update(planned)
    _top_up(rest, chosen, left, open_nodes, evaluator, worth)
    _fill_idle(rest, chosen, left, open_nodes)
    plan = _plan(
        pool, chosen, kept_free, evaluator, solution.exact, solution.method, solution.states, hidden
    )
    return replace(plan, forced=placed_late)


def _quantum(settings: AdmissionSettings, rooms: Sequence[Room]) -> int:
    """Return the tokens of a quantum: small enough for the smallest node."""
    smallest = min((r.capacity for r in rooms if r.capacity), default=0)
    if not smallest:
        return settings.quantum_tokens
    return min(settings.quantum_tokens, max(1, smallest // _QUANTA))


def best_room(candidate: Candidate, rooms: Sequence[Room], judge: Evaluator) -> str:
    """Return the node that a decision over *candidate* alone would choose; it fits them all."""
    left = {r.node: _Left(r, r.tokens, r.slots, set(r.prefixes)) for r in rooms}
    return _best(candidate, sorted(left), left, judge)


def _plan(
    pool: Sequence[Candidate],
    chosen: Mapping[str, str],
    reserved: Mapping[str, str],
    evaluator: Evaluator,
    exact: bool,
    method: str,
    states: int,
    hidden: int,
) -> Plan:
    placements: list[Placement] = []
    kept: list[Placement] = []
    deferred: list[str] = []
    sums: list[tuple[int, ...]] = []
    for candidate in pool:
        node = chosen.get(candidate.key)
        if node is None:
            if candidate.waiting:
                deferred.append(candidate.key)
            continue
        sums.append(evaluator.values(candidate, node))
        placement = Placement(
            key=candidate.key,
            session=candidate.session,
            node=node,
            credit=candidate.credits.get(node, 0),
        )
        (placements if candidate.waiting else kept).append(placement)
    return Plan(
        placements=tuple(placements),
        kept=tuple(kept),
        deferred=tuple(deferred),
        reserved=dict(reserved),
        objective=tuple(sum(parts) for parts in zip(*sums, strict=True)),
        exact=exact,
        method=method,
        states=states,
        rounding_tokens=hidden,
    )


def _place_held(
    held: Sequence[Candidate],
    left: Mapping[str, _Left],
    chosen: dict[str, str],
    evaluator: Evaluator,
    reserved: Mapping[str, str],
) -> dict[str, str]:
    """Place requests held too long, oldest first; return the node kept free for those that wait."""
    kept_free: dict[str, str] = {}
    for candidate in held:
        # A node kept free stays so for its own request until that one fits somewhere.
        others = set(kept_free.values()) | {
            n for k, n in reserved.items() if k != candidate.key and _waits(k, held, chosen)
        }
        fitting = [n for n in left if n not in others and left[n].fits(candidate, anywhere=True)]
        if fitting:
            node = _best(candidate, fitting, left, evaluator)
            left[node].take(candidate)
            chosen[candidate.key] = node
            continue
        allowed = [
            n for n in left if n not in others and (candidate.nodes is None or n in candidate.nodes)
        ]
        if not allowed:
            continue
        before = reserved.get(candidate.key)
        if before in allowed and before is not None:
            kept_free[candidate.key] = before
        else:
            kept_free[candidate.key] = max(
                allowed, key=lambda n: (left[n].room.capacity, left[n].tokens, n)
            )
    return kept_free


def _waits(key: str, held: Sequence[Candidate], chosen: Mapping[str, str]) -> bool:
    return key not in chosen and any(c.key == key for c in held)


def _best(
    candidate: Candidate, names: Sequence[str], left: Mapping[str, _Left], evaluator: Evaluator
) -> str:
    """Return the most valuable node, the emptiest of equals, the first of those."""
    return min(
        names,
        key=lambda n: (
            tuple(-v for v in evaluator.values(candidate, n)),
            n != candidate.origin,
            left[n].crowd(),
        ),
    )


def _spread(
    rest: Sequence[Candidate],
    planned: dict[str, str],
    left: Mapping[str, _Left],
    names: Sequence[str],
    worth: Mapping[str, list[list[int]]],
) -> None:
    """Take room for the plan; sessions worth the same elsewhere go where most room is left."""
    placed = [c for c in rest if c.key in planned]
    free = [
        c
        for c in placed
        if (c.nodes is None or len(c.nodes) > 1)
        and sum(v == worth[c.key][names.index(planned[c.key])] for v in worth[c.key]) > 1
    ]
    tied = {c.key for c in free}
    for candidate in placed:
        if candidate.key not in tied:
            left[planned[candidate.key]].take(candidate)
    saved = {n: (left[n].tokens, left[n].slots, set(left[n].prefixes)) for n in names}
    spread: dict[str, str] = {}
    for candidate in sorted(free, key=lambda c: (-c.footprint, c.arrived, c.key)):
        value = worth[candidate.key][names.index(planned[candidate.key])]
        equal = [
            n
            for n, v in zip(names, worth[candidate.key], strict=True)
            if v == value and left[n].fits(candidate)
        ]
        if not equal:
            break
        node = min(
            equal,
            key=lambda n: (n != candidate.origin, left[n].size(candidate), left[n].crowd()),
        )
        left[node].take(candidate)
        spread[candidate.key] = node
    if len(spread) == len(free):
        planned.update(spread)
        return
    for n, (tokens, slots, prefixes) in saved.items():  # no equal packing found: keep the plan's
        left[n].tokens, left[n].slots, left[n].prefixes = tokens, slots, prefixes
    for candidate in free:
        left[planned[candidate.key]].take(candidate)


def _top_up(
    rest: Sequence[Candidate],
    chosen: dict[str, str],
    left: Mapping[str, _Left],
    names: Sequence[str],
    evaluator: Evaluator,
    worth: Mapping[str, list[list[int]]],
) -> None:
    """Place what fits in the tokens that rounding hid or the planner left, best value first."""
    most = max((left[n].tokens for n in names), default=0)
    most_cold = max((left[n].tokens - left[n].room.reserve for n in names), default=0)
    waiting = [
        c
        for c in rest
        if c.key not in chosen
        and c.footprint <= (most if c.credits or not c.waiting else most_cold)
    ]
    ranked = sorted(
        waiting,
        key=lambda c: (
            not c.waiting,
            [-v for v in max(worth[c.key])],
            c.arrived,
            c.key,
        ),
    )
    for candidate in ranked:
        fitting = [n for n in names if left[n].fits(candidate)]
        if fitting:
            node = _best(candidate, fitting, left, evaluator)
            left[node].take(candidate)
            chosen[candidate.key] = node


def _fill_idle(
    rest: Sequence[Candidate],
    chosen: dict[str, str],
    left: Mapping[str, _Left],
    names: Sequence[str],
) -> None:
    """
    Give an idle node to one request that waits, at the price of rooms kept for gaps there.

    As few are lost as it takes, and none before the node has idled for as long as it would need to
    compute again what is lost: the sessions in gaps may be back before.
    """
    waiting = [c for c in rest if c.waiting and c.key not in chosen]
    if not waiting:
        return
    gaps = [c for c in rest if not c.waiting]
    soft = {c.key for c in gaps}
    busy = {node for key, node in chosen.items() if key not in soft}
    for name in names:
        node = left[name]
        if name in busy or node.room.running:
            continue
        kept = [c for c in gaps if chosen.get(c.key) == name]
        kept.sort(key=lambda c: (c.credits.get(name, 0), c.arrived, c.key))
        for candidate in waiting:
            lost = _price(candidate, node, kept)
            if lost is None:
                continue
            for gap in lost:
                del chosen[gap.key]
                node.tokens += gap.footprint
            node.take(candidate)
            chosen[candidate.key] = name
            waiting.remove(candidate)
            break


def _price(
    candidate: Candidate, node: _Left, kept: Sequence[Candidate]
) -> Sequence[Candidate] | None:
    """Return the gaps on an idle node to be lost for *candidate*; None: it waits on."""
    room, name = node.room, node.room.node
    spare = room.spare
    tokens, worth = node.tokens, candidate.credits.get(name, 0)
    for count in range(len(kept) + 1):
        if count:
            tokens += kept[count - 1].footprint
            worth -= kept[count - 1].credits.get(name, 0)
        if spare is not None and -worth > spare:
            return None
        if replace(node, tokens=tokens).fits(candidate, anywhere=True):
            return kept[:count]
    return None
