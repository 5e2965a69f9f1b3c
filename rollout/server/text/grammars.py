"""Structured outputs at the door: a grammar is read and compiled for trial, on a thread, before it is sent on."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from rollout.messages import EngineReady
from rollout.sampling.grammar import GrammarCompiler, as_grammar
from rollout.sampling.params import ParameterError, StructuredOutputsParams
from rollout.server.errors import ApiError

_TIMEOUT_S = 30.0  # one takes seconds at most: this is for those before it
_KNOWN = 64


class GrammarChecker:
    """One thread that compiles, so that hostile grammars wait for one another and for nobody else."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler: GrammarCompiler | None = None
        self._known: dict[bytes, str] = {}

    async def grammar(self, params: StructuredOutputsParams, tokenizer: Any, model: EngineReady, param: str) -> str:
        """As `check`, on the thread; also raises a 503 where others' keep it busy."""
        try:
            found = asyncio.get_running_loop().run_in_executor(
                self._thread, self.check, params, tokenizer, model, param
            )
            return await asyncio.wait_for(found, _TIMEOUT_S)
        except TimeoutError:
            message = f"Other requests' structured outputs kept the compiler busy for {_TIMEOUT_S:g} s; retry."
            raise ApiError(503, message, headers={"Retry-After": "10"}) from None

    def check(self, params: StructuredOutputsParams, tokenizer: Any, model: EngineReady, param: str) -> str:
        """The grammar that the engine gets; `tokenizer` is transformers'.

        Raises ParameterError, naming the field `param`, where it can't be had.
        """
        try:
            encoded = msgspec.json.encode(params)
        except RecursionError:
            raise ParameterError(f"{param} is nested too deeply.", param) from None
        if (known := self._known.get(encoded)) is not None:
            return known
        try:
            grammar = as_grammar(params)
            if self._compiler is None:
                self._compiler = GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
            self._compiler.compile(grammar)
        except ParameterError as error:
            raise ParameterError(str(error), param) from None
        except ValueError as error:
            raise ParameterError(f"{param} can't be served: {error}", param) from None
        if len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]
        self._known[encoded] = grammar
        return grammar
