"""Reads the files of TLS and node keys for `everfed serve`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everfed.errors import UserError
from everfed.federation.certificates import CA, CLIENTS, SERVER, SERVER_KEY, check_server, misplaced
from everfed.federation.superlink import Security


def read_security(folder: Path | None, warn: Callable[[str], None] = lambda text: None) -> Security:
    """The files that `everfed federation keys` wrote. Raises UserError without a folder: security is the default.
    warn: called with what is wrong but no reason to refuse."""
    if folder is None:
        raise UserError("give --certificates DIR (see `everfed federation keys`), or --insecure on this machine alone")
    for warning in (*check_server(folder), *misplaced(folder)):
        warn(warning)
    if not enrolled(folder):
        raise UserError(f"--certificates {folder}: there is no {CLIENTS}/NAME.pub in it, so no client could join")
    return Security(folder / CA, folder / SERVER, folder / SERVER_KEY)


def enrolled(folder: Path) -> dict[str, bytes]:
    """{name: public key} of the clients that may take part; in PEM, as Flower expects."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    found = {}
    for path in sorted((folder / CLIENTS).glob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path} is not a public key in OpenSSH's format: {error}") from error
        found[path.stem] = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found
