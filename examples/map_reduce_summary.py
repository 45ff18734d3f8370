"""Map-reduce: summarize the chapters of a text in parallel, then combine the summaries.

The server sees that the last call needs all others: it runs these as a task group, in as large
batches as possible, and only the last call is latency-sensitive.
"""

from __future__ import annotations

import time

from common import arguments, chapters, open_session, show_graph

import bros.semantic as P


@P.semantic_function(
    chat=True,
    sampling={"temperature": 0.0, "max_tokens": 40},
    transforms={"summary": "strip"},
)
def summarize(chapter: str):
    """Write one sentence that says what happens here: {{chapter}} {{output:summary}}"""


@P.semantic_function(chat=True, sampling={"temperature": 0.0, "max_tokens": 80})
def combine(summaries: list[P.SemanticVariable]):
    """Here is what happens in the chapters of a book:

    {{summaries}}

    Tell the whole story in three sentences. {{output:story}}"""


def main() -> None:
    given = arguments(__doc__.splitlines()[0], chapters=(8, "number of chapters"))
    with open_session(given) as session:
        began = time.perf_counter()
        story = combine([summarize(chapter) for chapter in chapters(given.chapters)])
        for piece in story.stream():
            print(piece, end="", flush=True)
        print(f"\n\n{time.perf_counter() - began:.1f} s")
        show_graph(session)


if __name__ == "__main__":
    main()
