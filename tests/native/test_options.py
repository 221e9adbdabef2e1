"""The engine's command line, and what it says of files that it cannot use: one line that names what is wrong."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from strata_native import ffi, lib

from tests.native import tiny_model
from tests.native.driver import MODEL, ROOT, Engine, Refused, gen, run
from tests.native.tiny_model import Model, Shape, Tensor

USAGE, CONFIG = 2, 78


# ---- options ---------------------------------------------------------------------------------------------------


def options_of_the_table() -> list[str]:
    """The names in options.c, which parsing and help are made from."""
    return re.findall(r'^    \{"(--[a-z-]+)"', (ROOT / "native" / "src" / "options.c").read_text(), re.M)


def test_help_lists_every_option() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    names = options_of_the_table()
    assert len(names) > 8
    for name in names:
        assert re.search(rf"^  {name}( |$)", done.stdout, re.M), name
    assert "exit status" in done.stdout


def test_the_manual_has_every_option() -> None:
    manual = (ROOT / "man" / "strata-engine.8").read_text()
    for name in options_of_the_table():
        assert f"Fl \\{name[1:]}".replace("-", "\\-").replace("\\\\-", "\\-") in manual, name


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"strata-engine \d+\.\d+\.\d+ \(protocol \d+, arithmetic \d+\)\n", done.stdout)


WRONG = [
    ([], "--model FILE is missing"),
    (["--modle", "x"], "unknown option --modle; did you mean --model?"),
    (["--max-contxt=7"], "did you mean --max-context?"),
    (["--thread", "2"], "did you mean --threads?"),
    (["-h"], "unknown option -h; strata-engine --help lists them"),
    (["model.gguf"], "unknown option model.gguf; strata-engine --help lists them"),
    ([""], "unknown option ; strata-engine --help lists them"),
    (["--" + "x" * 5000], "--help lists them"),
    (["--model"], "--model needs a value (FILE)"),
    (["--model="], "--model is empty"),
    (["--model", "x", "--threads"], "--threads needs a value (N)"),
    (["--model", "x", "--threads", "0"], "--threads 0: an integer from 1 to 512 is wanted"),
    (["--model", "x", "--threads", "513"], "an integer from 1 to 512"),
    (["--model", "x", "--threads", "two"], "--threads two"),
    (["--model", "x", "--threads", "2x"], "--threads 2x"),
    (["--model", "x", "--threads", "99999999999999999999"], "--threads 99999999999999999999"),
    (["--model", "x", "--threads="], "--threads"),
    (["--model", "x", "--max-context", "0"], "--max-context 0: an integer from 1 to"),
    (["--model", "x", "--max-context", "-5"], "--max-context -5"),
    (["--model", "x", "--chunk", "0"], "--chunk 0: an integer from 1 to 4000"),
    (["--model", "x", "--chunk", "4001"], "--chunk 4001"),
    (["--model", "x", "--isa", "sse2"], "--isa sse2: choose one of: auto avx512 avxvnni avx2 scalar"),
    (["--model", "x", "--isa", "avx"], "--isa avx: choose one of"),
    (["--model", "x", "--kv", "q4_1"], "--kv q4_1: choose one of: int8"),
    (["--help=yes"], "--help takes no value"),
    (["--allow-untrained-context=1"], "--allow-untrained-context takes no value"),
    (["--self-test", "many"], "--self-test many"),
]


@pytest.mark.parametrize(("args", "says"), WRONG, ids=[" ".join(w[0])[:40] or "nothing" for w in WRONG])
def test_a_wrong_option_is_named(args: list[str], says: str) -> None:
    done = run(*args)
    assert done.returncode == USAGE
    assert says in done.stderr
    assert done.stderr.startswith("strata-engine: ")
    assert done.stderr.count("\n") == 1
    assert not re.search("^(INFO|READY)", done.stdout, re.M)


def test_values_join_their_option_or_follow_it() -> None:
    for args in (["--threads=3", "--chunk=9"], ["--threads", "3", "--chunk", "9"]):
        with Engine(*args) as engine:
            assert (engine.info["threads"], engine.info["chunk"]) == ("3", "9")


def test_the_last_of_two_counts() -> None:
    with Engine("--threads", "3", "--threads", "1") as engine:
        assert engine.info["threads"] == "1"


def test_strata_isa_chooses_and_the_option_overrides_it() -> None:
    with Engine(env={"STRATA_ISA": "scalar"}) as engine:
        assert engine.info["isa"] == "scalar"
    best = ffi.string(lib.st_kernels_find(b"auto", ffi.NULL).isa).decode()
    with Engine("--isa", best, env={"STRATA_ISA": "scalar"}) as engine:
        assert engine.info["isa"] == best
    with Engine("--isa", "auto", env={"STRATA_ISA": "nonsense"}) as engine:
        assert engine.info["isa"] == best
    done = run("--model", MODEL, env={"STRATA_ISA": "nonsense"})
    assert done.returncode == USAGE
    assert "STRATA_ISA" in done.stderr
    assert "choose auto, avx512, avxvnni, avx2 or scalar" in done.stderr


# ---- context ---------------------------------------------------------------------------------------------------


def test_a_context_beyond_the_trained_one_must_be_allowed() -> None:
    done = run("--model", MODEL, "--max-context", "4097")
    assert_load_failure(done, "usage", USAGE, "4097", "4096", "--allow-untrained-context")
    with Engine("--max-context", "4097", "--allow-untrained-context") as engine:
        assert engine.ready[0] == engine.info["context"] == "4097"
        assert engine.info["trained_context"] == "4096"
    with Engine("--max-context", "4096") as engine:
        assert engine.ready[0] == "4096"


def test_the_smallest_context() -> None:
    with Engine("--max-context", "2") as engine:
        answer = engine.generate([5], 9)
        assert (len(answer.tokens), answer.finish) == (1, "length")


# ---- files -----------------------------------------------------------------------------------------------------


def assert_load_failure(done: Any, name: str, status: int, *says: str) -> None:
    """`ERR name text` is the last line on stdout, the same text is the one line on stderr."""
    assert done.returncode == status
    last = done.stdout.splitlines()[-1]
    word, got, text = last.split(" ", 2)
    assert (word, got) == ("ERR", name)
    assert done.stderr == f"strata-engine: {text}\n"
    for part in says:
        assert part in text
    assert "READY" not in done.stdout


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert_load_failure(run("--model", tmp_path / "no.gguf"), "model_open", CONFIG, "no.gguf", "No such file")


def test_a_directory(tmp_path: Path) -> None:
    assert_load_failure(run("--model", tmp_path), "model_open", CONFIG, tmp_path.name)


@pytest.mark.parametrize("data", [b"", b"GG", b"hello, world\n" * 100, b"\0" * 4096, b"\x7fELF" + b"\1" * 200])
def test_a_file_that_is_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "some.bin"
    path.write_bytes(data)
    assert_load_failure(run("--model", path), "model_format", CONFIG, "some.bin")


@pytest.mark.parametrize("keep", [4, 20, 100, 5000, 150_000, 277_504, 300_000, 4_581_568, 20_000_000, -1])
def test_a_file_that_is_cut_off(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copyfile(MODEL, path)
    with path.open("r+b") as file:
        file.truncate(keep if keep > 0 else path.stat().st_size + keep)
    assert_load_failure(run("--model", path), "model_format", CONFIG, "cut.gguf")


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_head_never_crashes(tmp_path: Path, seed: int) -> None:
    """Random bytes in the metadata and the tensor table of a small model: it loads, or says why not."""
    path = tiny_model.model().write(tmp_path / "damaged.gguf")
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(seed)
    for at in rng.integers(4, len(data) // 4, 4):
        data[at] = rng.integers(256)
    path.write_bytes(data)
    done = run("--model", path, "--threads", "1", "--max-context", "8")
    assert done.returncode in (0, 1, USAGE, CONFIG)
    assert done.stdout.splitlines()[-1].split()[0] == ("READY" if done.returncode == 0 else "ERR")


def test_a_small_model_loads_and_answers(tmp_path: Path) -> None:
    """The ground that the next tests stand on."""
    path = tiny_model.model().write(tmp_path / "tiny.gguf")
    with Engine("--threads", "2", model=path) as engine:
        assert engine.info["vocab"] == "48"
        answer = engine.generate([1, 2, 3], 20, logprobs=2)
        assert len(answer.tokens) == 20


Change = Callable[[Model], None]


def drop(name: str) -> Change:
    def change(m: Model) -> None:
        del m.tensors[name]

    return change


def reshape(name: str, *shape: int) -> Change:
    def change(m: Model) -> None:
        old = m.tensors[name]
        m.tensors[name] = Tensor(np.resize(old.values, shape), old.type)

    return change


def retype(name: str, type: Type) -> Change:
    def change(m: Model) -> None:
        m.tensors[name] = Tensor(m.tensors[name].values, type)

    return change


def spoil(name: str, value: float) -> Change:
    def change(m: Model) -> None:
        m.tensors[name].values.flat[1] = value

    return change


def key(name: str, value: Any) -> Change:
    def change(m: Model) -> None:
        if value is None:
            del m.meta[name]
        else:
            m.meta[name] = value

    return change


BROKEN: list[tuple[Change, str, tuple[str, ...]]] = [
    *((drop(t), "model_format", (t, "missing")) for t in tiny_model.model().tensors if t != "output.weight"),
    (reshape("blk.0.attn_qkv.weight", 80, 32), "model_format", ("blk.0.attn_qkv.weight", "[32, 80, 1]", "[32, 64, 1]")),
    (reshape("blk.0.ffn_gate_exps.weight", 3, 32, 32), "model_format", ("blk.0.ffn_gate_exps.weight", "[32, 32, 3]")),
    (reshape("blk.1.attn_q_norm.weight", 32), "model_format", ("blk.1.attn_q_norm.weight", "[32, 1, 1]", "[16, 1, 1]")),
    (reshape("token_embd.weight", 48, 64), "model_format", ("token_embd.weight", "64", "32")),
    (reshape("output.weight", 64, 32), "model_format", ("output.weight", "[32, 64, 1]", "[32, 48, 1]")),
    (reshape("blk.0.ssm_conv1d.weight", 64, 5), "model_format", ("blk.0.ssm_conv1d.weight",)),
    (retype("blk.1.attn_k.weight", Type.MXFP4), "model_unsupported", ("blk.1.attn_k.weight", "MXFP4", "Q5_K, Q6_K")),
    (retype("blk.0.ffn_down_exps.weight", Type.MXFP4), "model_unsupported", ("blk.0.ffn_down_exps.weight", "MXFP4")),
    (retype("blk.0.ssm_alpha.weight", Type.MXFP4), "model_unsupported", ("blk.0.ssm_alpha.weight", "MXFP4")),
    (spoil("blk.0.ssm_norm.weight", np.nan), "model_format", ("blk.0.ssm_norm.weight", "not finite", "at 1")),
    (spoil("output_norm.weight", np.inf), "model_format", ("output_norm.weight", "not finite")),
    (key("general.architecture", "gpt9"), "model_unsupported", ("gpt9", "qwen35moe")),
    (key("block_count", 0), "model_format", ("qwen35moe.block_count is 0",)),
    (key("block_count", 3), "model_format", ("blk.2.", "missing")),
    (key("block_count", None), "model_format", ("qwen35moe.block_count is missing",)),
    (key("block_count", "two"), "model_format", ("qwen35moe.block_count",)),
    (key("block_count", -1), "model_format", ("qwen35moe.block_count",)),
    (key("context_length", None), "model_format", ("qwen35moe.context_length is missing",)),
    (key("embedding_length", 33), "model_unsupported", ("embedding_length 33",)),
    (key("attention.head_count", 3), "model_unsupported", ("attention width 3 x 16",)),
    (key("attention.head_count_kv", 0), "model_format", ("head_count_kv",)),
    (key("attention.head_count_kv", 4), "model_format", ("head_count 2", "head_count_kv 4")),
    (key("attention.value_length", 32), "model_unsupported", ("value_length 32", "key_length 16")),
    (key("attention.key_length", 4096), "model_format", ("key_length is 4096",)),
    (key("attention.layer_norm_rms_epsilon", None), "model_format", ("layer_norm_rms_epsilon is missing",)),
    (key("attention.layer_norm_rms_epsilon", -1.0), "model_format", ("layer_norm_rms_epsilon is -1",)),
    (key("rope.dimension_count", 18), "model_format", ("rope.dimension_count is 18",)),
    (key("rope.dimension_count", 7), "model_format", ("rope.dimension_count 7 is odd",)),
    (key("rope.freq_base", float("nan")), "model_format", ("rope.freq_base",)),
    (key("expert_count", 0), "model_format", ("expert_count is 0",)),
    (key("expert_count", 2**31), "model_format", ("expert_count",)),
    (key("expert_used_count", 5), "model_format", ("expert_used_count 5", "expert_count 4")),
    (key("expert_feed_forward_length", 48), "model_unsupported", ("expert widths 48",)),
    (key("ssm.conv_kernel", 3), "model_format", ("ssm.conv_kernel is 3",)),
    (key("ssm.group_count", 3), "model_format", ("time_step_rank 2", "group_count 3")),
    (key("ssm.inner_size", 48), "model_format", ("inner_size 48",)),
    (key("ssm.state_size", None), "model_format", ("ssm.state_size is missing",)),
    (key("nextn_predict_layers", 2), "model_format", ("block_count 2", "MTP")),
    (key("attention.recurrent_layers", [True]), "model_format", ("recurrent_layers", "1 entries")),
]


@pytest.mark.parametrize(("change", "name", "says"), BROKEN, ids=[" ".join(b[2])[:50] for b in BROKEN])
def test_a_model_with_one_thing_wrong_is_refused_by_name(
    tmp_path: Path, change: Change, name: str, says: tuple[str, ...]
) -> None:
    m = tiny_model.model()
    change(m)
    path = m.write(tmp_path / "broken.gguf")
    assert_load_failure(run("--model", path, "--threads", "1"), name, CONFIG, *says)


def test_an_embedding_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    m = tiny_model.model()
    m.tensors["token_embd.weight"].type = Type.MXFP4
    done = run("--model", m.write(tmp_path / "m.gguf"))
    assert_load_failure(done, "model_unsupported", CONFIG, "token_embd.weight", "MXFP4")


def test_a_model_without_output_weight_uses_the_embedding(tmp_path: Path) -> None:
    m = tiny_model.model()
    del m.tensors["output.weight"]
    tied = m.write(tmp_path / "tied.gguf")
    m.tensors["output.weight"] = m.tensors["token_embd.weight"]
    untied = m.write(tmp_path / "untied.gguf")
    answers = []
    for path in (tied, untied):
        with Engine("--threads", "1", model=path) as engine:
            answers.append(engine.generate([1, 2, 3], 10, logprobs=3))
    assert (answers[0].tokens, answers[0].logprobs) == (answers[1].tokens, answers[1].logprobs)


SHAPES = [
    Shape(),
    Shape(heads=8, kv_heads=4, head_dim=20, rot=20, layers=3, interval=3),  # no multiple of 16: the slow path
    Shape(heads=2, head_dim=80, rot=16, embd=96),  # a whole and a part of a key/value group
    Shape(key_heads=2, value_heads=4, state=24, experts=7, used=7, layers=4, interval=4),
    Shape(key_heads=3, value_heads=6, state=32, ff=96, shared_ff=64, used=1, interval=1),  # attention alone
    Shape(embd=288, ff=320, experts=33, used=5, vocab=1008, layers=1),  # recurrent alone, segments that end short
]


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
@pytest.mark.parametrize("types", [(Type.Q8_0, Type.Q4_0), (Type.F32, Type.Q8_0), (Type.Q4_0, Type.F32)], ids=str)
def test_models_of_odd_shapes_give_the_same_bits_however_they_run(
    tmp_path: Path, shape: Shape, types: tuple[Type, Type]
) -> None:
    path = tiny_model.model(shape, 5, *types).write(tmp_path / "odd.gguf")
    ids = [int(i) for i in np.random.default_rng(1).integers(0, shape.vocab, 130)]
    answers = []
    for args in (
        ["--threads=1", "--isa=scalar"],
        ["--threads=2"],
        ["--threads=5", "--chunk=3"],
        ["--threads=3", "--chunk=17"],
    ):
        with Engine(*args, model=path) as engine:
            answers.append(engine.generate(ids, 12, logprobs=5, temperature=1, seed=3, timeout=120))
    for answer in answers[1:]:
        assert (answer.tokens, answer.logprobs, answer.tops) == (
            answers[0].tokens,
            answers[0].logprobs,
            answers[0].tops,
        )
    assert all(np.isfinite(answers[0].logprobs))


def test_weights_that_are_no_numbers_end_a_request_with_a_named_error(tmp_path: Path) -> None:
    """Nobody finds an infinite scale inside a quantised matrix at load; the request fails then, the engine does not."""
    m = tiny_model.model()
    path = m.write(tmp_path / "infinite.gguf")
    reader = gguf.GGUFReader(path)
    at = next(t.data_offset for t in reader.tensors if t.name == "blk.0.ssm_out.weight")
    del reader
    data = bytearray(path.read_bytes())
    data[at : at + 2] = struct.pack("<e", float("inf"))
    path.write_bytes(data)
    with Engine("--threads", "2", model=path) as engine:
        for _ in range(2):
            with pytest.raises(Refused, match="non_finite"):
                engine.generate([1, 2, 3], 4)
        engine.send("STAT")
        assert engine.line().startswith("STAT ")
        engine.send(gen([1], 0))
        assert engine.line().startswith("ERR bad_max_new")
