"""The options of `bros batch`. Imports next to nothing, so that --help is quick."""

from __future__ import annotations

import argparse

from bros.core.config_sources import URL_VARIABLE

TEXTS = (  # help, usage, description
    "submit batches of requests to a running server and fetch what came of them",
    "bros batch {submit,status,list,cancel,results} ...",
    "Hand a file of requests to a running server, which answers them beside its real-time "
    "requests and within a window of time. Works with any server that has OpenAI's batch API.",
)
RUN_TEXTS = (  # help, usage, description
    "answer a file of requests without a server",
    "bros run-batch INPUT OUTPUT [--endpoint PATH] [options]",
    "Answer the requests in INPUT, one JSON object per line as for `bros batch submit`, and write "
    "a line for each to OUTPUT, in the same order: its response or its error. If it is "
    "interrupted, the same command goes on where it was; until it is through, what is done is "
    "kept in OUTPUT.partial. Exit status 3: some requests failed; 4: the input is not valid.",
)
EPILOG = "Each action has a --help of its own, which also lists the exit statuses."
EXIT_STATUSES = """\
exit status:
  0    what was asked is done; if that was to wait for a batch or to fetch its
       results: every row succeeded
  1    an error: the server cannot be reached, refuses, or knows no such batch
  2    wrong usage
  3    the batch has ended, but some of its rows failed
  4    the batch failed validation, expired or was cancelled
  130  Ctrl-C; a batch that was submitted goes on
"""
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_WINDOW = "24h"
DEFAULT_LIMIT = "20"

FLAGS = (
    *("--url", "--api-key", "--endpoint", "--window", "--metadata", "--wait", "--output"),
    *("--json", "--limit", "--errors"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `bros batch`, each with its flags."""
    actions = parser.add_subparsers(
        dest="batch_action", metavar="ACTION", prog="bros batch", required=True
    )

    def add(name: str, help_line: str, description: str) -> argparse.ArgumentParser:
        return actions.add_parser(
            name,
            help=help_line,
            description=description,
            epilog=EXIT_STATUSES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    _add_submit(add("submit", "upload a file of requests and start a batch", _SUBMIT))
    status = add("status", "how a batch is getting on", _STATUS)
    _add_id(status)
    _add_wait(status, "until the batch has ended")
    _add_json(status, "the batch as the server describes it")
    every = add("list", "the batches there are, newest first", "List batches, newest first.")
    every.add_argument(
        "--limit",
        dest="batch_limit",
        metavar="N",
        default=DEFAULT_LIMIT,
        help=f"how many at most (default: {DEFAULT_LIMIT})",
    )
    _add_json(every, "an array of batches as the server describes them")
    cancel = add("cancel", "give up the unfinished rows of a batch", _CANCEL)
    _add_id(cancel)
    _add_wait(cancel, "until it is cancelled")
    results = add("results", "the answers of a batch that has ended", _RESULTS)
    _add_id(results)
    _add_output(results, "write the answers to FILE (default: standard output)")
    results.add_argument(
        "--errors",
        dest="batch_errors",
        metavar="FILE",
        help="write the lines of failed and unfinished rows to FILE (default: only count them)",
    )
    for action in actions.choices.values():
        _add_server(action)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `bros run-batch`, beside the options of an engine."""
    parser.add_argument("batch_input", metavar="INPUT", help="requests, one JSON object per line")
    parser.add_argument("batch_target", metavar="OUTPUT", help="file for the answers")
    parser.add_argument(
        "--endpoint",
        dest="batch_endpoint",
        metavar="PATH",
        help='what the requests are for (default: the "url" of the first)',
    )


_SUBMIT = """\
Upload a file of requests, one JSON object per line, and start a batch:

  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Standard output gets the id of the batch and nothing else; all else goes to
standard error.
"""
_STATUS = "Say how a batch is getting on and when it is expected to end."
_CANCEL = """\
Cancel a batch. What has been answered by then stays and can be fetched.
"""
_RESULTS = """\
Fetch the answers of a batch that is completed, expired or cancelled. They are
not in the order of the input: match them by their custom_id.
"""


def _add_submit(submit: argparse.ArgumentParser) -> None:
    submit.add_argument("batch_file", metavar="FILE", help="requests, one JSON object per line")
    submit.add_argument(
        "--endpoint",
        dest="batch_endpoint",
        metavar="PATH",
        help='what the requests are for (default: the "url" of the first)',
    )
    submit.add_argument(
        "--window",
        dest="batch_window",
        metavar="TIME",
        default=DEFAULT_WINDOW,
        help="time the server has for it: minutes, hours or days, such as 90m, 24h or 7d "
        f"(default: {DEFAULT_WINDOW})",
    )
    submit.add_argument(
        "--metadata",
        dest="batch_metadata",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a note to keep with the batch; may be given several times",
    )
    _add_wait(submit, "until the batch has ended")
    _add_output(submit, "write the answers to FILE; needs --wait")


def _add_id(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("batch_id", metavar="ID", help="id of the batch, as submit printed it")


def _add_wait(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--wait", dest="batch_wait", action="store_true", help=f"show progress {what}"
    )


def _add_json(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", dest="batch_json", action="store_true", help=f"print {what}")


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", dest="batch_output", metavar="FILE", help=what)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        dest="batch_url",
        metavar="URL",
        help=f"the server, with or without /v1 (default: {URL_VARIABLE}, else {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key",
        dest="api_key",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="key to send as a bearer token (BROS_API_KEY)",
    )
