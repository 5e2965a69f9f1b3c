"""The tokenizer, loaded on a thread while the server already answers: token-in/token-out hardly needs it."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rollout.sampling.grammar import load_tokenizer
from rollout.sampling.params import ParameterError
from rollout.server.errors import ApiError
from rollout.server.text.detokenizer import Vocabulary

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)


def _will_pass(error: BaseException | None) -> bool:
    """Whether it, or what it was raised for, says more of the machine's moment than of the model's folder."""
    while error is not None:
        number = re.search(r"\(os error (\d+)\)", str(error))  # as the tokenizers library, in Rust, words it
        if isinstance(error, MemoryError) or (error.errno if isinstance(error, OSError) else None) in _PASSING:
            return True
        if number is not None and int(number[1]) in _PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False


class BackgroundTokenizer:
    """`await get()` gives transformers' tokenizer of `model`, or None where it has none or none is wanted.

    It renders chats by `chat_template`, a file or a Jinja text, where there is one.
    """

    def __init__(self, model: str, *, enabled: bool, chat_template: str | None = None) -> None:
        self._model, self._chat_template = model, chat_template
        self._loaded: Future[Vocabulary | None] = Future()
        if enabled:  # on a daemon thread, not on asyncio's pool: the end of the loop would wait for that
            threading.Thread(target=self._load, name="tokenizer", daemon=True).start()
        else:
            self._loaded.set_result(None)

    def _load(self) -> None:
        pause_s = _RETRY_S
        while True:
            try:
                tokenizer = load_tokenizer(self._model)
                if (template := self._chat_template) is not None:
                    tokenizer.chat_template = template if "{" in template else Path(template).read_text()
                self._loaded.set_result(Vocabulary(tokenizer))
                gc.freeze()  # it and all that it imports stay
                return
            except Exception as error:  # whatever transformers raises on such a folder: token ids need no tokenizer
                if not _will_pass(error):
                    logger.warning("No tokenizer for %s, so only token ids are served: %s", self._model, error)
                    self._loaded.set_result(None)
                    return
                logger.warning("The tokenizer can't be loaded now, again in %g s: %s", pause_s, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

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
    """The token sequences that a bad word may be: as it opens a text, and as it follows a space.

    What is white space alone is banned as it is. Source: vLLM's `SamplingParams.update_from_tokenizer`, which leaves
    out the second form where it has another number of tokens. Raises ParameterError without a tokenizer.
    """
    if tokenizer is None:
        raise ParameterError(
            "bad_words need a tokenizer, and this server has none; ban ids by logit_bias.", "bad_words"
        )
    sequences: list[list[int]] = []
    for word in bad_words:
        text = word.lstrip() or word
        bare = tokenizer.encode(text, add_special_tokens=False)
        if not bare:
            raise ParameterError(f"bad_words holds a word without a token: {word!r}", "bad_words")
        sequences.append(bare)
        spaced = tokenizer.encode(" " + text, add_special_tokens=False)
        if spaced[-len(bare) :] != bare:  # else the first form ends it too
            sequences.append(spaced)
    return sequences
