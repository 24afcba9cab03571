"""The wheel holds the tree and nothing else; imports go one way; files stay short."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import cases
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("dispatch", "combine", "grouped_gemm")

# A module imports from its own layer or from earlier ones. A sub-package counts as a whole, and
# "moe_engine" is the package root: the public names, gathered from the layers before it.
LAYERS = (
    ("device",),
    (
        *("errors", "torch_privates", "utils", "deadline", "checks", "hardware", "choice_cache"),
        "timing",
    ),
    (
        *("nvshmem_library", "cuda_driver", "launch_graph", "kernel_bundle", "launch"),
        *("callers", "kinds", "call_memory", "prepared"),
    ),
    (
        *("grouped_gemm", "row_vectors", "expert_major", "expert_major_kernels"),
        *("layer_config", "node_traffic", "reference", "low_latency_reference"),
        "low_latency_handle",
    ),
    ("symm", "streams", "host_collectives", "emulation"),
    ("options", "agreement", "routing", "routing_kernels"),
    ("dispatch",),
    ("combine",),
    ("engines",),
    (
        *("handles", "debug_checks", "lifecycle", "warm_up", "low_latency_verbs", "layer_verbs"),
        *("buffer", "elastic_handle", "elastic_checks", "elastic_verbs", "elastic"),
        "ep_buffer",
    ),
    ("weight_layouts", "sharded_weights", "weight_gradients", "passes", "training"),
    ("expert_row_calls", "operators", "layer_operators"),
    ("layer", "ops", "checkpointing"),
    ("moe_engine",),
    ("integrations",),
    ("tools", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def sources() -> dict[str, Path]:
    """Every source file of the package, by its path inside the wheel."""
    tree = {
        f"moe_engine/{p.relative_to(ROOT / 'moe_engine')}": p
        for p in (ROOT / "moe_engine").rglob("*.py")
    }
    tree |= {
        f"moe_engine/{p.relative_to(ROOT)}": p
        for folder in FOLDERS
        for p in (ROOT / folder).rglob("*.py")
    }
    return dict(sorted(tree.items()))


def module_name(path: str) -> str:
    """`moe_engine/symm/__init__.py` -> `moe_engine.symm`"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def run(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no earlier build directory can add to it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in ("moe_engine", *FOLDERS, "tests", "bench"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_exactly_the_tree(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    data = {str(p.relative_to(ROOT)) for p in (ROOT / "moe_engine/tools/data").glob("*.txt")}
    assert set(names) == {*sources(), *data, "moe_engine/py.typed"}


