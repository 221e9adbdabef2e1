"""What programs print, as recorded from them, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import slots
from tests.bench.build_peer import unpack_command
from tests.bench.client import dechunk, events_of, streamed
from tests.bench.engine import BenchError, Done, Timed, gen_line, lines_of
from tests.bench.kernels import Limits, kernel_rows, limit_spreads, parse_kernels
from tests.bench.peer import Output, Peer, build_of, find_peer, parse_batched, parse_bench, run_watched
from tests.bench.speed import GENERATED, PROMPT, check, sample_of

BENCH_JSONL = """\
{"build_commit": "0c1e57098", "n_threads": 2, "n_prompt": 512, "n_gen": 0, "avg_ts": 2500.0, "samples_ts": [ 2517.39, 2400.0, 2610.5 ]}
{"build_commit": "0c1e57098", "n_threads": 2, "n_prompt": 0, "n_gen": 128, "avg_ts": 943.187937, "samples_ts": [ 943.188 ]}
"""  # noqa: E501
BENCH_CSV = """\
build_commit,build_number,n_threads,n_prompt,n_gen,n_depth,test_time,avg_ns,stddev_ns,avg_ts,stddev_ts
"0c1e57098","0","2","512","0","0","2026-11-30T21:30:20Z","191793361","0","2669.539745","0.000000"
"0c1e57098","0","2","0","128","0","2026-11-30T21:30:21Z","162734921","0","786.555210","0.000000"
"""
BATCHED = """\
some log line
{"n_kv_max": 4096, "n_threads": 2, "pp": 128, "tg": 128, "pl": 1, "t_pp": 0.064264, "speed_pp": 1991.783936, "speed_tg": 892.035828, "speed": 1232.214722}
{"n_kv_max": 4096, "n_threads": 2, "pp": 128, "tg": 128, "pl": 2, "t_pp": 0.088953, "speed_pp": 2877.924072, "speed_tg": 1069.237305, "speed": 1559.188232}

