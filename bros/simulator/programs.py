"""Programs of many calls, and the two ways to run them: in a session, or call by call.

A program is a list of calls whose templates name variables. It can be submitted to a session, or a
client can render each call as soon as its inputs are available, as client libraries do. Texts are
random, depend on a seed and have a given number of tokens; every output has a fixed length.

Both ways use an End, a server over HTTP or in the same process (then in virtual time), and wait
`delay_s` before each request to simulate the network latency.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from bros.core.clock import Clock
from bros.core.request import SamplingParams, ServiceClass, Slo
from bros.semantic.core.template import Text, parse_template
from bros.semantic.schema import CallSpec, Criteria, Parameter, Perf, Role, SessionView
from bros.semantic.service.service import SessionService
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer
from bros.workload.arrivals import generator
from bros.workload.attainment import Timeline, TimelineOutcome, judge, tpot_of


class Encoding(Protocol):
    """The part of a tokenizer that Texts needs."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Program:
    """calls: in topological order.
    results: the variables that the user gets.
    """

    calls: Sequence[CallSpec]
    results: Sequence[str]

    @property
    def num_output_tokens(self) -> int:
        return sum(int(call.sampling["max_tokens"]) for call in self.calls)


class Texts:
    """Random text of a given number of tokens, different each time."""

    def __init__(self, encoding: Encoding, seed: int | str) -> None:
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


def map_reduce_questions(
    texts: Texts, *, document_tokens: int, questions: int, output_tokens: int
) -> Program:
    """Questions about one document, and a summary of the answers."""
    document = "=" + texts.words(document_tokens)
    template = "{{input:document}}\n\nAnswer this question: {{input:question}}\n"
    names = [f"a{i}" for i in range(questions)]
    maps = [
        call(
            "ask",
            template,
            name,
            output_tokens,
            document=document,
            question="=" + texts.words(15),
        )
        for name in names
    ]
    listed = "\n".join(f"{{{{input:{name}}}}}" for name in names)
    reduce = f"Here are answers about a document:\n{listed}\n\nSum up all of it."
    inputs = {name: name for name in names}
    return Program([*maps, call("reduce", reduce, "summary", output_tokens, **inputs)], ["summary"])


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
                "reviser",
                revise,
                code[i],
                code_tokens,
                file=f"=module_{i}.py",
                comment=comments[i],
                **inputs,
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


SMALL_PROGRAMS: Mapping[str, Callable[[Texts], Program]] = MappingProxyType(
    {
        "chain": lambda texts: chain_summary(texts, chunks=6, chunk_tokens=64, output_tokens=16),
        "map-reduce": lambda texts: map_reduce_summary(
            texts, chunks=8, chunk_tokens=128, output_tokens=40
        ),
        "coding": lambda texts: multi_agent_coding(
            texts, files=3, rounds=1, code_tokens=40, comment_tokens=20
        ),
        "chat": lambda texts: question(
            texts, texts.words(300), question_tokens=20, output_tokens=64
        ),
    }
)
"""One program of each kind, small enough for a small model on CPUs."""


# ---- Programs by name, with the sizes of the Parrot paper's experiments (section 8).


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramKind:
    """A workload of programs.

    title: what a program is, for reports.
    make: (texts, generator of lengths, count) -> that many programs.
    rate: default programs per second and replica.
    count: default programs per replica.
    """

    title: str
    make: Callable[[Texts, random.Random, int], Sequence[Program]]
    rate: float
    count: int


_PARTS, _PART_TOKENS, _SUMMARY_TOKENS = 20, 1024, 50


def _chains(texts: Texts, rng: random.Random, count: int) -> Sequence[Program]:
    sizes = {"chunks": _PARTS, "chunk_tokens": _PART_TOKENS, "output_tokens": _SUMMARY_TOKENS}
    return [chain_summary(texts, **sizes) for _ in range(count)]


