"""`rollout.LLM` and `rollout.serve`: against transformers' forward pass, and against each other."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout
from tests.support import tiny_models
from tests.support.engine_utils import TOLERANCE, prompt
from tests.support.push_reference import as_stamped, assert_moved, single
from tests.support.tiny_tokenizers import byte_level
from trainer_bridge import WeightPushError
from trainer_bridge.client import Generation

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
CACHE = {"num_gpu_blocks_override": 128, "block_size": 4, "max_model_len": 256, "max_num_seqs": 16}
ENGINE = {"dtype": "float32", "device": "cpu", "seed": 0, **CACHE}
CHAT: dict[str, Any] = {"max_tokens": 8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer of bytes, which renders chats."""
    folder = tiny_models.build("llama", tmp_path_factory.mktemp("llm") / "model")
    tokenizer = byte_level()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<{{ speaker or 'assistant' }}>{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def llm(path: Path) -> Iterator[rollout.LLM]:
    with rollout.LLM(path, return_sampling_mask=True, **ENGINE) as llm:
        yield llm


def test_the_page_says_how_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.chdir(path.parent)
    for block in blocks:
        exec(compile(block.replace("path/to/model", str(path)), "python.md", "exec"), {})
    assert "'step-1'" in capsys.readouterr().out


def test_the_package_imports_no_torch() -> None:
    code = "import sys, rollout; rollout.serve; rollout.SamplingParams(n=2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_answer_has_the_models_own_logprobs(llm: rollout.LLM) -> None:
    prompts = [prompt(20), prompt(7)]
    answers = llm.generate(prompts, {"max_tokens": 9, "logprobs": 0, "ignore_eos": True}, n=3)
    assert [answer.prompt_token_ids for answer in answers] == prompts
    model = tiny_models.model("llama")
    for answer in answers:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            assert choice.finish_reason == "length"
            assert len(choice.token_ids) == 9
            (span,) = choice.spans
            assert (span.version, span.start, span.end, span.epoch, span.kv) == ("default", 0, 9, 0, "current")
            expected = single(model, answer.prompt_token_ids, choice.token_ids)
            torch.testing.assert_close(torch.tensor(choice.logprobs), expected, atol=TOLERANCE, rtol=0)
    assert len({tuple(choice.token_ids) for choice in answers[0].choices}) == 3


def test_an_update_in_the_middle_is_seen_from_the_next_token_on(llm: rollout.LLM) -> None:
    models = [tiny_models.model("llama", seed) for seed in range(3)]
    pieces: list[Generation] = []
    for piece in llm.stream(prompt(20), {"max_tokens": 15, "logprobs": 0, "ignore_eos": True}):
        pieces.append(piece)
        if len(pieces) == 5:
            pushed = llm.update_weights(models[1].state_dict(), version="step-1")
            assert (pushed.version, pushed.epoch) == ("step-1", 1)
        if len(pieces) == 10:
            llm.update_weights(models[2], version="step-2", kv_policy="recompute")
    choices = [choice for piece in pieces for choice in piece.choices]
    tokens = [token for choice in choices for token in choice.token_ids]
    spans = choices[-1].spans
    assert [(s.version, s.start, s.end, s.epoch, s.kv) for s in spans] == [
        ("default", 0, 5, 0, "current"),
        ("step-1", 5, 10, 1, "mixed"),
        ("step-2", 10, 15, 2, "current"),
    ]
    got = torch.tensor([logprob for choice in choices for logprob in choice.logprobs or ()])
    torch.testing.assert_close(got, as_stamped(models, prompt(20), tokens, spans), atol=TOLERANCE, rtol=0)
    assert_moved(models, prompt(20), tokens, spans, got)
    assert llm.weight_info()["weight_version"] == "step-2"


def test_a_refused_update_changes_nothing(llm: rollout.LLM) -> None:
    (before,) = llm.generate(prompt(8), {"max_tokens": 4, "temperature": 0})
    other = tiny_models.model("llama", 1).state_dict()
    broken = {**other, "model.norm.weight": torch.full_like(other["model.norm.weight"], torch.nan)}
    with pytest.raises(WeightPushError, match=r"finite.*model\.norm\.weight"):
        llm.update_weights(broken)
    with pytest.raises(WeightPushError, match="lacks"):
        llm.update_weights({"model.norm.weight": other["model.norm.weight"]})
    assert llm.weight_info()["epoch"] == 0
    (after,) = llm.generate(prompt(8), {"max_tokens": 4, "temperature": 0})
    assert after.choices == before.choices
    assert llm.update_weights({"model.norm.weight": other["model.norm.weight"]}, partial=True).epoch == 1


def test_a_thread_may_update_while_another_generates(llm: rollout.LLM) -> None:
    began, answers = threading.Event(), []

    def generate() -> None:
        for piece in llm.stream(prompt(20), {"max_tokens": 200, "logprobs": 0, "ignore_eos": True}):
            began.set()
            answers.append(piece)

    thread = threading.Thread(target=generate)
    thread.start()
    assert began.wait(60)
    llm.update_weights(tiny_models.model("llama", 1), version="later")
    (beside,) = llm.generate(prompt(5), {"max_tokens": 3})
    assert beside.choices[0].spans[0].version == "later"
    thread.join(120)
    (last,) = answers[-1].choices
    assert [span.version for span in last.spans] == ["default", "later"]
    assert last.spans[-1].end == 200


def test_text_is_answered_in_text_and_stop_strings_end_it(llm: rollout.LLM) -> None:
    (whole,) = llm.generate("Say something", {"max_tokens": 12, "seed": 3, "ignore_eos": True})
    text = whole.choices[0].text
    assert text
    assert whole.prompt_token_ids == llm.get_tokenizer()("Say something").input_ids
    printable = next(char for char in text[1:] if char != "\ufffd")
    (cut,) = llm.generate(
        [{"prompt": "Say something"}], {"max_tokens": 12, "seed": 3, "ignore_eos": True, "stop": [printable]}
    )
    assert cut.choices[0].text == text[: text.index(printable)]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", printable)
    (chosen,) = llm.generate("Say something", {"structured_outputs": {"choice": ["aye"]}})
    assert chosen.choices[0].text == "aye"
    (pieces,) = llm.generate(whole.prompt_token_ids, {"max_tokens": 12, "seed": 3, "ignore_eos": True})
    assert (pieces.choices[0].token_ids, pieces.choices[0].text) == (whole.choices[0].token_ids, None)


def test_chats_go_through_the_template(llm: rollout.LLM) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    params = {"max_tokens": 6, "seed": 3, "ignore_eos": True}
    (answer,) = llm.chat(chat, params)
    (same,) = llm.generate("<user>Hi\n<assistant>", params)
    assert (answer.prompt_token_ids, answer.choices) == (same.prompt_token_ids, same.choices)
    named, bare = llm.chat([chat, chat], params, chat_template_kwargs={"speaker": "poet"}, n=2)
    assert bytes(named.prompt_token_ids) == b"<user>Hi\n<poet>"
    assert len(bare.choices) == 2
    (own,) = llm.chat(chat, params, chat_template="{{ messages[0].content }}")
    assert bytes(own.prompt_token_ids) == b"Hi"
    with pytest.raises(TypeError, match="no argument 'template'"):
        llm.chat(chat, params, template="x")
    for wrong in ([], [{"content": "Hi"}], [{"role": "user", "content": [{"type": "image_url"}]}]):
        with pytest.raises(ValueError, match=r"messages"):
            llm.chat(wrong, params)


def test_a_tokenizer_may_lie_elsewhere(path: Path, tmp_path: Path) -> None:
    bare = tiny_models.build("llama", tmp_path / "model")
    with rollout.LLM(bare, tokenizer=path, **ENGINE) as llm:
        params = {"max_tokens": 4, "structured_outputs": {"choice": ["aye"]}}
        (answer,) = llm.generate("Hi", params)
    assert (bytes(answer.prompt_token_ids), answer.choices[0].text) == (b"Hi", "aye")
    with rollout.LLM(bare, **ENGINE) as llm, pytest.raises(ValueError, match="has no tokenizer: use token ids"):
        llm.generate("Hi")


def test_an_iterator_that_is_closed_ends_its_request(llm: rollout.LLM) -> None:
    pieces = llm.stream(prompt(6), {"max_tokens": 100})
    next(pieces)
    pieces.close()
    assert not llm._engine.has_work


def test_what_a_server_would_refuse_is_a_value_error(llm: rollout.LLM, path: Path) -> None:
    for params, why in (
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"temperature": 3.0}, "temperature must be in"),
        ({"temperature": "hot"}, "temperature"),
    ):
        with pytest.raises(ValueError, match=why):
            llm.generate([1, 2], params)
    long, unknown = [1] * 300, [9999]
    for prompts, why in ([[[1], []], "least 1 item"], [[], "no prompt"], [[unknown], "vocab"], [[long], "maximum"]):
        with pytest.raises(ValueError, match=why):
            llm.generate(prompts)
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        llm.generate([[1], [2]], [{}])
    with pytest.raises(ValueError, match="tensor_parallel_size 2 can't be had in process"):
        rollout.LLM(path, tensor_parallel_size=2)


