"""Summarize a text chapter by chapter, extending the summary so far.

This is a chain: each call needs the output of the previous one. The server has the whole chain from
the start, so there is no round trip to the client between two calls.
"""

from __future__ import annotations

import time

from common import arguments, chapters, open_session, show_graph

import bros.semantic as P


@P.semantic_function(
    chat=True,
    system="You keep a short summary of a long text. Answer with the summary only.",
    sampling={"temperature": 0.0, "max_tokens": 50},
    transforms={"summary": "strip"},
)
def extend_summary(so_far: P.SemanticVariable, chapter: str):
    """Summary so far: {{so_far}}

    Next part: {{chapter}}

    Write the summary of everything in two sentences. {{output:summary}}"""


def main() -> None:
    given = arguments(__doc__.splitlines()[0], chapters=(6, "number of chapters"))
    with open_session(given) as session:
        began = time.perf_counter()
        summary: P.SemanticVariable | str = "nothing yet"
        for chapter in chapters(given.chapters):
            summary = extend_summary(summary, chapter)
        print(summary.get(perf=P.LATENCY))
        print(f"\n{time.perf_counter() - began:.1f} s")
        show_graph(session)


if __name__ == "__main__":
    main()
