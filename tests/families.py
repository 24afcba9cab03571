"""All classes of experts in the installed transformers: which of them the engine runs, and how.

`python tests/families.py` prints the table of docs/families.md.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from moe_engine.integrations.transformers_experts import gate_of, shape_of, unfit_parts

MODELS = Path(transformers.__file__).parent / "models"
HEAD = "| experts of transformers | activation | weights |\n|---|---|---|"
SIZES = dict(hidden_size=32, num_experts_per_tok=2)
SIZES |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4)
SIZES |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), 24)


class Family(NamedTuple):
    """A class of experts, in the folder `model` of transformers."""

    model: str
    module: str
    name: str

    def build(self, **sizes: int) -> Any:
        """The experts, with sizes of SIZES, or these, and drawn weights; TypeError if transformers'
        configs of this module do not make them."""
        module = importlib.import_module(f"transformers.models.{self.model}.{self.module}")
        kind, problem = getattr(module, self.name), None
        for config in _configs(module):
            for name, size in (SIZES | sizes).items():
                if hasattr(config, name) and isinstance(getattr(config, name), int | None):
                    setattr(config, name, size)
            config.num_experts_per_tok = 2
            try:  # some have layers of experts of several sizes, which the layer names
                of_several = isinstance(getattr(config, "moe_intermediate_size", None), list)
                experts = kind(config, 24) if of_several else kind(config)
            except (AttributeError, TypeError, KeyError) as error:
                problem = error
                continue
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in experts.parameters():
                    weight.normal_(std=0.5, generator=generator)
            return experts
        raise TypeError(f"{self.name}: {problem}")


def _configs(module: Any) -> Iterator[PretrainedConfig]:
    """New configs of the kinds that a module imports, those of texts first."""
    kinds = {
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, PretrainedConfig) and one != PretrainedConfig
    }
    for kind in sorted(kinds, key=lambda one: ("Text" not in one.__name__, one.__name__)):
        config = kind()
        yield config
        if (text := getattr(config, "text_config", None)) is not None:
            yield text


def families() -> list[Family]:
    """The classes that transformers runs by an implementation that is chosen by name."""
    decorated = r"^@use_experts_implementation.*\nclass (\w+)"
    return [
        Family(file.parent.name, file.stem, name)
        for file in sorted(MODELS.glob("*/modeling_*.py"))
        for name in re.findall(decorated, file.read_text(), re.MULTILINE)
    ]


def others() -> list[str]:
    """Models with experts that are run by themselves alone."""
    own = r"^class (\w*Experts)\b"
    found = {
        file.parent.name: set(re.findall(own, file.read_text(), re.MULTILINE))
        for file in sorted(MODELS.glob("*/modeling_*.py"))
    }
    chosen = {family.model for family in families()}
    return [model for model, names in found.items() if names and model not in chosen]


def row(family: Family) -> tuple[str, str]:
    """(activation, weights) of a family as in the table; or why it is refused."""
    with torch.device("meta"):
        experts = family.build()
    if unfit := unfit_parts(experts):
        return "refused: " + ", ".join(unfit), ""
    gate = gate_of(experts)
    assert gate is not None
    name, limit, alpha, shift = gate.activation
    said = [f"limit {limit:g}"] if limit is not None else []
    said += [f"alpha {alpha:g}"] if alpha != 1 else []
    said += [f"shift {shift:g}"] if shift else []
    forms = {
        "no gate": not experts.has_gate,
        "transposed": experts.is_transposed,
        "interleaved": gate.is_interleaved,
        "biases": experts.has_bias,
    }
    return ", ".join([name, *said]), ", ".join(form for form, has in forms.items() if has)


def table() -> str:
    """Of all families; those that are alike share a row, those like Mixtral the first."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family in families():
        rows.setdefault(row(family), []).append(family.model)
    lines = [
        f"| {', '.join(dict.fromkeys(models))} | {activation} | {weights} |"
        for (activation, weights), models in sorted(rows.items(), key=lambda one: -len(one[1]))
    ]
    own = ", ".join(others())
    lines.append(f"| {own} | refused: transformers runs them by no other implementation | |")
    return "\n".join([HEAD, *lines])


class Layers(nn.Module):
    """Experts as a model of transformers holds them, each of which computes columns of its own."""

    def __init__(self, *experts: Any):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.widths = [shape_of(one)[1] for one in experts]
        self.set_experts_implementation("eager")

    def set_experts_implementation(self, name: str) -> None:
        for one in self.experts:
            one.config._experts_implementation = name

    def forward(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [1, T, H], as a model gets its tokens."""
        parts = zip(self.experts, x[0].split(self.widths, 1), strict=True)
        return torch.cat([one(part.contiguous(), idx, weights) for one, part in parts], 1)


if __name__ == "__main__":
    print(table())
