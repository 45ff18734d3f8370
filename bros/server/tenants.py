"""Who may use the server: one key for all, or one for each tenant."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bros.core.config import ServerConfig
from bros.core.errors import ConfigError

TENANT = "bros.tenant"
"""Where a request's ASGI scope has the name of its tenant, empty if there is only one."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tenants:
    """keys: name -> key. Nobody needs one if there are none."""

    keys: Mapping[str, str]

    def find(self, key: bytes) -> str | None:
        """Whose key that is. Takes the same time whether it is nearly right or not."""
        found = None
        for name, expected in self.keys.items():
            if hmac.compare_digest(key, expected.encode()):
                found = name
        return found


def load_tenants(config: ServerConfig) -> Tenants:
    """--api-key, which belongs to the tenant without a name, and the lines of --api-keys.

    Raises ConfigError.
    """
    keys = {"": config.api_key} if config.api_key else {}
    if config.api_keys is None:
        return Tenants(keys)
    try:
        lines = Path(config.api_keys).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys: cannot read {config.api_keys}: {error}") from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]):
            raise ConfigError(f"--api-keys: line {number} is not a NAME and a KEY")
        if words[0] in keys or words[1] in keys.values():
            raise ConfigError(f"--api-keys: the name or the key in line {number} is used twice")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError("--api-keys: the file has no keys; leave it out for a server without")
    return Tenants(keys)
