"""Adapters merged on the way, against a state dict merged by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.weight_updates import UpdaterServer, llama, qwen3_moe, same_weights
from trainer_bridge.push.lora import LoraSource
from trainer_bridge.push.sender import WeightSender

ADAPTED = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
SCALING = 2.5


def adapters(model, names=ADAPTED, rank=3):
    """Random A (r, in) and B (out, r) for each name, in float32."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in names:
        out, into = model.get_submodule(name).weight.shape
        a, b = (torch.randn(shape, generator=generator) for shape in ((rank, into), (out, rank)))
        found[name] = (a, b, SCALING)
    return found


def merged_by_hand(model, chosen):
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, (a, b, scaling) in chosen.items():
        weight = state[f"{name}.weight"]
        state[f"{name}.weight"] = (weight.float() + scaling * (b @ a)).to(weight.dtype)
    return state


def yielded(source):
    return dict(zip([i.name for i in source.infos()], source.tensors(), strict=True))


class Wrapped(nn.Module):
    """The attributes of PEFT's LoRA layers, which are all that is read of them."""

    def __init__(self, base, a, b):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict(), nn.ParameterDict()
        self.active_adapters = ["default"]
        self.scaling = {"default": SCALING, "other": 100.0}
        self.merged = self.disable_adapters = self.fan_in_fan_out = False
        for adapter, factor in (("default", 1.0), ("other", 3.0)):
            for parts, tensor in ((self.lora_A, a), (self.lora_B, b)):
                parts[adapter] = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
                parts[adapter].weight.data = tensor * factor


class ParamWrapper(nn.Module):
    """The attributes of PEFT's wrapper of one parameter (`target_parameters`; peft 0.21, tuners/lora/layer.py)."""

    def __init__(self, base, parameter_name, a, b, swapped=True):
        super().__init__()
        self.base_layer, self.parameter_name = base, parameter_name
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        for parts, tensor in ((self.lora_A, a), (self.lora_B, b)):
            parts["default"] = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
            parts["default"].weight.data = tensor
        self.active_adapters, self.scaling = ["default"], {"default": SCALING}
        self.merged = self.disable_adapters = self.fan_in_fan_out = False
        self.num_experts = self.get_param().shape[0] if self.get_param().dim() == 3 else 1
        self._did_swap_in_out_features = swapped

    def get_param(self):
        base = self.base_layer
        while hasattr(base, "base_layer"):
            base = base.base_layer
        return getattr(base, self.parameter_name)


class Root(nn.Module):
    """Names as PEFT's: base_model.model.<name>."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


def wrap(model, chosen):
    for name, (a, b, _) in chosen.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Wrapped(model.get_submodule(name), a, b))
    return Root(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["module", "state dict", "peft"])
def test_merged_weights_under_the_base_names(form, dtype):
    model = llama(1, dtype=dtype)
    chosen = adapters(model)
    expected = merged_by_hand(model, chosen)
    if form == "peft":
        source = LoraSource(wrap(model, chosen))
    elif form == "module":
        source = LoraSource(model, chosen)
    else:
        source = LoraSource(model.state_dict(), {f"{n}.weight": a for n, a in chosen.items()})
    got = yielded(source)
    assert list(got) == list(expected)
    assert {n: t.dtype for n, t in got.items()} == dict.fromkeys(expected, dtype)
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
        assert torch.equal(got[name], tensor) or name.removesuffix(".weight") in chosen


def test_adapters_are_read_when_they_are_sent():
    model = llama(1)
    chosen = adapters(model)
    source = LoraSource(model, chosen)
    with UpdaterServer(llama(0)) as server, WeightSender.connect(server.url, source, timeout_s=20) as sender:
        for _ in range(2):
            sender.push(sparse=True, verify=True)
            expected = llama(0)
            expected.load_state_dict(dict(zip(merged_by_hand(model, chosen), source.tensors(), strict=True)))
            assert same_weights(server.model, expected)
            weight = f"{ADAPTED[0]}.weight"
            torch.testing.assert_close(server.model.get_parameter(weight), merged_by_hand(model, chosen)[weight])
            chosen[ADAPTED[0]][1].mul_(-1)


@pytest.mark.parametrize("swapped", [True, False])
def test_adapters_of_expert_parameters_are_merged(swapped):
    """They used to be dropped without a word."""
    model, plain = qwen3_moe(1), qwen3_moe(1)
    generator = torch.Generator().manual_seed(2)
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    experts = model.model.layers[0].mlp.experts
    for name, rank in (("down_proj", 2), ("gate_up_proj", 3)):
        count, out, into = getattr(experts, name).shape
        if not swapped:  # the parameter is (experts, in, out), for all that PEFT knows
            out, into = into, out
        a = torch.randn(rank * count, into, generator=generator)
        b = torch.randn(out, rank * count, generator=generator)
        weight = expected[f"model.layers.0.mlp.experts.{name}"]
        for expert in range(count):
            rows, columns = a[expert * rank : (expert + 1) * rank], b[:, expert::count]
            delta = SCALING * (columns @ rows)
            weight[expert] += delta if swapped else delta.T
        # Two adapted parameters of one module are two wrappers, one in the other.
        model.model.layers[0].mlp.experts = ParamWrapper(model.model.layers[0].mlp.experts, name, a, b, swapped)
    got = yielded(LoraSource(Root(model)))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)


class Ddp(nn.parallel.DistributedDataParallel):
    """What a wrapper of that name has, without a process group."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("wrapper", [torch.compile, Ddp])
