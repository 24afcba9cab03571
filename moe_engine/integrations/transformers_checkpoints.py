"""Load a checkpoint of transformers so that each rank reads its own experts, and write it again.

    model, buffer = load_sharded("mixtral-8x7b", group, dtype=torch.bfloat16)

The model is made without memory, on the meta device. There each rank's experts become DTensors of
all experts, from which transformers knows what a rank has to read, whether a checkpoint has one
tensor for each expert (Mixtral's, Qwen's and DeepSeek's do) or one for all. It reads each tensor
straight to the device.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..buffer import Buffer
from ..checks import shown
from ..errors import BackendError, CheckpointError, DtypeError
from ..symm import exchange
from ..symm.meeting import per_rank
from .decode_graphs import check_graphs
from .expert_parts import expert_parts, is_peft, whole_state_dict
from .forward_passes import ForwardPasses
from .transformers import (
    Sizes,
    check_model,
    connect,
    keep_share,
    ranks_of,
    selected,
    share_of,
)
from .transformers_experts import experts_layers

INDEX = "model.safetensors.index.json"
PLACING = {"device_map", "max_memory", "tp_plan", "tp_size", "device_mesh", "distributed_config"}
"""Arguments of `from_pretrained` that say where weights go."""
LOADING_S = 1800.0
"""Seconds that ranks wait for one whose disk is slower, or which writes a checkpoint."""


@torch.inference_mode(False)  # parameters stay ordinary ones
def load_sharded(
    checkpoint: str | Path,
    group: dist.ProcessGroup | None = None,
    *,
    mesh: DeviceMesh | None = None,
    max_tokens: int = 4096,
    backend: str = "auto",
    cuda_graphs: bool = False,
    device: torch.device | str | None = None,
    model_class: Any = None,
    **more: Any,
) -> tuple[Any, Buffer]:
    """The model of a checkpoint as `shard_experts` would leave it, and its Buffer.

    Collective over `group` (None: all ranks). No rank ever has the experts of others, neither in
    its host's memory nor on its GPU. `checkpoint` is a folder with safetensors, or the name of a
    repository that is then downloaded. `device` is the current GPU, or else the CPU; `model_class`
    the class that config.json names; `more` goes to its `from_pretrained`, as `dtype=` does, which
    is that of the checkpoint otherwise. `group`, `mesh`, `max_tokens`, `backend` and
    `cuda_graphs` are those of `shard_experts`, whose errors are raised before anything is read.
    Where `model_class` is another class than that of the checkpoint, such as
    MixtralForSequenceClassification, what it has around the decoder and the checkpoint lacks is
    made as transformers makes it, alike on all ranks, and a warning names it; so is what has
    another shape with `ignore_mismatched_sizes=True`, but for experts.
    Raises CheckpointError, on all ranks, for files or tensors that are missing, cut off or of other
    shapes; BackendError for quantized models, except with `**dequantize_options(checkpoint)`.
    """
    group, *_ = ranks_of(group, mesh)
    loaded: list[tuple[Any, Sizes]] = []

    def load() -> list[str]:
        check = partial(check_graphs, cuda_graphs=cuda_graphs, backend=backend)
        model, sizes, new = _load(checkpoint, group, mesh, device, model_class, check, more)
        loaded.append((model, sizes))
        return new

    # All ranks learn of what one could not read, before any of them waits for another's Buffer.
    new = exchange(group, load, "loading a checkpoint", LOADING_S)
    [(model, sizes)] = loaded
    _make_alike(model, new, group, checkpoint)
    with selected(model) as before:
        buffer = Buffer.for_tokens(group, max_tokens, *sizes, backend=backend)
        connect(model, buffer, ForwardPasses(group, max_tokens), before, cuda_graphs)
    return model, buffer


def _load(
    checkpoint: str | Path,
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    device: torch.device | str | None,
    model_class: Any,
    check: Callable[[Any], None],
    more: dict[str, Any],
) -> tuple[Any, Sizes, list[str]]:
    """The model with this rank's experts, which nothing runs yet, the sizes of its layers, and the
    names of what the checkpoint does not have for it. `check` may refuse the model, before anything
    is read."""
    _check_more(more)
    group, rank, num_ranks = ranks_of(group, mesh)
    folder = local_folder(checkpoint)
    check_files(folder)
    if device is None:
        at = torch.cuda.current_device() if torch.cuda.is_available() else None
        device = torch.device("cpu") if at is None else torch.device("cuda", at)
    device = torch.device(device)
    whole = model_class or _class_of(_config_of(folder))
    _check_class(whole)
    of_loading = mesh
    if mesh is None and group is not None:
        of_loading = DeviceMesh.from_group(group, device.type, mesh_dim_names=("ep",))
    sizes: list[Sizes] = []

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        check_dequantized(folder, config)
        sizes.append(check_model(self, num_ranks, mesh))
        check(self)
        keep_share(self, rank, num_ranks, of_loading)

    # Its name selects how transformers renames the checkpoint's tensors.
    sharding: Any = type(
        whole.__name__, (whole,), {"__init__": init, "__module__": whole.__module__}
    )
    try:
        with _progress_of(rank == 0):
            model, info = sharding.from_pretrained(
                folder, device_map={"": device}, output_loading_info=True, **more
            )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error, BackendError):
            raise
        raise CheckpointError(f"{folder} could not be loaded: {error}") from error
    model.__class__ = whole
    new = _made_anew(model, info, _config_of(folder).architectures or [], folder)
    if mesh is None:
        for part in expert_parts(model):
            part.make_local()
    return model, sizes[0], new


def _check_more(more: dict[str, Any]) -> None:
    """Raise BackendError for arguments of `from_pretrained` that say where weights go, as
    `load_sharded` does."""
    if placing := sorted(more.keys() & PLACING):
        raise BackendError(
            f"{placing[0]}= is given, and load_sharded itself says which rank reads which weights: "
            "leave it out. device= is the device of this rank; a model that transformers is to "
            "distribute is loaded by from_pretrained after register()."
        )


def _made_anew(model: Any, info: dict[str, Any], saved_as: list[str], folder: Path) -> list[str]:
    """The names of parameters that transformers made, since the checkpoint, saved by the classes
    `saved_as`, has none or one of another shape. CheckpointError for those that it must have."""
    name, decoder = type(model).__name__, model.base_model_prefix
    is_other = name not in saved_as and model.base_model is not model
    absent = sorted(info["missing_keys"])
    if lost := [one for one in absent if not is_other or one.startswith(f"{decoder}.")]:
        raise CheckpointError(
            f"{folder} lacks {len(lost)} tensors of {name}, the first of them "
            f"{', '.join(lost[:3])}. Copy the checkpoint again, or name its model_class."
        )
    new = sorted({*absent, *(mismatch[0] for mismatch in info["mismatched_keys"])})
    experts = {id(part.weight) for part in expert_parts(model)}
    if misfits := [one for one in new if id(model.get_parameter_or_buffer(one)) in experts]:
        raise CheckpointError(
            f"{folder} has no {misfits[0]} of the shape that {name} has, and experts are not made "
            "anew. Load it with the sizes of its config."
        )
    return new


def _make_alike(
    model: Any, new: list[list[str]], group: dist.ProcessGroup | None, checkpoint: str | Path
) -> None:
    """Give all ranks what rank 0 has made anew, and say so there. `new` has the names by rank."""
    if any(names != new[0] for names in new):
        raise CheckpointError(
            f"{checkpoint} lacks other tensors on other ranks: {per_rank(new)}. Copy it again."
        )
    for name in new[0]:
        made = model.get_parameter_or_buffer(name).detach()
        if group is not None and group.size() > 1:
            dist.broadcast(made.view(-1).view(torch.uint8), group=group, group_src=0)
    if new[0] and (group is None or group.rank() == 0):
        warnings.warn(
            f"{checkpoint} has no {', '.join(new[0])} for {type(model).__name__}: made anew, alike "
            "on all ranks. Train it before you use the model.",
            stacklevel=4,
        )


def empty_model(checkpoint: str | Path) -> Any:
    """The model of a checkpoint's config on the meta device, in the dtype of its weights, or bf16
    where these are quantized. CheckpointError for a config that cannot be read."""
    config = _config_of(checkpoint)
    dtype = config.dtype or torch.float32
    if getattr(config, "quantization_config", None) is not None:
        dtype = torch.bfloat16
    with torch.device("meta"):
        return _class_of(config)._from_config(config, dtype=dtype)


def dequantize_options(checkpoint: str | Path) -> dict[str, Any]:
    """What `load_sharded` is to pass on, so that transformers dequantizes a checkpoint in MXFP4 or
    fp8 to bf16 while each rank reads its part; {} for weights that are not quantized."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    how = getattr(_config_of(checkpoint), "quantization_config", None)
    if how is None:
        return {}
    return {"quantization_config": AutoQuantizationConfig.from_dict(how | {"dequantize": True})}


