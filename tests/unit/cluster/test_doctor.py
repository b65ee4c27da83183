from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from frontier_llm.cli.main import main
from frontier_llm.cluster import doctor, slurm
from frontier_llm.cluster.doctor import NoResponse, Report, _read_answers, ask_nodes, examine, judge
from frontier_llm.cluster.node_errors import ErrorCounts, read_history, record_counts
from frontier_llm.cluster.probe import (
    NO_FI_INFO,
    Facts,
    Settings,
    fact_lines,
    gcd_memory_gib,
    gcd_used_gib,
    interface_is_up,
    memory_errors,
    plugin_error,
    provider_error,
)
from frontier_llm.cluster.sites import load_site

FRONTIER = load_site("frontier")
GIB = 2**30


def healthy(host: str) -> Facts:
    return Facts(
        host, (64.0,) * 8, 0, 56, (), "", "", {"python": "3.12", "HSA": "1"}, "", 0.1, 100 * GIB, "", 1000 * GIB
    )


def findings(
    changes: dict[str, object], skew_s: float = 0.0, needed_bytes: int = 0, host: str = "n1"
) -> list[tuple[str, tuple[str, ...]]]:
    nodes = ["n0", "n1", "n2"]
    facts = {node: healthy(node) for node in nodes}
    facts[host] = replace(facts[host], **changes)
    skews = dict.fromkeys(nodes, 0.0) | {host: skew_s}
    return [(finding.check, finding.hosts) for finding in judge(FRONTIER, facts, skews, nodes, needed_bytes)]


def test_a_healthy_allocation_has_no_findings() -> None:
    assert findings({}) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"gcd_memory_gib": (64.0,) * 7}, "GCDs"),
        ({"gcd_memory_gib": (64.0,) * 7 + (32.0,)}, "GCD memory"),
        ({"cores": 8}, "cores"),
        ({"interfaces_down": ("hsn2",)}, "network"),
        ({"provider_error": "no data"}, "libfabric"),
        ({"plugin_error": "librccl-net.so: cannot open"}, "RCCL plugin"),
        ({"library_conflicts": ("librccl-net.so loads libfabric 2.3, but fi_info uses 1.22",)}, "network libraries"),
        ({"environment": {"python": "3.12", "HSA": "0"}}, "environment"),
        ({"environment": {"python": "3.12"}}, "environment"),
        ({"run_dir_error": "Read-only file system"}, "run directory"),
        ({"run_dir_write_s": 9.0}, "run directory"),
        ({"node_local_error": "No such file"}, "local disk"),
        ({"node_local_free_bytes": GIB}, "local disk"),
        ({"gcd_used_gib": (0.1,) * 7 + (12.0,)}, "GCD memory"),
    ],
)
def test_each_fault_is_found_on_its_host(changes: dict[str, object], check: str) -> None:
    assert findings(changes) == [(check, ("n1",))]


def test_a_variable_with_which_torch_fails_on_gfx90a_is_a_warning() -> None:
    chosen = {"python": "3.12", "HSA": "1", "TORCH_ROCM_FA_PREFER_CK": "1"}
    facts = {node: replace(healthy(node), environment=chosen) for node in ("n0", "n1")}
    [finding] = judge(FRONTIER, facts, dict.fromkeys(facts, 0.0), ["n0", "n1"], 0)
    assert finding.hosts == ("n0", "n1") and not finding.fatal
    assert "TORCH_ROCM_FA_PREFER_CK=1: torch 2.12's attention ends with a segmentation fault" in finding.what


def test_clock_space_and_silence() -> None:
    assert findings({}, skew_s=30.0) == [("clock", ("n1",))]
    assert findings({}, skew_s=1.0) == []
    assert findings({}, needed_bytes=200 * GIB) == [("run directory", ("n0", "n1", "n2"))]
    facts = {"n0": healthy("n0")}
    assert [(f.check, f.hosts) for f in judge(FRONTIER, facts, {"n0": 0.0}, ["n0", "n1"], 0)] == [("node", ("n1",))]


