"""From the engine's outputs to the choices of an answer, whole or in pieces."""

from __future__ import annotations

from array import array

from rollout.outputs import FinishReason, TokenLogprob, TokenOutput, mask_ids
from rollout.server.protocol import Choice, Logprobs, SampledLogprob, TopLogprob
from rollout.weights.versions import SpanBuilder

# What stands for a logprob of -inf or NaN, which JSON can't say.
LOWEST_LOGPROB = -9999.0


def sendable(logprob: float) -> float:
    """The logprob, or -9999.0 where it is NaN or below."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def _sampled_logprob(candidates: list[TokenLogprob]) -> SampledLogprob:
    sampled = candidates[0]
    others = (c for c in candidates[1:] if c.token_id != sampled.token_id)
    top = [TopLogprob(c.token_id, sendable(c.logprob), c.rank) for c in (sampled, *others)]
    return SampledLogprob(top[0].token_id, top[0].logprob, top[0].rank, top)


class ChoiceBuilder:
    """Collects the outputs of one choice. `take` gives what came since the last `take` as a Choice."""

    def __init__(self, index: int, *, with_logprobs: bool) -> None:
        self.num_tokens = 0
        self._index = index
        self._with_logprobs = with_logprobs
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._spans = SpanBuilder()
        self._clear()

    def _clear(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[SampledLogprob] = []
        self._masks: list[array[int] | None] = []

    def add(self, output: TokenOutput) -> None:
        """Take the choice's next output."""
        if output.token_id is not None:
            self._token_ids.append(output.token_id)
            self._masks.append(None if output.sampling_mask is None else mask_ids(output.sampling_mask))
            if self._with_logprobs and output.logprobs:
                self._logprobs.append(_sampled_logprob(output.logprobs))
            self._spans.append(output)
            self.num_tokens += 1
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason
            self._stop_reason = output.stop_reason

    def take(self) -> Choice:
        """What is new. Spans, which cover the whole output, come once it has ended."""
        choice = Choice(
            index=self._index,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            token_ids=self._token_ids,
            routed_experts=None,
            sampling_mask=self._masks if any(mask is not None for mask in self._masks) else None,
            weight_versions=self._spans.spans() if self._finish_reason is not None else None,
            logprobs=Logprobs(self._logprobs) if self._with_logprobs else None,
        )
        self._clear()
        return choice
