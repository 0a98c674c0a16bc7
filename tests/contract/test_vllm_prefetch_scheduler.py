"""Warm-ups on vLLM's real scheduler and pool, in virtual time and without a model."""

import random
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

AGENTS, TURNS = 6, 12
STEP_S, TOKEN_S = 0.02, 0.001
"""How long an engine step takes: about what SmolLM2 needs on two cores."""
ON = {"prefetch": {"enabled": True, "chunk_tokens": 96, "per_tenant_per_min": 600}}


class World:
    """One client that runs sessions one after the other; between two turns a tool runs."""

    def __init__(self, lab: Any, runner: Any, additional: dict[str, object], **options: Any):
        from scout_server.vllm import ScoutScheduler

        self.lab = lab
        self.scheduler = lab.scheduler(
            ScoutScheduler, blocks=140, block_size=16, additional=additional, **options
        )
        self.driver = runner(self.scheduler, in_flight=2 if options.get("asynchronous") else 1)
        self.now = 0.0
        self.scheduler.scout.clock = lambda: self.now
        rng = random.Random(5)
        self.anchors = [[rng.randrange(5, 1000) for _ in range(480)] for _ in range(AGENTS)]
        self.ttft: list[float] = []
        self.late: list[int] = []
        self.outputs: list[str] = []
        update = self.scheduler.update_from_output

        def seen(*args: Any) -> Any:
            outputs = update(*args)
            for each in outputs.values():
                self.outputs += [output.request_id for output in each.outputs]
            return outputs

        self.scheduler.update_from_output = seen

    @property
    def prefetch(self) -> Any:
        return self.scheduler.scout.prefetch

    def step(self) -> dict[str, int]:
        """Run one engine step and let its time pass."""
        plan = self.driver.step()["tokens"]
        if plan:
            self.now += STEP_S + TOKEN_S * sum(plan.values())
        return dict(plan)

    def ask(self, session: int, turn: int, agent: int, final: bool) -> None:
        """Send one request and wait for its only token."""
        from scout_sdk import Hints, _wire

        rng = random.Random(f"{session}/{turn}")
        tokens = self.anchors[agent] + [rng.randrange(5, 1000) for _ in range(20)]
        hints = Hints(session=f"s{session}", agent=f"a{agent}", turn=turn, final=final)
        name = f"{session}/{turn}"
        sent = self.now
        self.scheduler.add_request(
            self.lab.request(
                self.scheduler, name, tokens, max_tokens=1, xargs=dict(_wire.to_xargs(hints))
            )
        )
        steps = 0
        while name in self.scheduler.requests:
            steps += name not in self.step()
            assert steps < 3
        self.late.append(steps)
        self.ttft.append(self.now - sent)

    def idle(self, seconds: float) -> None:
        """Let time pass; API servers ask what to warm up, and the engine steps while it has to."""
        until = self.now + seconds
        while self.scheduler.has_requests():
            self.step()  # what is left of the last request, before the engine sleeps
        while self.now < until:
            self.now += min(0.05, until - self.now)
            self.prefetch.poke()
            while self.scheduler.has_requests() and self.now < until:
                self.step()

    def run(self, sessions: int, follow: Any, gap: Any) -> None:
        agent = 0
        for session in range(sessions):
            for turn in range(1, TURNS + 1):
                self.ask(session, turn, agent, turn == TURNS)
                agent = follow(agent)
                self.idle(gap())


def cycle(agent: int) -> int:
    return (agent + 1) % AGENTS


def warmed_up_to_a_request(world: World) -> None:
    """Go on until a request of a warm-up has begun and is not done."""
    for turn in range(1, 40):
        world.ask(99, turn, turn % AGENTS, False)
        world.now += 1.0
        world.prefetch.poke()
        if world.prefetch.request_id is not None:
            world.driver.step()
            if world.prefetch.request_id is not None:
                return
    raise AssertionError("no warm-up of more than one step")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_idle_time_is_turned_into_a_shorter_wait(lab: Any, runner: Any, asynchronous: bool) -> None:
    """
    Where agents follow each other and their anchors do not fit, warm-ups in the gaps make the mean
    time to the first token at least a quarter shorter; 60 % of them or more are used.
    """
    worlds = {}
    for name, settings in (("scout", {}), ("prefetch", ON)):
        world = worlds[name] = World(lab, runner, settings, asynchronous=asynchronous)
        rng = random.Random(1)
        world.run(8, cycle, lambda rng=rng: rng.lognormvariate(0.3, 0.4))

    counters = worlds["prefetch"].prefetch.planner.counters
    assert worlds["scout"].prefetch.planner.counters.started == 0
    assert counters.used >= 0.6 * counters.started > 10
    assert mean(worlds["prefetch"].ttft) <= 0.75 * mean(worlds["scout"].ttft)
    assert worlds["prefetch"].prefetch.state()["off"] is None
    assert worlds["prefetch"].scheduler.scout.breaker.open is False


