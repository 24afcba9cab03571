"""What the tests of DeepEP's interface share: the package deep_ep, clients, the comparison."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import cases
import torch
from dispatch_cases import make_inputs

import moe_engine
from moe_engine import reference
from moe_engine.emulation import PerRank

FOLDER = Path(moe_engine.__file__).parent / "integrations/deep_ep_path"


HIDDEN, EXPERTS, TOPK = 32, 12, 2


def deep_ep(module="deep_ep"):
    """The package deep_ep, or a module that comes with it; importable here from now on."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(module)


def sized_buffer(group, hidden_bytes, **more):
    """As training frameworks make it: the larger hint of both configs, attributes compared."""
    cls = deep_ep().Buffer
    nvl, rdma = 0, 0
    for config in (cls.get_dispatch_config(group.size()), cls.get_combine_config(group.size())):
        nvl = max(nvl, config.get_nvl_buffer_size_hint(hidden_bytes, group.size()))
        rdma = max(rdma, config.get_rdma_buffer_size_hint(hidden_bytes, group.size()))
    buffer = cls(group, nvl, rdma, **more)
    assert buffer.group is group
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (nvl, rdma)
    return buffer


def run_client(pool, client, *args, num_ranks=2, kind="holes", num_tokens=(20, 11, 0, 7)):
    """Run `client(group, *args, x, topk_idx, topk_weights)` on ranks: (results, inputs)."""
    inputs = make_inputs(num_ranks, list(num_tokens), HIDDEN, EXPERTS, TOPK, kind, "fp32")
    results = pool.run(client, *args, *map(PerRank, inputs), num_ranks=num_ranks)
    return results, inputs


def to_device(*tensors):
    return [tensor.to(cases.device()) for tensor in tensors]


def to_cpu(**values):
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def check_received(results, inputs, alignment=1):
    """Each rank's x, idx, w and counts are those of the reference, which is returned."""
    received = reference.dispatch(*inputs, EXPERTS)
    for have, want in zip(results, received, strict=True):
        assert torch.equal(have["x"], want.x)
        assert torch.equal(have["idx"], want.topk_idx)
        assert torch.equal(have["w"], want.topk_weights)
        counts = [-(-count // alignment) * alignment for count in want.num_tokens_per_expert]
        assert list(have["counts"]) == counts
    return received


def check_combined(results, inputs, received, of_rows):
    """Each rank's `out` is the reference's sum of `of_rows(its received rows)`."""
    x, idx, _ = inputs
    rows = [of_rows(part) for part in received]
    want = reference.combine(rows, received, idx, [len(part) for part in x], EXPERTS)
    for have, expected in zip(results, want, strict=True):
        assert torch.equal(have["out"], expected)
