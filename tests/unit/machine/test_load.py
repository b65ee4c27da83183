"""Machine files: all shipped files load, each number has a source, and a malformed file is refused with line, key and
rule.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from frontier_llm.config import configs_dir, load
from frontier_llm.errors import ConfigError
from frontier_llm.machine.env import vendor_of_machine
from frontier_llm.machine.load import (
    OWN_STACK,
    PLACES,
    load_machine,
    machine_names,
    provenance,
    rates,
)
from frontier_llm.ops.kernel_table import ARCHITECTURES

FRONTIER = configs_dir() / "machines" / "frontier.yaml"


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = FRONTIER.read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize("name", machine_names())
def test_shipped_files_load_and_every_number_names_its_source(name: str) -> None:
    machine = load_machine(name)
    for stack in machine.stacks:
        assert rates(machine, stack).peak_flops > 0
        for field in PLACES:
            number = provenance(machine, stack, field)
            assert number.tag in ("measured", "published", "estimated")
            assert len(number.source) > 5


def test_the_rule_for_communications_in_flight_belongs_to_the_own_stack() -> None:
    for name in ("frontier", "mi250"):
        machine = load_machine(name)
        limited = {stack for stack in machine.stacks if rates(machine, stack).one_in_flight}
        assert limited == {OWN_STACK}


def test_a_gcd_is_the_device() -> None:
    numbers = rates(load_machine("frontier"))
    assert numbers.peak_flops == 191.5e12
    assert numbers.memory_bytes == 64 * 2**30
    assert numbers.node_devices == 8
    assert numbers.node_network_bytes_s == 100e9  # 4 NICs, 12.5 GB/s per GCD


def test_lumi_starts_from_frontier_and_changes_its_own() -> None:
    lumi = load_machine("lumi")
    frontier = load_machine("frontier")
    assert lumi.node.count.value == 2978
    assert lumi.device == frontier.device
    assert [entry.name for entry in lumi.operations.queue] == ["standard-g", "small-g", "dev-g"]
    assert lumi.operations.checkpoint_gbps_total.value == 240 / 2  # LUMI-P, not Orion


@pytest.mark.parametrize(
    ("old", "new", "key", "rule"),
    [
        ("  compute_units:", "  compute_unitz:", "device.compute_unitz", "unknown key"),
        ("tag: published, source: \"OLCF user guide: hsn0-hsn3\"", "tag: guessed, source: \"OLCF user " "guide: " "hsn0-hsn3\"", "node.nics.tag", "'measured', 'published' or 'estimated'"),  # noqa: E501
        ("nics: {value: 4", "nics: {value: four", "node.nics.value", "must be a number; got 'four'"),
        ("default_stack: frontier-llm", "default_stack: frontier-lm", "", "is not one of the stacks"),
        ("    1: [43, 56,", "    1: [43,", "allreduce", "entries, one per message size"),
    ],
)  # fmt: skip
def test_malformed_files_name_line_key_and_rule(tmp_path: Path, old: str, new: str, key: str, rule: str) -> None:
    path = edited(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        load_machine(str(path))
    message = str(caught.value)
    assert f"{path}:" in message
    assert key in message
    assert rule in message
    if key.count(".") > 0:
        line = next(
            number
            for number, text in enumerate(path.read_text().splitlines(), 1)
            if new.strip().split(",")[0].split(": {")[0] in text
        )
        assert f"{path}:{line}:" in message


def test_only_a_number_that_needs_a_source_is_told_to_have_one(tmp_path: Path) -> None:
    content = yaml.safe_load(FRONTIER.read_text())
    content["device"]["peak_tflops"] = 191.5
    content["stacks"]["frontier-llm"]["optimizer_bytes"] = -1
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as caught:
        load_machine(str(path))
    fixes = {problem.where.rpartition(": ")[2]: (problem.what, problem.fix) for problem in caught.value.problems}
    assert fixes["device.peak_tflops"][1] == "write {value: NUMBER, tag: measured|published|estimated, source: TEXT}"
    assert fixes["stacks.frontier-llm.optimizer_bytes"] == ("must be 0 or more; got -1", "")


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    content = yaml.safe_load(FRONTIER.read_text())
    del content["device"]["peak_tflops"]["source"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"device\.peak_tflops\.source: is required"):
        load_machine(str(path))


def test_unknown_names_give_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'frontier'"):
        load_machine("frontie")
    with pytest.raises(ConfigError, match="did you mean 'megatron-deepspeed'"):
        rates(load_machine("frontier"), "megatron-deepspede")


def test_bases_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_machine(str(tmp_path / "a.yaml"))


def test_no_rule_is_told_in_pydantics_words(tmp_path: Path) -> None:
    path = edited(tmp_path, "nics: {value: 4", "nics: {value: .inf")
    path.write_text(path.read_text().replace('source: "OLCF user guide: hsn0-hsn3"', "source: ab"))
    with pytest.raises(ConfigError) as caught:
        load_machine(str(path))
    message = str(caught.value)
    assert "must have at least 3 characters; got 'ab'" in message and "must be a finite number" in message
    assert "should" not in message


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_states_its_device(name: str) -> None:
    """The vendor decides which environment variables the ranks get. Kernels are built for the architecture."""
    machine = load_machine(name)
    assert "vendor" in machine.device.model_fields_set
    assert machine.device.vendor == vendor_of_machine(machine.environment)
    assert (machine.device.architecture in ARCHITECTURES) == (name != "local")
    assert machine.device.flushes_fp16 == (machine.device.architecture == "gfx90a")


@pytest.mark.parametrize(("former", "name"), [("eos", "h100"), ("selene", "a100")])
def test_a_former_name_is_read_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], former: str, name: str
) -> None:
    load._new_name.cache_clear()  # the notice is printed once per process
    assert load_machine(former) == load_machine(name)
    assert f"machine {former!r} has the new name {name!r}" in capsys.readouterr().err
    assert former not in machine_names()
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {former}\ntitle: mine\n")
    assert rates(load_machine(str(path))) == rates(load_machine(name))
    assert vendor_of_machine(former) == vendor_of_machine(name) == "nvidia"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("", ("none", None)),  # the vendor of a custom file cannot be derived from its name
        ("environment: lumi\n", ("amd", None)),
        ("environment: h200\n", ("nvidia", None)),
        ("environment: local\n", ("none", None)),
        ("  architecture: gfx942\n", ("amd", "gfx942")),
        ("  architecture: sm_100\n", ("nvidia", "sm_100")),
    ],
)
def test_a_file_without_a_vendor_has_that_of_its_architecture_or_of_its_environment(
    tmp_path: Path,
    lines: str,
    expected: tuple[str, str | None],
) -> None:
    text = (
        FRONTIER.read_text()
        .replace("  vendor: amd\n", "")
        .replace("  architecture: gfx90a\n", lines if lines[:1] == " " else "")
    )
    path = tmp_path / "mine.yaml"
    path.write_text(("" if lines[:1] == " " else lines) + text)
    device = load_machine(str(path)).device
    assert (device.vendor, device.architecture) == expected


def test_a_machine_may_be_rehearsed_without_its_gpus(tmp_path: Path) -> None:
    path = tmp_path / "rehearsal.yaml"
    path.write_text("base: frontier\ndevice: {vendor: none}\n")
    machine = load_machine(str(path))
    assert (machine.device.vendor, machine.device.architecture, machine.environment) == ("none", "gfx90a", "frontier")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("device: {vendor: intel}", "device.vendor"),
        ("device: {architecture: '{mi250x}'}", "'{mi250x}' is not the name of an architecture: write e.g. gfx90a"),
        ("device: {architecture: sm_90}", "architecture sm_90 belongs to vendor nvidia, but vendor is amd"),
        ("device: {vendor: nvidia, architecture: sm_86}", "runs the kernels of sm_80: write sm_80"),
        ("device: {vendor: nvidia, architecture: sm_90}", "environment frontier sets the variables of amd"),
    ],
)
def test_a_contradiction_about_the_device_is_refused(tmp_path: Path, content: str, rule: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: frontier\n{content}\n")
    with pytest.raises(ConfigError, match=rule):
        load_machine(str(path))
