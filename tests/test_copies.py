"""Copies of a Buffer and of what holds one share it; pickling leaves it out or is refused."""

from __future__ import annotations

import copy
import io
import pickle

import cases
import pytest
import torch

from moe_engine import BackendError, Buffer, DtypeError, MoEFeedForward

EXPERTS, TOPK, HIDDEN = 4, 2, 16


def new_buffer():
    return Buffer.for_tokens(None, 8, HIDDEN, EXPERTS, TOPK, torch.float32, backend="collective")


def new_layer():
    return MoEFeedForward(EXPERTS, HIDDEN, 8, new_buffer(), torch.float32)


def tokens():
    x, w = cases.tokens(6, HIDDEN, TOPK, torch.float32, 0)
    return x, cases.route("uniform", 6, EXPERTS, TOPK, 0), w


def through_a_file(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies_share_the_buffer(make):
    buffer, layer = new_buffer(), new_layer()
    assert make(buffer) is buffer
    model = torch.nn.Sequential(layer, torch.nn.Linear(2, 2))
    copied = make(layer)
    assert type(copied) is MoEFeedForward
    assert copied is not layer
    assert copied.buffer is layer.buffer
    assert make(model)[0].buffer is layer.buffer
    assert make([buffer, {"held": buffer}])[0] is buffer
    same = copied.gate_up_proj is layer.gate_up_proj
    assert same is (make is copy.copy)
    assert torch.equal(copied(*tokens()), layer(*tokens()))
    copied.buffer = None
    assert layer.buffer is not None


def test_a_deep_copy_keeps_what_the_module_shares():
    layer = new_layer()
    layer.other = layer.gate_up_proj
    copied = copy.deepcopy(layer)
    assert copied.other is copied.gate_up_proj
    assert copied.gate_up_proj.data_ptr() != layer.gate_up_proj.data_ptr()


@pytest.mark.parametrize("write", [pickle.dumps, through_a_file])
def test_a_buffer_is_not_pickled(write):
    for held in (new_buffer(), [new_buffer()], {"buffer": new_buffer()}):
        with pytest.raises(BackendError, match="state_dict"):
            write(held)


def test_a_layer_is_saved_without_its_buffer():
    layer = new_layer()
    loaded = through_a_file(torch.nn.Sequential(layer))[0]
    assert layer.buffer is not None
    with pytest.raises(BackendError, match=r"module\.buffer = Buffer"):
        loaded(*tokens())
    loaded.buffer = new_buffer()
    assert torch.equal(loaded(*tokens()), layer(*tokens()))
    other = new_layer()
    other.load_state_dict(through_a_file(layer.state_dict()))
    assert torch.equal(other(*tokens()), layer(*tokens()))


def test_a_layer_needs_a_buffer():
    for bad in (None, "buffer", torch.zeros(1)):
        with pytest.raises(DtypeError, match="buffer is"):
            MoEFeedForward(EXPERTS, HIDDEN, 8, bad)


def outlives(group):
    """A copy goes on when the first name is gone: both are the same memory."""
    buffer = Buffer.for_tokens(group, 8, HIDDEN, EXPERTS, TOPK, torch.float32)
    layer = MoEFeedForward(EXPERTS, HIDDEN, 8, buffer, torch.float32).to(cases.device())
    args = [tensor.to(cases.device()) for tensor in tokens()]
    want = layer(*args)
    copied = copy.deepcopy(layer)
    del layer, buffer
    assert torch.equal(copied(*args), want)
    copied.buffer.destroy()


def test_a_copy_outlives_the_first(pool):
    pool.run(outlives, num_ranks=1)
