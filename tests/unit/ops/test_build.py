"""Tests the ahead-of-time build on a machine without a GPU: each GPU kernel compiles, and the result may be shipped."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from frontier_llm.errors import BackendError
from frontier_llm.ops import driver, manifest
from frontier_llm.ops.aot import assembler, code_object
from frontier_llm.ops.kernel_table import ARCHITECTURES, HEAD_DIMS, all_kernels, variants

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install --no-deps triton")


ASSEMBLE = """
import sys
from pathlib import Path
from frontier_llm.ops.aot.assembler import assembler_version
from frontier_llm.ops.aot.build import Build, compile_one
code = compile_one(Build("sm_90", "accumulate", "bf16", "any", True), Path(sys.argv[1]))
print(assembler_version("sm_90"), code.abi)
"""


@needs_triton
def test_sm_90_is_assembled_by_the_ptxas_of_tritons_wheel(tmp_path):
    """Triton 3.9's own choice is ptxas-blackwell of CUDA 13, whose code objects need a newer driver."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", ASSEMBLE, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.stdout.split() == ["12.9", "7"], done.stderr


@needs_triton
def test_every_variant_is_there_and_fits_the_machine(gfx90a):
    shipped = manifest.read_manifest("gfx90a", gfx90a)
    built = {(line["kernel"], line["dtype"], line["variant"], line["aligned"]): line for line in shipped["kernels"]}
    assert set(built) == {
        (k.name, dtype, name, aligned)
        for k in all_kernels().values()
        for dtype in k.dtypes
        for name in variants(k.name, "gfx90a")
        for aligned in k.builds
    }
    assert len(built) == len(shipped["kernels"])
    for line in built.values():
        fits(line, "gfx90a")
        wants_what_the_launcher_gives(line, gfx90a, "gfx90a")
    for name in ("d64", "d128"):  # a second wave computes while the first multiplies
        line = built["attention_forward", "bf16", name, True]
        assert ARCHITECTURES["gfx90a"].waves_per_simd(line["warps"], line["registers"], line["shared_bytes"]) >= 2
    assert shipped["tools"]["triton"]


@needs_triton
def test_code_objects_do_not_say_where_they_were_built(gfx90a):
    """The same sources and tools then give the same files everywhere. The manifest's digests can prove it."""
    assert not [path.name for path in gfx90a.glob("*.hsaco") if b"frontier_llm/ops" in path.read_bytes()]


EXCEPTIONS = json.loads((Path(__file__).parent / "sm_90_exceptions.json").read_text())
EXCEPTIONS_AT_MOST = 41  # lower it when the list gets shorter; never raise it


def test_the_list_of_exceptions_on_sm_90_does_not_grow():
    assert len(EXCEPTIONS) <= EXCEPTIONS_AT_MOST


