"""An architect, coders and reviewers write a small program together, in rounds.

Every coder gets the architect's plan, every reviewer all files, every revision its review. Most of
each prompt is a prefix shared with other prompts, which the server computes once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from common import arguments, open_session, show_graph

import bros.semantic as P

SHORT = {"temperature": 0.2, "seed": 1, "max_tokens": 32}
CODE = {"temperature": 0.2, "seed": 1, "max_tokens": 48}


@P.semantic_function(sampling=SHORT, transforms={"plan": "strip"})
def design(task: P.SemanticVariable):
    """You are the architect of a small Python program.
    Task: {{task}}
    Plan, one line for each file: {{output:plan}}"""


@P.semantic_function(sampling=CODE, transforms={"code": "strip"})
def write_code(task: P.SemanticVariable, plan: P.SemanticVariable, file: str):
    """You are an engineer who writes one file of a Python program.
    Task: {{task}}
    Plan: {{plan}}
    Write {{file}}:
    {{output:code}}"""


@P.semantic_function(sampling=SHORT, transforms={"review": "strip"})
def review_code(task: P.SemanticVariable, files: Sequence[P.SemanticVariable], file: str):
    """You review a Python program.
    Task: {{task}}
    All files:
    {{files}}
    What should be better in {{file}}? One sentence: {{output:review}}"""


@P.semantic_function(sampling=CODE, transforms={"better": "strip"})
def revise(task: P.SemanticVariable, code: P.SemanticVariable, review: P.SemanticVariable):
    """You are an engineer who improves one file of a Python program.
    Task: {{task}}
    The file:
    {{code}}
    The review: {{review}}
    The better file:
    {{output:better}}"""


@P.native_function
def count_lines(files: list[P.SemanticVariable]) -> P.SemanticVariable:
    return str(sum(len(str(file).splitlines()) for file in files))  # type: ignore[return-value]


def main() -> None:
    given = arguments(
        __doc__.splitlines()[0],
        files=(2, "number of files"),
        rounds=(3, "rounds of review"),
    )
    with open_session(given) as session:
        began = time.perf_counter()
        task = P.SemanticVariable("a command line that keeps a list of things to do", name="task")
        names = [f"file_{number}.py" for number in range(1, given.files + 1)]
        plan = design(task)
        files = [write_code(task, plan, name) for name in names]
        for _ in range(given.rounds):
            reviews = [review_code(task, files, name) for name in names]
            files = [revise(task, *pair) for pair in zip(files, reviews, strict=True)]
        lines = count_lines(files)
        for name, code in zip(names, P.gather(*files, perf=P.LATENCY), strict=True):
            print(f"--- {name}\n{code}")
        print(f"\n{lines.get()} lines in {time.perf_counter() - began:.1f} s")
        show_graph(session)


if __name__ == "__main__":
    main()
