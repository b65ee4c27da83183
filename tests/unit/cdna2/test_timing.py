"""The timing model on instructions whose time can be worked out by hand."""

from __future__ import annotations

import pytest

from tests.cdna2.disassembly import Descriptor, Instruction, Program
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


def timed(lines, waves, **rates):
    instructions = tuple(
        Instruction(4 * index, name, "", operands, dict(*modifiers), name) for index, (name, operands, *modifiers) in enumerate(lines)
    )
    return time_of(Program("test", instructions, Descriptor(64, 32, 0, ())), range(len(lines)), waves, Rates(**rates))


def test_one_wave_computes_and_multiplies_by_turns():
    # the last 64 cycles are waited for by 16 nops, as the compiler does it
    timing = timed([MATRIX, nop(16), *[VECTOR] * 16], waves=1)
    assert timing.cycles == 4 + 64 + 64 and timing.matrix_share == pytest.approx(64 / 132)


def test_of_two_waves_one_computes_while_the_other_multiplies():
    lines = [MATRIX, nop(16), *[VECTOR] * 15] * 50
    one, two = timed(lines, 1), timed(lines, 2)
    assert one.matrix_share == pytest.approx(0.5, abs=0.01) and two.matrix_share > 0.95
    assert two.cycles == pytest.approx(one.cycles / 2, rel=0.05)


def test_units_that_are_busy_all_the_time_bound_the_rate():
    assert timed([EXPONENTIAL] * 100, 2).cycles == 1600  # a quarter of the vector rate
    assert timed([VECTOR] * 100, 4).vector_share == 1.0
    reads = [READ] * 100 + [wait(lgkm=0)]
    assert timed(reads, 4, lds_latency=0).cycles == pytest.approx(100 * 16 * 64 / 32, rel=0.01)  # a quarter of 128 bytes per cycle


def test_a_load_takes_its_latency_where_it_is_waited_for():
    hidden = timed([LOAD, *[VECTOR] * 200, wait(vm=0)], 1, memory_latency=500)
    assert hidden.cycles == 4 + 200 * 4 + 4
    assert timed([LOAD, wait(vm=0)], 1, memory_latency=500).cycles == 64 + 500
    assert timed([LOAD, LOAD, wait(vm=1), VECTOR, wait(vm=0)], 1, memory_latency=500).cycles == 2 * 64 + 500
