"""The `Cached` payloads that a client received, on its disk: the newest of each kind, named by its content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everfed.federation.codec import payload_value
from everfed.federation.packet import PacketError, digest
from everfed.store.files import make_folder, remove_temporaries, write_atomic


class PayloadCache:
    """One file per kind (part and key), `<kind>.<name>`. A damaged file counts as missing and is sent again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder)
        remove_temporaries(folder)
        self._values: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # kind -> name
        for path in folder.iterdir():
            kind, _, name = path.name.partition(".")
            self._names[kind] = name

    def names(self) -> list[str]:
        """The names of all payloads."""
        return sorted(set(self._names.values()))

    def put(self, part: str, key: str, name: str, data: bytes) -> None:
        """Store a payload in place of the last one of its kind. Raises PacketError when the name is not its digest."""
        if digest(data) != name:
            raise PacketError(f"the payload {part}/{key} was damaged on its way")
        kind = _kind(part, key)
        self._values[name] = payload_value(data)
        write_atomic(self.folder / f"{kind}.{name}", data, durable=False)  # a damaged file is sent again
        if self._names.get(kind, name) != name:
            self._drop(kind)
        self._names[kind] = name

    def newest(self, part: str, key: str) -> Any:
        """The value of this kind that was received last, or None."""
        name = self._names.get(_kind(part, key))
        return self.get(name) if name is not None and self.has(name) else None

    def has(self, name: str) -> bool:
        """Is the payload here and undamaged? It is read on first use."""
        for kind in [kind for kind, held in self._names.items() if held == name]:
            if name not in self._values:
                data = (self.folder / f"{kind}.{name}").read_bytes()
                if digest(data) != name:
                    self._drop(kind)
                    continue
                self._values[name] = payload_value(data)
            return True
        return False

    def get(self, name: str) -> Any:
        """The value of a payload; KeyError if it is not here."""
        if not self.has(name):
            raise KeyError(name)
        return self._values[name]

    def _drop(self, kind: str) -> None:
        name = self._names.pop(kind)
        (self.folder / f"{kind}.{name}").unlink(missing_ok=True)
        if name not in self._names.values():
            self._values.pop(name, None)


def _kind(part: str, key: str) -> str:
    return digest(f"{part}/{key}".encode())[:12]
