"""The node map and the environment variables of Frontier and LUMI, compared with the site files and the centres'
guides.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from frontier_llm.config import configs_dir
from frontier_llm.errors import ConfigError
from frontier_llm.machine import env
from frontier_llm.machine.affinity import NODE, best_ring, bus_limit_gbps, link_gbps
from frontier_llm.machine.env import environment


def test_cores_of_each_gcd_equal_the_lumi_guide_s() -> None:
    """CPU_BIND_MASKS of LUMI-AI-Guide, 05-multi-gpu-and-node.

    The local rank is the GCD, and the first core of each region is left out.
    """
    masks = (
        "00fe000000000000 fe00000000000000 0000000000fe0000 00000000fe000000 00000000000000fe 000000000000fe00 "
        "000000fe00000000 0000fe0000000000"
    )
    assert [f"{sum(1 << core for core in place.usable_cores):016x}" for place in NODE] == masks.split()


def test_cores_of_each_gcd_equal_the_olcf_guide_s() -> None:
    """frontier_user_guide.rst lists NUMA domain, first hardware thread of the L3 region, and GPU."""
    guide = [(0, 0, 4), (0, 8, 5), (1, 16, 2), (1, 24, 3), (2, 32, 6), (2, 40, 7), (3, 48, 0), (3, 56, 1)]
    assert sorted((place.numa, place.cores[0], place.gcd) for place in NODE) == guide
    assert all(place.cores == tuple(range(place.cores[0], place.cores[0] + 8)) for place in NODE)


def test_every_core_belongs_to_one_gcd_and_every_nic_to_one_package() -> None:
    assert sorted(core for place in NODE for core in place.cores) == list(range(64))
    assert [place.numa for place in NODE] == [3, 3, 1, 1, 0, 0, 2, 2]


def test_links_are_symmetric_and_each_gcd_has_the_diagram_s_number() -> None:
    matrix = [[link_gbps(one, other) for other in range(8)] for one in range(8)]
    assert all(matrix[one][other] == matrix[other][one] for one in range(8) for other in range(8))
    assert [sum(row) for row in matrix] == [350, 300, 350, 300, 350, 300, 350, 300]


def test_rings_and_cuts() -> None:
    assert best_ring((0, 1)) == ((0, 1), 200.0)
    assert best_ring((0, 1, 2, 3))[1] == 50.0
    assert best_ring(tuple(range(8)))[1] == 50.0
    assert bus_limit_gbps((0, 1)) == 200.0
    assert bus_limit_gbps((0, 1, 2, 3)) == 100.0
    assert bus_limit_gbps(tuple(range(8))) == 250.0
    assert bus_limit_gbps((0, 3)) == 0.0  # no direct link


@pytest.mark.parametrize("site", ["frontier", "lumi"])
def test_each_variable_has_one_home(site: str) -> None:
    """machine/env.py sets the variables of RCCL and libfabric.

    A site file only sets variables that the loader needs before Python starts.
    """
    path = configs_dir().parent / "slurm" / "sites" / f"{site}.yaml"
    content = yaml.safe_load(path.read_text())
    theirs = {**content.get("environment", {}), **content.get("multi_node_environment", {})}
    ours = {variable.name for variable in environment(site, 128)}
    assert len(ours) > 8
    assert not ours & theirs.keys()


def test_environment_depends_on_the_size_and_says_why() -> None:
    one = environment("frontier", 1)
    many = environment("frontier", 512)
    assert {"NCCL_NET": "Socket"}.items() <= {variable.name: variable.value for variable in one}.items()
    assert not any(variable.name.startswith("FI_") for variable in one)
    values = {variable.name: variable.value for variable in many}
    assert values["NCCL_NET"] == "AWS Libfabric"
    assert values["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert "TORCH_NCCL_COORD_CHECK_MILSEC" not in values
    interfaces = {
        nodes: next(one for one in environment("frontier", nodes) if one.name == "NCCL_SOCKET_IFNAME")
        for nodes in (299, 300)
    }
    assert interfaces[299].value == "hsn0,hsn1,hsn2,hsn3"
    assert interfaces[300].value == "hsn0" and "from 300 nodes" in interfaces[300].reason
    largest = {variable.name: variable.value for variable in environment("frontier", 9408)}
    assert largest["TORCH_NCCL_COORD_CHECK_MILSEC"] == "3763"  # 75,264 ranks at 20,000 checks per second
    for variables in (one, many):
        assert len({variable.name for variable in variables}) == len(variables)
        assert all(variable.reason and variable.source for variable in variables)
    with pytest.raises(ConfigError, match="did you mean 'frontier'"):
        environment("frontir", 4)


def test_each_machine_has_what_its_own_guide_says() -> None:
    """Multi-node starts on LUMI hung with NCCL_NET_GDR_LEVEL=PHB. Jobs on LUMI do not request the network setting that
    alt_read needs.
    """
    frontier, lumi = (
        {variable.name: variable.value for variable in environment(name, 16)} for name in ("frontier", "lumi")
    )
    assert (frontier["NCCL_NET_GDR_LEVEL"], frontier["FI_CXI_RDZV_PROTO"], frontier["FI_MR_CACHE_MONITOR"]) == (
        "PHB",
        "alt_read",
        "kdreg2",
    )
    assert frontier.keys() - lumi.keys() == {"NCCL_NET_GDR_LEVEL", "FI_CXI_RDZV_PROTO"}
    assert lumi["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    for name in ("frontier", "lumi"):
        content = yaml.safe_load((configs_dir().parent / "slurm" / "sites" / f"{name}.yaml").read_text())
        asks = content["sbatch"].get("network") == "disable_rdzv_get"
        assert asks == ("FI_CXI_RDZV_PROTO" in {variable.name for variable in environment(name, 2)})


def test_torch_reads_the_names_that_are_its_own() -> None:
    """A variable that torch has renamed would have no effect. The installed headers contain the names that torch
    reads.
    """
    headers = Path(torch.__file__).parent / "include"
    places = (headers / "torch/csrc/distributed/c10d", headers / "c10/cuda")
    text = "".join(path.read_text() for place in places for path in sorted(place.glob("*.h*")))
    ours = {
        variable.name for variable in environment("frontier", 9408) if variable.name.startswith(("TORCH_", "PYTORCH_"))
    }
    assert len(ours) == 4
    assert {name for name in ours if f'"{name}"' not in text} == set()


def test_a_computer_with_an_amd_gpu_gets_rocm_s_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "AMD_DRIVER", tmp_path / "kfd")
    assert [variable.name for variable in environment("local", 1)] == ["OMP_NUM_THREADS"]
    (tmp_path / "kfd").touch()
    here = {variable.name: variable.value for variable in environment("local", 1)}
    frontier = {variable.name: variable.value for variable in environment("frontier", 1)}
    rocm = {"GPU_MAX_HW_QUEUES", "HSA_FORCE_FINE_GRAIN_PCIE", "MIOPEN_USER_DB_PATH", "PYTORCH_HIP_ALLOC_CONF"}
    assert rocm <= here.keys() and here["OMP_NUM_THREADS"] == "1"
    assert all(here[name] == frontier[name] for name in here.keys() - {"OMP_NUM_THREADS"})
