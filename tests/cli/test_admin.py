"""What `bros admin` prints."""

from __future__ import annotations

import argparse
import io

import httpx
import pytest
from rich.console import Console

from bros.cli.admin import run_admin, tenant_table
from bros.cli.flags import add_arguments
from bros.core.tenants import Resource, TenantAccounts, TenantLimits

LIMITS = TenantLimits(
    requests=500,
    session_chars=100_000_000,
    file_bytes=16 * 2**30,
    batch_tokens=1_234_567_890,
    response_bytes=2**30,
)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_tenants_shows_every_resource_in_full(width: int) -> None:
    names = ("", "ann", "a.tenant-with_as-long-a-name-as-there-may-be-0123456789-abcdefghij")
    accounts = TenantAccounts({name: LIMITS for name in names})
    accounts.note_refusal("ann", Resource.RT_REQUESTS)
    figures = accounts.figures({("ann", Resource.FILE_BYTES): 3 * 2**30})
    tenants = [
        {
            "name": name,
            "uses": [
                {
                    "resource": figure.resource.value,
                    "used": figure.used,
                    "limit": figure.limit,
                    "option": figure.option,
                    "refused": figure.refused,
                }
                for figure in figures
                if figure.tenant == name
            ],
        }
        for name in names
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(tenant_table(tenants))
    text = console.file.getvalue()
    assert "…" not in text
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["tenant", "resource", "used", "limit", "refused", "option"]
    for name in ("(operator)", "ann"):
        shown = [row[1] for row in rows if row[0] == name]
        assert shown == [resource.value for resource in Resource]
    assert ["ann", "rt_requests", "0", "500", "1", "max_requests"] in rows
    assert ["ann", "file_bytes", "3GiB", "16GiB", "0", "max_file_bytes"] in rows
    assert ["ann", "batch_tokens", "0", "1.23G", "0", "max_batch_tokens"] in rows
    assert ["(operator)", "sessions", "0", "none", "0", "max_sessions"] in rows


def test_the_table_of_replicas_fits_80_columns() -> None:
    replica = {
        **{"number": 1, "state": "draining", "open": 12, "waiting": 3, "lost": 0},
        **{"used_blocks": 10, "cached_blocks": 50, "total_blocks": 100},
        **{"cached_tokens": 10, "prompt_tokens": 200},
        "routed": {"prefix": 12, "load": 3, "rebalance": 1},
    }
    found = {"data": [replica], "router": "e2", "continued": 0, "moved": 0}
    parser = argparse.ArgumentParser()
    add_arguments("admin", parser)
    text = io.StringIO()
    run_admin(
        parser.parse_args(["replicas"]),
        {},
        pytest.fail,
        transport=httpx.MockTransport(lambda request: httpx.Response(200, json=found)),
        console=Console(file=text, width=80, force_terminal=True, color_system=None),
    )
    assert "…" not in text.getvalue() and "prefix 12, load 3, rebalance 1" in text.getvalue()
