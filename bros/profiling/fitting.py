"""Fits a CostModel to measured steps.

A cost model is linear in its coefficients, so each measured step is one row of a linear system
whose columns are the model itself with one coefficient set to 1. Rows are divided by the measured
time, so that the relative error counts, for a decode step of 30 ms as for a prompt of a second.
No coefficient may be negative, or adding work could make a step cheaper.

The time of the matrix products is piecewise linear in the tokens, with slopes that are not
negative. Its knots, at most MAX_KNOTS of KNOTS, are those that leave the least error.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bros.scheduler.cost_model import CostModel, StepLoad

KNOTS = (4, 8, 16, 32, 64, 128, 256, 512)
MAX_KNOTS = 2

_WORTHWHILE = 0.97
"""A further knot has to reduce the error to less than this share."""

_FOLDS = 5

Matrix = npt.NDArray[np.float64]


class ChunkShape(NamedTuple):
    """`tokens` after `context` cached ones.

    sampled: whether a token is sampled after them.
    shared: how many of its first context tokens are also those of the step's first chunk, so that
        both read them once. 0 for the first chunk itself.
    """

    tokens: int
    context: int
    sampled: bool
    shared: int = 0


StepShape = tuple[ChunkShape, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured step."""

    chunks: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class CopySample:
    """Measured copies of KV.

    out: to the host, else to the device.
    """

    out: bool
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors, |predicted / measured - 1|: their mean and the largest one."""

    mape: float
    max: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model, with its errors on the steps it was fitted to and on held-out ones."""

    model: CostModel
    fitted: FitError
    held_out: FitError


def load_of(chunks: StepShape) -> StepLoad:
    """The load of a step."""
    load = StepLoad()
    for chunk in chunks:
        load.add(chunk.tokens, chunk.context, chunk.sampled, chunk.shared)
    return load


def relative_errors(model: CostModel, samples: Sequence[Sample]) -> Matrix:
    """predicted / measured - 1 of each sample."""
    return np.array([model.seconds(load_of(s.chunks)) / s.seconds - 1.0 for s in samples])


def error_of(model: CostModel, samples: Sequence[Sample]) -> FitError:
    """The model's error on `samples`, at least one."""
    return _error(relative_errors(model, samples))


def fit(
    samples: Sequence[Sample],
    padding: tuple[tuple[int, int], ...] = (),
    held_out: Sequence[Sample] = (),
) -> Fit:
    """The cost model with the least squared relative error on `samples`, which are not empty.

    padding: how the executor rounds token counts, see CostModel.
    held_out: steps to test the model on; without any, the held-out error is that of a five-fold
        cross-validation.
    Raises ValueError if a time is not positive.
    """
    if any(not sample.seconds > 0.0 for sample in samples):
        raise ValueError("the time of a step is not positive")
    system = _System(samples, padding)
    knots = _choose_knots(system)
    model = system.solve(knots, np.arange(len(system)))
    if held_out:
        outside = error_of(model, held_out)
    else:
        outside = _error(_cross_validated(system, knots))
    return Fit(model, error_of(model, samples), outside)


def with_copies(
    model: CostModel, samples: Sequence[CopySample], overlap: bool = False
) -> CostModel:
    """The model with the times of copies; zero for a direction without samples.

    overlap: copies overlap with the computation.
    """
    out_constant_s, out_token_s = _line([sample for sample in samples if sample.out])
    constant_s, token_s = _line([sample for sample in samples if not sample.out])
    return dataclasses.replace(
        model,
        swap_constant_s=constant_s,
        swap_token_s=token_s,
        swap_out_constant_s=out_constant_s,
        swap_out_token_s=out_token_s,
        overlap_swap=overlap,
    )


def _line(samples: Sequence[CopySample]) -> tuple[float, float]:
    """(constant, slope) of a line through the samples, neither negative.

    Small copies weigh more: they determine the constant, and their times vary less.
    """
    if not samples:
        return 0.0, 0.0
    tokens = np.array([sample.tokens for sample in samples], float)
    seconds = np.array([sample.seconds for sample in samples], float)
    if np.all(tokens == tokens[0]):
        return 0.0, float(np.mean(seconds / tokens))
    scale = np.sqrt(tokens)
    constant, slope = nnls(np.stack([1.0 / scale, scale], axis=1), seconds / scale)
    return float(constant), float(slope)


