from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from frontier_llm.checkpoint import directory as folder
from tests.harness.marks import thorough
from tests.unit.checkpoint.simulated import TINY, TINY_EXPERTS, TINY_TIED, Layout, check_loads, value, write

LAYOUTS = [
    Layout(),
    Layout(dp=2),
    Layout(dp=3, zero=0, bucket_numel=100_000_000),
    Layout(tp=2, dp=2, dtype="bf16"),
    Layout(tp=2, pp=2, dp=2, chunks=2, order="tp-pp-dp"),
    Layout(pp=4, dp=2, dtype="fp16"),
    Layout(tp=2, pp=2, zero=0, dtype="bf16"),
    Layout(tp=2, cp=2, dp=2, dtype="bf16"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [thorough(TINY), TINY_TIED], ids=["llama", "gpt-tied"])
def test_every_layout_loads_every_other(model: object, tmp_path: Path) -> None:
    for saved in LAYOUTS:
        path = tmp_path / str(LAYOUTS.index(saved))
        write(model, saved, path)
        for loaded in LAYOUTS:
            check_loads(model, loaded, path / "step_00000007")


def test_fp64_state_round_trips_and_loads_as_fp32(tmp_path: Path) -> None:
    assert write(TINY, Layout(dp=2, dtype="fp64"), tmp_path).dtype == "F64"
    check_loads(TINY, Layout(pp=2, dtype="fp64"), tmp_path / "step_00000007")
    check_loads(TINY, Layout(tp=2), tmp_path / "step_00000007")


def test_shards_hold_each_element_once_and_any_safetensors_reader_opens_them(tmp_path: Path) -> None:
    manifest = write(TINY, Layout(tp=2, dp=2, zero=0), tmp_path)
    counts = {tensor.name: np.zeros(tensor.shape, int) for tensor in manifest.tensors}
    for shard in manifest.shards:
        content = load_file(tmp_path / "step_00000007" / shard.file)
        assert len(content) == 3 * len(shard.pieces)
        for tensor, offset, shape in shard.pieces:
            name = manifest.tensors[tensor].name
            place = ",".join(map(str, offset))
            region = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
            counts[name][region] += 1
            indices = np.arange(counts[name].size).reshape(counts[name].shape)[region]
            np.testing.assert_array_equal(content[f"exp_avg/{name}@{place}"], value("exp_avg", name, indices))
    assert all((count == 1).all() for count in counts.values())


def test_manifest_names_step_and_sizes(tmp_path: Path) -> None:
    manifest = write(TINY, Layout(dp=2), tmp_path, step=12)
    path = tmp_path / "step_00000012"
    assert folder.named_steps(tmp_path) == [12]
    assert folder.read_latest(tmp_path) == path.name
    assert manifest.total_bytes == sum(file.stat().st_size for file in path.glob("shard_*"))
    assert folder.unexpected_files(path, manifest) == []


WITH_EXPERTS = [
    Layout(),
    Layout(dp=2, ep=2, dtype="bf16"),
    Layout(tp=2, dp=2, ep=4),
    Layout(tp=2, pp=2, dp=2, ep=2, etp=2, zero=0),
    Layout(dp=4, ep=2, bucket_numel=5_000),
]


@pytest.mark.parametrize("source", WITH_EXPERTS, ids=str)
def test_experts_load_in_any_layout(source: Layout, tmp_path: Path) -> None:
    """Experts are split over ep and etp, or replicated over tensor ranks. Every element must be at its place."""
    write(TINY_EXPERTS, source, tmp_path)
    for target in WITH_EXPERTS:
        check_loads(TINY_EXPERTS, target, tmp_path / "step_00000007")
