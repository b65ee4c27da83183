"""Tests what `code_object` reads from code objects of every assembler, and which it refuses."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest

from frontier_llm.errors import BackendError
from frontier_llm.ops.aot import code_object

ATTRIBUTES = sorted((Path(__file__).parent / "attributes").glob("*.json"))


def image_of(path):
    """Return an ELF file with the attribute sections that a version of ptxas wrote."""
    kept = json.loads(path.read_text())
    content = {name: bytes.fromhex(data) for name, data in kept["sections"].items()}
    return elf(190, kept["flags"], content, kept["abi"])


@pytest.mark.parametrize("path", ATTRIBUTES, ids=lambda path: path.stem)
def test_attributes_of_every_assembler_are_read(path):
    """ptxas 12.4 writes the stack size twice."""
    declared = code_object.read(image_of(path))
    kinds = ["*fp32", "*bf16", "i64"]
    code_object.check_launch(declared, "sm_90", "accumulate", kinds, declared.threads, 0)
    assert declared.registers in range(8, 64) and declared.spills == 0
    assert declared.abi == (7 if path.stem < "ptxas_13" else 8)


def test_the_last_of_repeated_attributes_holds():
    (path,) = (path for path in ATTRIBUTES if path.stem == "ptxas_12.4")
    once = image_of(path)
    stack = bytes.fromhex("041208000500000000000000")
    assert once.count(stack) == 2
    place = once.rindex(stack)
    changed = once[: place + 8] + struct.pack("<I", 12) + once[place + 12 :]
    assert code_object.read(changed).spills == 3


def test_a_damaged_file_is_a_backend_error_whatever_the_damage():
    draw = random.Random(7)
    images = [amd_image(), nvidia_image(), *map(image_of, ATTRIBUTES)]
    refused = 0
    for _ in range(600):
        image = bytearray(draw.choice(images))
        for _ in range(draw.randint(1, 4)):
            image[draw.randrange(len(image))] = draw.randrange(256)
        try:
            code_object.read(bytes(image[: draw.choice([len(image), draw.randrange(len(image))])]))
        except BackendError:
            refused += 1
    assert refused > 200


def elf(machine, flags, sections, abi=8):
    """Return an ELF file with these sections. Only the fields that `code_object` reads are set."""
    names = b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    image = bytearray(64)
    headers = []
    for name, content in {**sections, ".shstrtab": names}.items():
        place = names.index(name.encode())
        headers.append(struct.pack("<IIQQQQ24x", place, 1, 0, 0, len(image), len(content)))
        image += content
    image[:9] = b"\x7fELF\2\1\1\0" + bytes([abi])
    image[18:20] = struct.pack("<H", machine)
    image[40:52] = struct.pack("<QI", len(image), flags)
    image[58:64] = struct.pack("<3H", 64, len(headers), len(headers) - 1)
    return bytes(image + b"".join(headers))


def packed(value):
    """Return msgpack of short strings and lists as LLVM writes it."""
    if isinstance(value, str):
        return bytes([0xA0 | len(value)] if len(value) < 32 else [0xD9, len(value)]) + value.encode()
    if isinstance(value, bool | int):
        return bytes(
            [0xC2 + value] if isinstance(value, bool) else [value] if value < 128 else [0xCD, *value.to_bytes(2, "big")]
        )
    if isinstance(value, list):
        return bytes([0x90 | len(value)]) + b"".join(map(packed, value))
    return bytes([0x80 | len(value)]) + b"".join(packed(item) for pair in value.items() for item in pair)


# Arguments of a kernel with a pointer and a number on four warps, as both vendors' tools list them: (offset, bytes, is
# a pointer).
PARAMETERS = [(0, 8, True), (8, 4, False), (16, 8, True), (24, 8, True)]


def amd_image(parameters=PARAMETERS, threads=256, **changes):
    kinds = {True: "global_buffer", False: "by_value"}
    arguments = [
        {".offset": offset, ".size": size, ".value_kind": kinds[pointer]} for offset, size, pointer in parameters
    ]
    arguments.append({".offset": 32, ".size": 4, ".value_kind": "hidden_block_count_x"})
    kernel = {
        ".args": arguments,
        ".symbol": "f.kd",
        ".max_flat_workgroup_size": threads,
        ".wavefront_size": 64,
        ".vgpr_count": 20,
    }
    kernel |= {
        ".vgpr_spill_count": 0,
        ".sgpr_spill_count": 1,
        ".uses_dynamic_stack": False,
        ".group_segment_fixed_size": 0,
        **changes,
    }
    metadata = packed({"amdhsa.kernels": [kernel], "amdhsa.target": "amdgcn-amd-amdhsa--gfx90a"})
    return elf(224, 0x3F, {".note": struct.pack("<3I", 7, len(metadata), 32) + b"AMDGPU\0\0" + metadata})


def nvidia_image(parameters=PARAMETERS, threads=128):
    def attribute(number, payload):
        return struct.pack("<BBH", 4, number, len(payload)) + payload

    info = b"".join(
        attribute(0x17, struct.pack("<IHHI", 0, index, offset, size << 18 | 0x1F000 | 0x400 * pointer))
        for index, (offset, size, pointer) in reversed(list(enumerate(parameters)))
    )
    offset, size, _ = parameters[-1]
    info += struct.pack("<BBH", 3, 0x1B, 255) + attribute(0x10, struct.pack("<3I", threads, 1, 1))
    info += attribute(0x0A, struct.pack("<IHH", 1, 0x210, offset + size))
    usage = attribute(0x2F, struct.pack("<2I", 1, 20)) + attribute(0x12, struct.pack("<2I", 1, 4))
    return elf(190, 90 << 8, {".nv.info": usage, ".nv.info.f": info})


@pytest.mark.parametrize(
    ("architecture", "image", "threads"), [("gfx90a", amd_image, 256), ("sm_90", nvidia_image, 128)]
)
def test_what_the_launcher_does_not_give_is_refused(architecture, image, threads):
    def check(declared, kinds=("*bf16", "i32"), architecture=architecture, symbol="f", threads=threads, shared_bytes=0):
        code_object.check_launch(declared, architecture, symbol, kinds, threads, shared_bytes)

    declared = code_object.read(image())
    check(declared)
    assert (declared.registers, declared.spills) == (20, 1)
    for kinds, difference in (
        (("*bf16", "i64"), "argument 1"),  # another size
        (("*bf16",), "number of arguments"),  # one argument less
        (("i32", "*bf16"), "argument 0"),  # another order
        (("i64", "i32"), "argument 0"),  # a number instead of a pointer
    ):
        with pytest.raises(BackendError, match=difference):
            check(declared, kinds)
    for changes in ({"architecture": "gfx942"}, {"symbol": "g"}, {"threads": 512}, {"shared_bytes": 2**20}):
        with pytest.raises(BackendError, match="code object of"):
            check(declared, **changes)
    for planted in ([*PARAMETERS, (32, 8, True)], PARAMETERS[:-1], [(0, 8, True), (12, 4, False), *PARAMETERS[2:]]):
        with pytest.raises(BackendError, match="in the code object, but"):
            check(code_object.read(image(planted)))
    for broken in (b"text", b"\x7fELF", image()[:-200], elf(62, 0, {}), amd_image(**{".group_segment_fixed_size": 64})):
        with pytest.raises(BackendError, match="code object"):
            code_object.read(broken)