def is_no_new_exception(line):
    """Compare the warnings, stack and spills that ptxas 12.9 reports with the list of exceptions. The list names each
    kernel for which ptxas reports any.
    """
    name = line["file"].removesuffix(".cubin")
    assembled = line["assembled"]
    expected = EXCEPTIONS.get(name, {"warnings": [], "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0})
    assert assembled == expected, f"{name}: if this is better, correct sm_90_exceptions.json"


def test_notes_of_the_assembler_are_read():
    log = (
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : Function properties for f\n"
        "    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\n"
    )
    assert assembler.read_log(log) == assembler.Assembled(("C7515",), 16, 24, 32)
    assert assembler.read_log("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads").is_clean
    with pytest.raises(BackendError, match="no stack frame for the kernel: no output"):
        assembler.read_log("")


def fits(line, architecture):
    machine = ARCHITECTURES[architecture]
    key = (line["kernel"], line["dtype"], line["variant"], line["aligned"])
    # NVIDIA has 255 registers, CDNA has 512. ptxas may put a few words on the stack, and more in the unaligned
    # fallback.
    assert line["spills"] <= (0 if machine.backend == "hip" else 20 if line["aligned"] else 200), key
    assert line["shared_bytes"] <= machine.block_shared_bytes, key
    assert 0 < line["registers"] <= (512 if machine.backend == "hip" else 255), key
    assert line["threads"] == line["warps"] * machine.wave, key
    assert machine.waves_per_simd(line["warps"], line["registers"], line["shared_bytes"]) >= 1, key
    # Matrix products must run on the matrix units.
    of_attention = all_kernels()[line["kernel"]].is_attention
    assert (line["matrix_instructions"] > 0) == (of_attention or line["kernel"].startswith("grouped_")), key
    if of_attention and machine.backend == "cuda":
        work = line["matrix_flops"] * line["warps"] / flops_of_the_two_loops(line)
        # If work > 1, products are computed twice, because no other block size fits the registers
        # (docs/benchmarks/ops.md).
        assert work == 1 or (line["variant"][:3] != "d64" and work <= 1.67), key


def flops_of_the_two_loops(line):
    """Return the FLOPs of an attention kernel's two loops, one over complete blocks and one over blocks on the
    diagonal.

    Each loop must contain each product of a block once.
    If a block has more warps than tiles of rows, several warps share a tile and compute the same values. AMD's matrix
    instructions are counted when they are executed (tests/cdna2).
    """
    products = {"attention_forward": 2, "attention_grad_kv": 4, "attention_grad_q": 3}[line["kernel"]]
    return 2 * products * 2 * math.prod(line["constants"][f"BLOCK_{side}"] for side in "MND")


SAMPLE = """
import json, os, sys, tempfile
from dataclasses import asdict
from pathlib import Path
from frontier_llm.ops.aot.build import Build, compile_one
architecture, folder = sys.argv[1:]
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
for name in ("attention_forward bf16 d128", "attention_grad_kv bf16 d64", "attention_grad_q fp16 d64", "norm_forward bf16 layernorm-8192", "adamw bf16 any"):
    print(json.dumps(asdict(compile_one(Build(architecture, *name.split(), True), Path(folder)))))
"""  # noqa: E501


@needs_triton
@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["gfx942", "sm_80", "sm_90"])
def test_the_other_architectures_too(architecture, tmp_path):
    """Check every kernel in the folder of the built kernels. If the folder is empty, compile a sample of five, because
    all kernels take two minutes.
    """
    try:
        folder = manifest.GPU_DIR / architecture
        lines = manifest.read_manifest(architecture)["kernels"]
        assert {line["kernel"] for line in lines} == set(all_kernels())
        if architecture == "sm_90":
            built = {line["file"].removesuffix(".cubin") for line in lines}
            assert set(EXCEPTIONS) <= built, "remove kernels that do not exist from sm_90_exceptions.json"
    except BackendError:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-c", SAMPLE, architecture, str(tmp_path)]
        printed = subprocess.run(
            command, check=True, env=environment, timeout=280, capture_output=True, text=True
        ).stdout
        folder = tmp_path
        lines = [json.loads(line) for line in printed.splitlines()]
        assert len(lines) == 5
    for line in lines:
        fits(line, architecture)
        if architecture == "sm_90":
            is_no_new_exception(line)
        wants_what_the_launcher_gives(line, folder, architecture)


def wants_what_the_launcher_gives(line, folder, architecture):
    declared = code_object.read((folder / line["file"]).read_bytes())
    kinds = [kind for _, kind, _ in line["arguments"]]
    code_object.check_launch(declared, architecture, line["symbol"], kinds, line["threads"], line["shared_bytes"])
    assert (declared.registers, declared.spills) == (line["registers"], line["spills"]), line["file"]


@needs_triton
def test_what_triton_asks_beside_the_arguments_is_refused():
    from frontier_llm.ops.aot.build import check_extras

    plain = {
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_pdl": False,
        "tensordesc_meta": [],
    }
    check_extras(SimpleNamespace(**plain))
    for change in (
        {"global_scratch_size": 8},
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"tensordesc_meta": ["x"]},
    ):
        with pytest.raises(BackendError, match="which the launcher does not support"):
            check_extras(SimpleNamespace(**{**plain, **change}))


def test_arguments_stand_in_the_sources_signature():
    swiglu = all_kernels()["swiglu_forward"]
    assert swiglu.signature("bf16") == {
        "x": "*bf16",
        "weights": "*fp32",
        "out": "*bf16",
        "columns": "i32",
        "has_weights": "i32",
    }
    assert [argument.by16 for argument in swiglu.arguments] == [
        True,
        False,
        True,
        True,
        False,
    ] and swiglu.module == "pointwise"
    assert not any("BLOCK" in argument.name for kernel in all_kernels().values() for argument in kernel.arguments)


@needs_triton
def test_the_compiler_takes_the_arguments_that_the_table_reads():
    """In the interpreter a kernel is an object of another class.

    The test therefore reads the sources in a separate process.
    """
    program = """
import importlib
from frontier_llm.ops.kernel_table import all_kernels, variants
for kernel in all_kernels().values():
    names = getattr(importlib.import_module(f"frontier_llm.ops.triton.{kernel.module}"), kernel.name).arg_names
    for variant in variants(kernel.name, "gfx90a").values():
        assert [argument.name for argument in kernel.arguments] == [name for name in names if name not in variant.constants], kernel
"""  # noqa: E501
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=280)


def test_occupancy():
    amd = ARCHITECTURES["gfx90a"]
    nvidia = ARCHITECTURES["sm_90"]
    assert amd.waves_per_simd(4, 64, 0) == 8  # the hardware's limit
    assert amd.waves_per_simd(4, 129, 0) == 3  # registers: 512 / 136
    assert amd.waves_per_simd(4, 64, 32768) == 2  # LDS: two blocks of four waves on four SIMDs
    assert nvidia.waves_per_simd(8, 128, 0) == 4
    assert nvidia.waves_per_simd(8, 128, 100_000) == 4 and nvidia.waves_per_simd(8, 128, 120_000) == 2


def test_every_kernel_has_variants_everywhere():
    for architecture in ARCHITECTURES:
        for kernel in all_kernels().values():
            names = variants(kernel.name, architecture)
            assert names
            if kernel.is_attention:
                assert all(any(name.startswith(f"d{dim}") for name in names) for dim in HEAD_DIMS)
            for variant in names.values():  # the loops over the diagonal advance by complete blocks
                if kernel.is_attention:
                    outer, inner = (
                        ("BLOCK_N", "BLOCK_M") if kernel.name == "attention_grad_kv" else ("BLOCK_M", "BLOCK_N")
                    )
                    assert variant.constants[outer] % variant.constants[inner] == 0


