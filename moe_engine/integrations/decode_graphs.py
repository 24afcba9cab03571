"""Decode steps of a transformers model as CUDA graphs: `shard_experts(model, cuda_graphs=True)`.

A step brings one new token for each sequence to a static cache. The first step of a kind runs as
any pass does; the second one is captured, and replayed from then on.

Ranks need not replay the same passes. Kernels take from the host nothing but how many tokens any
rank brings, and a graph holds the calls for one such number. So the hosts agree on the number
before each step, as before each pass, and a rank replays the graph of the number that came, or has
none and runs the step by the host; the others cannot tell which. Those that are done run, or
replay, passes without tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..buffer import Buffer
from ..checks import check_flag
from ..errors import BackendError, MoeEngineError
from ..symm import resolve_device
from ..utils import untraced
from .forward_passes import ForwardPasses
from .transformers_experts import experts_layers, has_own_forward

CACHE_NAMES = "cache", "past_key_values"
"""The argument of a model that is its cache: since transformers 5.24, and before."""
MOST_GRAPHS = 8
"""The most graphs of one cache: one for each size of the batches that come in turn as ranks begin
and end."""

Call = Callable[[], Any]

# --- What can be captured ------------------------------------------------------------------------


def generating(model: Any) -> Any:
    """The model whose decode steps are captured: the outermost of transformers' own in `model` that
    generates. None if there is none."""
    names = "generate", "set_experts_implementation"
    return next((m for m in model.modules() if all(hasattr(type(m), n) for n in names)), None)


def check_graphs(model: Any, cuda_graphs: bool, backend: str) -> None:
    """Raise BackendError where decode steps of a model are to be captured, and none can be;
    DtypeError for `cuda_graphs` that is no bool."""
    check_flag("cuda_graphs", cuda_graphs)
    if not cuda_graphs:
        return
    if backend == "collective":
        raise BackendError(
            "cuda_graphs is True with backend 'collective', whose hosts wait for the counts of "
            "each layer. Leave cuda_graphs out, or choose another backend."
        )
    if resolve_device(None).type != "cuda":
        raise BackendError(
            "cuda_graphs is True on a CPU, which has no CUDA graphs. Leave it out, or run on GPUs."
        )
    if generating(model) is None:
        raise BackendError(
            f"cuda_graphs is True for a {type(model).__name__}, which has no generate. Give "
            "shard_experts the whole model, such as a ...ForCausalLM."
        )
    if has_own_forward(generating(model)):
        raise BackendError(
            f"cuda_graphs is True, and the {type(model).__name__} has a forward of its own, as "
            "accelerate's hooks and torch.compile set it, which graphs would leave out. Remove it, "
            "hooks by accelerate.hooks.remove_hook_from_module(model, recurse=True), or leave "
            "cuda_graphs out."
        )
    if others := layers_not_static(generating(model).config):
        raise BackendError(
            f"cuda_graphs is True, and the static cache of {type(model).__name__} has "
            f"{', '.join(others)}, whose steps the host directs. Only caches of whole attention "
            "can be captured: leave cuda_graphs out."
        )


def layers_not_static(config: Any) -> list[str]:
    """The names of the layers of a model's static cache that are more than keys and values."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    try:
        layers = StaticCache(config.get_text_config(decoder=True), max_cache_len=1).layers
    except KeyError as error:  # transformers has no static layer for these
        return [f"no layer for {error}"]
    return sorted({type(one).__name__ for one in layers if type(one) is not StaticLayer})