def check_dequantized(folder: Path, config: Any) -> None:
    """Raise BackendError for weights that stay quantized in the model of this config."""
    how = getattr(config, "quantization_config", None)
    if how is not None and not getattr(how, "dequantize", False):
        raise BackendError(
            f"{folder} holds a quantized model, and experts run in bf16 or fp32. Pass "
            "**dequantize_options(checkpoint), by which transformers dequantizes MXFP4 and fp8, or "
            "convert the checkpoint to bf16 first."
        )


def local_folder(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint, downloaded if it is the name of a repository."""
    if (folder := Path(checkpoint)).is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        files = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(str(checkpoint), allow_patterns=files))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"checkpoint is {str(checkpoint)!r}, which is no folder here, and could not be "
            f"downloaded: {error}"
        ) from error


def _check_class(whole: Any) -> None:
    """Raise DtypeError for what is no class of models, such as an Auto class, which would load all
    experts on each rank."""
    from transformers import PreTrainedModel

    if not isinstance(whole, type) or not issubclass(whole, PreTrainedModel):
        raise DtypeError(
            f"model_class is {getattr(whole, '__name__', shown(whole))}; it must be the class of a "
            "model, such as MixtralForCausalLM. Leave it out for that of the config."
        )


def _config_of(checkpoint: str | Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the config of {checkpoint} cannot be read: {error}") from error


def _class_of(config: Any) -> Any:
    """The class of transformers that a checkpoint was saved by."""
    import transformers

    names = config.architectures or ["none"]
    if (found := getattr(transformers, names[0], None)) is None:
        raise CheckpointError(
            f"the config.json of {config.name_or_path} names the class {names[0]}, which "
            f"transformers {transformers.__version__} has not. Pass model_class=."
        )
    return found


@contextmanager
def _progress_of(shown: bool) -> Iterator[None]:
    """Show transformers' progress bar on one rank alone."""
    from transformers.utils import logging

    hide = not shown and logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hide:
            logging.enable_progress_bar()


# --- Files ---------------------------------------------------------------------------------------


def check_files(folder: Path) -> None:
    """Raise CheckpointError for a checkpoint that is not complete, by its files' headers alone.

    A missing expert would else move the ones that follow it to its place.
    """
    files = sorted(folder.glob("*.safetensors"))
    indexed: dict[str, str] = {}
    if (index := folder / INDEX).exists():
        try:
            indexed = dict(json.loads(index.read_text())["weight_map"])
            files = [folder / name for name in sorted(set(indexed.values()))]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{index} cannot be read ({type(error).__name__}: {error}). Copy it again."
            ) from error
    if not files:
        raise CheckpointError(
            f"{folder} has no .safetensors files. Save the model by save_pretrained of "
            "transformers 5, which writes them."
        )
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in files:
        found |= {name: (file, shape) for name, shape in _shapes(file).items()}
    for name, file_name in indexed.items():
        if name not in found:
            raise CheckpointError(
                f"{folder / file_name} lacks the tensor {name}, which {INDEX} says it has. Copy "
                "the file again."
            )
    _check_experts(found)


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing. Copy the checkpoint again.") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is cut off, or no safetensors file: {error}. Copy it again."
        ) from error


