"""Parrot's semantic variables and sessions: the public API of the front end.

Example:

    import bros.semantic as P

    @P.semantic_function
    def write_code(task: P.SemanticVariable):
        \"""Write python code of {{input:task}}. Code: {{output:code}}\"""

    with P.Session("http://localhost:8000"):
        print(write_code("a snake game").get(perf=P.LATENCY))
"""

from __future__ import annotations

from bros.semantic.client.connection import Connection
from bros.semantic.client.functions import native_function, semantic_function
from bros.semantic.client.program import SemanticVariable, agather, gather
from bros.semantic.client.session import Session, connect
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    GetTimeoutError,
    ServerUnreachableError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import Criteria, Perf

SemanticFunction = semantic_function
"""The Parrot paper's spelling."""

LATENCY = Perf.LATENCY
THROUGHPUT = Perf.THROUGHPUT
TTFT = Perf.TTFT
TPOT = Perf.TPOT

__all__ = [
    "LATENCY",
    "THROUGHPUT",
    "TPOT",
    "TTFT",
    "Cause",
    "ConflictError",
    "Connection",
    "Criteria",
    "FailedStage",
    "GetTimeoutError",
    "Perf",
    "SemanticFunction",
    "SemanticVariable",
    "ServerUnreachableError",
    "Session",
    "SessionGoneError",
    "SessionLimitError",
    "UpstreamError",
    "agather",
    "connect",
    "gather",
    "native_function",
    "semantic_function",
]
