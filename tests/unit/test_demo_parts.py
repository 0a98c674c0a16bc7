import asyncio
import math

import pytest

from scout_sdk import ConfigError, ScoutError
from scout_server.demo.figures import Arm, Bounds, judge, percentile, summarise
from scout_server.demo.measure import Counters, Recorder, read_counters, recording_client, replay
from scout_server.demo.servers import ServerSpec, start_all
from scout_server.demo.workload import EXAMPLES, Mix, load_example, make_jobs

MIX = Mix(travel=3, coding=2, desk=4, concurrency=2)


def _arm(hit, ttft):
    return Arm([Counters(100.0, 100.0 * hit)] * 3, [ttft] * 5, [1.0, 3.0])


def _targets(lru, scout, off):
    results, targets = judge(lru, scout, off, Bounds(15.0, 0.6))
    return results, {target.name: target for target in targets}


def test_equal_seeds_give_equal_jobs():
    """
    The sessions of a repetition follow from the seed, and another seed gives others.
    """
    assert make_jobs(MIX, 5) == make_jobs(MIX, 5)
    assert make_jobs(MIX, 5) != make_jobs(MIX, 6)
    assert sorted(EXAMPLES) == sorted({job.example for job in make_jobs(MIX, 5)})
    assert 9 == len(make_jobs(MIX, 5))


def test_no_two_users_say_the_same():
    """
    Users differ, so that nothing but the agents' own prompts recurs between sessions.
    """
    jobs = make_jobs(Mix(travel=40, coding=40, desk=40, concurrency=1), 0)

    assert len(jobs) == len({job.text for job in jobs})


def test_unknown_example():
    """
    An unknown example is an error that lists the known ones.
    """
    with pytest.raises(ConfigError, match="plain_openai"):
        load_example("dance")


def test_percentiles():
    """
    Percentiles are values of the sample, by nearest rank; of nothing there is none.
    """
    assert 2.0 == percentile([3.0, 1.0, 2.0], 0.5)
    assert 3.0 == percentile([3.0, 1.0, 2.0], 0.95)
    assert math.isnan(percentile([], 0.5))


def test_counters_are_differences():
    """
    The hit rate of an arm is that of its summed differences.
    """
    earlier, later = Counters(1000.0, 900.0), Counters(1100.0, 925.0)
    arm = Arm([later - earlier, Counters(100.0, 75.0)])

    assert 0.5 == summarise(arm)["hit rate"]
    assert 100.0 == summarise(arm)["recomputed tokens"]


def test_targets_are_ratios_of_the_run():
    """
    Points gained, the ratio of medians and the difference with identity off are judged.
    """
    off = {"LRU": Counters(10.0, 4.0), "identity off": Counters(10.0, 4.0)}
    results, targets = _targets(_arm(0.3, 0.2), _arm(0.5, 0.1), off)

    assert results["void"] is False
    assert 20.0 == pytest.approx(targets["hit rate over LRU, points"].value)
    assert 0.5 == targets["median TTFT over LRU's"].value
    assert [True] * 3 == [target.met for target in targets.values()]


def test_a_void_run_meets_nothing():
    """
    A run whose baseline hits above 0.85 is void, and says so; its ratios meet no target.
    """
    off = {"LRU": Counters(10.0, 4.0), "identity off": Counters(10.0, 5.0)}
    results, targets = _targets(_arm(0.9, 0.2), _arm(0.99, 0.01), off)

    assert results["void"] is True
    assert "why void" in results
    assert [False] * 3 == [target.met for target in targets.values()]


async def test_a_server_that_does_not_start():
    """
    A server that ends at start is an error with its own words, and no other is left running.
    """
    wrong = ServerSpec(name="wrong", args=["--embedded", "--set", "embedded.policy=fifo"])
    right = ServerSpec(name="right", args=["--embedded"])

    with pytest.raises(ScoutError, match="'lru' or 'scout'"):
        async with start_all([right, wrong]):
            pass


@pytest.fixture
async def server():
    """An embedded engine in a process of its own."""
    fast = ["--set", "embedded.prefill_tokens_per_s=1e7", "--set", "embedded.step_s=0.0001"]
    async with start_all([ServerSpec(name="a", args=["--embedded", *fast])]) as (running,):
        yield running


async def test_recording_and_replay(server):
    """
    The client records every chat request with its hints and its time to the first byte; a replay
    of them counts at the server, and again counts more hits.
    """
    import openai

    recorder = Recorder()
    client = recording_client(recorder)
    ask = openai.AsyncOpenAI(base_url=f"{server.root}/v1", api_key="none", http_client=client)
    for stream in (True, True, False):
        answer = await ask.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": "what is it? " * 50}],
            max_tokens=4,
            stream=stream,
            extra_headers={"X-Session-ID": "s1"},
        )
        if stream:
            assert [part async for part in answer]
    await client.aclose()

    assert [{"x-session-id": "s1"}] * 3 == [
        {k.lower(): v for k, v in headers.items()} for headers, _ in recorder.sent
    ]
    assert 2 == len(recorder.ttft_s)
    sent = 0

    def count():
        nonlocal sent
        sent += 1

    counted = await replay(server.root, recorder.sent, count)
    assert 3 == sent
    assert 0 < counted.hit < counted.queried
    total = await read_counters(server.root)
    assert 2 * counted.queried == total.queried


async def test_a_server_without_counters():
    """
    A server whose metrics lack the prefix cache's counters is an error that names them.
    """

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nother 1.0\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(ScoutError, match="prefix_cache_queries"):
            await read_counters(f"http://127.0.0.1:{port}")