def _check_experts(found: dict[str, tuple[Path, list[int]]]) -> None:
    """Raise unless each layer's tensors of single experts are all there, of one shape."""
    families: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name in found:
        if match := re.fullmatch(r"(.*\bexperts\.)(\d+)(\..*)", name):
            families[match[1] + "{}" + match[3]][int(match[2])] = name
    most: defaultdict[str, int] = defaultdict(int)  # experts of each layer
    for family, members in families.items():
        layer = family.partition("{}")[0]
        most[layer] = max(most[layer], 1 + max(members))
    for family, members in families.items():
        for number in range(most[family.partition("{}")[0]]):
            if number not in members:
                raise CheckpointError(
                    f"the tensor {family.format(number)} is in no file of the checkpoint, which "
                    "has those of other experts. Copy the checkpoint again."
                )
        file, shape = found[members[0]]
        for name in members.values():
            if found[name][1] != shape:
                raise CheckpointError(
                    f"{name} in {found[name][0]} has the shape {found[name][1]}, and {members[0]} "
                    f"in {file} has {shape}. Copy the checkpoint again."
                )


def save_whole(model: nn.Module, folder: str | Path, **more: Any) -> None:
    """Write the whole model, experts of all ranks included, by rank 0's `save_pretrained`; of a
    PeftModel its adapters.

    Collective over the group of `shard_experts`. The weights are gathered one after another into
    the memory of rank 0's host. `more` goes to `save_pretrained`, as `max_shard_size=` does.
    """
    group = share_of(experts_layers(model)[0]).passes.group
    is_first = group is None or group.rank() == 0
    state = whole_state_dict(model, is_first, adapters_only=is_peft(model))

    def save() -> None:
        if is_first:
            model.save_pretrained(folder, state_dict=state, **more)  # type: ignore[operator]

    exchange(group, save, "saving a checkpoint", LOADING_S)
