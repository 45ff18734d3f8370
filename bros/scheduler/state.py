"""What the scheduler remembers about one request."""

from __future__ import annotations

from array import array

from bros.core.plan import SampleSpec
from bros.core.request import EngineRequest, FinishReason

Rank = tuple[float, ...]
"""Position in the order of service: lower runs first."""


class RequestState:
    """One request from submission to its last token.

    token_ids   [ prompt .................... | output so far ]
    num_cached  [ in KV memory ....... )                           0 after preemption
    remaining                          [ to compute .......... )   then a token is sampled
    """

    __slots__ = (
        "arrival_index",
        "max_length",
        "num_cached",
        "prompt_len",
        "rank",
        "request",
        "request_id",
        "seed",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        arrival_index: int,
        seed: int,
        max_length: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        params = request.sampling
        self.request = request
        self.request_id = request.request_id
        self.arrival_index = arrival_index
        self.seed = seed
        self.token_ids = array("i", request.prompt_token_ids)
        self.prompt_len = len(self.token_ids)
        self.num_cached = 0
        self.rank: Rank = (arrival_index,)  # until a policy has its say
        limit = self.prompt_len + params.max_tokens if params.max_tokens else max_length
        self.max_length = min(limit, max_length)
        eos = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_ids = eos.union(params.stop_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    def sample_spec(self) -> SampleSpec:
        """How to choose the token after everything computed so far."""
        params = self.request.sampling
        too_early = self.num_outputs < params.min_tokens
        return SampleSpec(
            params=params,
            seed=self.seed,
            output_index=self.num_outputs,
            prompt_len=self.prompt_len,
            token_ids=self.token_ids[:] if params.needs_history else (),
            forbidden=tuple(self.stop_ids) if too_early else (),
        )

    def add_output(self, token_id: int) -> FinishReason | None:
        """Record a sampled token; says why the request is finished, if it is."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_length:
            return FinishReason.LENGTH
        return None
