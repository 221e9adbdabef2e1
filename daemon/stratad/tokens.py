"""Token ids for text, and bytes for token ids, from the vocabulary inside a GGUF file.

Control tokens (`<|im_start|>` and its like) are special only where the chat template wrote them. How that is kept:

1. `Tokens.guard` puts `SENTINEL` behind the first character of every place in a user's text at which the text of a
   control token stands or could be completed by what the template writes next to it. The sentinel is a lone
   surrogate, which no JSON request can hold (they are refused on entry), so it is unambiguous.
2. The template is rendered with guarded texts.
3. `Tokens.encode` cuts the rendered text at control tokens, which a sentinel inside hides, removes the sentinels and
   encodes the ordinary text between the cuts with a tokenizer that does not know control tokens at all.

The ids are therefore the canonical tokenisation of the rendered text and a function of the request alone.
User-defined tokens (GGUF token type 4, such as `<think>`) are ordinary text that happens to have an id of its own, and
are recognised everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

log = logging.getLogger(__name__)

SENTINEL = "\udfff"
"""Hides a control token's text from `Tokens.encode`; removed there."""

OFF_LOOP_CHARS = 4096
"""Longer texts are encoded on a thread: about 2 ms of work."""

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type

END_TEXTS = ("<|endoftext|>", "<|im_end|>")
"""Control tokens that end an answer even where the file names only another one."""


class VocabularyError(ValueError):
    """The file's vocabulary cannot be used. The message names the GGUF key and what would be right."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before byte-pair merging (`tokenizer.ggml.pre`). No regex: GPT-2's own, built in."""

    regex: str | None = None
    single_digits: bool = False  # cut out every digit first
    nfc: bool = False  # compose characters first, as the models' own tokenizers do
    whole_words: bool = False  # a piece that is a token as a whole is not merged up


def _word_regex(letter: str, mark: str, digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{letter}+"
        rf"|{digits}"
        rf"| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_QWEN2 = PreTokenizer(_word_regex(r"\p{L}", "", r"\p{N}"), nfc=True)
_LLAMA3 = PreTokenizer(_word_regex(r"\p{L}", "", r"\p{N}{1,3}"), whole_words=True)
_GPT2 = PreTokenizer()

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer(_word_regex(r"[\p{L}\p{M}]", r"\p{M}", r"\p{N}"), nfc=True),
    "smollm": PreTokenizer(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": _GPT2,
    "default": _GPT2,
}


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters by which byte-level vocabularies write bytes, as character -> byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


BYTE_OF = _byte_alphabet()

# Without a token for one of these a vocabulary cannot write ordinary text. Some lack control characters, bytes that
# are no UTF-8, and the first bytes of planes without characters; a character of such bytes is left out of a prompt.
NEEDED_BYTES = frozenset([*b"\t\n", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)])


