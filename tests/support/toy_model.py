"""An executor that checks the plans it is given."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from bros.core.plan import Chunk, KvCopies, ReadPositions, SampledToken, StepPlan, StepResult
from bros.core.request import PooledTokens, PromptLogprobs

VOCAB = 1000


class ToyModel:
    """A "model" whose next token depends on the whole context, read back from a slot memory.

    It stores each token in its slot as an executor stores K and V, and reads the context
    through the plan's segments only, so a wrong slot, segment or position changes the output.
    """

    def __init__(self, block_size: int = 4) -> None:
        self._block_size = block_size
        self._memory: dict[int, tuple[int, int]] = {}
        self._host: dict[int, tuple[int, int]] = {}

    @staticmethod
    def next_token(context: Sequence[int]) -> int:
        return 1 + sum((i + 1) * t for i, t in enumerate(context)) % (VOCAB - 1)

    @classmethod
    def continuation(cls, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What the model answers to a prompt, computed the plain way."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(cls.next_token(tokens))
        return tokens[len(prompt) :]

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """should_abort: asked after each chunk, so that an aborted step has written something."""
        if plan.copies is not None:
            self._copy(plan.copies)
        samples, readouts = [], []
        for chunk in plan.chunks:
            assert len(chunk.token_ids) > 0, "a chunk of nothing"
            context = self._read(chunk.segments)
            assert [position for position, _ in context] == list(range(chunk.start))
            for offset, (slot, token) in enumerate(zip(chunk.slots, chunk.token_ids, strict=True)):
                self._memory[slot] = (chunk.start + offset, token)
            tokens = [token for _, token in context] + list(chunk.token_ids)
            if chunk.sample is not None:
                samples.append(self.choose(chunk, tokens))
            if chunk.readout is not None:
                readouts.append(self.read(chunk, tokens))
            if should_abort is not None and should_abort():
                return None
        return StepResult(plan.step, tuple(samples), tuple(readouts))

    def read(self, chunk: Chunk, tokens: Sequence[int]) -> ReadPositions:
        """What its readout asks for. tokens: all of the request so far."""
        readout = chunk.readout
        assert readout is not None and 0 <= readout.first < readout.end <= len(chunk.token_ids)
        first, end = chunk.start + readout.first, chunk.start + readout.end
        if readout.pooling is not None:
            assert readout.end <= len(chunk.token_ids) and not readout.targets
            states = [float(self.next_token(tokens[: p + 1])) for p in range(first, end)]
            pooled = PooledTokens(end, end - first, array("f", [sum(states)]).tobytes())
            return ReadPositions(chunk.request_id, end, pooled=pooled)
        targets = list(readout.targets)
        assert len(targets) == end - first
        # As far as the chunk goes, targets are its own tokens.
        assert targets[: len(tokens) - first - 1] == tokens[first + 1 : end + 1]
        values = [self.logprobs(tokens[: p + 1], t) for p, t in enumerate(targets, start=first)]
        rows = [(target, *[target] * readout.top) for target in targets]
        return ReadPositions(
            chunk.request_id,
            end,
            PromptLogprobs(
                first + 1,
                readout.top,
                array("i", [token for row in rows for token in row]).tobytes(),
                array("f", [v for v in values for _ in range(readout.top + 1)]).tobytes(),
                array("i", [1] * len(targets)).tobytes(),
            ),
        )

    @classmethod
    def logprobs(cls, context: Sequence[int], token: int) -> float:
        """A number that stands for the log-probability of a token: exact in fp32."""
        return float(-cls.next_token([*context, token]))

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        """The token after `tokens`, which are all of a request so far."""
        return SampledToken(chunk.request_id, self.next_token(tokens))

    def close(self) -> None:
        pass

    def _copy(self, copies: KvCopies) -> None:
        for slot, host_slot in zip(copies.out_device, copies.out_host, strict=True):
            self._host[host_slot] = self._memory[slot]
        for host_slot, slot in zip(copies.back_host, copies.back_device, strict=True):
            self._memory[slot] = self._host[host_slot]

    def _read(self, segments: Sequence[int]) -> list[tuple[int, int]]:
        found = []
        for i in range(0, len(segments), 3):
            block, lo, hi = segments[i : i + 3]
            found += [self._memory[block * self._block_size + offset] for offset in range(lo, hi)]
        return sorted(found)
