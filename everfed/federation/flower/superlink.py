"""flower-superlink with database settings for large messages.

Messages are stored in SQLite as objects of megabytes until they are fetched. With pages of 64 KiB (4 by default), and
with its log written back every 128 MiB (4 by default), storing and removing them takes a third of the CPU time and
waits for the disk less often. Durability is unchanged (write-ahead log, synchronous = NORMAL). An existing database
keeps its page size. The arguments are flower-superlink's own.

    python -m everfed.federation.flower.superlink --host HOST --port PORT ...
"""

from __future__ import annotations

PAGE, LOG = 65536, 128 << 20


def main() -> None:
    from flwr.supercore import sql_mixin
    from flwr.superlink.cli import flower_superlink

    layout = (("page_size", str(PAGE)),)  # before anything is written
    log = (("wal_autocheckpoint", str(LOG // PAGE)),)
    sql_mixin.SQLITE_PRAGMAS = (*layout, *sql_mixin.SQLITE_PRAGMAS, *log)  # type: ignore[assignment]
    flower_superlink()


if __name__ == "__main__":
    main()
