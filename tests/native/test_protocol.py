"""The engine's side of the line protocol: what it takes, what it refuses, and that nothing leaves it unusable."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strata_native import ffi, lib

from tests.native.conftest import Prompt, load_prompts
from tests.native.driver import ENGINE, MODEL, PATIENCE, Engine, Refused, eventually, gen, resident_mib, run

N_VOCAB = 8192
ON = "8185:-1000,8187:-1000"  # a logit_bias under which no answer ends by itself
PROMPT = list(next(p for p in load_prompts() if p.name == "story").ids)
FOREVER = gen(PROMPT, 100000, logit_bias=ON)
GOOD = "GEN 3 temperature=0 " + ",".join(map(str, PROMPT))


def usable(engine: Engine) -> None:
    """The engine answers in step: nothing else is in its output, and the answer is the right one."""
    engine.send("STAT")
    assert engine.line().startswith("STAT ")
    assert engine.generate(PROMPT, 3).tokens == [327, 2187, 281]


def refused(engine: Engine, line: str | bytes) -> tuple[str, str]:
    """The name and text of the ERR that this line brings."""
    engine.send(line)
    word, name, text = engine.line().split(" ", 2)
    assert word == "ERR"
    return name, text


# ---- commands --------------------------------------------------------------------------------------------------


def test_start_up_lines_say_what_runs(engine: Engine) -> None:
    assert engine.ready == ["4096", "stop"]
    facts = {"engine": "0.1.0", "protocol": "1", "arithmetic": "1", "arch": "qwen35moe", "threads": "2", "kv": "int8"}
    facts |= {"context": "4096", "trained_context": "4096", "vocab": "8192"}
    assert facts.items() <= engine.info.items()
    for name in ("identity", "fingerprint"):
        assert len(bytes.fromhex(engine.info[name])) == 16
    assert engine.info["isa"] in ("avx512", "avx2", "scalar")
    assert float(engine.info["weights_mib"]) > 10
    assert engine.load_percent == sorted(set(engine.load_percent))
    assert len(engine.load_percent) > 5


def test_an_answer_has_its_lines_in_order(engine: Engine, prompts: list[Prompt]) -> None:
    engine.generate(PROMPT, 1)
    answer = engine.generate(prompts[0].ids, 20, logprobs=2)
    words = "".join(line.split(" ")[0] + " " for line in answer.lines)
    assert re.fullmatch(f"RESUME (PP )+REUSED (T ){{{len(answer.tokens)}}}DONE ", words)
    assert answer.progress[-1] == (len(prompts[0].ids),) * 2
    assert int(answer.done["generated"]) == len(answer.tokens)
    assert float(answer.done["prompt_ms"]) >= 0 <= float(answer.done["decode_ms"])
    assert [len(top) for top in answer.tops] == [2] * len(answer.tokens)
    assert all(token in top and top[token] == lp for token, lp, top in zip(*triples(answer), strict=True))


def triples(answer: Any) -> tuple[Any, Any, Any]:
    return answer.tokens, answer.logprobs, answer.tops


def test_stat_is_one_line_of_json_at_any_time(engine: Engine) -> None:
    def stat(line: str) -> dict[str, Any]:
        word, text = line.split(" ", 1)
        assert word == "STAT"
        loaded: dict[str, Any] = json.loads(text)
        return loaded

    engine.send("STAT")
    before = stat(engine.line())
    assert before["phase"] == "idle"
    engine.send(FOREVER)
    engine.until("T")
    engine.send("STAT")
    assert stat(engine.until("STAT")[-1])["phase"] == "decoding"
    engine.send("STOP")
    done = engine.until("DONE")[-1].split()
    engine.send("STAT")
    after = stat(engine.line())
    assert after["requests"] == before["requests"] + 1
    assert after["output_tokens"] == before["output_tokens"] + int(done[1])
    assert after["windows"] > before["windows"]


def test_stop_ends_an_answer_at_the_next_window(engine: Engine) -> None:
    engine.send(FOREVER)
    engine.until("T")
    engine.send("STOP")
    lines = engine.until("DONE", timeout=5)
    assert lines[-1].split()[5] == "cancel"
    usable(engine)


def test_stop_ends_the_reading_of_a_prompt() -> None:
    with Engine("--threads", "1", "--chunk", "1") as engine:
        engine.send(gen(PROMPT * 150, 10))
        engine.until("PP")
        engine.send("STOP")
        lines = engine.until("DONE", timeout=5)
        done = lines[-1].split()
        assert (done[1], done[5]) == ("0", "cancel")
        assert not any(line.startswith(("T", "REUSED")) for line in lines)
        assert 0 < int(done[14]) < len(PROMPT) * 150, "what was read is told"
        usable(engine)


def test_a_stop_behind_its_gen_in_one_write_ends_it(engine: Engine) -> None:
    engine.write(f"{FOREVER}\nSTOP\n".encode())
    assert engine.until("DONE", timeout=5)[-1].split()[5] == "cancel"
    usable(engine)


def test_a_stale_stop_does_nothing(engine: Engine) -> None:
    engine.write(b"STOP\nSTOP\n" + GOOD.encode() + b"\n")
    assert engine.answer().finish == "length"
    engine.send("STOP")
    usable(engine)


@pytest.mark.parametrize(
    "tail", [b"QUIT\n", b"QUIT\nGEN 1 1\nnonsense\n", b""], ids=["quit", "and more", "end of input"]
)
def test_quit_and_the_end_of_the_input_let_the_running_answer_end(tail: bytes) -> None:
    shell = subprocess.run(
        [str(ENGINE), "--model", str(MODEL)], input=GOOD.encode() + b"\n" + tail, capture_output=True, timeout=60
    )
    lines = shell.stdout.decode().splitlines()
    assert shell.returncode == 0
    assert [line for line in lines if line.startswith("T ")] == ["T 327", "T 2187", "T 281"]
    assert lines[-1].split()[:6:5] == ["DONE", "length"]


@pytest.mark.parametrize("tail", [b"", b"GEN 3 1,2"], ids=["nothing", "half a line"])
def test_the_end_of_the_input_ends_an_idle_engine(tail: bytes) -> None:
    """Half a line is no line: its sender died while writing it."""
    with Engine("--threads", "2") as engine:
        engine.write(tail)
        assert engine.process.stdin
        engine.process.stdin.close()
        assert engine.wait(5) == 0
        assert engine.rest() == []


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("state", ["idle", "decoding", "reading", "not read"])
def test_a_signal_ends_the_engine_at_once(sig: signal.Signals, state: str) -> None:
    with Engine("--threads", "2", "--chunk", "4") as engine:
        if state == "decoding":
            engine.send(FOREVER)
            engine.until("T")
        elif state == "reading":
            engine.send(gen(PROMPT * 100, 10))
            engine.until("PP")
        elif state == "not read":
            engine.pause()
            engine.send(FOREVER.replace("GEN 100000", "GEN 100000 logprobs=20"))
            time.sleep(0.5)
        begin = time.monotonic()
        engine.process.send_signal(sig)
        assert engine.wait(10) == 0
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize("request_line", [FOREVER, ""], ids=["decoding", "idle"])
def test_an_engine_whose_reader_has_gone_ends(request_line: str) -> None:
    """Its input stays open, so nothing but the output tells."""
    command = [str(ENGINE), "--model", str(MODEL), "--threads", "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdin and process.stdout
            while not process.stdout.readline().startswith(b"READY"):
                pass
            process.stdin.write(request_line.encode() + b"\n")
            process.stdin.flush()
            process.stdout.close()
            assert process.wait(10 * PATIENCE) == 0
        finally:
            process.kill()


# ---- refusals --------------------------------------------------------------------------------------------------

IDS = "1,2,3"
REFUSALS = [
    ("HELLO", "bad_command", "HELLO"),
    ("gen 1 1", "bad_command", "STAT, QUIT"),
    ("GENX 1 1", "bad_command", "GENX"),
    ("  ", "bad_command", ""),
    (f"GEN 0 {IDS}", "bad_max_new", "at least 1"),
    (f"GEN -1 {IDS}", "bad_max_new", "-1"),
    (f"GEN 1.5 {IDS}", "bad_max_new", "1.5"),
    (f"GEN 2147483648 {IDS}", "bad_max_new", "2147483648"),
    (f"GEN 99999999999999999999999999 {IDS}", "bad_max_new", ""),
    (f"GEN nan {IDS}", "bad_max_new", "nan"),
    (f"GEN 0x10 {IDS}", "bad_max_new", "0x10"),
    ("GEN", "bad_max_new", ""),
    (f"GEN temperature=1 5 {IDS}", "bad_max_new", "temperature=1"),
    ("GEN 5", "bad_ids", "needs token ids"),
    ("GEN 5 temperature=1", "bad_ids", "needs token ids"),
    ("GEN 5 1,,2", "bad_ids", ""),
    ("GEN 5 1,2,", "bad_ids", ""),
    ("GEN 5 ,1", "bad_ids", ""),
    ("GEN 5 1;2", "bad_ids", ""),
    ("GEN 5 one", "bad_ids", "one"),
    ("GEN 5 -1", "bad_ids", "-1"),
    ("GEN 5 +1", "bad_ids", ""),
    ("GEN 5 1.0", "bad_ids", ""),
    ("GEN 5 1 2", "bad_ids", "no blanks"),
    (f"GEN 5 {IDS} top_k=1", "bad_ids", "nothing may follow"),
    ("GEN 5 8192", "token_range", "8192"),
    ("GEN 5 1,99999999999999999999", "token_range", "vocabulary of 8192"),
    (f"GEN 5 temperature=x {IDS}", "bad_key", "temperature"),
    (f"GEN 5 temperature=nan {IDS}", "bad_key", "temperature"),
    (f"GEN 5 temperature=inf {IDS}", "bad_key", "temperature"),
    (f"GEN 5 temperature= {IDS}", "bad_key", "temperature"),
    (f"GEN 5 top_p=1.1 {IDS}", "bad_key", "top_p"),
    (f"GEN 5 top_p=-0.1 {IDS}", "bad_key", "top_p"),
    (f"GEN 5 min_p=2 {IDS}", "bad_key", "min_p"),
    (f"GEN 5 top_k=-1 {IDS}", "bad_key", "top_k"),
    (f"GEN 5 top_k=1.5 {IDS}", "bad_key", "top_k"),
    (f"GEN 5 seed=1.5 {IDS}", "bad_key", "seed"),
    (f"GEN 5 seed=x {IDS}", "bad_key", "seed"),
    (f"GEN 5 seed=- {IDS}", "bad_key", "seed"),
    (f"GEN 5 seed=18446744073709551616 {IDS}", "bad_key", "seed"),
    (f"GEN 5 seed=-9223372036854775809 {IDS}", "bad_key", "seed"),
    (f"GEN 5 choice=-1 {IDS}", "bad_key", "choice"),
    (f"GEN 5 choice=4294967296 {IDS}", "bad_key", "choice"),
    (f"GEN 5 penalty_repeat=0 {IDS}", "bad_key", "penalty_repeat"),
    (f"GEN 5 penalty_freq=101 {IDS}", "bad_key", "penalty_freq"),
    (f"GEN 5 penalty_present=-101 {IDS}", "bad_key", "penalty_present"),
    (f"GEN 5 penalty_last_n=-2 {IDS}", "bad_key", "penalty_last_n"),
    (f"GEN 5 logit_bias=1 {IDS}", "bad_key", "logit_bias"),
    (f"GEN 5 logit_bias=1:x {IDS}", "bad_key", "logit_bias"),
    (f"GEN 5 logit_bias=1:nan {IDS}", "bad_key", "logit_bias"),
    (f"GEN 5 logit_bias=1:inf {IDS}", "bad_key", "logit_bias"),
    (f"GEN 5 logit_bias=8192:1 {IDS}", "token_range", "8192"),
    (f"GEN 5 logprobs=21 {IDS}", "bad_key", "logprobs"),
    (f"GEN 5 logprobs=-1 {IDS}", "bad_key", "logprobs"),
    (f"GEN 5 ckpt=2 {IDS}", "bad_key", "ckpt"),
    (f"GEN 5 pin=-1 {IDS}", "bad_key", "pin"),
    (f"GEN 5 out_from=4 {IDS}", "bad_key", "out_from"),
    (f"GEN 5 out_from=-1 {IDS}", "bad_key", "out_from"),
    (gen([5] * 4096, 1), "context_full", "4096"),
    (gen([5] * 100000, 1), "context_full", "100000"),
]


@pytest.mark.parametrize(("line", "name", "says"), REFUSALS, ids=[f"{r[1]}-{r[0][:40]}" for r in REFUSALS])
def test_a_bad_line_is_refused_by_name(engine: Engine, line: str, name: str, says: str) -> None:
    got, text = refused(engine, line)
    assert got == name
    assert says in text
    usable(engine)


def test_one_request_at_a_time(engine: Engine) -> None:
    engine.send(FOREVER)
    engine.until("T")
    engine.send(GOOD)
    assert engine.until("ERR")[-1].startswith("ERR busy ")
    engine.send("STOP")
    assert engine.until("DONE")[-1].split()[5] == "cancel"
    usable(engine)


def test_two_requests_in_one_write(engine: Engine) -> None:
    """The second is refused at once, the first runs."""
    engine.write(f"{GOOD}\n{GOOD}\n".encode())
    lines = engine.until("DONE")
    assert lines[-1].split()[5] == "length"
    assert [line.split()[:2] for line in lines if line.startswith("ERR")] == [["ERR", "busy"]]
    usable(engine)


# ---- keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 0},
        {"temperature": -1},
        {"temperature": "1e-3"},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "min_p": 1},
        {"seed": "18446744073709551615", "choice": 4294967295},
        {"seed": "-9223372036854775808"},
        {"penalty_repeat": 1.0, "penalty_freq": 0, "penalty_present": 0, "penalty_last_n": -1},
        {"ckpt": 1, "pin": 7, "out_from": 0},
        {"out_from": len(PROMPT)},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": "5:-100,6:-inf,7:0"},
        {"logit_bias": ""},
        {"spec_min_p": 0.5, "a_key_of_tomorrow": "what:ever,it=is", "": 1},
    ],
    ids=str,
)
def test_every_key_is_taken(engine: Engine, keys: dict[str, Any]) -> None:
    """All of these leave the likeliest tokens the likeliest."""
    answer = engine.generate(PROMPT, 3, **keys)
    assert answer.tokens == [327, 2187, 281]
    if "logprobs" in keys:
        assert [len(top) for top in answer.tops] == [keys["logprobs"]] * 3
        assert len(answer.logprobs) == 3
    else:
        assert not answer.logprobs


@pytest.mark.parametrize(
    "keys",
    [
        {"logit_bias": "327:-100"},
        {"logit_bias": "327:-inf"},
        {"logit_bias": "1000:100"},
        {"temperature": 50, "seed": 1},
        {"penalty_present": 100, "out_from": 0, "logit_bias": "327:-1,5:50"},
    ],
    ids=str,
)
def test_keys_have_their_effect(engine: Engine, keys: dict[str, Any]) -> None:
    assert engine.generate(PROMPT, 3, **keys).tokens != [327, 2187, 281]


def test_penalties_count_from_out_from_on(engine: Engine) -> None:
    """penalty_present looks at output alone; where that begins is told by out_from."""
    ids = [*PROMPT, 327]
    bias = "327:60"
    without = engine.generate(ids, 1, logit_bias=bias).tokens
    as_prompt = engine.generate(ids, 1, logit_bias=bias, penalty_present=100).tokens
    as_output = engine.generate(ids, 1, logit_bias=bias, penalty_present=100, out_from=len(PROMPT)).tokens
    assert without == as_prompt == [327]
    assert as_output != [327]


# ---- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [GOOD + "\r", GOOD.replace(" ", "\t"), GOOD.replace(" ", "   "), "  " + GOOD + "  \t", f"\n\r\n\n{GOOD}"],
    ids=["crlf", "tabs", "blanks", "around", "empty lines"],
)
def test_forms_of_a_line(engine: Engine, line: str) -> None:
    assert len(engine.generate(PROMPT, 1).tokens) == 1
    engine.send(line)
    assert engine.answer().tokens == [327, 2187, 281]


@pytest.mark.parametrize(
    "line", [b"GEN 3 1,2\x00,3", b"\x00", b"STAT\x00", b"\x00STAT", b"GEN 3\x00\r"], ids=[str(i) for i in range(5)]
)
def test_a_nul_byte_never_cuts_a_line(engine: Engine, line: bytes) -> None:
    assert refused(engine, line) == ("bad_command", "a line holds a NUL byte")
    usable(engine)


def test_bytes_that_are_no_text_are_shown_escaped(engine: Engine) -> None:
    name, text = refused(engine, b"\xff\xfe\x1b[2J \x80")
    assert name == "bad_command"
    assert r"\xff\xfe\x1b[2J" in text
    usable(engine)


def test_a_line_in_pieces(engine: Engine) -> None:
    for i in range(0, len(GOOD), 7):
        engine.write(GOOD[i : i + 7].encode())
        time.sleep(0.001)
    engine.write(b"\nSTA")
    assert engine.answer().tokens == [327, 2187, 281]
    engine.write(b"T\n")
    assert engine.line().startswith("STAT ")
    usable(engine)


def test_a_line_without_end_is_refused_and_skipped_in_bounded_memory() -> None:
    with Engine("--threads", "2") as engine:
        before = resident_mib(engine.process.pid)
        for piece in range(66):
            engine.write(b"GEN 1 " + b"1," * (1 << 18) if piece == 0 else b"1," * (1 << 19))
        engine.send("")
        assert engine.line().startswith("ERR bad_command a line is longer than 32 MiB")
        usable(engine)
        assert resident_mib(engine.process.pid) < before + 100 * PATIENCE


def test_many_ids_in_one_line(engine: Engine) -> None:
    """Fifteen million are parsed and refused within seconds."""
    begin = time.monotonic()
    assert refused(engine, b"GEN 1 " + b"1," * 15_000_000 + b"1")[0] == "context_full"
    assert time.monotonic() - begin < 20
    usable(engine)


# ---- a reader that does not read -------------------------------------------------------------------------------


def test_a_reader_that_does_not_read_stalls_nothing() -> None:
    """The answer is computed to its end while nobody listens, and nothing of it is lost."""
    with Engine("--threads", "2") as engine:
        engine.pause()
        engine.send(gen(PROMPT, 1500, logprobs=20, logit_bias=ON))
        ticks = -1

        def done() -> bool:
            """Processor time has stopped to grow: the engine waits for us, or is done."""
            nonlocal ticks
            time.sleep(0.3)
            last, ticks = ticks, processor_ticks(engine.process.pid)
            return last == ticks

        eventually("the answer is computed", done, timeout=60)
        engine.send("STAT")
        time.sleep(0.2)
        engine.resume()
        answer = engine.answer()
        assert len(answer.tokens) == 1500
        assert len("\n".join(answer.lines)) > 5 * 65536, "more than a pipe holds"
        assert json.loads(engine.line().split(" ", 1)[1])["phase"] == "idle", "STAT was taken while nobody read"
        usable(engine)


def processor_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_what_gathers_for_a_reader_that_does_not_read_is_bounded() -> None:
    """STAT without end: at some point the engine takes no more of them, and our pipe is full."""
    with Engine("--threads", "1") as engine:
        before = resident_mib(engine.process.pid)
        engine.pause()
        assert engine.process.stdin
        fd = engine.process.stdin.fileno()
        os.set_blocking(fd, False)
        sent, stuck = 0, 0
        while stuck < 50 and sent < 4_000_000:
            try:
                sent += os.write(fd, b"STAT\n" * 800)
                stuck = 0
            except BlockingIOError:
                stuck += 1
                time.sleep(0.01)
        assert stuck == 50, "input is not held up"
        assert resident_mib(engine.process.pid) < before + 400 * PATIENCE
        os.set_blocking(fd, True)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.wait(10) == 0


# ---- any bytes at all ------------------------------------------------------------------------------------------

KEYS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "choice",
    "penalty_repeat",
    "penalty_freq",
    "penalty_present",
    "penalty_last_n",
    "logit_bias",
    "logprobs",
    "ckpt",
    "pin",
    "out_from",
    "unknown",
]
NUMBERS = st.one_of(
    st.integers(-5, 30).map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["", "-", "+", ".", "1e", "e5", "0x1", "1e400", "-1e400", "inf", "-inf", "nan", "00000001", "1" * 80]
    ),
)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS).map(":".join), max_size=4).map(",".join)
KEY_WORDS = st.tuples(st.sampled_from(KEYS), st.one_of(NUMBERS, PAIRS)).map("=".join)
ID_LISTS = st.lists(st.one_of(st.integers(0, 9000).map(str), NUMBERS), max_size=6).map(",".join)
LINES = st.one_of(
    st.tuples(st.lists(KEY_WORDS, max_size=5), NUMBERS, ID_LISTS).map(lambda t: " ".join(["GEN", t[1], *t[0], t[2]])),
    st.lists(
        st.one_of(
            st.sampled_from(["GEN", "BGEN", "STAT", "QUIT", "STOP", "BSTOP", "BYIELD", " ", "\t"]), NUMBERS, KEY_WORDS
        )
    ).map(" ".join),
    st.text(max_size=60),
).map(lambda text: text.encode("utf-8", "surrogatepass").replace(b"\0", b" "))
NAMES = {"bad_command", "bad_key", "bad_ids", "bad_max_new", "bad_slot", "token_range"}


@dataclass
class Parsed:
    """What st_parse_line made of a line."""

    command: int
    name: str = ""
    text: str = ""
    max_new: int = 0
    ids: list[int] = field(default_factory=list)
    biases: dict[int, float] = field(default_factory=dict)
    sampling: Any = None


def parse(line: bytes) -> Parsed:
    request, err = ffi.new("st_request *"), ffi.new("st_error *")
    command = lib.st_parse_line(line, N_VOCAB, request, err)
    try:
        if command < 0:
            return Parsed(command, ffi.string(err.name).decode(), ffi.string(err.text).decode())
        s = request.sampling
        return Parsed(
            command,
            max_new=request.max_new,
            ids=[request.ids[i] for i in range(request.n_ids)],
            biases={s.bias_ids[i]: s.bias_values[i] for i in range(s.n_bias)},
            sampling={k: getattr(s, k) for k in ("temperature", "top_p", "top_k", "min_p", "seed", "choice")},
        )
    finally:
        lib.st_request_free(request)


@settings(deadline=None, max_examples=1500)
@given(LINES)
@example(b"GEN 1 logit_bias=1:1,2:2,,3:3 1")
@example(b"GEN 1 logit_bias=1:1,logit_bias=2:2 1")
@example(b"GEN 1 logit_bias=1:1 logit_bias=2:2 logit_bias= 1")
@example(b"GEN 1 logit_bias=1:1 logit_bias=x 1")
def test_any_line_is_a_command_or_a_named_error(line: bytes) -> None:
    got = parse(line)
    if got.command < 0:
        assert got.name in NAMES
        assert not {unicodedata.category(c) for c in got.text} & {"Cc", "Zl", "Zp"}
    elif got.command == lib.ST_CMD_GEN:
        assert got.max_new >= 1
        assert got.ids
        assert all(0 <= i < N_VOCAB for i in [*got.ids, *got.biases])
        assert 0 <= got.sampling["top_p"] <= 1
        assert 0 <= got.sampling["min_p"] <= 1
        assert got.sampling["top_k"] >= 0
    else:
        assert line.split()[0].decode() in ("STOP", "STAT", "QUIT", "BGEN", "BSTOP", "BYIELD")


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 2**31 - 1),
    st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=50),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.dictionaries(st.integers(0, N_VOCAB - 1), st.floats(-1e5, 1e5, width=32), max_size=5),
    st.floats(0, 100, width=32),
)
def test_a_good_line_is_understood(
    max_new: int, ids: list[int], seed: int, choice: int, biases: dict[int, float], temperature: float
) -> None:
    pairs = ",".join(f"{i}:{v!r}" for i, v in biases.items())
    got = parse(gen(ids, max_new, seed=seed, choice=choice, logit_bias=pairs, temperature=repr(temperature)).encode())
    assert (got.command, got.max_new, got.ids) == (lib.ST_CMD_GEN, max_new, ids)
    assert got.biases == biases
    sampling = got.sampling
    assert (sampling["seed"], sampling["choice"], sampling["temperature"]) == (seed % 2**64, choice, temperature)


def test_thousands_of_bad_lines_leave_the_engine_usable(engine: Engine) -> None:
    lines = [r[0] for r in REFUSALS if len(r[0]) < 200] * 100
    before = resident_mib(engine.process.pid)
    engine.write("\n".join(lines).encode() + b"\n")
    for line in lines:
        assert engine.line().startswith("ERR "), line
    usable(engine)
    assert resident_mib(engine.process.pid) < before + 50 * PATIENCE


def test_a_refused_request_raises_in_the_driver(engine: Engine) -> None:
    with pytest.raises(Refused, match="bad_ids"):
        engine.generate([], 1)
    usable(engine)


def test_nothing_on_the_input_is_no_failure() -> None:
    done = run("--model", MODEL)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "READY 4096 stop"


# ---- slots -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("BGEN", "ERR bad_slot"),
        ("BGEN x 3 1,2", "ERR bad_slot"),
        ("BGEN -1 3 1,2", "ERR bad_slot"),
        ("BGEN 1.5 3 1,2", "ERR bad_slot"),
        ("BGEN 99 3 1,2", "BERR 99 bad_slot"),
        ("BGEN 0 0 1,2", "BERR 0 bad_max_new"),
        ("BGEN 0 3 1,x", "BERR 0 bad_ids"),
        ("BGEN 0 3 top_p=2 1", "BERR 0 bad_key"),
        ("BGEN 0 3 9999", "BERR 0 token_range"),
        ("BSTOP", "ERR bad_slot"),
        ("BSTOP 99", "BERR 99 bad_slot"),
        ("BYIELD 99", "BERR 99 bad_slot"),
    ],
)
def test_a_bad_slot_line_is_refused_under_its_slot(engine: Engine, line: str, says: str) -> None:
    engine.send(line)
    assert engine.line().startswith(says + " ")
    usable(engine)


def check_answers(lines: list[str], started: Counter[int]) -> None:
    """Each request of a slot ends once, and between its ends no line is out of place. Slot -1 is that of GEN."""
    ends: Counter[int] = Counter()
    inside: dict[int, int] = {}
    for line in lines:
        word, *rest = line.split(" ")
        if word in ("STAT", "YIELDED"):
            continue
        slot = -1 if word in ("RESUME", "PP", "REUSED", "T", "DONE", "ERR") else int(rest[0])
        if word in ("RESUME", "BRESUME"):
            assert slot not in inside, line
            inside[slot] = 0
        elif word in ("T", "BT"):
            inside[slot] += 1
        elif word in ("DONE", "BDONE"):
            assert int(rest[slot >= 0]) == inside.pop(slot), line
            ends[slot] += 1
        elif word in ("ERR", "BERR"):
            assert rest[slot >= 0] == "busy", line
            ends[slot] += 1
        else:
            assert word in ("PP", "BPP", "REUSED", "BADM"), line
            assert slot in inside, line
    assert not inside
    assert ends == started


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", [0, 14], ids=["roomy", "crowded"])
def test_any_order_of_commands_leaves_every_request_with_one_end(seed: int, pool: int) -> None:
    """Requests, stops and yields at random over three slots and the hidden one, also where the pool is too small."""
    rng = random.Random(seed)
    prompts = [list(p.ids) for p in load_prompts()]
    started: Counter[int] = Counter()
    with Engine(
        "--threads", "2", "--parallel", "3", "--chunk", "32", "--max-context", "512", f"--pool-blocks={pool}"
    ) as e:
        for _ in range(120):
            slot = rng.randrange(-1, 3)
            kind = rng.choice(["gen", "gen", "gen", "stop", "yield", "stat", "wait"])
            if kind == "gen":
                ids = rng.choice(prompts) * rng.randrange(1, 5)
                keys = {"temperature": rng.choice([0, 4]), "ckpt": rng.randrange(2), "pin": rng.choice([0, 20])}
                line = gen(ids[:400], rng.randrange(1, 60), seed=rng.randrange(9), **keys)
                e.send(line if slot < 0 else f"B{line.replace('GEN ', f'GEN {slot} ', 1)}")
                started[slot] += 1
            elif kind == "wait":
                time.sleep(rng.random() * 0.02)
            elif kind == "stat":
                e.send("STAT")
            elif kind == "yield":
                e.send(f"BYIELD {max(slot, 0)}")
            else:
                e.send("STOP" if slot < 0 else f"BSTOP {slot}")
        e.send("QUIT")
        check_answers(e.rest(60), started)
        assert e.wait() == 0
