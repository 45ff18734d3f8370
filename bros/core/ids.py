"""Request ids, drawn from a generator that is passed in so that runs can be repeated."""

from __future__ import annotations

import random
import string

_ALPHABET = string.ascii_letters + string.digits


class IdGenerator:
    """Makes ids such as `chatcmpl-4fT9...`: 24 characters, 142 bits, so they do not collide."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def new(self, prefix: str, separator: str = "-") -> str:
        return f"{prefix}{separator}{''.join(self._rng.choices(_ALPHABET, k=24))}"
