"""moe_engine: a mixture-of-experts communication engine in stock torch and Triton.

Letters used in names and shapes throughout:
T tokens per rank, H hidden, I expert intermediate, E experts, K top-k, R ranks,
L local experts (E / R), N received rows, S slot.
"""

from .buffer import Buffer
from .callers import calls_tagged
from .elastic import ElasticBuffer
from .elastic_handle import EPHandle
from .engines.base import Handle
from .ep_buffer import EPBuffer
from .errors import (
    BackendError,
    CallAbandoned,
    CapacityError,
    DtypeError,
    MoeEngineError,
    OutOfStep,
    PeerTimeout,
    RoutingError,
    ShapeError,
)
from .grouped_gemm.activations import Activation
from .layer import LayerInFlight, MoEFeedForward, moe_ffn, start_moe_ffn
from .layer_config import LayerConfig
from .options import Config, Options
from .streams import EventHandle, EventOverlap
from .weight_gradients import DelayedWgrad, WgradSink

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "BackendError",
    "Buffer",
    "CallAbandoned",
    "CapacityError",
    "Config",
    "DelayedWgrad",
    "DtypeError",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "Handle",
    "LayerConfig",
    "LayerInFlight",
    "MoEFeedForward",
    "MoeEngineError",
    "Options",
    "OutOfStep",
    "PeerTimeout",
    "RoutingError",
    "ShapeError",
    "WgradSink",
    "calls_tagged",
    "moe_ffn",
    "start_moe_ffn",
]
