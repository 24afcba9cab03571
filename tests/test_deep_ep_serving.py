"""How inference servers find and call DeepEP: import, then calls, against the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from deep_ep_cases import (
    EXPERTS,
    FOLDER,
    check_combined,
    check_received,
    deep_ep,
    run_client,
    sized_buffer,
    to_cpu,
    to_device,
)

# --- vLLM (high throughput) and sglang ---------------------------------------------------------


def vllm(group, config, x, idx, w):
    ranks = torch.distributed.get_process_group_ranks(group)
    cpu_group = torch.distributed.new_group(ranks, backend="gloo")
    x, idx, w = to_device(x, idx, w)
    buffer = deep_ep().Buffer(
        group=cpu_group,
        num_nvl_bytes=16 << 20,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )
    config = config and deep_ep().Config(*config)
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=idx,
        num_experts=EXPERTS,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    recv_x, recv_idx, recv_w, counts, handle, event = buffer.dispatch(
        x=x,
        handle=None,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=idx,
        topk_weights=w,
        expert_alignment=1,
        config=config,
        previous_event=None,
        async_finish=True,
        allocate_on_comm_stream=False,
    )
    if event.event is not None:
        event.current_stream_wait()
    out, _, event = buffer.combine(
        x=recv_x,
        handle=handle,
        topk_weights=None,
        config=config,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    buffer.check()
    torch.distributed.barrier(cpu_group)
    buffer.destroy()
    return to_cpu(x=recv_x, idx=recv_idx, w=recv_w, counts=counts, out=out)


@pytest.mark.parametrize("kind", ["duplicates", "empty_rank"])
@pytest.mark.parametrize("config", [None, (24, 8, 256)])
def test_vllm(pool, kind, config):
    ranks = pool.num_ranks
    results, inputs = run_client(pool, vllm, config, kind=kind, num_ranks=ranks)
    received = check_received(results, inputs)
    check_combined(results, inputs, received, lambda r: r.x)


def sglang(group, config, x, idx, w):
    x, idx, w = to_device(x, idx, w)
    cls = deep_ep().Buffer
    buffer = sized_buffer(group, x.shape[1] * 4, low_latency_mode=False, allow_mnnvl=True)
    assert (buffer.group_size, buffer.low_latency_mode) == (group.size(), False)
    assert cls.num_sms == 20
    config = config and deep_ep().Config(**config)
    flags = {"async_finish": True, "allocate_on_comm_stream": True}
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        idx, EXPERTS, previous_event=cls.capture(), **flags
    )
    recv_x, recv_idx, recv_w, counts, handle, event = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=w,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        expert_alignment=128,
        config=config,
        **flags,
    )
    event.current_stream_wait()
    out, _, event = buffer.combine(
        recv_x, handle, previous_event=cls.capture(), config=config, **flags
    )
    event.current_stream_wait()
    return to_cpu(x=recv_x, idx=recv_idx, w=recv_w, counts=counts, out=out)


@pytest.mark.parametrize(
    "config", [None, {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 8}], ids=["none", "json"]
)
def test_sglang(pool, config):
    results, inputs = run_client(pool, sglang, config)
    received = check_received(results, inputs, alignment=128)
    check_combined(results, inputs, received, lambda r: r.x)


# --- Finding the package -----------------------------------------------------------------------


def python(code, *folders):
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), *map(str, folders)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd="/",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_deep_ep_is_importable_only_when_asked_for(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    probe = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert "HybridEPBuffer: no, ElasticBuffer: yes" in python(probe, FOLDER)
    code = "from importlib.util import find_spec; import moe_engine.integrations; "
    code += "print(find_spec('deep_ep'), find_spec('deep_ep_cpp'))"
    assert python(code) == "None None\n"


def test_buffers_that_are_absent_say_what_there_is():
    module, name = deep_ep(), "HybridEPBuffer"
    assert not hasattr(module, name)
    with pytest.raises(
        AttributeError, match=f"{name} is absent.*has Buffer.*ElasticBuffer.*deep-ep-path"
    ):
        getattr(module, name)
    for _ in range(2):  # the first leaves nothing
        with pytest.raises(ImportError, match=f"{name} is absent.*Use these"):
            exec(f"from deep_ep import Buffer, {name}")
    with pytest.raises(AttributeError, match="module 'deep_ep' has no attribute 'Bufer'"):
        module.Bufer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Bufer'"):
        exec("from deep_ep import Bufer")


PROBE = """
import importlib.util
import multiprocessing

def probe():
    assert importlib.util.find_spec("deep_ep").origin
    import deep_ep
    import deep_ep_cpp
    import moe_engine
    from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap
    from deep_ep import get_logical_domain_size, get_physical_domain_size, topk_idx_t
    from deep_ep.utils import EventHandle as Handle, EventOverlap as Overlap

    assert ElasticBuffer is moe_engine.ElasticBuffer and EPHandle is moe_engine.EPHandle
    assert Buffer is moe_engine.Buffer and Config is deep_ep_cpp.Config
    assert EventHandle is Handle is deep_ep_cpp.EventHandle and EventOverlap is Overlap
    assert topk_idx_t.itemsize == 8 and deep_ep.__version__.startswith("2.1.0+")

def has(name):
    try:
        exec(f"from deep_ep import {name}")
        return "yes"
    except ImportError:
        return "no"

if __name__ == "__main__":
    probe()
    worker = multiprocessing.get_context("spawn").Process(target=probe)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    print(", ".join(f"{name}: {has(name)}" for name in ("HybridEPBuffer", "ElasticBuffer")))
"""
