"""What the API description says of sessions."""

from __future__ import annotations

from typing import Any

from bros.semantic.program import Perf
from bros.server.operations.operation import Operation, path_parameter, query_parameter
from bros.server.sessions import messages, replies
from bros.server.sessions.messages import MAX_WAIT_S

_SESSION = (path_parameter("sid", "The id of the session"),)
_REQUEST = (*_SESSION, path_parameter("rid", "The id of the request"))
_VARIABLE = (*_SESSION, path_parameter("vid", "The id of the variable"))
_UPSTREAM = ((424, replies.UpstreamErrorEnvelope),)

_FLAG: Any = {"type": "boolean", "default": False}
_MS: Any = {"type": "number", "exclusiveMinimum": 0}
_SECONDS: Any = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_WAIT_S}

_WAITING = (
    query_parameter("wait", "Answer once its value is there", _FLAG),
    query_parameter("stream", "The value in pieces, as server-sent events", _FLAG),
    query_parameter(
        "timeout",
        "Seconds: with wait, until the value is there; with stream, until the next piece",
        _SECONDS,
    ),
    query_parameter(
        "criteria", "How soon the value is wanted", {"enum": [perf.value for perf in Perf]}
    ),
    query_parameter("ttft_ms", "Until its first token", _MS),
    query_parameter("tpot_ms", "Between its tokens", _MS),
    query_parameter("deadline_ms", "Until it is complete", _MS),
)

_OF_SESSIONS = (
    Operation(
        "post",
        "/v1/sessions",
        "Open a session: a place for a program of many calls",
        replies.SessionSummary,
        messages.CreateSession,
    ),
    Operation("get", "/v1/sessions", "The sessions there are", replies.SessionList),
    Operation(
        "get",
        "/v1/sessions/{sid}",
        "A session with the graph of its requests and variables",
        replies.SessionObject,
        None,
        _SESSION,
    ),
    Operation(
        "delete",
        "/v1/sessions/{sid}",
        "End a session: what runs in it is stopped, who waits for a value gets status 410",
        replies.DeletedSession,
        None,
        _SESSION,
    ),
    Operation(
        "get",
        "/v1/sessions/{sid}/graph",
        "The graph as a page that refreshes itself",
        "text/html",
        None,
        _SESSION,
    ),
    Operation(
        "get",
        "/v1/sessions/{sid}/graph.mmd",
        "The graph as Mermaid text",
        "text/plain",
        None,
        _SESSION,
    ),
    Operation(
        "get",
        "/v1/sessions/{sid}/graph.dot",
        "The graph as Graphviz DOT text",
        "text/plain",
        None,
        _SESSION,
    ),
)

_OF_REQUESTS = (
    Operation(
        "post",
        "/v1/sessions/{sid}/requests",
        "Add a request, or a whole program of them. They run when a value is wanted that needs "
        "them",
        replies.SubmittedRequests,
        (messages.SubmitCall, messages.SubmitProgram),
        _SESSION,
        failures=_UPSTREAM,
    ),
    Operation(
        "delete",
        "/v1/sessions/{sid}/requests/{rid}",
        "Cancel a request; what needs its outputs fails",
        replies.CancelledRequest,
        None,
        _REQUEST,
    ),
    Operation(
        "post",
        "/v1/sessions/{sid}/requests/{rid}/fail",
        "Say that a native function has failed",
        replies.FailedRequest,
        messages.FailCall,
        _REQUEST,
    ),
)

_OF_VARIABLES = (
    Operation(
        "post",
        "/v1/sessions/{sid}/variables",
        "Make a variable, with its value or without",
        replies.VariableObject,
        messages.CreateVariable,
        _SESSION,
    ),
    Operation(
        "get",
        "/v1/sessions/{sid}/variables",
        "The variables of a session",
        replies.VariableList,
        None,
        _SESSION,
    ),
    Operation(
        "get",
        "/v1/sessions/{sid}/variables/{vid}",
        "A variable as it is, or once its value is there",
        replies.VariableObject,
        None,
        (*_VARIABLE, *_WAITING),
        may_stream=True,
        failures=_UPSTREAM,
    ),
    Operation(
        "put",
        "/v1/sessions/{sid}/variables/{vid}",
        "Give a variable its value, once",
        replies.VariableObject,
        messages.SetVariable,
        _VARIABLE,
    ),
    Operation(
        "patch",
        "/v1/sessions/{sid}/variables/{vid}",
        "Begin what a variable needs, or hurry it up",
        replies.VariableObject,
        messages.WantVariable,
        _VARIABLE,
    ),
)

_OF_THE_PAPER = (
    Operation(
        "post",
        "/v1/submit",
        "As in the Parrot paper: a prompt with placeholders",
        replies.PaperSubmitted,
        messages.PaperSubmit,
    ),
    Operation(
        "post",
        "/v1/get",
        "As in the Parrot paper: the value of a variable",
        replies.PaperValue,
        messages.PaperGet,
        failures=_UPSTREAM,
    ),
)

OPERATIONS = _OF_SESSIONS + _OF_REQUESTS + _OF_VARIABLES + _OF_THE_PAPER
