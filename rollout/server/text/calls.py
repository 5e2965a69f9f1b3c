"""Tool calls and reasoning in the text of a chat, found as it comes.

Every reader takes each character a constant number of times, whatever the pieces that it comes in; and any cut of a
text into pieces gives what the whole gives. What isn't well formed stays text.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field

from rollout.server.text.call_formats import CallFormat, ReasoningFormat, ToolCall, Tools, call_from_object


@dataclass
class Part:
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


_PYTHON_TAG = "<|python_tag|>"
_MAX_SPACE = 64  # before a mark that must come first
_PIECE = 4096


class _Until:
    """Takes text up to a mark; what may be the mark's beginning is held back."""

    def __init__(self, mark: str) -> None:
        self._mark, self._held = mark, ""

    def take(self, text: str) -> tuple[str, str | None]:
        """What comes before the mark, and what after it: None where it hasn't come."""
        text = self._held + text
        before, found, after = text.partition(self._mark)
        if found:
            self._held = ""
            return before, after
        most = min(len(text), len(self._mark) - 1)
        held = next((n for n in range(most, 0, -1) if self._mark.startswith(text[len(text) - n :])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


class _Reasoning:
    """The reasoning before an answer: `take` gives what is new of it, and the text after it."""

    def __init__(self, format: ReasoningFormat, begun: bool) -> None:
        self._format, self._within = format, begun or format.always
        self._start: str | None = ""  # what may be white space and the first mark
        self._until = _Until(format.end)
        self._ended = False

    def take(self, text: str) -> tuple[str, str]:
        if self._ended:
            return "", text
        if self._start is not None:
            self._start += text
            lead = self._start.lstrip()
            near = len(self._start) - len(lead) <= _MAX_SPACE
            if near and len(lead) < len(self._format.begin) and self._format.begin.startswith(lead):
                return "", ""
            text, self._start = self._start, None
            if near and lead.startswith(self._format.begin):
                text, self._within = lead[len(self._format.begin) :], True
        if not self._within:
            self._ended = True
            return "", text
        reasoning, after = self._until.take(text)
        self._ended = after is not None
        return reasoning, after or ""

    def end(self) -> tuple[str, str]:
        left, self._start = self._start or "", None
        held = left + self._until.end()
        return (held, "") if self._within and not self._ended else ("", held)


class _Calls:
    """The calls in a text: `take` gives what is new of the content, and whole calls."""

    def __init__(self, format: CallFormat, tools: Tools) -> None:
        self._format, self._tools = format, tools
        self._begin = _Until(format.begin)
        self._end = _Until(format.end) if format.end is not None else None
        self._body: list[str] | None = None  # of the call under way
        self._made = 0
        self._space: list[str] | None = None  # after a call, content as long as it is white space
        self._lead = ""
        self._start: str | None = "" if format.alone else None
        self._plain = False

    def take(self, text: str) -> Part:
        part = Part()
        for start in range(0, len(text), _PIECE):  # each mark copies what is left of a piece
            rest: str | None = text[start : start + _PIECE]
            while rest:
                rest = self._step(rest, part)
        return part

    def _step(self, text: str, part: Part) -> str | None:
        if self._plain:
            part.content += text
            return None
        if self._start is not None:
            self._start += text
            bare = self._start.lstrip()
            near = len(self._start) - len(bare) <= _MAX_SPACE
            lead = bare.removeprefix(_PYTHON_TAG)
            if near and (not lead or _PYTHON_TAG.startswith(lead)):
                return None
            text, self._start = self._start, None
            if not near or not lead.startswith(self._format.begin):
                self._plain = True
                return text
            self._lead = text[: len(text) - len(lead)]
            text = lead
        if self._body is None:
            before, after = self._begin.take(text)
            self._say(before, part)
            if after is not None:
                self._body = []
            return after
        if self._end is None:
            self._body.append(text)
            return None
        before, after = self._end.take(text)
        self._body.append(before)
        if after is not None:
            self._close(self._format.end or "", part)
        return after

    def _say(self, text: str, part: Part) -> None:
        """Content; white space alone between calls is none."""
        if self._space is not None:
            self._space.append(text)
            if not text.strip():
                return
            text, self._space = "".join(self._space), None
        part.content += text

    def _close(self, end: str, part: Part) -> None:
        body, self._body = "".join(self._body or ()), None
        try:
            calls = self._format.read(body, self._tools)
        except (ValueError, RecursionError):
            self._say(self._lead + self._format.begin + body + end, part)
            return
        for call in calls:
            call.index, call.id = self._made, f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
            self._made += 1
        self._space = []
        part.calls += calls

    def end(self) -> Part:
        part = Part()
        if self._start:
            part.content, self._start = self._start, None
        if self._body is None:
            self._say(self._begin.end(), part)
            return part
        if self._end is not None:
            self._body.append(self._end.end())
        self._close("", part)
        return part


class _Required:
    """An answer that is a JSON list of calls."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def take(self, text: str) -> Part:
        self._text.append(text)
        return Part()

    def end(self) -> Part:
        text = "".join(self._text)
        try:
            calls = [call_from_object(item) for item in json.loads(text)]
        except (ValueError, TypeError, RecursionError):  # cut off by a length
            return Part(content=text)
        for index, call in enumerate(calls):
            call.index, call.id = index, f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
        return Part(calls=calls)


class _Named:
    """An answer that is the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def take(self, text: str) -> Part:
        if not text:
            return Part()
        name, self._name = self._name, None
        return Part(calls=[ToolCall(name, text, 0, name and f"chatcmpl-tool-{uuid.uuid4().hex[:16]}")])

    def end(self) -> Part:
        return Part()


class AnswerReader:
    """The parts of one answer. With `required` it is a list of calls, with `named` the arguments of that tool; `begun`:
    the prompt ends within reasoning."""

    def __init__(
        self,
        *,
        calls: CallFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        tools: Tools | None = None,
        required: bool = False,
        named: str | None = None,
        begun: bool = False,
    ) -> None:
        self._reasoning = None if reasoning is None else _Reasoning(reasoning, begun)
        self._calls: _Calls | _Required | _Named | None = None
        if named is not None:
            self._calls = _Named(named)
        elif required:
            self._calls = _Required()
        elif calls is not None:
            self._calls = _Calls(calls, tools or {})

    def take(self, text: str) -> Part:
        """What this text adds."""
        reasoning, text = ("", text) if self._reasoning is None else self._reasoning.take(text)
        part = Part(content=text) if self._calls is None else self._calls.take(text)
        part.reasoning = reasoning
        return part

    def end(self) -> Part:
        """What was held back at the end."""
        reasoning, text = ("", "") if self._reasoning is None else self._reasoning.end()
        part = self.take_after(text)
        last = Part() if self._calls is None else self._calls.end()
        return Part(reasoning, part.content + last.content, part.calls + last.calls)

    def take_after(self, text: str) -> Part:
        """What text after the reasoning adds."""
        return Part(content=text) if self._calls is None else self._calls.take(text)