def test_a_server_gives_the_same_answers(llm: rollout.LLM, path: Path) -> None:
    params = {"max_tokens": 8, "seed": 5, "logprobs": 2, "top_p": 0.5, "prompt_logprobs": 0}
    flags = {**ENGINE, "num_threads": 1, "return_sampling_mask": True}
    with rollout.serve(path, api_key="secret", **flags) as client:
        assert client.api_key == "secret"
        remote = client.generate(torch.tensor(prompt(9)), params, n=2)
        chat = {"messages": [{"role": "user", "content": "Hi"}], **CHAT, "return_token_ids": True, "model": str(path)}
        chatted = client.post("/v1/chat/completions", chat)
    (local,) = llm.generate(torch.tensor(prompt(9)), rollout.SamplingParams(n=2, **params))
    (answer,) = llm.chat(chat["messages"], CHAT)
    assert answer.prompt_token_ids == chatted["prompt_token_ids"]
    assert answer.choices[0].text == chatted["choices"][0]["message"]["content"]
    assert local.raw.keys() == remote.raw.keys()
    assert local.raw["prompt_logprobs"] is not None
    for mine, theirs in zip(local.choices, remote.choices, strict=True):
        assert mine.sampling_mask is not None
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)
        assert (mine.token_ids, mine.sampling_mask, mine.spans) == (
            theirs.token_ids,
            theirs.sampling_mask,
            theirs.spans,
        )


def test_a_misspelt_flag_is_a_type_error_before_anything_starts(path: Path) -> None:
    for name, why in (("max_num_seq", "max_num_seqs"), ("port", "no flag of rollout.serve")):
        with pytest.raises(TypeError, match=why), rollout.serve(path, **{name: 1}):
            pass
