"""
Many sessions of the examples, with different users' inputs, at once.

The agents and their prompts are those of the files in `examples/`; here are only the people who
ask: what they want, at random from one seed, and how many come at a time.
"""

import asyncio
import importlib.util
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from scout_sdk import ConfigError

__all__ = ["EXAMPLES", "Job", "Mix", "load_example", "make_jobs", "run_jobs"]

CITIES = (
    "Lisbon", "Porto", "Ghent", "Trieste", "Bergen", "Krakow", "Seville", "Tartu", "Graz",
    "Nantes", "Aarhus", "Split", "Leipzig", "Valencia", "Cork", "Turin", "Riga", "Basel",
)  # fmt: skip
LIKES = (
    "walks before breakfast", "tiled houses", "old trams", "modern dance", "markets", "bookshops",
    "swimming in cold water", "bicycles", "churches without visitors", "chess in the park",
    "astronomy", "sour beer", "long ferries", "botanical gardens", "radio plays", "bridges",
)  # fmt: skip
CARES = (
    "one of them cannot climb stairs", "they bring a cello", "the youngest is four",
    "they do not fly at night", "both are vegetarian", "one is afraid of heights",
    "they have been there twice", "they meet friends on the second evening", "a dog comes along",
)  # fmt: skip
WISHES = (
    "lists the slack water of a day", "finds the first berth that is deep enough",
    "says how long a ship must wait for the tide", "merges two tide tables", "drops stale rows",
    "warns when two ships want one berth", "exports a table as CSV", "names the highest tide",
)  # fmt: skip
ARTICLES = ("desk lamp", "shade", "dimmer", "ceiling lamp", "bulb", "transformer", "lantern")
TROUBLES = (
    "hums when it is on", "came in a wet box", "is the wrong colour", "grew hot overnight",
    "has not arrived", "does not fit the hook", "flickers", "was sent twice", "lost a screw",
)  # fmt: skip


def _travel(dice: random.Random) -> str:
    wanted = ", ".join(dice.sample(["flights", "hotel", "food", "sights", "trains"], 3))
    about = "; ".join([*dice.sample(LIKES, 6), *dice.sample(CARES, 3)])
    start, city = dice.sample(CITIES, 2)
    return (
        f"{dice.randint(2, 9)} days in {city} for {dice.randint(1, 6)}, starting in {start}, for "
        f"at most {dice.randint(4, 40) * 50} euros: {wanted}. What we know of them: {about}."
    )


def _coding(dice: random.Random) -> str:
    names = dice.sample(("port", "berth", "tide", "ship", "table", "row", "depth", "pilot"), 4)
    wish = dice.choice(WISHES)
    listing = "\n".join(
        f"def {dice.choice(names)}_{dice.choice(names)}_{dice.randint(2, 99)}({names[0]}, "
        f"{names[1]}_m={dice.uniform(1, 20):.2f}): return {names[2]}[{dice.randint(0, 60)}] * "
        f"{dice.uniform(0.1, 3):.3f} - {names[3]}.offset_{dice.randint(1, 9)}"
        for _ in range(8)
    )
    return f"Add a function to harbour/{names[0]}s.py that {wish}. It holds now:\n{listing}"


def _ticket(dice: random.Random) -> str:
    article, trouble = dice.choice(ARTICLES), dice.choice(TROUBLES)
    return (
        f"Order {dice.randint(10000, 99999)} of {dice.randint(1, 28)} April, to "
        f"{dice.choice(CITIES)}: the {article} {trouble}. I have had {dice.randint(2, 30)} lamps "
        f"from you since {dice.randint(1995, 2024)}, and never this. I am at home after "
        f"{dice.randint(1, 6)} o'clock."
    )


EXAMPLES: dict[str, Callable[[random.Random], str]] = {
    "langgraph_travel_planner": _travel,
    "autogen_coding_team": _coding,
    "plain_openai": _ticket,
}
"""Module of each example, and what its users say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How many sessions of each example one repetition has, and how many run at a time."""

    travel: int
    """Sessions of the travel planner."""
    coding: int
    """Sessions of the coding team."""
    desk: int
    """Sessions of the support desk."""
    concurrency: int
    """Sessions at a time."""


@dataclass(frozen=True, slots=True)
class Job:
    """One session to run."""

    example: str
    text: str
    """What the user says."""


def make_jobs(mix: Mix, seed: int) -> list[Job]:
    """Return the sessions of one repetition in order of arrival; equal seeds give equal jobs."""
    dice = random.Random(seed)
    counts = (mix.travel, mix.coding, mix.desk)
    jobs = [
        Job(example, say(dice))
        for (example, say), count in zip(EXAMPLES.items(), counts, strict=True)
        for _ in range(count)
    ]
    dice.shuffle(jobs)
    return jobs


def load_example(name: str) -> ModuleType:
    """Return the example *name*: of this installation, or of the checkout it is installed from."""
    here = Path(__file__).resolve()
    for folder in (here.parent / "examples", here.parents[3] / "examples"):
        file = folder / f"{name}.py"
        if not file.is_file():
            continue
        spec = importlib.util.spec_from_file_location(f"scout_example_{name}", file)
        if spec is None or spec.loader is None:
            continue
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ModuleNotFoundError as error:
            msg = f"the example {name} needs {error.name}: pip install 'scout-sdk[demo]'"
            raise ConfigError(msg) from error
        return module
    msg = f"no example {name!r}; known: {', '.join(EXAMPLES)}"
    raise ConfigError(msg)


async def run_jobs(
    jobs: Sequence[Job],
    base_url: str,
    *,
    model: str,
    http_client: Any,
    concurrency: int,
    done: Callable[[], None] = lambda: None,
) -> list[float]:
    """
    Run *jobs* in order, *concurrency* at a time; return each one's seconds.

    *done* is called after each. An example's exception ends the run.
    """
    modules = {name: load_example(name) for name in dict.fromkeys(job.example for job in jobs)}
    room = asyncio.Semaphore(concurrency)
    seconds = [0.0] * len(jobs)

    async def one(index: int, job: Job) -> None:
        async with room:
            started = time.perf_counter()
            await modules[job.example].run(base_url, job.text, model=model, http_client=http_client)
            seconds[index] = time.perf_counter() - started
            done()

    async with asyncio.TaskGroup() as group:
        for index, job in enumerate(jobs):
            group.create_task(one(index, job))
    return seconds
