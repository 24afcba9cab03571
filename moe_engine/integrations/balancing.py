"""Balancing of experts without an auxiliary loss, by a bias of each expert in the router.

The router of DeepSeek-V3 adds it to the scores when it chooses experts, and not to their weights.
After each step the bias of experts that got fewer tokens than the mean rises, and that of others
falls (Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024):

    with record_counts(model) as counts:
        loss = model(input_ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    update_biases(model, counts, speed=1e-3)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError, ShapeError
from .transformers import share_of
from .transformers_experts import experts_layers


@contextmanager
def record_counts(model: Any) -> Iterator[list[Tensor]]:
    """Collect, for each call of a layer of experts, int32 [E]: how many (token, k) all ranks of the
    group route to each expert. The layers know it, so this takes no collective call.

    All ranks of the group must do it for the same passes. What checkpoints compute again in a
    backward is not counted again.
    """
    with share_of(experts_layers(model)[0]).passes.counting() as counts:
        yield counts


@torch.no_grad()
def update_biases(model: Any, counts: Sequence[Tensor], speed: float) -> None:
    """Add `speed * sign(mean - count)` to the bias of each expert, in place.

    counts: of each layer in order, [E]; of several passes, such as micro-batches, one after the
    other. Where several groups of ranks hold the experts, add the counts up over the groups before.

    With E = 4, counts (5, 1, 2, 0) and speed 0.1, biases change by (-0.1, 0.1, 0, 0.1).
    Raises BackendError for a model whose routers have no bias, ShapeError for other counts.
    """
    biases = router_biases(model)
    if not counts or len(counts) % len(biases):
        raise ShapeError(
            f"counts has {len(counts)} tensors, and the model {len(biases)} routers with a bias: "
            "record whole passes."
        )
    for layer, bias in enumerate(biases):
        count = torch.stack([*counts[layer :: len(biases)]]).sum(0).to(bias)
        bias += speed * (count.mean() - count).sign()


def imbalance(load: Tensor) -> Tensor:
    """The largest load of an expert over the mean, of each layer: [layers, E] -> [layers].

    The load (3, 1, 0, 0) has the mean 1, and gives 3.
    """
    return load.amax(1) / load.double().mean(1)


def router_biases(model: Any) -> list[Tensor]:
    """The biases of all routers, float32 [E] each, in layer order."""
    name = "e_score_correction_bias"
    biases = [getattr(one, name) for one in model.modules() if name in one._buffers]
    if not biases:
        raise BackendError(
            f"the routers of {type(model).__name__} have no {name}, as those of DeepSeek-V3 "
            "do. Balance them by the model's auxiliary loss."
        )
    return biases
