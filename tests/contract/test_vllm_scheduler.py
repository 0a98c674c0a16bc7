"""vLLM's real scheduler with and without the retention policy, side by side."""

import random
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

OFF = {"policy": {"hints": False, "fingerprints": False}}


def stock(asynchronous: bool) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if asynchronous else Scheduler


def scout() -> Any:
    from scout_server.vllm import ScoutScheduler

    return ScoutScheduler


class Traffic:
    """Random multi-turn sessions, some aborted, told to several schedulers alike."""

    def __init__(self, lab: Any, runners: list[Any], seed: int, *, resets: bool) -> None:
        self.resets = resets
        self.lab = lab
        self.runners = runners
        self.rng = random.Random(seed)
        self.anchors = [
            [self.rng.randrange(5, 1000) for _ in range(self.rng.randint(20, 150))]
            for _ in range(4)
        ]
        self.sessions: list[list[int]] = []
        self.serial = 0

    def act(self) -> None:
        rng = self.rng
        choice = rng.random()
        if choice < 0.3:
            self.arrive()
        elif choice < 0.33:
            live = sorted(self.runners[0].scheduler.requests)
            if live:
                from vllm.v1.request import RequestStatus

                victim = rng.choice(live)
                for runner in self.runners:
                    runner.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        elif choice < 0.335 and self.resets:
            everything = rng.random() < 0.5
            for runner in self.runners:
                runner.scheduler.reset_prefix_cache(reset_running_requests=everything)

    def arrive(self) -> None:
        rng = self.rng
        if self.sessions and rng.random() < 0.6:
            tokens = rng.choice(self.sessions)
        else:
            tokens = list(rng.choice(self.anchors))
            self.sessions.append(tokens)
        tokens += [rng.randrange(5, 1000) for _ in range(rng.randint(1, 40))]
        if len(tokens) > 400:
            self.sessions.remove(tokens)
        self.serial += 1
        generated = rng.choice((1, 20, 200))
        for runner in self.runners:
            runner.scheduler.add_request(
                self.lab.request(
                    runner.scheduler, f"r{self.serial}", list(tokens), max_tokens=generated
                )
            )


def run_alike(lab: Any, runners: list[Any], seed: int, steps: int, *, resets: bool = True) -> int:
    """Give all *runners* the same traffic; return the preemptions, after comparing every step."""
    traffic = Traffic(lab, runners, seed, resets=resets)
    for _ in range(steps):
        traffic.act()
        plans = [runner.step() for runner in runners]
        for plan in plans[1:]:
            assert plan == plans[0]
    for runner in runners:
        runner.drain()
    return sum(runner.scheduler.scout.finishes["preempted"] for runner in runners[1:])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("windows", [(), ((16, 64),), ((32, 96),)], ids=["one", "two", "sizes"])
def test_identity_off_equals_the_stock_scheduler(
    lab: Any, runner: Any, asynchronous: bool, windows: tuple[tuple[int, int], ...]
) -> None:
    """
    With identity off every step plans the same blocks, hits and preemptions as stock vLLM.
    """
    options = {"blocks": 50 + 25 * len(windows), "windows": windows, "asynchronous": asynchronous}
    in_flight = 2 if asynchronous else 1
    ours = lab.scheduler(scout(), additional=OFF, **options)
    twins = [
        runner(lab.scheduler(stock(asynchronous), **options), in_flight=in_flight),
        runner(ours, in_flight=in_flight),
    ]
    preemptions = run_alike(lab, twins, seed=7, steps=700)

    assert preemptions > 0
    assert ours.scout.breaker.open is False
    assert ours.scout.queue.counts.evicted > 100
    assert ours.scout.state()["live_requests"] == 0


def test_blocks_freed_behind_a_step_in_flight_keep_their_place(lab: Any, runner: Any) -> None:
    """Where vLLM frees blocks only after the step in flight, plans still equal the stock ones."""
    schedulers = [
        lab.scheduler(stock(True), blocks=50, asynchronous=True),
        lab.scheduler(scout(), blocks=50, asynchronous=True, additional=OFF),
    ]
    for scheduler in schedulers:
        scheduler.defer_block_free = True  # what a KV connector that fills blocks switches on
    run_alike(
        lab, [runner(each, in_flight=2) for each in schedulers], seed=5, steps=700, resets=False
    )

    assert schedulers[1].scout.breaker.open is False


def test_the_scheduler_fits_the_engines_way_of_scheduling(lab: Any) -> None:
    """Ours extends AsyncScheduler where the engine is asynchronous and Scheduler where not."""
    asynchronous = lab.scheduler(scout(), blocks=10, asynchronous=True)
    plain = lab.scheduler(scout(), blocks=10, asynchronous=False)

    assert isinstance(asynchronous, stock(True))
    assert isinstance(plain, stock(False))
    assert not isinstance(plain, stock(True))


