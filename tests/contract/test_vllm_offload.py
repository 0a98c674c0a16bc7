"""Scout's policy in vLLM's CPU offload tier: vLLM's interface, its LRU where it must be equal."""

import ast
import inspect
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_sdk import Hints
from scout_server.policy import PolicyCore, PolicySettings
from scout_server.vllm import tier
from scout_server.vllm.breaker import Breaker

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

KEYS = [bytes([i]) * 32 + bytes(4) for i in range(10)]
CAPACITY = 6


@pytest.fixture(autouse=True)
def _nobody_attached() -> Any:
    tier._attached.clear()
    yield
    tier._attached.clear()


def guide(*, scout: bool) -> tier.Guide:
    """A real core whose order of eviction is set by hand."""
    core = PolicyCore(PolicySettings(), capacity_blocks=8, block_tokens=16)
    core.order.scout = scout
    return tier.Guide(core, Breaker(lambda: None))


def policy_class() -> Any:
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

    return CachePolicyFactory.get_cache_policy_cls("ScoutCachePolicy", "scout_server.vllm.offload")


def manager(name: str = "ScoutCachePolicy", *, chunks: int = CAPACITY) -> Any:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    return CPUOffloadingManager(
        chunks, cache_policy=name, cache_policy_module_path="scout_server.vllm.offload"
    )


def context(request_id: str, keys: list[bytes] = KEYS) -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    made = ReqContext(request_id)
    for at, key in enumerate(keys):
        made.set_offload_key_position(key, 16 * (at + 1))
    return made


# ---- the interface ----------------------------------------------------------------------------


def test_vllm_loads_the_policy_by_its_name_and_module() -> None:
    """The factory finds the class, it leaves nothing abstract, and takes every call of the base."""
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    ours = policy_class()
    assert issubclass(ours, CachePolicy)
    assert not ours.__abstractmethods__
    for name, method in inspect.getmembers(CachePolicy, inspect.isfunction):
        wanted = list(inspect.signature(method).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters)[: len(wanted)] == wanted


def test_it_takes_every_call_of_the_sources_named() -> None:
    """
    Each method of CachePolicy in the sources is a method of ours with the same parameters first.

    SCOUT_VLLM_SOURCES names folders of unpacked wheels, separated like PATH; else the installed.
    """
    import vllm

    folders = os.environ.get("SCOUT_VLLM_SOURCES", "").split(os.pathsep)
    roots = [Path(folder) / "vllm" for folder in folders if folder]
    for root in roots or [Path(vllm.__file__).parent]:
        _takes_every_call(root)


def _takes_every_call(root: Path) -> None:
    text = (root / "v1" / "kv_offload" / "cpu" / "policies" / "base.py").read_text()
    (base,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "CachePolicy"
    )
    methods = [node for node in base.body if isinstance(node, ast.FunctionDef)]
    assert {"insert", "touch", "evict", "clear"} <= {method.name for method in methods}
    for method in methods:
        wanted = [argument.arg for argument in method.args.args]
        have = list(inspect.signature(getattr(policy_class(), method.name)).parameters)
        assert have[: len(wanted)] == wanted, method.name


def test_the_calls_of_version_0_33_are_understood() -> None:
    """With the request's context in `insert`, and first accesses told, the tail goes first."""
    tier.attach(guide(scout=True))
    policy = policy_class()(CAPACITY)
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

    ours = context("r")
    policy.on_request_access(KEYS[:2], ours)
    for at in (0, 1, 2):
        policy.insert(KEYS[at], ChunkStatus(at), ours)
    for at in (0, 1, 2):
        policy.get(KEYS[at]).ref_cnt = 0
        policy.mark_evictable(KEYS[at])
    policy.on_request_access(KEYS[:2], context("other"))
    victims = policy.evict(3, set())
    assert [key for key, _ in victims] == [KEYS[2], KEYS[1], KEYS[0]]


# ---- equal to LRU -----------------------------------------------------------------------------


