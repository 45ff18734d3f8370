"""The options of `bros admin`. Imports next to nothing, so that --help is quick."""

from __future__ import annotations

import argparse

from bros.core.config_sources import URL_VARIABLE

TEXTS = (  # help, usage, description
    "look at the replicas of a running server, and empty one for an upgrade",
    "bros admin {replicas,drain,resume} ...",
    "Look at the engines of a server that was started with --replicas, and take them out of use "
    "and into it again. Where there are tenants (--api-keys) it takes the key of --api-key.",
)
EPILOG = "Each action has a --help of its own."
DEFAULT_URL = "http://127.0.0.1:8000"

FLAGS = ("--url", "--api-key", "--move", "--restart", "--no-wait", "--json")

_DRAIN = (
    "Send nothing new to a replica, and wait until nothing is open there. Ctrl-C only ends the "
    "waiting. `bros admin resume` uses it again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `bros admin`, each with its flags."""
    actions = parser.add_subparsers(
        dest="admin_action", metavar="ACTION", prog="bros admin", required=True
    )

    def add(name: str, help_line: str, description: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=help_line, description=description, allow_abbrev=False)

    replicas = add("replicas", "a table of the replicas", "Show what each replica is doing.")
    replicas.add_argument(
        "--json", dest="admin_json", action="store_true", help="print it as the server says it"
    )
    drain = add("drain", "send nothing new to a replica until it is empty", _DRAIN)
    _add_number(drain)
    drain.add_argument(
        "--move",
        dest="admin_move",
        action="store_true",
        help="what is open there goes on elsewhere at once, where its prompt is computed again",
    )
    drain.add_argument(
        "--restart",
        dest="admin_restart",
        action="store_true",
        help="when it is empty, start its engine anew and use it again",
    )
    drain.add_argument(
        "--no-wait", dest="admin_no_wait", action="store_true", help="only begin with it"
    )
    _add_number(add("resume", "use a replica again", "Send requests to a replica again."))
    for action in actions.choices.values():
        _add_server(action)


def _add_number(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "admin_number", metavar="N", help="number of the replica, as `bros admin replicas` shows it"
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        dest="admin_url",
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
