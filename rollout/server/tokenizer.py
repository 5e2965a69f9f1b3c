"""The tokenizer, loaded on a thread while the server already answers: token-in/token-out hardly needs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout.sampling_params import ParameterError

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
        self._loading = asyncio.create_task(self._load()) if enabled else None

    async def _load(self) -> Any:
        try:
            return await asyncio.to_thread(_load, self._model)
        except Exception as error:  # whatever transformers raises on such a folder: token ids need no tokenizer
            logger.warning("No tokenizer for %s, so only token ids are served: %s", self._model, error)
            return None

    async def get(self) -> Any:
        """The tokenizer once it is loaded. Raises TimeoutError after two minutes."""
        if self._loading is None:
            return None
        return await asyncio.wait_for(asyncio.shield(self._loading), _LOAD_TIMEOUT_S)


async def bad_words_token_ids(tokenizer: Any, bad_words: list[str]) -> list[list[int]]:
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


async def decode_each(tokenizer: Any, token_ids: Iterable[int]) -> dict[int, str | None]:
    """The text of each of these ids by itself; None for each without a tokenizer."""
    unique = sorted(set(token_ids))
    if tokenizer is None:
        return dict.fromkeys(unique)
    texts = await asyncio.to_thread(tokenizer.batch_decode, [[token_id] for token_id in unique])
    return dict(zip(unique, texts, strict=True))
