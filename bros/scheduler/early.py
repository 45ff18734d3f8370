"""How much of a prompt whose rest is not there yet is computed beside others (Hints.early).

What it costs the step, against what it spares one full of prompts later:

    seconds                                      seconds
      |          ____ step with n more tokens      |               / step with n more tokens
      |        .'                                  |            .'
      |_______'.....  half of what n tokens        |          .'  ..  half of what n tokens spare
      |    ....'      spare                        |        .' ...
      |....                                        |______.'..
      +-----------|--------- n                     +---------------- n
         weights are read: up to here              every token costs the same: nothing
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from bros.scheduler.cost_model import StepTimePredictor

_WORTH = 0.5
"""Others are made slower by no more than this share of what is spared."""

_MANY_TOKENS = 512
"""In a step with so many the weights are no longer what takes the time."""


def most_worthwhile(
    sizes: range, added_seconds: Callable[[int], float], predictor: StepTimePredictor
) -> int:
    """The largest of the sizes (in tokens, rising) that costs others little; 0 if none does.

    added_seconds: by which so many tokens make the step longer, on the safe side.
    """
    spared_s = predictor.safety_factor * predictor.added_prefill_seconds(_MANY_TOKENS)
    worth_s = _WORTH * spared_s / _MANY_TOKENS
    count = bisect.bisect_left(sizes, True, key=lambda n: added_seconds(n) > n * worth_s)
    return sizes[count - 1] if count else 0
