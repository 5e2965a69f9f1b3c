"""The tokenizer, loaded on a thread while the server already answers: token-in/token-out hardly needs it."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollout.sampling.params import ParameterError
from rollout.server.errors import ApiError
from rollout.server.text.detokenizer import Vocabulary

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0


def _load(model: str) -> Any:
    from transformers import AutoTokenizer  # imports torch: seconds, and only here

    path = Path(model)
    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(model)


class BackgroundTokenizer:
    """`await get()` gives transformers' tokenizer of `model`, or None where it has none or none is wanted."""

    def __init__(self, model: str, *, enabled: bool) -> None:
        self._model = model
        self._loaded: Future[Vocabulary | None] = Future()
        if enabled:  # on a daemon thread, not on asyncio's pool: the end of the loop would wait for that
            threading.Thread(target=self._load, name="tokenizer", daemon=True).start()
        else:
            self._loaded.set_result(None)

    def _load(self) -> None:
        try:
            self._loaded.set_result(Vocabulary(_load(self._model)))
        except Exception as error:  # whatever transformers raises on such a folder: token ids need no tokenizer
            logger.warning("No tokenizer for %s, so only token ids are served: %s", self._model, error)
            self._loaded.set_result(None)

    async def get(self) -> Any:
        """The tokenizer once it is loaded. Raises as `vocabulary` does."""
        vocabulary = await self.vocabulary()
        return None if vocabulary is None else vocabulary.tokenizer

    async def vocabulary(self) -> Vocabulary | None:
        """What its ids stand for; None where there is no tokenizer. Raises a 503 while it loads for two minutes."""
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._loaded)), _LOAD_TIMEOUT_S)
        except TimeoutError:
            message = f"The tokenizer was not loaded within {_LOAD_TIMEOUT_S:g} s; retry."
            raise ApiError(503, message, headers={"Retry-After": "10"}) from None


def bad_words_token_ids(tokenizer: Any, bad_words: list[str]) -> list[list[int]]:
    """The token sequences a bad word may take: as it opens a text, and after a space where that is as long.

    Same rule as vLLM's `SamplingParams.update_from_tokenizer`. Raises ParameterError without a tokenizer.
    """
    if tokenizer is None:
        raise ParameterError(
            "bad_words need a tokenizer, and this server has none; ban ids by logit_bias.", "bad_words"
        )
    sequences: list[list[int]] = []
    for word in bad_words:
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not bare:
            raise ParameterError(f"bad_words holds a word without a token: {word!r}", "bad_words")
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        sequences.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            sequences.append(spaced)
    return sequences
