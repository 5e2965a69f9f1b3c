"""examples/grpo.py and ppo.py: one step against the same step by hand, whole small runs, and what a run logs."""

from __future__ import annotations

import copy
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import grpo
import ppo
import pytest
import torch
from transformers import PreTrainedModel

from rollout.launch import serve
from tests.support import tiny_models, wandb_reader
from tests.support.wait import eventually
from trainer_bridge import RolloutClient
from trainer_bridge.client import Choice, Span
from trainer_bridge.integrations.wandb import coloured_html, workspace
from trainer_bridge.loop import checkpoint, dashboard
from trainer_bridge.push.publisher import Publisher
from trainer_bridge.rollouts import Prompt, RolloutGroup

FLAGS = ["--tokens-only", "--dtype", "float32", "--device", "cpu", "--num-threads", "1", "--return-sampling-mask"]
EXACT = ["--batch-invariant", "--logprobs-mode", "processed_logprobs", "--max-model-len", "256"]
FILTERED = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.8, "logprobs": 0, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(model, tmp_path_factory.mktemp("server") / "log", *FLAGS, *EXACT) as url:
        yield url


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[RolloutClient]:
    with RolloutClient(server) as client:
        yield client


def sample(client: RolloutClient, groups: int, n: int) -> list[RolloutGroup]:
    rng = random.Random(0)
    found = []
    for number in range(groups):
        prompt = [rng.randrange(2, 256) for _ in range(8 + number)]
        params = {**FILTERED, "seed": number}
        choices = client.generate(prompt, params, n=n).choices
        found.append(
            RolloutGroup(Prompt(prompt), params, choices, [rng.random() for _ in choices], "processed_logprobs")
        )
    return found


def moved(policy: PreTrainedModel, by: float) -> PreTrainedModel:
    """The policy some optimizer steps later."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return policy


def filtered_logprobs(policy: PreTrainedModel, group: RolloutGroup, *, masked: bool = True) -> list[torch.Tensor]:
    """Of each answer's tokens, from one stock forward pass for each on all its logits; the definition spelled out."""
    found = []
    for choice in group.choices:
        logits = policy(torch.tensor([group.prompt.token_ids + choice.token_ids])).logits[0]
        rows = []
        for t, token in enumerate(choice.token_ids):
            scaled = logits[len(group.prompt.token_ids) - 1 + t] / FILTERED["temperature"]
            assert choice.sampling_mask is not None
            support = choice.sampling_mask[t]
            assert support is not None
            among = scaled[support] if masked else scaled
            rows.append(scaled[token] - among.logsumexp(-1))
        found.append(torch.stack(rows))
    return found


