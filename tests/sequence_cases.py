"""Sequences of mixed calls on Buffers that stay, each of which every rank knows the result of.

All ranks draw the same sequence from its seed. A *start* is a call that may leave something for
later: a handle for combines, a forward for its backward, a low-latency call for its hook. What is
left is a `Later`, and a sequence makes these in any order among other starts. Values are as in
`rounds`; options, and how tensors lie, are drawn as well.
"""

from __future__ import annotations

import traceback
from typing import Any

import fuzz_values
import pytest
import torch
from rounds import FEW
from sequence_calls import Exchanges
from sequence_layers import Layers
from sequence_values import Later, Wrong

from moe_engine import MoeEngineError, calls_tagged, moe_ffn, start_moe_ffn

REFUSED = [odd for odd in fuzz_values.TENSORS if odd.outcome == fuzz_values.REFUSED]
MOST_LATER = 6


class Sequence(Exchanges, Layers):
    """Calls of every kind in any order, refused ones among them."""

    # --- Refused calls ---------------------------------------------------------------------------

    def refuse(self, only: int | None = None) -> None:
        """A call that all ranks are refused alike, or one of them alone."""
        drawn = self.tokens(torch.bfloat16, least=1)  # where there are none, all are alike
        x, idx, weights = (part[self.rank].clone() for part in drawn)
        up, down = (part[self.rank] for part in self.weights(torch.bfloat16))
        odd = self.rng.choice(REFUSED)
        self.log[-1] += f" {odd.name}"
        verbs = ["layer", "started layer", "dispatch"]
        if self.has_low_latency:
            verbs.append("low latency")
        verb = self.choose("verb", *verbs)
        if only is not None and self.rank != only:
            return
        try:
            wrong = odd.make(x)
        except Exception:  # torch has no such tensor
            wrong = None
        with pytest.raises((MoeEngineError, TypeError)):
            if verb == "layer":
                moe_ffn(wrong, idx, weights, up, down, self.buffer)
            elif verb == "started layer":
                start_moe_ffn(wrong, idx, weights, up, down, self.buffer)
            elif verb == "low latency":
                self.buffer.low_latency_dispatch(wrong, idx, FEW, self.num_experts)
            else:
                layout = self.buffer.get_dispatch_layout(idx, self.num_experts)
                counts = layout[0], None, layout[3], layout[2]
                self.buffer.dispatch(wrong, None, *counts, idx, weights)

    def refuse_alone(self) -> None:
        """One rank is refused a call: all are out of step at the next one, and make a Buffer."""
        if self.num_ranks == 1:
            return self.refuse()
        self._make_room(2)
        self.refuse(self.choose("rank", *range(self.num_ranks)))
        drawn = self.tokens(torch.bfloat16)
        up, down = (part[self.rank] for part in self.weights(torch.bfloat16))
        few = self.choose("max_tokens", None, FEW)
        try:
            moe_ffn(*(part[self.rank] for part in drawn), up, down, self.buffer, few)
            self.buffer.check()
        except MoeEngineError as error:
            if type(error).__name__ != "OutOfStep" or "refused" not in str(error):
                raise
        else:
            raise Wrong("a rank that was refused a call is not out of step")
        self.later = [one for one in self.later if one.buffer != "normal"]
        torch.distributed.barrier(self.group)
        self.buffer.destroy()
        self.buffers["normal"] = self._new_buffer()

    # --- The sequence ----------------------------------------------------------------------------

    def _make_room(self, num_calls: int) -> None:
        """Call the hooks of low-latency calls whose memory so many new ones need."""
        while hooks := [one for one in self.later if one.name.startswith("hook")]:
            oldest = min(hooks, key=lambda one: one.began)
            if self.num_low_latency - oldest.began + 1 + num_calls <= self.options["num_slots"]:
                break
            self._make(oldest)
        self.num_low_latency += num_calls

    def _make(self, one: Later) -> None:
        """Make a call that was left."""
        self.log.append(one.name)
        if not one.often or len(self.later) > MOST_LATER:
            self.later.remove(one)
        if one.name == "low-latency combine":
            self._make_room(1)
        one.run()

    def step(self) -> None:
        """One call."""
        starts = {
            self.dispatch: 2,
            self.rows: 2,
            self.layer: 6,
            self.low_latency: 3 if self.has_low_latency else 0,
            self.elastic_dispatch: 2,
            self.refuse: 2,
            self.refuse_alone: 0.5,
        }
        if self.later and (self.rng.random() < 0.5 or len(self.later) > MOST_LATER):
            self._make(self.rng.choice(self.later))
            return
        [start] = self.rng.choices(list(starts), list(starts.values()))
        self._make_room({"low_latency": 1, "layer": 2}.get(start.__name__, 0))
        self.log.append(start.__name__)
        tag = self.rng.choice((None, "some layer"))
        if tag is None:
            start()
        else:
            with calls_tagged(tag):
                start()

    def end(self) -> None:
        self.log.append("end")
        while once := [one for one in self.later if not one.often]:
            self._make(self.rng.choice(once))
        for buffer in self.buffers.values():
            buffer.check()
        torch.distributed.barrier(self.group)
        for buffer in self.buffers.values():
            buffer.destroy()


def run_sequence(group: Any, seed: int, num_calls: int) -> str | None:
    """What was wrong on this rank in the sequence of this seed, or None."""
    sequence = Sequence(group, seed)
    for number in range(num_calls + 1):
        problem = None
        try:
            sequence.step() if number < num_calls else sequence.end()
        except BaseException:
            problem = traceback.format_exc(limit=-6)
        bad = torch.tensor(float(problem is not None))
        torch.distributed.all_reduce(bad, group=group)
        if bad:
            calls = "\n    ".join(sequence.log)
            return f"seed {seed}, rank {sequence.rank} of {sequence.num_ranks}: {calls}\n{problem}"
    return None


def run_sequences(group: Any, seeds: range, num_calls: int) -> list[str]:
    """What was wrong on this rank in these sequences, of which the first wrong one is the last."""
    torch.manual_seed(0)
    for seed in seeds:
        problem = run_sequence(group, seed, num_calls)
        if problem is not None:
            return [problem]
    return []
