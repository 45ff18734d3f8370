"""API keys: one for all, or those of each tenant, with options of the tenant.

# name  key       weight, slowdown of streams, and limits that differ from the defaults
ann     ann-key   weight=3 rt_slowdown=1.2
bob     bob-key   max_requests=64 max_sessions=100 max_file_bytes=2GiB
bob     new-key

Several lines of a name give it several keys; its options are in the first one. A running server
reads the file again when it has changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bros.core.clock import Clock
from bros.core.config import RT_SLOWDOWN, WEIGHT, EngineConfig, ServerConfig, parse_bytes
from bros.core.errors import ConfigError
from bros.core.files import expand_user
from bros.core.interfaces import MAX_TRACES
from bros.core.tenants import LIMIT_NAMES, NO_LIMITS, TenantAccounts, TenantLimits
from bros.semantic.service.live import SessionSettings
from bros.text.grammar_check import MAX_CACHED_GRAMMARS
from bros.text.public_prefixes import PublicPrefixes
from bros.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TENANT = "bros.tenant"
"""Key in the ASGI scope of the tenant's name, which is empty if there is only one tenant."""

OPERATOR = ""
"""Name of the tenant of --api-key, and of the only one of a server without keys."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PREFIX = "max_"
_NUMBERS = {"weight": WEIGHT, "rt_slowdown": RT_SLOWDOWN}
"""Options of a tenant for the engine."""

_OPTIONS = frozenset((*_NUMBERS, *(_PREFIX + name for name in LIMIT_NAMES)))

_NO_LIMIT = "none"

_SESSION_CHARS = 100_000_000
_FILES = 10_000
_FILE_BYTES = 16 * 2**30
_INPUT_BYTES = 64 * 2**20
_OUTPUT_BYTES = 64 * 2**20
_CPU_SECONDS = 30


TenantsLimits = tuple[Mapping[str, TenantLimits], TenantLimits]
"""Limits by tenant, and those of a tenant that has none of its own."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants and their API keys.

    keys: name -> its keys. If it is empty, requests need no key.
    limits: name -> its limits that differ from the defaults, as fields of TenantLimits.
    weights: name -> its weight, of those that have one.
    rt_slowdowns: name -> its --rt-slowdown, of those that have one.
    """

    keys: Mapping[str, Sequence[str]]
    limits: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    rt_slowdowns: Mapping[str, float] = field(default_factory=dict)

    def find(self, key: bytes) -> str | None:
        """Name of the tenant with a key, None if no tenant has it. The comparison takes constant
        time, so that timing does not reveal a key."""
        found = None
        for name, keys in self.keys.items():
            for expected in keys:
                if hmac.compare_digest(key, expected.encode()):
                    found = name
        return found

    def with_numbers(self, config: EngineConfig) -> EngineConfig:
        """The options of an engine, which gets the weights and slowdowns of all tenants; those of
        its options come first. Raises ConfigError if an option names an unknown tenant."""
        changes: dict[str, Any] = {}
        for option, number, known in (
            ("tenant_weights", WEIGHT, self.weights),
            ("tenant_rt_slowdowns", RT_SLOWDOWN, self.rt_slowdowns),
        ):
            given = number.parse_all(getattr(config, option))
            for name in given:
                if name not in self.keys:
                    flag = option.replace("_", "-")
                    raise ConfigError(f"--{flag}: --api-keys has no tenant {name!r}")
            if values := {**known, **given}:
                changes[option] = ",".join(f"{name}={value!r}" for name, value in values.items())
        return dataclasses.replace(config, **changes) if changes else config

    def accounts(
        self,
        config: ServerConfig,
        *,
        max_queue: int,
        max_waits: int = SessionSettings().max_waiting,
        server_limits: TenantLimits = NO_LIMITS,
        clock: Clock | None = None,
    ) -> TenantAccounts:
        """Accounts with the limits of every tenant; the arguments are those of `all_limits`, and
        the clock of TenantAccounts."""
        limits, default = self.all_limits(
            config, max_queue=max_queue, max_waits=max_waits, server_limits=server_limits
        )
        return TenantAccounts(limits, default, clock, server_limits=server_limits)

    def all_limits(
        self,
        config: ServerConfig,
        *,
        max_queue: int,
        max_waits: int = SessionSettings().max_waiting,
        server_limits: TenantLimits = NO_LIMITS,
    ) -> TenantsLimits:
        """The limits of every tenant.

        By default a tenant gets at most half of what the tenants share, if there are several; the
        only tenant of a server has the limits that an option sets, and those of the server.

        max_queue: most waiting requests of a class. max_waits: most waiting gets of sessions.
        server_limits: of all tenants together, see bros/server/limits.py.
        """
        several = len(self.keys) > 1

        def default(given: int | None, usual: int) -> int | None:
            return usual if given is None and several else given

        def part(given: int | None, usual: int, whole: int | None) -> int | None:
            return default(given, usual if whole is None else min(usual, max(1, whole // 2)))

        def half(given: int | None, shared: int) -> int | None:
            return default(given, max(1, shared // 2))

        def size(given: str | None) -> int | None:
            return None if given is None else parse_bytes(given)

        defaults = TenantLimits(
            requests=half(config.tenant_max_requests, max_queue),
            sessions=half(config.tenant_max_sessions, config.max_sessions),
            session_chars=part(
                config.tenant_max_session_chars, _SESSION_CHARS, server_limits.session_chars
            ),
            waits=half(None, max_waits),
            files=part(config.tenant_max_files, _FILES, server_limits.files),
            file_bytes=part(
                size(config.tenant_max_file_bytes), _FILE_BYTES, server_limits.file_bytes
            ),
            batches=config.batch_max_open,
            batch_tokens=config.batch_max_tokens,
            responses=config.tenant_max_responses,
            response_bytes=parse_bytes(config.tenant_max_response_bytes),
            background=config.tenant_max_background,
            input_bytes=part(
                size(config.tenant_max_input_bytes), _INPUT_BYTES, server_limits.input_bytes
            ),
            output_bytes=part(
                size(config.tenant_max_output_bytes), _OUTPUT_BYTES, server_limits.output_bytes
            ),
            cpu_seconds=default(config.tenant_max_cpu_seconds, _CPU_SECONDS),
            requests_per_minute=config.tenant_max_requests_per_minute,
            tokens_per_minute=config.tenant_max_tokens_per_minute,
            grammars=half(config.tenant_max_grammars, max_queue),
            cached_grammars=half(None, MAX_CACHED_GRAMMARS),
            traces=half(None, MAX_TRACES),
        )
        own = {
            name: dataclasses.replace(defaults, **self.limits.get(name, {}))
            for name in self.keys or (OPERATOR,)
        }
        return own, defaults


class LiveTenants:
    """The tenants of a running server, which reads --api-keys again when the file has changed.

    Keys that come are valid, and keys that go are refused, from then on; what the tenant of a key
    has goes on, and is there when it comes back. A file with a mistake changes nothing.

    accounts: theirs, with the limits that they have by now.
    """

    def __init__(
        self,
        tenants: Tenants,
        config: ServerConfig,
        *,
        max_queue: int,
        server_limits: TenantLimits,
        clock: Clock | None = None,
    ) -> None:
        """max_queue, server_limits, clock: as in Tenants.accounts."""
        self._tenants = tenants
        self._config = config
        self._max_queue = max_queue
        self.accounts = tenants.accounts(
            config, max_queue=max_queue, server_limits=server_limits, clock=clock
        )

    @property
    def keys(self) -> Mapping[str, Sequence[str]]:
        return self._tenants.keys

    def find(self, key: bytes) -> str | None:
        """As Tenants.find."""
        return self._tenants.find(key)

    async def run(self) -> None:
        """Look after the file until cancelled."""
        if self._config.api_keys is None:
            return
        path = expand_user(self._config.api_keys)
        if path.exists() and not path.is_file():  # a pipe can be read only once
            return
        last_read = last_seen = _NOT_SEEN
        while True:
            current = await asyncio.to_thread(_version_of, path)
            # A file that differs from the last look may still be being written.
            if current == last_seen and current != last_read:
                last_read = current
                try:
                    await self._read()
                except Exception:
                    logger.exception("--api-keys could not be read again")
            last_seen = current
            await asyncio.sleep(_LOOK_S)

    async def _read(self) -> None:
        try:
            tenants = await asyncio.to_thread(load_tenants, self._config)
        except ConfigError as error:
            logger.error("%s; until that is mended, the keys stay as they were", error)
            return
        before = self._tenants
        if tenants == before:
            return
        limits = tenants.all_limits(
            self._config, max_queue=self._max_queue, server_limits=self.accounts.server_limits
        )
        self.accounts.change_limits(*limits)
        self._tenants = tenants
        logger.info("--api-keys was read again: %s", _difference(before, tenants))
        if (tenants.weights, tenants.rt_slowdowns) != (before.weights, before.rt_slowdowns):
            logger.warning("--api-keys: weights and slowdowns change when the server is restarted")


_LOOK_S = 2.0
_NOT_SEEN = (-1, -1, -1)


def _version_of(path: Path) -> tuple[int, int, int]:
    """Differs if the file has changed."""
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _difference(before: Tenants, after: Tenants) -> str:
    """What has changed, by the names of tenants."""
    same = [name for name in after.keys if name in before.keys]
    groups = {
        "new": [name for name in after.keys if name not in before.keys],
        "gone": [name for name in before.keys if name not in after.keys],
        "with other keys": [name for name in same if after.keys[name] != before.keys[name]],
        "with other limits": [
            name for name in same if after.limits.get(name) != before.limits.get(name)
        ],
    }
    said = [f"{', '.join(names)} {what}" for what, names in groups.items() if names]
    return "; ".join(said) or "no tenant has other keys or limits"


def load_tenants(config: ServerConfig) -> Tenants:
    """The tenants of --api-keys, and that of --api-key, whose name is empty. Raises ConfigError."""
    if config.metrics_access == "key" and not config.api_key:
        raise ConfigError("--metrics-access key: needs --api-key")
    keys = {OPERATOR: [config.api_key]} if config.api_key else {}
    if config.api_keys is None:
        return Tenants(keys)
    try:
        lines = expand_user(config.api_keys).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys: cannot read {config.api_keys}: {error}") from error
    limits: dict[str, Mapping[str, int | None]] = {}
    numbers: dict[str, dict[str, float]] = {option: {} for option in _NUMBERS}
    for number, words in enumerate(map(str.split, lines), start=1):
        if not words or words[0].startswith("#"):
            continue
        name, key, *options = _checked(words, number)
        if any(key in others for others in keys.values()):
            raise ConfigError(f"--api-keys: the key in line {number} is used twice")
        keys.setdefault(name, []).append(key)
        if name in limits and options:
            raise ConfigError(
                f"--api-keys: line {number} has options; those of {name} are in its first line"
            )
        for option, values in numbers.items():
            given = [each for each in options if each.startswith(f"{option}=")]
            if given:
                values[name] = _number_of(option, given, number)
                options = [each for each in options if each not in given]
        limits.setdefault(name, _limits(options, number))
    if not keys:
        raise ConfigError("--api-keys: the file has no keys; without the option none are needed")
    return Tenants(keys, limits, numbers["weight"], numbers["rt_slowdown"])


def _checked(words: Sequence[str], number: int) -> Sequence[str]:
    """The words of a line of this number, if it begins with a name and a key."""
    if len(words) < 2 or not _NAME.fullmatch(words[0]):
        raise ConfigError(
            f"--api-keys: line {number} is not 'NAME KEY [weight=N] [rt_slowdown=N] [LIMIT=N ...]'"
        )
    if words[1].partition("=")[0] in _OPTIONS or words[1].startswith("#"):
        raise ConfigError(f"--api-keys: line {number} has {words[1][:50]!r} in the place of a key")
    if not words[1].isprintable():
        raise ConfigError(f"--api-keys: the key in line {number} has invisible characters")
    return words


def public_prefixes(config: ServerConfig, tokenizer: Tokenizer) -> PublicPrefixes | None:
    """What tenants share by --share-prefix and --public-prefix; None: nothing. Raises
    ConfigError."""
    if config.share_prefix == "all":
        return PublicPrefixes(all_tokens=True)
    texts = public_texts(config)
    return PublicPrefixes.of(tokenizer, texts) if texts else None


def public_texts(config: ServerConfig) -> list[str]:
    """The texts of the files of --public-prefix. Raises ConfigError for one that it cannot read."""
    texts = []
    for name in filter(None, map(str.strip, (config.public_prefix or "").split(","))):
        try:
            texts.append(expand_user(name).read_text(encoding="utf-8").rstrip("\n"))
        except OSError as error:
            raise ConfigError(f"--public-prefix: cannot read {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"--public-prefix: cannot read {name}: {error}") from error
    return texts


def _number_of(option: str, given: Sequence[str], number: int) -> float:
    """The value of one of _NUMBERS in a line of this number."""
    if len(given) > 1:
        raise ConfigError(f"--api-keys: line {number}: {option} is given twice")
    try:
        return _NUMBERS[option].parse(given[0].removeprefix(f"{option}="))
    except ConfigError as error:
        raise ConfigError(f"--api-keys: line {number}: {error}") from None


def _limits(options: Sequence[str], number: int) -> dict[str, int | None]:
    """Fields of TenantLimits from words such as max_sessions=100, in a line of this number."""
    found: dict[str, int | None] = {}
    for option in options:
        name, _, value = option.partition("=")
        limit = name.removeprefix(_PREFIX)
        if limit == name or limit not in LIMIT_NAMES:
            known = ", ".join(_PREFIX + each for each in LIMIT_NAMES)
            raise ConfigError(
                f"--api-keys: line {number}: {option[:50]!r} is not weight=N, rt_slowdown=N or "
                f"LIMIT=N with a limit of {known}"
            )
        if limit in found:
            raise ConfigError(f"--api-keys: line {number}: {name} is given twice")
        found[limit] = _number(name, value, number)
    return found


def _number(name: str, value: str, number: int) -> int | None:
    """The value of a limit; sizes such as 2GiB only for bytes."""
    if value == _NO_LIMIT:
        return None
    amount = 0
    if value.isascii() and value.isdecimal() and len(value) <= 18:
        amount = int(value)
    elif name.endswith("_bytes"):
        try:
            amount = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"--api-keys: line {number}: {name}: {error}") from None
    if amount < 1:
        raise ConfigError(
            f"--api-keys: line {number}: {name} must be a whole number from 1, or {_NO_LIMIT}; "
            f"got {value[:50]!r}"
        )
    return amount
