"""TRL's AsyncGRPOTrainer, as it comes from PyPI, against `rollout serve`, on a CPU.

    pip install 'rollout-engine[trl]'
    python examples/trl_async_grpo.py --model path/to/model --max-steps 30 --output trl-output

Teaches the demo's task: an answer of exactly ten words. Starts its own server; requests are in flight all the time, and
each optimizer step pushes its weights into them without a pause.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import datasets
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import rollout
from rollout.demo import task
from trainer_bridge.integrations.trl import RolloutWorker, WeightTransfer, log_gap
from trainer_bridge.loop import dashboard

GAP = "sampling/sampling_logp_difference/mean"
PANELS = [
    dashboard.Panel("reward", ("reward",), "mean of the step's answers"),
    dashboard.Panel("rollout/trainer gap", (GAP,), "|log π_θ - log π_old|"),
    dashboard.Panel("staleness", ("sample/staleness_mean",), "commits behind"),
]


class TenWords:
    """The demo's reward, as TRL calls it."""

    __name__ = "ten_words"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, *, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """One reward an answer; one that was cut off gets none."""
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        ended = [ids[-1] == self._tokenizer.eos_token_id for ids in completion_ids]
        return [task.reward(text, finished) for text, finished in zip(texts, ended, strict=True)]


class Report(TrainerCallback):
    """One line a step, and all of TRL's numbers for the plot."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """TRL logs once a step, and once more at the end, without a reward."""
        if logs and "reward" in logs:
            self.steps.append({dashboard.STEP: state.global_step, **logs})
            print(
                f"step {state.global_step:3}  reward {logs['reward']:.3f}  gap {logs[GAP]:.5f}  "
                f"staleness {logs['sample/staleness_mean']:.2f}  crossed by a push {logs['version/mixed_frac']:.0%}",
                flush=True,
            )


def main() -> None:
    """Train, print, and leave the numbers and a plot in --output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a transformers folder with a tokenizer")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--output", type=Path, help="a folder for log.json, reward.png and the server's log")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        train(options, options.output or Path(scratch))


def train(options: argparse.Namespace, output: Path) -> None:
    """A server, a trainer on it, `options.max_steps` steps."""
    output.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    server_threads = max(1, (os.cpu_count() or 2) // 2)
    torch.set_num_threads(server_threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    flags: dict[str, Any] = {"tokens_only": True, "device": "cpu", "dtype": "float32", "num_threads": server_threads}
    flags |= {"logprobs_mode": "processed_logprobs", "kv_policy": "recompute", "max_model_len": 512}
    with rollout.serve(options.model, log=output / "server.log", **flags) as client:
        args = AsyncGRPOConfig(
            str(output / "checkpoints"),
            vllm_server_base_url=client.base_url,
            max_steps=options.max_steps,
            learning_rate=options.learning_rate,
            adam_beta2=0.95,
            num_generations=8,
            max_completion_length=24,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,  # four groups a step
            token_budget=0,  # micro-batches of a fixed number of samples
            max_inflight_tasks=24,
            max_staleness=3,
            queue_maxsize=32,
            epsilon_high=0.28,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=options.seed,
        )
        dataset = datasets.Dataset.from_list([{"prompt": prompt(tokenizer, question)} for question in task.QUESTIONS])
        report = Report()
        trainer = AsyncGRPOTrainer(
            options.model,
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[report],
            weight_transfer=WeightTransfer(args),
            rollout_worker=RolloutWorker(args, dataset.shuffle(options.seed), TenWords(tokenizer), tokenizer),
        )
        trainer.remove_callback(transformers.PrinterCallback)
        log_gap(trainer)
        trainer.train()
    (output / "log.json").write_text(json.dumps(report.steps, indent=2) + "\n")
    quarter = max(1, len(report.steps) // 4)
    rewards = [step["reward"] for step in report.steps]
    first, last, gap = fmean(rewards[:quarter]), fmean(rewards[-quarter:]), fmean(step[GAP] for step in report.steps)
    print(f"reward {first:.3f} (first quarter of the steps) -> {last:.3f} (last), mean gap {gap:.5f}")
    if options.output:
        dashboard.plot(report.steps, output / "reward.png", PANELS)


def prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> Any:
    """Messages, or plain text for a model that has no chat template."""
    if tokenizer.chat_template is None:
        return question
    return [{"role": "system", "content": task.SYSTEM}, {"role": "user", "content": question}]


if __name__ == "__main__":
    main()
