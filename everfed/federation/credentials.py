"""A client's long-lived key, and the roster of the other clients' keys, which comes from elsewhere than the server.

Under secure aggregation the server passes clients' keys on to each other. With a roster a client gives shares only to
keys that were signed by a client in it, so that a server can neither invent clients nor replace keys.

A roster is a text file with a line for each client, as `everfed federation keys` writes it to roster.txt:

    site-a ecdsa-sha2-nistp384 AAAA...
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everfed.errors import UserError
from everfed.federation.names import is_name


class RosterError(UserError):
    """A roster that cannot be used."""


@dataclass(frozen=True)
class KeyPair:
    """private: the key of `everfed join --key`; roster: public keys by name, None where no roster was given."""

    name: str
    private: Any
    roster: dict[str, Any] | None = None

    def sign(self, data: bytes) -> bytes:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        found: bytes = self.private.sign(data, ec.ECDSA(hashes.SHA384()))
        return found

    def problem(self, name: str, signature: bytes, data: bytes) -> str:
        """Why this is not the signature of the client `name`; "" if it is, or without a roster."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        if self.roster is None:
            return ""
        if name not in self.roster:
            return f"{name[:64]!r} is not in the roster" if name else "its keys are not signed"
        try:
            self.roster[name].verify(signature, data, ec.ECDSA(hashes.SHA384()))
        except InvalidSignature:
            return f"its keys are not signed by {name}"
        return ""


def read_credentials(name: str, key: Path | None, roster: Path | None) -> KeyPair | None:
    """None without a key. Raises RosterError for a roster that cannot be used, or that has another key for `name`."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    if key is None:
        if roster is not None:
            raise RosterError("--roster needs --key: the other clients check this client's signature, too")
        return None
    private: Any = load_ssh_private_key(key.read_bytes(), None)
    known = None if roster is None else read_roster(roster)
    if known is not None and known.get(name) != private.public_key():
        raise RosterError(f"{roster} does not have the key {key} under the name {name!r}")
    return KeyPair(name, private, known)


def read_roster(path: Path) -> dict[str, Any]:
    """{name: public key}. Raises RosterError with the line that is wrong."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    found: dict[str, Any] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        name, _, text = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        where = f"{path}, line {number}"
        if not is_name(name) or name in found:
            raise RosterError(f"{where}: each line is a name, once, and a public key; {name[:64]!r} is not")
        try:
            key: Any = load_ssh_public_key(text.encode())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise RosterError(f"{where}: not a public key in OpenSSH's format: {error}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise RosterError(f"{where}: a key of everfed federation keys is of type ecdsa-sha2-nistp384")
        found[name] = key
    if not found:
        raise RosterError(f"{path} names no client")
    return found


def fingerprint(path: Path) -> str:
    """Of a roster's content: what clients compare with each other to see that they have the same."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    lines = [
        f"{name} {key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()}"
        for name, key in sorted(read_roster(path).items())
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
