"""A PostgreSQL server for tests and for what measures the archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from warpsmith.errors import BadInput

SERVER = "postgres"
"""PostgreSQL refuses to serve as root; Debian's package brings this user."""


class PostgreSql:
    """A server on a socket in a directory of its own; nothing listens on a network.

    Raises:
        BadInput: PostgreSQL is not installed.
    """

    def __init__(self) -> None:
        found = shutil.which("pg_ctl") or next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))), None)
        if found is None:
            raise BadInput("PostgreSQL is missing: make system-deps (as root; on Debian: apt-get install postgresql)")
        self._programs = Path(found).parent
        self._user = SERVER if os.geteuid() == 0 else None
        self._place = Path(tempfile.mkdtemp(prefix="warpsmith-postgres-", dir="/tmp"))
        if self._user:
            shutil.chown(self._place, self._user)
        self._run("initdb", "--pgdata=data", "--username=warpsmith", "--auth=trust", "--no-sync")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            cwd=self._place,
            user=self._user,
            check=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def start(self) -> None:
        """Serves; returns when connections are taken."""
        options = f"-c listen_addresses='' -c unix_socket_directories={self._place}"
        self._run("pg_ctl", "start", "--pgdata=data", "--wait", "--log=log", f"--options={options}")

    def stop(self) -> None:
        """Cuts all connections and ends."""
        self._run("pg_ctl", "stop", "--pgdata=data", "--wait", "--mode=fast")

    def close(self) -> None:
        """Stops, and leaves nothing."""
        self.stop()
        shutil.rmtree(self._place)

    def url(self, database: str) -> str:
        """Of a database of that name, made afresh."""
        import psycopg  # an extra, which a GPU machine may lack

        with psycopg.connect(host=str(self._place), user="warpsmith", dbname="postgres", autocommit=True) as connection:
            connection.execute(f"drop database if exists {database} with (force)".encode())
            connection.execute(f"create database {database}".encode())
        return f"postgresql://warpsmith@/{database}?host={self._place}"
