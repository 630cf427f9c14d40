"""Notices that a client's state folder was removed while the client runs."""

from __future__ import annotations

from pathlib import Path

from everfed.errors import UserError


class StateLost(UserError):
    """The state folder, or what lies in it, is gone."""


class FolderWatch:
    """files: names in the folder; each must stay from the first time that it is seen there."""

    def __init__(self, folder: Path, *files: str) -> None:
        self.folder, self.files = folder, files
        self._first = self._identities()

    def check(self) -> None:
        """Raises StateLost."""
        now = self._identities()
        for name, identity in self._first.items():
            if now.get(name) != identity:
                what = self.folder / name if name else self.folder
                raise StateLost(f"{what} was removed or replaced while this client was running: its state is lost")
        self._first = {**now, **self._first}

    def _identities(self) -> dict[str, tuple[int, int]]:
        """Device and inode of what is there; "" stands for the folder itself."""
        found = {}
        for name in ("", *self.files):
            try:
                status = (self.folder / name).stat()
            except OSError:
                continue
            found[name] = (status.st_dev, status.st_ino)
        return found