class TwoManagers(RuleBasedStateMachine):
    """vLLM's manager with its LRU policy and with ours, told the same; every answer is equal."""

    attach: tier.Guide | None = None

    def __init__(self) -> None:
        super().__init__()
        tier._attached.clear()
        self.prepare()
        self.both = (manager("lru"), manager())
        self.serial = 0
        self.contexts: dict[str, tuple[Any, Any]] = {}
        self.storing: list[tuple[str, list[bytes]]] = []
        self.loading: list[tuple[str, list[bytes]]] = []

    def prepare(self) -> None:
        """Nobody is attached."""

    def teardown(self) -> None:
        tier._attached.clear()

    def _same(self, answers: list[Any]) -> Any:
        assert answers[0] == answers[1]
        return answers[0]

    @rule()
    def begin(self) -> None:
        self.serial += 1
        name = f"r{self.serial}"
        self.contexts[name] = (context(name), context(name))
        for each, ctx in zip(self.both, self.contexts[name], strict=True):
            each.on_new_request(ctx)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=5))
    @precondition(lambda self: self.contexts)
    def store(self, data: Any, keys: list[bytes]) -> None:
        name = data.draw(st.sampled_from(sorted(self.contexts)))
        found = []
        for each, ctx in zip(self.both, self.contexts[name], strict=True):
            output = each.prepare_store(keys, ctx)
            found.append(
                output
                and (output.keys_to_store, output.evicted_keys, list(output.store_spec.chunk_ids))
            )
        done = self._same(found)
        if done and done[0]:
            self.storing.append((name, done[0]))

    @rule(data=st.data(), success=st.booleans())
    @precondition(lambda self: self.storing)
    def stored(self, data: Any, success: bool) -> None:
        name, keys = self.storing.pop(data.draw(st.integers(0, len(self.storing) - 1)))
        for each in self.both:
            each.complete_store(keys, context(name), success)

    @rule(data=st.data(), keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=4))
    @precondition(lambda self: self.contexts)
    def load(self, data: Any, keys: list[bytes]) -> None:
        from vllm.v1.kv_offload.base import LookupResult

        name = data.draw(st.sampled_from(sorted(self.contexts)))
        ready = [
            key
            for key in keys
            if self._same([each.lookup(key, context(name)) for each in self.both])
            is LookupResult.HIT
        ]
        if ready:
            for each, ctx in zip(self.both, self.contexts[name], strict=True):
                each.prepare_load(ready, ctx)
            self.loading.append((name, ready))

    @rule(data=st.data())
    @precondition(lambda self: self.loading)
    def loaded(self, data: Any) -> None:
        name, keys = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        for each in self.both:
            each.complete_load(keys, context(name))

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=4))
    def touch(self, keys: list[bytes]) -> None:
        for each in self.both:
            each.touch(keys, context("touch"))

    @rule(data=st.data())
    @precondition(lambda self: self.contexts)
    def end(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.contexts)))
        for each, ctx in zip(self.both, self.contexts.pop(name), strict=True):
            each.on_request_finished(ctx)

    @rule()
    def reset(self) -> None:
        for each in self.both:
            each.reset_cache()
        self.storing.clear()
        self.loading.clear()

    @invariant()
    def same_content(self) -> None:
        for key in KEYS:
            self._same([each.lookup(key, context("look")) for each in self.both])
        ours = self.both[1]._policy
        if not ours._broken:
            assert {key for key in KEYS if key in ours._order} == set(ours._stock.chunks)


class NobodyAttached(TwoManagers):
    """There is no core in the process."""


class FollowingTheEngine(TwoManagers):
    """There is a core, and it follows the engine's order: identity is off, or LRU does better."""

    def prepare(self) -> None:
        tier.attach(guide(scout=False))


class BrokenAtOnce(TwoManagers):
    """The core would follow its own order, but its first score is an exception."""

    def prepare(self) -> None:
        faulty = guide(scout=True)
        faulty.core.order.score = None  # type: ignore[assignment, method-assign]
        tier.attach(faulty)


for machine in (NobodyAttached, FollowingTheEngine, BrokenAtOnce):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestNobodyAttached = NobodyAttached.TestCase
TestFollowingTheEngine = FollowingTheEngine.TestCase
TestBrokenAtOnce = BrokenAtOnce.TestCase


# ---- by the scores ----------------------------------------------------------------------------