def test_every_module_imports_without_a_gpu_or_numpy(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # The second only raises, and the third does without torchtitan, whose classes it extends.
    no_modules = "__main__", "HybridEPBuffer", "torchtitan_overrides"
    names = [m for m in map(module_name, sources()) if not m.endswith(no_modules)]
    modules = [m for m in names if ".device.interpreter." not in m]  # these are for numpy's arrays
    code = f"""
import importlib, sys
sys.modules["numpy"] = None  # only emulation needs it
for name in {modules}:
    module = importlib.import_module(name)
    assert module.__file__.startswith({str(tmp_path)!r}), module.__file__
"""
    done = run(code, tmp_path, PYTHONPATH=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout


def test_operators_are_defined_where_they_are_used(tmp_path: Path) -> None:
    code = "import sys, moe_engine; print([m for m in sys.modules if m.endswith('operators')])"
    assert run(code, tmp_path).stdout.strip() == "[]"


def test_deep_ep_is_in_the_wheel_and_hidden(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    env = {"PYTHONPATH": str(tmp_path)}
    for name in ("deep_ep", "deep_ep_cpp"):
        assert f"No module named '{name}'" in run(f"import {name}", tmp_path, **env).stdout
    code = (
        "import sys; sys.argv[1:] = ['deep-ep-path']; from moe_engine.tools.cli import app; app()"
    )
    folder = run(code, tmp_path, **env).stdout.strip()
    assert folder == str(tmp_path / "moe_engine/integrations/deep_ep_path")
    env["PYTHONPATH"] += os.pathsep + folder
    code = "import deep_ep.utils, deep_ep_cpp; print(deep_ep.__file__, deep_ep_cpp.__file__)"
    done = run(code, tmp_path, **env)
    assert done.stdout.split() == [f"{folder}/deep_ep/__init__.py", f"{folder}/deep_ep_cpp.py"]


@pytest.mark.parametrize("folder", cases.slow_unless([("dispatch",)], FOLDERS))
def test_bare_import_from_the_root_fails(folder: str) -> None:
    """So that `try: import grouped_gemm` in other projects still falls through."""
    done = run(f"import {folder}", ROOT)
    assert "ImportError: attempted relative import beyond top-level package" in done.stdout


def test_libraries_are_called_through_their_packages() -> None:
    """CUDA through cuda.bindings, NVSHMEM through nvshmem4py, but for `waiting_calls`. Elsewhere
    ctypes reads and writes memory of the CPU, or finds a library that nothing calls."""
    of_memory = "launch", "symm.device_context", "symm.nic_process", "device.network"
    allowed = {f"moe_engine.{name}" for name in (*of_memory, "nvshmem_library", "tools.doctor")}
    for path, source in sources().items():
        tree = ast.parse(source.read_text())
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if "ctypes" in source.read_text():
            assert module_name(path) in allowed, path
        if module_name(path) != "moe_engine.nvshmem_library":
            assert not named & {"CDLL", "PyDLL", "LoadLibrary", "cdll", "CFUNCTYPE"}, path
            continue
        [waiting] = [node for node in tree.body if getattr(node, "name", "") == "waiting_calls"]
        lines = source.read_text().splitlines()
        users = [at for at, line in enumerate(lines, 1) if "ctypes." in line]
        assert all(waiting.lineno <= at <= waiting.end_lineno for at in users)
        assert len(users) <= 6


def test_private_names_of_torch_stand_in_one_file() -> None:
    private = re.compile(r"\btorch\.(cuda\.)?_|\btorch\._C\b|distributed_c10d\._")
    for path, source in sources().items():
        if "deep_ep_path" in path or path.endswith("/torch_privates.py"):
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute | ast.ImportFrom):
                assert not private.search(ast.unparse(node)), f"{path}:{node.lineno}"


def layer_name(module: str) -> str:
    """The name in `LAYERS` of a module: `moe_engine.symm.slots` -> `symm`"""
    return f"{module}.moe_engine".split(".")[1]


def imported_modules(module: str, modules: dict[str, Path]) -> set[str]:
    """The modules of this package that a module imports.

    In moe_engine.dispatch.launch, `from ..symm.slots import Slots` gives {"moe_engine.symm.slots"}
    and `from .. import errors` gives {"moe_engine.errors"}. What stands under `if TYPE_CHECKING`
    never runs and is left out, as is the own package's `__init__`.
    """
    path, parent = modules[module], module.rpartition(".")[0]
    package = (module if path.name == "__init__.py" else parent).split(".")
    tree = ast.parse(path.read_text())
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    unused = {
        statement
        for block in blocks
        if ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
    }
    found = set()
    for node in ast.walk(tree):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            assert target[0] not in FOLDERS, f"{path}: {target[0]} is moe_engine.{target[0]}"
            while ".".join(target) not in modules and target:
                target.pop()
            found.add(".".join(target))
    own = {module, parent} if layer_name(parent) == layer_name(module) else {module}
    return found - own - {""}


def test_imports_go_one_way() -> None:
    modules = {module_name(path): source for path, source in sources().items()}
    used = {layer_name(module) for module in modules}
    assert used == LEVEL.keys(), f"LAYERS and the tree differ in {used ^ LEVEL.keys()}"
    graph = {module: imported_modules(module, modules) for module in modules}
    packages: dict[str, set[str]] = {name: set() for name in used}
    for module, imported in graph.items():
        name = layer_name(module)
        others = {layer_name(other) for other in imported} - {name}
        upward = sorted(other for other in others if LEVEL[other] > LEVEL[name])
        assert not upward, f"{module} imports {upward}, of layers after that of {name}"
        packages[name] |= others
    TopologicalSorter(packages).prepare()  # raises CycleError, and names the cycle
    TopologicalSorter(graph).prepare()


def test_no_file_is_longer_than_500_lines() -> None:
    lengths = {path: len(source.read_text().splitlines()) for path, source in sources().items()}
    assert not {path: n for path, n in lengths.items() if n > 500}