@pytest.mark.parametrize("method", ["arrive", "segments", "finish", "tick"])
def test_a_fault_of_the_core_leaves_the_stock_scheduler(lab: Any, runner: Any, method: str) -> None:
    """When the core raises mid-run, the plans stay those of the stock scheduler to the end."""
    ours = lab.scheduler(scout(), blocks=50, additional=OFF)
    twins = [runner(lab.scheduler(stock(False), blocks=50)), runner(ours)]
    calls = 40
    honest = getattr(ours.scout.core, method)

    def fail(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise RuntimeError("planted")
        return honest(*args, **kwargs)

    setattr(ours.scout.core, method, fail)
    run_alike(lab, twins, seed=3, steps=500)

    assert ours.scout.breaker.open is True
    assert ours.scout.breaker.faults == 1
    assert "planted" in ours.scout.state()["breaker"]["reason"]
    assert ours.scout.mode == "stock"
    assert type(ours.kv_cache_manager.block_pool.free_block_queue).__module__.startswith("vllm")


def hinted(agent: str, session: str, turn: int = 1) -> dict[str, object]:
    from scout_sdk import Hints, _wire

    return dict(_wire.to_xargs(Hints(agent=agent, session=session, turn=turn)))


@pytest.mark.parametrize("windows", [(), ((64, 128),)], ids=["one group", "two sizes"])
def test_blocks_get_their_owners_in_every_group(
    lab: Any, runner: Any, windows: tuple[tuple[int, int], ...]
) -> None:
    """
    An agent's anchor and its sessions' own blocks have different owners, in each KV group.
    """
    ours = lab.scheduler(scout(), blocks=200, windows=windows, additional={})
    driver = runner(ours)
    rng = random.Random(1)
    anchor = [rng.randrange(5, 1000) for _ in range(160)]
    blocks: list[list[Any]] = []
    for session in range(3):
        own = [rng.randrange(5, 1000) for _ in range(64)]
        xargs = hinted("planner", f"s{session}")
        ours.add_request(lab.request(ours, f"r{session}", anchor + own, xargs=xargs))
        while f"r{session}" in ours.requests:
            driver.step()
            held = ours.kv_cache_manager.coordinator.get_blocks(f"r{session}")
            if any(held):
                blocks = [list(group) for group in held]
    owners = ours.scout.queue.owners
    full = [owners[block.block_id] for block in blocks[0]]

    assert len(set(full[:10])) == 1  # 160 tokens of anchor
    assert len(set(full[10:14])) == 1
    assert full[0] != full[10]
    assert full[0] > 0
    for group in blocks[1:]:
        known = [owners[block.block_id] for block in group if not block.is_null]
        assert known[-1] == full[10]
    assert ours.scout.breaker.open is False


def test_preempted_requests_lose_their_blocks_last(lab: Any, runner: Any) -> None:
    """In scout mode whatever is free goes before the blocks of a request that was preempted."""
    ours = lab.scheduler(
        scout(), blocks=80, additional={"policy": {"duel": False, "min_predictability": 0.0}}
    )
    driver = runner(ours)
    rng = random.Random(2)

    def serve(name: str, agent: str, turn: int) -> None:
        tokens = [rng.randrange(5, 1000) for _ in range(200)]
        ours.add_request(
            lab.request(ours, name, tokens, max_tokens=20, xargs=hinted(agent, name, turn))
        )

    for i in range(4):
        serve(f"old{i}", f"agent{i}", 1)
        driver.drain()
    serve("victim", "worker", 1)
    for _ in range(6):
        driver.step()
    request = ours.requests["victim"]
    victims = {
        block.block_id for block in ours.kv_cache_manager.coordinator.get_blocks("victim")[0]
    }
    ours.running.remove(request)
    ours._preempt_request(request, 0.0)
    ours.scout.tick()
    order = ours.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
    hashed = [block.block_id for block in order if block.block_hash is not None]

    assert ours.scout.mode == "scout"
    kept = [block_id for block_id in hashed if block_id in victims]
    assert len(kept) >= 12
    assert hashed[-len(kept) :] == kept
    driver.drain()
    assert max(state.score for state in ours.scout.core.state(now=0.0).agents) < float("inf")
    assert ours.scout.state()["finishes"] == {"length": 5, "preempted": 1}


def test_an_unsupported_vllm_runs_stock(
    lab: Any, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a vLLM outside of the range the scheduler says so, and plans like the stock one."""
    from scout_server.vllm import _compat
    from scout_server.vllm.utility import answer

    cls = scout()
    _compat.problems.cache_clear()
    monkeypatch.setattr(_compat.metadata, "version", lambda name: "0.31.4")
    try:
        ours = lab.scheduler(cls, blocks=50)
    finally:
        monkeypatch.undo()
        _compat.problems.cache_clear()
    queue = ours.kv_cache_manager.block_pool.free_block_queue

    assert ours.scout is None
    assert type(queue).__module__.startswith("vllm")
    said = answer(ours, "state", "")
    assert "0.31.4" in said
    assert "0.32.x" in said
    ours.add_request(lab.request(ours, "r", list(range(5, 105))))
    runner(ours).drain()
    assert not ours.requests


def test_a_wrong_configuration_is_an_error_at_start(lab: Any) -> None:
    """Settings that are wrong stop the engine's start and are all named."""
    from scout_sdk import ConfigError

    with pytest.raises(ConfigError) as caught:
        lab.scheduler(scout(), blocks=50, additional={"policy": {"max_agents": 0, "nonsense": 1}})
    assert "policy.max_agents" in str(caught.value)
    assert "policy.nonsense" in str(caught.value)


def test_the_utility_answers_like_an_api_server_expects(lab: Any) -> None:
    """State and events are JSON; an unknown operation names the known ones."""
    import json

    from scout_sdk import SessionEvent, _wire
    from scout_server.vllm.utility import answer

    ours = lab.scheduler(scout(), blocks=50, additional={})
    body = _wire.encode_events([SessionEvent(session="s", final=True)]).decode()

    assert json.loads(answer(ours, "events", f"tenant\n{body}")) == {"accepted": 1, "rejected": 0}
    assert json.loads(answer(ours, "events", "tenant\nnonsense")) == {"accepted": 0, "rejected": 1}
    assert json.loads(answer(ours, "state", ""))["events"] == {"unknown": 1, "rejected": 1}
    assert "known: events, state" in answer(ours, "nonsense", "")