class ByTheScores(RuleBasedStateMachine):
    """The policy against a reference that sorts everything, with scores that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.guide = guide(scout=True)
        tier.attach(self.guide)
        self.policy = policy_class()(CAPACITY)
        self.owner = {key: 1 + at % 3 for at, key in enumerate(KEYS)}
        for key, group in self.owner.items():
            self.guide._released[key.hex()] = (tier.Segment(10_000, group),)
        self.chunks: dict[bytes, Any] = {}
        self.uses: dict[bytes, int] = {}
        self.last: dict[int, int] = {}
        self.use = 0

    def teardown(self) -> None:
        tier._attached.clear()

    def _context(self, key: bytes) -> Any:
        return context(key.hex())

    def _idle(self) -> list[bytes]:
        return [key for key, chunk in self.chunks.items() if chunk.ref_cnt == 0]

    def _seen(self, key: bytes) -> None:
        if self.chunks[key].ref_cnt == 0:
            group = self.owner[key]
            self.last[group] = max(self.last.get(group, 0), self.uses[key])

    def _settle(self) -> None:
        alive = {self.owner[key] for key in self._idle()}
        self.last = {group: last for group, last in self.last.items() if group in alive}

    @rule(key=st.sampled_from(KEYS))
    def insert(self, key: bytes) -> None:
        from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

        if key in self.chunks or len(self.chunks) == CAPACITY:
            return
        asking = self._context(key)
        self.policy.on_store_miss([key], asking)
        self.use += 1
        self.chunks[key] = ChunkStatus(0)
        self.uses[key] = self.use
        self.policy.insert(key, self.chunks[key], asking)

    @rule(data=st.data())
    @precondition(lambda self: self.chunks)
    def store_done_or_pin_or_unpin(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.chunks)))
        chunk = self.chunks[key]
        if chunk.ref_cnt == 0:
            self.policy.mark_non_evictable(key)
            chunk.ref_cnt = 1
            self._settle()
        else:
            chunk.ref_cnt = 0
            self.policy.mark_evictable(key)
            self._seen(key)

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: bytes) -> None:
        self.policy.touch([key], self._context(key))
        self.use += 1
        if key in self.chunks:
            self.uses[key] = self.use
            self._seen(key)

    @rule(group=st.integers(1, 3), score=st.sampled_from([0.0, 0.2, 0.7]))
    def renew(self, group: int, score: float) -> None:
        self.guide.core.order.set_score(group, score)
        self.guide.core.scoring.renewals += 1

    @rule(n=st.integers(0, 4), protected=st.sets(st.sampled_from(KEYS), max_size=3))
    def evict(self, n: int, protected: set[bytes]) -> None:
        ranked = sorted(
            (key for key in self._idle() if key not in protected),
            key=lambda key: (
                self.guide.core.order.score(self.owner[key]),
                self.last[self.owner[key]],
                self.owner[key],
                self.uses[key],
            ),
        )[:n]
        victims = self.policy.evict(n, protected)
        if len(ranked) < n:
            assert victims is None
            return
        assert [key for key, _ in victims] == ranked
        assert [chunk for _, chunk in victims] == [self.chunks[key] for key in ranked]
        for key in ranked:
            del self.chunks[key], self.uses[key]
        self._settle()

    @invariant()
    def nothing_else_changed(self) -> None:
        for key in KEYS:
            assert self.policy.get(key) is self.chunks.get(key)
        assert not self.guide.breaker.open


TestByTheScores = ByTheScores.TestCase
TestByTheScores.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def fill(policy: Any, chunks: int) -> None:
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

    for at in range(chunks):
        policy.insert(KEYS[at], ChunkStatus(at), context("fill"))
        policy.get(KEYS[at]).ref_cnt = 0
        policy.mark_evictable(KEYS[at])


@pytest.mark.parametrize("named", [[KEYS[0]], [KEYS[5], KEYS[5]], [b"unknown", KEYS[5]]])
def test_a_victim_that_must_stay_opens_the_breaker_and_lru_evicts(named: list[bytes]) -> None:
    """Were our order to name a protected chunk, one twice or an unknown one, LRU would choose."""
    attached = guide(scout=True)
    tier.attach(attached)
    policy = policy_class()(CAPACITY)
    fill(policy, 6)
    policy._order.choose = lambda n, protected: named
    victims = policy.evict(len(named), {KEYS[0]})
    assert [key for key, _ in victims] == KEYS[1 : 1 + len(named)]
    assert attached.breaker.open
    assert attached.breaker.reason.startswith("offload evict")
    assert policy.evict(2, set()) is not None
    assert sum(policy.get(key) is not None for key in KEYS) == 6 - len(named) - 2


# ---- in the scheduler -------------------------------------------------------------------------


def offloading(
    lab: Any,
    scheduler: Any,
    name: str,
    *,
    blocks: int,
    chunks: int,
    additional: dict[str, object] | None = None,
) -> Any:
    """A real scheduler with vLLM's offloading connector over a tier of *chunks* chunks."""
    from vllm.config import KVTransferConfig

    config = lab.config
    before = config.kv_transfer_config
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": 1 << 30,
            "eviction_policy": name,
            "cache_policy_module_path": "scout_server.vllm.offload",
        },
    )
    try:
        made = lab.scheduler(scheduler, blocks=blocks, additional=additional)
    finally:
        config.kv_transfer_config = before
    side = made.connector.connector_scheduler
    side.manager = manager(name, chunks=chunks)
    return made


