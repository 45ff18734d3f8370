"""Queues against sorted lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bros.core.request import ServiceClass, Slo
from bros.scheduler.state import Queues, RequestState, by_deadline
from support.scheduling import request

CLASSES = st.sampled_from(list(ServiceClass))


def state(index: int, service_class: ServiceClass, key: float) -> RequestState:
    made = RequestState(
        request(f"r{index}", 5, service_class),
        service_class=service_class,
        slo=Slo(),
        now=0.0,
        arrival_index=index,
        seed=0,
        max_length=9,
        eos_token_ids=frozenset(),
    )
    made.queue_key = (key, index)
    made.rank = (-key, index)
    return made


@given(
    st.lists(st.tuples(CLASSES, st.sampled_from([0.0, 1.0, 2.0])), min_size=1, max_size=12),
    st.data(),
)
def test_any_sequence_of_moves_leaves_both_queues_sorted_and_complete(
    population: list[tuple[ServiceClass, float]], data: st.DataObject
) -> None:
    queues = Queues()
    waiting: list[RequestState] = []
    running: list[RequestState] = []
    for index, (service_class, key) in enumerate(population):
        waiting.append(state(index, service_class, key))
        queues.enqueue(waiting[-1])
    for _ in range(data.draw(st.integers(0, 20))):
        moves = ["requeue", "start"] * bool(waiting) + ["stop"] * bool(running) + ["remove"]
        move = data.draw(st.sampled_from(moves))
        source = {"requeue": waiting, "start": waiting, "stop": running}.get(
            move, running + waiting
        )
        if not source:
            break
        chosen = data.draw(st.sampled_from(source))
        if move == "requeue":
            queues.requeue(chosen, (data.draw(st.sampled_from([0.5, 1.5])), chosen.arrival_index))
        elif move == "start":
            queues.start(chosen)
            chosen.num_computed_tokens = 3
            waiting.remove(chosen)
            running.append(chosen)
        elif move == "stop":
            chosen.num_computed_tokens = 0
            queues.stop(chosen)
            running.remove(chosen)
            waiting.append(chosen)
        else:
            queues.remove(chosen)
            (running if chosen in running else waiting).remove(chosen)
        queues.check_integrity()
        assert queues.running == sorted(running, key=lambda s: s.rank)
        for service_class, queue in queues.waiting.items():
            mine = [s for s in waiting if s.service_class is service_class]
            assert queue == sorted(mine, key=lambda s: s.queue_key)
        assert len(list(queues)) == len(running) + len(waiting)


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), max_size=10))
def test_equal_deadlines_go_by_rank(deadlines: list[float]) -> None:
    states = []
    for index, deadline_s in enumerate(deadlines):
        states.append(state(index, ServiceClass.RT, 0.0))
        states[-1].deadline_s = deadline_s
    expected = sorted(states, key=lambda s: (s.deadline_s, s.rank))
    assert by_deadline(states) == expected
