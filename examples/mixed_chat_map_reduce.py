"""A map-reduce summary in the background of a chat, on one engine.

The summary is best-effort (THROUGHPUT) and uses the time that the streamed chat responses (TTFT)
leave over.
"""

from __future__ import annotations

import time

from common import arguments, chapters, open_session, show_graph
from map_reduce_summary import combine, summarize

import bros.semantic as P

QUESTIONS = (
    "Name a fish.",
    "What is a harbour?",
    "Why do boats float?",
    "What do seals eat?",
)


@P.semantic_function(chat=True, sampling={"temperature": 0.2, "seed": 3, "max_tokens": 30})
def chat(question: str):
    """{{question}} Answer in one sentence. {{output:reply}}"""


def main() -> None:
    given = arguments(
        __doc__.splitlines()[0],
        chapters=(8, "number of chapters"),
        questions=(4, "number of chat questions"),
    )
    with open_session(given) as session:
        began = time.perf_counter()
        story = combine([summarize(chapter) for chapter in chapters(given.chapters)])
        story.want(perf=P.THROUGHPUT)
        for number in range(given.questions):
            question = QUESTIONS[number % len(QUESTIONS)]
            asked = time.perf_counter()
            pieces = chat(question).stream(perf=P.TTFT)
            first = next(pieces, "")
            first_s = time.perf_counter() - asked
            print(f"{question}\n  {first}{''.join(pieces)}\n  (first words after {first_s:.2f} s)")
        print(f"\nThe summary: {story.get(perf=P.THROUGHPUT)}")
        print(f"\n{time.perf_counter() - began:.1f} s")
        show_graph(session)


if __name__ == "__main__":
    main()