class Copier:
    """Steps a scheduler as a runner does; the copies that a GPU would make all succeed at once."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.loaded: Counter[str] = Counter()

    def step(self) -> dict[str, int]:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
            OffloadingWorkerMetadata,
        )
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        jobs = output.kv_connector_metadata
        done = OffloadingWorkerMetadata(dict.fromkeys((*jobs.load_jobs, *jobs.store_jobs), 1))
        for job in jobs.load_jobs.values():
            self.loaded[job.req_id] += len(job.src_spec.block_ids)
        ids = list(output.num_scheduled_tokens)
        tokens = [[] if self.scheduler.requests[i].is_prefill_chunk else [7] for i in ids]
        connector = KVConnectorOutput(
            finished_recving={job.req_id for job in jobs.load_jobs.values()},
            kv_connector_worker_meta=done,
        )
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                sampled_token_ids=tokens,
                kv_connector_output=connector,
            ),
        )
        return {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}


def anchors_asked(lab: Any, scheduler: Any, *, seed: int = 3) -> tuple[int, int]:
    """
    Ask six agents in turn, one of them in every second request, each time with much that is new.

    Return the prompt tokens that were found in the pool or the tier, and all prompt tokens.
    """
    from scout_sdk import _wire

    rng = random.Random(seed)
    anchors = [[rng.randrange(5, 1000) for _ in range(320)] for _ in range(6)]
    now = 0.0
    if getattr(scheduler, "scout", None) is not None:
        scheduler.scout.clock = lambda: now
    copier = Copier(scheduler)
    found = asked = 0
    for turn in range(120):
        agent = 0 if turn % 2 else rng.randrange(1, 6)
        tokens = anchors[agent] + [rng.randrange(5, 1000) for _ in range(480)]
        hints = Hints(session=f"s{turn}", agent=f"a{agent}", final=True)
        name = f"r{turn}"
        scheduler.add_request(
            lab.request(scheduler, name, tokens, max_tokens=1, xargs=dict(_wire.to_xargs(hints)))
        )
        asked += len(tokens)
        while scheduler.requests:
            found += copier.step().get(name, 0)
            now += 0.5
        copier.step()  # what the request stores after its end
    return found, asked


def test_the_tier_of_a_real_scheduler_knows_whose_chunk_is_whose(lab: Any) -> None:
    """After requests with hints, each chunk in the tier has the group that its request had."""
    from scout_server.vllm import ScoutScheduler

    scheduler = offloading(lab, ScoutScheduler, "ScoutCachePolicy", blocks=80, chunks=300)
    found, _ = anchors_asked(lab, scheduler)
    assert found > 0
    assert not scheduler.scout.breaker.open, scheduler.scout.breaker.reason
    policy = scheduler.connector.connector_scheduler.manager._policy
    owned = Counter(policy._order.group(key) for key in policy._stock.chunks)
    assert owned[0] == 0
    core = scheduler.scout.core
    anchors = {group: agent.name for agent in core.tenant("").agents for _, group in agent.segments}
    by_agent = Counter(anchors.get(group, "session") for group in owned.elements())
    assert len(by_agent) >= 4, by_agent
    assert by_agent["a0"] >= 19
    assert by_agent["session"] > 100
    assert scheduler.scout.state()["offload"]["evicted"]


def test_hints_keep_anchors_in_the_tier(lab: Any) -> None:
    """
    Where the tier turns over before the rare agents come again, Scout finds more of their anchors
    in it than vLLM's LRU does, and with identity off exactly as much.
    """
    from scout_server.vllm import ScoutScheduler

    off: dict[str, object] = {"policy": {"hints": False, "fingerprints": False}}

    def share(name: str, additional: dict[str, object] | None = None) -> float:
        tier._attached.clear()
        scheduler = offloading(
            lab, ScoutScheduler, name, blocks=80, chunks=160, additional=additional
        )
        found, asked = anchors_asked(lab, scheduler)
        return found / asked

    lru, scout = share("lru"), share("ScoutCachePolicy")
    assert share("ScoutCachePolicy", off) == share("lru", off)
    assert scout > lru + 0.03
