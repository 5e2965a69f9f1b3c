"""What others ask for by name, shown on a model of yours in seconds, in process.

python examples/claims.py path/to/model [no-pause | versions | atomic | cache]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import rollout
from trainer_bridge import WeightPushError

PROMPT = list(range(5, 45))
LONG = {"max_tokens": 64, "ignore_eos": True}


def changed(policy: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The policy's weights, each scaled a little: what an optimizer step would leave."""
    return {name: tensor * 1.01 for name, tensor in policy.state_dict().items() if tensor.is_floating_point()}


def no_pause(llm: rollout.LLM, policy: PreTrainedModel) -> str:
    """Tokens are sampled while updates are received, checked and committed, one after the other."""
    tokens, updates, during = 0, 0, 0
    weights, began = changed(policy), threading.Event()

    def update() -> None:
        nonlocal updates, during
        began.wait(60)
        before = tokens
        while during < 10:  # a small model's update takes less than a token
            llm.update_weights(weights, version=f"update-{updates}")
            updates, during = updates + 1, tokens - before

    trainer = threading.Thread(target=update)
    trainer.start()
    while trainer.is_alive():
        for piece in llm.stream(PROMPT, LONG):
            tokens += len(piece.choices[0].token_ids)
            began.set()
    commit = llm.weight_info()["commit_seconds"]
    return f"{during} tokens were sampled during {updates} updates; the last commit took {1000 * commit:.2f} ms"


def versions(llm: rollout.LLM, policy: PreTrainedModel) -> str:
    """Each token says which weights sampled it."""
    pieces = []
    for piece in llm.stream(PROMPT, LONG):
        pieces.append(piece)
        if len(pieces) in (20, 40):
            llm.update_weights(changed(policy), version=f"step-{len(pieces)}")
    return "; ".join(f"tokens {s.start} to {s.end}: {s.version}, epoch {s.epoch}" for s in pieces[-1].choices[0].spans)


def atomic(llm: rollout.LLM, policy: PreTrainedModel) -> str:
    """Weights that aren't whole and finite change nothing."""
    before = llm.generate(PROMPT, {"max_tokens": 16, "temperature": 0, "logprobs": 0})
    weights = changed(policy)
    norm = next(name for name, tensor in weights.items() if tensor.ndim == 1)
    refusals = []
    for broken in ({**weights, norm: weights[norm] * torch.nan}, {norm: weights[norm]}):
        try:
            llm.update_weights(broken, version="broken")
        except WeightPushError as error:
            refusals.append(str(error)[:90])
    after = llm.generate(PROMPT, {"max_tokens": 16, "temperature": 0, "logprobs": 0})
    if [answer.choices for answer in after] != [answer.choices for answer in before]:
        raise SystemExit("a refused update has changed an answer")
    return "; ".join(refusals) + "; the same answer, bit for bit, before and after"


def cache(llm: rollout.LLM, policy: PreTrainedModel) -> str:
    """No key or value outlives the weights that computed it."""

    def hits() -> int:
        before = llm.stats().get("prefix_hit_tokens", 0)
        llm.generate(PROMPT, {"max_tokens": 1})
        return llm.stats().get("prefix_hit_tokens", 0) - before

    hits()
    again = hits()
    llm.update_weights(changed(policy), version="new")
    return f"asked again, {again} of {len(PROMPT)} prompt tokens came from the cache; after an update, {hits()}"


CLAIMS: dict[str, Callable[[rollout.LLM, PreTrainedModel], str]] = {
    "no-pause": no_pause,
    "versions": versions,
    "atomic": atomic,
    "cache": cache,
}


def main(folder: str, names: list[str]) -> None:
    """Print what became of each."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with rollout.LLM(folder, dtype="float32", max_model_len=256, max_num_seqs=8, num_gpu_blocks_override=128) as llm:
        for name in names or CLAIMS:
            print(f"{name}: {CLAIMS[name](llm, policy)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
