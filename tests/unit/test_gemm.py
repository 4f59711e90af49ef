"""Linear layers through oneDNN: the same numbers, only where it is there, exact and faster."""

import copy
import json
import types

import pytest
import torch
from torch import nn

from ppocli.config.schema import HardwareConfig
from ppocli.errors import ConfigError
from ppocli.models import gemm
from ppocli.opening import noted_products

pytestmark = pytest.mark.skipif(gemm._fault() is not None, reason="no oneDNN here")


def conv1d(inputs, outputs):
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("layer", [
    nn.Linear(24, 40), nn.Linear(40, 24, bias=False), conv1d(24, 40), conv1d(96, 8)],
    ids=["linear", "no bias", "conv1d", "narrow conv1d"])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (0,)], ids=["rows", "batch", "nothing"])
def test_outputs_and_gradients_are_the_default_ones(layer, shape):
    plain, routed = copy.deepcopy(layer), copy.deepcopy(layer)
    names = list(routed.state_dict())
    gemm.route_linears(nn.ModuleList([routed]))
    assert list(routed.state_dict()) == names
    assert isinstance(routed, type(layer))
    assert type(copy.deepcopy(routed)) is type(routed) is not type(layer)
    inputs = layer.weight.shape[1] if isinstance(layer, nn.Linear) else layer.weight.shape[0]
    x = torch.randn(*shape, inputs)
    found = []
    for one in (plain, routed):
        given = x.clone().requires_grad_()
        out = one(given)
        out.square().sum().backward()
        found.append([out, given.grad, *(p.grad for p in one.parameters())])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert ours.stride() == theirs.stride() or not ours.numel()


def test_packed_weights_serve_for_a_while_and_are_given_back(monkeypatch):
    layer = nn.Linear(24, 40)
    whole = nn.Sequential(layer)
    gemm.route_linears(whole)
    x = torch.randn(3, 24)
    with torch.no_grad():
        plain = whole(x)
        with gemm.packed_weights(whole, torch.float32):
            assert layer.packed is not None
            torch.testing.assert_close(whole(x), plain, rtol=1e-5, atol=1e-6)
            layer.weight.zero_()  # the copy is what is read
            torch.testing.assert_close(whole(x), plain, rtol=1e-5, atol=1e-6)
        assert layer.packed is None
        monkeypatch.setattr(gemm, "PACKED_BYTES", 10)
        with gemm.packed_weights(whole, torch.float32):
            assert layer.packed is None


def test_a_product_that_is_not_exact_is_refused(monkeypatch):
    exact = gemm._linear
    monkeypatch.setattr(gemm, "_linear", lambda *args: exact(*args).bfloat16().float())
    gemm._fault.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"oneDNN can't be used.*off by"):
            gemm.choose_gemm(HardwareConfig(gemm="onednn"))
        assert not gemm.choose_gemm(HardwareConfig(gemm="auto"))
    finally:
        monkeypatch.undo()
        gemm._fault.cache_clear()


@pytest.mark.parametrize(("gain", "chosen"), [(1.5, True), (1.0, False)])
def test_auto_takes_what_was_measured_faster_unless_a_run_goes_on(monkeypatch, gain, chosen):
    monkeypatch.setattr(gemm, "_gain", lambda _threads: gain)
    assert gemm.choose_gemm(HardwareConfig()) is chosen
    assert gemm.choose_gemm(HardwareConfig(), noted=not chosen) is not chosen
    assert gemm.choose_gemm(HardwareConfig(gemm="onednn"), noted=False)
    assert not gemm.choose_gemm(HardwareConfig(gemm="default"), noted=True)


@pytest.mark.parametrize(("text", "noted"), [
    (json.dumps({"linear_layers": "oneDNN"}), True),
    (json.dumps({"linear_layers": "torch"}), False),
    (json.dumps({"python": "3.11"}), None), ("{", None), (None, None)])
def test_what_a_run_began_with_is_noted_in_its_folder(tmp_path, text, noted):
    if text is not None:
        (tmp_path / "env.json").write_text(text)
    assert noted_products(types.SimpleNamespace(path=tmp_path)) is noted
