"""From token ids to text, a token at a time, and the stop strings in it.

Every token is read by itself and in order, so text and stop do not depend on how the tokens arrive. The work for a
token is bounded, whatever came before it.
"""

from __future__ import annotations

import bisect
import codecs
import re
from collections.abc import Callable, Sequence
from typing import Any

from rollout.outputs import FinishReason
from rollout.sampling.params import SamplingParams

_REPLACEMENT = "\ufffd"
# Tokens that may wait for the rest of a character, which has at most four bytes; also how far back context goes.
_MAX_HELD = 8
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_UTF8 = codecs.getincrementaldecoder("utf-8")


class _Bytes(dict[int, bytes | None]):
    """The bytes that a token stands for, None where only the tokenizer's decoder can say; found as they are needed.

    They are known of byte-level tokens and of SentencePiece's `<0x0A>`; ids that are no token stand for nothing.
    """

    def __init__(self, tokenizer: Any) -> None:
        # Both are loaded with the tokenizer; imported at the top, they would delay the server's start by seconds.
        from tokenizers import decoders
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._byte_of: dict[str, int] | None = None
        if isinstance(getattr(fast, "decoder", None), decoders.ByteLevel):
            self._byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        self._token: Callable[[int], str | None]
        if fast is not None:
            self._token = fast.id_to_token
        else:
            self._token = {token_id: token for token, token_id in tokenizer.get_vocab().items()}.get

    def __missing__(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        self[token_id] = found = b"" if token is None else self._find(token_id, token)
        return found

    def _find(self, token_id: int, token: str) -> bytes | None:
        if self._byte_of is not None:
            if all(char in self._byte_of for char in token):
                return bytes(self._byte_of[char] for char in token)
            return token.encode()  # an added token
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None and self._tokenizer.decode([token_id]) != token:
            return bytes.fromhex(byte[1])
        return None


class Vocabulary:
    """What a tokenizer's ids stand for. `tokenizer` is one of transformers', fast or slow."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self.added: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        special = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special.union(tokenizer.all_special_ids))
        self.bytes_of = _Bytes(tokenizer)
        self._pieces: dict[int, tuple[str, bytes]] = {}
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special ones included, as the tokenizer says it, with nothing cleaned up."""
        if self._fast is not None:
            return str(self._fast.decode(token_ids, skip_special_tokens=False))
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token_id: int) -> tuple[str, bytes]:
        """The text of one token inside a text, and its bytes: those of several tokens may make one character."""
        if (found := self._pieces.get(token_id)) is not None:
            return found
        data = self.bytes_of[token_id]
        if data is None:
            text = _added(self.decode(self._before), self.decode([*self._before, token_id]))
            data = text.encode()
        else:
            text = data.decode("utf-8", "replace")
        self._pieces[token_id] = piece = (text, data)
        return piece


def _added(before: str, after: str) -> str:
    """What a token has added to a text. (A decoder that also changes what came before it can't be followed there.)"""
    if after.startswith(before):
        return after[len(before) :]
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return after[same:]


