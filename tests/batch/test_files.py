"""Files: who sees them, for how long, and when their content goes."""

from __future__ import annotations

import pytest

from support.batch_store import NOW, Store


def test_a_file_can_be_read_once_it_is_added(store: Store) -> None:
    file = store.put_file(b"hello")
    assert store.files.get("ann", "file-1", NOW) == file
    assert store.files.body(file).read_bytes() == b"hello"
