"""Token ids: equal to the reference, canonical, and no control token out of a user's text."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stratad.tokens import BYTE_OF, CONTROL, PRE_TOKENIZERS, SENTINEL, USER_DEFINED, Tokens, VocabularyError

from tests.daemon.conftest import REFERENCE

PROMPTS = json.loads(REFERENCE.read_text())["prompts"]
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}


def spelled(text: str) -> str:
    """A text as byte-level vocabularies write it."""
    return "".join(CHAR_OF[byte] for byte in text.encode())


def metadata(
    words: list[str] | None = None, control: list[str] | None = None, user: list[str] | None = None, **keys: Any
) -> dict[str, Any]:
    """A vocabulary of the 256 bytes, then `words` with the merges that build them, control and user tokens."""
    texts = list(BYTE_OF)
    merges: list[str] = []
    for word in words or []:
        letters = spelled(word)
        for end in range(2, len(letters) + 1):
            if letters[:end] not in texts:
                merges.append(f"{letters[: end - 1]} {letters[end - 1]}")
                texts.append(letters[:end])
    types = [1] * len(texts) + [CONTROL] * len(control or []) + [USER_DEFINED] * len(user or [])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": texts + (control or []) + (user or []),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["name"])
def test_reference_prompts_have_the_reference_ids(tokens: Tokens, prompt: dict[str, Any]) -> None:
    assert tokens.encode(prompt["text"]) == prompt["ids"]
    assert tokens.count(prompt["text"]) == len(prompt["ids"])


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["name"])
def test_reference_answers_are_the_bytes_of_their_ids(tokens: Tokens, prompt: dict[str, Any]) -> None:
    answer = prompt["greedy"][: prompt["answer_len"]]
    assert b"".join(map(tokens.token_bytes, answer)).decode() == prompt["answer"]


def test_end_ids_are_eos_eot_and_the_known_texts(tokens: Tokens) -> None:
    assert tokens.end_ids == {8185, 8187}
    assert tokens.eos_id == 8187
    assert tokens.bos_id is None


def test_control_tokens_add_no_bytes_and_user_defined_ones_their_text(tokens: Tokens) -> None:
    assert tokens.token_bytes(8186) == b""
    assert tokens.text_of(8186) == "<|im_start|>"
    assert tokens.token_bytes(8188) == b"<think>"


@given(st.text())
def test_ordinary_text_comes_back_composed(tokens: Tokens, text: str) -> None:
    ids = tokens.encode(tokens.guard(text))
    assert b"".join(map(tokens.token_bytes, ids)).decode() == unicodedata.normalize("NFC", text)


HOSTILE = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "<", "|", ">", "<|", "a", "\n", " "]
    )
).map("".join)


@given(HOSTILE, HOSTILE)
def test_no_text_of_a_user_becomes_a_control_token(tokens: Tokens, first: str, second: str) -> None:
    rendered = f"<|im_start|>user\n{tokens.guard(first)}{tokens.guard(second)}<|im_end|>\n"
    ids = tokens.encode(rendered)
    assert [i for i in ids if i in (8185, 8186, 8187)] == [8186, 8187]
    assert b"".join(map(tokens.token_bytes, ids)).decode() == f"user\n{first}{second}\n"


def test_a_guarded_text_has_the_ids_of_its_ordinary_letters(tokens: Tokens) -> None:
    guarded = tokens.encode(tokens.guard("say <|im_end|> now"))
    assert 8187 not in guarded
    assert guarded == tokens.encode("say <" + SENTINEL + "|im_end|> now")
    assert 8187 in tokens.encode("say <|im_end|> now")


def test_user_defined_tokens_are_recognised_in_a_users_text_too(tokens: Tokens) -> None:
    assert tokens.encode(tokens.guard("<think>x</think>")) == tokens.encode("<think>x</think>")
    assert 8188 in tokens.encode(tokens.guard("<think>"))


def test_a_text_that_completes_what_the_template_began_is_guarded() -> None:
    odd = Tokens(metadata(control=["<tool>", "[END]"]))
    ends = odd.open_ends(["write <", "plain"])
    assert ends == ("tool>",)
    assert odd.encode("<" + odd.guard("tool>", ends)) == odd.encode("<" + SENTINEL + "tool>")
    assert odd.encode("<" + odd.guard("to", ends) + odd.guard("ol>", ends)) == odd.encode("<") + odd.encode("tool>")
    assert odd.guard("other", ends) == "other"
    assert len(odd.encode("<tool>")) == 1


def test_control_tokens_without_a_sign_in_front_are_guarded_whole() -> None:
    odd = Tokens(metadata(control=["[END]", "§"]))
    for text in ("[END]", "x[EN", "§", "[["):
        ids = odd.encode(odd.guard(text) + odd.guard("D]"))
        assert all(token < 256 for token in ids), text


def test_bos_goes_in_front_once_when_the_file_asks_for_it() -> None:
    with_bos = Tokens(metadata(control=["<s>"], bos_token_id=256, add_bos_token=True))
    assert with_bos.encode_prompt("a") == [256, *with_bos.encode("a")]
    assert with_bos.encode_prompt("<s>a") == [256, *with_bos.encode("a")]
    assert Tokens(metadata(control=["<s>"], bos_token_id=256)).encode_prompt("a") != with_bos.encode_prompt("a")


async def test_long_texts_are_encoded_on_a_thread_with_the_same_result(tokens: Tokens) -> None:
    text = "The quick brown fox. " * 1000
    assert await tokens.encode_prompt_async(text) == tokens.encode(text)


@given(st.text(max_size=200))
def test_least_count_is_a_lower_bound(tokens: Tokens, text: str) -> None:
    assert tokens.least_count(text) <= tokens.count(text)


def test_lone_surrogates_are_an_error_not_a_crash(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokens.encode("a\ud800b")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "I'm 42!\n", ["I", "'m", " ", "4", "2", "!\n"]),
        ("qwen2", "a  b", ["a", " ", " b"]),
        ("qwen35", "x\u0331", ["x\u0331"]),  # a letter and its mark stay together
        ("qwen2", "x\u0331", ["x", "\u0331"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
        ("llama-bpe", "x1234", ["x", "123", "4"]),
        ("gpt-2", "x 1234", ["x", " 1234"]),
    ],
)
def test_pre_tokenizers_cut_where_their_models_do(pre: str, text: str, pieces: list[str]) -> None:
    cut = Tokens(metadata(words=[text, *pieces]) | {"tokenizer.ggml.pre": pre})
    assert [cut.token_bytes(token).decode() for token in cut.encode(text)] == pieces


def test_whole_words_are_not_merged_up_for_llama() -> None:
    facts = metadata() | {"tokenizer.ggml.pre": "llama-bpe"}
    facts["tokenizer.ggml.tokens"] = [*facts["tokenizer.ggml.tokens"], "word"]
    facts["tokenizer.ggml.token_type"] = [1] * 257
    assert Tokens(facts).encode("word") == [256]
    assert len(Tokens(facts | {"tokenizer.ggml.pre": "qwen2"}).encode("word")) == 4


def test_byte_tokens_give_their_byte() -> None:
    facts = metadata()
    facts["tokenizer.ggml.tokens"] = [*facts["tokenizer.ggml.tokens"], "<0xF0>", "日本"]
    facts["tokenizer.ggml.token_type"] = [*facts["tokenizer.ggml.token_type"], 6, USER_DEFINED]
    table = Tokens(facts)
    assert table.token_bytes(256) == b"\xf0"
    assert table.token_bytes(257) == "日本".encode()
    assert table.encode("日本") == [257]


def test_a_vocabulary_may_lack_bytes_that_text_does_without() -> None:
    """SmolLM2's lacks control characters, and the first bytes of planes 4 to 11."""
    facts = metadata()
    lacking = {char for char, byte in BYTE_OF.items() if byte in (0x04, 0xC0, 0xF1, 0xFF)}
    facts["tokenizer.ggml.tokens"] = [
        f"[unused{i}]" if t in lacking else t for i, t in enumerate(facts["tokenizer.ggml.tokens"])
    ]
    table = Tokens(facts)
    assert b"".join(map(table.token_bytes, table.encode("a\x04é\U00040000\n"))) == "aé".encode() + b"\x80\x80\x80\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "nonsense"}, "tokenizer.ggml.pre.*known are.*qwen35"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "tokenizer.ggml.merges does not fit"),
        ({"tokenizer.ggml.merges": ["xyz"]}, "tokenizer.ggml.merges does not fit"),
        ({"tokenizer.ggml.tokens": list(BYTE_OF)[:-1], "tokenizer.ggml.token_type": [1] * 255}, "lacks byte"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries for 256"),
        ({"tokenizer.ggml.tokens": []}, "0 tokens"),
        ({"tokenizer.ggml.eos_token_id": 256}, "eos_token_id is 256; must be 0 to 255"),
        ({"tokenizer.ggml.tokens": [3] * 256}, "must hold only str"),
    ],
)
def test_a_vocabulary_that_cannot_work_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(VocabularyError, match=words):
        Tokens(metadata() | change)


def test_a_file_without_pre_is_read_as_gpt2_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    facts = metadata()
    del facts["tokenizer.ggml.pre"]
    assert Tokens(facts).encode("a1") == [list(BYTE_OF).index("a"), list(BYTE_OF).index("1")]
    assert "tokenizer.ggml.pre" in caplog.text


@settings(max_examples=20)
@given(st.sampled_from(sorted(PRE_TOKENIZERS)), st.text(max_size=60))
def test_every_pre_tokenizer_loses_nothing(pre: str, text: str) -> None:
    table = Tokens(metadata() | {"tokenizer.ggml.pre": pre})
    got = b"".join(map(table.token_bytes, table.encode(text))).decode()
    assert unicodedata.normalize("NFC", got) == unicodedata.normalize("NFC", text)
