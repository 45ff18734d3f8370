from __future__ import annotations

import inspect
from array import array

import pytest

from bros.core import errors
from bros.core.errors import BrosError, NotFoundError, PromptTooLongError, QueueFullError
from bros.core.plan import Chunk, StepPlan


def test_every_error_is_a_bros_error_with_a_docstring() -> None:
    found = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(found) >= 9
    for kind in found:
        assert issubclass(kind, BrosError)
        assert kind.__doc__


def test_the_tree_in_the_module_docstring_is_the_real_one() -> None:
    tree = inspect.getdoc(errors) or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        [line] = [line for line in tree.splitlines() if name in line.split()[:3]]
        assert line.index(name) == 4 * (len(kind.__mro__[: kind.__mro__.index(BrosError)]))


def test_prompt_too_long_says_both_lengths() -> None:
    error = PromptTooLongError(3000, 2048)
    assert "2048 tokens" in str(error) and "3000 tokens" in str(error)
    assert (error.param, error.code) == ("messages", "context_length_exceeded")
    assert PromptTooLongError(1, 1, "prompt").param == "prompt"


def test_queue_full_says_when_to_come_back() -> None:
    error = QueueFullError(512, 3.4)
    assert str(error) == "512 requests are already waiting; retry in 3 s."
    assert (error.waiting, error.retry_after_s) == (512, 3.4)


def test_not_found_names_the_parameter() -> None:
    error = NotFoundError("no model x", param="model", code="model_not_found")
    assert (str(error), error.param, error.code) == ("no model x", "model", "model_not_found")


@pytest.mark.parametrize("lengths", [[1], [1, 1, 5], [16, 1]])
def test_tokens_of_a_plan_are_those_of_its_chunks(lengths: list[int]) -> None:
    chunks = tuple(
        Chunk(str(i), 0, tuple(range(n)), array("i"), array("i", range(n)), None)
        for i, n in enumerate(lengths)
    )
    assert StepPlan(step=0, chunks=chunks).num_tokens == sum(lengths)
