"""Processor time of the server process per streamed token, with many concurrent streams.

    python benchmarks/stream_speed.py [--streams 200] [--tokens 128] [--rounds 5] [--quick]
        [--trees . ../before] [--options --replicas 1] [--files] [--profile FILE] [--json FILE]

`bros serve` runs a random model of two small layers, so that the engine, in another process, is not
the bottleneck. The clients are raw sockets in this process: each sends one chat request and reads
events until the stream ends. Only the processor time of the server process counts.

--trees: source trees whose servers are compared; their rounds alternate.
--files: lists the files of bros/ whose functions the server calls for a streamed request. Left out
    are tasks that ran before it came and are not its own: the watch on the event loop, the
    supervisor of the engine. tests/server/test_request_path.py limits the number.
--profile: cProfile of one round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import hashlib
import json
import opcode
import os
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

WORDS = 2048
READY = re.compile(r"bros is ready at http://([\d.]+):(\d+)")
SERVE = ("--policy", "fcfs", "--max-num-seqs", "256", "--max-batch-tokens", "4096")
QUIET = ("--log-level", "warning", "--threads", "1")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Round:
    """One round: all streams, from the first request to the last byte.

    tokens: of all responses.
    events: with text; fewer than tokens if some have several.
    user_s, system_s: processor time of the server process, in its own code and in the kernel
        (mostly for sending).
    texts: digest of all responses.
    """

    tree: str
    tokens: int
    events: int
    user_s: float
    system_s: float
    elapsed_s: float
    texts: str

    @property
    def us_per_token(self) -> float:
        return 1e6 * (self.user_s + self.system_s) / self.tokens

    @property
    def user_us_per_token(self) -> float:
        return 1e6 * self.user_s / self.tokens


def save_model(folder: Path) -> None:
    """Save a random Llama in which every token is a word."""
    import tokenizers
    import torch
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab = {"<unk>": 0, "<end>": 1}
    vocab |= {f"Ġword{number}": number for number in range(2, WORDS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<end>"])
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    content = json.dumps(names | {"chat_template": TEMPLATE})
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=1,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


# ---- The server


class Server:
    """`bros serve` of one source tree."""

    def __init__(self, tree: str, command: Sequence[str]) -> None:
        self.tree = tree
        environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve())}
        self._process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=tree, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        found = None
        for line in self._process.stdout:
            found = READY.search(line)
            if found is not None:
                break
        if found is None:
            raise SystemExit(f"the server of {tree} did not start")
        self.host, self.port, self.pid = found[1], int(found[2]), self._process.pid

    def cpu_s(self) -> tuple[float, float]:
        """(user, system) processor seconds so far of the server process, without the engine."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return int(fields[11]) / TICKS_PER_S, int(fields[12]) / TICKS_PER_S

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


@contextlib.contextmanager
def running(
    trees: Sequence[str], options: Sequence[str], launcher: Sequence[str] = ("-m", "bros")
) -> Iterator[list[Server]]:
    """Run a server per tree, all with the same model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        save_model(folder)
        servers: list[Server] = []
        try:
            for number, tree in enumerate(trees):
                place = ("--port", "0", "--data-dir", f"{scratch}/{number}")
                arguments = ("serve", str(folder), *place, *SERVE, *QUIET, *options)
                servers.append(Server(tree, [*launcher, *arguments]))
            yield servers
        finally:
            for server in servers:
                server.stop()


# ---- The clients


class _Stream(asyncio.Protocol):
    """One request and its response."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.parts: list[bytes] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)


