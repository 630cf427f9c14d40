"""Creates and checks the files of TLS and node authentication: an authority, the server's certificate, client keys.

    pki/ca.crt            for every client: verifies the server's certificate
    pki/ca.key            signs certificates; keep it away from the server
    pki/server.crt .key   the server's, for TLS
    pki/clients/NAME.pub  public keys of the clients that may take part
    pki/secrets/NAME      a client's private key, to be moved to the client
    pki/roster.txt        the clients' public keys in one file, for the clients

Private keys are readable by their owner only, and nothing is overwritten.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from everfed.errors import UserError
from everfed.federation.names import check_name
from everfed.store.files import write_atomic

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"
CLIENTS, SECRETS, ROSTER = "clients", "secrets", "roster.txt"
_SKEW = datetime.timedelta(hours=1)  # certificates are valid from an hour earlier, for clocks that are slow


class CertificateError(UserError):
    """Files of TLS or of keys that are missing, exist already, or are not valid."""


def require() -> None:
    """Raises CertificateError if the package cryptography is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise CertificateError(
            "keys are made with cryptography; install it with pip install 'everfed[flower]'"
        ) from error


def make_authority(folder: Path, name: str = "everfed") -> None:
    """ca.crt and ca.key: an authority for this federation alone, valid for ten years."""
    from cryptography import x509

    key = _new_key("p256")
    subject = _subject(f"{check_name('the federation', name)} authority")
    limits = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(subject, subject, key.public_key(), days=3650).add_extension(limits, critical=True)
    _write_secret(folder / CA_KEY, _pem(key))
    _write(folder / CA, _signed(builder.add_extension(_usage(signs=True), critical=True), key))


def make_server(folder: Path, hosts: Sequence[str], days: int = 365, now: datetime.datetime | None = None) -> None:
    """server.crt and server.key for the names and addresses by which clients reach the server, and for loopback, where
    the proxy reaches the SuperLink. now: the beginning of its validity."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    authority = _certificate(folder / CA)
    signer = load_pem_private_key(_read(folder / CA_KEY), None)
    key = _new_key("p256")
    names = [_general_name(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"])]
    builder = _builder(_subject((list(hosts) or ["localhost"])[0][:64]), authority.subject, key.public_key(), days, now)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    _write_secret(folder / SERVER_KEY, _pem(key))
    _write(folder / SERVER, _signed(builder, signer))  # type: ignore[arg-type]


def make_client(folder: Path, name: str) -> Path:
    """clients/NAME.pub and secrets/NAME, in OpenSSH's format, which Flower reads; returns the private one."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    check_name("the client", name)
    key = _new_key("p384")
    secret, public = folder / SECRETS / name, folder / CLIENTS / f"{name}.pub"
    _absent(public)
    _write_secret(secret, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(public, line + f" {name}\n".encode())
    write_roster(folder)
    return secret


def write_roster(folder: Path) -> None:
    """roster.txt: the public keys of all clients in one file, for `everfed join --roster`."""
    keys = {path.stem: path.read_text().split() for path in sorted((folder / CLIENTS).glob("*.pub"))}
    text = "".join(f"{name} {' '.join(words[:2])}\n" for name, words in keys.items())
    write_atomic(folder / ROSTER, text.encode(), shared=True)


def revoke(folder: Path, name: str) -> None:
    """Remove a client's public key, so that it may no longer take part, and its private one if it still lies here."""
    public = folder / CLIENTS / f"{check_name('the client', name)}.pub"
    if not public.exists():
        known = ", ".join(sorted(path.stem for path in (folder / CLIENTS).glob("*.pub"))) or "none"
        raise CertificateError(f"{public} does not exist; enrolled in {folder}: {known}")
    public.unlink()
    (folder / SECRETS / name).unlink(missing_ok=True)
    write_roster(folder)


def withdraw_server(folder: Path) -> None:
    """Remove the server's certificate and key, to make room for new ones."""
    for name in (SERVER, SERVER_KEY):
        (folder / name).unlink(missing_ok=True)


def check_server(folder: Path, now: datetime.datetime | None = None) -> list[str]:
    """Raises CertificateError for server files that clients would refuse: missing, not signed by ca.crt, not yet valid,
    expired, or with a key that others can read. Returns warnings, such as an expiry within thirty days."""
    now = now or datetime.datetime.now(datetime.UTC)
    authority, server = _certificate(folder / CA), _certificate(folder / SERVER)
    try:
        server.verify_directly_issued_by(authority)
    except Exception as error:  # the library raises several kinds; all mean the same here
        raise CertificateError(f"{folder / SERVER} is not signed by {folder / CA}") from error
    warnings = []
    for path, certificate in ((folder / CA, authority), (folder / SERVER, server)):
        if now < certificate.not_valid_before_utc:
            raise CertificateError(
                f"{path} is valid from {certificate.not_valid_before_utc:%Y-%m-%d}; is the clock right?"
            )
        left = certificate.not_valid_after_utc - now
        if left <= datetime.timedelta():
            ended = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
            raise CertificateError(f"{path} expired on {ended}; make a new one with `everfed federation keys`")
        if left < datetime.timedelta(days=30):
            warnings.append(f"{path} expires in {left.days} days")
    require_private(folder / SERVER_KEY)
    return warnings


def require_private(path: Path) -> None:
    """Raises CertificateError for a private key that others can read."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise CertificateError(f"{path} can be read by others; chmod 600 it, or make a new key if they may have")


def misplaced(folder: Path) -> list[str]:
    """Warnings about keys that do not belong on a server."""
    found = []
    if (folder / CA_KEY).exists():
        found.append(f"{folder / CA_KEY} signs certificates that every client accepts; move it away from the server")
    secrets = sorted(path.name for path in (folder / SECRETS).glob("*"))
    if secrets:
        found.append(
            f"{folder / SECRETS} holds the private keys of {', '.join(secrets)}; move each to its client and delete it"
        )
    return found


# files and keys ------------------------------------------------------------------------------------------------------
def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error


def _absent(path: Path) -> None:
    if path.exists():
        raise CertificateError(f"{path} exists; nothing is overwritten: remove it first to replace it")


def _write(path: Path, data: bytes) -> None:
    _absent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _write_secret(path: Path, data: bytes) -> None:
    """Created with mode 600, before anything is written to it."""
    _absent(path)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def _certificate(path: Path) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(_read(path))
    except ValueError as error:
        raise CertificateError(f"{path} is not a certificate in PEM format: {error}") from error


def _new_key(curve: str) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1() if curve == "p256" else ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _subject(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    now: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    from cryptography import x509

    if not 0 < days <= 36500:
        raise CertificateError(f"--days must be 1 to 36500; got {days}")
    now = now or datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - _SKEW)
    return builder.not_valid_after(now + datetime.timedelta(days=days))


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _usage(signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(part and part.isascii() and part.replace("-", "").isalnum() for part in labels):
        raise CertificateError(f"--host {host[:80]!r} is neither a host name nor an address")
    return x509.DNSName(host)
