"""What the hash kernels of :mod:`benchmarks.hfuse.workloads` must give: hashlib, and pure Python where it has none.

They follow the published definitions and share nothing with the kernels: messages are bytes, rounds are loops over
tables that are calculated where the definition allows it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["DIGESTS", "blake256", "ethash", "keccak", "searched"]

_M32, _M64 = 2**32 - 1, 2**64 - 1

# The first 16 words of pi's fraction, and the permutations of the BLAKE submission.
_PI = struct.unpack(
    ">16I",
    bytes.fromhex(
        "243F6A8885A308D313198A2E03707344A4093822299F31D0082EFA98EC4E6C89"
        "452821E638D01377BE5466CF34E90C6CC0AC29B7C97C50DD3F84D5B5B5470917"
    ),
)
_ORDERS = tuple(
    tuple(int(digit, 16) for digit in row)
    for row in (
        *("0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d"),
        *("2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0"),
    )
)


def _turned(word: int, count: int) -> int:
    """A word of 32 bits rotated to the right."""
    return (word >> count | word << 32 - count) & _M32


def blake256(message: bytes) -> bytes:
    """BLAKE-256 of 14 rounds without salt."""
    bits = 8 * len(message)
    padded = message + b"\x80" + bytes((54 - len(message)) % 64) + b"\x01" + bits.to_bytes(8, "big")
    if len(message) % 64 == 55:
        padded = message + b"\x81" + bits.to_bytes(8, "big")
    # The initial value is that of SHA-256: the fractions of the square roots of the first primes.
    chain = list(
        struct.unpack(">8I", bytes.fromhex("6a09e667bb67ae853c6ef372a54ff53a510e527f9b05688c1f83d9ab5be0cd19"))
    )
    for start in range(0, len(padded), 64):
        words = struct.unpack(">16I", padded[start : start + 64])
        # A block that holds no bit of the message has a counter of zero.
        counter = min(bits, 8 * (start + 64)) if 8 * start < bits else 0
        v = [*chain, *_PI[:4], *(_PI[4 + i] ^ (counter >> 32 * (i // 2) & _M32) for i in range(4))]
        for number in range(14):
            order = _ORDERS[number % 10]
            for i in range(8):
                first, second = order[2 * i], order[2 * i + 1]
                a, b, c, d = (4 * row + (i + (row if i >= 4 else 0)) % 4 for row in range(4))
                v[a] = v[a] + v[b] + (words[first] ^ _PI[second]) & _M32
                v[d] = _turned(v[d] ^ v[a], 16)
                v[c] = v[c] + v[d] & _M32
                v[b] = _turned(v[b] ^ v[c], 12)
                v[a] = v[a] + v[b] + (words[second] ^ _PI[first]) & _M32
                v[d] = _turned(v[d] ^ v[a], 8)
                v[c] = v[c] + v[d] & _M32
                v[b] = _turned(v[b] ^ v[c], 7)
        chain = [chain[i] ^ v[i] ^ v[i + 8] for i in range(8)]
    return struct.pack(">8I", *chain)


def _round_constants() -> list[int]:
    """Keccak's, from its shift register of 8 bits."""
    constants, register = [], 1
    for _ in range(24):
        constant = 0
        for j in range(7):
            if register & 1:
                constant |= 1 << 2**j - 1
            register = register << 1 ^ (0x171 if register & 0x80 else 0)
        constants.append(constant)
    return constants


_CONSTANTS = _round_constants()