class Tokens:
    """The tokenizer of one model file. Immutable, so it may be used from any thread."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Build from GGUF metadata. Takes about a second for 250,000 tokens. Raises VocabularyError."""
        if metadata.get("tokenizer.ggml.model") != "gpt2":
            raise VocabularyError(
                f'tokenizer.ggml.model is {metadata.get("tokenizer.ggml.model")!r}; only byte-level BPE ("gpt2") works'
            )
        self._texts: list[str] = _list(metadata, "tokenizer.ggml.tokens", str)
        types = _list(metadata, "tokenizer.ggml.token_type", int) or [1] * len(self._texts)
        if not self._texts or len(types) != len(self._texts):
            raise VocabularyError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(self._texts)} tokens")
        self._control = {t: i for i, t in enumerate(self._texts) if types[i] in (CONTROL, UNKNOWN) and t}
        self._model = _build_model(metadata, self._texts, types)
        self.bos_id = self._id_of(metadata, "bos")
        self.eos_id = self._id_of(metadata, "eos")
        self.pad_id = self._id_of(metadata, "padding")
        self._adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token")) and self.bos_id is not None
        named = {self.eos_id, self._id_of(metadata, "eot")}
        named |= {self._control.get(text) for text in END_TEXTS}
        self.end_ids = frozenset(token for token in named if token is not None)
        self._bytes = tuple(
            b"" if kind in (CONTROL, UNKNOWN) or i in self.end_ids else _bytes_of(text, kind)
            for i, (text, kind) in enumerate(zip(self._texts, types, strict=True))
        )
        self._longest = max(len(text.encode("utf-8", "replace")) for text in self._texts)
        self._cut = _cut_regex(self._control)
        self._guard = _guard_regex(self._control)

    @property
    def size(self) -> int:
        """Number of ids in the vocabulary."""
        return len(self._texts)

    def text_of(self, token: int) -> str:
        """The token as a person would write it, for logprobs and logs; U+FFFD for what is not UTF-8 alone."""
        return self._bytes[token].decode("utf-8", "replace") or self._texts[token]

    def token_bytes(self, token: int) -> bytes:
        """The bytes this id adds to an answer: none for control tokens and for those that end an answer."""
        return self._bytes[token]

    def guard(self, text: str, continuations: Sequence[str] = ()) -> str:
        """`text` of a user with sentinels, so that no part of it can be read as a control token.

        `continuations` are what a template's own words leave open (see `open_ends`): a text that begins with one, or
        is the beginning of one, gets a sentinel in front.
        """
        if self._guard is None:
            return text
        guarded = self._guard.sub(lambda match: match.group() + SENTINEL, text)
        if text and any(text.startswith(rest) or rest.startswith(text) for rest in continuations):
            return SENTINEL + guarded
        return guarded

    def open_ends(self, words: Iterable[str]) -> tuple[str, ...]:
        """What would complete a control token behind a text that ends in its beginning, for each of `words`."""
        rests: dict[str, set[str]] = {}
        for control in self._control:
            for k in range(1, len(control)):
                rests.setdefault(control[:k], set()).add(control[k:])
        longest = max(map(len, rests), default=0)
        found = (rests.get(word[-k:], ()) for word in words for k in range(1, min(longest, len(word)) + 1))
        return tuple(sorted({rest for some in found for rest in some}))

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text: control tokens as such unless guarded, no beginning-of-text token added.

        Raises ValueError for a lone surrogate other than the sentinel.
        """
        ids: list[int] = []
        position = 0
        for match in self._cut.finditer(text) if self._cut else ():
            ids += self._plain(text[position : match.start()])
            ids.append(self._control[match.group()])
            position = match.end()
        ids += self._plain(text[position:])
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, with the beginning-of-text token in front where the file asks for it and the text lacks it."""
        ids = self.encode(text)
        if self._adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    async def encode_prompt_async(self, text: str) -> list[int]:
        """`encode_prompt`, on a thread when the text is long."""
        if len(text) <= OFF_LOOP_CHARS:
            return self.encode_prompt(text)
        return await asyncio.to_thread(self.encode_prompt, text)

    def count(self, text: str) -> int:
        """Number of ids of `encode(text)`."""
        return len(self.encode(text))

    def least_count(self, text: str) -> int:
        """A number of tokens that `text` cannot have fewer of; costs next to nothing."""
        return len(text.replace(SENTINEL, "")) // self._longest

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        ordinary = text.replace(SENTINEL, "")
        ordinary.encode()  # a lone surrogate is a UnicodeEncodeError (a ValueError) here, a panic further down
        return list(self._model.encode(ordinary, add_special_tokens=False).ids)

    def _id_of(self, metadata: Mapping[str, Any], name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self._texts):
            raise VocabularyError(f"tokenizer.ggml.{name}_token_id is {value!r}; must be 0 to {len(self._texts) - 1}")
        return value


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = list(metadata.get(key) or ())
    if not all(isinstance(value, kind) for value in values):
        raise VocabularyError(f"{key} must hold only {kind.__name__} values")
    return values


def _bytes_of(text: str, kind: int) -> bytes:
    if kind == USER_DEFINED:
        return text.encode()
    if kind == BYTE and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", text):
        return bytes([int(text[3:5], 16)])
    if all(char in BYTE_OF for char in text):
        return bytes(BYTE_OF[char] for char in text)
    return text.encode("utf-8", "replace")  # unused entries of padded vocabularies


def _build_model(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> Tokenizer:
    """A tokenizer of ordinary text. Control tokens are left out, so that no text at all can become one."""
    pre = _pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    vocabulary = {text: i for i, text in enumerate(texts) if types[i] not in (CONTROL, UNKNOWN)}
    missing = next((byte for char, byte in BYTE_OF.items() if char not in vocabulary and byte in NEEDED_BYTES), None)
    if missing is not None:
        raise VocabularyError(f"tokenizer.ggml.tokens lacks byte {missing}")
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "tokenizer.ggml.merges", str)]
    try:
        bpe = models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises plain Exception
        raise VocabularyError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from None
    tokenizer = Tokenizer(bpe)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _hf_pre_tokenizer(pre)
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for i, text in enumerate(texts) if types[i] == USER_DEFINED and text]
    )
    return tokenizer


def _pre_tokenizer(name: object) -> PreTokenizer:
    if name is None:
        log.warning('the model file has no tokenizer.ggml.pre; text is cut as for "gpt-2", answers may suffer')
        return PRE_TOKENIZERS["default"]
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise VocabularyError(f"tokenizer.ggml.pre is {name!r}; known are {known}")
    return PRE_TOKENIZERS[name]


def _hf_pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    stages: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        stages.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.regex is not None:
        stages.append(pre_tokenizers.Split(Regex(pre.regex), behavior="isolated"))
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None))
    return pre_tokenizers.Sequence(stages)


def _cut_regex(control: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(control, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile("(?:" + "|".join(map(re.escape, longest_first)) + f")(?!{SENTINEL})")


def _guard_regex(control: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the first character of what must not be read as a control token.

    That is a whole one and the beginning of one at the end of the text; for those that open with two signs, as `<|`
    does, every such opening, so that a template which takes a text apart cannot leave one behind either.
    """
    rests: dict[str, set[str]] = {}
    for text in control:
        parts = rests.setdefault(text[0], set())
        if len(text) > 2 and not (text[0].isalnum() or text[1].isalnum()):
            parts |= {re.escape(text[1]), r"\Z"}
        else:
            parts.add(re.escape(text[1:]))
            parts.update(re.escape(text[1:k]) + r"\Z" for k in range(1, len(text)))
    if not rests:
        return None
    alternatives = (re.escape(first) + f"(?={'|'.join(sorted(parts))})" for first, parts in rests.items())
    return re.compile("|".join(alternatives))
