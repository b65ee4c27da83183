"""Writes the attribute sections of one sm_90 kernel from several versions of ptxas, as files of this folder.

    python -m tests.unit.ops.attributes.make PTXAS [PTXAS ...]

PTXAS are paths, for example in unpacked wheels of nvidia-cuda-nvcc-cu12. Each file has the ELF header's ABI and flags,
the sections in hexadecimal, and the values that a correct reader finds. Needs Triton, and no GPU.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

from frontier_llm.ops.aot.code_object import sections
from frontier_llm.ops.manifest import PTXAS_VARIABLES

FOLDER = Path(__file__).parent
COMPILE = """
import sys
from pathlib import Path
from frontier_llm.ops.aot.assembler import assembler_version
from frontier_llm.ops.aot.build import Build, compile_one
code = compile_one(Build("sm_90", "accumulate", "bf16", "any", True), Path(sys.argv[1]))
print(assembler_version("sm_90"), code.file)
"""


def write(ptxas: str, folder: Path) -> Path:
    """Assemble the kernel with this ptxas, and write its attributes. Returns the path."""
    environment = {**os.environ, **dict.fromkeys(PTXAS_VARIABLES, ptxas), "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-c", COMPILE, str(folder)]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    version, file = printed.split()
    elf = ELFFile(io.BytesIO((folder / file).read_bytes()))
    content = {name: data.hex() for name, data in sections(elf).items() if name.startswith(".nv.info")}
    identity = {"ptxas": version, "abi": elf["e_ident"]["EI_ABIVERSION"], "flags": elf["e_flags"]}
    path = FOLDER / f"ptxas_{version}.json"
    path.write_text(json.dumps({**identity, "sections": content}, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    import tempfile

    for assembler in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            print(write(assembler, Path(scratch)))
