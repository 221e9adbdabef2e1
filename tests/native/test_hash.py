"""BLAKE2b and the page keys against Python's own implementation."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
from strata_native import ffi, lib

SIZES = [*range(0, 20), 63, 64, 65, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 1000, 4096, 65537]


def one_shot(data: bytes, size: int, key: bytes = b"") -> bytes:
    out = ffi.new("uint8_t[]", size)
    assert lib.st_blake2b_hash(out, size, data, len(data), key, len(key)) == 0
    return bytes(ffi.buffer(out))


@pytest.mark.parametrize("size", SIZES)
def test_one_shot_equals_hashlib(size: int) -> None:
    data = random.Random(size).randbytes(size)
    for digest_size, key in [(64, b""), (32, b""), (16, b"k"), (1, b"x" * 64), (33, b"y" * 63)]:
        want = hashlib.blake2b(data, digest_size=digest_size, key=key).digest()
        assert one_shot(data, digest_size, key) == want


def test_every_digest_and_key_length() -> None:
    data = bytes(range(200))
    for length in range(1, 65):
        key = bytes(range(length))
        assert one_shot(data, length) == hashlib.blake2b(data, digest_size=length).digest()
        assert one_shot(data, 64, key) == hashlib.blake2b(data, key=key).digest()
        assert one_shot(b"", 32, key) == hashlib.blake2b(b"", digest_size=32, key=key).digest()


def test_rfc_7693_appendix_a() -> None:
    assert one_shot(b"abc", 64).hex().startswith("ba80a53f981c4d0d6a2797b69f12f6e9")
    assert one_shot(b"abc", 64).hex().endswith("18d38aa8dbf1925ab92386edd4009923")


def test_pieces_of_any_size_give_the_same_digest() -> None:
    rng = random.Random(5)
    for _ in range(200):
        key = rng.randbytes(rng.choice([0, 0, 1, 64]))
        state = ffi.new("st_blake2b *")
        assert lib.st_blake2b_init(state, 32, key, len(key)) == 0
        oracle = hashlib.blake2b(digest_size=32, key=key)
        for _ in range(rng.randrange(6)):
            piece = rng.randbytes(rng.choice([0, 1, 64, 127, 128, 129, 256, 300]))
            lib.st_blake2b_update(state, piece, len(piece))
            oracle.update(piece)
        out = ffi.new("uint8_t[32]")
        lib.st_blake2b_final(state, out)
        assert bytes(ffi.buffer(out)) == oracle.digest()


def test_a_copied_state_goes_its_own_way() -> None:
    state, out = ffi.new("st_blake2b *"), ffi.new("uint8_t[32]")
    lib.st_blake2b_init(state, 32, ffi.NULL, 0)
    lib.st_blake2b_update(state, b"common ", 7)
    fork = ffi.new("st_blake2b *", state[0])
    for one, tail in [(state, b"left"), (fork, b"right")]:
        lib.st_blake2b_update(one, tail, len(tail))
        lib.st_blake2b_final(one, out)
        assert bytes(ffi.buffer(out)) == hashlib.blake2b(b"common " + tail, digest_size=32).digest()


@pytest.mark.parametrize(("digest", "key"), [(0, 0), (65, 0), (2**32, 0), (32, 65)])
def test_lengths_out_of_range_are_refused(digest: int, key: int) -> None:
    assert lib.st_blake2b_init(ffi.new("st_blake2b *"), digest, bytes(65), key) == -1


def page_key(parent: bytes, tokens: list[int]) -> bytes:
    out = ffi.new("uint8_t[32]")
    lib.st_page_key(out, parent, ffi.new("int32_t[]", tokens), len(tokens))
    return bytes(ffi.buffer(out))


@pytest.mark.parametrize("n", [0, 1, 64, 255, 256])
def test_page_key(n: int) -> None:
    rng = random.Random(n)
    parent, tokens = rng.randbytes(32), [rng.randrange(-(2**31), 2**31) for _ in range(n)]
    want = hashlib.blake2b(parent + struct.pack(f"<{n}i", *tokens), digest_size=32).digest()
    assert page_key(parent, tokens) == want


def test_page_key_of_a_negative_count_reads_no_tokens() -> None:
    out = ffi.new("uint8_t[32]")
    lib.st_page_key(out, bytes(32), ffi.NULL, -1)
    assert bytes(ffi.buffer(out)) == page_key(bytes(32), [])


def test_page_keys_depend_on_every_token_and_on_the_parent() -> None:
    tokens = list(range(256))
    keys = {page_key(bytes(32), tokens), page_key(b"\1" + bytes(31), tokens), page_key(bytes(32), tokens[:-1])}
    for i in range(256):
        keys.add(page_key(bytes(32), [*tokens[:i], 9999, *tokens[i + 1 :]]))
    assert len(keys) == 259


@pytest.mark.parametrize("identity", [b"", b"fingerprint=00 arithmetic=1 kv=int8", bytes(300)])
def test_root_key(identity: bytes) -> None:
    out = ffi.new("uint8_t[32]")
    lib.st_root_key(out, identity, len(identity))
    assert bytes(ffi.buffer(out)) == hashlib.blake2b(b"strata page root\0" + identity, digest_size=32).digest()