class _System:
    """The linear systems of one set of samples, for any choice of knots."""

    def __init__(self, samples: Sequence[Sample], padding: tuple[tuple[int, int], ...]) -> None:
        zero = CostModel(
            constant_s=0.0, token_s=0.0, sample_s=0.0, pair_s=0.0, context_s=0.0, padding=padding
        )
        self._zero = zero
        self._seconds = np.array([sample.seconds for sample in samples])
        self._loads = [load_of(sample.chunks) for sample in samples]
        self._token = self._column(dataclasses.replace(zero, token_s=1.0))
        self._rest = [
            self._column(dataclasses.replace(zero, constant_s=1.0)),
            self._column(dataclasses.replace(zero, sample_s=1.0)),
            self._column(dataclasses.replace(zero, pair_s=1.0)),
            self._column(dataclasses.replace(zero, context_s=1.0)),
        ]
        # Without shared prefixes, unique_context_s cannot be told from context_s.
        self._shares = any(load.unique_context < load.context for load in self._loads)
        if self._shares:
            self._rest.append(self._column(dataclasses.replace(zero, unique_context_s=1.0)))
        self._above = {
            knot: self._column(dataclasses.replace(zero, hinges=((knot, 1.0),))) for knot in KNOTS
        }

    def __len__(self) -> int:
        return len(self._loads)

    def _column(self, model: CostModel) -> Matrix:
        seconds = np.array([model.seconds(load) for load in self._loads], float)
        return np.asarray(seconds / self._seconds)

    def useful_knots(self) -> list[int]:
        """Knots with samples on both sides."""
        return [
            knot
            for knot, above in self._above.items()
            if 0 < np.count_nonzero(above) < len(self._loads)
        ]

    def solve(self, knots: tuple[int, ...], rows: npt.NDArray[np.intp]) -> CostModel:
        """The best model with these knots for the samples with indices `rows`."""
        solution = nnls(self._matrix(knots)[rows], np.ones(len(rows)))
        values = [float(value) for value in solution]
        constant, sample, pair, context = values[:4]
        slopes = values[len(self._rest) :]
        steps = [after - before for before, after in itertools.pairwise(slopes)]
        return dataclasses.replace(
            self._zero,
            constant_s=constant,
            token_s=slopes[0],
            sample_s=sample,
            pair_s=pair,
            context_s=context,
            unique_context_s=values[4] if self._shares else 0.0,
            hinges=tuple((k, s) for k, s in zip(knots, steps, strict=True) if s != 0.0),
        )

    def error(self, knots: tuple[int, ...]) -> float:
        """The root mean square of the relative errors of the best model with these knots."""
        matrix = self._matrix(knots)
        solution = nnls(matrix, np.ones(len(matrix)))
        return float(np.sqrt(np.mean((matrix @ solution - 1.0) ** 2)))

    def relative_errors(self, model: CostModel, rows: npt.NDArray[np.intp]) -> Matrix:
        predicted = np.array([model.seconds(self._loads[row]) for row in rows], float)
        return np.asarray(predicted / self._seconds[rows] - 1.0)

    def _matrix(self, knots: tuple[int, ...]) -> Matrix:
        """The linear system, with a column of tokens for each interval between knots."""
        beyond = [self._token, *(self._above[knot] for knot in knots)]
        stretches = [low - high for low, high in itertools.pairwise(beyond)]
        return np.stack([*self._rest, *stretches, beyond[-1]], axis=1)


def _choose_knots(system: _System) -> tuple[int, ...]:
    best: tuple[int, ...] = ()
    least = system.error(best)
    for count in range(1, MAX_KNOTS + 1):
        candidates = list(itertools.combinations(system.useful_knots(), count))
        if not candidates:
            break
        error, knots = min((system.error(knots), knots) for knots in candidates)
        if error >= _WORTHWHILE * least:
            continue
        best, least = knots, error
    return best


def _cross_validated(system: _System, knots: tuple[int, ...]) -> Matrix:
    """The relative error of each sample under a model that was fitted without it."""
    numbers = np.arange(len(system))
    errors = np.zeros(len(system))
    for fold in range(min(_FOLDS, len(system))):
        left_out = numbers % _FOLDS == fold
        # A single sample has to be predicted from itself.
        model = system.solve(knots, numbers[~left_out] if len(system) > 1 else numbers)
        errors[left_out] = system.relative_errors(model, numbers[left_out])
    return errors


def _error(errors: Matrix) -> FitError:
    sizes = np.abs(errors)
    return FitError(mape=float(np.mean(sizes)), max=float(np.max(sizes)))


def nnls(matrix: Matrix, target: Matrix) -> Matrix:
    """The x >= 0 that minimizes |matrix @ x - target|, exactly.

    Without the columns that are zero in the answer, the answer is an ordinary least-squares
    solution. Branch and bound searches the sets of columns from the full set downwards: if a set's
    solution is not negative, no subset is better, and subsets of a set with a larger error than
    the best one are skipped. The QR decomposition in front makes the systems tiny.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    q, r = np.linalg.qr(matrix / scale)
    target = q.T @ target
    best, least = np.zeros(len(scale)), float(target @ target)
    pending = [tuple(range(len(scale)))]
    seen = set(pending)
    while pending:
        chosen = pending.pop()
        columns = r[:, chosen]
        solution = np.linalg.lstsq(columns, target, rcond=None)[0]
        residual = columns @ solution - target
        if residual @ residual >= least * (1.0 - 1e-9):
            continue
        if np.all(solution >= 0.0):
            least = float(residual @ residual)
            best = np.zeros(len(scale))
            best[list(chosen)] = solution
            continue
        fewer = set(itertools.combinations(chosen, len(chosen) - 1)) - seen - {()}
        pending.extend(sorted(fewer))
        seen |= fewer
    return np.asarray(best / scale)
