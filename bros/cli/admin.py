"""`bros admin`: shows the tenants and replicas of a running server, drains and resumes replicas."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bros.bench.report.tables import print_table
from bros.cli.flags import DEFAULT_URL, AdminFlags, read_own, whole
from bros.cli.remote import auth_headers, base_url, error_message
from bros.core.config_sources import URL_VARIABLE, given_flags, load_config
from bros.core.errors import BrosError, ConfigError

_REPLICAS = "/replicas"
_TIMEOUT_S = 30.0
_POLL_S = 0.5
_STYLES = {"up": "green", "down": "red", "gone": "red"}
_OPERATOR = "(operator)"
_NO_LIMIT = "none"
_WIDTH = 120
"""Of tables without a terminal."""

Fields = Mapping[str, Any]


def run_admin(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    *,
    pause: Callable[[float], object] | None = None,
    transport: httpx.BaseTransport | None = None,
    console: Console | None = None,
) -> int:
    """Run one action; returns the exit status.

    pause: sleeps for some seconds. transport: replaces the network. console: standard output.
    Raises ConfigError for wrong usage, BrosError for other errors, KeyboardInterrupt.
    """
    config = load_config(given_flags(args), environ, warn)
    own = read_own(AdminFlags, args)
    url = own.url or environ.get(URL_VARIABLE) or DEFAULT_URL
    headers = auth_headers(config.server.api_key)
    base = base_url(url) + "/admin"
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    with httpx.Client(headers=headers, timeout=_TIMEOUT_S, transport=transport) as http:
        command = _Command(own, http, base, pause or threading.Event().wait, console)
        actions = {
            "tenants": command.show_tenants,
            "replicas": command.show_replicas,
            "drain": command.drain,
            "resume": command.resume,
        }
        try:
            actions[args.admin_action]()
        except (KeyError, TypeError, AttributeError) as error:
            raise BrosError(f"{base} does not speak bros' admin API: {error!r}") from error
    return 0


@dataclass(frozen=True, slots=True)
class _Command:
    """One action and what it works with."""

    own: AdminFlags
    http: httpx.Client
    url: str
    pause: Callable[[float], object]
    console: Console

    def show_tenants(self) -> None:
        found = self._ask("GET", "/tenants")
        if self.own.json:
            print(json.dumps(found, indent=2), file=self.console.file)
            return
        self.console.print(tenant_table(found["data"]))

    def show_replicas(self) -> None:
        found = self._ask("GET", _REPLICAS)
        if self.own.json:
            print(json.dumps(found, indent=2), file=self.console.file)
            return
        print_table(self.console, replica_table(found["data"]))
        self.console.print(
            f"router {found['router']}; requests continued on another replica: "
            f"{found['continued']} after a failure, {found['moved']} after a drain or to rebalance"
        )
        if plan := found.get("plan"):
            self.console.print(_plan_line(plan))

    def drain(self) -> None:
        own, number = self.own, whole("N", self.own.number, low=0)
        body = {"move": own.move, "restart": own.restart}
        found = self._ask("POST", f"{_REPLICAS}/{number}/drain", body)
        last = None
        while not own.no_wait:
            replica = _replica(found, number)
            state, count = replica["state"], replica["open"]
            said = f"{replica['name']} is {state}" + (f": {count} open" if count else "")
            if said != last:
                self.console.print(said)
                last = said
            if state == "gone" and own.restart:
                raise BrosError(f"{replica['name']} did not come back; the server's log says why")
            # A restart passes through `drained`.
            if state in ("up", "gone") or (state == "drained" and not own.restart):
                return
            self.pause(_POLL_S)
            found = self._ask("GET", _REPLICAS)

    def resume(self) -> None:
        number = whole("N", self.own.number, low=0)
        replica = _replica(self._ask("POST", f"{_REPLICAS}/{number}/resume"), number)
        self.console.print(f"{replica['name']} is {replica['state']}")

    def _ask(self, method: str, path: str, body: Fields | None = None) -> Any:
        try:
            response = self.http.request(method, self.url + path, json=body)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise BrosError(f"{self.url} does not answer: {reason}") from error
        except httpx.InvalidURL as error:
            raise ConfigError(f"--url: {error}") from error
        if response.status_code == 404:
            if path == _REPLICAS:
                raise BrosError(
                    "This server has only one engine, and needs --replicas N to have several; or "
                    f"{self.url} is not where bros serves its admin API."
                )
            if path.startswith(_REPLICAS):
                self._ask("GET", _REPLICAS)  # says so, if that is why
        if not response.is_success:
            raise BrosError(f"{response.status_code}: {error_message(response)}")
        try:
            return response.json()
        except ValueError:
            raise BrosError(f"{self.url} does not respond with JSON") from None


def _replica(found: Fields, number: int) -> Fields:
    """The replica with this number. Raises BrosError if it has been removed."""
    for replica in found["data"]:
        if replica["number"] == number:
            return replica  # type: ignore[no-any-return]
    raise BrosError(f"There is no replica {number} any more.")


def tenant_table(tenants: list[Fields]) -> Table:
    """One row per tenant and resource: what is held, its limit, how often more was refused, and the
    option that sets the limit. Only long names of tenants are wrapped in 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("tenant", overflow="fold")
    table.add_column("resource", no_wrap=True)
    for heading in ("used", "limit", "refused"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("option", no_wrap=True)
    for tenant in tenants:
        for use in tenant["uses"]:
            shown = _size if use["resource"].endswith("_bytes") else _count
            limit = use["limit"]
            table.add_row(
                tenant["name"] or _OPERATOR,
                use["resource"],
                shown(use["used"]),
                _NO_LIMIT if limit is None else shown(limit),
                _count(use["refused"]),
                use["option"],
            )
    return table


def _count(amount: int) -> str:
    """Four characters at most for what limits usually are: 512, 10k, 100M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if amount >= size:
            return f"{amount / (1000 if unit == 'k' else size):.3g}{unit}"
    return str(amount)


def _size(amount: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.3g}{unit}"
    return str(amount)


def replica_table(replicas: list[Fields]) -> Table:
    """One row per replica."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("replica", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("open", "waiting", "KV in use", "KV cached", "prompts cached", "lost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("routed by")
    for replica in replicas:
        state, blocks = replica["state"], replica["total_blocks"]
        reasons = sorted(replica["routed"].items(), key=lambda item: -item[1])
        table.add_row(
            str(replica["number"]),
            Text(state, style=_STYLES.get(state, "yellow")),
            str(replica["open"]),
            str(replica["waiting"]),
            _share(replica["used_blocks"], blocks),
            _share(replica["cached_blocks"], blocks),
            _share(replica["cached_tokens"], replica["prompt_tokens"]),
            str(replica["lost"]),
            ", ".join(f"{reason} {count}" for reason, count in reasons),
        )
    return table


def _plan_line(plan: Fields) -> str:
    """The gain of the planned placement of prefixes."""
    return (
        f"plan: {plan['requests']} requests, {plan['prefill_s']:.1f} s of prefill, "
        f"{plan['planned_s']:.1f} s as planned; busiest replica {plan['balance']:.2f} times the "
        f"mean, {plan['planned_balance']:.2f} as planned"
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
