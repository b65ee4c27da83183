"""The ahead-of-time report: every GPU kernel compiles for gfx90a on this machine without a GPU, and is fit to ship."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from frontier_llm.errors import BackendError
from frontier_llm.ops import prebuilt
from frontier_llm.ops.kernel_table import ARCHITECTURES, HEAD_DIMS, KERNELS, variants

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install --no-deps triton")


@pytest.fixture(scope="module")
def gfx90a(tmp_path_factory):
    """The shipped folder when it is up to date, else a build into a temporary one (half a minute on one core)."""
    try:
        prebuilt.read_manifest("gfx90a")
        return prebuilt.GPU_DIR / "gfx90a"
    except BackendError:
        folder = tmp_path_factory.mktemp("gpu")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "frontier_llm.ops.triton.build", str(folder), "gfx90a"]
    subprocess.run(command, check=True, env=environment, timeout=280)
    return folder / "gfx90a"


@needs_triton
def test_every_variant_is_there_and_fits_the_machine(gfx90a):
    manifest = prebuilt.read_manifest("gfx90a", gfx90a)
    built = {(line["kernel"], line["dtype"], line["variant"]): line for line in manifest["kernels"]}
    assert set(built) == {(k.name, dtype, name) for k in KERNELS.values() for dtype in k.dtypes for name in variants(k.name, "gfx90a")}
    wave, lds_bytes = ARCHITECTURES["gfx90a"][2:]
    for key, line in built.items():
        assert line["spills"] == 0, key
        assert line["shared_bytes"] <= lds_bytes, key
        assert line["vgprs"] <= 512, key
        assert line["threads"] == line["warps"] * wave, key
        # the products of attention must run on the matrix units; delta is a row sum
        is_product = line["kernel"].startswith("attention_") and line["kernel"] != "attention_delta"
        assert (line["matrix_instructions"] > 0) == is_product, key
    assert manifest["tools"]["triton"]


@needs_triton
def test_code_objects_are_for_the_architecture_and_export_their_symbol(gfx90a):
    for line in prebuilt.read_manifest("gfx90a", gfx90a)["kernels"]:
        image = (gfx90a / line["file"]).read_bytes()
        assert image[:4] == b"\x7fELF" and image[48] == 0x3F  # e_flags: EF_AMDGPU_MACH_AMDGCN_GFX90A
        assert f"{line['symbol']}.kd".encode() in image


def test_arguments_of_other_sizes_are_refused():
    from frontier_llm.ops.triton.build import check_arguments

    sizes = (8, 4, 8, 8)
    assembly = "".join(f"      - .offset: 0\n        .size: {size}\n        .value_kind: global_buffer\n" for size in sizes)
    check_arguments(assembly, ["*bf16", "i32"])
    with pytest.raises(BackendError, match="arguments of"):
        check_arguments(assembly, ["*bf16", "i64"])


def test_every_kernel_has_variants_everywhere():
    for architecture in ARCHITECTURES:
        for kernel in KERNELS.values():
            names = variants(kernel.name, architecture)
            assert names
            if kernel.module == "attention":
                assert all(any(name.startswith(f"d{dim}") for name in names) for dim in HEAD_DIMS)
            for variant in names.values():  # the forward kernel walks blocks of N up to a block of M
                if "BLOCK_N" in variant.constants and kernel.name == "attention_forward":
                    assert variant.constants["BLOCK_M"] % variant.constants["BLOCK_N"] == 0


def manifest_of(folder, **changes):
    code = folder / "a.hsaco"
    code.write_bytes(b"code")
    digest = "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"  # sha256 of b"code"
    content = {
        "version": prebuilt.MANIFEST_VERSION,
        "architecture": "gfx90a",
        "tools": {"triton": "3"},
        "sources_sha256": prebuilt.source_digest(),
        "kernels": [{"file": "a.hsaco", "sha256": digest}],
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(content))


def test_bad_manifests_are_refused_with_the_command_that_mends_them(tmp_path):
    with pytest.raises(BackendError, match=r"have not been built(.|\n)*build_ops --arch gfx90a"):
        prebuilt.read_manifest("gfx90a", tmp_path)
    manifest_of(tmp_path)
    assert prebuilt.read_manifest("gfx90a", tmp_path)["architecture"] == "gfx90a"
    for changes in ({"sources_sha256": "0"}, {"version": 0}, {"architecture": "gfx942"}):
        manifest_of(tmp_path, **changes)
        with pytest.raises(BackendError, match="other kernel sources"):
            prebuilt.read_manifest("gfx90a", tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BackendError, match="unreadable manifest"):
        prebuilt.read_manifest("gfx90a", tmp_path)
    manifest_of(tmp_path)
    (tmp_path / "a.hsaco").write_bytes(b"coda")
    with pytest.raises(BackendError, match=r"a\.hsaco.*sha256 differs"):
        prebuilt.read_manifest("gfx90a", tmp_path)
    with pytest.raises(BackendError, match="no GPU ops are built for gfx906"):
        prebuilt.read_manifest("gfx906")


@pytest.mark.skipif(not prebuilt.LAUNCHER.exists(), reason="scripts/build_native.sh")
@pytest.mark.parametrize("vendor", ["hip", "cuda"])
def test_a_missing_driver_is_an_error_not_a_crash(vendor):
    try:
        prebuilt._open_driver.__wrapped__(vendor)
    except BackendError as error:
        assert "driver cannot be opened" in str(error) and "LD_LIBRARY_PATH" in str(error)
    else:
        pytest.skip(f"there is a {vendor} driver here")


@needs_triton
def test_an_unknown_architecture_is_named():
    from frontier_llm.ops.triton.build import work

    with pytest.raises(BackendError, match=r"gfx90b(.|\n)*gfx90a"):
        work(["gfx90b"])
