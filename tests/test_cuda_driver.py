"""What the driver gets from cuda.bindings: a library in its place prints it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch
from cuda.pathfinder import find_nvidia_header_directory

HEADERS = next(
    (
        folder
        for folder in ("/usr/local/cuda/include", find_nvidia_header_directory("cudart"))
        if folder and (Path(folder) / "cuda.h").exists()
    ),
    None,
)
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a driver"),
    pytest.mark.skipif(not (HEADERS and which("cc")), reason="needs cuda.h and a C compiler"),
]

PROGRAM = """
import os, sys, threading
from types import SimpleNamespace
from unittest import mock
import torch
from moe_engine.cuda_driver import Binary, Function, PackedLaunch, TensorMap
from moe_engine.launch_graph import LaunchGraph

torch.cuda.current_device = lambda: 0
torch.cuda.get_device_properties = lambda: SimpleNamespace(shared_memory_per_block_optin=232448)
x, y = (mock.Mock(data_ptr=lambda at=at: at) for at in (0xa000, 0xb000))

def packed(pdl):
    signature = "*bf16", "i32", "fp32"
    binary = Binary("kernel", b"code", 4, 65536, pdl, signature, ())
    return PackedLaunch(Function(binary), ("x", "rows", "scale"), (2, 3), (x, 5, 1.0))

def move(launch):
    [(place, index, _)] = launch.pointers
    place[index] = y.data_ptr()

def launches():
    first, second = packed(False), packed(True)
    second(0)
    move(second)
    place, index = second.numbers["rows"]
    place[index] = -6
    second(7)

def graphs():
    first, second = packed(False), packed(True)
    graph = LaunchGraph([first, second])
    graph(0, set())
    move(second)
    graph(9, {1})

def threads():
    launch = packed(True)
    print("thread")
    tensor_map = made_map()
    calls = (
        launch,
        lambda stream: LaunchGraph([launch, launch])(stream, set()),
        lambda stream: tensor_map.__setitem__(0, 0xc000),
        lambda stream: launch._function.prefer_shared_memory(),
    )
    for call in calls:
        thread = threading.Thread(target=call, args=(7,))
        thread.start()
        thread.join()

def made_map():
    tensor = SimpleNamespace(shape=(64, 128), strides=(256, 1), base=x, padding="nan")
    metadata = dict(fp4_padded=False, elem_type=10, elem_size=2, block_size=(16, 32), swizzle=3)
    return TensorMap(tensor, metadata)

def maps():
    made = made_map()
    assert made.address
    made[0] = y.data_ptr()

def forks():
    graphs()
    sys.stdout.flush()
    child = os.fork()
    if child:
        assert os.waitpid(child, 0) == (child, 0)

globals()[sys.argv[1]]()
"""
PARAMETERS = "a000 5 3f800000 0 0"
SIZES = "grid 2 3 1 block 128 1 1 shared 65536"
LOADED = """load code
function kernel of 0x10
0xf0 cache 1
0xf0 attribute 8 = 231936
"""
MAP = """map type 9 of 2 at 0xa000 shape 128 64 strides 512 box 32 16 steps 1 1 swizzle 3 \
promotion 2 fill 1
"""
EXPECTED = {
    "launches": f"""enter context 0xc0
{LOADED * 2}launch 0xf0 {SIZES} stream 0x1 attribute 6 1 {PARAMETERS}
launch 0xf0 {SIZES} stream 0x7 attribute 6 1 b000 fffffffa 3f800000 0 0
""",
    "graphs": f"""enter context 0xc0
{LOADED * 2}node 0x1 of 0x60: 0xf0 {SIZES} {PARAMETERS}
node 0x2 of 0x60: 0xf0 {SIZES} {PARAMETERS}
1 edge 0x1 0x2 port 1 type 1
capture mode 2
instantiate 0x60 flags 0
capture mode 0
launch graph 0xe0 stream 0x1
change 0x2 in 0xe0: b000 5 3f800000 0 0
launch graph 0xe0 stream 0x9
capture mode 2
capture mode 0
""",
    "threads": f"""enter context 0xc0
{LOADED}thread
{MAP}enter context 0xc0
launch 0xf0 {SIZES} stream 0x7 attribute 6 1 {PARAMETERS}
node 0x1 of 0x60: 0xf0 {SIZES} {PARAMETERS}
node 0x2 of 0x60: 0xf0 {SIZES} {PARAMETERS}
1 edge 0x1 0x2 port 1 type 1
capture mode 2
instantiate 0x60 flags 0
capture mode 0
enter context 0xc0
launch graph 0xe0 stream 0x7
capture mode 2
capture mode 0
enter context 0xc0
map moved to 0xc000
enter context 0xc0
0xf0 attribute 9 = 100
""",
    "maps": f"""enter context 0xc0
{MAP}map moved to 0xb000
""",
}
EXPECTED["forks"] = EXPECTED["graphs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a program finds the library."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("stub_driver.c")
    name = "libcuda.so.1"
    options = ["-w", "-shared", "-fPIC", f"-Wl,-soname,{name}", f"-I{HEADERS}"]
    subprocess.run(["cc", *options, "-o", folder / name, source, "-ldl"], check=True)
    return folder


def printed(folder, name, **env):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder), "TRITON_INTERPRET": "0"} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_what_the_driver_gets(folder, name):
    assert printed(folder, name) == EXPECTED[name]


@pytest.mark.parametrize("name", ["launches", "graphs"])
def test_streams_are_the_same_with_one_for_each_thread(folder, name):
    """cuda.bindings takes other functions of the driver then, in which 0 is another stream."""
    found = printed(folder, name, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1").splitlines()
    assert "per-thread streams" in found
    ours = [line for line in found if line != "per-thread streams"]
    assert ours == EXPECTED[name].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_the_oldest_bindings(folder, name, tmp_path):
    """The first that torch for CUDA 13 takes."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    if subprocess.run([*install, "cuda-bindings==13.0.3"], check=False).returncode:
        pytest.skip("pip does not find cuda-bindings 13.0.3 here")
    code = "from cuda.bindings import __version__; print(__version__)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    version = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert version.stdout.startswith(b"13.0.3")
    assert printed(folder, name, PYTHONPATH=str(tmp_path)) == EXPECTED[name]