def test_a_step_is_that_of_the_loss_by_hand_on_full_logits(client: RolloutClient, model: Path) -> None:
    with Publisher(client, tiny_models.model("llama")) as publisher:
        publisher.publish(4)
        old_groups = sample(client, 1, 4)
        publisher.publish(5)
        groups = old_groups + sample(client, 2, 4)[1:]
        lags = [torch.cat([publisher.lags(choice) for choice in group.choices]) for group in groups]
    policy = moved(tiny_models.model("llama"), by=0.02)
    by_hand = copy.deepcopy(policy)
    trainer = grpo.GRPO(policy, torch.optim.SGD(policy.parameters(), lr=1.0), max_lag=3, lag_decay=0.5)
    found = trainer.step(groups, lags, lambda: None)

    loss, ratios = torch.zeros(()), []
    for group, weight in zip(groups, (0.5, 1.0), strict=True):
        rewards = torch.tensor(group.rewards)
        spread = ((rewards - rewards.mean()) ** 2).mean().sqrt() + 1e-4
        for choice, reward, new in zip(group.choices, rewards, filtered_logprobs(by_hand, group), strict=True):
            advantage = (reward - rewards.mean()) / spread
            for t in range(len(choice.token_ids)):
                ratio = torch.exp(new[t] - choice.logprobs[t])  # type: ignore[index]
                ratios.append(float(ratio.detach()))
                capped = ratio if ratio < 4 else torch.tensor(4.0)
                clipped = min(max(capped, torch.tensor(0.8)), torch.tensor(1.28))
                loss = loss - weight * min(capped * advantage, clipped * advantage)
    loss = loss / len(ratios)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
    torch.optim.SGD(by_hand.parameters(), lr=1.0).step()
    assert min(ratios) < 0.8
    assert max(ratios) > 1.28  # the clip was at work
    for (name, got), expected in zip(policy.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert found["policy/loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert found["policy/grad_norm"] == pytest.approx(float(norm), abs=1e-4)
    assert found["ratio/mean"] == pytest.approx(sum(ratios) / len(ratios), abs=1e-5)
    assert (found["ratio/min"], found["ratio/max"]) == pytest.approx((min(ratios), max(ratios)), abs=1e-4)
    assert found["staleness/mean"] == 0.5


def test_ratios_average_to_one_where_masks_are_replayed_and_not_where_they_are_not(client: RolloutClient) -> None:
    with Publisher(client, tiny_models.model("llama")) as publisher:
        publisher.publish(0)
    groups = sample(client, 8, 32)
    old = torch.tensor([logprob for group in groups for logprob in group.logprobs])

    def mean_ratio(policy: PreTrainedModel, *, masked: bool) -> tuple[float, float]:
        """The mean over tokens, and its standard error."""
        with torch.no_grad():
            new = torch.cat([row for group in groups for row in filtered_logprobs(policy, group, masked=masked)])
        ratios = (new - old).exp()
        return float(ratios.mean()), float(ratios.std() / len(ratios) ** 0.5)

    same, other = tiny_models.model("llama"), moved(tiny_models.model("llama"), by=0.02)
    assert mean_ratio(same, masked=True)[0] == pytest.approx(1, abs=1e-4)
    mean, error = mean_ratio(other, masked=True)
    assert 1e-3 < error < 0.05
    assert abs(mean - 1) < 4 * error
    for policy in (same, other):
        mean, error = mean_ratio(policy, masked=False)
        assert mean < 1 - 10 * error
        assert mean < 0.95


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["example", *map(str, arguments)])
    module.main()


def test_grpo_learns_in_exact_mode_and_logs_what_a_researcher_wants(
    server: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))  # no key: offline without being told
    flags = [model, "--url", server, "--exact", "--output", tmp_path, "--top-p", "0.9", "--max-tokens", "12"]
    flags += ["--learning-rate", "2e-2"]
    run(grpo, monkeypatch, *flags, "--steps", "10")
    run(grpo, monkeypatch, *flags, "--steps", "16")
    printed = capsys.readouterr().out
    assert "step 0 is published" in printed
    assert "step 10 is published" in printed  # the second run went on where the first one ended

    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step[dashboard.STEP] for step in steps] == list(range(1, 17))
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 4 * 0.1
    gaps = [step["gap/current_max"] for step in steps if "gap/current_max" in step]
    assert len(gaps) > len(steps) / 2  # of most steps, as groups finish while they compute
    assert set(gaps) == {0.0}  # every bit
    assert max(step["gap/mean"] for step in steps) > 0  # of older versions' tokens
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")

    eventually(lambda: len(wandb_reader.history(tmp_path)) == len(steps), 60)  # another process writes the file
    logged = wandb_reader.history(tmp_path)
    assert [row["trainer/step"] for row in logged] == list(range(1, 17))
    names = {name for row in logged for name in row}
    drawn = {name for panels in dashboard.LAYOUT.values() for panel in panels for name in panel.metrics}
    assert {name for name in drawn if name not in names} == {dashboard.LAGS}  # a histogram: of several parts
    for row, step in zip(logged, steps, strict=True):
        assert {name: row[name] for name in step} == step
        assert sum(row["staleness/lags/values"]) == round(32 * row["length/mean"])
    assert {"server/num_requests_running", "server/weight_epoch", "server/kv_cache_usage_perc"} <= names
    pages = [path.read_text() for path in tmp_path.glob("wandb/offline-run-*/files/media/html/samples/rollouts_*.html")]
    assert len(pages) == 16
    for page in pages:
        assert page.count("<tr>") == 1 + 4
        answers = re.findall(
            r'(?:<span style="background:#\w+" title="step-\d+, tokens \d+ to \d+[^>]*>[\d ]+</span>)+', page
        )
        assert len(answers) == 4


def test_an_answer_that_crossed_a_push_has_two_colours() -> None:
    spans = [Span("step-1", 0, 2, 4, "current"), Span("<b>", 2, 3, 5, "mixed")]
    page = coloured_html(Choice(0, [7, 8, 9], None, None, spans, "stop", None), lambda ids: f"<{ids}>")
    found = re.findall(r'<span style="background:(#\w+)" title="([^"]*)">([^<]*)</span>', page)
    assert [row[1:] for row in found] == [
        ("step-1, tokens 0 to 2, epoch 4, cache current", "&lt;[7, 8]&gt;"),
        ("&lt;b&gt;, tokens 2 to 3, epoch 5, cache mixed", "&lt;[9]&gt;"),
    ]
    assert found[0][0] != found[1][0]


@pytest.mark.long
def test_ppo_learns_with_a_server_of_its_own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    flags = ["--learning-rate", "1e-2", "--max-tokens", "12", "--top-k", "50", "--lag-decay", "0.7"]
    run(ppo, monkeypatch, model, "--output", tmp_path, "--steps", "14", *flags)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.1
    values = [step["policy/value_loss"] for step in steps]
    assert values[-1] < values[0] / 2  # the head knows what an answer is worth by now
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    assert state is not None
    assert state["trainer"]["value_head"]["weight"].abs().sum() > 0


def test_a_server_of_other_settings_is_refused(
    server: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {"logprobs_mode": "raw_logprobs", "batch_invariant": False}
    monkeypatch.setattr(RolloutClient, "weight_info", lambda _: info)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(SystemExit, match="reports raw_logprobs: serve with --logprobs-mode processed_logprobs"):
        run(grpo, monkeypatch, model, "--url", server, "--output", tmp_path)
    info["logprobs_mode"] = "processed_logprobs"
    with pytest.raises(SystemExit, match="isn't batch-invariant: serve with --batch-invariant, or leave out --exact"):
        run(grpo, monkeypatch, model, "--url", server, "--output", tmp_path, "--exact")


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")  # theirs
def test_the_saved_view_has_the_layouts_sections_and_panels() -> None:
    spec = workspace("someone", "rollout-grpo")._to_model().model_dump()
    sections = spec["spec"]["section"]["panel_bank_config"]["sections"]
    assert [section["name"] for section in sections] == [*dashboard.LAYOUT, "Samples"]
    for section, panels in zip(sections, dashboard.LAYOUT.values(), strict=False):
        assert [panel["config"]["metrics"] for panel in section["panels"]] == [list(p.metrics) for p in panels]