class Detokenizer:
    """The text of one choice, which goes on from its prompt (so that a space which only opens a text is kept).

    `read` gives what a token adds: nothing yet where a character is incomplete. What is invalid, or incomplete at the
    end, which `flush` gives, becomes U+FFFD. All of it joined is what the tokenizer makes of the output as a whole;
    only in a run of SentencePiece's byte tokens that is not valid UTF-8 does it spoil the valid characters too.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._bytes_of = vocabulary.bytes_of
        self._skipped: frozenset[int] = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._spaces = spaces_between_special_tokens
        self._utf8 = _UTF8("replace")
        # The last ids whose text has been given, and those after them, of a character that is incomplete.
        before = prompt_token_ids[-_MAX_HELD:]
        self._context = [i for i in before if i not in self._skipped and self._bytes_of[i] != b""]
        self._held: list[int] = []

    def read(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skipped:
            return ""
        data = self._bytes_of[token_id]
        if data == b"":
            return ""
        if data is not None:
            text = self._utf8.decode(data)
            if self._held:
                text = self._release(*self._decode()) + text
            self._context = [token_id]
            return text
        text = self._utf8.decode(b"", final=True)
        added = self._vocabulary.added
        if not self._spaces and token_id in added and self._context[-1:] and self._context[-1] in added:
            self._context = [token_id]
            return text + added[token_id]
        self._held.append(token_id)
        before, after = self._decode()
        if len(self._held) < _MAX_HELD and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return text
        return text + self._release(before, after)

    def flush(self) -> str:
        """What is left at the end."""
        return (self._release(*self._decode()) if self._held else "") + self._utf8.decode(b"", final=True)

    def _decode(self) -> tuple[str, str]:
        return self._vocabulary.decode(self._context), self._vocabulary.decode([*self._context, *self._held])

    def _release(self, before: str, after: str) -> str:
        self._context, self._held = self._held, []
        return _added(before, after)


class _Beginning:
    """What a text may end with: the first `length` characters of the sorted stop strings `first` to `last` - 1.

    `shorter` is the longest end of it that is such a beginning too, `complete` the stop string that it ends with, and
    `held` how much of it may still become one: its own length, or less where it is a whole stop string.
    """

    __slots__ = ("complete", "first", "held", "last", "length", "longer", "shorter")

    def __init__(self, first: int, last: int, length: int) -> None:
        self.first, self.last, self.length = first, last, length
        self.longer: dict[str, _Beginning] = {}
        self.shorter: _Beginning | None = None
        self.complete: str | None = None
        self.held: _Beginning = self


class StopMatcher:
    """Finds the first of some stop strings to be completed in a text that comes in pieces.

    Text is held back only while it may still become a stop string; with `include` none is, since a match stays in.
    `matched` is the stop string found; of several that end with the same character, the first in the list. `tail` is
    the longest end of the text that begins a stop string.

    This is the automaton of Aho and Corasick (Efficient String Matching, 1975): a character takes a constant number of
    steps on average, however many stop strings there are and however they repeat themselves. Its states are made as
    the text reaches them, so that strings that are never begun cost nothing.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.matched: str | None = None
        self._rank = {stop: place for place, stop in reversed(list(enumerate(stops)))}
        self._stops = sorted(self._rank)
        self._firsts = {stop[0] for stop in stops}
        self._include = include
        self._start = self._end = _Beginning(0, len(self._stops), 0)

    @property
    def tail(self) -> str:
        """The longest end of the text that begins a stop string, and is not all of one."""
        return self._stops[self._end.first][: self._end.length] if self._end.length else ""

    def push(self, text: str, *, armed: bool) -> str:
        """Take more text; what of the text can be given out. A match that ends in it counts only if `armed`."""
        before = end = self._end
        if end is self._start and self._firsts.isdisjoint(text):
            return text
        for count, char in enumerate(text, start=1):
            end = self._next(end, char)
            if armed and end.complete is not None:
                self.matched, self._end = end.complete, self._start
                return text[:count] if self._include else self._head(before, text, count - len(end.complete))
        self._end = end.held
        return text if self._include else self._head(before, text, len(text) - self._end.length)

    def flush(self) -> str:
        """What was held back and didn't become a stop string."""
        text, self._end = self.tail, self._start
        return "" if self._include else text

    def _head(self, before: _Beginning, text: str, end: int) -> str:
        """What was held back, and `text`, up to this place of `text`; one below 0 counts from its start backwards."""
        held = self._stops[before.first][: before.length + min(end, 0)] if before.length else ""
        return held + text[: max(end, 0)]

    def _next(self, end: _Beginning, char: str) -> _Beginning:
        """The longest beginning that the text ends with after one more character."""
        at: _Beginning | None = end
        while at is not None:
            if (longer := self._longer(at, char)) is not None:
                return longer
            at = at.shorter
        return self._start

    def _longer(self, begun: _Beginning, char: str) -> _Beginning | None:
        """The beginning and one more character, where a stop string goes on with it."""
        if (known := begun.longer.get(char)) is not None:
            return known

        def next_char(stop: str) -> str:
            return stop[begun.length : begun.length + 1]

        first = bisect.bisect_left(self._stops, char, begun.first, begun.last, key=next_char)
        last = bisect.bisect_right(self._stops, char, first, begun.last, key=next_char)
        if first == last:
            return None
        made = begun.longer[char] = _Beginning(first, last, begun.length + 1)
        made.shorter = self._start if begun.shorter is None else self._next(begun.shorter, char)
        whole = [self._stops[first]] if len(self._stops[first]) == made.length else []
        ended = [stop for stop in (*whole, made.shorter.complete) if stop is not None]
        made.complete = min(ended, key=self._rank.__getitem__, default=None)
        if whole and last - first == 1:
            made.held = made.shorter.held
        return made


class TextReader:
    """The text of one choice up to its stop string, if any. `stop` is the one that ended it.

    Stop strings are not matched before `min_tokens` tokens are there and one more. The text of the token that ended the
    choice in the engine (EOS, a stop token) belongs to it only with `include_stop_str_in_output`, as in vLLM.
    With the last four ids that another has `read`, its `tail` and its `length`, a reader goes on where that one was
    left. `length` counts the characters of all that was read, also where a stop string may have begun: what the next
    token adds begins there, or a character whose first bytes have come does.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        read: Sequence[int] = (),
        tail: str = "",
        length: int = 0,
    ) -> None:
        self.length = length
        self._detokenizer = Detokenizer(
            vocabulary,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self._matcher.push(tail, armed=False)
        for token_id in read:
            self._detokenizer.read(token_id)
        self._include = params.include_stop_str_in_output
        self._unarmed = params.min_tokens

    @property
    def tail(self) -> str:
        """The end of the text in which a stop string may have begun: a reader made with it goes on from there."""
        return self._matcher.tail

    @property
    def stop(self) -> str | None:
        """The stop string that was completed; nothing may be read after it."""
        return self._matcher.matched

    def read(self, token_id: int | None, finish_reason: FinishReason | None) -> str:
        """What can be given out after this step of the engine: a token or none, the end or not."""
        text = ""
        if token_id is not None:
            armed = self._unarmed <= 0
            self._unarmed -= 1
            if self._include or finish_reason != FinishReason.STOP:
                added = self._detokenizer.read(token_id)
                self.length += len(added)
                text = self._matcher.push(added, armed=armed)
        if finish_reason is not None and self.stop is None:
            text += self._matcher.push(self._detokenizer.flush(), armed=self._unarmed < 0)
            if self.stop is None:
                text += self._matcher.flush()
        return text
