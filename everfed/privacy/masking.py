"""The cryptography of secure aggregation, in small functions over bytes.

Key agreement, encryption and Shamir's shares are Flower's primitives (`flwr.common.secure_aggregation`). The masks are
not: Flower's generator folds its seed to 32 bits, which a curious server can search through in minutes, so masks here
are a keystream of AES-256 in counter mode under the whole key. Nor is the reconstruction of secrets: theirs is slow.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

from everfed.errors import UserError
from everfed.privacy import shamir

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.ciphers import CipherContext

SEED = 32  # bytes
PUBLIC = 33  # bytes of a compressed point on P-256
_PRIVATE = 32
_BLOCK = 1 << 15  # numbers that are masked at a time: they stay in the processor's cache
Vector = np.ndarray  # uint32 or uint64; sums wrap around


class MissingPackage(UserError):
    """Secure aggregation without the package of its primitives."""


def check_installed() -> None:
    """Refuse to start where the primitives are missing."""
    try:
        import cryptography  # noqa: F401
        import flwr.common.secure_aggregation.crypto.shamir  # noqa: F401
    except ImportError as error:
        raise MissingPackage(
            "privacy.secure_aggregation stands on Flower's primitives; install them with pip install 'everfed[flower]'"
        ) from error


def new_seed() -> bytes:
    return secrets.token_bytes(SEED)


def new_private() -> bytes:
    """A private key, as bytes that can lie in a client's state."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1()).private_numbers().private_value.to_bytes(_PRIVATE, "big")


def public_of(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return _private(private).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def agree(private: bytes, public: bytes) -> bytes:
    """The secret that two key pairs share, the same from either side. Raises ValueError on what is no key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key

    theirs = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), public)
    return generate_shared_key(_private(private), theirs)


def _private(private: bytes) -> ec.EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.derive_private_key(int.from_bytes(private, "big"), ec.SECP256R1())


def encrypt(key: bytes, plain: bytes) -> bytes:
    from flwr.common.secure_aggregation.crypto import symmetric_encryption

    return symmetric_encryption.encrypt(key, plain)


def decrypt(key: bytes, sealed: bytes) -> bytes:
    """Raises ValueError on a letter that was changed on its way or is for another client."""
    from cryptography.fernet import InvalidToken
    from flwr.common.secure_aggregation.crypto import symmetric_encryption

    try:
        return symmetric_encryption.decrypt(key, sealed)
    except InvalidToken as error:
        raise ValueError("a letter that cannot be opened") from error


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """`count` shares: any `threshold` of them give the secret, fewer give nothing."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    return create_shares(secret, threshold, count)


def combine(shares: list[bytes]) -> bytes:
    """Raises ValueError where the shares do not belong together or are too few.

    Equal to Flower's `combine_shares`, which interpolates anew for every 16 bytes: with 50 clients most of the server's
    time. The weights depend only on which clients answered, so they are the same for all secrets of a phase.
    """
    from Crypto.Util.Padding import unpad

    sizes = {len(share) for share in shares}
    if len(sizes) != 1 or (size := sizes.pop()) < 20 or size % 16 != 4:
        raise ValueError("not shares of one secret")
    weights = shamir.weights(tuple(int.from_bytes(share[:4], "little") for share in shares))
    blocks = range(4, size, 16)
    return unpad(b"".join(shamir.at_zero(weights, [share[i : i + 16] for share in shares]) for i in blocks), 16)


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
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"everfed mask " + purpose).derive(secret)
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
