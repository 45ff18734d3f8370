"""Whatever two runners, two tenants and the clock do, a store is what a naive model says.

Runners crash by doing nothing more: their leases run out. All leases that were ever given are
used again and again, so that former owners try to write at every moment.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bros.batch.files import Page
from bros.batch.objects import (
    BatchStatus,
    Lease,
    LeaseLostError,
    LineError,
    RowOutcome,
    TokenUsage,
)
from bros.core.errors import InvalidRequestError, NotFoundError, TenantLimitError
from support.batch_store import NOW, open_store, row_refs
from support.tier import examples

from .conftest import NewUrl

S = BatchStatus
T = TypeVar("T")

LEASE_S = 10
MAX_OPEN = 3
MAX_TOKENS = 100  # two of the first batches' 45, and 10 more

# The diagram in objects.py.
EDGES = {
    S.VALIDATING: {S.IN_PROGRESS, S.FAILED, S.CANCELLING, S.EXPIRED},
    S.IN_PROGRESS: {S.FINALIZING, S.CANCELLING, S.EXPIRED, S.FAILED},
    S.FINALIZING: {S.COMPLETED},
    S.CANCELLING: {S.CANCELLED},
}


@dataclass
class ModelFile:
    tenant: str
    content: bytes
    expires_at: int | None = None


@dataclass
class ModelBatch:
    """rows: line to outcome, while the batch is open."""

    tenant: str
    content: bytes
    status: BatchStatus = S.VALIDATING
    outcome: BatchStatus | None = None
    lease: Lease | None = None
    lease_until: float = 0
    epoch: int = 0
    tokens: int = 0
    total: int = 0
    failed: int = 0
    faults: int = 0
    done: list[RowOutcome] = field(default_factory=list)
    rows: dict[int, RowOutcome | None] = field(default_factory=dict)
    files: tuple[str | None, str | None] = (None, None)

    @property
    def is_open(self) -> bool:
        return self.status in EDGES

    def results(self, ok: bool) -> list[tuple[str, str]]:
        """Of rows that went well, or of all others."""
        return [
            (f"row-{line}", outcome.result if outcome else "")
            for line, outcome in sorted(self.rows.items())
            if (outcome is not None and outcome.ok) == ok
        ]


tenants = st.sampled_from(["ann", "bob"])
owners = st.sampled_from(["runner-1", "runner-2"])
contents = st.sampled_from([b"one", b"two"])
picks = st.integers(0, 7)
outcomes = st.lists(
    st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 9)), min_size=1, max_size=4
)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, url: str | None) -> None:
        super().__init__()
        self._exits = ExitStack()
        folder = self._exits.enter_context(tempfile.TemporaryDirectory())
        self.store = self._exits.enter_context(open_store(url, Path(folder)))
        self.now = NOW
        self.files: dict[str, ModelFile] = {}
        self.batches: dict[str, ModelBatch] = {}
        self.leases: list[Lease] = []
        self.seen: dict[str, BatchStatus] = {}
        self.placed: set[bytes] = set()
        self.made = 0

    def teardown(self) -> None:
        self._exits.close()

    # What clients do

    @initialize(owner=owners, content=contents, num_rows=st.integers(1, 3))
    def work_has_begun(self, owner: str, content: bytes, num_rows: int) -> None:
        """Two of three batches are in progress, so that runs get far."""
        for tenant in ("ann", "bob", "ann"):
            self.upload(tenant, content, None)
            self.create(tenant, content)
        self.claim(owner)
        for pick in range(2):
            self.admit(pick, num_rows, 45)

    @rule(tenant=tenants, content=contents, life_s=st.none() | st.integers(1, 40))
    def upload(self, tenant: str, content: bytes, life_s: int | None) -> None:
        name, expires_at = self.new_name("file"), None if life_s is None else self.now + life_s
        self.store.put_file(content, file_id=name, tenant=tenant, expires_at=expires_at)
        self.files[name] = ModelFile(tenant, content, expires_at)
        self.placed.add(content)

    @precondition(lambda self: self.files)
    @rule(pick=picks, tenant=tenants)
    def delete(self, pick: int, tenant: str) -> None:
        name = list(self.files)[pick % len(self.files)]
        if name in self.visible_files(tenant):
            self.store.files.delete(tenant, name, self.now)
            content = self.files.pop(name).content
            self.placed -= {content} - self.needed()
        else:
            with pytest.raises(NotFoundError):
                self.store.files.delete(tenant, name, self.now)

    @rule(tenant=tenants, content=contents)
    def create(self, tenant: str, content: bytes) -> None:
        name, fields = self.new_name("batch"), {"tenant": tenant, "content": content}
        num_open = sum(b.is_open for b in self.batches.values() if b.tenant == tenant)
        if num_open >= MAX_OPEN:
            with pytest.raises(TenantLimitError):
                self.store.put_batch(name, max_open=MAX_OPEN, **fields)  # type: ignore[arg-type]
        else:
            self.store.put_batch(name, max_open=MAX_OPEN, **fields)  # type: ignore[arg-type]
            self.batches[name] = ModelBatch(tenant, content)

    @rule(pick=picks, tenant=tenants)
    def cancel(self, pick: int, tenant: str) -> None:
        name = list(self.batches)[pick % len(self.batches)]
        batch = self.batches[name]
        if batch.tenant != tenant:
            with pytest.raises(NotFoundError):
                self.store.batches.cancel(tenant, name, self.now)
            return
        if batch.status in (S.VALIDATING, S.IN_PROGRESS) and batch.outcome is None:
            batch.status = S.CANCELLING
        if batch.status in (S.VALIDATING, S.IN_PROGRESS, S.CANCELLING, S.CANCELLED):
            assert self.store.batches.cancel(tenant, name, self.now).status is batch.status
        else:
            with pytest.raises(InvalidRequestError):
                self.store.batches.cancel(tenant, name, self.now)

    # What happens to processes

    @rule(seconds=st.integers(0, 12))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def reopen(self) -> None:
        self.store.database.close()
        self.store = self._exits.enter_context(self.store.again())

    @rule(content=contents)
    def crash_while_adding_a_file(self, content: bytes) -> None:
        """The body may have its name already; nothing refers to it."""
        files = self.store.files
        with (
            self.store.new_file("file-lost", content) as made,
            pytest.raises(KeyError),
            self.store.database.write(exclusive=True) as connection,
        ):
            files.insert(connection, *made)
            raise KeyError
        self.placed.add(content)

    @rule()
    def sweep(self) -> None:
        self.store.files.sweep(self.now)
        self.files = {name: file for name, file in self.files.items() if self.lives(file)}
        self.placed &= self.needed()

    # Leases

    @rule(owner=owners)
    def claim(self, owner: str) -> None:
        free = {
            name: batch
            for name, batch in self.batches.items()
            if batch.is_open and batch.lease_until <= self.now
        }
        for name, batch in free.items():
            batch.epoch += 1
            batch.lease = Lease(name, owner, batch.epoch)
            batch.lease_until = self.now + LEASE_S
        claimed = self.store.batches.claim(owner, self.now, LEASE_S)
        # All windows end at the same time, so that they are as old as in the model.
        assert [lease for lease, _ in claimed] == [batch.lease for batch in free.values()]
        self.leases += [lease for lease, _ in claimed]

    @rule(owner=owners, every=st.integers(1, 2))
    def renew(self, owner: str, every: int) -> None:
        names = list(self.batches)[::every]
        held: dict[Lease, BatchStatus] = {}
        for batch in map(self.batches.__getitem__, names):
            if batch.is_open and batch.lease is not None and batch.lease.owner == owner:
                held[batch.lease] = batch.status
                batch.lease_until = self.now + LEASE_S
        assert self.store.batches.renew(owner, names, self.now, LEASE_S) == held

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self.store.batches.release(owner)
        for batch in self.batches.values():
            if batch.lease is not None and batch.lease.owner == owner:
                batch.lease, batch.lease_until = None, 0

    # Work

    @precondition(lambda self: self.leases)
    @rule(pick=picks, num_rows=st.integers(1, 5), tokens=st.integers(0, 60))
    def admit(self, pick: int, num_rows: int, tokens: int) -> None:
        lease, batch = self.pick(pick)
        rows = row_refs(num_rows)
        self.write(
            lease,
            lambda: self.store.batches.admit(
                lease, rows, model="m", tokens=tokens, max_tokens=MAX_TOKENS, now=self.now
            ),
        )
        if batch is None or batch.status is not S.VALIDATING:
            return
        mine = (b for b in self.batches.values() if b.is_open and b.tenant == batch.tenant)
        if sum(b.tokens for b in mine) + tokens > MAX_TOKENS:
            batch.status = S.FAILED
        else:
            batch.status, batch.tokens, batch.total = S.IN_PROGRESS, tokens, num_rows
            batch.rows = dict.fromkeys(range(1, num_rows + 1))

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        lease, batch = self.pick(pick)
        errors = [LineError("empty_file", "Nothing.")]
        self.write(lease, lambda: self.store.batches.fail(lease, errors, self.now))
        if batch is not None and batch.status is S.VALIDATING:
            batch.status = S.FAILED

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def work_ends_unexpectedly(self, pick: int) -> None:
        lease, batch = self.pick(pick)
        error = LineError("internal_error", "The server failed.")
        self.write(lease, lambda: self.store.batches.note_fault(lease, error, 2, self.now))
        if batch is None:
            return
        batch.faults += 1
        if batch.faults >= 2 and batch.outcome is None:
            if batch.status is S.VALIDATING:
                batch.status = S.FAILED
            elif batch.status is S.IN_PROGRESS:
                batch.outcome = S.FAILED

    @precondition(lambda self: self.leases)
    @rule(pick=picks, given=outcomes)
    def commit(self, pick: int, given: list[tuple[int, bool, int]]) -> None:
        lease, batch = self.pick(pick)
        made = [
            RowOutcome(line, ok, self.new_name("result"), TokenUsage(tokens, 0, 1))
            for line, ok, tokens in given
        ]
        self.write(lease, lambda: self.store.batches.commit(lease, made, None))
        if batch is None or batch.outcome is not None:
            return
        batch.faults = 0
        for outcome in made:
            if outcome.line in batch.rows and batch.rows[outcome.line] is None:
                batch.rows[outcome.line] = outcome
                batch.done.append(outcome)
                batch.failed += not outcome.ok

    @precondition(lambda self: self.leases)
    @rule(pick=picks, wanted=st.sampled_from([S.COMPLETED, S.EXPIRED]))
    def begin_finalizing(self, pick: int, wanted: BatchStatus) -> None:
        lease, batch = self.pick(pick)
        if batch is not None and batch.status is S.VALIDATING:
            wanted = S.EXPIRED
        said = self.write(
            lease, lambda: self.store.batches.begin_finalizing(lease, wanted, self.now)
        )
        if batch is None:
            return
        if batch.is_open and batch.outcome is None:
            batch.outcome = S.CANCELLED if batch.status is S.CANCELLING else wanted
            if batch.outcome is S.COMPLETED:
                batch.status = S.FINALIZING
        # A batch whose file turned out to be bad after it had expired has failed.
        assert said == (batch.outcome if batch.is_open else batch.status)

    @precondition(lambda self: self.leases)
    @rule(pick=picks, wanted=st.sampled_from([S.COMPLETED, S.EXPIRED]))
    def finish(self, pick: int, wanted: BatchStatus) -> None:
        self.begin_finalizing(pick, wanted)
        self.batches_are_as_in_the_model()  # the next step is another one of the diagram
        lease, batch = self.pick(pick)
        name = lease.batch_id
        lines = [list(self.store.batches.results(name, ok=ok, page=2)) for ok in (True, False)]
        texts = ["\n".join(f"{row}: {text}" for row, text in some).encode() for some in lines]
        names = [self.new_name("file") for _ in texts]
        outcome = (batch.outcome if batch else None) or S.FAILED
        tenant = self.batches[name].tenant
        with (
            self.store.new_file(names[0], texts[0], tenant=tenant) as output,
            self.store.new_file(names[1], texts[1], tenant=tenant) as errors,
        ):
            made = output if texts[0] else None, errors if texts[1] else None
            self.write(lease, lambda: self.store.batches.finish(lease, outcome, *made, self.now))
        if batch is None or not batch.is_open:
            return
        assert lines == [batch.results(True), batch.results(False)]
        self.files |= {n: ModelFile(tenant, t) for n, t in zip(names, texts, strict=True) if t}
        self.placed |= {text for text in texts if text}
        batch.files = (names[0] if texts[0] else None, names[1] if texts[1] else None)
        batch.failed = batch.total - sum(outcome.ok for outcome in batch.done)
        batch.status, batch.tokens, batch.rows = outcome, 0, {}

    # What is always so

    @invariant()
    def batches_are_as_in_the_model(self) -> None:
        pages = (self.store.batches.page(tenant, Page(100))[0] for tenant in ("ann", "bob"))
        batches = {batch.id: batch for page in pages for batch in page}
        assert batches.keys() == self.batches.keys()
        for name, model in self.batches.items():
            batch, before = batches[name], self.seen.get(name, S.VALIDATING)
            assert batch.status is before or batch.status in EDGES.get(before, set())
            self.seen[name] = batch.status
            assert (batch.tenant, batch.status) == (model.tenant, model.status)
            assert batch.outcome == model.outcome
            completed = sum(outcome.ok for outcome in model.done)
            counted = batch.total, batch.completed, batch.failed
            assert counted == (model.total, completed, model.failed)
            assert batch.usage == sum((o.usage for o in model.done), TokenUsage())
            assert (batch.output_file_id, batch.error_file_id) == model.files

    @invariant()
    def rows_are_as_in_the_model(self) -> None:
        stored = self.store.query("SELECT batch_id, line, ok, result FROM rows")
        assert {(b, line): (ok, result) for b, line, ok, result in stored} == {
            (name, line): (outcome and outcome.ok, outcome and outcome.result)
            for name, batch in self.batches.items()
            for line, outcome in batch.rows.items()
        }

    @invariant()
    def files_are_as_in_the_model(self) -> None:
        for tenant in ("ann", "bob"):
            files, _ = self.store.files.page(tenant, Page(10_000, newest_first=False), self.now)
            assert [file.id for file in files] == self.visible_files(tenant)
            for file in files:
                assert self.store.files.body(file).read_bytes() == self.files[file.id].content
        assert self.store.bodies() == {hashlib.sha256(body).hexdigest() for body in self.placed}
        assert self.store.unplaced() == []

    # Helpers

    def new_name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}-{self.made}"

    def pick(self, pick: int) -> tuple[Lease, ModelBatch | None]:
        """A lease that was given once, and its batch if it still holds. Late ones more often."""
        lease = self.leases[-1 - pick % min(8, len(self.leases))]
        batch = self.batches[lease.batch_id]
        return lease, batch if batch.lease == lease else None

    def write(self, lease: Lease, call: Callable[[], T]) -> T | None:
        """Something that only the holder of the lease may do."""
        if self.batches[lease.batch_id].lease == lease:
            return call()
        with pytest.raises(LeaseLostError):
            call()
        return None

    def lives(self, file: ModelFile) -> bool:
        return file.expires_at is None or file.expires_at > self.now

    def visible_files(self, tenant: str) -> list[str]:
        files = self.files.items()
        return [name for name, file in files if file.tenant == tenant and self.lives(file)]

    def needed(self) -> set[bytes]:
        """Contents that a file or an open batch refers to."""
        batches = {batch.content for batch in self.batches.values() if batch.is_open}
        return batches | {file.content for file in self.files.values()}


def test_a_store_is_what_the_model_says(new_url: NewUrl) -> None:
    is_sqlite = new_url() is None
    run_state_machine_as_test(
        lambda: StoreMachine(new_url()),
        settings=settings(
            max_examples=examples(8) if is_sqlite else examples(3),
            stateful_step_count=40,
            phases=[Phase.generate],  # shrinking a failure would take minutes
        ),
    )
