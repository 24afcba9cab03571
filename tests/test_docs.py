"""What the pages name exists: files, modules, kernels, commands, errors. Links lead somewhere."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

import moe_engine
from moe_engine import errors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
FOLDERS = "moe_engine|dispatch|combine|grouped_gemm|docs|tests|bench|examples|tools"

sys.path.append(str(DOCS))
import layer_walk  # noqa: E402

by_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def in_backticks(text: str) -> list[str]:
    """What the page sets as code within a line."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


@by_page
def test_files_exist(path: Path) -> None:
    named = {name for name in in_backticks(path.read_text()) if re.match(rf"(?:{FOLDERS})/", name)}
    patterns = [re.sub(r"<\w+>", "*", name).rstrip("/") for name in named]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []


@by_page
def test_modules_and_what_they_have_exist(path: Path) -> None:
    for name in in_backticks(path.read_text()) + re.findall(r"^::: (.+)", path.read_text(), re.M):
        if re.fullmatch(r"moe_engine(\.\w+)+", name):
            module, _, attribute = name.rpartition(".")
            found = importlib.import_module(module)
            if isinstance(found, ModuleType) and not hasattr(found, attribute):
                importlib.import_module(name)


def anchors(path: Path) -> set[str]:
    """Those of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)", path.read_text(), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {re.sub(r"\s", "-", heading.strip()) for heading in plain}


@by_page
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(((?!https?:)[^)]+)\)", path.read_text()):
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def kernels() -> set[str]:
    """The names of all kernels, without their ending."""
    folders = [ROOT / name for name in ("moe_engine", "dispatch", "combine", "grouped_gemm")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return {name for path in files for name in re.findall(r"def (\w+)_kernel\(", path.read_text())}


def test_kernels_exist_and_have_these_names() -> None:
    page = (DOCS / "architecture.md").read_text()
    [table] = re.findall(r"^\| call \| launches \|\n(.*?)\n\n", page, re.M | re.S)
    launches = "\n".join(row.split("|")[2] for row in table.splitlines())
    named = set(in_backticks(launches))
    assert named >= set(layer_walk.KERNELS)
    assert named - kernels() == set()


def test_the_walk_is_that_of_the_reference() -> None:
    page = re.sub(r"^ +", "", (DOCS / "architecture.md").read_text(), flags=re.M)
    assert layer_walk.row_table() in page
    assert layer_walk.sum_table() in page
    counts = [layer_walk.reference.layout(ids, 4, 2)[1].tolist() for ids in layer_walk.topk_idx()]
    assert f"sends {counts[0]} rows" in page
    assert f"sends {counts[1]}." in page


def command(name: str) -> Any:
    """A command of `moe-engine`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, app = scripts["moe-engine"].partition(":")
    group: Any = typer.main.get_command(getattr(importlib.import_module(module), app))
    return group.commands[name]


@by_page
def test_commands_and_their_options_exist(path: Path) -> None:
    line = r"(?:moe-engine|python -m moe_engine) ([a-z][\w-]*)((?: +[\w./-]+)*)"
    for name, rest in re.findall(line, path.read_text()):
        options = {option for known in command(name).params for option in known.opts}
        assert set(re.findall(r"--[\w-]+", rest)) - {"--help"} <= options


def test_every_error_has_its_row() -> None:
    page = (DOCS / "errors.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    public = {kind.__name__ for kind in kinds if issubclass(kind, errors.MoeEngineError)}
    rows = set(re.findall(r"^\| `(\w+)`", page, re.M))
    assert rows == public - {"MoeEngineError"}


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "api.md").read_text()
    assert [name for name in moe_engine.__all__ if not re.search(rf"\b{name}\b", page)] == []
