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

from ..checks import check_tensor
from ..errors import BackendError, DtypeError, ShapeError
from .transformers import share_of
from .transformers_experts import experts_layers

BIAS = "e_score_correction_bias"
COUNT_DTYPES = torch.int32, torch.int64, torch.float32, torch.float64
"""Those that hold counts as they are."""


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

    counts: of each layer in order, [E], int32, int64, float32 or float64; of several passes, such
    as micro-batches, one after the other. Where several groups of ranks hold the experts, add the
    counts up over the groups before.

    With E = 4, counts (5, 1, 2, 0) and speed 0.1, biases change by (-0.1, 0.1, 0, 0.1).
    Raises BackendError for a model whose routers have no bias; DtypeError for biases that are not
    float32, and for counts of other dtypes; ShapeError for other counts. Then no bias has changed.
    """
    biases = router_biases(model)
    if not counts or len(counts) % len(biases):
        raise ShapeError(
            f"counts has {len(counts)} tensors, and the model {len(biases)} routers with a bias: "
            "record whole passes."
        )
    for number, count in enumerate(counts):
        num_experts = len(biases[number % len(biases)])
        check_tensor(f"counts[{number}]", count, (num_experts,), COUNT_DTYPES)
    for layer, bias in enumerate(biases):
        # In fp64, which holds counts and their sums as they are.
        count = torch.stack([*counts[layer :: len(biases)]]).sum(0, dtype=torch.float64)
        bias += speed * (count.mean() - count).sign().to(bias)


def imbalance(load: Tensor) -> Tensor:
    """The largest load of an expert over the mean, of each layer: [layers, E] -> [layers].

    The load (3, 1, 0, 0) has the mean 1, and gives 3.
    """
    return load.amax(1) / load.double().mean(1)


def routers_with_bias(model: Any) -> dict[str, Any]:
    """The routers that add a bias to the scores, by their paths, in layer order."""
    return {path: one for path, one in model.named_modules() if BIAS in one._buffers}


def router_biases(model: Any) -> list[Tensor]:
    """The biases of all routers, float32 [E] each, in layer order; DtypeError for others."""
    routers = routers_with_bias(model)
    biases = [getattr(router, BIAS) for router in routers.values()]
    if not biases:
        raise BackendError(
            f"the routers of {type(model).__name__} have no {BIAS}, as those of DeepSeek-V3 "
            "do. Balance them by the model's auxiliary loss."
        )
    for path, bias in zip(routers, biases, strict=True):
        if bias.dtype != torch.float32:
            raise DtypeError(
                f"{path}.{BIAS} is {str(bias.dtype).removeprefix('torch.')}, as model.to(dtype) "
                "makes it; it must be float32, since smaller dtypes round the steps away. Load the "
                "model by from_pretrained(..., dtype=...), which keeps it in float32."
            )
    return biases
