"""What selective activation checkpointing should save of a layer and its router.

contexts = partial(create_selective_checkpoint_contexts, save_routing_policy)
y = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .errors import BackendError
from .layer_operators import operators

ROUTING_OPS = (
    torch.ops.aten.topk.default,
    torch.ops.aten.argmax.default,
    torch.ops.aten.max.dim,
)
"""The operators by which routers choose experts."""

SAVED_OPS = (
    operators.moe_ffn.default,
    operators.moe_ffn_forward.default,
    operators.dispatch.default,
    operators.internode_dispatch.default,
    operators.combine.default,
    operators.dispatch_start.default,
    operators.internode_dispatch_start.default,
    operators.dispatch_wait.default,
    operators.combine_start.default,
    operators.combine_wait.default,
)
"""Layers, and dispatch and combine: where a policy saves these, the recomputation sends nothing."""


def save_routing_policy(policy: Any = None) -> tuple[Any, Any]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint`: what routers choose by `ROUTING_OPS`
    is saved, and copied, so that it may be changed in place afterwards. `policy` says what else is,
    as `create_selective_checkpoint_contexts` takes it: a list of operators, or a function.

    Computed again, a top-k may break ties otherwise than in the forward, and the gradients would be
    those of another routing than that of the loss. BackendError if the recomputation routes more
    often than the forward did.
    """
    saved: list[Any] = []
    others = nullcontext(), nullcontext()
    if policy is not None:
        others = create_selective_checkpoint_contexts(policy)
    return _SavesRouting(saved, others[0]), _RepeatsRouting(saved, others[1])


class _SavesRouting(TorchDispatchMode):
    """In a forward: saves copies of what routers choose. `others` sees all operators, too."""

    def __init__(self, saved: list[Any], others: AbstractContextManager[Any]):
        super().__init__()
        self.saved, self.others = saved, others

    def __enter__(self) -> Self:
        self.others.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.others.__exit__(*error)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in ROUTING_OPS:
            self.saved.append(tree_map(torch.clone, result))
        return result


class _RepeatsRouting(_SavesRouting):
    """In a recomputation: gives the same again, in the same order."""

    def __enter__(self) -> Self:
        self.todo = iter(self.saved)
        return super().__enter__()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if op not in ROUTING_OPS:
            return op(*args, **(kwargs or {}))
        result = next(self.todo, None)
        if result is None:
            raise BackendError(
                "the recomputation of a checkpoint routes more often than its forward did; what is "
                "inside must call the same operators each time."
            )
        return tree_map(torch.clone, result)
