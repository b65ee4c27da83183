"""The ahead-of-time report: every GPU kernel compiles for gfx90a on this machine without a GPU, and is fit to ship."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

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
    built = {(line["kernel"], line["dtype"], line["variant"], line["aligned"]): line for line in manifest["kernels"]}
    assert set(built) == {
        (k.name, dtype, name, aligned)
        for k in KERNELS.values()
        for dtype in k.dtypes
        for name in variants(k.name, "gfx90a")
        for aligned in k.builds
    }
    assert len(built) == len(manifest["kernels"])
    for line in built.values():
        fits(line, "gfx90a")
    for name in ("d64", "d128"):  # one wave computes while the other multiplies
        line = built["attention_forward", "bf16", name, True]
        assert ARCHITECTURES["gfx90a"].waves_per_simd(line["warps"], line["registers"], line["shared_bytes"]) >= 2
    assert manifest["tools"]["triton"]


def fits(line, architecture):
    machine, key = ARCHITECTURES[architecture], (line["kernel"], line["dtype"], line["variant"], line["aligned"])
    # NVIDIA's 255 registers are less than CDNA's 512: ptxas may put a few words on the stack, more of them in the unaligned fallback
    assert line["spills"] <= (0 if machine.backend == "hip" else 40 if line["aligned"] else 200), key
    assert line["shared_bytes"] <= machine.block_shared_bytes, key
    assert 0 < line["registers"] <= (512 if machine.backend == "hip" else 255), key
    assert line["threads"] == line["warps"] * machine.wave, key
    assert machine.waves_per_simd(line["warps"], line["registers"], line["shared_bytes"]) >= 1, key
    # the products of attention must run on the matrix units; delta is a row sum
    is_product = line["kernel"].startswith("attention_") and line["kernel"] != "attention_delta"
    assert (line["matrix_instructions"] > 0) == is_product, key


SAMPLE = """
import json, os, sys, tempfile
from dataclasses import asdict
from pathlib import Path
from frontier_llm.ops.triton.build import Work, compile_one
architecture, folder = sys.argv[1:]
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
for name in ("attention_forward bf16 d128", "attention_grad_kv bf16 d64", "attention_grad_q fp16 d64", "norm_forward bf16 layernorm-8192", "adamw bf16 any"):
    print(json.dumps(asdict(compile_one(Work(architecture, *name.split(), True), Path(folder)))))
"""


@needs_triton
@pytest.mark.parametrize("architecture", ["gfx942", "sm_80", "sm_90"])
def test_the_other_architectures_too(architecture, tmp_path):
    """All of what is shipped; a sample of five where nothing is built (the whole takes two minutes)."""
    try:
        folder, lines = prebuilt.GPU_DIR / architecture, prebuilt.read_manifest(architecture)["kernels"]
        assert {line["kernel"] for line in lines} == set(KERNELS)
    except BackendError:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", SAMPLE, architecture, str(tmp_path)]
        printed = subprocess.run(command, check=True, env=environment, timeout=280, capture_output=True, text=True).stdout
        folder, lines = tmp_path, [json.loads(line) for line in printed.splitlines()]
        assert len(lines) == 5
    machine = {"gfx942": (224, 0x4C), "sm_80": (190, 80), "sm_90": (190, 90)}[architecture]
    for line in lines:
        fits(line, architecture)
        assert elf_machine((folder / line["file"]).read_bytes()) == machine, line["file"]


def elf_machine(image):
    """(e_machine, architecture in e_flags); NVIDIA's number is in the second byte since ABI 8, before in the first."""
    assert image[:4] == b"\x7fELF"
    machine, flags = int.from_bytes(image[18:20], "little"), int.from_bytes(image[48:52], "little")
    return machine, flags >> 8 & 0xFF if machine == 190 and image[8] >= 8 else flags & 0xFF


@needs_triton
def test_code_objects_are_for_the_architecture_and_export_their_symbol(gfx90a):
    for line in prebuilt.read_manifest("gfx90a", gfx90a)["kernels"]:
        image = (gfx90a / line["file"]).read_bytes()
        assert elf_machine(image) == (224, 0x3F)  # EM_AMDGPU, EF_AMDGPU_MACH_AMDGCN_GFX90A
        assert f"{line['symbol']}.kd".encode() in image


AMD = "".join(f"      - .offset: 0\n        .size: {size}\n        .value_kind: global_buffer\n" for size in (8, 4, 8, 8))
NVIDIA = (
    "\t.param .u64 .ptr .global .align 16 f_param_0,\n\t.param .u32 f_param_1,\n" + "\t.param .u64 .ptr .global .align 1 f_param_2,\n" * 2
)


@pytest.mark.parametrize("assembly", [AMD, NVIDIA])
def test_what_the_launcher_does_not_give_is_refused(assembly):
    from frontier_llm.ops.triton.build import check_launch

    plain = SimpleNamespace(num_ctas=1, global_scratch_size=0, profile_scratch_size=0, launch_pdl=False, tensordesc_meta=[])
    check_launch(assembly, ["*bf16", "i32"], plain)
    for kinds in (["*bf16", "i64"], ["*bf16"], ["i32", "*bf16"]):
        with pytest.raises(BackendError, match="arguments of"):
            check_launch(assembly, kinds, plain)
    for change in ({"global_scratch_size": 8}, {"num_ctas": 2}, {"launch_cooperative_grid": True}, {"tensordesc_meta": ["x"]}):
        with pytest.raises(BackendError, match="which the launcher does not give"):
            check_launch(assembly, ["*bf16", "i32"], SimpleNamespace(**{**vars(plain), **change}))


def test_occupancy():
    amd, nvidia = ARCHITECTURES["gfx90a"], ARCHITECTURES["sm_90"]
    assert amd.waves_per_simd(4, 64, 0) == 8  # the hardware's limit
    assert amd.waves_per_simd(4, 129, 0) == 3  # registers: 512 / 136
    assert amd.waves_per_simd(4, 64, 32768) == 2  # LDS: two blocks of four waves on four SIMDs
    assert nvidia.waves_per_simd(8, 128, 0) == 4
    assert nvidia.waves_per_simd(8, 128, 100_000) == 4 and nvidia.waves_per_simd(8, 128, 120_000) == 2


def test_every_kernel_has_variants_everywhere():
    for architecture in ARCHITECTURES:
        for kernel in KERNELS.values():
            names = variants(kernel.name, architecture)
            assert names
            if kernel.module == "attention":
                assert all(any(name.startswith(f"d{dim}") for name in names) for dim in HEAD_DIMS)
            for variant in names.values():  # the loops over the diagonal go by whole blocks
                if "BLOCK_N" in variant.constants:
                    outer, inner = ("BLOCK_N", "BLOCK_M") if kernel.name == "attention_grad_kv" else ("BLOCK_M", "BLOCK_N")
                    assert variant.constants[outer] % variant.constants[inner] == 0


def manifest_of(folder, **changes):
    code = folder / "a.hsaco"
    code.write_bytes(b"code")
    digest = "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"  # sha256 of b"code"
    content = {
        "version": prebuilt.MANIFEST_VERSION,
        "architecture": "gfx90a",
        "tools": {"triton": "3.9.0"},
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
    for triton in ("3.2.0", "4.0.0", "?"):
        manifest_of(tmp_path, tools={"triton": triton})
        with pytest.raises(BackendError, match=r"compiled by Triton(.|\n)*'triton>=3.4,<4' && python setup.py build_ops --arch gfx90a"):
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
