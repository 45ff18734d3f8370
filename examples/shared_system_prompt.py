"""Several users talk to one assistant that has a long system prompt.

The server computes the KV of the system prompt once and shares it, also across sessions. Each
decode step reads it once for the whole batch.
"""

from __future__ import annotations

import asyncio
import time

from common import CHAPTERS, arguments, open_session, show_graph

import bros.semantic as P

RULES = " ".join(
    f"Rule {number}: when a guest asks about {topic}, answer in one short sentence and be kind."
    for number, topic in enumerate(
        ("boats", "rooms", "trains", "herring", "seals", "tides", "oranges", "the cannery"), start=1
    )
)
SYSTEM = (
    "You are the guide of the museum of Marrow Bay. Answer in one short sentence.\n"
    f"{RULES}\nThis is what you know:\n" + "\n".join(" ".join(text.split()) for text in CHAPTERS)
)
QUESTIONS = (
    "Who was Osk?",
    "Why did the railway come to the bay?",
    "How long did the strike for equal pay take?",
    "What do guests learn here?",
    "What do the scientists count?",
    "Where is the banner of the strike?",
)


@P.semantic_function(
    chat=True, system=SYSTEM, sampling={"temperature": 0.2, "seed": 7, "max_tokens": 40}
)
def answer(question: P.SemanticVariable):
    """{{question}} {{output:reply}}"""


async def talk(question: str) -> None:
    began = time.perf_counter()
    first_s = 0.0
    pieces: list[str] = []
    async for piece in answer(question).astream(perf=P.TTFT):
        if not pieces:
            first_s = time.perf_counter() - began
        pieces.append(piece)
    print(f"{question}\n  {''.join(pieces).strip()}\n  (first words after {first_s:.2f} s)")


async def main() -> None:
    given = arguments(__doc__.splitlines()[0], users=(6, "number of users after the first one"))
    session = open_session(given)
    async with session:
        await talk("What is this museum about?")
        asked = (QUESTIONS[i % len(QUESTIONS)] for i in range(given.users))
        await asyncio.gather(*(talk(question) for question in asked))
        await asyncio.to_thread(show_graph, session)


if __name__ == "__main__":
    asyncio.run(main())
