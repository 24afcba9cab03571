"""Typed errors. Each text says what came, what is allowed and what to do."""

from __future__ import annotations


class MoeEngineError(Exception):
    """Base of every error this package raises on purpose."""


class ShapeError(MoeEngineError, ValueError):
    """A tensor has a shape, stride or size that the call cannot take."""


class DtypeError(MoeEngineError, TypeError):
    """A tensor or argument has a type that the call cannot take."""


class CapacityError(MoeEngineError, ValueError):
    """More rows than the Buffer's memory was made for."""


class TooManyTokens(CapacityError):
    """One rank brought more tokens than a call takes. The other ranks, which may be in the call
    already, are told. The Buffer is unusable from here on."""


class BackendError(MoeEngineError, RuntimeError):
    """The chosen backend is missing something on this machine, or lacks the feature asked for."""


class CheckpointError(MoeEngineError, ValueError):
    """A file of a checkpoint, or a tensor in it, is missing, cut off or of another shape."""


class RoutingError(MoeEngineError, ValueError):
    """`topk_idx` held ids outside -1 .. num_experts-1; they were treated as -1.

    A call that raises it was made, so that this rank stays in step: `result` is what it returned,
    None from `check()`.
    """

    def __init__(self, text: str, result: object = None):
        super().__init__(text)
        self.result = result


class PeerTimeout(MoeEngineError, TimeoutError):
    """A rank did not signal within the deadline. The Buffer is unusable from here on.

    `rank`, `peer`, `phase`, `epoch` and `slot` name who waited for whom, and for what. With
    ranks_per_node, on several nodes, `node` is that of the peer and `forwarder` the rank that
    gets what the peer sends to this rank's node, this rank or one that forwards to it; else they
    are None.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        phase: str,
        epoch: int,
        slot: int,
        seconds: float,
        ranks_per_node: int | None = None,
    ):
        self.rank, self.peer, self.phase, self.epoch, self.slot = rank, peer, phase, epoch, slot
        self.node = self.forwarder = None
        whose, who = f"rank {peer}", f"Rank {peer} is gone, stuck, or"
        if ranks_per_node is not None:
            own, self.node = rank // ranks_per_node, peer // ranks_per_node
            whose += f" of node {self.node}"
            if self.node != own:
                self.forwarder = own * ranks_per_node + peer % ranks_per_node
                if self.forwarder == rank:
                    who = f"Rank {peer} or the network to it is gone or stuck, or that rank"
                else:
                    who = f"Rank {peer}, rank {self.forwarder} that forwards what it sends, or the "
                    who += "network between them is gone or stuck, or one of them"
        if peer == rank:
            who = f"Rank {peer} computes longer than that, has changed a handle or topk_idx, or"
        super().__init__(
            f"rank {rank} waited {seconds:g} s for {whose} in phase '{phase}' (epoch {epoch}, slot "
            f"{slot}). {who} issued its calls in another order. Make a new Buffer; "
            "MOE_ENGINE_TIMEOUT_S sets the deadline."
        )


class OutOfStep(MoeEngineError, TimeoutError):
    """Ranks did not all make the same call: one is gone, made fewer, or made another one."""


class CallAbandoned(MoeEngineError, RuntimeError):
    """A call broke off on some rank, by an error of the host. The text says on which, where and
    why. The Buffer is unusable from here on, on all ranks."""


def bad_ids(rank: int, count: int) -> str:
    """The text of a RoutingError."""
    return (
        f"rank {rank}: {count} expert ids in topk_idx lay outside -1 .. num_experts-1 and were "
        "treated as -1 (not routed). Check the router."
    )
