"""Habits that are being given up may only become rarer. Whoever lowers a count lowers it here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("moe_engine", "dispatch", "combine", "grouped_gemm")
OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}
MOST_SPLATS, MOST_REACHES = 529, 67


def trees() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name == "torch_privates.py":  # which exists for that
                continue
            yield ast.parse(path.read_text())


def splats(tree: ast.Module) -> Iterator[str]:
    """Variables that are opened at a call, as in `send(*how, **more)`, where a reader of the call
    does not see what is passed."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            opened = [one.value for one in call.args if isinstance(one, ast.Starred)]
            named = [one.value for one in call.keywords if one.arg is None]
            yield from (
                ast.unparse(one) for one in opened if isinstance(one, ast.Name | ast.Attribute)
            )
            yield from (ast.unparse(one) for one in named if isinstance(one, ast.Name))


def reaches(tree: ast.Module) -> Iterator[str]:
    """Private names of what another module defines, as in `buffer._streams`."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in own | OF_NAMED_TUPLES:
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr.startswith("_") and not node.attr.startswith("__") and not of_self:
                yield node.attr


def test_fewer_variables_are_opened_at_calls() -> None:
    assert sum(len(list(splats(tree))) for tree in trees()) <= MOST_SPLATS


def test_fewer_privates_of_other_modules_are_used() -> None:
    assert sum(len(list(reaches(tree))) for tree in trees()) <= MOST_REACHES
