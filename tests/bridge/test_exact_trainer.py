"""`trainer_bridge.score.exact` in a trainer: ratios of exactly 1, eager attention's gradients, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import CONFIG_MAPPING

from rollout.engine.engine import Engine
from tests.support import tiny_models
from tests.support.engine_utils import prompt
from tests.support.exact_rollouts import (
    DTYPES,
    Rollout,
    differing,
    exact_engine,
    request,
    roll_out,
    take_step,
    threads,
    trainer_logprobs,
    trainers_model,
)
from trainer_bridge.score import exact, replay

LOGIT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-5
"""Of the largest entry of a gradient: float32 rounding through a few layers."""

_ODD: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": tiny_models.EOS_TOKEN_ID,
    "pad_token_id": None,
}
ODD: dict[str, dict[str, Any]] = {
    # attention sinks, and sliding layers
    "gpt_oss": {
        **_ODD,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    # value heads of another width than keys
    "deepseek_v3": {
        **_ODD,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


@torch.no_grad()
def odd_model(name: str, path: Path) -> Path:
    """Save a tiny random model of an architecture with attention of its own kind."""
    config: PreTrainedConfig = CONFIG_MAPPING[name](**ODD[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.2 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


def build(name: str, path: Path) -> Path:
    return odd_model(name, path) if name in ODD else tiny_models.build(name, path)


# -- the importance ratio


def batch(number: int) -> list[Any]:
    """Eight sequences: two groups and two single requests."""
    base = prompt(20 + number, seed=number)
    filters = [{}, {"top_p": 0.9}, {"top_k": 30, "temperature": 1.2}, {"min_p": 0.02, "repetition_penalty": 1.1}]
    params = {"max_tokens": 6, **filters[number % len(filters)]}
    return [
        request(f"{number}-group", base, n=4, **params),
        request(f"{number}-pair", base[:17] + prompt(5), n=2, **params),
        request(f"{number}-long", prompt(130 if number % 5 == 0 else 40, seed=number), **params),
        request(f"{number}-one", prompt(1, seed=number), **params),
    ]


def ratios(model: PreTrainedModel, rollouts: list[Rollout], *, packed: bool) -> Tensor:
    """π of the trainer's forward pass, with gradients on, over the server's; one number a token."""
    assert len(rollouts) >= 8
    new = torch.cat(trainer_logprobs(model, rollouts, packed=packed))
    assert new.requires_grad
    return replay.importance_ratios(new, torch.tensor([value for r in rollouts for value in r.logprobs]))


def push(engine: Engine, folder: Path) -> None:
    def call(method: str, **params: object) -> None:
        engine.weights.call(method, dict(params)).result(20)

    call("init_weight_transfer_engine", init_info={"backend": "disk"})
    call("start_weight_update")
    call("update_weights", update_info={"path": str(folder)})
    engine.weights.call("finish_weight_update", {})
    while engine.weights.call("weight_info", {}).result(20)["state"] != "ready":
        pass


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_the_ratio_of_an_unchanged_policy_is_one(dtype: str, tmp_path: Path) -> None:
    path = tiny_models.build("qwen3", tmp_path / "model")
    model = trainers_model(path, dtype)
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    with threads(1):
        engine = exact_engine(path, dtype)
        batches = [list(roll_out(engine, batch(number)).values()) for number in range(20)]
    with threads(2):
        for number, rollouts in enumerate(batches):
            ratio = ratios(model, rollouts, packed=bool(number % 2))
            assert torch.equal(ratio, torch.ones(8 * 6))
        (-ratio.mean()).backward()

    for master, parameter in zip(masters, model.parameters(), strict=True):
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    stale = ratios(model, batches[0], packed=False)
    assert (stale != 1).float().mean() > 0.9

    # The push lands in running requests, which the mode's default policy recomputes.
    model.save_pretrained(tmp_path / "pushed")
    rollouts = {}
    with threads(1):
        for item in batch(3):
            engine.add_request(item)
            rollouts |= {(item.request_id, index): Rollout(item) for index in range(item.sampling_params.n)}
        for _ in range(3):
            take_step(engine, rollouts)
        push(engine, tmp_path / "pushed")
        while engine.has_work:
            take_step(engine, rollouts)
    for packed in (False, True):
        ratio = ratios(model, list(rollouts.values()), packed=packed)
        epochs = torch.tensor([epoch for rollout in rollouts.values() for epoch in rollout.epochs])
        assert set(epochs.tolist()) == {0, 1}
        assert torch.equal(ratio[epochs == 1], torch.ones(int(epochs.sum())))
        assert (ratio[epochs == 0] != 1).any()


# -- against transformers' eager attention


SEQUENCES = [prompt(length, seed=length) for length in (150, 37, 5)]
TOKENS = torch.tensor([token for sequence in SEQUENCES for token in sequence])


def padded() -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(s) for s in SEQUENCES], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(s) for s in SEQUENCES])[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def rows_of(model: PreTrainedModel) -> Tensor:
    inputs = padded()
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def packed_rows(model: PreTrainedModel) -> Tensor:
    positions = torch.cat([torch.arange(len(s)) for s in SEQUENCES])
    return model(input_ids=TOKENS[None], position_ids=positions[None]).logits[0]


@pytest.mark.parametrize("name", [*tiny_models.NAMES, *ODD])
def test_logits_and_gradients_are_those_of_eager_attention(name: str, tmp_path: Path) -> None:
    path = build(name, tmp_path)
    kwargs: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(path, **kwargs).eval()
    expected = rows_of(reference)
    expected.log_softmax(-1).gather(-1, TOKENS[:, None]).sum().backward()
    for rows in (rows_of, packed_rows):
        model = trainers_model(path)
        got = rows(model)
        torch.testing.assert_close(got, expected, atol=LOGIT_TOLERANCE, rtol=0)
        got.log_softmax(-1).gather(-1, TOKENS[:, None]).sum().backward()
        for (label, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), label
            if theirs.grad is not None:
                assert theirs.grad.abs().max() > 0, label
                limit = GRADIENT_TOLERANCE * float(theirs.grad.abs().max())
                torch.testing.assert_close(mine.grad, theirs.grad, atol=limit, rtol=0, msg=label)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ODD)
def test_sinks_and_other_value_widths_are_exact_too(name: str, dtype: str, tmp_path: Path) -> None:
    path = build(name, tmp_path)
    with threads(1):
        rollouts = list(roll_out(exact_engine(path, dtype, max_num_batched_tokens=40), batch(0)).values())
    with threads(2):
        model = trainers_model(path, dtype)
        for packed in (False, True):
            logprobs = trainer_logprobs(model, rollouts, packed=packed)
            assert differing(rollouts, logprobs) == (0, 8 * 6)


def test_logits_to_keep_picks_rows_without_changing_them(tmp_path: Path) -> None:
    model = trainers_model(tiny_models.build("gemma2", tmp_path))
    inputs = padded()
    whole = model(**inputs).logits
    assert torch.equal(model(**inputs, logits_to_keep=7).logits, whole[:, -7:])
    wanted = torch.tensor([3, 149, 0])
    assert torch.equal(model(**inputs, logits_to_keep=wanted).logits, whole[:, wanted])
    assert torch.equal(packed_rows(model), whole[inputs["attention_mask"].bool()])


# -- refusals


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return trainers_model(tiny_models.build("llama", tmp_path_factory.mktemp("llama")))


IDS = torch.tensor([prompt(9), prompt(9, seed=1)])
ONES = torch.ones_like(IDS)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "left": ({"attention_mask": torch.cat([torch.zeros(2, 3), torch.ones(2, 6)], 1)}, "pad on the right"),
    "holes": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]] * 2)}, "holey"),
    "4d": ({"attention_mask": torch.zeros(2, 1, 9, 9)}, r"got \(2, 1, 9, 9\)"),
    "embeds": ({"input_ids": None, "inputs_embeds": torch.zeros(2, 9, 64)}, "not inputs_embeds"),
    "cache": ({"past_key_values": object()}, "no past_key_values"),
    "packed": ({"position_ids": torch.arange(9) % 5}, "batch of one row"),
    "mask": ({"logits_to_keep": ONES[0].bool()}, "logits_to_keep must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused(name: str, llama: PreTrainedModel) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        llama(**{"input_ids": IDS, "attention_mask": ONES, **arguments})


def test_autocast_is_refused(llama: PreTrainedModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast computes with other"):
        llama(input_ids=IDS)


@pytest.mark.parametrize("where", ["attention", "module"])
def test_dropout_is_refused_in_training_mode_only(where: str) -> None:
    model = tiny_models.model("llama")
    if where == "attention":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
    else:
        model.model.layers[0].mlp.dropped = torch.nn.Dropout(0.1)
    exact.install(model)
    check: Callable[[], Any] = lambda: model(input_ids=IDS)  # noqa: E731
    check()
    model.train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        check()


def test_a_cast_model_had_rounded_buffers(tmp_path: Path) -> None:
    """Its logprobs were up to 0.07 nats off."""
    path = tiny_models.build("gemma2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with pytest.raises(ValueError, match=r"inv_freq \(torch\.bfloat16\) .*\(…, dtype=torch\.bfloat16\)"):
        exact.install(copy.deepcopy(model).to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"inv_freq \(torch\.float32\) isn't what the model's configuration gives"):
        exact.install(copy.deepcopy(model).to(torch.bfloat16).to(torch.float32))
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    scaled = copy.deepcopy(loaded)
    scaled.model.embed_tokens.embed_scale *= 1.01
    with pytest.raises(ValueError, match=r"embed_scale \(torch\.bfloat16\) isn't what"):
        exact.install(scaled)
    exact.install(loaded)
    loaded(input_ids=IDS)
    with pytest.raises(ValueError, match=r"was torch\.bfloat16 at exact\.install and is torch\.float32"):
        loaded.to(torch.float32)(input_ids=IDS)


def test_a_cast_router_had_a_rounded_bias(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(odd_model("deepseek_v3", tmp_path), dtype=torch.float32).eval()
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight is torch\.bfloat16, and float32 in a server"):
        exact.install(model)
    gate = model.model.layers[1].mlp.gate
    gate.weight.data = gate.weight.data.float()
    with pytest.raises(ValueError, match=r"gate\.e_score_correction_bias is torch\.bfloat16"):
        exact.install(model)


def test_a_model_that_keeps_its_own_attention_is_refused_by_name() -> None:
    model = tiny_models.model("llama")
    model.set_attn_implementation = lambda *_: nullcontext()  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match="LlamaForCausalLM doesn't take its attention"):
        exact.install(model)


def test_a_row_whose_model_hides_the_positions_is_refused() -> None:
    heads = torch.zeros(1, 2, 9, 8)
    with pytest.raises(ValueError, match="Identity doesn't tell its attention the positions"):
        exact.attention_forward(torch.nn.Identity(), heads, heads, heads, None)
