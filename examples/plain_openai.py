"""
A support desk with three agents and no framework: plain openai calls, named by a context.

    scout serve --embedded --port 8000            # or: scout serve MODEL [vLLM's own arguments]
    python examples/plain_openai.py --base-url http://127.0.0.1:8000/v1

A ticket is a session. `triage` sorts it by guided JSON, the warehouse is asked for the customer's
orders, `solver` finds out what went wrong, `writer` answers in the shop's voice.
"""

import argparse
import asyncio
import random
from typing import Any

import openai

import scout_sdk

COMMON = """You are {agent} at the service desk of Lanternworks, a shop for lamps and spare parts.
{duty}

What the shop promises, and you may rely on:
- Orders before two o'clock leave the same day. Parcels take two days at home, five abroad.
- Goods may go back within thirty days, also opened; bulbs only if they are broken. We pay the way.
- A lamp has five years of warranty, a battery two, a bulb one. Wear of switches counts as a fault.
- What arrives broken is sent again at once; a photograph is enough, and the broken one may be kept.
- Spare parts for every lamp since 2009 are in stock or can be made within three weeks.
- Refunds go the way the money came and take three days. Vouchers never expire.
- A price that falls within two weeks of an order is refunded without being asked for.
- Old lamps are taken back with any parcel; batteries and mercury bulbs in the box that we send.
- Whoever mounts a ceiling lamp for money gets the trade price and a longer warranty of seven years.

How lamps fail, as the workshop has seen it over the years:
- Humming: a dimmer for another load, or a transformer that has run dry. Both are ours to replace.
- Flickering: a loose bulb, a cheap bulb on a dimmer, a worn switch; rarely the mains of the house.
- Heat: a bulb that is too strong, or a shade put on upside down. Anything brown is collected.
- Broken glass: packed in the small box, carried upside down, left in the cold before unpacking.
- Rust: bought for a bathroom without the letters IP44 on its plate; advice first, then exchange.

How everyone at the desk works:
- Believe the customer unless the order list says otherwise. Never ask for what we already know.
- Name the order, the article and the date. Amounts are in euros. Days are working days.
- Safety first: heat, smoke, smell, a wet transformer: the lamp is unplugged and collected by us.
- Do not promise what is not above. If it is not above, hand over to the shop's manager.
- Three sentences at most. Plain words, no slogans, no apology longer than four words.

{rules}
"""
AGENTS = {
    "triage": (
        "You read a new ticket and say what it is about. You do not answer it.",
        """Kinds of tickets:
- delivery: late, lost, wrong address, a piece is missing from the parcel.
- fault: it does not work, flickers, hums, smells, grew hot, fell apart, arrived broken.
- return: does not please, does not fit, was ordered twice, the customer changed his mind.
- question: before buying, about sizes, bulbs, dimmers, spare parts, mounting, bills.
When two fit, danger wins over money, and money over time. Answer with a JSON object alone,
{"kind": ...}. Example: 'the lamp I got on Monday hums and the box was wet' is a fault.""",
    ),
    "solver": (
        "You find out what happened, from the ticket and the customer's orders, and what to do.",
        """How a case is solved:
- Find the order that the ticket means: article first, then date, then amount. Say which it is.
- Compare what was promised with what happened: dates of dispatch and arrival, warranty, returns.
- Choose one remedy: send again, repair, refund, spare part, advice. Prefer what is fastest for the
  customer, then what is cheapest for the shop. More than 200 euros go to the manager.
- If two orders fit, take the later one, and say so. If none fits, say that we must ask.
- Note what the shop should learn from it, in five words, such as 'box too thin for glass'.""",
    ),
    "writer": (
        "You write the answer that the customer gets. The remedy is decided: keep it.",
        """How the shop sounds:
- Begin with the remedy, then the reason, then what the customer has to do, if anything.
- Use the customer's own word for the article. Never say ticket, case, process or policy.
- A date is a weekday and a day: Thursday the 4th. Never 'soon', 'shortly' or 'as soon as possible'.
- End with the first name of whoever is at the desk: Ines in the morning, Tom in the afternoon.
- Model: 'A new shade leaves today and is with you on Thursday the 4th. The old one broke because
  the box was too thin; please keep it or throw it away. Ines'""",
    ),
}
KINDS = {"enum": ["delivery", "fault", "return", "question"]}
SCHEMA = {"type": "object", "properties": {"kind": KINDS}, "required": ["kind"]}
FORM = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA}}


def prompt(agent: str) -> str:
    """Return the long fixed prompt of one agent: this is what the server learns to keep."""
    return COMMON.format(agent=agent, duty=AGENTS[agent][0], rules=AGENTS[agent][1])


async def orders(customer: str) -> str:
    """Ask the warehouse for a customer's orders: it takes a second."""
    await asyncio.sleep(1.0)
    dice = random.Random(customer)
    things = ["desk lamp", "shade", "dimmer", "ceiling lamp", "bulb", "transformer", "lantern"]
    return "\n".join(
        f"order {dice.randint(10000, 99999)}: {dice.randint(1, 4)} x {dice.choice(things)}, "
        f"{dice.randint(9, 180)} euros, sent on {dice.randint(1, 28)} April, arrived after "
        f"{dice.randint(1, 9)} days, paid by {dice.choice(['card', 'bill', 'voucher'])}"
        for _ in range(8)
    )


async def run(base_url: str, ticket: str, *, model: str, http_client: Any = None) -> str:
    """Answer one ticket; return the letter."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", http_client=http_client)

    async def ask(agent: str, *said: str, **options: Any) -> str:
        messages = [{"role": "system", "content": prompt(agent)}]
        messages += [{"role": "user", "content": text} for text in said]
        with scout_sdk.context(agent=agent):
            stream = await client.chat.completions.create(
                model=model, messages=messages, stream=True, temperature=0, max_tokens=40, **options
            )
            parts = [part.choices[0].delta.content async for part in stream if part.choices]
        return "".join(part for part in parts if part)

    with scout_sdk.context(session=f"ticket-{random.getrandbits(64):x}", final=True):
        kind = await ask("triage", ticket, response_format=FORM)
        history = await orders(ticket)
        remedy = await ask("solver", ticket, f"Triage says: {kind}\nOrders:\n{history}")
        return await ask("writer", ticket, f"The solver says: {remedy}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer a ticket with three agents.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--ticket", default="The desk lamp you sent on Monday hums when it is on.")
    args = parser.parse_args()
    first = openai.OpenAI(base_url=args.base_url, api_key="none").models.list().data[0]
    print(asyncio.run(run(args.base_url, args.ticket, model=first.id)))