"""  # noqa: E501
KERNELS = """\
avx2    q4_0 k=64    rows=1     16.9 GB/s     60.0 GOP/s
avx2    q4_0 k=2048  rows=8      5.0 GB/s    141.8 GOP/s
avx2    q8_0 k=64    rows=1     27.4 GB/s     51.5 GOP/s
avx2    delta_step 64x64  0.45 us
"""
PROBE = """\
read_memory threads=1 21.6 GB/s
read_memory threads=2 30.3 GB/s
read_cache threads=1 50.0 GB/s
int8 threads=1 188.9 GOP/s
fma threads=1 102.3 GOP/s
"""


# ---- llama.cpp ----


def test_llama_bench_jsonl_gives_the_median_of_its_repeats() -> None:
    assert parse_bench(BENCH_JSONL) == {(512, 0): 2517.39, (0, 128): 943.188}
    assert build_of(BENCH_JSONL) == "0c1e57098"


def test_llama_bench_csv_gives_the_mean_that_it_has() -> None:
    assert parse_bench(BENCH_CSV) == {(512, 0): 2669.539745, (0, 128): 786.55521}
    assert build_of(BENCH_CSV) == "0c1e57098"


def test_llama_bench_json_list() -> None:
    assert parse_bench(f"[{','.join(BENCH_JSONL.splitlines())}]") == parse_bench(BENCH_JSONL)


@pytest.mark.parametrize(
    "text", ["", "error: no model\n", '{"n_prompt": 5}\n', '{"n_prompt": 0, "n_gen": "x", "avg_ts": 1}']
)
def test_llama_bench_without_results_is_told(text: str) -> None:
    with pytest.raises(BenchError, match="llama-bench"):
        parse_bench(text)


def test_a_turn_of_llama_bench_needs_both_of_its_tests() -> None:
    assert sample_of(Output(BENCH_JSONL, 101.5)) == {"decode": 943.188, "prompt": 2517.39, "memory": 101.5}
    with pytest.raises(BenchError, match=rf"\({PROMPT}, 0\)|\(0, {GENERATED}\)"):
        sample_of(Output(BENCH_JSONL.splitlines()[0], 1))


def test_batched_bench_rates_by_number_of_sequences() -> None:
    rates = parse_batched(BATCHED)
    assert rates[1] == {"prompt": 1991.783936, "decode": 892.035828, "total": 1232.214722}
    assert rates[2]["decode"] == 1069.237305
    with pytest.raises(BenchError, match="no results"):
        parse_batched("nothing")


def test_the_peer_is_where_the_environment_says_or_where_it_was_built(tmp_path: Path) -> None:
    (tmp_path / "llama-bench").touch(0o755)
    (tmp_path / "empty").mkdir()
    assert find_peer({"STRATA_BENCH_PEER": str(tmp_path)}, tmp_path / "empty") == Peer(tmp_path)
    assert find_peer({}, tmp_path) == Peer(tmp_path)
    assert find_peer({}, tmp_path / "empty") is None
    with pytest.raises(BenchError, match="STRATA_BENCH_PEER"):
        find_peer({"STRATA_BENCH_PEER": str(tmp_path / "empty")}, tmp_path)
    with pytest.raises(BenchError, match="llama-server is missing"):
        Peer(tmp_path).program("llama-server")


def test_a_watched_program_gives_its_output_and_its_memory() -> None:
    output = run_watched(["sh", "-c", "echo one; sleep 0.1; echo two"])
    assert output.text == "one\ntwo\n"
    assert output.peak_mib > 0
    with pytest.raises(BenchError, match="sh ended with status 3"):
        run_watched(["sh", "-c", "exit 3"])


def test_the_source_is_unpacked_without_its_package() -> None:
    command = unpack_command(Path("p/llama_cpp_python-1.2.tar.gz"), Path("to"))
    assert "--strip-components=3" in command
    assert command[-1] == "llama_cpp_python-1.2/vendor/llama.cpp"


# ---- the engine ----


def test_lines_arrive_with_the_block_that_ends_them() -> None:
    lines = lines_of([(1.0, b"T 5\nT"), (2.0, b" 6"), (3.0, b"\nDONE 2\nrest")])
    assert lines == [Timed(1.0, "T 5"), Timed(3.0, "T 6"), Timed(3.0, "DONE 2")]


def test_done_gives_rates() -> None:
    done = Done.parse("DONE 129 512 256.0 64.0 length 0 0 0 0 0 0 0 0 512 0 more")
    assert done == Done(129, 512, 256.0, 64.0, "length", 0)
    assert done.decode_rate == 2000.0  # the first token came with the prompt
    assert done.prompt_rate == 2000.0
    assert Done.parse("DONE 1 10 0.0 0.0 stop 0 0 0").decode_rate == 0.0
    drafted = Done.parse("DONE 129 512 256.0 64.0 length 88 100 3 0 0 0 0 0 512 0")
    assert (drafted.accepted, drafted.offered, drafted.reused, drafted.windows) == (88, 100, 3, 40)
    with pytest.raises(BenchError, match="'ERR no'"):
        Done.parse("ERR no")


@pytest.mark.parametrize(
    ("line", "wall_s", "text"),
    [
        ("DONE 128 1 1.0 100.0 stop 0 0 0", 0.1, "made 128 of 129"),
        ("DONE 129 9 1.0 100.0 length 0 0 8", 0.1, "reused 8"),
        ("DONE 129 9 1.0 100.0 length 0 0 0", 0.3, "tells 0.101 s for what took 0.300 s"),
    ],
)
def test_a_figure_needs_the_whole_work_and_the_whole_time(line: str, wall_s: float, text: str) -> None:
    with pytest.raises(BenchError, match=text):
        check(Done.parse(line), 129, wall_s)
    check(Done.parse("DONE 129 9 1.0 100.0 length 0 0 0"), 129, 0.11)


def test_gen_lines() -> None:
    assert gen_line([5, 6], 7, "temperature=0") == "GEN 7 temperature=0 5,6"
    assert gen_line([5], 7, "") == "GEN 7 5"


# ---- slots ----


def slot_lines(ends: tuple[float, ...], made: int = slots.WRITTEN) -> list[Timed]:
    """Two slots whose prompts are read after 1 s and 2 s and that then write a token every 10 ms."""
    lines = [Timed(0.1, "BRESUME 0 0"), Timed(1.0, "BADM 0 1"), Timed(2.0, "BADM 1 1")]
    for slot, end in enumerate(ends):
        lines += [Timed(end - 0.01 * i, f"BT {slot} 5") for i in range(slots.WRITTEN)]
        lines.append(Timed(end, f"BDONE {slot} {made} length 1000.0 0 0 128 0 1.0 2.0 128"))
    return sorted(lines, key=lambda timed: timed.at)


def test_slots_decode_from_the_last_prompt_to_the_first_end() -> None:
    together = slots.rates(slot_lines((3.5, 4.0)), 2, began=0.0)
    # slot 0 wrote 129 tokens in 2.22..3.5, slot 1 those of 2.72..3.5: 79
    assert together.decode == pytest.approx((129 + 79) / 1.5)
    assert together.total == pytest.approx(2 * (slots.PROMPT + slots.GENERATED) / 4.0)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([Timed(1, "BERR 1 busy taken")], "refused slot 1 busy"),
        ([Timed(1, "BADM 0 0")], "not admitted"),
        (slot_lines((3.5, 4.0), made=5), "made 5 of"),
        (slot_lines((3.5,)), "1 of 2 slots"),
        (slot_lines((1.9, 4.0)), "did not run together"),
    ],
)
def test_slots_that_did_something_else_are_told(lines: list[Timed], text: str) -> None:
    with pytest.raises(BenchError, match=text):
        slots.rates(lines, 2, 0.0)


# ---- kernels ----


def test_kernels_stand_beside_the_limits_of_their_own_round() -> None:
    limits = [Limits.parse(PROBE), Limits.parse(PROBE.replace("50.0", "100.0"))]
    rows = kernel_rows(limits, [parse_kernels(KERNELS), parse_kernels(KERNELS.replace("16.9", "50.0"))])
    first = rows[0]
    assert [row.name for row in rows] == [
        "q4_0 avx2, k=64, 1 row",
        "q4_0 avx2, k=2048, 8 rows",
        "q8_0 avx2, k=64, 1 row",
    ]
    assert first.of_bandwidth is not None and first.of_peak is not None
    assert (first.of_bandwidth.low, first.of_bandwidth.high) == pytest.approx((16.9 / 50, 50 / 100))
    assert first.of_peak.median == pytest.approx(60 / 188.9)


def test_limits_have_names_and_units() -> None:
    spreads = limit_spreads([Limits.parse(PROBE)])
    assert spreads["Reading memory, 2 threads, GB/s"].median == 30.3
    assert spreads["int8 multiply-add, 1 thread, GOP/s"].median == 188.9


def test_a_probe_or_kernel_bench_that_says_nothing_is_told() -> None:
    with pytest.raises(BenchError, match="fma"):
        Limits.parse(PROBE.replace("fma", "other"))
    with pytest.raises(BenchError, match="--bench-kernels"):
        parse_kernels("avx2 delta_step 64x64  0.45 us\n")


# ---- HTTP ----

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


EVENTS = [
    b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"Hello"}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":" there"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n',
]


def test_a_stream_is_timed_by_its_texts() -> None:
    blocks = [
        (1.0, HEAD),
        *((2.0 + i, chunk(event)) for i, event in enumerate(EVENTS)),
        (9.0, b"0\r\n\r\n"),
        (9.5, b""),
    ]
    answer = streamed(blocks, began=0.5)
    assert (answer.tokens, answer.first_s, answer.last_s, answer.end_s) == (3, 2.5, 3.5, 9.0)
    assert answer.rate == 2.0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_chunks_and_blocks_may_be_cut_anywhere(size: int) -> None:
    stream = HEAD + b"".join(chunk(event[:11]) + chunk(event[11:]) for event in EVENTS) + b"0\r\n\r\n"
    status, body = dechunk([(float(i), stream[i : i + size]) for i in range(0, len(stream), size)])
    assert status == 200
    assert b"".join(data for _, data in body) == b"".join(EVENTS)
    assert len(events_of(body)) == len(EVENTS)


def test_a_body_without_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    assert dechunk([(0.0, head + b"ab"), (1.0, b"c")]) == (200, [(0.0, b"ab"), (1.0, b"c")])


def test_refusals_and_torn_streams_are_told() -> None:
    refusal = b'HTTP/1.1 429 Too Many\r\nContent-Length: 9\r\n\r\n{"no": 1}'
    with pytest.raises(BenchError, match=r'status 429: \{"no": 1\}'):
        streamed([(0.0, refusal), (1.0, b"")], 0.0)
    with pytest.raises(BenchError, match="not whole"):
        streamed([(0.0, HEAD + chunk(EVENTS[1])), (1.0, b"")], 0.0)
    with pytest.raises(BenchError, match="status none"):
        streamed([(0.0, b"")], 0.0)