def request_of(number: int, tokens: int) -> bytes:
    body = {
        "messages": [{"role": "user", "content": f"word{2 + number} word7 word8 word9"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    )


def unchunked(data: bytes) -> bytes:
    """The body of a response with chunked encoding."""
    body, rest = b"", data.partition(b"\r\n\r\n")[2]
    parts = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    body = b"".join(parts)
    assert body.endswith(DONE), f"a stream did not end well: {data[:300]!r} ... {body[-300:]!r}"
    return body


async def run_streams(server: Server, streams: int, tokens: int) -> list[bytes]:
    """Run all streams; returns the bodies of the responses."""
    loop = asyncio.get_running_loop()
    clients = [_Stream(request_of(number, tokens)) for number in range(streams)]
    for client in clients:
        await loop.create_connection(lambda made=client: made, server.host, server.port)
    await asyncio.gather(*(client.ended for client in clients))
    return [unchunked(b"".join(client.parts)) for client in clients]


def measure(server: Server, streams: int, tokens: int) -> Round:
    before_s, began_s = server.cpu_s(), time.monotonic()
    bodies = asyncio.run(run_streams(server, streams, tokens))
    elapsed_s, after_s = time.monotonic() - began_s, server.cpu_s()
    user_s, system_s = (after - before for after, before in zip(after_s, before_s, strict=True))
    total, events, digest = 0, 0, hashlib.sha256()
    for body in bodies:
        text = ""
        for line in body.removesuffix(DONE).strip().split(b"\n\n"):
            chunk: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            if chunk.get("usage"):
                total += chunk["usage"]["completion_tokens"]
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            events += bool(piece)
            text += piece
        digest.update(text.encode())
    assert total == streams * tokens, f"{total} tokens instead of {streams * tokens}"
    texts = digest.hexdigest()[:12]
    return Round(server.tree, total, events, user_s, system_s, elapsed_s, texts)


def compare(args: argparse.Namespace) -> list[Round]:
    """Alternating rounds of all trees, after a warm-up."""
    rounds: list[Round] = []
    with running(args.trees, args.options) as servers:
        for server in servers:
            measure(server, args.streams, min(16, args.tokens))
        for _ in range(args.rounds):
            for server in servers:
                rounds.append(measure(server, args.streams, args.tokens))
    return rounds


def report(rounds: Sequence[Round]) -> None:
    """Print medians and minima, because other load on the machine increases all times."""
    print(f"{'tree':24} {'us/token':>9} {'least':>6} {'user':>6} {'least':>6} {'tokens/event':>13}")
    for tree in dict.fromkeys(entry.tree for entry in rounds):
        own = [entry for entry in rounds if entry.tree == tree]
        both, user = [e.us_per_token for e in own], [e.user_us_per_token for e in own]
        per_event = sum(e.tokens for e in own) / sum(e.events for e in own)
        print(
            f"{tree[-24:]:24} {statistics.median(both):9.1f} {min(both):6.1f} "
            f"{statistics.median(user):6.1f} {min(user):6.1f} {per_event:13.2f}   "
            f"{statistics.median(e.elapsed_s for e in own):.2f} s, texts {own[-1].texts}"
        )


# ---- Probing the server process


class CalledFiles:
    """The files of a package whose functions are called between `begin` and `end`.

    Calls in tasks that existed at `begin` do not count, since no request that comes later is
    theirs; nor does the resumption of a coroutine.

    names: relative to the folder of the package, in order of the first call.
    """

    def __init__(self, package: Path) -> None:
        self.names: list[str] = []
        self._package = package
        self._seen: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Call it on the thread of the running event loop."""
        self._background = asyncio.all_tasks()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def end(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or path in self._seen or not _is_new_call(frame):
            return
        if not Path(path).is_relative_to(self._package) or _running_task() in self._background:
            return
        self._seen.add(path)
        self.names.append(Path(path).relative_to(self._package.parent).as_posix())


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None


def _is_new_call(frame: FrameType) -> bool:
    """Whether the frame is not that of a coroutine which is resumed."""
    code = frame.f_code.co_code
    resumes = opcode.opname[code[frame.f_lasti]] == "RESUME" and code[frame.f_lasti + 1] & 3 != 0
    return not resumes


def serve_probed(probe: str, result: Path, arguments: Sequence[str]) -> None:
    """Run bros with `arguments`; record from SIGUSR1 to SIGUSR2. probe: files or profile."""
    called = CalledFiles(Path(__import__("bros").__file__).parent)
    profile = cProfile.Profile(time.process_time)

    def begin(*_: object) -> None:
        if probe == "profile":
            profile.enable()
        else:
            called.begin()

    def end(*_: object) -> None:
        if probe == "profile":
            profile.disable()
            profile.dump_stats(result)
        else:
            called.end()
            result.write_text("\n".join(called.names), encoding="utf-8")

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    sys.argv = ["bros", *arguments]
    runpy.run_module("bros", run_name="__main__")


def probe(tree: str, kind: str, result: Path, args: argparse.Namespace) -> None:
    """Record one round; for `files`, of a single stream."""
    result.unlink(missing_ok=True)
    launcher = [str(Path(__file__).resolve()), "--serve-probed", kind, str(result.resolve())]
    with running([tree], args.options, launcher) as (server,):
        measure(server, args.streams if kind == "profile" else 1, 4)
        server.signal(signal.SIGUSR1)
        time.sleep(0.2)
        measure(server, args.streams if kind == "profile" else 1, args.tokens)
        server.signal(signal.SIGUSR2)
        while not result.exists():
            time.sleep(0.05)
        time.sleep(0.2)


def list_files(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for tree in args.trees:
            result = Path(scratch) / "files"
            probe(tree, "files", result, args)
            names = result.read_text(encoding="utf-8").split()
            print(f"{tree}: {len(names)} files, in order of their first call")
            print("\n".join(f"  {name}" for name in names))


def main() -> int:
    if sys.argv[1:2] == ["--serve-probed"]:
        serve_probed(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few streams, one round")
    parser.add_argument("--trees", nargs="+", default=["."], metavar="FOLDER")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="for bros serve")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.streams, args.tokens, args.rounds = 16, 32, 1
    if args.files:
        list_files(args)
        return 0
    if args.profile is not None:
        probe(args.trees[0], "profile", args.profile, args)
        return 0
    rounds = compare(args)
    report(rounds)
    if args.json is not None:
        figures = [asdict(entry) | {"us_per_token": entry.us_per_token} for entry in rounds]
        content = {"streams": args.streams, "tokens": args.tokens, "rounds": figures}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
