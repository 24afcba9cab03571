"""The verb of a whole layer."""

from __future__ import annotations

import torch

from . import checks
from .callers import Tag
from .engines.base import Engine, LayerInputs, LayerResult, check_scales
from .errors import ShapeError
from .grouped_gemm.activations import Activation, check_layer_activation
from .kinds import Described, Kind
from .lifecycle import verb
from .low_latency_verbs import LowLatencyVerbs
from .streams import EventOverlap


class LayerVerbs(LowLatencyVerbs):
    """The routed experts of a layer in one call, which `moe_engine.moe_ffn` makes."""

    @verb
    def moe_ffn(
        self,
        inputs: LayerInputs,
        async_finish: bool = False,
        max_tokens: int | None = None,
        return_counts: bool = False,
        tag: Tag | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, torch.Tensor | None]:
        """(result [T, H], event, counts int32 [E] or None) of a layer's routed experts; see
        `moe_engine.moe_ffn`."""
        engine = self._ready()
        x, topk_idx, _, w_gate_up, w_down, *_ = inputs
        described = engine.describe(*inputs, max_tokens, return_counts, weights=w_down)
        kind = described.kind
        if not kind.is_checked:
            self._check_layer(inputs)
            most_tokens = self._most_tokens(x, topk_idx, w_gate_up, max_tokens)
            kind.choice = 0 if return_counts else most_tokens
        caller = self._caller_of_layer(inputs, kind, tag)
        with self._streams.call(None, async_finish, caller=caller) as call:
            if call.is_async:
                call.reads(*inputs.tensors)
            out, counts = self._launch_layer(engine, inputs, return_counts, described)
            if call.is_async:
                call.returns(out, counts)
        kind.is_checked = True
        return out, call.event, counts

    def _caller_of_layer(self, inputs: LayerInputs, kind: Kind, tag: Tag | None) -> int:
        """The caller of a layer: by its tag, else by that of the block, else by what ranks must
        give alike of its experts. kind: of its arguments."""
        callers = self._streams.callers
        if tag is not None:
            return callers.number(tag)
        if of_block := callers.of_block():
            return of_block
        if kind.caller is None:
            name = Activation.of(inputs.activation).name
            biases = [" with a bias" for b in (inputs.b_gate_up, inputs.b_down) if b is not None]
            columns = inputs.w_down.shape[2]
            kind.caller = callers.number(f"unnamed, {columns} columns, {name}{''.join(biases)}")
        return kind.caller

    def _launch_layer(
        self, engine: Engine, inputs: LayerInputs, return_counts: bool, described: Described
    ) -> LayerResult:
        """(result, counts or None), by low-latency calls if the kind of these arguments says so."""
        kind, low_latency = described.kind, self._low_latency
        most_tokens = kind.choice
        if not most_tokens or low_latency is None:
            found = engine.again(described)
        else:
            found = low_latency.again(described, num_calls=2), None
        if found is not None and found[0] is not None:
            return found
        args = inputs.packed
        kind.is_packed = args is inputs
        if most_tokens and low_latency is not None:
            return low_latency.moe_ffn(args, most_tokens, described.if_packed), None
        return engine.moe_ffn(args, return_counts, described.if_packed)

    def _check_layer(self, inputs: LayerInputs) -> None:
        """Refuse arguments of a layer that do not fit one another."""
        x, topk_idx, topk_weights, w_gate_up, w_down = inputs[:5]
        checks.check_rows("x", x, device=self._rows_device)
        check_layer_activation(inputs.activation)
        check_scales(inputs)
        checks.check_expert_weights(x, w_gate_up, w_down, inputs.parts, inputs.operand_dtype)
        checks.check_expert_biases(x, w_gate_up, w_down, inputs.b_gate_up, inputs.b_down)
        num_experts = checks.check_experts(len(w_gate_up) * self.group_size, self.group_size)
        most = self.options.max_experts
        if most is not None and num_experts > most:
            raise ShapeError(
                f"w_gate_up has {len(w_gate_up)} experts, which on {self.group_size} ranks are "
                f"{num_experts}, and this Buffer was made for {most}. Pass the experts of this "
                "rank alone, or make the Buffer for those of all ranks."
            )
        checks.check_routing(x, topk_idx, topk_weights)

    def _most_tokens(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        w_gate_up: torch.Tensor,
        max_tokens: int | None,
    ) -> int:
        """The most tokens of a rank in a layer that runs by low-latency calls; 0: it does not."""
        max_tokens = checks.check_max_tokens(len(x), max_tokens)
        max_tokens = self.options.max_tokens if max_tokens is None else max_tokens
        num_experts = w_gate_up.shape[0] * self.group_size
        sizes = x.shape[1] * x.itemsize, topk_idx.shape[1], num_experts  # equal on all ranks
        low_latency = self._low_latency
        if w_gate_up.itemsize == 1 and x.shape[1] % 128:  # its casts take whole blocks
            return 0
        if low_latency is None or not low_latency.takes(max_tokens, *sizes, self.options):
            return 0
        checks.check_max_tokens(len(x), max_tokens)
        return max(1, max_tokens or 0)

    @property
    def _rows_device(self) -> torch.device | None:
        """On which rows must lie; None: any."""
        return None if self.backend == "collective" else self.device