def test_only_what_distinguishes_a_node_excludes_it() -> None:
    nodes = ["n0", "n1", "n2"]
    facts = {node: replace(healthy(node), plugin_error="missing") for node in nodes}
    facts["n2"] = replace(facts["n2"], gcd_memory_gib=())
    report = Report(tuple(nodes), tuple(judge(FRONTIER, facts, {}, nodes, 0)), 1.0)
    assert report.bad_hosts == ("n2",)
    assert not report.healthy
    text = report.render()
    assert "--exclude=n2" in text and "RCCL plugin on n[0-2]" in text and text.count("fix: ") == 2
    assert report.as_dict()["exclude"] == "n2"


def test_one_node_needs_no_network() -> None:
    """Slurm gives a single-node job no access to Slingshot, so fi_info finds nothing. In such a job RCCL is configured
    to use sockets.
    """
    fact = replace(healthy("n0"), provider_error="no data", plugin_error="missing")
    found = judge(FRONTIER, {"n0": fact}, {}, ["n0"], 0)
    assert [(finding.check, finding.fatal) for finding in found] == [("libfabric", False), ("RCCL plugin", False)]
    found = judge(
        FRONTIER,
        {host: replace(healthy(host), provider_error=NO_FI_INFO) for host in ("n0", "n1")},
        {},
        ["n0", "n1"],
        0,
    )
    # without fi_info the provider cannot be determined
    assert [(finding.check, finding.fatal) for finding in found] == [("libfabric", False)]


@pytest.mark.parametrize(
    ("errors", "history", "reason"),
    [
        ((0, 1), [(0, 0)], "1 uncorrected memory errors since the last examination"),
        # the count began again at the node's restart
        ((7, 3), [(9, 3)], "3 uncorrected memory errors since the last examination"),
        ((0, 3), [(0, 3)], ""),
        ((500, 0), [], ""),  # no history: the errors can be years old
        ((130, 0), [(0, 0), (10, 0), (20, 0), (30, 0)], "100 corrected memory errors since the last examination"),
        ((129, 0), [(0, 0), (10, 0), (20, 0), (30, 0)], ""),  # 99 new errors are less than 10 times the usual 10
        ((9, 0), [(0, 0)] * 4, ""),  # a healthy node may have a few errors
        ((10, 0), [(0, 0)] * 4, "10 corrected memory errors since the last examination, and usually 0"),
        (None, [(0, 0)], ""),
    ],
)
def test_memory_errors_are_compared_with_the_nodes_own_history(
    errors: tuple[int, int] | None, history: list[tuple[int, int]], reason: str, tmp_path: Path
) -> None:
    for counts in history:
        record_counts(tmp_path, {"n1": ErrorCounts(*counts), "n0": ErrorCounts(10**6, 0)})
    facts = {node: healthy(node) for node in ("n0", "n1")}
    facts["n1"] = replace(facts["n1"], errors=errors)
    found = judge(FRONTIER, facts, {}, ["n0", "n1"], 0, read_history(tmp_path))
    assert [(finding.check, finding.hosts) for finding in found] == ([("memory errors", ("n1",))] if reason else [])
    assert not reason or found[0].what.startswith(reason)


def test_error_counts_and_used_memory_are_read_from_the_driver(tmp_path: Path) -> None:
    assert (memory_errors(tmp_path), gcd_used_gib(tmp_path)) == (None, ())
    for card in ("card0", "card1"):
        device = tmp_path / "sys/class/drm" / card / "device"
        (device / "ras").mkdir(parents=True)
        (device / "ras/umc_err_count").write_text("ue: 1\nce: 20\n")
        (device / "ras/gfx_err_count").write_text("ue: 0\nce: 3\n")
        (device / "mem_info_vram_used").write_text(f"{3 * GIB}\n")
    assert (memory_errors(tmp_path), gcd_used_gib(tmp_path)) == ((46, 2), (3.0, 3.0))


