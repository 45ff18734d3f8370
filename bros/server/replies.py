"""Large replies: written piece by piece, as their client reads them, and counted until then.

body of 4 MB ─▶ 64 KiB ─▶ transport ─▶ client
                the next one when the client has read most of those before
"""

from __future__ import annotations

from starlette.types import Scope, Send

from bros.core.errors import TenantLimitError
from bros.core.tenants import Resource, TenantAccounts
from bros.server.tenants import TENANT

PIECE_BYTES = 2**16
"""A body of at most so many bytes is written at once, and does not count."""


async def send_large(
    accounts: TenantAccounts, scope: Scope, send: Send, body: bytes, *, more: bool
) -> None:
    """Send a body in pieces, each when the client has read enough of the ones before. It counts for
    the tenant of the request until the last one is written, whatever the limit.

    more: whether the response goes on after it.
    """
    with accounts.count(scope.get(TENANT, ""), Resource.OUTPUT_BYTES, len(body)):
        for begin in range(0, len(body), PIECE_BYTES):
            end = begin + PIECE_BYTES
            piece = {"type": "http.response.body", "body": body[begin:end]}
            await send({**piece, "more_body": more or end < len(body)})


def refusal(accounts: TenantAccounts, scope: Scope, num_bytes: int) -> TenantLimitError | None:
    """Why a large body may not be held until its client has read it. One that is larger than a
    limit may be the only one."""
    tenant, resource = scope.get(TENANT, ""), Resource.OUTPUT_BYTES
    most = accounts.most(tenant, resource)
    try:
        accounts.check(tenant, resource, num_bytes if most is None else min(num_bytes, most))
    except TenantLimitError as error:
        return error
    return None
