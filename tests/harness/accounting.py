"""Starts Slurm's accounting on this machine: slurmdbd, with its database in MariaDB, for a `LocalSlurm`.

Both listen on loopback and store everything in a temporary folder. Debian 12: `apt-get install slurmdbd
mariadb-server-core mariadb-client-core`. The daemons need root.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.harness.slurm import LocalSlurm, find_program, free_ports
from tests.harness.system import missing

PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd")
PACKAGES = "slurmdbd mariadb-server-core mariadb-client-core"


@contextlib.contextmanager
def accounting() -> Iterator[tuple[str, ...]]:
    """Start the database and slurmdbd. Yield the lines of slurm.conf that use them. Skips the test without them."""
    paths = {name: find_program(name) for name in PROGRAMS}
    if None in paths.values():
        missing(f"needs Slurm's accounting: apt-get install {PACKAGES}")
    database_port, slurmdbd_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="fl-accounting-") as folder:
        root = Path(folder)
        data = f"--datadir={root}/data"
        install = [str(paths["mariadb-install-db"]), "--no-defaults", "--user=root", "--skip-test-db", data]
        subprocess.run(install, check=True, capture_output=True)
        database = [
            str(paths["mariadbd"]),
            "--no-defaults",
            "--user=root",
            data,
            f"--socket={root}/socket",
            "--bind-address=127.0.0.1",
            f"--port={database_port}",
            "--skip-grant-tables",
        ]
        configuration = root / "slurmdbd.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            "\n".join(
                [
                    "DbdHost=localhost",
                    "DbdAddr=127.0.0.1",
                    f"DbdPort={slurmdbd_port}",
                    "AuthType=auth/none",
                    "SlurmUser=root",
                    "StorageType=accounting_storage/mysql",
                    "StorageHost=127.0.0.1",
                    f"StoragePort={database_port}",
                    "StorageUser=root",
                    f"PidFile={root}/slurmdbd.pid",
                ]
            )
            + "\n",
            encoding="utf-8",
        )
        slurmdbd = [str(paths["slurmdbd"]), "-D"]
        log = (root / "log").open("wb")
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            daemons.append(subprocess.Popen(database, stdout=log, stderr=log))
            LocalSlurm.wait_for((root / "socket").exists, 120, f"database: {(root / 'log').read_text()}")
            variables = {"SLURM_CONF": str(root / "slurm.conf"), "PATH": "/usr/bin:/bin"}
            daemons.append(subprocess.Popen(slurmdbd, stdout=log, stderr=log, env=variables))
            # slurmctld ends if it cannot reach slurmdbd, and slurmdbd makes its tables before it listens
            LocalSlurm.wait_for(lambda: listens(slurmdbd_port), 120, f"slurmdbd: {(root / 'log').read_text()}")
            yield (
                "AccountingStorageType=accounting_storage/slurmdbd",
                "AccountingStorageHost=127.0.0.1",
                f"AccountingStoragePort={slurmdbd_port}",
                "JobAcctGatherType=jobacct_gather/none",
            )
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait(30)
            log.close()


def listens(port: int) -> bool:
    """Return whether a process accepts connections to this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
