from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from frontier_llm.cluster import slurm
from frontier_llm.errors import FrontierError


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a sinfo whose first two calls do not reach the controller. Return the file that counts the calls."""
    count = tmp_path / "count"
    (tmp_path / "sinfo").write_text(
        f"""#!/bin/bash
echo >> {count}
if [[ $(wc -l < {count}) -lt 3 ]]; then
    echo "slurm_load_partitions: Unable to contact slurm controller (connect failure)" >&2
    exit 1
fi
echo "n0|idle"; echo "n1|down*"
"""
    )
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(slurm, "PAUSE_S", 0.01)
    return count


def test_a_supervisor_waits_for_a_controller_that_is_away(sinfo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.unhealthy(["n0", "n1"]) == ["n1"]
    assert len(sinfo.read_text()) == 3
    assert capsys.readouterr().err.count("does not respond to sinfo") == 1


def test_no_second_job_is_queued_after_a_lost_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sbatch does not reach the controller. The second queues job 8, but its reply is lost."""
    (tmp_path / "sbatch").write_text(
        f"""#!/bin/bash
echo "$PLACE" >> {tmp_path}/calls
[[ $(wc -l < {tmp_path}/calls) -lt 2 ]] || echo "8|/run/job.sbatch" >> {tmp_path}/queue
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""
    )
    (tmp_path / "squeue").write_text(f"#!/bin/bash\ncat {tmp_path}/queue\n")
    (tmp_path / "queue").write_text("7|/run/job.sbatch\n6|/other/job.sbatch\n")
    for name in ("sbatch", "squeue"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(slurm, "PAUSE_S", 0.01)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PLACE": "next"}
    assert slurm.queue(["sbatch", "/run/job.sbatch"], env, patience_s=60.0) == "8"
    assert (tmp_path / "calls").read_text() == "next\nnext\n"
    with pytest.raises(slurm.ControllerAway, match="Socket timed out"):
        slurm.queue(["sbatch", "/run/job.sbatch"], env)  # a person's command is not repeated


def test_nodes_that_fail_or_leave_the_job_are_not_those_that_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """n4 failed and came back: sinfo reports it as idle, but Slurm has removed it from the job."""
    states = ("allocated", "draining", "draining*", "down", "idle", "drained", "mixed")
    answers = {
        "sinfo": "".join(f"n{number}|{state}\n" for number, state in enumerate(states)),
        "squeue": "n[0-3,5-6]\n",
    }
    monkeypatch.setattr(slurm, "ask", lambda command: answers[command[0]])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    nodes = [f"n{number}" for number in range(len(states))]
    assert slurm.node_health(nodes) == slurm.NodeHealth(failed=("n2", "n3", "n4", "n5"), draining=("n1",))
    assert slurm.unhealthy(nodes) == ["n1", "n2", "n3", "n4", "n5"]


def test_a_person_is_told_at_once(sinfo: Path) -> None:
    with pytest.raises(FrontierError, match="Unable to contact"):
        slurm.call(["sinfo"])
    with pytest.raises(FrontierError, match="Unable to contact"):
        slurm.ask(["sinfo"], patience_s=0)
    assert len(sinfo.read_text()) == 2


def test_node_hours_of_slurms_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sacct prints one line per start of a requeued job. Without accounting the node-hours are unknown."""
    script = tmp_path / "sacct"
    script.write_text(
        '#!/bin/bash\n[[ "$*" == *--jobs=7,8* ]] || exit 3\necho "7|17|3600"; echo "7|17|1800"; echo "8||"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.billed_node_hours(["7", "8", "7"]) == {"7": 25.5}
    assert slurm.billed_node_hours([]) == {}
    script.write_text('#!/bin/bash\necho "Slurm accounting storage is disabled" >&2\nexit 1\n')
    assert slurm.billed_node_hours(["7"]) == {}


def test_the_next_maintenance_is_read_from_the_reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.fromisoformat("2026-11-20T08:00:00").timestamp()
    lines = [
        "ReservationName=past StartTime=2026-11-01T08:00:00 EndTime=2026-11-01T20:00:00 Flags=MAINT,SPEC_NODES",
        "ReservationName=course StartTime=2026-11-21T08:00:00 EndTime=2026-11-21T20:00:00 Flags=SPEC_NODES",
        "ReservationName=next StartTime=2026-11-24T08:00:00 EndTime=2026-11-24T20:00:00 Flags=MAINT,ALL_NODES",
        "ReservationName=later StartTime=2026-12-24T08:00:00 EndTime=2026-12-24T20:00:00 Flags=MAINT",
        "ReservationName=odd StartTime=Unknown Flags=MAINT",
    ]
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def executable(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / name).chmod(0o755)

    executable("scontrol", "\n".join(lines))
    executable("sinfo", "n1\nn2\nn3\nn3")  # n3 has two partitions
    assert slurm.next_maintenance(now, 2, "batch") == slurm.Maintenance("next", now + 4 * 86400)
    day = "StartTime=2026-11-21T08:00:00 EndTime=2026-11-21T20:00:00"
    part = f"ReservationName=part {day} Nodes=n[1,9] Flags=MAINT,SPEC_NODES"
    executable("scontrol", "\n".join([*lines, part]))
    assert slurm.next_maintenance(now, 2, "batch") == slurm.Maintenance("next", now + 4 * 86400)
    assert slurm.next_maintenance(now, 3, "batch") == slurm.Maintenance("part", now + 1 * 86400)
    other_part = f"ReservationName=other_part {day} Nodes=n[2] Flags=MAINT,SPEC_NODES"
    executable("scontrol", "\n".join([*lines, part, other_part]))  # together they leave one node
    assert slurm.next_maintenance(now, 2, "batch") == slurm.Maintenance("part", now + 1 * 86400)
    assert slurm.next_maintenance(now, 1, "batch") == slurm.Maintenance("next", now + 4 * 86400)
    executable("scontrol", "No reservations in the system")
    assert slurm.next_maintenance(now, 2, "batch") is None
