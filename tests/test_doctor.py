"""`moe-engine doctor` on hosts with and without network adapters, drivers and NVSHMEM, as trees of
files."""

from __future__ import annotations

import io
import sys

import nvshmem_cases
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moe_engine import nvshmem_library, symm
from moe_engine.tools import cli, doctor

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def host(tmp_path):
    """A host with an adapter whose second port is down, and the proprietary driver."""
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    driver = tmp_path / "proc/driver/nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n")
    (driver / "params").write_text('RegistryDwords: "PeerMappingOverride=1;"\n')
    return tmp_path


def by_name(findings):
    return {one.what: (one.found, one.is_good) for one in findings}


def test_what_a_host_has(host):
    found = by_name(doctor.network(host))
    assert found["adapter mlx5_0, port 1"] == ("4: ACTIVE, 400 Gb/sec (4X NDR)", True)
    assert found["adapter mlx5_0, port 2"] == ("1: DOWN, 400 Gb/sec (4X NDR)", False)
    assert found["adapters reach GPU memory by"] == ("nvidia_peermem", True)
    assert found["GDRCopy"][0] == "not loaded"
    assert found["driver key PeerMappingOverride (for IBGDA)"][0] == "1"
    assert by_name(doctor.gpus(host))["driver"] == ("570.86.15", True)
    (host / "sys/module/nvidia_peermem").rmdir()
    assert by_name(doctor.network(host))["adapters reach GPU memory by"][1] is False
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07\n"
    (host / "proc/driver/nvidia/version").write_text(text)
    assert by_name(doctor.network(host))["adapters reach GPU memory by"] == ("DMA-BUF", True)
    assert by_name(doctor.gpus(host))["driver"][0] == "580.82.07 (open kernel modules)"


def test_an_empty_host(tmp_path):
    found = by_name(doctor.network(tmp_path))
    assert found["adapters for RDMA"][1] is False
    assert found["adapters reach GPU memory by"][1] is False
    assert by_name(doctor.gpus(tmp_path))["driver"] == ("none", False)


def test_the_nvshmem_that_would_be_used(tmp_path, monkeypatch):
    nvshmem_cases.install(tmp_path, monkeypatch, "3.4.5")
    with nvshmem_cases.stand_in(version=(3, 6, 5)):
        found = by_name(doctor.software())
        assert found["NVSHMEM's bitcode"][0] == f"3.4.5, {tmp_path}/lib/libnvshmem_device.bc"
        assert found["NVSHMEM's host library"] == ("3.6.5", True)
        answer, is_good = found["kernels can reach the adapter (IBGDA)"]
        assert not is_good and nvshmem_library.INSTALL_TESTED in answer
    nvshmem_cases.uninstall(monkeypatch)
    assert "NVSHMEM is not installed" in by_name(doctor.software())["NVSHMEM"][0]


def test_the_cuda_of_the_driver(monkeypatch):
    driver = doctor.cuda_driver
    for version, shown, is_good in ((13020, "13.2", True), (12080, "12.8; needs CUDA 13", False)):
        told = driver.CUresult(0), version
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda told=told: told)
        found = doctor._cuda_of_driver()
        assert found.found.startswith(shown) and found.is_good is is_good


def test_packages_that_do_not_work_are_told(monkeypatch):
    found = by_name(doctor.software())
    assert found["einops"][1] and found["cuda-bindings"][1]
    monkeypatch.setitem(sys.modules, "einops", None)
    text, is_good = by_name(doctor.software())["einops"]
    assert not is_good and "cannot be imported" in text
    one = doctor._package("no-such-package", "nothing", "pip install it")
    assert one == ("no-such-package", "not installed; pip install it", False)


def test_ranks_of_several_hosts(host, tmp_path, monkeypatch):
    """NVSHMEM serves them with kernels that reach them, GPUs, an adapter and a library."""
    system = host / "sys"
    assert "GPUs" in symm.no_network(CPU, system)
    assert "no network adapter" in symm.no_network(GPU, tmp_path / "proc")
    nvshmem_cases.uninstall(monkeypatch)
    assert "not installed" in symm.no_network(GPU, system)
    with nvshmem_cases.stand_in():
        assert symm.no_network(GPU, system) is None


def test_which_backend_is_taken():
    found = {"torch": None, "emulated": None, "nvshmem": "it is not installed.", "collective": None}
    taken = by_name(doctor.choices(found))
    assert taken["ranks of this host"][0].startswith("torch")
    assert taken["ranks of several hosts"] == (
        "collective, as nvshmem cannot: it is not installed.",
        False,
    )
    taken = by_name(doctor.choices(found | {"torch": "no GPU.", "nvshmem": None}))
    assert taken["ranks of this host"] == ("emulated: no GPU.", True)
    assert taken["ranks of several hosts"] == ("nvshmem", True)


def test_variables_are_shown(monkeypatch):
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "mlx5_7")
    found = by_name(doctor.variables())
    assert found["NVSHMEM_HCA_LIST"][0].startswith("mlx5_7 ")
    assert found["NVSHMEM_IB_GID_INDEX"][0].startswith("not set ")


def test_the_command(monkeypatch):
    """It ends well whatever it finds, unless a backend is required that cannot be had."""
    run = CliRunner().invoke
    done = run(cli.app, ["doctor"])
    assert done.exit_code == 0, done.output
    for title in ("GPUs", "Software", "Network", "Environment variables", "takes"):
        assert title in done.output
    assert run(cli.app, ["doctor", "--require", "collective"]).exit_code == 0
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "[/mlx5_0]")  # as rich would end a style
    done = run(cli.app, ["doctor"])
    assert done.exit_code == 0 and "[/mlx5_0]" in done.output
    nvshmem_cases.uninstall(monkeypatch)
    done = run(cli.app, ["doctor", "--require", "collective", "--require", "nvshmem"])
    assert done.exit_code == 1 and "'nvshmem' cannot serve ranks from here" in done.output


def test_report_of_another_host(host):
    text = io.StringIO()
    found = doctor.report(Console(file=text, width=200), host)
    assert "mlx5_0" in text.getvalue() and found["nvshmem"]
