"""Reads the files of TLS and node keys for `everfed serve`, and enrols the keys on a SuperLink."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from everfed.errors import UserError
from everfed.federation.certificates import CA, CLIENTS, SERVER, SERVER_KEY, check_server
from everfed.federation.superlink import Security

if TYPE_CHECKING:
    from everfed.federation.flower.link import Address


def read_security(folder: Path | None) -> Security:
    """The files that `everfed federation keys` wrote. Raises UserError without a folder: security is the default."""
    if folder is None:
        raise UserError("give --certificates DIR (see `everfed federation keys`), or --insecure on this machine alone")
    check_server(folder)
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


def register(address: Address, keys: dict[str, bytes]) -> None:
    """Enrol these keys on the SuperLink; keys that it has already are skipped."""
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    version = RuntimeVersionHttpInterceptor(component_name="flwr CLI")
    with ControlHttpClient.from_server_address(str(address), address.root is None, address.root, [version]) as client:
        for key in keys.values():
            try:
                client.RegisterNode(RegisterNodeRequest(public_key=key))
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (400, 409, 412):
                    raise