def _map_reduces(texts: Texts, rng: random.Random, count: int) -> Sequence[Program]:
    sizes = {"chunks": _PARTS, "chunk_tokens": _PART_TOKENS, "output_tokens": _SUMMARY_TOKENS}
    return [map_reduce_summary(texts, **sizes) for _ in range(count)]


def _codings(texts: Texts, rng: random.Random, count: int) -> Sequence[Program]:
    return [
        multi_agent_coding(texts, files=8, rounds=3, code_tokens=300, comment_tokens=100)
        for _ in range(count)
    ]


def _copilots(texts: Texts, rng: random.Random, count: int) -> Sequence[Program]:
    system = texts.words(6000)
    return [
        question(texts, system, question_tokens=40, output_tokens=rng.randint(180, 800))
        for _ in range(count)
    ]


GPTS, GPTS_TOKENS = 4, 3000
"""Applications, and tokens of the system prompt of each. The paper says only that it is long."""


def _gpts(texts: Texts, rng: random.Random, count: int) -> Sequence[Program]:
    systems = [texts.words(GPTS_TOKENS) for _ in range(GPTS)]
    return [
        question(
            texts, rng.choice(systems), question_tokens=40, output_tokens=rng.randint(100, 500)
        )
        for _ in range(count)
    ]


PROGRAMS: Mapping[str, ProgramKind] = MappingProxyType(
    {
        "map-reduce": ProgramKind(
            title="summary of 20 parts of 1,024 tokens at once, 50 tokens each",
            make=_map_reduces,
            rate=0.25,
            count=10,
        ),
        "chain": ProgramKind(
            title="summary of 20 parts of 1,024 tokens one after another, 50 tokens each",
            make=_chains,
            rate=0.25,
            count=10,
        ),
        "coding": ProgramKind(
            title="multi-agent coding, 8 files, 3 rounds of review",
            make=_codings,
            rate=0.05,
            count=5,
        ),
        "copilot": ProgramKind(
            title="questions after one system prompt of 6,000 tokens",
            make=_copilots,
            rate=2.0,
            count=100,
        ),
        "gpts": ProgramKind(
            title="questions to four applications with system prompts of 3,000 tokens",
            make=_gpts,
            rate=2.0,
            count=100,
        ),
    }
)


def programs_of(name: str, count: int, encoding: Encoding, seed: int) -> Sequence[Program]:
    """The first `count` programs of a workload, a key of PROGRAMS."""
    texts = Texts(encoding, f"bros/{seed}/{name} texts")
    return PROGRAMS[name].make(texts, generator(seed, f"{name} lengths"), count)


# ---- Two ways to run a program.


RT, BE = ServiceClass.RT, ServiceClass.BE


@dataclass(slots=True)
class ChatRecord:
    """One chat completion. Times are in seconds on the client's clock."""

    asked_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        return tpot_of(self.first_s, self.last_s, self.tokens)

    def met(self, slo: Slo) -> bool | None:
        """Whether it met both objectives; None if there are none."""
        seen = Timeline(
            start_s=self.asked_s,
            times_s=(self.first_s, self.last_s),
            tokens=self.tokens,
            outcome=TimelineOutcome.COMPLETED,
        )
        return judge(seen, slo, self.last_s).both_met


class End(Protocol):
    """A server. Each method is one request."""

    async def chat(
        self, content: str, sampling: Mapping[str, Any], service_class: ServiceClass
    ) -> ChatRecord: ...

    async def open(self) -> str: ...

    async def submit(self, session: str, calls: Sequence[CallSpec]) -> None: ...

    async def get(self, session: str, variable: str, perf: Perf) -> str: ...

    async def calls_of(self, session: str) -> list[dict[str, Any]]:
        """The calls of the session, as inspection returns them."""
        ...

    async def close(self, session: str) -> None: ...


@dataclass(slots=True)
class Run:
    """The run of a program.

    seconds: from the first request to the last value.
    """

    seconds: float
    values: dict[str, str]
    answers: list[ChatRecord] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


