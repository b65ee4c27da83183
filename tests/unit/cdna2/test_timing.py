"""Tests the timing model with instructions whose time can be computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cdna2.disassembly import Descriptor, Instruction, Program
from tests.cdna2.local_memory import bank_cycles
from tests.cdna2.timing import Rates, time_of

MATRIX = ("v_mfma_f32_32x32x8f16", ("a[0:15]", "v[0:1]", "v[2:3]", "a[0:15]"))
VECTOR = ("v_add_f32", ("v4", "v5", "v6"))
EXPONENTIAL = ("v_exp_f32", ("v4", "v5"))
LOAD = ("global_load_dwordx4", ("v[8:11]", "v[12:13]", "off"))
READ = ("ds_read_b128", ("v[8:11]", "v12"))


def nop(count):
    return "s_nop", (str(count - 1),)


def wait(**counters):
    return "s_waitcnt", (), {f"{counter}cnt": str(left) for counter, left in counters.items()}


def timed(lines, waves, bank_cycles=0, **rates):
    instructions = tuple(
        Instruction(4 * index, name, "", operands, dict(*modifiers), name)
        for index, (name, operands, *modifiers) in enumerate(lines)
    )
    return time_of(
        Program("test", instructions, Descriptor(64, 32, 0, ())),
        [(index, bank_cycles) for index in range(len(lines))],
        waves,
        Rates(**rates),
    )


def test_one_wave_computes_and_multiplies_by_turns():
    # s_nop 16 waits for the end of the matrix instruction (64 cycles). The compiler emits the same wait.
    timing = timed([MATRIX, nop(16), *[VECTOR] * 16], waves=1)
    assert timing.cycles == 4 + 64 + 64 and timing.matrix_share == pytest.approx(64 / 132)


def test_of_two_waves_one_computes_while_the_other_multiplies():
    lines = [MATRIX, nop(16), *[VECTOR] * 15] * 50
    one = timed(lines, 1)
    two = timed(lines, 2)
    assert one.matrix_share == pytest.approx(0.5, abs=0.01) and two.matrix_share > 0.95
    assert two.cycles == pytest.approx(one.cycles / 2, rel=0.05)


def test_units_that_are_busy_all_the_time_bound_the_rate():
    assert timed([EXPONENTIAL] * 100, 2).cycles == 1600  # exponentials have a quarter of the vector rate
    assert timed([VECTOR] * 100, 4).vector_share == 1.0
    reads = [READ] * 100 + [wait(lgkm=0)]
    # each of the four waves gets a quarter of the LDS's 128 bytes per cycle
    assert timed(reads, 4, lds_latency=0).cycles == pytest.approx(100 * 16 * 64 / 32, rel=0.01)


def test_a_load_takes_its_latency_where_it_is_waited_for():
    hidden = timed([LOAD, *[VECTOR] * 200, wait(vm=0)], 1, memory_latency=500)
    assert hidden.cycles == 4 + 200 * 4 + 4
    assert timed([LOAD, wait(vm=0)], 1, memory_latency=500).cycles == 64 + 500
    assert timed([LOAD, LOAD, wait(vm=1), VECTOR, wait(vm=0)], 1, memory_latency=500).cycles == 2 * 64 + 500


LANE = np.arange(64)


@pytest.mark.parametrize(
    ("addresses", "size", "reads", "cycles"),
    [
        (4 * LANE, 4, True, 2),  # 64 words in 32 banks: two words per bank
        (0 * LANE, 4, True, 2),  # all lanes read the same word
        (128 * LANE, 4, True, 64),  # 64 different words of the same bank
        (8 * LANE, 8, False, 4),
        (16 * LANE, 16, True, 8),
        # rows of 256 bytes without swizzling: eight lanes access the same four banks
        (256 * (LANE % 32) + 16 * (LANE // 32), 16, True, 64),
        (256 * (LANE % 32) + 16 * (LANE // 32 ^ LANE % 16), 16, True, 8),  # swizzled
        (2 * LANE, 2, False, 2),  # two lanes read the two halves of one word
    ],
)
def test_an_access_takes_as_long_as_the_bank_that_is_asked_most(addresses, size, reads, cycles):
    assert bank_cycles(addresses, LANE >= 0, size, reads=reads) == cycles


def test_reads_of_sixteen_bytes_are_served_in_other_groups_than_writes():
    """Lanes 0 to 3 are served together with lanes 20 to 23, and 4 to 7 with 16 to 19. If they address the same banks,
    they wait for each other in a read but not in a write.
    """
    addresses = 16 * np.where(LANE < 8, LANE ^ 4, LANE)
    assert bank_cycles(addresses, LANE >= 0, 16, reads=False) == 8
    assert bank_cycles(addresses, LANE >= 0, 16, reads=True) == 10


def test_conflicts_keep_the_lds_busy_and_can_be_left_out():
    reads = [READ] * 100 + [wait(lgkm=0)]
    assert timed(reads, 4, bank_cycles=64, lds_latency=0).cycles == pytest.approx(100 * 64 * 4, rel=0.01)
    assert timed(reads, 4, bank_cycles=64, lds_latency=0, bank_conflicts=False).cycles == pytest.approx(
        100 * 8 * 4, rel=0.01
    )


def test_code_that_the_instruction_cache_does_not_hold_is_loaded_again():
    lines = [VECTOR] * 64  # 256 bytes: four lines
    assert timed(lines, 1, instruction_cache_bytes=256).cycles == 64 * 4
    assert timed(lines, 1, instruction_cache_bytes=128, memory_latency=500).cycles == 64 * 4 + 4 * 500