def test_random_agents_are_not_warmed_up(lab: Any, runner: Any) -> None:
    """
    Where any agent may follow any other, there are no warm-ups at all.
    """
    world = World(lab, runner, ON)
    rng = random.Random(2)
    world.run(8, lambda _: rng.randrange(AGENTS), lambda: rng.lognormvariate(0.3, 0.4))

    assert world.prefetch.planner.counters.started == 0


def test_an_engine_without_hope_is_asked_seldom(lab: Any, runner: Any) -> None:
    """
    Where nothing can be foreseen the engine wants to be asked twice a second, busy or not; where
    warm-ups help, it wants to be asked as soon as it may be idle.
    """
    hopeless, hopeful = World(lab, runner, ON), World(lab, runner, ON)
    rng = random.Random(2)
    hopeless.run(8, lambda _: rng.randrange(AGENTS), lambda: 1.0)
    hopeful.run(8, cycle, lambda: 1.0)
    for world, pause in ((hopeless, 0.5), (hopeful, 0.05)):
        tokens = world.anchors[0]
        world.scheduler.add_request(world.lab.request(world.scheduler, "live", tokens))
        assert world.prefetch.poke() == pause
    hopeless.driver.drain()
    hopeless.now += 1.0

    assert hopeless.prefetch.poke() == 0.5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_user_waits_for_one_step_at_most(lab: Any, runner: Any, asynchronous: bool) -> None:
    """
    A request that comes in the middle of a warm-up is in the very next step that is planned, and
    the warm-up is gone with its blocks free.
    """
    world = World(lab, runner, ON, asynchronous=asynchronous)
    world.run(4, cycle, lambda: 1.5)
    cancelled = world.prefetch.planner.counters.cancelled
    warmed_up_to_a_request(world)
    world.ask(99, 50, 5, True)

    assert max(world.late) <= (1 if asynchronous else 0)
    assert world.prefetch.planner.counters.cancelled == cancelled + 1
    assert world.prefetch.contended == 0
    world.driver.drain()
    assert world.scheduler.scout.queue.num_free_blocks == 139
    assert not world.scheduler.requests


def test_nobody_sees_a_warm_up(lab: Any, runner: Any) -> None:
    """
    Warm-ups reach no client, no hit counter, and teach the policy core nothing.
    """
    world = World(lab, runner, ON)
    stats = []
    world.run(4, cycle, lambda: 1.5)
    stats.append(world.scheduler.kv_cache_manager.make_prefix_cache_stats())
    bridge = world.scheduler.scout

    assert world.prefetch.requests > 5
    assert not [name for name in world.outputs if name.startswith("scout")]
    assert bridge.core.state(now=world.now).requests == 4 * TURNS
    assert bridge.tokens["prompt"] == 4 * TURNS * 500
    assert sum(bridge.finishes.values()) == 4 * TURNS


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_with_only_a_warm_up_has_work(lab: Any, runner: Any, asynchronous: bool) -> None:
    """
    An engine that has nothing but a warm-up makes steps, unless it is paused, and counts no
    request.
    """
    from vllm.v1.core.sched.interface import PauseState

    world = World(lab, runner, ON, asynchronous=asynchronous)
    world.run(4, cycle, lambda: 1.5)
    warmed_up_to_a_request(world)

    assert world.scheduler.has_unfinished_requests()
    assert world.scheduler.get_request_counts() == (0, 0)
    world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not world.scheduler.has_unfinished_requests()
    world.scheduler.set_pause_state(PauseState.UNPAUSED)
    world.prefetch.arriving()
    assert not world.scheduler.has_unfinished_requests()


def test_a_fault_ends_prefetching_and_nothing_else(lab: Any, runner: Any) -> None:
    """
    When our planning fails, warm-ups stop for good, and retention and users go on.
    """
    world = World(lab, runner, ON)
    world.run(3, cycle, lambda: 1.5)
    world.prefetch.warmth = None
    world.run(2, cycle, lambda: 1.5)

    assert world.prefetch.active is False
    assert "AttributeError" in world.prefetch.state()["off"]
    assert world.scheduler.scout.breaker.open is False
    assert len(world.ttft) == 5 * TURNS


def test_a_reset_of_the_cache_is_not_held_up(lab: Any, runner: Any) -> None:
    """
    Dropping the cache in the middle of a warm-up works, and the warm-up is gone.
    """
    world = World(lab, runner, ON)
    world.run(4, cycle, lambda: 1.5)
    warmed_up_to_a_request(world)

    assert world.scheduler.reset_prefix_cache()
    assert not world.scheduler.requests