async def run_by_calls(
    end: End, program: Program, clock: Clock, *, delay_s: float, service_class: ServiceClass = RT
) -> Run:
    """The client renders and sends each call as soon as its inputs are available."""
    began = clock.now()
    values = {output_of(call): asyncio.get_running_loop().create_future() for call in program.calls}
    answers: list[ChatRecord] = []

    async def one(call: CallSpec) -> None:
        content = await rendered(call, values)
        await asyncio.sleep(delay_s)
        answer = await end.chat(content, call.sampling, service_class)
        answers.append(answer)
        values[output_of(call)].set_result(answer.text)

    await asyncio.gather(*(one(call) for call in program.calls))
    wanted = {name: values[name].result() for name in program.results}
    return Run(clock.now() - began, wanted, answers)


async def run_in_session(
    end: End, program: Program, clock: Clock, *, delay_s: float, perf: Perf = Perf.LATENCY
) -> Run:
    """Three round trips: open a session, submit the program, get its values."""
    began = clock.now()
    await asyncio.sleep(delay_s)
    session = await end.open()
    await asyncio.sleep(delay_s)
    await end.submit(session, program.calls)
    await asyncio.sleep(delay_s)
    found = await asyncio.gather(*(end.get(session, name, perf) for name in program.results))
    seconds = clock.now() - began
    calls = await end.calls_of(session)
    await end.close(session)
    return Run(seconds, dict(zip(program.results, found, strict=True)), [], calls)


def output_of(call: CallSpec) -> str:
    """The output variable of a call of this module."""
    (name,) = [p.variable for p in call.parameters if p.name == "answer"]
    assert name is not None
    return name


async def rendered(call: CallSpec, values: Mapping[str, asyncio.Future[str]]) -> str:
    """The prompt of a call. Waits for its inputs."""
    inputs = {p.name: p for p in call.parameters}
    pieces: list[str] = []
    for piece in parse_template(call.template or ""):
        if isinstance(piece, Text):
            pieces.append(piece.text)
        elif piece.role is not Role.OUTPUT:
            given = inputs[piece.name]
            value = given.value if given.variable is None else await values[given.variable]
            pieces.append(value or "")
    return "".join(pieces)


class ServiceEnd:
    """A server in this process, with any engine and clock."""

    def __init__(
        self, service: SessionService, generator: TextGenerator, tokenizer: Tokenizer, clock: Clock
    ) -> None:
        self._service = service
        self._generator = generator
        self._tokenizer = tokenizer
        self._clock = clock

    async def chat(
        self, content: str, sampling: Mapping[str, Any], service_class: ServiceClass
    ) -> ChatRecord:
        prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": content}])
        return await self.complete(prompt, SamplingParams(**sampling), service_class)

    async def complete(
        self, prompt: Sequence[int], sampling: SamplingParams, service_class: ServiceClass = RT
    ) -> ChatRecord:
        """Complete a prompt of tokens."""
        answer = ChatRecord(self._clock.now())
        async with await self._generator.start(
            [prompt], sampling, service_class=service_class
        ) as generation:
            async for delta in generation:
                answer.last_s = self._clock.now()
                answer.first_s = answer.first_s or answer.last_s
                answer.tokens += len(delta.token_ids)
                answer.text += delta.text
        return answer

    async def open(self) -> str:
        return self._service.create("").id

    async def submit(self, session: str, calls: Sequence[CallSpec]) -> None:
        self._service.submit("", session, calls)

    async def get(self, session: str, variable: str, perf: Perf) -> str:
        found = await self._service.get("", session, variable, Criteria(perf=perf), 1e6)
        return found.value or ""

    async def calls_of(self, session: str) -> list[dict[str, Any]]:
        return [asdict(call) for call in self.view(session).calls]

    def view(self, session: str) -> SessionView:
        """The session with its graph."""
        return self._service.inspect("", session)

    async def close(self, session: str) -> None:
        await self._service.delete("", session)
