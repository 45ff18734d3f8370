"""Every option of the engine and the server, declared once.

Each field has a type, a default and one help line in its metadata; the command line, the
BROS_* environment variables and the TOML file are all generated from here (config_sources.py).
Values are checked on construction and never change afterwards; derived values (block counts,
resolved dtypes) are returned by the code that derives them, not stored back.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from bros.core.errors import ConfigError
from bros.core.request import Slo

POLICIES = ("bros", "fcfs", "priority", "rr", "edf")
OVERLOAD = ("late", "relegate", "reject")
PACKING = ("chunked", "paper")
GROWTH = ("tcp", "additive")
KV_DTYPES = ("auto", "fp32", "bf16", "fp16")
KV_LAYOUTS = ("bidirectional", "plain")
PREFIX_CACHE = ("class-aware", "lru", "off")
KV_FIND = ("final", "paper")
KERNELS = ("auto", "reference", "cpu", "triton")
SHARED_ATTENTION = ("on", "off")
TOOLS = ("auto", "hermes", "llama3", "mistral", "pythonic")
REASONING = ("auto", "think", "mistral", "none")
ROUTERS = ("e2", "rr", "least")

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*$", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """`2GiB` -> 2147483648. Units B, kB, MB, GB, TB and KiB, MiB, GiB, TiB; raises ConfigError."""
    match = _SIZE.match(text)
    if not match:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB or 2GiB")
    unit = match[2].lower().removesuffix("b")
    scale = _BINARY_UNITS.get(unit) or _UNITS[unit]
    return int(float(match[1]) * scale)


@dataclass(frozen=True, slots=True)
class TenantNumber:
    """A kind of number that each tenant may have. `title` has an article."""

    title: str
    low: float
    high: float

    def parse(self, text: str) -> float:
        """Raises ConfigError."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.low <= value <= self.high:
            raise ConfigError(
                f"{text[:50]!r} is not {self.title} from {self.low:g} to {self.high:g}"
            )
        return value

    def parse_all(self, text: str | None) -> dict[str, float]:
        """`ann=3,bob=0.5` -> {"ann": 3.0, "bob": 0.5}; raises ConfigError."""
        found: dict[str, float] = {}
        for part in filter(None, (text or "").split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise ConfigError(f"{part[:50]!r} is not NAME=N, with {self.title}")
            if name in found:
                raise ConfigError(f"{name!r} is named twice")
            found[name] = self.parse(value)
        return found


MAX_RT_SLOWDOWN = 1000.0
"""From this target on, only the objectives bound how much streams are slowed down."""

WEIGHT = TenantNumber("a weight", 0.01, 100.0)
RT_SLOWDOWN = TenantNumber("a slowdown", 1.0, MAX_RT_SLOWDOWN)


def option(default: Any, help: str, **limits: Any) -> Any:
    """A config field. limits: choices=(...); low=, high= (inclusive); size=True for bytes;
    tenants=a TenantNumber for NAME=N,...; address=True for auto or host:port; secret=True for
    text that must not be empty."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


class _Checked:
    """Validates every field against the limits in its metadata."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            check_value(spec, getattr(self, spec.name))


def check_value(spec: dataclasses.Field[Any], value: object) -> None:
    """Raise ConfigError naming the option and what is allowed if `value` is outside its limits."""
    if value is None:
        return
    flag = "--" + spec.name.replace("_", "-")
    limits = spec.metadata
    if value == "" and limits.get("secret"):
        raise ConfigError(f"{flag}: must not be empty; omit it to run a server without a key")
    if limits.get("secret") and str(value) != str(value).strip():
        raise ConfigError(f"{flag}: must not begin or end with white space, such as a line break")
    if "low" in limits:
        _check_number(flag, spec, value)
    if "choices" in limits and value not in limits["choices"]:
        allowed = ", ".join(limits["choices"])
        raise ConfigError(f"{flag}: {value!r} is not one of {allowed}")
    try:
        if limits.get("size"):
            parse_bytes(str(value))
        if "tenants" in limits:
            limits["tenants"].parse_all(str(value))
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if limits.get("address") and value != "auto" and not _ADDRESS.fullmatch(str(value)):
        raise ConfigError(f"{flag}: {value!r} is neither auto nor host:port")


def _check_number(flag: str, spec: dataclasses.Field[Any], value: object) -> None:
    kind, types = "a number", int | float
    if spec.type in ("int", "int | None"):
        kind, types = "a whole number", int
    if isinstance(value, bool) or not isinstance(value, types):
        raise ConfigError(f"{flag}: {value!r} is not {kind}")
    if not math.isfinite(value):
        raise ConfigError(f"{flag}: {value} is not a finite number")
    low, high = spec.metadata["low"], spec.metadata.get("high")
    if value < low:
        raise ConfigError(f"{flag}: {value} must be at least {low}")
    if high is not None and value > high:
        raise ConfigError(f"{flag}: {value} must be at most {high}")


_ADDRESS = re.compile(r"([^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]):\d{1,5}")


class StepBounds(NamedTuple):
    """The maximum requests (rows) and tokens of one step."""

    rows: int
    tokens: int


_CPU_BOUNDS = StepBounds(rows=64, tokens=256)
_GPU_BOUNDS = StepBounds(rows=256, tokens=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(_Checked):
    """Options of the engine process."""

    model: str | None = option(
        None, "local Hugging Face folder, .gguf file or hub id; default: embedded SmolLM2-135M"
    )
    device: str = option(
        "auto",
        "device that runs the model; auto uses the GPU if there is one",
        choices=("auto", "cpu", "cuda"),
    )
    weights: str = option(
        "auto",
        "precision of the weights; auto: bf16, or what a device without bf16 multiplies best",
        choices=("auto", "fp32", "bf16", "fp16", "int8", "int4"),
    )
    kernels: str = option("auto", "kernel back end", choices=KERNELS)
    self_attention: str = option(
        "auto",
        "GPU only: kernel for attention within prompt chunks; auto: triton",
        choices=("auto", "triton", "xformers"),
    )
    shared_attention: str = option(
        "on",
        "compute the attention over a shared prefix once for all its requests",
        choices=SHARED_ATTENTION,
    )
    kv_dtype: str = option("auto", "precision of the KV cache", choices=KV_DTYPES)
    kv_memory: str | None = option(
        None,
        "memory for the KV cache, e.g. 2GiB; default: 1GiB on a CPU, all usable memory on a GPU",
        size=True,
    )
    kv_blocks: int | None = option(
        None, "KV cache size in blocks of 16 tokens, instead of --kv-memory", low=1
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory that bros may use, weights included", low=0.05, high=1
    )
    cuda_graphs: str = option(
        "on", "GPU only: capture decode steps as CUDA graphs and replay them", choices=("on", "off")
    )
    async_scheduling: str = option(
        "auto",
        "schedule the next step while one runs; auto: on for a GPU, else off",
        choices=("auto", "on", "off"),
    )
    kv_layout: str = option(
        "bidirectional",
        "bidirectional: real-time and best-effort requests share blocks; plain: they do not",
        choices=KV_LAYOUTS,
    )
    on_pressure: str = option(
        "checkpoint",
        "preempted KV: copy it to the host and restore it, or recompute it",
        choices=("checkpoint", "recompute"),
    )
    host_kv_memory: str = option("1GiB", "host memory for copies of preempted KV", size=True)
    host_kv_blocks: int | None = option(
        None, "host copies in blocks of 16 tokens, instead of --host-kv-memory", low=0
    )
    kv_find: str = option(
        "final", "search for free KV slots; paper: the published algorithm", choices=KV_FIND
    )
    prefix_cache: str = option(
        "class-aware",
        "eviction order of the prefix cache: by class and value, or lru; off: no prefix cache",
        choices=PREFIX_CACHE,
    )
    rt_cache_share: float = option(
        0.25,
        "share of the KV cache in which cached real-time prompts are protected from best-effort",
        low=0,
        high=0.9,
    )
    max_model_len: int | None = option(
        None,
        "maximum tokens of prompt + output; default: what the model and the KV cache allow",
        low=2,
    )
    max_num_seqs: int | None = option(
        None, "maximum requests per step; default: 64 on a CPU, 256 on a GPU", low=1, high=4096
    )
    max_batch_tokens: int | None = option(
        None,
        "maximum tokens per step, longer prompts are chunked; default: 256 on a CPU, 2048 on a GPU",
        low=1,
    )
    policy: str = option("bros", "scheduling policy", choices=POLICIES)
    profile: str | None = option(
        None,
        "profile of measured step times; default: the one stored for this machine, else measured",
    )
    slo_ttft: float = option(
        400.0, "default TTFT objective of real-time requests in milliseconds", low=1
    )
    slo_tpot: float = option(
        200.0, "default TPOT objective of real-time requests in milliseconds", low=1
    )
    slo_gap: float | None = option(
        None,
        "longest time between two real-time tokens in milliseconds; default: 1.5 TPOT objectives",
        low=1,
    )
    rt_wait: float = option(
        0.5,
        "maximum duration of a step with best-effort work, as a share of --slo-ttft",
        low=0.01,
        high=1,
    )
    rt_slowdown: float = option(
        1.4,
        "slowdown of real-time streams by best-effort work that can wait; "
        f"{MAX_RT_SLOWDOWN:g}: within their objectives",
        low=1,
        high=MAX_RT_SLOWDOWN,
    )
    be_share: float = option(
        0.02, "share of the time that is guaranteed to best-effort work", low=0, high=0.9
    )
    be_order: str = option(
        "programs",
        "best-effort start order: programs that have begun first, or most cached prefix first",
        choices=("programs", "prefix-groups"),
    )
    be_max_wait: float = option(
        30.0,
        "seconds for which --be-order may delay a best-effort request behind later ones",
        low=0,
    )
    tenant_weights: str | None = option(
        None,
        "shares of device time between tenants, e.g. ann=3,bob=0.5; of others: weight=N in "
        "--api-keys, else 1",
        tenants=WEIGHT,
    )
    tenant_rt_slowdowns: str | None = option(
        None,
        "--rt-slowdown of tenants' work, e.g. ann=1.2,bob=3; of others: rt_slowdown=N in "
        "--api-keys",
        tenants=RT_SLOWDOWN,
    )
    late: str = option(
        "renew",
        "late real-time requests: renew the deadline, keep it (edf), or drop the request (shed)",
        choices=("renew", "edf", "shed"),
    )
    overload: str = option(
        "late",
        "real-time requests that cannot meet their TTFT: serve late, as best-effort, or refuse",
        choices=OVERLOAD,
    )
    packing: str = option(
        "chunked", "packing of --policy bros; paper: the published algorithm", choices=PACKING
    )
    batch_growth: str = option("tcp", "growth of the adaptive batch size", choices=GROWTH)
    max_queue: int = option(
        512, "maximum waiting requests per class, which tenants share; more get HTTP 429", low=1
    )
    seed: int = option(0, "seed for requests that name none", low=0)
    pooling: str = option(
        "auto",
        "hidden states that become an embedding: of the last or first token, or their mean",
        choices=("auto", "last", "mean", "first"),
    )
    threads: int | None = option(
        None,
        "CPU threads per rank; default: all cores, divided among the ranks",
        low=1,
        high=512,
    )
    tp: int = option(
        1,
        "tensor parallelism: number of ranks (processes), each on a device of its own",
        low=1,
        high=64,
    )
    tp_timeout: float = option(
        30.0, "seconds that ranks wait for each other in a step before the engine ends", low=0.1
    )
    load_timeout: float = option(
        300.0,
        "seconds without progress, such as bytes read, after which an engine that loads is ended; "
        "0: never",
        low=0,
    )
    hang_timeout: float = option(
        8.0,
        "seconds after which an engine that is stopped or hangs is replaced, or a thread given up; "
        "0: never",
        low=0,
    )

    def threads_of_rank(self, cores: int, ranks: int) -> int:
        """CPU threads of each of `ranks` ranks that share the cores."""
        return self.threads or max(1, cores // ranks)

    @property
    def default_slo(self) -> Slo:
        """Objectives of real-time requests that ask for none."""
        gap_s = None if self.slo_gap is None else self.slo_gap / 1000
        return Slo(ttft_s=self.slo_ttft / 1000, tpot_s=self.slo_tpot / 1000, gap_s=gap_s)

    def step_bounds(self, device: str) -> StepBounds:
        """max_num_seqs and max_batch_tokens, or their defaults. device: as in EngineInfo."""
        rows, tokens = _CPU_BOUNDS if device == "cpu" else _GPU_BOUNDS
        return StepBounds(self.max_num_seqs or rows, self.max_batch_tokens or tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(_Checked):
    """Options of the server process."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one", low=0, high=65535)
    max_connections: int = option(
        2048,
        "maximum open connections; fewer if the process may not have as many descriptors",
        low=1,
    )
    max_connections_per_address: int | None = option(
        None,
        "maximum open connections of an address; default: half of them all, none for this machine",
        low=1,
    )
    header_timeout: float = option(
        15.0, "seconds in which the headers of a request must arrive", low=0.05
    )
    body_timeout: float = option(
        30.0, "seconds in which a body, or 1 KiB of it for each second, must arrive", low=0.05
    )
    idle_timeout: float = option(
        75.0, "seconds after which a connection without a request is closed", low=0.05
    )
    stream_heartbeat: float = option(
        15.0,
        "longest silence of a stream in seconds: then it sends a comment, for proxies",
        low=0.05,
        high=30,
    )
    drain_timeout: float = option(
        30.0, "seconds in which open requests may end after Ctrl-C, SIGTERM or SIGHUP", low=0
    )
    tls_cert: str | None = option(
        None, "file with the TLS certificate, and those of its issuers, for https"
    )
    tls_key: str | None = option(None, "file with its private key; default: in --tls-cert")
    allowed_hosts: str | None = option(
        None,
        "names of the server in Host headers, *.NAME or *; default: local names and IP addresses",
    )
    allowed_origins: str | None = option(
        None,
        "origins of web pages that may use the server, or *; default: its own pages",
    )
    metrics_access: str = option(
        "open",
        "which clients may read /metrics: all, those with the key of --api-key, or none",
        choices=("open", "key", "off"),
    )
    api_key: str | None = option(None, "key that clients must send as a bearer token", secret=True)
    served_model_name: str | None = option(None, "model name in the API; default: from the model")
    tool_format: str = option(
        "auto", "how the model writes tool calls; auto: as its chat template does", choices=TOOLS
    )
    reasoning_format: str = option(
        "auto",
        "markers of reasoning: <think>, or Mistral's [THINK]; auto: from the chat template",
        choices=REASONING,
    )
    data_dir: str | None = option(
        None,
        "folder for batch jobs and converted models; default: ~/.local/share/bros, ~/.cache/bros",
    )
    api_keys: str | None = option(
        None,
        "file of NAME KEY [weight=N] [rt_slowdown=N] [LIMIT=N ...] lines; a NAME has its own data",
    )
    share_prefix: str = option(
        "own",
        "whose cached prefixes a prompt may use: those of its own tenant, or those of all tenants",
        choices=("own", "all"),
    )
    public_prefix: str | None = option(
        None,
        "files with beginnings of prompts and system messages, whose cached KV all tenants may use",
    )
    max_session_chars: int | None = option(
        None,
        "maximum characters in all sessions; default: a 16th of the bytes of the memory",
        low=1,
    )
    max_input_bytes: str | None = option(
        None,
        "maximum bytes of all inputs in progress; default: a 64th of the memory, at least 64MiB",
        size=True,
    )
    max_output_bytes: str | None = option(
        None,
        "maximum bytes of large replies not read yet; default: a 64th of the memory, at least "
        "64MiB",
        size=True,
    )
    max_files: int = option(100_000, "maximum files of all tenants", low=1)
    max_file_bytes: str | None = option(
        None, "maximum bytes of the files of all tenants; default: half of the disk", size=True
    )
    tenant_max_requests: int | None = option(
        None,
        "maximum open requests of a tenant by class; default: half of --max-queue if several exist",
        low=1,
    )
    tenant_max_sessions: int | None = option(
        None,
        "maximum open sessions per tenant; default: half of --max-sessions if there are several",
        low=1,
    )
    tenant_max_session_chars: int | None = option(
        None,
        "maximum characters in the sessions of a tenant; default: 100 million if there are several",
        low=1,
    )
    tenant_max_files: int | None = option(
        None, "maximum files per tenant; default: 10000 if there are several", low=1
    )
    tenant_max_file_bytes: str | None = option(
        None,
        "maximum bytes of files per tenant; default: 16GiB if there are several",
        size=True,
    )
    tenant_max_responses: int = option(
        10_000, "maximum stored responses per tenant; the oldest make room for new ones", low=1
    )
    tenant_max_response_bytes: str = option(
        "1GiB", "maximum bytes of stored responses per tenant; as above", size=True
    )
    tenant_max_background: int = option(
        1000, "maximum unfinished background responses per tenant", low=1
    )
    tenant_max_input_bytes: str | None = option(
        None,
        "maximum bytes of a tenant's inputs in progress; default: 64MiB if there are several",
        size=True,
    )
    tenant_max_output_bytes: str | None = option(
        None,
        "maximum bytes of a tenant's large replies not read yet; default: 64MiB if there are "
        "several",
        size=True,
    )
    tenant_max_cpu_seconds: int | None = option(
        None,
        "CPU seconds per minute for large inputs of a tenant; default: 30 if there are several",
        low=1,
    )
    tenant_max_requests_per_minute: int | None = option(
        None, "requests per minute of a tenant, without rows of batches; default: no limit", low=1
    )
    tenant_max_tokens_per_minute: int | None = option(
        None,
        "tokens of prompts and answers per minute of a tenant, without batches; default: no limit",
        low=1,
    )
    tenant_max_grammars: int | None = option(
        None,
        "maximum outputs with a grammar per tenant; default: half of --max-queue if several exist",
        low=1,
    )
    response_ttl: float = option(
        30 * 86400.0, "seconds after which a stored response is deleted", low=1
    )
    store: str | None = option(
        None,
        "store of files, batches and responses: a folder or postgresql://...; default: --data-dir",
    )
    batch_order: str = option(
        "prefix",
        "order of a batch's rows: rows with a common prefix together, or as in the file",
        choices=("prefix", "file"),
    )
    batch_lease: float = option(
        15.0, "seconds after which another server takes over the batches of a dead one", low=1
    )
    batch_max_open: int = option(100, "maximum unfinished batches per tenant", low=1)
    batch_max_tokens: int = option(
        1_000_000_000, "maximum prompt tokens in unfinished batches per tenant", low=1
    )
    session_ttl: float = option(
        600.0, "seconds of inactivity after which a session ends", low=1, high=86400
    )
    max_sessions: int = option(1000, "maximum open sessions", low=1)
    session_max_calls: int = option(10_000, "maximum calls per session", low=1)
    replicas: int = option(
        1,
        "number of engines, each with --tp ranks; the router sends prompts where they are cached",
        low=1,
        high=64,
    )
    min_replicas: int | None = option(
        None, "minimum engines when the load is low; default: --replicas", low=1, high=64
    )
    max_replicas: int | None = option(
        None, "maximum engines when objectives or deadlines need them; default: --replicas", low=1
    )
    cluster: str | None = option(
        None,
        "address of a Ray cluster that runs the engines, or auto for this machine's cluster",
        address=True,
    )
    router: str = option(
        "e2",
        "routing: by cached prefix and load (Preble's E2), round robin, or least loaded",
        choices=ROUTERS,
    )
    router_plan: str = option(
        "off",
        "plan the placement of the most used prefixes; shadow: only count what it would gain",
        choices=("off", "shadow", "on"),
    )
    log_level: str = option(
        "info", "minimum severity of log lines", choices=("debug", "info", "warning", "error")
    )
    on_engine_death: str = option(
        "restart", "restart a dead engine, or exit the server", choices=("restart", "exit")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options of `bros serve`."""

    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
