"""An agent that uses a calculator over several turns, and the training sequence that comes of it.

python examples/tool_agent.py path/to/model [--url http://127.0.0.1:8000] [--question "What is 17 times 24?"]

Tokens go in and come out: the next prompt is what was really sampled and inserted so far, never text that is tokenized
again, so that loss mask, logprobs and versions stay aligned, and each turn finds all before it in the prefix cache.
--chat does the same through /v1/chat/completions, whose answers carry the tokens, and makes sure that they agree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

import rollout
from trainer_bridge import RolloutClient
from trainer_bridge.score import replay

MAX_TURNS = 4
CALL = re.compile(r"calc\(([^()=]*)\)")
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
Messages = list[dict[str, str]]
SHOTS: Messages = [
    {"role": "system", "content": "You do arithmetic. Answer calc(EXPRESSION) first, and say the result then."},
    {"role": "user", "content": "What is 12 times 31?"},
    {"role": "assistant", "content": "calc(12*31)"},
    {"role": "user", "content": "calc(12*31) = 372"},
    {"role": "assistant", "content": "The result is 372."},
]


@dataclass
class Trajectory:
    """One training sequence. All lists have its length.

    `loss_mask` is true for tokens that the model sampled; `logprobs` and `versions` are theirs, 0.0 and None for tokens
    that were put in: the prompt, the template's, the tool's.
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)

    def insert(self, token_ids: Sequence[int]) -> None:
        """Add tokens that nobody sampled."""
        self._add(token_ids, False, [0.0] * len(token_ids), [None] * len(token_ids))

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[str]) -> None:
        """Add a turn's answer, all of it."""
        self._add(token_ids, True, logprobs, versions)

    def _add(
        self, token_ids: Sequence[int], sampled: bool, logprobs: Sequence[float], versions: Sequence[str | None]
    ) -> None:
        if not len(token_ids) == len(logprobs) == len(versions):
            raise ValueError(f"{len(token_ids)} tokens came with {len(logprobs)} logprobs and {len(versions)} versions")
        self.token_ids += token_ids
        self.loss_mask += [sampled] * len(token_ids)
        self.logprobs += logprobs
        self.versions += versions


def run_episode(
    client: RolloutClient,
    prompt: Sequence[int],
    reply: Callable[[list[int]], list[int] | None],
    sampling_params: Mapping[str, Any],
    max_turns: int = MAX_TURNS,
) -> Trajectory:
    """Turns until `reply` has none: it gets an answer's token ids and gives what comes before the next answer."""
    trajectory = Trajectory()
    trajectory.insert(prompt)
    for _ in range(max_turns):
        (choice,) = client.generate(trajectory.token_ids, {**sampling_params, "logprobs": 0}).choices
        versions = replay.versions_per_token(choice.spans, len(choice.token_ids))
        trajectory.append(choice.token_ids, choice.logprobs or [], versions)
        inserted = reply(choice.token_ids) if choice.finish_reason == "stop" else None
        if inserted is None:
            break
        trajectory.insert(inserted)
    return trajectory


def run_chat_episode(
    client: RolloutClient,
    messages: Messages,
    reply: Callable[[str], str | None],
    sampling_params: Mapping[str, Any],
    max_turns: int = MAX_TURNS,
) -> Trajectory:
    """The same by messages. Raises ValueError where the server's rendering of the chat isn't what was sampled: such a
    sequence must not be trained on, its logprobs are those of other tokens."""
    trajectory, messages = Trajectory(), list(messages)
    wanted = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
    for turn in range(max_turns):
        answer = client.post("/v1/chat/completions", {"messages": messages, **sampling_params, **wanted})
        prompt, (choice,) = answer["prompt_token_ids"], answer["choices"]
        so_far = trajectory.token_ids
        if prompt[: len(so_far)] != so_far:
            at = next(i for i, token in enumerate(so_far) if i >= len(prompt) or prompt[i] != token)
            raise ValueError(f"turn {turn}: the chat was tokenized to other tokens than were sampled, from {at} on")
        trajectory.insert(prompt[len(so_far) :])
        ids = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        trajectory.append(ids, logprobs, replay.versions_per_token(choice["weight_versions"], len(ids)))
        content = choice["message"]["content"]
        said = reply(content) if choice["finish_reason"] == "stop" else None
        if said is None:
            break
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": said}]
    return trajectory


def calculator(text: str) -> str | None:
    """What the tool says to an answer, None where the answer doesn't call it."""
    call = CALL.search(text)
    if call is None:
        return None
    try:
        return f"{call[0]} = {_value(ast.parse(call[1].strip(), mode='eval').body):.10g}"
    except (ValueError, SyntaxError, ArithmeticError) as error:
        return f"{call[0]} failed: {error}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"only numbers and + - * / are understood, not {ast.unparse(node)!r}")


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    """The prompt of a chat, up to where the assistant speaks."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def ids_between(tokenizer: PreTrainedTokenizerBase, said: str) -> list[int]:
    """What the template puts between an answer's EOS and the next answer: a user's message.

    Special tokens stand at both ends, so no token of the text beside it could have merged into these.
    """
    marker = "ANSWER"
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": marker},
        {"role": "user", "content": said},
    ]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    _, _, between = text.partition(f"{marker}{tokenizer.eos_token}")
    if not between:
        raise ValueError(f"the chat template doesn't end an answer with {tokenizer.eos_token!r}: {text!r}")
    return list(tokenizer(between, add_special_tokens=False).input_ids)


def main() -> None:
    """Ask, and show what would be trained on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a transformers folder with a chat template")
    parser.add_argument("--url", help="a running server of it; default: one is started for the time being")
    parser.add_argument("--question", default="What is 17 times 24?")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help="also by /v1/chat/completions; both must agree")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    messages = [*SHOTS, {"role": "user", "content": args.question}]
    params = {"max_tokens": 32, "temperature": args.temperature, "seed": args.seed}

    def reply(answer: list[int]) -> list[int] | None:
        said = calculator(str(tokenizer.decode(answer, skip_special_tokens=True)))
        return None if said is None else ids_between(tokenizer, said)

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(rollout.serve(args.model) if args.url is None else RolloutClient(args.url))
        trajectory = run_episode(client, chat_ids(tokenizer, messages), reply, params)
        if args.chat:
            by_chat = run_chat_episode(client, messages, calculator, params)
            if by_chat.token_ids != trajectory.token_ids or by_chat.loss_mask != trajectory.loss_mask:
                raise SystemExit("the chat endpoint gave another sequence")
    show(trajectory, tokenizer)


def show(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the sequence: sampled tokens with their logprobs, inserted ones in brackets."""
    for token, sampled, logprob, version in zip(
        trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs, trajectory.versions, strict=True
    ):
        text = repr(str(tokenizer.decode([token])))
        print(f"{text:20} {logprob:8.3f}  {version}" if sampled else f"[{text}]")
    print(f"{sum(trajectory.loss_mask)} of {len(trajectory.token_ids)} tokens were sampled")


if __name__ == "__main__":
    main()
