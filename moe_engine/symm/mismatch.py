"""The errors of ranks that began calls which differ, as what they told each other says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..callers import Callers
from ..device.context import (
    CALLER,
    DISPATCH_OF_HANDLE,
    REFUSED_CALLS,
    SAVED,
    SIGNATURE,
    Kind,
    saved_name,
)
from ..errors import MoeEngineError, OutOfStep, ShapeError


def signature_fields(words: Sequence[int]) -> dict[str, int]:
    """The fields of a call's signature by name; see `device/signature.py`."""
    return dict(zip(SIGNATURE, words, strict=False))


def low_latency_fields(words: Sequence[int]) -> dict[str, int]:
    """The fields of a low-latency call by name, but for its tokens, in which ranks may differ; see
    `call_fields.call_fields`."""
    _, most, low, high, num_topk, num_experts, mixed, last, caller, of_caller, refused, *_ = words
    verb, item_bytes = mixed >> 4, mixed & 15
    is_combine = verb in (Kind.LOW_LATENCY_COMBINE, Kind.MOE_FFN_COMBINE)
    return {
        "verb": verb,
        "most tokens": most,
        "bytes per token": low + (high << 16),
        "top-k": num_topk,
        "experts": num_experts,
        "bytes per item": item_bytes,
        DISPATCH_OF_HANDLE if is_combine else "words of scales": last,
        CALLER: _as_int32(caller + (of_caller << 16)),
        REFUSED_CALLS: refused,
    }


SAME_ORDER = "Every rank makes the same calls on a Buffer in the same order; make a new Buffer."


def out_of_step_by_refusal(rank: int, peer: int, refused: int, count: int, last: str) -> OutOfStep:
    """The error of ranks of which rank `refused` has refused so many calls more than the other;
    last: which verb refused the last of them, and why."""
    other = peer if refused == rank else rank
    what = f"a call that rank {other} did not refuse, in"
    if count > 1:
        what = f"{count} calls that rank {other} did not refuse, the last one in"
    why = last.rstrip(".") or "a verb, for a reason that has not arrived here"
    return OutOfStep(
        f"ranks {rank} and {peer} are out of step: rank {refused} refused {what} {why}. A rank may "
        f"go on after an error that all ranks got. {SAME_ORDER}"
    )


def mismatch(
    rank: int, peer: int, found: dict[str, tuple[Any, ...]], callers: Callers
) -> MoeEngineError:
    """The error of ranks whose calls differ in `found`: for each name, the values of both."""
    if "verb" in found:
        ours, theirs = (_verb(value) for value in found["verb"])
        return OutOfStep(
            f"ranks {rank} and {peer} are out of step: rank {rank} began {ours}, rank {peer} began "
            f"{theirs}. {SAME_ORDER}"
        )
    if CALLER in found:
        ours, theirs = map(callers.name, found[CALLER])
        return OutOfStep(
            f"ranks {rank} and {peer} are out of step: rank {rank} called {ours}, rank {peer} "
            f"called {theirs}. {SAME_ORDER}"
        )
    if DISPATCH_OF_HANDLE in found:
        ours, theirs = (str(value) for value in found[DISPATCH_OF_HANDLE])
        return OutOfStep(
            f"ranks {rank} and {peer} are out of step: the handle of rank {rank} is of call "
            f"{ours}, that of rank {peer} of call {theirs}. {SAME_ORDER}"
        )
    if SAVED in found:
        found[SAVED] = tuple(map(saved_name, found[SAVED]))
    sizes = ", ".join(
        f"{name} {one} on rank {rank} and {other} on rank {peer}"
        for name, (one, other) in found.items()
    )
    return ShapeError(
        f"ranks {rank} and {peer} began calls of different shapes: {sizes}. They must agree on all "
        "ranks; make a new Buffer."
    )


def _as_int32(bits: int) -> int:
    return bits - 2**32 if bits >> 31 else bits


def _verb(kind: int) -> str:
    known = {int(one) for one in Kind}
    return Kind(kind).name.lower() if kind in known else f"something unknown ({kind})"
