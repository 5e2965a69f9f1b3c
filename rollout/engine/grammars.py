"""Requests with a grammar, until it is compiled: on a thread, so that no step waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property

from rollout.messages import AbortRequests, AddRequest
from rollout.outputs import TokenOutput
from rollout.sampling.grammar import Grammar, GrammarCompiler, load_tokenizer
from rollout.sampling.sampler import end_without_token

logger = logging.getLogger(__name__)
_PAUSE_S = 0.01  # for a step that has nothing else to do


class GrammarQueue:
    """`put` takes a request, which `enter` lets into the engine once its grammar is there."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._model, self._vocab_size, self._eos = model, vocab_size, eos_token_ids
        self._compilers: dict[str, GrammarCompiler] = {}  # one: a server has one tokenizer
        self._waiting: dict[str, tuple[AddRequest, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def _compile(self, grammar: str, tokenizer: str) -> Grammar:
        if (compiler := self._compilers.get(tokenizer)) is None:
            compiler = GrammarCompiler(load_tokenizer(tokenizer), self._vocab_size, self._eos)
            self._compilers[tokenizer] = compiler
        return compiler.compile(grammar)

    @property
    def compiled(self) -> bool:
        """Whether every request that waits may enter at the next step."""
        return all(future.done() for _, future in self._waiting.values())

    def put(self, message: AddRequest) -> None:
        """Begin to compile the grammar of this request, which has one."""
        assert message.grammar is not None
        future = self._thread.submit(self._compile, message.grammar, message.tokenizer or self._model)
        self._waiting[message.request_id] = message, future

    def enter(self, add: Callable[[AddRequest, Grammar], None], *, idle: bool) -> list[TokenOutput]:
        """`add` the requests whose grammars are there; where the engine is `idle`, after a short wait for one.

        Returns an output for each choice of those whose grammar can't be had, which ends it and says why.
        """
        if idle and self._waiting:
            wait([future for _, future in self._waiting.values()], _PAUSE_S)
        failed = []
        for message, future in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[message.request_id]
            if (error := future.exception()) is None:
                add(message, future.result().after(message.thinking))
                continue
            logger.warning("request %s ends: its grammar can't be had: %s", message.request_id, error)
            ends = [TokenOutput(message.request_id, index) for index in range(message.sampling_params.n)]
            for output in ends:
                end_without_token(output, f"structured_outputs can't be served: {error}")
            failed += ends
        return failed

    def abort(self, message: AbortRequests) -> list[tuple[str, int]]:
        """Forget the requests that this ends; each of their choices, by id and index."""
        ids = list(self._waiting) if message.request_ids is None else message.request_ids
        ended = [self._waiting.pop(request_id)[0] for request_id in ids if request_id in self._waiting]
        return [(request.request_id, index) for request in ended for index in range(request.sampling_params.n)]
