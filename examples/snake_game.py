"""Two dependent calls: the example of the Parrot paper (figure 7).

It gets one value after the other, so the second call is requested only after the first has ended;
`P.gather(code, test)` would request both at once.
"""

from __future__ import annotations

from common import arguments, open_session

import bros.semantic as P
from bros.semantic import LATENCY


# fmt: off  (as printed in the paper)
@P.SemanticFunction
def WritePythonCode(task: P.SemanticVariable):
    """You are an expert software engineer.
    Write python code of {{input:task}}.
    Code: {{output:code}}
    """


@P.SemanticFunction
def WriteTestCode(task: P.SemanticVariable, code: P.SemanticVariable):
    """You are an experienced QA engineer.
    You write test code for {{input:task}}.
    Code: {{input:code}}.
    Your test code: {{output:test}}
    """


def WriteSnakeGame():
    task = P.SemanticVariable("a snake game")
    code = WritePythonCode(task)
    test = WriteTestCode(task, code)
    return code.get(perf=LATENCY), test.get(perf=LATENCY)


# fmt: on


if __name__ == "__main__":
    with open_session(arguments(__doc__.splitlines()[0])):
        for text in WriteSnakeGame():
            print(text, end="\n\n" + "-" * 80 + "\n\n")
