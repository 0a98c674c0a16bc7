"""The replica's rules, one by one."""

import math

import pytest

from scout_sdk import ScoutError
from scout_server.policy import Finish, FinishFacts, PolicyCore, PolicySettings, RequestFacts
from scout_server.replica import (
    BatchSettings,
    KeyedQueue,
    LinearLatency,
    Replica,
    Request,
    RequestTooLargeError,
    SpanLatency,
    State,
    StepBatch,
    block_hashes,
    extend_hashes,
)

_OFF = PolicySettings(hints=False, fingerprints=False)
_SECOND = LinearLatency(
    step_s_fixed=1.0, prefill_s_per_token=0, decode_s_per_sequence=0, decode_s_per_kv_token=0
)


class _StepsOnly:
    """A latency model that knows batches only."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def step_s(self, batch: StepBatch) -> float:
        self.batches.append(batch)
        return 1.0


class _Told(PolicyCore):
    """A policy core that writes down what it is told."""

    def __init__(self, capacity: int, block_tokens: int) -> None:
        super().__init__(_OFF, capacity_blocks=capacity, block_tokens=block_tokens)
        self.told: list[tuple[str, object]] = []

    def arrive(self, facts, *, now):
        self.told.append(("arrive", facts))
        return super().arrive(facts, now=now)

    def segments(self, request_id, block_hashes):
        self.told.append(("segments", list(block_hashes)))
        return super().segments(request_id, block_hashes)

    def finish(self, facts, *, now):
        self.told.append(("finish", facts))
        super().finish(facts, now=now)


def _replica(blocks=64, *, latency=_SECOND, runs=True, **settings) -> Replica:
    values = {"block_tokens": 4, "max_num_seqs": 4, "max_batched_tokens": 16, **settings}
    return Replica(BatchSettings(**values), latency, kv_blocks=blocks, policy=_OFF, runs=runs)


def _request(name: str, prompt: int, output: int = 1, *, first=0, **more) -> Request:
    hashes = block_hashes(range(first, first + prompt + output), 4)
    return Request(name, prompt_tokens=prompt, output_tokens=output, hashes=hashes, **more)


def _run(replica: Replica) -> list[Request]:
    done: list[Request] = []
    while (result := replica.advance(math.inf)) is not None:
        done += result.finished
        if not replica.unfinished:
            break
    return done


def test_a_long_prompt_is_computed_in_chunks_within_the_budget():
    """
    40 tokens under a budget of 16 take three steps, and the third gives the first token.
    """
    replica = _replica()
    request = _request("a", 40)
    replica.submit(request, 0.0)
    counts = []
    while replica.unfinished:
        replica.step(replica.next_event_time())
        counts.append(list(replica.scheduler.batch.counts))
    assert counts[:3] == [[16], [16], [8]]
    assert request.first_token_at == 3.0


def test_running_requests_come_before_waiting_ones():
    """
    A decoding request takes its token first; the newcomer gets what is left of the budget.
    """
    replica = _replica()
    replica.submit(_request("a", 4, 10), 0.0)
    replica.step(0.0)
    replica.submit(_request("b", 40, first=1000), 0.5)
    replica.step(1.0)
    batch = replica.scheduler.batch
    assert [(r.request_id, n) for r, n in zip(batch.requests, batch.counts, strict=True)] == [
        ("a", 1),
        ("b", 15),
    ]


def test_the_last_token_of_a_cached_prompt_is_computed_again():
    """
    A prompt that is cached whole hits all blocks but the one of its last token.
    """
    replica = _replica()
    replica.submit(_request("a", 16), 0.0)
    _run(replica)
    again = _request("b", 16)
    replica.submit(again, 10.0)
    _run(replica)
    assert again.cached_tokens == 12


def test_output_is_cached_too_but_not_its_last_token():
    """
    The next turn finds prompt and reply; the last token of a reply was never computed.
    """
    replica = _replica()
    replica.submit(_request("a", 8, 8), 0.0)
    _run(replica)
    longer = _request("b", 30)
    replica.submit(longer, 20.0)
    _run(replica)
    assert longer.cached_tokens == 12


def test_a_prefix_is_shared_while_it_is_being_computed():
    """
    Of two requests with one prefix in one step, the second hits the blocks of the first.
    """
    replica = _replica(max_batched_tokens=64)
    replica.submit(_request("a", 16), 0.0)
    second = _request("b", 16, 1)
    replica.submit(second, 0.0)
    replica.step(0.0)
    assert second.cached_tokens == 12
    assert replica.pool.refs.count(2) == 3


def test_the_tail_of_a_chain_is_evicted_before_its_head():
    """
    Half a pool's worth of new blocks leaves the first half of an idle chain.
    """
    replica = _replica(8)
    replica.submit(_request("a", 31), 0.0)
    _run(replica)
    replica.submit(_request("b", 15, first=1000), 10.0)
    _run(replica)
    hashes = block_hashes(range(32), 4)
    assert len(replica.pool.lookup(hashes, 8)) == 4


def test_without_room_the_last_running_request_is_preempted_and_starts_again():
    """
    Two requests that outgrow the pool: the younger loses its blocks, both end with whole replies.
    """
    replica = _replica(6)
    old, young = _request("a", 8, 12), _request("b", 8, 12, first=1000)
    replica.submit(old, 0.0)
    replica.submit(young, 0.0)
    done = _run(replica)
    assert [r.request_id for r in done] == ["a", "b"]
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert (old.generated, young.generated) == (12, 12)
    assert replica.counters.preemptions == 1
    assert replica.pool.free_blocks == 6


def test_recomputation_and_warm_ups_are_in_no_hit_counter():
    """
    Queried tokens are those of first starts of users' requests.
    """
    replica = _replica(6)
    replica.submit(_request("a", 8, 12), 0.0)
    replica.submit(_request("b", 8, 12, first=1000), 0.0)
    replica.submit(_request("w", 8, 1, warmup=True), 0.0)
    _run(replica)
    assert replica.counters.preemptions > 0
    assert replica.counters.queried_tokens == 16
    assert replica.counters.prompt_tokens == 24


def test_a_request_is_admitted_when_all_of_its_prompt_fits():
    """
    Two chunks of room do not admit a prompt of five; with the rule off, they do.
    """
    for reserve, admitted in ((True, 1), (False, 2)):
        replica = _replica(9, reserve_full_prompt=reserve)
        replica.submit(_request("a", 8, 8), 0.0)
        replica.submit(_request("b", 32, first=1000), 0.0)
        replica.step(0.0)
        assert len(replica.running) == admitted


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    """
    The error names blocks needed and blocks there, and is a ScoutError and a ValueError.
    """
    replica = _replica(4)
    with pytest.raises(RequestTooLargeError, match=r"needs 5 blocks.*the pool has 4") as caught:
        replica.submit(_request("a", 14, 4), 0.0)
    assert isinstance(caught.value, ScoutError)
    assert isinstance(caught.value, ValueError)
    replica.submit(_request("b", 14, 3), 0.0)
    assert len(_run(replica)) == 1


def test_an_aborted_request_frees_its_blocks_at_once():
    """
    Abort works on running and waiting requests; an unknown id is None.
    """
    replica = _replica(max_num_seqs=1)
    running, waiting = _request("a", 8, 50), _request("b", 8, first=1000)
    replica.submit(running, 0.0)
    replica.submit(waiting, 0.0)
    replica.step(0.0)
    assert replica.pool.free_blocks == 62
    assert replica.abort("b", 0.5) is waiting
    assert replica.abort("a", 0.5) is running
    assert running.state is waiting.state is State.FINISHED
    assert running.finish is Finish.ABORT
    assert replica.pool.free_blocks == 64
    assert replica.abort("a", 0.5) is None
    replica.step(replica.next_event_time())
    assert replica.next_event_time() == math.inf


def test_time_does_not_go_back():
    """
    Calls with an earlier time, or past a step that has not been taken, are errors.
    """
    replica = _replica()
    replica.submit(_request("a", 4, 2), 5.0)
    replica.step(5.0)
    with pytest.raises(ValueError, match="time goes back"):
        replica.submit(_request("b", 4), 4.0)
    with pytest.raises(ValueError, match="call step first"):
        replica.submit(_request("c", 4), 7.5)


def test_a_run_of_decode_steps_is_one_event_and_an_arrival_cuts_it():
    """
    100 decode steps are one event; a request that comes in the middle starts with the next step.
    """
    replica = _replica()
    replica.submit(_request("a", 4, 101), 0.0)
    replica.step(0.0)
    replica.step(1.0)
    assert replica.next_event_time() == 101.0
    late = _request("b", 4, first=1000)
    replica.submit(late, 50.25)
    assert replica.next_event_time() == 51.0
    assert replica.counters.steps == 50
    _run(replica)
    assert late.first_scheduled_at == 51.0
    assert late.first_token_at == 52.0
    assert replica.counters.steps == 101


def test_the_pool_is_up_to_date_after_settle():
    """
    In the middle of a run, settle takes the blocks of the steps that have been made.
    """
    replica = _replica()
    replica.submit(_request("a", 4, 101), 0.0)
    replica.step(0.0)
    replica.step(1.0)
    replica.settle(20.5)
    assert replica.running[0].generated == 20
    assert replica.pool.free_blocks == 64 - 6
    assert replica.next_event_time() == 101.0


def test_a_model_without_sums_is_asked_step_by_step():
    """
    Prefill has (new, computed), decode the context of each sequence, its new token included.
    """
    latency = _StepsOnly()
    replica = _replica(latency=latency)
    replica.submit(_request("a", 20, 3), 0.0)
    _run(replica)
    assert latency.batches == [
        StepBatch(((16, 0),), ()),
        StepBatch(((4, 16),), ()),
        StepBatch((), (21,)),
        StepBatch((), (22,)),
    ]


def test_linear_latency_adds_up_runs():
    """
    A span is the sum of its steps, and one step of it is the mixed step without prefill.
    """
    latency = LinearLatency(
        step_s_fixed=0.5,
        prefill_s_per_token=0.25,
        decode_s_per_sequence=0.125,
        decode_s_per_kv_token=0.0625,
        prefill_s_fixed=2.0,
    )
    assert isinstance(latency, SpanLatency)
    steps = [latency.step_s(StepBatch((), (10 + i, 20 + i, 30 + i))) for i in range(7)]
    assert latency.span_s(3, 60, 7) == sum(steps)
    assert latency.span_s(3, 60, 1) == latency.mixed_s((), 3, 60)
    batch = StepBatch(((8, 0), (2, 6)), (10,))
    assert latency.mixed_s(batch.prefill, 1, 10) == latency.step_s(batch)


def test_the_core_is_told_everything_in_order():
    """
    arrive; at a preemption and at the end segments, then finish. The future is not told.
    """
    core = _Told(6, 4)
    replica = Replica(
        BatchSettings(block_tokens=4, max_num_seqs=4, max_batched_tokens=16),
        _SECOND,
        kv_blocks=6,
        core=core,
    )
    old, young = _request("a", 8, 12), _request("b", 8, 12, first=1000, finish=Finish.TOOL_CALLS)
    young.tools = (("shell", 3.0),)
    replica.submit(old, 0.0)
    replica.submit(young, 0.0)
    _run(replica)
    kinds = [kind for kind, _ in core.told]
    assert kinds == ["arrive", "arrive"] + ["segments", "finish"] * 3
    first = core.told[0][1]
    assert isinstance(first, RequestFacts)
    assert list(first.block_hashes) == old.hashes[:2]
    finishes = [fact for _, fact in core.told if isinstance(fact, FinishFacts)]
    assert [(f.request_id, f.finish, f.tools) for f in finishes] == [
        ("b", Finish.PREEMPTED, ()),
        ("a", Finish.STOP, ()),
        ("b", Finish.TOOL_CALLS, (("shell", 3.0),)),
    ]
    assert finishes[1].output_tokens == 12
    assert finishes[1].cached_tokens == 0
    segments = [fact for kind, fact in core.told if kind == "segments"]
    assert segments[1] == old.hashes[:5]


def test_a_keyed_queue_serves_the_smallest_key_first():
    """
    Shortest first; a preempted request keeps its place; rekey follows changed keys.
    """
    keys = {"a": 3.0, "b": 1.0, "c": 2.0}
    queue = KeyedQueue(lambda request, now: keys[request.request_id])
    requests = {name: _request(name, 4) for name in "abc"}
    for sequence, request in enumerate(requests.values()):
        request.sequence = sequence
        queue.push(request, 0.0)
    assert queue.peek(0.0) is requests["b"]
    queue.remove(requests["b"])
    queue.push_back(requests["b"], 0.0)
    assert queue.peek(0.0) is requests["b"]
    keys["a"] = 0.5
    queue.rekey(1.0)
    assert queue.peek(1.0) is requests["a"]
    queue.remove(requests["c"])
    assert sorted(r.request_id for r in queue) == ["a", "b"]
    assert len(queue) == 2


class _NoneBefore:
    """Admits nobody before a moment."""

    def __init__(self, moment: float) -> None:
        self.moment = moment

    def admit(self, request, view, now):
        return now >= self.moment

    def horizon(self, now):
        return self.moment


def test_a_refusing_admission_hook_is_asked_again_when_it_says():
    """
    An idle replica with a refused request wakes at the hook's horizon.
    """
    replica = Replica(
        BatchSettings(block_tokens=4), _SECOND, kv_blocks=8, policy=_OFF, admission=_NoneBefore(7.0)
    )
    request = _request("a", 4)
    replica.submit(request, 0.0)
    replica.step(0.0)
    assert replica.next_event_time() == 7.0
    _run(replica)
    assert request.first_token_at == 8.0


class _FirstVictim:
    """Takes the blocks of whoever started first."""

    def choose(self, running, needy, now):
        return 0


def test_a_victim_hook_may_choose_a_request_that_is_scheduled_already():
    """
    The victim leaves the batch, its tokens go back to the budget, everybody ends.
    """
    replica = Replica(
        BatchSettings(block_tokens=4, max_num_seqs=4, max_batched_tokens=16),
        _SECOND,
        kv_blocks=7,
        policy=_OFF,
        victims=_FirstVictim(),
    )
    old, young = _request("a", 8, 12), _request("b", 8, 12, first=1000)
    replica.submit(old, 0.0)
    replica.submit(young, 0.0)
    assert [r.request_id for r in _run(replica)] == ["b", "a"]
    assert old.preemptions == 1


def test_scheduling_ahead_considers_an_arrival_one_step_later():
    """
    What arrives during step k runs in step k + 1, with scheduling ahead in k + 2; idle: at once.
    """
    for ahead, started in ((False, 1.0), (True, 2.0)):
        replica = _replica(schedule_ahead=ahead)
        first = _request("a", 4, 10)
        replica.submit(first, 0.0)
        replica.step(0.0)
        late = _request("b", 4, first=1000)
        replica.submit(late, 0.5)
        assert replica.waiting_count == 1
        _run(replica)
        assert first.first_scheduled_at == 0.0
        assert late.first_scheduled_at == started


def test_chained_hashes_are_those_of_prefixes():
    """
    Equal prefixes have equal hashes, a change shows in every later block, salts divide.
    """
    tokens = list(range(40))
    hashes = block_hashes(tokens, 16)
    assert len(hashes) == 2
    assert block_hashes(tokens[:32], 16) == hashes
    changed = [*tokens[:3], 999, *tokens[4:]]
    assert not set(block_hashes(changed, 16)) & set(hashes)
    assert block_hashes([*tokens[:20], 7, *tokens[21:]], 16)[0] == hashes[0]
    assert extend_hashes(hashes[0], tokens[16:], 16) == hashes[1:]
    assert not set(block_hashes(tokens, 16, salt=1)) & set(hashes)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_only_waits_for_an_ended_one_goes_on(ahead):
    """
    When the blocks of a request that has just ended are all that is missing, work goes on.
    """
    replica = Replica(
        BatchSettings(block_tokens=4, max_num_seqs=3, max_batched_tokens=16, schedule_ahead=ahead),
        _SECOND,
        kv_blocks=16,
        policy=_OFF,
    )
    for name, prompt, output in (("long", 17, 24), ("short", 16, 15)):
        replica.submit(Request(name, prompt_tokens=prompt, output_tokens=output), 0.0)

    ended = []
    while (result := replica.advance(1e6)) is not None:
        ended += [request.request_id for request in result.finished]

    assert sorted(ended) == ["long", "short"]
    assert replica.unfinished == 0
