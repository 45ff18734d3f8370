"""The programs of the session benchmarks: chains, map-reduce, multiple agents, single questions.

A program is a list of calls whose templates name variables. It can be submitted to a session, or a
client can render each call as soon as its inputs are available, as client libraries do. Texts are
random, depend on a seed and have a given number of tokens; every output has a fixed length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bros.semantic.schema import CallSpec, Parameter


class Encoding(Protocol):
    """The part of a tokenizer that Texts needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Program:
    """calls: in topological order. results: the variables that the user gets."""

    calls: Sequence[CallSpec]
    results: Sequence[str]

    @property
    def num_output_tokens(self) -> int:
        return sum(int(call.sampling["max_tokens"]) for call in self.calls)


class Texts:
    """Random text of a given number of tokens, different each time."""

    def __init__(self, encoding: Encoding, seed: int) -> None:
        self._encoding = encoding
        self._rng = random.Random(seed)

    def words(self, num_tokens: int) -> str:
        rng = self._rng
        drawn = (f"{rng.choice('bcdfgklmnprst')}{rng.randrange(10_000)}" for _ in range(num_tokens))
        ids = self._encoding.encode(" ".join(drawn), add_special_tokens=False)
        return self._encoding.decode(ids[:num_tokens])


def call(name: str, template: str, output: str, tokens: int, **inputs: str) -> CallSpec:
    """A call with one output of `tokens` tokens. inputs: placeholder -> "=text" or a variable."""
    parameters = [
        Parameter(name=key, value=value[1:])
        if value[:1] == "="
        else Parameter(name=key, variable=value)
        for key, value in inputs.items()
    ]
    return CallSpec(
        name=name,
        template=template + "{{output:answer}}",
        chat=True,
        parameters=[*parameters, Parameter(name="answer", variable=output)],
        sampling=fixed_length(tokens),
    )


def fixed_length(tokens: int) -> dict[str, Any]:
    """Greedy sampling of exactly `tokens` tokens."""
    return {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0.0}


def chain_summary(texts: Texts, *, chunks: int, chunk_tokens: int, output_tokens: int) -> Program:
    """A document in parts, each summarized together with the previous summary.

    The part comes first in the prompt, because it is known beforehand.
    """
    template = (
        "Here is part of a document:\n{{input:part}}\n\nThe parts before it say: "
        "{{input:before}}\n\nSum up everything so far."
    )
    calls, before = [], "=nothing, this is the first part."
    for index in range(chunks):
        part = "=" + texts.words(chunk_tokens)
        calls.append(call("sum up", template, f"s{index}", output_tokens, part=part, before=before))
        before = f"s{index}"
    return Program(calls, [before])


def map_reduce_summary(
    texts: Texts, *, chunks: int, chunk_tokens: int, output_tokens: int
) -> Program:
    """All parts summarized in parallel, and a summary of the summaries."""
    template = "Here is part of a document:\n{{input:part}}\n\nSum it up."
    calls = [
        call("map", template, f"m{i}", output_tokens, part="=" + texts.words(chunk_tokens))
        for i in range(chunks)
    ]
    names = [f"m{i}" for i in range(chunks)]
    listed = "\n".join(f"{{{{input:{name}}}}}" for name in names)
    reduce = f"Here are summaries of the parts of a document:\n{listed}\n\nSum up all of it."
    inputs = {name: name for name in names}
    return Program(
        [*calls, call("reduce", reduce, "summary", output_tokens, **inputs)], ["summary"]
    )


def multi_agent_coding(
    texts: Texts, *, files: int, rounds: int, code_tokens: int, comment_tokens: int
) -> Program:
    """An architect, a coder per file, and rounds in which each file is reviewed and revised.

    All prompts contain the design, reviews and revisions all files: as in the MetaGPT workload of
    the Parrot paper (section 8.4), most of the prompts' text is shared.
    """
    task = "=" + texts.words(60)
    design = "We write a program together. The task is: {{input:task}}\nThe design is:"
    calls = [call("architect", design, "design", code_tokens, task=task)]
    common = design + " {{input:design}}\n"
    code = [f"code-{i}-0" for i in range(files)]
    calls += [
        call(
            "coder",
            common + "You are an engineer. Write this file: {{input:file}}\n",
            code[i],
            code_tokens,
            task=task,
            design="design",
            file=f"=module_{i}.py",
        )
        for i in range(files)
    ]
    listed = "".join(f"File module_{i}.py:\n{{{{input:f{i}}}}}\n" for i in range(files))
    for turn in range(1, rounds + 1):
        files_now = {f"f{i}": name for i, name in enumerate(code)}
        inputs = {"task": task, "design": "design", **files_now}
        review = common + listed + "You are a reviewer. Comment on {{input:file}}\n"
        comments = [f"comment-{i}-{turn}" for i in range(files)]
        calls += [
            call("reviewer", review, comments[i], comment_tokens, file=f"=module_{i}.py", **inputs)
            for i in range(files)
        ]
        revise = (
            common + listed + "You are an engineer. A reviewer says on {{input:file}}: "
            "{{input:comment}}\nWrite it anew.\n"
        )
        code = [f"code-{i}-{turn}" for i in range(files)]
        calls += [
            call(
                *("reviser", revise, code[i], code_tokens),
                **{"file": f"=module_{i}.py", "comment": comments[i], **inputs},
            )
            for i in range(files)
        ]
    return Program(calls, code)


def question(texts: Texts, system: str, *, question_tokens: int, output_tokens: int) -> Program:
    """One call: a shared system prompt and a question."""
    template = "{{input:system}}\n\nA user asks: {{input:question}}"
    asked = "=" + texts.words(question_tokens)
    # The system prompt is part of the template, because sessions share templates.
    template = template.replace("{{input:system}}", system.replace("{{", "\\{{"))
    return Program([call("chat", template, "answer", output_tokens, question=asked)], ["answer"])
