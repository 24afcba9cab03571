"""`moe-engine train` at small sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError, DtypeError, ShapeError
from moe_engine.tools.cli import app
from moe_engine.tools.models import Kind, build_config, build_model
from moe_engine.tools.train import Job, Run, count_tokens, run_rank
from moe_engine.tools.train_report import report

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from transformers_cases import build

from moe_engine.integrations.balancing import (
    BIAS,
    record_counts,
    router_biases,
    routers_with_bias,
    update_biases,
)
from moe_engine.integrations.recorded_routing import record_routing
from moe_engine.integrations.transformers import shard_experts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "steps"),
    [
        ("mixtral", "auto", 2),
        ("qwen3-moe", "auto", 6),
        ("deepseek-v3", "collective", 8),
    ],
)
def test_losses_are_those_of_the_unsharded_model(
    tmp_path: Path, model: str, backend: str, steps: int
) -> None:
    picture = tmp_path / "training.png"
    arguments = [f"--model={model}", f"--backend={backend}", f"--steps={steps}", "--length=8"]
    arguments += ["--ranks=2", "--fp32", f"--picture={picture}"]
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 0, done.output
    for text in ("loss of the last step", "bound 1e-04: ok", picture.name):
        assert text in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("last", [4.0, 4.01, float("nan")])
def test_a_missed_bound_fails_the_training(last: float) -> None:
    job = Job(Kind.MIXTRAL, "cpu", torch.float32, 2, 8, 1e-3, "auto")
    runs = Run([5.0, 4.0]), Run([5.0, last])
    assert report(job, [runs], Console(quiet=True)) is (last == 4.0)


# --- Balancing by biases -------------------------------------------------------------------------


def test_biases_even_the_load_out(pool: RankPool) -> None:
    """The counts of layers lead to the same biases on all ranks as those of a collective call, and
    the load spreads less and less over the experts."""
    how = "cpu", torch.float32, 12, 64, 1e-4, "collective"
    (plain, sharded), (others, also_sharded) = pool.run(
        run_rank, Job(Kind.DEEPSEEK_V3, *how, bias_speed=0.03), num_ranks=2
    )
    for run in (sharded, others, also_sharded):
        assert torch.equal(run.biases, plain.biases)
        assert run.imbalance == plain.imbalance
    assert sum(plain.imbalance[6:]) < 0.9 * sum(plain.imbalance[:6])
    still = Job(Kind.DEEPSEEK_V3, *how, bias_speed=1e-9)
    (unbiased, _), _ = pool.run(run_rank, still, num_ranks=2)
    assert sum(plain.imbalance[6:]) < 0.8 * sum(unbiased.imbalance[6:])


def record(group: dist.ProcessGroup, backend: str) -> None:
    """Checkpoints count once; passes add up; models without biases are refused."""
    model = build(Kind.DEEPSEEK_V3).train()
    with pytest.raises(BackendError, match="call shard_experts"), record_counts(model):
        pass
    buffer = shard_experts(model, group, max_tokens=4, backend=backend)
    model.gradient_checkpointing_enable()
    ids = torch.tensor([[1, 2, 3 + group.rank()]], device=model.device)
    with record_counts(model) as counts, record_routing(model) as routing:
        loss = model(ids).logits.sum()
    with record_counts(model) as again:
        loss.backward()
    assert not again
    want = count_tokens(model, routing, group)
    assert torch.equal(torch.stack(counts).long(), want)
    update_biases(model, [*counts, *counts], 0.5)
    [bias], [count] = router_biases(model), want.float()
    assert torch.equal(bias, 0.5 * (count.mean() - count).sign())
    with pytest.raises(ShapeError, match="counts has 0 tensors, and the model 1 routers"):
        update_biases(model, again, 0.5)
    with pytest.raises(BackendError, match="MixtralForCausalLM have no e_score_correction_bias"):
        update_biases(build(Kind.MIXTRAL), counts, 0.5)
    buffer.destroy()


@pytest.mark.parametrize("backend", ["collective", pytest.param("auto", marks=pytest.mark.slow)])
def test_counts_of_layers(pool: RankPool, backend: str) -> None:
    pool.run(record, backend, num_ranks=2)


@pytest.mark.slow
def test_aux_free_draws_the_load(tmp_path: Path) -> None:
    picture = tmp_path / "training.png"
    arguments = ["train", "--aux-free", "--backend=collective", "--steps=2", "--length=8"]
    arguments += ["--ranks=2", f"--picture={picture}"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "largest load over the mean, last step" in done.output
    assert picture.exists()
    done = CliRunner().invoke(app, ["train", "--aux-free", "--model=mixtral"])
    assert done.exit_code == 2


def small_deepseek(dtype: torch.dtype) -> Any:
    config = build_config(Kind.DEEPSEEK_V3)
    return build_model(config, "cpu", dtype), config.n_routed_experts


def test_biases_that_are_rounded_are_refused() -> None:
    """Steps of 1e-3 would be lost in bf16 at 1.0, and counts of 1000 and 1001 be equal."""
    model, num_experts = small_deepseek(torch.bfloat16)
    [bias] = router_biases(model)  # float32, though the model is bf16
    bias.fill_(1.0)
    counts = torch.full((num_experts,), 1000, dtype=torch.int32)
    counts[1] = 1001
    for _ in range(100):
        update_biases(model, [counts], 1e-3)
    assert abs(float(bias[0]) - 1.1) < 1e-5 and abs(float(bias[1]) - 0.9) < 1e-5
    model.bfloat16()
    before = router_biases_as_they_are(model)
    for _ in range(2):
        with pytest.raises(DtypeError, match=r"gate.e_score_correction_bias is bfloat16, as model"):
            update_biases(model, [counts], 1e-3)
    assert torch.equal(router_biases_as_they_are(model), before)


def router_biases_as_they_are(model: Any) -> torch.Tensor:
    return torch.stack([getattr(one, BIAS) for one in routers_with_bias(model).values()])


def test_counts_are_added_up_as_they_are() -> None:
    """Above 2**24, too, where fp32 rounds them."""
    model, num_experts = small_deepseek(torch.float32)
    counts = torch.full((num_experts,), 2**24, dtype=torch.int32)
    counts[0] += 1
    update_biases(model, [counts], 0.5)
    [bias] = router_biases(model)
    assert bias.tolist() == [-0.5] + [0.5] * (num_experts - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool])
def test_counts_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model, num_experts = small_deepseek(torch.float32)
    ones = torch.ones(num_experts, dtype=torch.int32)
    for counts, error in (([ones, ones.to(dtype)], DtypeError), ([ones, ones[:3]], ShapeError)):
        with pytest.raises(error, match=r"^counts\[1\] "):
            update_biases(model, counts, 0.5)
    assert not router_biases(model)[0].any()
