"""The engine: requests of token ids in, sampled tokens out, one step at a time."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rollout.config import EngineConfig
from rollout.engine.adapters import Adapters
from rollout.engine.grammars import GrammarQueue
from rollout.engine.kv_cache import KVCache
from rollout.engine.request import Request, Sequence
from rollout.engine.scheduler import Scheduler, SchedulerOutput
from rollout.engine.sleep import Sleeper
from rollout.kernels.attention.base import RaggedBatch, ranges
from rollout.messages import AbortRequests, AddRequest, EngineState
from rollout.model.runner import ModelRunner
from rollout.outputs import FinishReason, TokenOutput
from rollout.rendezvous import device_uuid
from rollout.sampling.grammar import Grammar
from rollout.sampling.sampler import NOT_FINITE, Drawn, Sampler, end_without_token
from rollout.weights.snapshot import SnapshotKeeper, resume
from rollout.weights.store import WeightStore
from rollout.weights.updater import WeightUpdater

if TYPE_CHECKING:
    from rollout.tensor_parallel.team import Team

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flight:
    """A step that was launched and not read: an output, complete but for its token, for each sequence that samples."""

    batch: SchedulerOutput
    sequences: list[Sequence]
    outputs: list[TokenOutput]
    drawn: Drawn


SLOW_FLOPS = 1e10
"""Operations a second that a CPU is taken to do until its first step was measured: few, so that this one is short."""


class Engine:
    """One model, with its scheduler, cache, sampler and weights; on one device, or leading a team of them.

    Not thread-safe: one thread calls it. `wake` is called, on any thread, when weights are ready while it may be idle;
    `died`, where a lost rank of the team has left that thread stuck.
    `staleness` counts the tokens of choices that have ended by how many epochs their weights were behind then;
    `commit_seconds` is how long the last commit kept a step from starting; `restarted` says, in an engine that took
    over from one that died, what it goes on with. What another thread may read to see that a step gets on: `steps` and
    `layers`, of the model, that were begun, and `step_since`, the time.monotonic() of the one under way.
    """

    def __init__(
        self, config: EngineConfig, wake: Callable[[], None] = lambda: None, died: Callable[[str], None] | None = None
    ) -> None:
        self.config = config
        self.runner: ModelRunner
        self.sleeper: Sleeper
        self.team: Team | None = None
        updater: Callable[..., WeightUpdater] = WeightUpdater
        if config.tensor_parallel_size > 1:
            from rollout.tensor_parallel.team import load_team
            from rollout.tensor_parallel.updater import TeamUpdater

            self.team, self.runner = load_team(config, wake, died)
            updater = partial(TeamUpdater, self.team)
        else:
            self.runner = ModelRunner(config)
        self.staleness: Counter[int] = Counter()
        self.commit_seconds: float | None = None
        self.paused = False
        self.store = WeightStore(
            self.runner.parameters,
            allow_partial=config.allow_partial_updates,
            weight_staging=config.weight_staging,
            prepare=self.runner.packed.pack,
            mesh=None if self.team is None else self.team.mesh,
        )
        self.restarted: str | None = None
        self.snapshots = (
            None if config.keep_weight_snapshot is None else SnapshotKeeper(self.store, config.keep_weight_snapshot)
        )
        self.weights = updater(
            self.store,
            timeout_s=config.weight_update_timeout_s,
            device=self.runner.device,
            wake=wake,
            info=lambda: {
                "dtype": str(self.runner.dtype).removeprefix("torch."),
                "kv_policy": config.default_kv_policy,
                "logprobs_mode": config.logprobs_mode,
                "batch_invariant": config.batch_invariant,
                "device_uuid": device_uuid(self.runner.device),
                "restarted": self.restarted,
                "commit_seconds": self.commit_seconds,
            },
            paused=lambda: self.paused or self.sleeper.level > 0,
        )
        self.scheduler = Scheduler(
            KVCache(self.runner.num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_head_rows=self.runner.max_head_rows,
            by_priority=config.scheduling_policy == "priority",
        )
        self.adapters = Adapters(config, self.runner, self.scheduler, self.store) if config.enable_lora else None
        self.sleeper = Sleeper(self.runner, self.store, self.scheduler)
        self.sampler = Sampler(config.logprobs_mode, exact=config.batch_invariant)
        on_cuda = self.runner.device.type == "cuda" and self.team is None and self.runner.routing is None
        self._overlaps = on_cuda if config.async_scheduling is None else config.async_scheduling
        self._flight: Flight | None = None
        self._eos = self.runner.eos_token_ids
        self.grammars = GrammarQueue(config.model, self.runner.vocab_size, self._eos)
        self._seeds = random.Random(secrets.randbits(64) if config.seed is None else config.seed)
        self._arrivals = 0
        self._warned_epoch: int | None = None
        self.steps = self.layers = 0
        self.step_since: float | None = None
        for layer in getattr(self.runner.model.get_decoder(), "layers", ()):
            layer.register_forward_pre_hook(self._count_layer)
        if self.runner.device.type == "cpu":
            flops = 2 * sum(parameter.numel() for parameter in self.runner.model.parameters())
            self.scheduler.seconds_per_token = flops / SLOW_FLOPS

    def close(self) -> None:
        """Abort an update under way, leave the trainer's group, and end the team's other processes."""
        self.weights.close()
        if self.team is not None:
            self.team.close()

    # -- requests

    def add_request(self, message: AddRequest) -> None:
        """Queue a request that the server has validated; one with a grammar, once that is compiled."""
        if message.grammar is None:
            self._add(message, None)
        else:
            self.grammars.put(message)

    def _add(self, message: AddRequest, grammar: Grammar | None) -> None:
        params = message.sampling_params
        room = self.runner.max_model_len - len(message.prompt_token_ids)
        self._arrivals += 1
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            arrival=self._arrivals,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
            priority=message.priority,
            cache_salt=message.cache_salt,
            bad_words_token_ids=message.bad_words_token_ids,
            eos_token_ids=self._eos,
            return_sampling_mask=message.return_sampling_mask,
            grammar=grammar,
            adapter=None if self.adapters is None or message.adapter is None else self.adapters[message.adapter],
        )
        self.scheduler.counters["prompt_tokens"] += len(message.prompt_token_ids)
        self.scheduler.add([Sequence(request, index, request.prompt_token_ids) for index in range(params.n)])

    def abort(self, message: AbortRequests) -> list[TokenOutput]:
        """End sequences now; one last output for each of them, unless the message is silent.

        A single choice is one that a stop string has ended: it counts as such.
        """
        requests = self.scheduler.requests
        ids = list(requests) if message.request_ids is None else dict.fromkeys(message.request_ids)
        aborted = [
            sequence
            for request in (requests[request_id] for request_id in ids if request_id in requests)
            for sequence in request.sequences.values()
            if message.index in (None, sequence.index)
        ]
        for sequence in reversed(aborted):  # siblings before their leader, so that none has to lead for a moment
            self._end(sequence, FinishReason.ABORT if message.index is None else FinishReason.STOP)
        choices = [(s.request.request_id, s.index) for s in aborted] + self.grammars.abort(message)
        if message.silent:
            return []
        return [TokenOutput(request_id, index, finish_reason=FinishReason.ABORT) for request_id, index in choices]

    @property
    def has_work(self) -> bool:
        """True while there are sequences to go on with."""
        return bool(self.scheduler.requests or self.grammars)

    @property
    def halted(self) -> bool:
        """True while no step would do anything: paused, asleep, or without valid weights."""
        return self.paused or self.sleeper.level > 0 or not self.store.valid

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start, and how many sequences and blocks are in use now."""
        scheduler = self.scheduler
        now = {
            "epoch": self.store.epoch,
            "running": len(scheduler.running),
            "waiting": sum(1 for _ in scheduler) - len(scheduler.running),
            "free_blocks": scheduler.kv.num_free,
            "num_blocks": scheduler.kv.num_usable,
            "sleep_level": self.sleeper.level,
        }
        return Counter({**scheduler.counters, **now})

    # -- the step

    def step(self) -> list[TokenOutput]:
        """Commit weights that are ready; then schedule, forward, sample, stop, emit.

        With `async_scheduling` the tokens that come out are those of the step before: this one is launched first.
        """
        outputs = self.commit_weights()
        if self.halted:
            return outputs + self.land()
        if self._flight is not None and self._flight.drawn.look_back:
            outputs += self.land()
        outputs += self.grammars.enter(self._add, idle=not self.scheduler.requests)
        launched = self._launch()
        outputs += self.land()
        self._flight = launched
        return outputs if self._overlaps else outputs + self.land()

    def _launch(self) -> Flight | None:
        """Schedule, forward, sample. None: there was nothing to do, or nothing that samples."""
        batch = self.scheduler.schedule()
        if not batch.scheduled:
            return None
        if self.adapters is not None:
            self.adapters.begin(batch.scheduled)
        self.steps += 1
        self.step_since = time.monotonic()
        flight = self._sample(batch, self._forward(batch))
        if flight is None:
            self._keep_pace(batch)
        return flight

    def land(self) -> list[TokenOutput]:
        """Read what was launched; stop, emit. What has ended meanwhile gets no token."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        flight.drawn.write(flight.outputs)
        self._keep_pace(flight.batch)
        landed = []
        for sequence, output in zip(flight.sequences, flight.outputs, strict=True):
            request = sequence.request
            sequence.in_flight -= 1
            if request.sequences.get(sequence.index) is not sequence:
                continue
            if not request.prompt_is_finite:
                end_without_token(output, NOT_FINITE)
            if output.token_id is None:
                self._break_off(sequence, output)
            elif ended := sequence.append(output.token_id, output.epoch):
                output.finish_reason, output.stop_reason = ended
                self._end(sequence, ended[0])
            landed.append(output)
        self.scheduler.counters["sampled_tokens"] += sum([output.token_id is not None for output in landed])
        return landed

    def _count_layer(self, *_: object) -> None:
        self.layers += 1

    def _keep_pace(self, batch: SchedulerOutput) -> None:
        """A step was read: on a CPU, let its speed say how much the next may prefill."""
        if self.runner.device.type == "cpu" and self.step_since is not None:
            self.scheduler.keep_pace(batch, time.monotonic() - self.step_since)
        self.step_since = None

    def restore(self, state: EngineState, reason: str, source: str | None = None) -> None:
        """Go on, before the first request, from `state`: that of an engine that died for this reason, or that of a
        fleet that this one joins, whose weights `source` has sent it."""
        if source is None:
            outcome = resume(self.store, self.config.keep_weight_snapshot, state.epoch, state.version)
        else:
            self.store.epoch, self.store.label = state.epoch, state.version
            outcome = f"it serves the weights of epoch {state.epoch} ({state.version!r}), as {source} sent them"
        self.restarted = f"The engine was restarted ({reason}); {outcome}."
        self.scheduler.epoch = self.store.epoch
        self.paused = state.paused

    def commit_weights(self) -> list[TokenOutput]:
        """Between two steps: flip to received weights, if a session waits for it. What was in flight lands before."""
        if self.team is not None:
            self.team.check()  # an idle engine, too, notices a lost rank
        if self.weights.ready is None:
            return []
        outputs = self.land()
        began = time.perf_counter()
        commit = self.weights.commit_if_ready()
        if commit is not None:
            self.scheduler.commit(commit.epoch, commit.kv_policy or self.config.default_kv_policy)
            if self.snapshots is not None:
                self.snapshots.request()
            self.commit_seconds = time.perf_counter() - began
        return outputs

    def _forward(self, batch: SchedulerOutput) -> Tensor:
        """Compute the batch's tokens; float logits of the rows that sample, or whose prompt logprobs are asked for."""
        items = batch.scheduled
        token_ids = []
        for item in items:
            sequence = item.sequence
            if sequence.in_flight:  # it is on the device, where `ModelRunner.forward` finds it by its place in its step
                token_ids.append(-1 - sequence.drawn_at)
            elif item.count == 1:
                token_ids.append(sequence.token_ids[item.start])
            else:
                token_ids += sequence.token_ids[item.start : item.start + item.count]
        seats, starts, counts, heads = np.array([(i.sequence.seat, i.start, i.count, i.num_head_rows) for i in items]).T
        contexts, ends = starts + counts, np.cumsum(counts)
        tables = self.scheduler.tables[seats, : -(-contexts.max() // self.config.block_size)]
        ragged = RaggedBatch(np.append(0, ends), contexts, tables)
        drawn = None if self._flight is None else self._flight.drawn.tokens
        logits = self.runner.forward(np.array(token_ids), ragged, ranges(ends - heads, heads), drawn)
        self.runner.copy_blocks(batch.copies)
        self.scheduler.computed(batch)
        return logits

    def _sample(self, batch: SchedulerOutput, logits: Tensor) -> Flight | None:
        """Draw a token for each sequence of the batch that samples, and note what is known of its weights and cache."""
        sequences, rows, row = [], [], 0
        for item in batch.scheduled:
            if item.wants_prompt_rows:
                self._collect_prompt_logprobs(item.sequence.request, item.start, logits[row : row + item.num_head_rows])
            row += item.num_head_rows
            sequences += item.samples
            rows += [row - 1] * len(item.samples)
        if not sequences:
            return None
        if rows != list(range(len(logits))):
            logits = logits[rows]
        ahead = [sequence.in_flight for sequence in sequences]
        drawn = self.sampler.launch(logits, [sequence.row for sequence in sequences], ahead)
        for place, sequence in enumerate(sequences):
            sequence.in_flight += 1
            sequence.drawn_at = place
        return Flight(batch, sequences, self._outputs(sequences), drawn)

    def _outputs(self, sequences: list[Sequence]) -> list[TokenOutput]:
        """What is true of the tokens that were just drawn for these sequences, but for the tokens."""
        epoch, version, routing = self.store.epoch, self.store.label, self.runner.routing
        outputs = []
        for sequence in sequences:
            request = sequence.request
            label = version if request.adapter is None else request.adapter.label
            output = TokenOutput(request.request_id, sequence.index, epoch=epoch, version=label)
            output.kv = "mixed" if sequence.kv_epoch is None else "current"
            output.cached_tokens, output.waited_s = sequence.cached_tokens, request.waited_s
            outputs.append(output)
            request.waited_s = None
            wanted = request.params.prompt_logprobs is not None and request.prompt_is_finite
            if wanted and not request.prompt_logprobs_delivered:
                output.prompt_logprobs, request.prompt_logprobs_delivered = list(request.prompt_logprobs), True
            if routing is not None:
                # A row that was delivered stands, also where its token is computed again: it is what it sampled by.
                routed, sequence.num_routed = sequence.num_routed, len(sequence.token_ids)
                output.routed_experts = routing.read(sequence.block_table, routed, sequence.num_routed)
        return outputs

    def _collect_prompt_logprobs(self, request: Request, start: int, logits: Tensor) -> None:
        """Keep the logprobs of the prompt tokens that these rows, from position `start` on, predict."""
        targets = request.prompt_token_ids[start + 1 : start + 1 + len(logits)]
        k = request.params.prompt_logprobs or 0
        found = self.sampler.prompt_logprobs(logits[: len(targets)], targets, k)
        request.prompt_is_finite &= None not in found
        request.prompt_logprobs += found

    def _break_off(self, sequence: Sequence, output: TokenOutput) -> None:
        """End a sequence that has no token to sample."""
        assert output.finish_reason is not None
        self._warn_once_an_epoch(f"a choice of request {output.request_id} ends: {output.stop_reason}")
        self._end(sequence, output.finish_reason)

    def _warn_once_an_epoch(self, message: str) -> None:
        if self._warned_epoch != self.store.epoch:
            self._warned_epoch = self.store.epoch
            logger.warning("epoch %d: %s (the metrics count all that do)", self.store.epoch, message)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self.scheduler.remove(sequence)
        self.scheduler.counters[f"finished_{reason}"] += 1
        for epoch, count in sequence.tokens_of.items():
            self.staleness[self.store.epoch - epoch] += count
