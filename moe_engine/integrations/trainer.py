"""transformers' `Trainer` for a model whose experts are sharded over all of its ranks.

    class ExpertParallelTrainer(ExpertParallel, Trainer):
        pass

    buffer = shard_experts(model, max_tokens=args.per_device_train_batch_size * length)
    trainer = ExpertParallelTrainer(model, args, train_dataset=dataset)
    trainer.train()
    trainer.save_model(folder)

Trainer trains by DistributedDataParallel, which would average different experts with each other;
it would clip by a norm of its own on each rank; and it would save the experts of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import BackendError
from .data_parallel import average_expert_gradients, clip_grad_norm_
from .expert_parts import is_peft, whole_state_dict
from .transformers_experts import experts_layers, weights_of

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class ExpertParallel(Base):
    """A mixin that stands before `Trainer`, or a subclass of it, in a class's bases.

    Each rank reads batches of its own, as under DistributedDataParallel. All ranks call `train`,
    `evaluate`, `predict` and `save_model`, which writes the whole model, or the whole adapters of a
    PeftModel. Losses and gradients are those of one process with the batches of all ranks.

    Raises BackendError for what `check_trainer` refuses, and for `resume_from_checkpoint`.
    """

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        check_trainer(self)
        average_expert_gradients(self.model)
        experts = set(self.model._ddp_params_and_buffers_to_ignore)
        trained = {name for name, one in self.model.named_parameters() if one.requires_grad}
        if trained <= experts:  # DistributedDataParallel would refuse to have nothing to do
            prepare = self.accelerator.prepare_model
            self.accelerator.prepare_model = partial(prepare, evaluation_mode=True)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = self._clip_all_experts

    def _clip_all_experts(self, parameters: Iterable[Tensor], *norms: float) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, *norms)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **more: Any) -> Any:
        if resume_from_checkpoint:
            raise BackendError(
                "a Trainer does not resume with sharded experts: load the model from the "
                "checkpoint, then call shard_experts(model) and make the Trainer."
            )
        return super().train(resume_from_checkpoint, *args, **more)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        keep, adapters_only = self.args.should_save, is_peft(self.model)
        self._whole_state: Any = whole_state_dict(self.model, keep, adapters_only)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole_state = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._whole_state if state_dict is None else state_dict)


def check_trainer(trainer: Any) -> None:
    """Raise BackendError for what would train, or save, other experts than those of all ranks."""
    args = trainer.args
    share = getattr(experts_layers(trainer.model)[0], "moe_share", None)
    if trainer.model_init is not None or share is None:
        raise BackendError(
            "the model has all experts on each rank. Call shard_experts(model), then give the "
            "model to the Trainer, without model_init."
        )
    num_ranks = share.buffer.group_size
    refused = {
        "its experts are DTensors, which DistributedDataParallel refuses: shard_experts without "
        "mesh": hasattr(weights_of(experts_layers(trainer.model)[0])[0], "device_mesh"),
        "FSDP and DeepSpeed would shard the experts again: leave both out, or write the loop "
        "yourself, by fully_shard_experts": args.fsdp or args.deepspeed,
        f"its experts are on {num_ranks} ranks, and the Trainer runs on {args.world_size}: shard "
        "over all ranks, and start them by torchrun or accelerate": num_ranks != args.world_size,
        "even_batches=False of accelerator_config gives ranks different numbers of batches: leave "
        "it True": not args.accelerator_config.even_batches,
        "checkpoints would have the optimizer of one rank: set save_only_model=True": (
            args.save_strategy != "no" and not args.save_only_model
        ),
        "load_best_model_at_end would load whole experts: set it False": (
            args.load_best_model_at_end
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise BackendError(f"the Trainer cannot train this model: {why}.")