def plant(root: Path, gcds: int, memory_gib: int = 64) -> None:
    for index in range(gcds + 1):
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(index)
        (node / "mem_banks/0").mkdir(parents=True)
        (node / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count {440 if index else 0}\nunique_id 99999999999999999999\n"
        )
        (node / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {memory_gib * GIB}\n")


def test_gcds_are_counted_from_the_drivers_topology(tmp_path: Path) -> None:
    plant(tmp_path, 8)
    assert gcd_memory_gib(tmp_path) == ((64.0,) * 8, 0)
    assert gcd_memory_gib(tmp_path / "none") == ((), 0)


def test_a_driver_that_refuses_to_be_read_is_no_node_without_gcds(tmp_path: Path) -> None:
    plant(tmp_path, 8)
    for properties in sorted((tmp_path / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"))[-3:]:
        properties.unlink()
        properties.mkdir()  # reading it fails, for root too
    assert gcd_memory_gib(tmp_path) == ((64.0,) * 5, 3)
    fact = replace(healthy("n0"), gcd_memory_gib=(64.0,) * 5, gcds_refused=3)
    (finding,) = judge(FRONTIER, {"n0": fact}, {}, ["n0"], 0)
    assert not finding.fatal and finding.what.startswith("unknown: the driver shows 5 of 8 and denies access to 3")


def test_interfaces(tmp_path: Path) -> None:
    for name, state in (("hsn0", "up"), ("hsn1", "down")):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text(state + "\n")
    assert [interface_is_up(tmp_path, f"hsn{index}") for index in range(3)] == [True, False, False]


def test_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_error(None) == "" and plugin_error("libc.so.6") == ""
    assert "librccl-net-of-nobody.so" in plugin_error("librccl-net-of-nobody.so")
    monkeypatch.setenv("NCCL_NET_PLUGIN", "/nonexistent/librccl-net.so")
    assert "/nonexistent/librccl-net.so" in plugin_error("libc.so.6")  # the path that RCCL itself would load
    fake = tmp_path / "fi_info"
    fake.write_text('#!/bin/sh\n[ "$2" = cxi ] && echo "provider: cxi"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert provider_error("cxi") == "" and "efa" in provider_error("efa")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert provider_error("cxi") == NO_FI_INFO


def test_a_plugin_for_a_newer_libfabric_is_named() -> None:
    error = "/opt/cray/lib64/libfabric.so.1: version `FABRIC_1.8' not found (required by librccl-net.so)"
    (finding,) = judge(FRONTIER, {"n0": replace(healthy("n0"), plugin_error=error)}, {"n0": 0.0}, ["n0"], 0)
    assert "built with a newer libfabric" in finding.remedy


def test_command_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--site", "generic", "--this-node", "--run-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    assert (
        main(
            ["doctor", "--site", "frontier", "--this-node", "--run-dir", str(tmp_path), "--system-root", str(tmp_path)]
        )
        == 1
    )
    out = capsys.readouterr().out
    assert (
        "0 of 8 are visible\n    fix: a login node has no GCDs: run this inside an allocation" in out
        and "RCCL plugin" in out
        and "hsn0, hsn1" in out
    )


# Output that srun would forward from an allocation: the nodes' lines in any order, with noise between them. Some nodes
# never answer.
FAKE_SRUN = """#!{python}
import json, random, sys, time
answers = json.load(open({answers!r}))
random.seed(1)
random.shuffle(answers)
for host, lines in answers:
    sys.stderr.write("slurmstepd: warning: something about " + host + " that fills a pipe\\n" * 20)
    sys.stdout.write("probe-time " + json.dumps({{"host": host, "unix_s": time.time() + (30 if host == "node007" else 0)}}) + "\\n")
    sys.stdout.write("\\n".join(lines) + "\\n")
sys.stdout.flush()
time.sleep({silence_s})
"""  # noqa: E501


def allocation_of(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence_s: float) -> list[str]:
    """Put a simulated `srun` on PATH that answers for these nodes. The last node never answers."""
    nodes = [f"node{number:03}" for number in range(count)]
    answers = [(host, fact_lines(replace(healthy(host), cores=8 if host == "node200" else 56))) for host in nodes[:-1]]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    script = tmp_path / "srun"
    script.write_text(
        FAKE_SRUN.format(python=sys.executable, answers=str(tmp_path / "answers.json"), silence_s=silence_s)
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return nodes


def test_384_nodes_are_judged_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the nodes and srun's start on them. Real: this node's probe, the pipe, reading and judging."""
    nodes = allocation_of(384, tmp_path, monkeypatch, silence_s=0)
    report = examine(Settings(site=FRONTIER, run_dir=str(tmp_path)), nodes)
    assert {(finding.check, finding.hosts) for finding in report.findings} == {
        ("clock", ("node007",)),
        ("cores", ("node200",)),
        ("node", ("node383",)),
    }
    assert report.as_dict()["exclude"] == "node[007,200,383]"
    own = examine(Settings(site=load_site("generic"), run_dir=str(tmp_path)), [])
    assert report.seconds + own.seconds < 10


def test_a_stamp_that_comes_late_is_no_clock_that_runs_late() -> None:
    # n2's clock is half a minute behind
    stamps = [("n0", 0.0), ("n1", 40.0), ("n1", 0.0), ("n0", 9.0), ("n2", 30.0), ("n2", 31.0)]
    lines = ["probe-time " + json.dumps({"host": host, "unix_s": time.time() - late_s}) for host, late_s in stamps]
    _, offsets = _read_answers(lines)
    assert {host: round(offset, -1) for host, offset in offsets.items()} == {"n0": 0.0, "n1": 0.0, "n2": -30.0}


def test_facts_survive_an_srun_that_splits_long_lines() -> None:
    """Slurm forwards at most 1,024 bytes of a line at once, and a node's next part follows another node's part."""
    facts = {
        host: replace(healthy(host), environment={"LD_LIBRARY_PATH": "/opt/rocm/lib:" * 300, "ä": '"'})
        for host in ("n0", "n1", "n2")
    }
    written = [[f"{line}\n" for line in fact_lines(fact)] for fact in facts.values()]
    assert all(len(line.encode()) <= 1024 for lines in written for line in lines)
    lines = [line for turn in zip(*written, strict=True) for line in turn]
    assert _read_answers(lines) == (facts, {})
    missing = [line for line in lines if not line.startswith("probe-facts n1 3/")]
    damaged = [line.replace("probe-facts n2 1/", "probe-facts n2 probe-time 1/") for line in missing]
    assert _read_answers(["probe-time {\n", "probe-facts \n", *damaged]) == ({"n0": facts["n0"]}, {})


def test_an_examination_without_any_reply_is_repeated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = ["", "", "n0"]

    def examine(settings: Settings, nodes: list[str]) -> Report:
        if host := replies.pop(0):
            return Report((host,), (), 1.0)
        raise NoResponse("no node responded: srun: error: Unable to create step")

    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(slurm, "unhealthy", lambda nodes: [])
    with pytest.raises(NoResponse):
        doctor.preflight(FRONTIER, tmp_path, ["n0"])
    replies.insert(0, "")
    assert doctor.preflight(FRONTIER, tmp_path, ["n0"]) == () and replies == []


def test_a_hung_node_does_not_hold_up_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = allocation_of(4, tmp_path, monkeypatch, silence_s=600)
    facts, skew_s = ask_nodes(
        Settings(site=FRONTIER, run_dir=str(tmp_path)), nodes, timeout_s=5.0
    )  # returns long before the silent node ends
    assert sorted(facts) == sorted(skew_s) == nodes[:-1]
