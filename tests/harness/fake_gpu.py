"""Provides a fake GPU driver that only records calls (fake_driver.c), empty code objects for it, and kernels that are
launched on it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from frontier_llm.ops import driver as gpu_driver
from frontier_llm.ops import manifest as built
from frontier_llm.ops import prebuilt
from frontier_llm.ops.kernel_table import ARCHITECTURES, all_kernels, variants

skipped = [
    pytest.mark.skipif(not gpu_driver.LAUNCHER.exists(), reason="scripts/build_native.sh"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the fake driver"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real driver: test_gpu.py"),
]
DEVICE = 3
STREAM = 0xABC0
checked_address = prebuilt.address_or_number
IMAGE = b"\x7fELF of nothing"


class Record(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("launches", "loads", "device", "context_switches", "shared_attribute", "count")
        ),
        *((name, ctypes.c_uint * 3) for name in ("grid", "block")),
        ("shared", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("stream", "function")),
        ("slots", ctypes.c_ulonglong * 64),
        ("symbol", ctypes.c_char * 64),
    )


def write_code_objects(folder, architecture):
    """Write a manifest as the build does, with every kernel's real arguments. Only the fake driver accepts the code
    objects.
    """
    machine = ARCHITECTURES[architecture]
    lines = []
    (folder / "code").write_bytes(IMAGE)
    for kernel in all_kernels().values():
        for dtype in kernel.dtypes:
            for name, variant in variants(kernel.name, architecture).items():
                for aligned in kernel.builds:
                    signature = kernel.signature(dtype)
                    lines.append(
                        {
                            "kernel": kernel.name,
                            "dtype": dtype,
                            "variant": name,
                            "aligned": aligned,
                            "symbol": f"{kernel.name}{'' if aligned else '_unaligned'}",
                            "file": f"{kernel.name}-{dtype}-{name}-{aligned}",
                            "sha256": hashlib.sha256(IMAGE).hexdigest(),
                            "arguments": [
                                [argument.name, signature[argument.name], argument.by16]
                                for argument in kernel.arguments
                            ],
                            "constants": variant.constants,
                            "threads": variant.warps * machine.wave,
                            "shared_bytes": 60000 if kernel.is_attention else 0,
                        }
                    )
                    (folder / lines[-1]["file"]).write_bytes(IMAGE)
    manifest = {"version": built.MANIFEST_VERSION, "architecture": architecture, "tools": {"triton": "3.9.0"}}
    manifest |= {"sources": built.source_digests(), "kernels": lines}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@cache
def driver_of(backend: str) -> ctypes.CDLL:
    """Build and load the driver. There is one per process, because dlopen finds a loaded library by its soname."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libamdhip64.so" if backend == "hip" else "libcuda.so.1")
        define = ["-DAMD"] if backend == "hip" else []
        source = str(Path(__file__).with_name("fake_driver.c"))
        subprocess.run(
            ["cc", "-shared", "-fPIC", *define, f"-Wl,-soname,{library.name}", "-o", str(library), source], check=True
        )
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)


@contextmanager
def fake_gpu(architecture: str, folder: Path) -> Iterator[tuple[prebuilt.PrebuiltKernels, ctypes.CDLL, Record]]:
    """Yield (kernels, driver, its record) of device 3. CPU tensors or meta tensors stand for this device's tensors."""
    driver = driver_of(ARCHITECTURES[architecture].backend)
    write_code_objects(folder, architecture)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: DEVICE)
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
        patch.setattr(
            prebuilt,
            "address_or_number",
            lambda name, pointed, value, device: checked_address(name, pointed, value, -1),
        )
        gpu_driver._open.cache_clear()
        yield prebuilt.PrebuiltKernels(architecture, folder), driver, Record.in_dll(driver, "record")
    gpu_driver._open.cache_clear()
