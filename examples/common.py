"""Shared by the examples: options, a text to summarize, and a summary of the calls."""

from __future__ import annotations

import argparse
from collections import Counter

import bros.semantic as P

CHAPTERS = (
    """The harbour of Marrow Bay was built in a single summer. The fishermen had lost four boats to
    the winter storms, and nobody wanted to wait for money from the capital. They took stone from
    the old quarry, worked in shifts by lamplight, and finished the outer wall on the last day of
    September. The first storm of October broke two windows in the chapel and no boat at all.""",
    """With the harbour came traders. They brought salt, rope and oranges, and took dried cod and
    wool. A customs house went up beside the pier, and its clerk, a patient man called Osk, wrote
    down every barrel for thirty-one years. His books are still the best record of what people in
    the bay ate, wore and argued about.""",
    """The railway arrived late and by accident. It was meant for the mining town of Tell, but the
    hills there slid into the valley one wet spring, and the engineers turned the line towards the
    sea. Within five years the traders had moved their goods from ships to wagons, and the pier was
    left to gulls, anglers and children.""",
    """The town tried to hold on to its fishery. A cannery opened in the old salt store and gave
    work to sixty women, who went on strike twice: once for warm water to wash their hands in, which
    they got in a day, and once for equal pay, which took eleven weeks. The banner of that strike
    hangs in the school today.""",
    """When the herring disappeared, the cannery closed and many families left. Those who stayed
    learned to live from guests. They painted the boats in bright colours, rented out rooms, and
    taught people from the city how to mend nets, which turned out to be something that people from
    the city would pay for.""",
    """Now the bay has a research station. Its scientists count seals, measure the temperature of
    the water at nine depths, and hold an open evening every month. The herring have come back in
    small numbers. Some want to fish again; others say that it is too early, and the argument fills
    the harbour inn on most Friday nights.""",
)
"""A short history of a town that does not exist."""


def arguments(description: str, **numbers: tuple[int, str]) -> argparse.Namespace:
    """Parse --url, --model, and an option per entry of `numbers`: name -> (default, help)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="a bros server (default: run the model in this process)")
    parser.add_argument("--model", help="model for this process (default: the embedded one)")
    for name, (default, text) in numbers.items():
        help_text = f"{text} (default: {default})"
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    return parser.parse_args()


def open_session(given: argparse.Namespace) -> P.Session:
    if given.url is not None:
        return P.Session(given.url)
    return P.Session(model=given.model)


def chapters(count: int) -> list[str]:
    """`count` chapters, repeated if there are not enough."""
    return [" ".join(CHAPTERS[i % len(CHAPTERS)].split()) for i in range(count)]


def show_graph(session: P.Session) -> None:
    """Print a line per kind of call, and the number of shared prompt tokens."""
    requests = session.inspect()["requests"]
    kinds = Counter((r["name"], str(r["service_class"] or "client"), r["stage"]) for r in requests)
    print(f"\n{len(requests)} calls:")
    for (name, service_class, stage), count in kinds.items():
        print(f"  {count:3} x {name:24} class {service_class:6} stage {stage}")
    prompt = sum(r["prompt_tokens"] for r in requests)
    cached = sum(r["cached_tokens"] for r in requests)
    print(f"  {cached} of {prompt} prompt tokens were shared")