def _permuted(lanes: list[list[int]]) -> list[list[int]]:
    """Keccak-f[1600] of lanes[x][y]."""

    def rotated(word: int, count: int) -> int:
        count %= 64
        return (word << count | word >> 64 - count) & _M64

    for constant in _CONSTANTS:
        parity = [lanes[x][0] ^ lanes[x][1] ^ lanes[x][2] ^ lanes[x][3] ^ lanes[x][4] for x in range(5)]
        flips = [parity[(x - 1) % 5] ^ rotated(parity[(x + 1) % 5], 1) for x in range(5)]
        lanes = [[lanes[x][y] ^ flips[x] for y in range(5)] for x in range(5)]
        x, y, carried = 1, 0, lanes[1][0]
        for step in range(24):
            x, y = y, (2 * x + 3 * y) % 5
            carried, lanes[x][y] = lanes[x][y], rotated(carried, (step + 1) * (step + 2) // 2)
        lanes = [
            [lanes[x][y] ^ (~lanes[(x + 1) % 5][y] & lanes[(x + 2) % 5][y] & _M64) for y in range(5)] for x in range(5)
        ]
        lanes[0][0] ^= constant
    return lanes


def keccak(message: bytes, digest_bytes: int, suffix: int = 0x01) -> bytes:
    """Keccak of a capacity of twice the digest.

    Parameters
    ----------
    message : bytes
    digest_bytes : int
    suffix : int
        1 for Keccak as submitted and as Ethereum has it, 6 for SHA-3 (FIPS 202).
    """
    rate = 200 - 2 * digest_bytes
    padded = bytearray(message + bytes(rate - len(message) % rate))
    padded[len(message)] |= suffix
    padded[-1] |= 0x80
    lanes = [[0] * 5 for _ in range(5)]
    for start in range(0, len(padded), rate):
        for i, word in enumerate(struct.unpack(f"<{rate // 8}Q", padded[start : start + rate])):
            lanes[i % 5][i // 5] ^= word
        lanes = _permuted(lanes)
    return b"".join(lanes[i % 5][i // 5].to_bytes(8, "little") for i in range(25))[:digest_bytes]


def ethash(header: bytes, nonce: int, rows: np.ndarray) -> bytes:
    """Ethash's digest over a given data set, `rows` by 32 words."""

    def joined(x: int, y: int) -> int:
        return x * 0x01000193 & _M32 ^ y

    seed = keccak(header + nonce.to_bytes(8, "little"), 64)
    mix = struct.unpack("<16I", seed) * 2
    first = mix[0]
    for i in range(64):
        row = rows[joined(i ^ first, mix[i % 32]) % len(rows)]
        mix = tuple(joined(x, int(y)) for x, y in zip(mix, row))
    words = [joined(joined(joined(*mix[i : i + 2]), mix[i + 2]), mix[i + 3]) for i in range(0, 32, 4)]
    return keccak(seed + struct.pack("<8I", *words), 32)


def _sha256(given: Mapping[str, Any], nonce: int) -> bytes:
    message = given["header"].tobytes()[:76] + (nonce & _M32).to_bytes(4, "little")
    return hashlib.sha256(hashlib.sha256(message).digest()).digest()


def _blake256(given: Mapping[str, Any], nonce: int) -> bytes:
    return blake256(given["header"].tobytes()[:76] + (nonce & _M32).to_bytes(4, "big"))


def _blake2b(given: Mapping[str, Any], nonce: int) -> bytes:
    header = given["header"].tobytes()
    return hashlib.blake2b(header[:32] + nonce.to_bytes(8, "little") + header[40:], digest_size=32).digest()


def _ethash(given: Mapping[str, Any], nonce: int) -> bytes:
    return ethash(given["header"].tobytes(), nonce, given["rows"].reshape(-1, 32))


DIGESTS: dict[str, Callable[[Mapping[str, Any], int], bytes]] = {
    "sha256": _sha256,
    "blake256": _blake256,
    "blake2b": _blake2b,
    "ethash": _ethash,
}
"""The digest of a launch's header with a nonce."""


def searched(kernel: str, given: Mapping[str, Any], nonces: int) -> dict[str, np.ndarray]:
    """What a search must give.

    Parameters
    ----------
    kernel : str
        One of :data:`DIGESTS`.
    given
        The launch's arguments by name.
    nonces : int
        How many the launch tries: all threads of its grid times ``tries``. Nonces of 32 bits begin again at zero.
    """
    start = given["first_nonce"]
    digests = [DIGESTS[kernel](given, nonce) for nonce in range(start, start + nonces)]
    # Bitcoin reads a digest as a little-endian number, the other three read it as a big-endian one.
    leading = [int.from_bytes(d[:-5:-1] if kernel == "sha256" else d[:4], "big") for d in digests]
    best = min(word << 32 | nonce & _M32 for word, nonce in zip(leading, range(start, start + nonces)))
    kept = np.frombuffer(b"".join(digests[: given["kept"]]), given["digests"].dtype)
    return {"best": np.array([best], np.uint64), "digests": kept}
