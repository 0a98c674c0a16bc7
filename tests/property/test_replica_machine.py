"""The whole replica under any sequence of events; runs of steps against single steps."""

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scout_sdk import Hints
from scout_server.policy import PolicySettings
from scout_server.replica import BatchSettings, LinearLatency, Replica, Request, State

_SETTINGS = BatchSettings(block_tokens=4, max_num_seqs=3, max_batched_tokens=16)
_BLOCKS = 16
# Powers of two: sums of them are exact, so that two ways to add them up agree.
_LATENCY = LinearLatency(
    step_s_fixed=2.0**-6,
    prefill_s_per_token=2.0**-10,
    decode_s_per_sequence=2.0**-9,
    decode_s_per_kv_token=2.0**-14,
)


class _Arm:
    def __init__(self, runs: bool, policy: PolicySettings, batch: BatchSettings) -> None:
        self.victims: list[int] = []
        self.finished: list[tuple[str, int, float, float, int, int]] = []
        self.replica = Replica(
            batch,
            _LATENCY,
            kv_blocks=_BLOCKS,
            policy=policy,
            on_evict=lambda now, blocks, hashes: self.victims.extend(blocks),
            runs=runs,
        )

    def advance(self, until: float) -> None:
        while (result := self.replica.advance(until)) is not None:
            self.finished += [
                (
                    r.request_id,
                    r.generated,
                    r.first_token_at,
                    r.finished_at,
                    r.cached_tokens,
                    r.preemptions,
                )
                for r in result.finished
            ]


class _Replicas(RuleBasedStateMachine):
    """One replica that skips ahead, one that makes every step; they are told the same."""

    policy = PolicySettings(hints=False, fingerprints=False)
    batch = _SETTINGS

    def __init__(self) -> None:
        super().__init__()
        self.arms = tuple(_Arm(runs, self.policy, self.batch) for runs in (True, False))
        self.now = 0.0
        self.submitted = 0
        self.ended = 0

    @rule(
        path=st.lists(st.integers(1, 2), min_size=1, max_size=6),
        prompt=st.integers(1, 30),
        output=st.integers(1, 30),
    )
    def submit(self, path, prompt, output):
        """A request arrives; its blocks are those of a path in a small tree."""
        self.submitted += 1
        hashes = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        for arm in self.arms:
            arm.replica.submit(
                Request(
                    str(self.submitted),
                    prompt_tokens=prompt,
                    output_tokens=output,
                    hashes=hashes,
                    hints=Hints(session=f"s{path[-1]}{output % 3}", agent=f"a{path[0]}"),
                ),
                self.now,
            )

    @rule(seconds=st.integers(0, 400))
    def wait(self, seconds):
        """Time goes by, in units of 2**-9 s."""
        self.now += seconds * 2.0**-9
        for arm in self.arms:
            arm.advance(self.now)

    @precondition(lambda self: self.arms[0].replica.unfinished)
    @rule(data=st.data())
    def abort(self, data):
        """A client goes away."""
        live = sorted(request.request_id for request in self.arms[0].replica.requests)
        name = data.draw(st.sampled_from(live))
        for arm in self.arms:
            ended = arm.replica.abort(name, self.now)
            assert ended is not None
            assert ended.state is State.FINISHED
        self.ended += 1

    @rule()
    def poke(self):
        """Asking again changes nothing."""
        for arm in self.arms:
            arm.replica.poke(self.now)

    @invariant()
    def blocks_are_conserved(self):
        """Every block is free or used by running requests, as often as counted."""
        for arm in self.arms:
            pool, running = arm.replica.pool, arm.replica.running
            uses = Counter(block for request in running for block in request.blocks)
            assert pool.refs == [uses[block] for block in range(_BLOCKS)]
            assert sorted(pool.order) == [b for b in range(_BLOCKS) if not uses[b]]
            assert len(running) <= _SETTINGS.max_num_seqs
            for request in running:
                assert request.computed < request.prompt_tokens + request.generated
                assert request.cached_tokens < request.prompt_tokens

    @invariant()
    def steps_stay_within_the_budget(self):
        """No step computes more tokens than allowed."""
        for arm in self.arms:
            assert sum(arm.replica.scheduler.batch.counts) <= _SETTINGS.max_batched_tokens

    @invariant()
    def skipping_ahead_changes_nothing(self):
        """Victims, ends and times are the same, whether steps are skipped over or made."""
        one, two = self.arms
        for arm in self.arms:
            arm.replica.settle(self.now)
        assert one.finished == two.finished
        assert one.victims == two.victims
        assert list(one.replica.pool.order) == list(two.replica.pool.order)
        assert [(r.request_id, r.computed) for r in one.replica.running] == [
            (r.request_id, r.computed) for r in two.replica.running
        ]

    def teardown(self):
        """Everything that is not aborted ends with its whole reply, and leaves no block."""
        self.now = 1e9
        for arm in self.arms:
            arm.advance(self.now)
            assert len(arm.finished) == self.submitted - self.ended
            assert arm.replica.unfinished == 0
            assert arm.replica.pool.free_blocks == _BLOCKS
        self.skipping_ahead_changes_nothing()
        one, two = (arm.replica.counters for arm in self.arms)
        assert (one.steps, one.generated_tokens, one.hit_tokens, one.preemptions) == (
            two.steps,
            two.generated_tokens,
            two.hit_tokens,
            two.preemptions,
        )


class _ScoutReplicas(_Replicas):
    """The same with the policy's own order, always followed."""

    policy = PolicySettings(duel=False, min_predictability=0.0)


class _AheadReplicas(_Replicas):
    """The same with steps scheduled ahead."""

    batch = replace(_SETTINGS, schedule_ahead=True)


TestReplicas = _Replicas.TestCase
TestReplicas.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScoutReplicas = _ScoutReplicas.TestCase
TestScoutReplicas.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestAheadReplicas = _AheadReplicas.TestCase
TestAheadReplicas.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