def test_adapters_within_other_wrappers_are_merged(wrapper):
    model = llama(1)
    chosen = adapters(model)
    expected = merged_by_hand(model, chosen)
    root = wrap(model, chosen)
    if wrapper is Ddp:
        root = Ddp(root)
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0])
        root.base_model.model = torch.compile(model)
    got = yielded(LoraSource(root))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-6)


def test_two_wrappers_of_one_layer_are_both_merged():
    model = llama(1)
    chosen = adapters(model)
    expected = merged_by_hand(model, chosen)
    for name, (a, b, scaling) in chosen.items():
        expected[f"{name}.weight"] += scaling * (b @ a)
    root = Root(wrap(model, chosen))
    wrap(model, chosen)
    got = yielded(LoraSource(root))
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5)


def test_inactive_merged_and_disabled_adapters_add_nothing():
    for attribute, value in (("active_adapters", []), ("merged", True), ("disable_adapters", True)):
        model = llama(1)
        chosen = adapters(model)
        root = wrap(model, chosen)
        for name in ADAPTED:
            setattr(root.base_model.model.get_submodule(name), attribute, value)
        plain = dict(llama(1).named_parameters())
        assert all(torch.equal(t, plain[n]) for n, t in yielded(LoraSource(root)).items())


def test_an_embeddings_adapter_is_transposed():
    model = llama(1)
    rows, width = model.model.embed_tokens.weight.shape
    a, b = torch.randn(2, rows), torch.randn(width, 2)
    expected = model.model.embed_tokens.weight.detach() + SCALING * (b @ a).T
    root = wrap(model, {"model.embed_tokens": (torch.zeros(2, width), torch.zeros(rows, 2), SCALING)})
    layer = model.model.embed_tokens
    layer.lora_A, layer.lora_B = nn.ModuleDict(), nn.ModuleDict()
    layer.lora_embedding_A["default"], layer.lora_embedding_B["default"] = nn.Parameter(a), nn.Parameter(b)
    torch.testing.assert_close(yielded(LoraSource(root))["model.embed_tokens.weight"], expected)


def spoil_dora(layer):
    layer.lora_magnitude_vector = nn.ModuleDict({"default": nn.Identity()})


def spoil_bias(layer):
    layer.lora_B["default"].bias = nn.Parameter(torch.zeros(32))


def spoil_shape(layer):
    layer.lora_A["default"].weight.data = torch.zeros(3, 5)


def spoil_other_method(layer):
    layer.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(32))})


def spoil_quantized(layer):
    layer.base_layer.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)


def spoil_float8(layer):
    layer.base_layer.weight.data = layer.base_layer.weight.data.to(torch.float8_e4m3fn)


def spoil_packed(layer):
    layer.base_layer.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    del layer.base_layer.weight


def spoil_tokens(layer):
    layer.original_module = nn.Linear(2, 2)


def spoil_adalora(layer):
    layer.lora_B = nn.ParameterDict({"default": torch.zeros(32, 3)})


def spoil_saved(layer):
    layer.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_dora, "DoRA"),
        (spoil_bias, "lora_bias"),
        (spoil_shape, "does not fit"),
        (spoil_saved, "modules_to_save"),
        (spoil_other_method, "ia3_l.default is not merged"),
        (spoil_quantized, "quantized"),
        (spoil_float8, "quantized"),
        (spoil_packed, "quantized"),
        (spoil_tokens, "trained in parts"),
        (spoil_adalora, "AdaLoRA"),
    ],
)
def test_what_is_more_than_a_product_is_refused_by_name(spoil, named):
    model = llama(1)
    root = wrap(model, adapters(model))
    spoil(model.get_submodule(ADAPTED[0]))
    with pytest.raises(ValueError, match=f"{ADAPTED[0]}.*{named}"):
        LoraSource(root)


def test_adapters_that_fit_nothing_are_refused():
    model = llama(1, tied=True)
    with pytest.raises(ValueError, match="'nope' fits no weight"):
        LoraSource(model, {"nope": (torch.zeros(1, 1), torch.zeros(1, 1), 1.0)})
    with pytest.raises(ValueError, match="one tied weight"):
        LoraSource(model, adapters(model, ["model.embed_tokens"]))
    with pytest.raises(ValueError, match="not a PEFT model"):
        LoraSource(model)
    with pytest.raises(ValueError, match="needs adapters"):
        LoraSource(model.state_dict())
    assert "lm_head.weight" not in yielded(LoraSource(model, {}))
