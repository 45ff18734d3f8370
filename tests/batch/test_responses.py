"""The store of responses, on both databases, beside a model of it in memory."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from bros.batch.responses import (
    MAX_CONVERSATION_BYTES,
    Claim,
    ResponseStatus,
    ResponseStore,
    StoredResponse,
)
from bros.core.errors import InvalidRequestError, NotFoundError, TenantLimitError
from bros.core.tenants import Resource, TenantLimits
from support.batch_store import NOW, Store
from support.tier import by_tier, seed

STEPS = by_tier(fast=80, long=2000)
MODEL = "model"


@pytest.fixture
def responses(store: Store) -> ResponseStore:
    return ResponseStore(store.database)


def made(
    name: str,
    previous: str | None = None,
    *,
    tenant: str = "ann",
    status: ResponseStatus = ResponseStatus.COMPLETED,
    text: str = "",
    expires_at: int = NOW + 100,
    deadline_at: float | None = None,
) -> StoredResponse:
    is_open = not status.is_final
    return StoredResponse(
        id=name,
        tenant=tenant,
        served_model=MODEL,
        previous_id=previous,
        status=status,
        background=is_open,
        created_at=NOW,
        expires_at=expires_at,
        deadline_at=deadline_at or (NOW + 50.0 if is_open else None),
        input=json.dumps([{"text": name + text}]),
        body=json.dumps({"id": name, "output": [{"text": f"to {name}"}], "error": None}),
        request="{}" if is_open else None,
    )


def test_what_was_put_is_found_by_its_tenant(responses: ResponseStore) -> None:
    one = made("one")
    responses.put(one)
    assert responses.get("ann", "one", NOW) == one
    for tenant, name, now in (("bob", "one", NOW), ("ann", "two", NOW), ("ann", "one", NOW + 100)):
        with pytest.raises(NotFoundError):
            responses.get(tenant, name, now)
    with pytest.raises(NotFoundError):
        responses.delete("bob", "one", NOW)
    responses.delete("ann", "one", NOW)
    with pytest.raises(NotFoundError):
        responses.get("ann", "one", NOW)


def texts(responses: ResponseStore, name: str) -> list[str]:
    turns = responses.conversation("ann", name, NOW)
    return [item["text"] for turn in turns for item in (*turn.input, *turn.output)]


def test_conversations_are_trees_of_responses(responses: ResponseStore) -> None:
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("x", "a")):
        responses.put(made(name, previous))
    assert texts(responses, "c") == ["a", "to a", "b", "to b", "c", "to c"]
    assert texts(responses, "x") == ["a", "to a", "x", "to x"]
    responses.delete("ann", "a", NOW)
    with pytest.raises(NotFoundError, match="'a', an earlier one"):
        responses.conversation("ann", "c", NOW)
    assert [turn.input[0]["text"] for turn in responses.turns("ann", "c", NOW)] == ["b", "c"]


def test_a_conversation_does_not_reach_into_that_of_another_tenant(
    responses: ResponseStore,
) -> None:
    responses.put(made("a", tenant="bob"))
    responses.put(made("b", "a"))
    with pytest.raises(NotFoundError):
        responses.conversation("ann", "b", NOW)
    assert responses.get("bob", "a", NOW).expires_at == NOW + 100


def test_a_conversation_can_be_too_long(responses: ResponseStore) -> None:
    half = "x" * (MAX_CONVERSATION_BYTES // 2)
    responses.put(made("a", text=half))
    assert len(texts(responses, "a")) == 2
    responses.put(made("b", "a", text=half))
    with pytest.raises(InvalidRequestError, match="The conversation has 2 responses"):
        responses.conversation("ann", "b", NOW)


def test_the_outputs_of_several_responses(responses: ResponseStore) -> None:
    names = [f"r{i}" for i in range(600)]  # more than one query asks for
    for name in names[:3] + names[-3:]:
        responses.put(made(name))
    responses.put(made("open", status=ResponseStatus.QUEUED))
    responses.put(made("failed", status=ResponseStatus.FAILED))
    responses.put(made("his", tenant="bob"))
    responses.put(made("old", expires_at=NOW))
    wanted = [*names, "r0", "open", "failed", "his", "old", "\0"]
    found = [item["text"] for item in responses.outputs("ann", wanted, NOW)]
    assert sorted(found) == sorted(f"to {name}" for name in names[:3] + names[-3:])


def test_the_outputs_of_several_responses_can_be_too_long(responses: ResponseStore) -> None:
    """Their own input does not count: it is often a copy of what was said before."""
    half = json.dumps({"output": [{"text": "x" * (MAX_CONVERSATION_BYTES // 2)}]})
    for name in "ab":
        responses.put(replace(made(name, text=half), body=half))
    assert len(responses.outputs("ann", "a", NOW)) == 1
    with pytest.raises(InvalidRequestError, match="2 responses") as error:
        responses.outputs("ann", "ab", NOW)
    assert error.value.param == "input"


def test_continuing_a_conversation_keeps_all_of_it(responses: ResponseStore) -> None:
    responses.put(made("a"))
    responses.put(made("b", "a"))
    responses.put(made("c", "b", expires_at=NOW + 500))
    responses.put(made("short", "c", expires_at=NOW + 10))
    assert {responses.get("ann", name, NOW).expires_at for name in "abc"} == {NOW + 500}
    responses.sweep(NOW + 10)
    assert len(responses.conversation("ann", "c", NOW)) == 3


def claim(
    responses: ResponseStore, owner: str = "me", now: float = NOW, most: int = 9
) -> list[Claim]:
    return list(responses.claim(owner, now, 10.0, most, MODEL))


def test_the_earliest_deadline_is_claimed_first(responses: ResponseStore) -> None:
    for name, deadline in (("late", NOW + 30), ("soon", NOW + 10), ("middle", NOW + 20)):
        responses.put(made(name, status=ResponseStatus.QUEUED, deadline_at=deadline))
    responses.put(replace(made("other", status=ResponseStatus.QUEUED), served_model="another"))
    assert [found.response_id for found in claim(responses, most=2)] == ["soon", "middle"]
    assert [found.response_id for found in claim(responses, "you")] == ["late"]
    assert claim(responses) == []


def test_tenants_take_turns_in_what_is_claimed(responses: ResponseStore) -> None:
    """One sends many, all of them with earlier deadlines than the other has."""
    for number in range(8):
        deadline = NOW + 10 + number
        responses.put(made(f"ann{number}", status=ResponseStatus.QUEUED, deadline_at=deadline))
    for number in range(3):
        deadline, name = NOW + 90 + number, f"bob{number}"
        responses.put(made(name, tenant="bob", status=ResponseStatus.QUEUED, deadline_at=deadline))

    def claimed(most: int, owner: str = "me") -> set[str]:
        return {found.response_id for found in claim(responses, owner, most=most)}

    assert claimed(3) == {"ann0", "bob0", "ann1"}
    assert claimed(1, "you") == {"bob1"}  # of whom fewer are claimed
    assert claimed(3) == {"ann2", "bob2", "ann3"}
    assert claimed(9) == {"ann4", "ann5", "ann6", "ann7"}


def test_only_the_last_owner_can_end_it(responses: ResponseStore) -> None:
    responses.put(made("a", status=ResponseStatus.QUEUED))
    (first,) = claim(responses)
    assert responses.renew("me", ["a"], NOW + 5, 10.0) == {("a", first.epoch)}
    assert claim(responses, "you", NOW + 14) == []
    (second,) = claim(responses, "you", NOW + 15)
    assert responses.load(first) is None and responses.load(second) is not None
    body = json.dumps({"id": "a", "output": [], "error": None, "more": "x" * 100})
    assert not responses.finish(first, ResponseStatus.COMPLETED, "{}", None)
    assert responses.finish(second, ResponseStatus.COMPLETED, body, None)
    assert not responses.finish(second, ResponseStatus.FAILED, None, "{}")
    found = responses.get("ann", "a", NOW)
    assert (found.status, found.body, found.request) == (ResponseStatus.COMPLETED, body, None)
    assert responses.usage()["ann", Resource.RESPONSE_BYTES] == found.num_bytes
    assert responses.renew("you", ["a"], NOW, 10.0) == frozenset()


def test_a_lease_of_before_the_clock_went_back_is_not_believed(
    store: Store, responses: ResponseStore
) -> None:
    """In PostgreSQL it is: its servers may have leases of different lengths."""
    responses.put(made("a", status=ResponseStatus.QUEUED))
    (first,) = claim(responses, "dead", NOW + 3600)
    assert claim(responses, "new", NOW + 3600 - 30) == []
    found = claim(responses, "new", NOW)
    if store.url is not None:
        assert found == []
        return
    assert [each.response_id for each in found] == ["a"]
    assert responses.load(first) is None
    assert claim(responses, "dead", NOW + 9) == []


def test_deadlines_end_what_is_open(responses: ResponseStore) -> None:
    for name, deadline in (("a", NOW + 10.0), ("b", NOW + 20.0)):
        responses.put(made(name, status=ResponseStatus.QUEUED, deadline_at=deadline))
    (running, _) = claim(responses)
    responses.fail_overdue(NOW + 10)
    assert not responses.finish(running, ResponseStatus.COMPLETED, "{}", None)
    failed = responses.get("ann", "a", NOW).to_object()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert responses.get("ann", "b", NOW).status is ResponseStatus.IN_PROGRESS


def test_limits(responses: ResponseStore) -> None:
    size = made("a").num_bytes
    limits = TenantLimits(responses=3, response_bytes=9 * size, background=1)
    responses.put(made("q", status=ResponseStatus.QUEUED, expires_at=NOW + 1), limits)
    with pytest.raises(TenantLimitError, match="unfinished background"):
        responses.put(made("r", status=ResponseStatus.QUEUED), limits)
    for number, name in enumerate("abc"):
        responses.put(made(name, expires_at=NOW + 50 - number), limits)
    # Those that expire first make room, but none that is open.
    left = {name for name in "qabc" if _is_there(responses, name)}
    assert left == {"q", "a", "c"}
    with pytest.raises(InvalidRequestError, match="max_response_bytes"):
        responses.put(made("d", text="x" * 9 * size), limits)
    responses.put(made("e", tenant="bob"), limits)
    assert responses.usage()["ann", Resource.RESPONSES] == 3


def _is_there(responses: ResponseStore, name: str) -> bool:
    try:
        responses.get("ann", name, NOW)
    except NotFoundError:
        return False
    return True


class Model:
    """Random steps of clients and of two owners, with a clock that goes on.

    kept: what has to be in the store. owners: id -> its last claim, and the end of its lease.
    """

    def __init__(self, responses: ResponseStore, rng: random.Random) -> None:
        self.responses = responses
        self.rng = rng
        self.now = float(NOW)
        self.kept: dict[str, StoredResponse] = {}
        self.owners: dict[str, tuple[Claim, float]] = {}
        self.claims: list[Claim] = []
        self.count = 0

    def step(self) -> None:
        steps = (self.put, self.put, self.claim, self.finish, self.cancel, self.delete, self.renew)
        self.rng.choice((*steps, self.wait))()
        if self.kept:
            self.check(self.any())

    def any(self) -> StoredResponse:
        return self.rng.choice(list(self.kept.values()))

    def check(self, one: StoredResponse) -> None:
        assert replace(self.responses.get("ann", one.id, self.now), error=None) == one

    def is_open(self, response_id: str) -> bool:
        found = self.kept.get(response_id)
        return found is not None and not found.status.is_final

    def end(self, response_id: str, status: ResponseStatus, **fields: str) -> None:
        found = self.kept[response_id]
        self.kept[response_id] = replace(found, status=status, request=None, **fields)

    def put(self) -> None:
        self.count += 1
        status = self.rng.choice((ResponseStatus.QUEUED, ResponseStatus.COMPLETED))
        previous = self.any().id if self.kept and self.rng.random() < 0.5 else None
        new = made(
            f"r{self.count}",
            previous,
            status=status,
            expires_at=int(self.now) + 100,
            deadline_at=self.now + self.rng.randint(5, 60),
        )
        self.responses.put(new)
        self.kept[new.id] = new
        while previous in self.kept:
            found = self.kept[previous] = replace(self.kept[previous], expires_at=new.expires_at)
            previous = found.previous_id

    def claim(self) -> None:
        free = [
            name
            for name in self.kept
            if self.is_open(name) and self.owners.get(name, (None, 0.0))[1] <= self.now
        ]
        found = claim(self.responses, self.rng.choice(("me", "you")), self.now, most=100)
        assert sorted(each.response_id for each in found) == sorted(free)
        for each in found:
            self.owners[each.response_id] = each, self.now + 10.0
            old = self.kept[each.response_id]
            self.kept[old.id] = replace(old, status=ResponseStatus.IN_PROGRESS)
        self.claims += found

    def finish(self) -> None:
        if not self.claims:
            return
        mine = self.rng.choice(self.claims)
        name = mine.response_id
        is_owner = self.is_open(name) and self.owners[name][0] == mine
        body = json.dumps({"output": [{"text": f"at {self.now}"}], "error": None})
        assert self.responses.finish(mine, ResponseStatus.COMPLETED, body, None) == is_owner
        if is_owner:
            self.end(name, ResponseStatus.COMPLETED, body=body)

    def cancel(self) -> None:
        if self.kept and (one := self.any()).background:
            self.responses.cancel("ann", one.id, self.now)
            if self.is_open(one.id):
                self.end(one.id, ResponseStatus.CANCELLED)

    def delete(self) -> None:
        if self.kept and self.rng.random() < 0.3:
            self.responses.delete("ann", (one := self.any()).id, self.now)
            del self.kept[one.id]

    def renew(self) -> None:
        mine = {name: each for name, (each, _) in self.owners.items() if each.owner == "me"}
        held = {(name, each.epoch) for name, each in mine.items() if self.is_open(name)}
        assert self.responses.renew("me", list(mine), self.now, 10.0) == held
        for name, _ in held:
            self.owners[name] = mine[name], self.now + 10.0

    def wait(self) -> None:
        self.now += self.rng.choice((1.0, 4.0, 11.0))
        self.responses.fail_overdue(self.now)
        self.responses.sweep(self.now)
        for one in list(self.kept.values()):
            if self.is_open(one.id) and (one.deadline_at or 0.0) <= self.now:
                self.end(one.id, ResponseStatus.FAILED)
            if one.expires_at <= self.now:
                del self.kept[one.id]


def test_it_keeps_what_a_model_of_it_keeps(responses: ResponseStore) -> None:
    model = Model(responses, random.Random(seed(7)))
    for _ in range(STEPS):
        model.step()
    for one in model.kept.values():
        model.check(one)
    assert len(model.kept) > 5
    used = responses.usage()
    assert used["ann", Resource.RESPONSES] == len(model.kept)
    sizes = [one.num_bytes for one in model.kept.values()]
    assert used["ann", Resource.RESPONSE_BYTES] == sum(sizes)
