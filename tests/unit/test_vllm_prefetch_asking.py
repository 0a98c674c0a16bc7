"""API servers wake idle engines to let them plan warm-ups."""

import asyncio
import json

import pytest

from scout_server.vllm.link import EngineLink
from scout_server.vllm.prefetch import keep_warm
from scout_server.vllm.utility import answer


class _OverError(Exception):
    """The clock was stopped."""


def _pauses(answers):
    """Return how long keep_warm waits before each of the questions that get *answers*."""
    left, pauses = list(answers), []

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) > len(answers):
            raise _OverError

    async def ask():
        return left.pop(0)

    with pytest.raises(_OverError):
        asyncio.run(keep_warm(ask, sleep=sleep))
    return pauses[1:]


def test_the_engine_says_when_it_wants_to_be_asked_again():
    """
    The pause is the engine's, within bounds; without an answer it is long.
    """
    assert _pauses([0.05, 0.5]) == [0.05, 0.5]
    assert _pauses([0.0, 1e9]) == [0.02, 60.0]
    assert _pauses([None])[0] >= 1.0


@pytest.mark.parametrize(
    ("texts", "seconds"),
    [
        (['{"next_s": 0.5}', '{"next_s": 0.05}'], 0.05),
        (['{"next_s": null}', '{"mode": "stock"}'], None),
        (["nonsense"], None),
    ],
)
def test_the_most_urgent_rank_decides(texts, seconds):
    """
    Of several data-parallel ranks the one that wants to be asked first decides; none: no answer.
    """

    async def call(operation, argument):
        assert (operation, argument) == ("warm", "")
        return texts

    async def ask():
        return await EngineLink(call, timeout_s=1.0).warm()

    assert asyncio.run(ask()) == seconds


def test_a_stock_engine_is_not_woken():
    """
    A scheduler without Scout answers the question with what it is.
    """
    assert json.loads(answer(object(), "warm", ""))["mode"] == "stock"
