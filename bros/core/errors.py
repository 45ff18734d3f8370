"""The exceptions that bros raises for reasons outside its own code.

BrosError
├── InvalidRequestError      a field of a request is wrong                  (HTTP 400)
│   ├── PromptTooLongError   the prompt does not fit the model's context    (HTTP 400)
│   └── OverTenantLimitError more at once than the API key may ever hold     (HTTP 400)
├── AuthenticationError      missing or wrong API key                       (HTTP 401)
├── NotFoundError            no such model, request or object               (HTTP 404)
├── QueueFullError           too many requests are waiting, try later       (HTTP 429)
├── OverloadedError          objectives cannot be met now, try later        (HTTP 429)
├── TenantLimitError         the API key holds as much as it may            (HTTP 429)
│   └── ServerLimitError     all clients together do                        (HTTP 429)
├── EngineDeadError          the engine stopped; open requests are lost     (HTTP 503)
├── RanksLostError           another rank of the model ended or hangs       (ends the engine)
├── ConfigError              a flag, variable or file entry is wrong        (start-up)
└── ModelError               the model cannot be loaded or is unsupported   (start-up)
"""

from __future__ import annotations


class BrosError(Exception):
    """Base of all of them."""


class InvalidRequestError(BrosError, ValueError):
    """A request field is wrong. `param` is its name in the API."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room for a single output token, or could never fit the KV cache."""

    def __init__(
        self,
        prompt_tokens: int,
        max_model_len: int,
        param: str = "messages",
        *,
        exact: bool = True,
        generates: bool = True,
    ) -> None:
        """exact: False if counting stopped once the prompt was certainly too long.
        generates: False if it is not a prompt of a text to generate.
        """
        count = str(prompt_tokens) if exact else f"more than {prompt_tokens - 1}"
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{count} tokens and at least one token must be generated."
            if generates
            else f"This model takes at most {max_model_len} tokens, but a text has {count} tokens.",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class OverTenantLimitError(InvalidRequestError):
    """A single thing is larger than the tenant's limit, so that waiting does not help.

    resource: of what, a value of tenants.Resource.
    """

    def __init__(self, message: str, resource: str) -> None:
        super().__init__(message, code="tenant_limit_exceeded")
        self.resource = resource


class AuthenticationError(BrosError):
    """The API key is missing or wrong."""


class NotFoundError(BrosError):
    """The named object does not exist here."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(BrosError):
    """The waiting queue of this class is full. `retry_after_s`: seconds until a retry."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        requests = "request is" if waiting == 1 else "requests are"
        super().__init__(f"{waiting} {requests} already waiting; retry in {retry_after_s:.0f} s.")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class OverloadedError(BrosError):
    """A real-time request cannot meet its objectives.

    retry_after_s: seconds until a retry; infinite if waiting does not help.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TenantLimitError(BrosError):
    """The tenant holds as much as its limit allows; the message names it.

    resource: of what, a value of tenants.Resource.
    retry_after_s: seconds until a retry.
    ends_soon: whether what it holds ends by itself within seconds, so that clients should retry.
    """

    def __init__(
        self, message: str, resource: str, retry_after_s: float, *, ends_soon: bool
    ) -> None:
        super().__init__(message)
        self.resource = resource
        self.retry_after_s = retry_after_s
        self.ends_soon = ends_soon


class ServerLimitError(TenantLimitError):
    """The server holds as much for all its tenants together as it may; the message names it."""


class EngineDeadError(BrosError):
    """The engine is not running; open requests are lost. `retry_after_s`: seconds until a retry, if
    an engine is known to be starting."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RanksLostError(BrosError):
    """Another rank of the same model ended or does not answer."""


class ConfigError(BrosError, ValueError):
    """A configuration value is wrong; the message names the option and what is allowed."""


class ModelError(BrosError):
    """The model cannot be found, read, or is of a kind this build does not support."""