def manifest_of(folder, **changes):
    code = folder / "a.hsaco"
    code.write_bytes(b"code")
    digest = "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"  # sha256 of b"code"
    content = {
        "version": manifest.MANIFEST_VERSION,
        "architecture": "gfx90a",
        "tools": {"triton": "3.9.0"},
        "sources": manifest.source_digests(),
        "kernels": [{"file": "a.hsaco", "sha256": digest}],
        **changes,
    }
    (folder / "manifest.json").write_text(json.dumps(content))


def test_bad_manifests_are_refused_with_the_command_that_mends_them(tmp_path):
    with pytest.raises(BackendError, match=r"have not been built(.|\n)*build_ops --arch gfx90a"):
        manifest.read_manifest("gfx90a", tmp_path)
    manifest_of(tmp_path)
    assert manifest.read_manifest("gfx90a", tmp_path)["architecture"] == "gfx90a"
    for changes, message in (
        ({"version": 0}, "is for gfx90a and has version 0; expected gfx90a and version"),
        ({"architecture": "gfx942"}, "is for gfx942 and has version"),
        (
            {"sources": {**manifest.source_digests(), "norm.py": "0"}},
            r"other versions of the kernel sources norm.py; out of date: .*norm",
        ),
        ({"sources": {}}, r"attention_forward.py, .*kernel_table.py.* out of date: .*adamw"),
    ):
        manifest_of(tmp_path, **changes)
        with pytest.raises(BackendError, match=message):
            manifest.read_manifest("gfx90a", tmp_path)


def test_only_comments_and_blank_lines_leave_the_digest_of_a_source() -> None:
    source = 'x = 1  # one\n# two\n\n\ny = """\n# text\n\n"""  # three\nz = "# no comment"\n'
    plain = 'x = 1\ny = """\n# text\n\n"""\nz = "# no comment"'
    assert manifest.without_comments(source) == plain
    assert manifest.without_comments(plain) == plain
    for path in (Path(manifest.__file__).parent / "triton").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ast.dump(ast.parse(manifest.without_comments(text))) == ast.dump(ast.parse(text)), path.name


def test_a_changed_source_makes_its_own_kernels_stale_and_no_other() -> None:
    def stale(file: str) -> tuple[list[str], list[str]]:
        return manifest.stale_kernels({**manifest.source_digests(), file: "0"})

    forward = ["attention_forward"]
    gradients = ["attention_grad_kv", "attention_grad_q"]
    assert stale("attention_forward.py") == (["attention_forward.py"], forward)
    assert stale("attention_backward.py") == (["attention_backward.py"], gradients)
    files, kernels = stale("attention_scores.py")  # defines no kernel, and both of the others import it
    assert (files, sorted(kernels)) == (["attention_scores.py"], forward + gradients)
    assert stale("gone.py") == stale("__init__.py") == ([], [])  # no kernel uses these files
    assert set(manifest.stale_kernels({**manifest.source_digests(), manifest.TABLE: "0"})[1]) == set(all_kernels())
    assert manifest.stale_kernels(manifest.source_digests()) == ([], [])


def test_wrong_tools_and_damaged_files_are_refused(tmp_path):
    manifest_of(tmp_path)
    for triton in ("3.4.0", "4.0.0", "?"):
        manifest_of(tmp_path, tools={"triton": triton})
        with pytest.raises(
            BackendError,
            match=r"compiled by Triton(.|\n)*'triton>=3.5,<4' && pip install --no-deps msgpack pyelftools && python "
            r"setup.py build_ops --arch gfx90a",
        ):
            manifest.read_manifest("gfx90a", tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BackendError, match="the manifest cannot be read"):
        manifest.read_manifest("gfx90a", tmp_path)
    manifest_of(tmp_path)
    (tmp_path / "a.hsaco").write_bytes(b"coda")
    with pytest.raises(BackendError, match=r"a\.hsaco.*differs from the file"):
        manifest.read_manifest("gfx90a", tmp_path)
    with pytest.raises(BackendError, match="there are no GPU ops for gfx906"):
        manifest.read_manifest("gfx906")


@pytest.mark.skipif(not driver.LAUNCHER.exists(), reason="scripts/build_native.sh")
@pytest.mark.parametrize("vendor", ["hip", "cuda"])
def test_a_missing_driver_is_an_error_not_a_crash(vendor):
    try:
        driver._open.__wrapped__(vendor)
    except BackendError as error:
        assert "driver cannot be opened" in str(error) and "LD_LIBRARY_PATH" in str(error)
    else:
        pytest.skip(f"there is a {vendor} driver here")


@needs_triton
def test_an_unknown_architecture_is_named():
    from frontier_llm.ops.aot.build import all_builds

    with pytest.raises(BackendError, match=r"gfx90b(.|\n)*gfx90a"):
        all_builds(["gfx90b"])
