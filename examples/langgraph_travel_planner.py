"""
A travel planner: a supervisor and five specialists, made agent-aware by one callback.

    scout serve --embedded --port 8000            # or: scout serve MODEL [vLLM's own arguments]
    python examples/langgraph_travel_planner.py --base-url http://127.0.0.1:8000/v1

The supervisor lets the model choose the next specialist by guided JSON, within those that the
request still needs; a specialist writes a query, calls its tool and sums up what came back.
"""

import argparse
import asyncio
import json
import operator
import random
from typing import Annotated, Any, TypedDict

import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

from scout_integrations.langgraph import ScoutCallback

SPECIALISTS = {  # name: (duty, its tool, what the tool does, seconds that the tool takes)
    "flights": ("find the flights", "search_flights", "Ask every airline for live prices.", 2.0),
    "hotel": ("find where they sleep", "search_hotels", "Search hotels and guest houses.", 0.3),
    "food": ("find where they eat", "search_tables", "Search restaurants with a free table.", 0.3),
    "sights": ("find what they see and do", "search_sights", "Search museums and walks.", 0.2),
    "trains": ("find how they get about", "search_rides", "Search trains, ferries and cars.", 0.5),
}
HANDBOOK = """You are {name} at Meridian, an agency that plans journeys for small groups of \
travellers. Your duty is to {duty}, and nothing else.

How {name} works:
- Read the traveller's request first, then the notes of your colleagues. Their findings are facts;
  do not repeat their searches and do not contradict a booking that is already made.
- Prefer what can still be cancelled. Say the price in euros, per person, with taxes.
- If dates are missing, assume the second weekend of next month. If a budget is missing, assume a
  middle one. Never invent an operator, an address or a price: use what the tools return.
- Mind connections: ninety minutes between flights, two hours when the airport changes, no arrival
  after eleven at night unless the traveller asked for it.
- Point out what a careful friend would: visas, strikes, closing days, steep hills, cash only.
- Write short plain sentences. One finding a line, the best first, at most three lines.
- When the tools return nothing useful, say so and propose the next best thing.

The tools of {name}, as JSON schemas:
"""


class Search(BaseModel):
    query: str = Field(description="What to look for, in a few words")
    place: str = Field("", description="City, quarter or station; empty: from the request")


class Trip(TypedDict, total=False):
    request: str
    notes: Annotated[list[str], operator.add]
    next: str


def make_tool(name: str, description: str, seconds: float) -> BaseTool:
    async def search(query: str, **_: object) -> str:
        await asyncio.sleep(seconds)
        dice = random.Random(f"{name} {query}")
        houses = ["Aurora", "Bela Vista", "Cedar", "Dom Pedro", "Estrela", "Fado", "Gloria"]
        return "\n".join(
            f"{dice.choice(houses)} {dice.randint(100, 999)}: {dice.randint(20, 400)} euros, rated "
            f"{dice.uniform(3, 5):.1f}, can be cancelled until {dice.randint(1, 28)} May"
            for _ in range(4)
        )

    about = {"name": name, "description": description, "args_schema": Search}
    return StructuredTool.from_function(coroutine=search, **about)


TOOLS = {name: make_tool(*rest) for name, (_, *rest) in SPECIALISTS.items()}
TEXT = {"type": "string", "maxLength": 60}
CALENDAR = make_tool("check_calendar", "Say what is closed, sold out or on strike on a day.", 0.1)


def system(name: str, duty: str, *tools: BaseTool) -> SystemMessage:
    """Return the long fixed prompt of one agent: this is what the server learns to keep."""
    schemas = [json.dumps(convert_to_openai_tool(tool), indent=1) for tool in tools]
    return SystemMessage(HANDBOOK.format(name=name, duty=duty) + "\n".join(schemas))


async def ask(llm: ChatOpenAI, prompt: list[Any], key: str, kind: object, default: str) -> str:
    """Return one value of a guided answer, or *default* if the model gives none."""
    schema = {"type": "object", "properties": {key: kind}, "required": [key]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    reply = await llm.bind(response_format=form).ainvoke(prompt)
    try:
        return str(json.loads(str(reply.content))[key])
    except (ValueError, KeyError, TypeError):
        return default


def build(llm: ChatOpenAI) -> Any:
    lead = system("the lead planner", "decide who works next", CALENDAR, *list(TOOLS.values())[:2])

    async def supervisor(trip: Trip) -> Trip:
        done = {note.split(":")[0] for note in trip["notes"]}
        needed = [name for name in SPECIALISTS if name in trip["request"] and name not in done]
        if not needed:
            return {"next": END}
        user = HumanMessage("\n".join([trip["request"], *trip["notes"], "Who works next?"]))
        chosen = await ask(llm, [lead, user], "next", {"enum": needed}, needed[0])
        return {"next": chosen if chosen in needed else needed[0]}

    def specialist(name: str) -> Any:
        tool = TOOLS[name]
        prompt = system(f"the {name} expert", SPECIALISTS[name][0], tool, CALENDAR)

        async def work(trip: Trip) -> Trip:
            user = HumanMessage("\n".join([trip["request"], *trip["notes"], "What is your query?"]))
            query = await ask(llm, [prompt, user], "query", TEXT, trip["request"])
            found = HumanMessage(f"{tool.name} found:\n{await tool.ainvoke({'query': query})}")
            reply = await llm.ainvoke([prompt, user, found])
            return {"notes": [f"{name}: {reply.content}"]}

        return work

    graph = StateGraph(Trip).add_node("supervisor", supervisor).add_edge(START, "supervisor")
    graph.add_conditional_edges("supervisor", lambda trip: trip["next"], [*SPECIALISTS, END])
    for name in SPECIALISTS:
        graph.add_node(name, specialist(name)).add_edge(name, "supervisor")
    return graph.compile(name="travel_planner")


async def run(base_url: str, request: str, *, model: str, http_client: Any = None) -> str:
    options = {"temperature": 0, "max_completion_tokens": 40, "streaming": True}
    server = {"base_url": base_url, "api_key": "none", "http_async_client": http_client}
    graph = build(ChatOpenAI(model=model, **server, **options))
    config = {"callbacks": [ScoutCallback()]}
    trip = await graph.ainvoke({"request": request, "notes": []}, config=config)
    return "\n".join(trip["notes"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plan a trip with six agents.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--request", default="Three days in Lisbon for two: flights, hotel, food")
    args = parser.parse_args()
    first = openai.OpenAI(base_url=args.base_url, api_key="none").models.list().data[0]
    print(asyncio.run(run(args.base_url, args.request, model=first.id)))
