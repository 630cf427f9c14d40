"""The cryptography of secure aggregation, in small functions over bytes, on the package `cryptography`.

Keys are agreed on by Diffie-Hellman on P-256, letters are sealed with AES-256-GCM, masks are a keystream of AES-256 in
counter mode under the whole key. Flower's own mask generator folds its seed to 32 bits, which a curious server can
search through in minutes.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

import numpy as np

from everfed.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.ciphers import CipherContext

SEED = 32  # bytes
PUBLIC = 33  # bytes of a compressed point on P-256
PRIVATE = 32
NONCE, TAG = 12, 16  # bytes that sealing adds to a letter
MAC = 32
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_BLOCK = 1 << 15  # numbers that are masked at a time: they stay in the processor's cache
Vector = np.ndarray  # uint32 or uint64; sums wrap around


class MissingPackage(UserError):
    """Secure aggregation without the package of its primitives."""


def check_installed() -> None:
    """Refuse to start where the primitives are missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            "privacy.secure_aggregation needs the package cryptography; pip install 'everfed[flower]'"
        ) from error


def new_seed() -> bytes:
    return secrets.token_bytes(SEED)


def new_private() -> bytes:
    """A private key, as bytes that can lie in a client's state."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_numbers().private_value.to_bytes(PRIVATE, "big")


def public_of(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return _private(private).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def is_public(key: bytes) -> bool:
    """Is this a point on the curve?"""
    try:
        _public(key)
    except ValueError:
        return False
    return True


def fits(private: bytes, public: bytes) -> bool:
    """Is this the private key of `public`?"""
    return 0 < int.from_bytes(private, "big") < _ORDER and public_of(private) == public


def agree(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """The secret that two key pairs share for one purpose, the same from either side. Raises ValueError on what is no
    key."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return _derived(_private(private).exchange(ec.ECDH(), _public(public)), purpose)


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.derive_private_key(int.from_bytes(private, "big"), ec.SECP256R1())


def _public(key: bytes) -> ec.EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    if len(key) != PUBLIC:
        raise ValueError(f"a key of {len(key)} bytes, not {PUBLIC}")
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"everfed " + purpose).derive(secret)


def encrypt(key: bytes, plain: bytes, about: bytes) -> bytes:
    """A letter that opens only with `key` and the same `about`."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = secrets.token_bytes(NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, about)


def decrypt(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Raises ValueError on a letter that was changed on its way, or is for another client or another occasion."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(sealed[:NONCE], sealed[NONCE:], about)
    except (InvalidTag, ValueError) as error:
        raise ValueError("a letter that cannot be opened") from error


def mac(key: bytes, data: bytes) -> bytes:
    """HMAC-SHA256."""
    return hmac.digest(key, data, "sha256")


def is_mac(claimed: bytes, key: bytes, data: bytes) -> bool:
    return hmac.compare_digest(claimed, mac(key, data))


def add_mask(vector: Vector, secret: bytes, purpose: bytes, minus: bool = False) -> None:
    """Add `mask` to the vector, or subtract it, in place: block by block, so that no whole mask is ever in memory."""
    stream, size = _stream(secret, purpose), vector.dtype.itemsize
    for start in range(0, len(vector), _BLOCK):
        block = vector[start : start + _BLOCK]
        numbers = np.frombuffer(stream.update(bytes(len(block) * size)), dtype=vector.dtype)
        np.subtract(block, numbers, out=block) if minus else np.add(block, numbers, out=block)


def mask(secret: bytes, length: int, dtype: type[np.unsignedinteger], purpose: bytes) -> Vector:
    """`length` pseudo-random numbers, a different stream for each secret and purpose."""
    vector = np.zeros(length, dtype=dtype)
    add_mask(vector, secret, purpose)
    return vector


def _stream(secret: bytes, purpose: bytes) -> CipherContext:
    """The keystream of a secret for one purpose."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = _derived(secret, b"mask " + purpose)
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
