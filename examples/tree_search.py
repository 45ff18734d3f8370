"""A beam search over sentences: of all ways to go on, the most likely ones are followed further.

Every step forks the contexts that are left, lets the forks generate one sentence each as one batch,
and keeps the forks whose tokens the model found most likely. The beginning that forks have in
common is computed once, whatever their number.
"""

from __future__ import annotations

import argparse

from bros import LLM, SamplingParams
from bros.llm import Context
from bros.text.generation import ChoiceResult

TASK = "Write a very short story about a lighthouse keeper, in simple sentences."
SENTENCE = SamplingParams(temperature=0.8, seed=5, logprobs=0, max_tokens=30, stop=(".", "\n"))
BEAMS, BRANCHES = 2, 3


def score(answer: ChoiceResult) -> float:
    """Mean log-probability of a token."""
    return sum(token.logprob for token in answer.logprobs) / len(answer.logprobs)


def search(llm: LLM, root: Context, steps: int) -> Context:
    """The best context after `steps` sentences."""
    beams = [(0.0, root)]
    for step in range(steps):
        forks = [(total, beam.fork()) for total, beam in beams for _ in range(BRANCHES)]
        prompt_tokens = sum(len(fork) for _, fork in forks)
        answers = llm.generate_in([fork for _, fork in forks], params=SENTENCE)
        cached = sum(answer.cached_tokens for answer in answers)
        print(f"step {step + 1}: {len(forks)} branches, {cached} of {prompt_tokens} tokens cached")
        scored = [
            (total + score(answer), fork)
            for (total, fork), answer in zip(forks, answers, strict=True)
        ]
        beams = sorted(scored, key=lambda pair: pair[0], reverse=True)[:BEAMS]
    return beams[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model (default: the embedded one)")
    parser.add_argument("--steps", type=int, default=3, help="sentences (default: 3)")
    given = parser.parse_args()
    with LLM(given.model) as llm, llm.context([{"role": "user", "content": TASK}]) as root:
        best = search(llm, root, given.steps)
        print(best.text[len(root.text) :].strip())


if __name__ == "__main__":
    main()
