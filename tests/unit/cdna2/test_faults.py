"""Tests that the simulator detects each fault: it is planted once in hand-written code and once in a shipped kernel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.cdna2 import Fault, SimulatorError, disassembly, launch, load, simulator
from tests.unit.cdna2.machine import execute

COPY = """v_lshlrev_b32_e32 v1, 2, v0
global_load_dword v2, v1, s[8:9]
s_waitcnt vmcnt(0)
global_store_dword v1, v2, s[10:11]"""

# each wave writes its part of LDS and reads the part of the next wave
EXCHANGE = """v_lshlrev_b32_e32 v1, 2, v0
global_load_dword v2, v1, s[8:9]
s_waitcnt vmcnt(0)
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
s_barrier
v_xor_b32_e32 v3, 0x100, v1
ds_read_b32 v4, v3
s_waitcnt lgkmcnt(0)
global_store_dword v1, v4, s[10:11]"""


def without(text, line):
    assert line in text
    return text.replace(line + "\n", "", 1)


def numbers(count):
    return np.arange(count, dtype=np.uint32) * 3 + 1


def test_copy_and_exchange_are_right():
    source = numbers(64)
    target = np.zeros(64, np.uint32)
    counts = execute(COPY, source, target)
    assert np.array_equal(source, target) and counts.waves == 1
    assert counts.bytes_moved == {"smem": 16, "vmem loaded": 256, "vmem stored": 256} and counts.per_wave["vmem"] == 2
    source = numbers(128)
    target = np.zeros(128, np.uint32)
    counts = execute(EXCHANGE, source, target, threads=128, shared_bytes=512)
    assert np.array_equal(np.roll(source, 64), target)
    assert counts.instructions["barriers"] == 2 and counts.bytes_moved["lds written"] == 512


@pytest.mark.parametrize(
    ("text", "register"),
    [
        (without(COPY, "s_waitcnt vmcnt(0)"), "v2"),
        (COPY.replace("vmcnt(0)", "vmcnt(1)"), "v2"),
        (COPY.replace("s_waitcnt", "v_mov_b32_e32 v2, 0\ns_waitcnt"), "v2"),  # the load arrives after this instruction
        (EXCHANGE.replace("lgkmcnt(0)\nglobal", "vmcnt(0)\nglobal"), "v4"),
        ("s_load_dword s12, s[8:9], 0x0\ns_add_u32 s12, s12, 1", "s12"),
        # Scalar loads arrive in any order, so waiting for all but one does not guarantee the first.
        (
            "s_load_dword s12, s[8:9], 0x0\ns_load_dword s13, s[8:9], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s14, s12",
            "s12",
        ),
    ],
)
def test_a_missing_wait(text, register):
    with pytest.raises(Fault, match=rf"{register} is touched while its load is in flight"):
        execute(text, numbers(128), np.zeros(128, np.uint32), threads=128, shared_bytes=512)


def test_loads_arrive_in_order():
    text = """v_lshlrev_b32_e32 v1, 2, v0
    global_load_dword v2, v1, s[8:9]
    global_load_dword v3, v1, s[8:9]
    global_load_dword v3, v1, s[10:11]
    s_waitcnt vmcnt(2)
    v_mov_b32_e32 v4, v2
    s_waitcnt vmcnt(0)
    global_store_dword v1, v4, s[10:11]"""
    source = numbers(64)
    target = np.zeros(64, np.uint32)
    execute(text, source, target)
    assert np.array_equal(source, target)


def test_waves_that_parted_load_one_register_in_different_ways():
    text = """v_lshlrev_b32_e32 v1, 2, v0
    v_readfirstlane_b32 s12, v0
    ds_write_b32 v1, v0
    ds_read_b32 v3, v1
    s_cmp_lg_u32 s12, 0
    s_cbranch_scc1 second
    ds_read_b32 v2, v1
    s_branch both
    second:
    global_load_dword v2, v1, s[8:9]
    both:
    s_cbranch_scc1 wait
    s_waitcnt lgkmcnt(0)
    v_mov_b32_e32 v4, v2
    wait:
    s_waitcnt vmcnt(0) lgkmcnt(0)
    global_store_dword v1, v2, s[10:11]"""
    source = numbers(128)
    target = np.zeros(128, np.uint32)
    execute(text, source, target, threads=128, shared_bytes=512)
    assert np.array_equal(target, np.where(np.arange(128) < 64, np.arange(128), source))
    with pytest.raises(Fault, match="v2 is touched"):
        execute(without(text, "    s_waitcnt lgkmcnt(0)"), source, target, threads=128, shared_bytes=512)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (without(EXCHANGE, "s_barrier"), "a race in LDS, no barrier between: reads what another wave wrote"),
        (without(EXCHANGE, "ds_write_b32 v1, v2"), "reads LDS that no wave wrote"),
        (without(EXCHANGE, "s_waitcnt lgkmcnt(0)"), "a barrier while LDS accesses are in flight"),
        (
            EXCHANGE.replace("ds_write_b32 v1, v2", "v_and_b32_e32 v1, 0xfc, v1\nds_write_b32 v1, v2"),
            "writes what another wave writes",
        ),
        (
            EXCHANGE.replace("ds_read_b32 v4, v3", "ds_read_b32 v4, v3\nds_write_b32 v1, v0"),
            "writes what another wave read",
        ),
        (
            EXCHANGE.replace("ds_write_b32 v1, v2", "ds_write_b32 v1, v2 offset:4"),
            "outside of what the launch gives: 4 bytes at 512 of 512",
        ),
        # only the second wave reaches the barrier
        ("v_readfirstlane_b32 s12, v0\ns_cmp_eq_u32 s12, 0\ns_cbranch_scc1 over\ns_barrier\nover:", "not all waves"),
        ("again:\ns_branch again", "no end after 1000 steps"),
        (
            "v_mov_b32_e32 v1, 4\nglobal_load_dword v2, v1, s[8:9] offset:512",
            "outside of the launch's tensors: 4 bytes at offset 516 of tensor 0",
        ),
        (
            "v_lshlrev_b32_e32 v1, 3, v0\nglobal_store_dword v1, v0, s[10:11]",
            "4 bytes at offset 512 of tensor 1, which has 512 bytes",
        ),
        ("v_frobnicate_b32 v0, v1", "unknown to the simulator: instruction"),
        ("global_load_dword v2, v1, s[8:9] glc", "unknown to the simulator: modifiers"),
        ("s_waitcnt 0x70", "unknown to the simulator: counters"),
        (
            "s_mov_b32 s13, 0x40000\nv_mov_b32_e32 v1, 0\nbuffer_load_dword v2, v1, s[12:15], 0 offen",
            "a buffer with a stride",
        ),
        ("v_mov_b32_e32 v1, v32", "the kernel descriptor allocates less"),
    ],
)
def test_what_breaks_a_rule(monkeypatch, text, what):
    monkeypatch.setattr(simulator, "STEPS_AT_MOST", 1000)
    with pytest.raises(Fault, match=what):
        execute(text, numbers(128), np.zeros(128, np.uint32), threads=128, shared_bytes=512)


def test_halves_are_stored_from_either_half():
    text = """v_lshlrev_b32_e32 v1, 2, v0
    global_load_dword v2, v1, s[8:9]
    s_waitcnt vmcnt(0)
    ds_write_b16_d16_hi v1, v2
    ds_write_b16 v1, v2 offset:2
    s_waitcnt lgkmcnt(0)
    ds_read_b32 v3, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[10:11]"""
    source = numbers(64) * np.uint32(0x30201)
    target = np.zeros(64, np.uint32)
    execute(text, source, target, shared_bytes=256)
    assert np.array_equal(target, source >> np.uint32(16) | source << np.uint32(16))


def test_a_buffer_ends_where_its_descriptor_says():
    text = """v_lshlrev_b32_e32 v1, 2, v0
    s_mov_b32 s12, s8
    s_mov_b32 s13, s9
    s_movk_i32 s14, 0x80
    s_mov_b32 s15, 0x27000
    buffer_load_dword v2, v1, s[12:15], 0 offen
    s_waitcnt vmcnt(0)
    global_store_dword v1, v2, s[10:11]"""
    source = numbers(64)
    target = np.ones(64, np.uint32)
    execute(text, source, target)
    assert np.array_equal(target, np.where(np.arange(64) < 32, source, 0))


def test_a_fault_says_where():
    with pytest.raises(
        Fault, match=r"by_hand, workgroup 3, wave 1, lane 5, at 0x[0-9a-f]+: global_store_dword v2, v0, s\[10:11\]"
    ):
        execute(
            """v_cmp_eq_u32_e32 vcc, 0x45, v0
            s_cmp_eq_u32 s6, 3
            s_cselect_b32 s12, 4, 0
            v_mov_b32_e32 v1, s12
            v_cndmask_b32_e32 v2, 0, v1, vcc
            v_mul_u32_u24_e32 v2, 0x100, v2
            global_store_dword v2, v0, s[10:11]""",
            numbers(128), np.zeros(128, np.uint32), grid=(4, 1, 1), threads=128,
        )  # fmt: skip


def test_waves_that_part_come_together_again():
    text = """v_readfirstlane_b32 s12, v0
    s_lshr_b32 s12, s12, 6
    s_mov_b32 s13, 0
    again:
    s_add_i32 s13, s13, 1
    s_cmp_lt_i32 s13, s12
    s_cbranch_scc1 again
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v2, s13
    global_store_dword v1, v2, s[8:9]"""
    target = np.zeros(256, np.uint32)
    execute(text, target, threads=256)
    assert list(target[::64]) == [1, 1, 2, 3]


@pytest.fixture(scope="module")
def accumulate(objects):
    return load((objects / "accumulate-bf16-any.hsaco").read_bytes())


def accumulated(kernel, count=1504):
    main = np.ones(count, np.float32)
    grad = np.full(count, 0x4000, np.uint16)
    launch(kernel, (2, 1, 1), {"main": main, "grad": grad, "count": count})
    return main


def without_instruction(kernel, place):
    instructions = list(kernel.program.instructions)
    instructions[place] = dataclasses.replace(instructions[place], mnemonic="s_nop", text="s_nop 0")
    program = dataclasses.replace(kernel.program, instructions=tuple(instructions))
    return dataclasses.replace(kernel, program=program)


@pytest.mark.thorough
def test_a_shipped_kernel_without_one_of_its_instructions(accumulate):
    assert (accumulated(accumulate) == 3.0).all()
    for place, instruction in enumerate(accumulate.program.instructions):
        if instruction.mnemonic == "s_waitcnt":
            with pytest.raises(Fault, match="an s_waitcnt is missing"):
                accumulated(without_instruction(accumulate, place))
        if instruction.mnemonic == "s_and_saveexec_b64":  # this instruction masks the last elements
            with pytest.raises(Fault, match="outside of the launch's tensors"):
                accumulated(without_instruction(accumulate, place))


def test_a_missing_disassembler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(disassembly.shutil, "which", lambda *_args, **_more: None)
    disassembly.find_objdump.cache_clear()
    with pytest.raises(SimulatorError, match=r"llvm-objdump(.|\n)*apt-get install llvm"):
        disassembly.find_objdump()
    disassembly.find_objdump.cache_clear()