def is_static(cache: Any) -> bool:
    """Whether a cache stays where it is, with whole attention in each layer, and holds a prompt."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    if type(cache) is not StaticCache or cache.offloading:
        return False
    return all(type(layer) is StaticLayer and layer.is_initialized for layer in cache.layers)


def with_static_cache(model: Any, args: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` with a static cache, where they leave the choice, and without
    transformers' own compilation of decode."""
    configs = (more.get("generation_config"), *args[1:2], model.generation_config)

    def given(name: str) -> Any:
        values = (more.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    has_other_cache = (
        any(more.get(name) is not None for name in CACHE_NAMES)
        or given("cache_implementation") is not None
        or given("use_cache") is False
    )
    needs_other = (
        more.get("assistant_model") is not None
        or given("prompt_lookup_num_tokens") is not None
        or (given("num_beams") or 1) > 1
    )
    if has_other_cache or needs_other:
        return {"disable_compile": True} | more
    return {"disable_compile": True, "cache_implementation": "static"} | more


def is_fully_sharded(model: Any) -> bool:
    """Whether FSDP2 gathers weights of a model for each pass, each time to another place."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


class Step(NamedTuple):
    """The inputs of a decode step: tensors, in a dict or in dicts within it, and numbers.
    cache_name: the one of CACHE_NAMES by which the cache came."""

    cache: Any
    cache_name: str
    inputs: dict[str, Any]
    num_tokens: int
    kind: Hashable

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> Step | None:
        """From the named arguments of the model; None for anything else than a decode step."""
        inputs = dict(inputs)
        ids = inputs.get("input_ids")
        given = (one for one in CACHE_NAMES if inputs.get(one) is not None)
        cache = inputs.pop(name := next(given, ""), None)
        if not isinstance(ids, Tensor) or ids.shape[1:] != (1,) or not is_static(cache):
            return None
        kind: list[Hashable] = [name]
        for key, value in items(inputs):
            if isinstance(value, Tensor):
                kind.append((key, value.shape, value.dtype, value.device))
            elif value is None or isinstance(value, bool | int | float | str):
                kind.append((key, value))
            else:
                return None
        for layer in cache.layers:  # a beam search puts other tensors there
            kept = layer.keys, layer.values, layer.cumulative_length
            kind.append(tuple(tensor.data_ptr() for tensor in kept))
        return cls(cache, name, inputs, ids.numel(), tuple(kind))


def items(inputs: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is in a dict and in the dicts within it, by name.

    {"a": 1, "b": {"c": 2}} gives ("a", 1) and ("b.c", 2).
    """
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from items(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def tensors_of(inputs: dict[str, Any]) -> list[Tensor]:
    return [value for _, value in items(inputs) if isinstance(value, Tensor)]


@torch.inference_mode(False)
@torch.no_grad()
def cloned(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs, in memory of their own, to which a replay outside inference mode may store,
    too."""
    found = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, dict):
            found[name] = cloned(value)
        elif isinstance(value, Tensor):
            found[name] = value.clone()
    return found


class Output(NamedTuple):
    """What the model gives: a ModelOutput's class and its tensors, with None in place of the cache,
    which a graph must not keep alive."""

    kind: type
    values: dict[str, Tensor | None]

    @classmethod
    def of(cls, output: Any, cache: object) -> Output | None:
        """None for an output that holds anything but tensors and the cache, such as the tuples of
        output_hidden_states."""
        if not isinstance(output, dict):
            return None
        values = {name: None if value is cache else value for name, value in output.items()}
        if not all(value is None or isinstance(value, Tensor) for value in values.values()):
            return None
        return cls(type(output), values)

    def copied(self, cache: object) -> Any:
        """The ModelOutput in memory of its own, which later replays do not overwrite."""
        found = {name: cache if one is None else one.clone() for name, one in self.values.items()}
        return self.kind(**found)


# --- Graphs --------------------------------------------------------------------------------------


class CudaGraphs:
    """Captures calls as CUDA graphs, on a stream and in a pool of memory of their own.

    The graphs share the pool: what a replay returns is copied before the next one.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None

    def warm_up(self, call: Call) -> Any:
        """`call()`, on the stream of the captures, as torch wants it before."""
        with self._on_stream():
            return call()

    def capture(self, call: Call) -> Call:
        """Capture `call`, which launches nothing now. The function that is returned launches it,
        and returns what `call` did, in memory that each launch overwrites."""
        with self._on_stream():
            if self._first is None:
                # The pool would go with the last graph in it, and torch takes no pool twice.
                self._first, _ = self._captured(lambda: torch.zeros(1, device=self._device))
            graph, result = self._captured(call, self._first.pool())

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    @staticmethod
    def _captured(call: Call, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which empties the memory cache.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = call()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, result

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


@dataclass
class Captured:
    """The graphs with one cache, by kind: their inputs, and what replays them. `last` is the kind
    of the last step, if that may be captured the next time."""

    graphs: dict[Hashable, tuple[dict[str, Any], Call]] = field(default_factory=dict)
    last: Hashable = None


class DecodeGraphs:
    """`forward` of a model, which replays decode steps, and passes without tokens.

    Steps are run by the host with gradients, in training mode, under autocast, in debug mode, under
    FSDP2, while hooks watch the experts (`record_routing`), and in captures of the caller's.
    What is changed after a step was captured, such as hooks, adapters, or weights that were
    replaced, does not reach replays with the same cache.
    Graphs go with their cache, with the Buffer, and with `clear`. `num_replays` counts replays.
    """

    def __init__(self, model: Any, buffer: Buffer, passes: ForwardPasses):
        self.num_replays = 0
        self.__signature__ = inspect.signature(model.forward)
        self._model, self._buffer, self._passes = model, buffer, passes
        self._layers = experts_layers(model)
        self.clear()
        buffer.before_destroy(self.clear)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeGraphs:
        memo[id(self)] = copied = copy.copy(self)
        for name in ("_model", "_passes", "_layers"):
            setattr(copied, name, copy.deepcopy(vars(self)[name], memo))
        copied.clear()
        copied._buffer.before_destroy(copied.clear)
        return copied

    def clear(self) -> None:
        """Free all graphs."""
        self._captured: WeakKeyDictionary[Any, Captured] = WeakKeyDictionary()
        self._capturing: CudaGraphs | None = None

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model for these arguments of its `forward`, tensors of a decode step in
        memory of their own."""
        forward, step = partial(type(self._model).forward, self._model), None
        if self._may_replay():
            step = Step.of(dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs)
        if step is None:
            return forward(*args, **kwargs)
        most = self._passes.agree(step.num_tokens)
        call = partial(forward, **{step.cache_name: step.cache})
        if self._is_prefill(most, step.num_tokens):
            with self._passes.fixing(most):
                return call(**step.inputs)
        return self._run(step.cache, most, step.kind, step.inputs, call)

    @torch.no_grad()
    def join(self, most: int, call: Call) -> None:
        """`call()`, a pass without tokens to which another rank brings `most`."""

        def run() -> dict[str, Any]:
            call()
            return {}

        if self._may_replay() and not self._is_prefill(most):
            self._run(self._passes, most, "without tokens", {}, run)
        else:
            with self._passes.fixing(most):
                call()

    def end_join(self) -> None:
        """All ranks are done: free the graphs of passes without tokens, which have no cache to go
        with, and so would outlive weights that are replaced."""
        self._captured.pop(self._passes, None)

    def _is_prefill(self, most: int, num_tokens: int = 0) -> bool:
        """Whether another rank brings more than a decode step, by its size."""
        return most > max(num_tokens, self._buffer.options.decode_tokens)

    def _may_replay(self) -> bool:
        device = self._buffer.device.type
        return not (
            torch.is_grad_enabled()
            or self._model.training
            or torch.is_autocast_enabled(device)
            or self._buffer.options.debug
            or any(one._forward_pre_hooks or one._forward_hooks for one in self._layers)
            or (device == "cuda" and torch.cuda.is_current_stream_capturing())
        )

    def _run(
        self, owner: object, most: int, kind: Hashable, inputs: dict[str, Any], call: Call
    ) -> Any:
        """`call(**inputs)`, by a graph from the second call of a kind on. The graph lives as long
        as `owner`, the cache of a step; `most` is what the ranks have agreed on."""
        captured = self._captured.setdefault(owner, Captured())
        graphs, passes = captured.graphs, self._passes
        self._capturing = self._capturing or CudaGraphs(self._buffer.device)
        kind = most, passes.counts is not None, torch.is_inference_mode_enabled(), kind
        with passes.fixing(most):
            if kind not in graphs and kind != captured.last:
                result = self._capturing.warm_up(partial(call, **inputs))
                may_be_captured = Output.of(result, owner) and not is_fully_sharded(self._model)
                captured.last = kind if may_be_captured else None
                return result
            if kind not in graphs:
                graphs[kind] = self._capture(owner, inputs, call)
                if len(graphs) > MOST_GRAPHS:
                    del graphs[next(iter(graphs))]
            static, replay = graphs[kind]
            for kept, new in zip(tensors_of(static), tensors_of(inputs), strict=True):
                kept.copy_(new)
            output, counts = self._buffer.launch(replay)
        self.num_replays += 1
        if passes.counts is not None:
            passes.counts.extend(counts.clone().unbind())
        return output.copied(owner)

    def _capture(
        self, owner: object, inputs: dict[str, Any], call: Call
    ) -> tuple[dict[str, Any], Call]:
        """Inputs like these, in memory of their own, and what replays `call` with them."""
        static, is_counted = cloned(inputs), self._passes.counts is not None

        def work() -> tuple[Output | None, Tensor | None]:
            if not is_counted:
                return Output.of(call(**static), owner), None
            with self._passes.counting() as counts:
                output = Output.of(call(**static), owner)
            return output, torch.stack(counts)

        assert self._capturing is not None
        try:
            return static, self._buffer.launch(partial(self._capturing.capture, work))
        except MoeEngineError:
            raise
        except RuntimeError as error:
            raise BackendError(
                f"cuda_graphs is True, and a decode step of {type(self._model).__name__} cannot be "
                f"captured: {error} Call shard_experts without cuda_graphs, or load the model with "
                'attn_implementation="sdpa".'
            ) from error
