"""Philox4x32-10: the published known answers, a plain second implementation, and how sampling uses the counter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata_native import ffi, lib

WORD = 0xFFFFFFFF
u32 = st.integers(0, WORD)


def philox(counter: list[int], key: list[int]) -> list[int]:
    out = ffi.new("uint32_t[4]")
    lib.st_philox_block(ffi.new("uint32_t[4]", counter), ffi.new("uint32_t[2]", key), out)
    return list(out)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's figure: ten rounds of two multiplications, crossing halves, with a Weyl sequence as key."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & WORD, (a >> 32) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


# The known-answer file of the authors' library (philox4x32, 10 rounds).
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert philox(counter, key) == answer


@given(st.lists(u32, min_size=4, max_size=4), st.lists(u32, min_size=2, max_size=2))
def test_equals_the_plain_form(counter: list[int], key: list[int]) -> None:
    assert philox(counter, key) == plain_philox(counter, key)


@pytest.fixture(scope="module")
def sampler() -> Any:
    out = ffi.new("st_sampler **")
    assert lib.st_sampler_new(256, out, ffi.NULL) == 0
    yield out[0]
    lib.st_sampler_free(out[0])


@settings(deadline=None)
@given(seed=st.integers(-(2**63), 2**64 - 1), position=u32, choice=u32)
def test_the_draw_is_word_0_of_seed_position_and_choice(sampler: Any, seed: int, position: int, choice: int) -> None:
    """Over 256 equal logits the drawn id is the top byte of the random word: negative seeds count mod 2^64."""
    seed %= 2**64
    sp = ffi.new("st_sampling *")
    lib.st_sampling_init(sp)
    sp.temperature, sp.seed, sp.choice = 1.0, seed, choice
    token = ffi.new("int32_t *")
    logits = ffi.new("float[256]")
    assert lib.st_sample(sampler, logits, sp, ffi.NULL, position, token, ffi.NULL) == 0
    assert token[0] == plain_philox([position, 0, choice, 0], [seed & WORD, seed >> 32])[0] >> 24
