"""transformers' Trainer with sharded experts, against one process with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers_cases import build

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError
from moe_engine.integrations.expert_parts import is_peft, whole_state_dict
from moe_engine.integrations.trainer import ExpertParallel
from moe_engine.integrations.transformers import shard_experts
from moe_engine.symm.base import environment
from moe_engine.tools.models import Kind

LENGTH, BATCH, SAMPLES = 5, 2, 11
"""With 2 samples of a rank, the last of 3 steps lacks one, which is then read again."""


class ExpertParallelTrainer(ExpertParallel, Trainer):
    pass


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """A Trainer runs on all ranks there are."""
    cases.skip_without_interpreter()
    with RankPool(2, "cpu", timeout_s=240) as ranks:
        yield ranks


def samples(number: int) -> list[torch.Tensor]:
    """Texts of 2 to 5 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (number, LENGTH), generator=generator)
    return [row[: 2 + at % (LENGTH - 1)] for at, row in enumerate(ids)]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    def pad(value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    return {"input_ids": pad(0), "labels": pad(-100), "attention_mask": (pad(-100) >= 0).long()}


def arguments(folder: str, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = dict(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        max_steps=6,
        learning_rate=1e-3,
        adam_epsilon=1e-6,
        max_grad_norm=0.5,
        gradient_checkpointing=True,
        train_sampling_strategy="sequential",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    return TrainingArguments(**given | changes)


def history(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def make(kind: type[Trainer], model: Any, args: TrainingArguments, rows: Any) -> Trainer:
    evaluated = [row for row in samples(16) if len(row) == LENGTH]
    data = {"train_dataset": rows, "eval_dataset": evaluated, "data_collator": collate}
    return kind(model, args, **data)


def ranks_of(group: dist.ProcessGroup) -> Any:
    """The variables by which torchrun tells a process its rank."""
    names = {"RANK": group.rank(), "WORLD_SIZE": group.size(), "MASTER_ADDR": "localhost"}
    names |= {"LOCAL_RANK": group.rank(), "LOCAL_WORLD_SIZE": group.size(), "MASTER_PORT": 0}
    return environment({name: str(value) for name, value in names.items()})


def train(group: dist.ProcessGroup, folder: str, build_model: Any, **changes: Any) -> list[float]:
    """Losses, norms and weights are those of a Trainer alone that reads what both ranks read; it is
    saved whole."""
    data = samples(SAMPLES)
    args = arguments(folder, per_device_train_batch_size=2 * BATCH, **changes)
    want = make(Trainer, build_model(), args, [*data, data[0]])
    want.train()
    loss = want.evaluate()["eval_loss"]
    with ranks_of(group):
        model = build_model()
        buffer = shard_experts(model, max_tokens=BATCH * LENGTH, backend="collective")
        have = make(ExpertParallelTrainer, model, arguments(folder, **changes), data)
        have.train()
        for key in ("loss", "grad_norm"):
            assert len(history(have, key)) == have.args.max_steps
            torch.testing.assert_close(history(have, key), history(want, key), rtol=1e-4, atol=0)
        assert max(history(want, "grad_norm")) > have.args.max_grad_norm
        assert have.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)
        have.save_model(folder)
        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        state, others = whole_state_dict(model), want.model.state_dict()
        for name in trained:
            torch.testing.assert_close(state[name], others[name], rtol=1e-4, atol=1e-5)
    dist.barrier(group)
    if is_peft(model):
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(build(Kind.QWEN3_MOE), folder).state_dict()
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert loaded.keys() == state.keys()
    for name in trained:
        assert torch.equal(loaded[name], state[name])
    buffer.destroy()
    return history(have, "grad_norm")


def whole_model() -> Any:
    return build(Kind.QWEN3_MOE).train()


def test_trainer_trains_as_one_process(two_ranks: RankPool, tmp_path: Path) -> None:
    norms = two_ranks.run(train, str(tmp_path), whole_model)
    assert norms[0] == norms[1]


@pytest.mark.slow
def test_trainer_adds_up_micro_batches(two_ranks: RankPool, tmp_path: Path) -> None:
    micro_batches = partial(train, gradient_accumulation_steps=2, gradient_checkpointing=False)
    two_ranks.run(micro_batches, str(tmp_path), whole_model)


@pytest.mark.parametrize("modules", [["q_proj"], []])
def test_trainer_trains_adapters(two_ranks: RankPool, tmp_path: Path, modules: list[str]) -> None:
    pytest.importorskip("peft")
    two_ranks.run(train, str(tmp_path), partial(adapted, modules))


def adapted(modules: list[str]) -> Any:
    """A model with adapters of experts, and of these modules."""
    from peft import LoraConfig, get_peft_model

    model = build(Kind.QWEN3_MOE).train()
    torch.manual_seed(1)
    weights = ["gate_up_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=modules, target_parameters=weights)
    return get_peft_model(model, config)


# --- What is refused -----------------------------------------------------------------------------


def refuse(group: dist.ProcessGroup, folder: str) -> None:
    def check(match: str, model: Any, args: TrainingArguments, **more: Any) -> None:
        with pytest.raises(BackendError, match=match):
            ExpertParallelTrainer(model, args, **more)

    with ranks_of(group):
        whole = whole_model()
        check("has all experts on each rank", whole, arguments(folder))
        check("without model_init", None, arguments(folder), model_init=whole_model)
        meshed = whole_model()
        mesh = init_device_mesh("cpu", (group.size(),))
        shard_experts(meshed, mesh=mesh, max_tokens=4, backend="collective").destroy()
        check("shard_experts without mesh", meshed, arguments(folder))
        alone = whole_model()
        just_me = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        shard_experts(alone, just_me, max_tokens=4).destroy()
        check("are on 1 ranks, and the Trainer runs on 2", alone, arguments(folder))
        model = whole_model()
        buffer = shard_experts(model, max_tokens=4, backend="collective")
        uneven = {"accelerator_config": {"even_batches": False}}
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_steps": 1}
        for match, changes in (
            ("different numbers of batches", uneven),
            ("set save_only_model=True", {"save_strategy": "steps"}),
            ("load_best_model_at_end", {"save_strategy": "steps", "save_only_model": True} | best),
        ):
            args = arguments(folder, **changes)
            check(match, model, args, eval_dataset=samples(2), data_collator=collate)
        trainer = make(ExpertParallelTrainer, model, arguments(folder), samples(2))
        with pytest.raises(BackendError, match="does not resume with sharded experts"):
            trainer.train(resume_from_checkpoint=True)
    dist.barrier(group)
    buffer.destroy()


def test_what_is_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(refuse, str(tmp_path))
