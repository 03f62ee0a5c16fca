"""Conversions that are killed, run out of disk space, or get wrong data from the disk.

None is marked complete unless it has exactly the bytes of an undisturbed conversion.
"""

import errno
import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import dsv3_jax
from dsv3_jax.checkpoint import journal
from dsv3_jax.checkpoint.array_files import ArrayFiles
from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX
from tests.checkpoint.values import small_config
from tests.support import children
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.children import Child, FailingReads
from tests.support.command import run
from tests.support.covering import slow_except
from tests.support.trees import contents, snapshot

MANIFEST, JOURNAL = "manifest.json", "journal.jsonl"
TARGETS = ("fp8", "bf16", "int8", "int4")
SHARD = "model-00002-of-00003.safetensors"
ROOT = Path(__file__).parents[2]

Convert = Callable[..., object]


def fp8_checkpoint(directory: Path, config: dict, seed: int = 0) -> Path:
    tensors = random_tensors(config, seed)
    options = {"dtype": "fp8", "shards": 3, "scales_in_other_shard": True}
    write_checkpoint(directory, config, tensors, **options)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 128}\n')
    return directory


@pytest.fixture(autouse=True)
def no_sync(monkeypatch) -> None:
    """Replaces syncs. Only a power cut, not the death of a process, loses unsynced writes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return fp8_checkpoint(tmp_path_factory.mktemp("sound") / "source", small_config())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, sound) -> dict[str, tuple[Path, int]]:
    """Returns undisturbed stores and the number of reads of their conversions, by target."""
    folder = tmp_path_factory.mktemp("wholes")
    made = {}
    for target in TARGETS:
        with pytest.MonkeyPatch.context() as patch:
            counting = FailingReads(after=sys.maxsize)
            patch.setattr(os, "preadv", counting)
            convert(sound, folder / target, target, workers=1)
        made[target] = folder / target, counting.calls
    return made


@pytest.fixture(scope="module")
def wholes(undisturbed) -> dict[str, Path]:
    return {target: store for target, (store, _) in undisturbed.items()}


@pytest.fixture(scope="module")
def reads(undisturbed) -> dict[str, int]:
    return {target: count for target, (_, count) in undisturbed.items()}


@pytest.fixture
def source(tmp_path, sound) -> Path:
    """Returns a copy of the source that a test may change."""
    return shutil.copytree(sound, tmp_path / "source")


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="module")
def halves(tmp_path_factory, sound, reads) -> Callable[[str, float], Path]:
    """Returns stores whose conversion ended by a disk error after a share of the reads."""

    @functools.cache
    def convert_in_part(target: str, share: float) -> Path:
        store = tmp_path_factory.mktemp("halves") / "store"
        with pytest.MonkeyPatch.context() as patch:
            after = int((reads[target] - 1) * share)
            patch.setattr(os, "preadv", FailingReads(after))
            message = refusal(sound, store, target, workers=1)
        assert os.strerror(errno.EIO) in message
        assert journal_lines(store)
        return store

    return convert_in_part


@pytest.fixture
def interrupted(store, halves) -> Callable[..., Path]:
    """Returns a copy of such a store. By default the error was at the last read."""

    def interrupt(target: str = "fp8", *, share: float = 1.0) -> Path:
        return shutil.copytree(halves(target, share), store)

    return interrupt


def refusal(source: Path, store: Path, target: str, **options) -> str:
    """Expects a conversion to fail with one line, and the store not to be marked complete."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        convert(source, store, target, **options)
    line = str(caught.value)
    assert re.fullmatch(r".{10,500}", line), line
    assert not (store / MANIFEST).exists()
    return line


def journal_lines(store: Path) -> int:
    """Returns the number of lines, or 0 without a journal. It may disappear at any moment."""
    try:
        return (store / JOURNAL).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def converted_tensors(store: Path) -> list[str]:
    """Returns the source's tensors that the journal lists as converted."""
    lines = (store / JOURNAL).read_text().splitlines()
    return [name for line in lines for name in json.loads(line).get("source", {})]


def assert_whole(store: Path, whole: Path) -> None:
    """Expects the exact files of an undisturbed conversion."""
    got, expected = contents(store), contents(whole)
    assert sorted(got) == sorted(expected)
    assert [name for name in expected if got[name] != expected[name]] == []


def resumed(source: Path, store: Path, target: str) -> str | None:
    """Returns the line with which a resumed conversion is refused, or None if it completes."""
    try:
        convert(source, store, target, resume=True)
    except ValueError as error:
        return str(error)
    return None


def assert_right_or_refused(source: Path, store: Path, target: str, whole: Path) -> bool:
    """Resumes, and expects a one-line refusal or completion. Returns whether it was refused."""
    if (line := resumed(source, store, target)) is not None:
        assert re.fullmatch(r".{10,500}", line), line
        assert not (store / MANIFEST).exists()
        return True
    assert_whole(store, whole)
    return False


# ---- killed --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory) -> Path:
    """Returns a model with 128 experts, each large enough to have a file of its own in a store."""
    config = tiny_config(
        hidden_size=160,
        moe_intermediate_size=128,
        n_routed_experts=64,
        num_hidden_layers=2,
    )
    return fp8_checkpoint(tmp_path_factory.mktemp("many") / "source", config)


def wait_for_lines(child: Child, store: Path, lines: int) -> None:
    until = time.monotonic() + 120
    while child.running and journal_lines(store) < lines:
        assert time.monotonic() < until, child.output
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_killed_at_random_moments(many_experts, tmp_path, target):
    """Sends SIGKILL at a random time after a number of journal lines, and resumes."""
    whole, store = tmp_path / "whole", tmp_path / "store"
    before = snapshot(many_experts)
    slowly = partial(children.slow_reads, 0.001)
    command = ("convert", many_experts, store, "--to", target)
    undisturbed = Child(tmp_path / "log", *command[:2], whole, *command[3:], hook=slowly)
    began, lines = time.monotonic(), 0
    while undisturbed.running:
        lines = max(lines, journal_lines(whole))
    assert undisturbed.wait() == 0, undisturbed.output
    assert lines > 300
    per_line = (time.monotonic() - began) / lines
    kills = 20
    rng = random.Random(f"{target}, {kills}")
    at = []
    for moment in sorted(rng.sample(range(1, lines - 20), kills)):
        resume = ("--resume",) if store.exists() else ()
        child = Child(tmp_path / "log", *command, *resume, hook=slowly)
        wait_for_lines(child, store, moment)
        time.sleep(rng.uniform(0, 4 * per_line))
        child.kill()
        assert child.wait() == -signal.SIGKILL, child.output
        assert not (store / MANIFEST).exists()
        at.append(journal_lines(store))
    assert at == sorted(at)
    assert len(set(at)) > kills // 2
    child = Child(tmp_path / "log", *command, "--resume")
    assert child.wait() == 0, child.output
    assert_whole(store, whole)
    assert snapshot(many_experts) == before


@pytest.mark.slow
def test_a_killed_process_of_the_system(many_experts, tmp_path):
    """Every run has an interpreter of its own, as for users."""
    script = (
        "import os, sys, time\n"
        "read = os.preadv\n"
        "def slowly(*arguments):\n"
        "    time.sleep(0.005)\n"
        "    return read(*arguments)\n"
        "os.preadv = slowly\n"
        "from dsv3_jax.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    whole, store = tmp_path / "whole", tmp_path / "store"
    convert(many_experts, whole, "bf16")
    arguments = ["convert", str(many_experts), str(store), "--to", "bf16", "--resume"]
    for moment in (2, 100, 300):
        process = subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT)
        with process:
            while process.poll() is None and journal_lines(store) < moment:
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        assert not (store / MANIFEST).exists()
    subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, check=True)
    assert_whole(store, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "edge", "middle"), [(target, 10, 8) for target in ("fp8", "int4")]
)
def test_killed_at_every_kind_of_call(sound, wholes, tmp_path, target, edge, middle):
    """Kills the process from inside, at calls that create the store, write headers, or complete it.

    Chunks are written by native code, which the tests above interrupt.
    """
    store, touched = tmp_path / "store", tmp_path / "touched"
    command = ("convert", sound, store, "--to", target)
    counting = partial(children.counts_touches, str(store), str(touched))
    child = Child(tmp_path / "log", *command, hook=counting)
    assert child.wait() == 0, child.output
    assert_whole(store, wholes[target])
    shutil.rmtree(store)
    count = len(touched.read_text().splitlines())
    assert count > 30
    between = random.Random(5).sample(range(edge + 1, count - edge), middle)
    died = 0
    for number in (*range(1, edge + 1), *sorted(between), *range(count - edge, count + 1)):
        dying = partial(children.dies_at, str(store), number)
        child = Child(tmp_path / "log", *command, "--resume", hook=dying)
        status = child.wait()
        assert status in (-signal.SIGKILL, 0), child.output  # calls vary with several threads
        died += status != 0
        child = Child(tmp_path / "log", *command, "--resume")
        assert child.wait() == 0, child.output
        assert_whole(store, wholes[target])
        shutil.rmtree(store)
    assert died >= 2 * edge


def test_control_c(sound, wholes, tmp_path):
    store = tmp_path / "store"
    command = ("convert", sound, store, "--to", "fp8")
    # Half a minute without interruption, which is longer than any pause of this process.
    child = Child(tmp_path / "log", *command, hook=partial(children.slow_reads, 0.4))
    wait_for_lines(child, store, 2)
    child.interrupt()
    assert child.wait() == 130, child.output
    assert "Traceback" not in child.output
    assert not (store / MANIFEST).exists()
    convert(sound, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


@pytest.mark.slow
def test_two_at_once(many_experts, tmp_path):
    """The second conversion is refused, and the first one is not disturbed."""
    store, whole = tmp_path / "store", tmp_path / "whole"
    command = ("convert", many_experts, store, "--to", "fp8", "--resume")
    first = Child(tmp_path / "log", *command, hook=partial(children.slow_reads, 0.002))
    wait_for_lines(first, store, 5)
    assert re.search(r"store.* another process", refusal(many_experts, store, "fp8", resume=True))
    assert first.wait() == 0, first.output
    convert(many_experts, whole, "fp8")
    assert_whole(store, whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("target", ["fp8", "int4"])
def test_workers_do_not_matter(sound, wholes, store, target, workers):
    convert(sound, store, target, workers=workers)
    assert_whole(store, wholes[target])


# ---- the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "limit"),
    [
        ("int4", 10_000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("fp8", 1_000), ("fp8", 3_000), ("fp8", 15_000), ("bf16", 6_000)]
        ),
    ],
)
def test_files_that_cannot_grow(sound, wholes, tmp_path, store, target, limit):
    command = ("convert", sound, store, "--to", target)
    child = Child(tmp_path / "log", *command, hook=partial(children.small_files, limit))
    assert child.wait() == 2, child.output
    line = child.output.splitlines()[-1]
    assert re.fullmatch(rf"dsv3 convert: error: .*{re.escape(str(store))}.*", line)
    assert os.strerror(errno.EFBIG) in line
    assert "Traceback" not in child.output
    assert not (store / MANIFEST).exists()
    child = Child(tmp_path / "log", *command, "--resume")
    assert child.wait() == 0, child.output
    assert_whole(store, wholes[target])


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of a given size. A second call changes the size."""
    where = tmp_path / "disk"
    where.mkdir()

    def mount(size: int) -> Path:
        options = f"size={size}" + (",remount" if os.path.ismount(where) else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
        if shutil.which("mount") is None:
            pytest.skip("no small disk to fill here: a tmpfs needs the mount command")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no small disk to fill here: {done.stderr.strip()}")
        return where

    yield mount
    if os.path.ismount(where):
        subprocess.run(["umount", str(where)], check=True)


def size_on_disk(directory: Path) -> int:
    """Returns the size in whole pages, as tmpfs counts it."""
    return sum(-(-len(data) // 4096) * 4096 for data in contents(directory).values() if data)


@pytest.mark.parametrize(
    ("target", "share"),
    [
        ("fp8", 0.4),
        ("int8", 0.8),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("fp8", 0.02), ("fp8", 0.97), ("bf16", 0.4)]
        ),
    ],
)
def test_a_full_disk(sound, wholes, tmp_path, small_disk, target, share):
    room = int(size_on_disk(wholes[target]) * share)
    store = small_disk(room) / "store"
    command = ("convert", sound, store, "--to", target)
    child = Child(tmp_path / "log", *command, hook=children.believes_in_space)
    assert child.wait() == 2, child.output
    line = child.output.splitlines()[-1]
    assert re.fullmatch(rf"dsv3 convert: error: .*{re.escape(str(store))}.*", line)
    assert os.strerror(errno.ENOSPC) in line
    assert not (store / MANIFEST).exists()
    small_disk(50_000_000)
    child = Child(tmp_path / "log", *command, "--resume")
    assert child.wait() == 0, child.output
    assert_whole(store, wholes[target])


def test_too_small_a_disk_is_seen_first(sound, small_disk):
    store = small_disk(100_000) / "store"
    assert re.search(r"store: .*bytes", refusal(sound, store, "fp8"))
    assert not store.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "share"),
    slow_except(
        [("fp8", 0), ("bf16", 0.1), ("int8", 0.5), ("int4", 0.9), *((t, 1) for t in TARGETS)],
        quick=(0, 3),
    ),
)
def test_a_source_that_cannot_be_read(source, wholes, interrupted, target, share):
    before = snapshot(source)
    store = interrupted(target, share=share)
    convert(source, store, target, resume=True)
    assert_whole(store, wholes[target])
    assert snapshot(source) == before


def test_a_read_error_names_the_file(source, store, reads, monkeypatch):
    monkeypatch.setattr(os, "preadv", FailingReads(reads["bf16"] // 2))
    line = refusal(source, store, "bf16")
    assert re.search(r"model-0000\d-of-00003\.safetensors|model\.\S+weight", line), line
    assert "--resume" in line


def test_a_source_that_shrinks_meanwhile(source, store, monkeypatch):
    """A tensor exists when the headers are read, but not when its values are."""
    real = os.preadv

    def preadv(*arguments):
        os.truncate(source / SHARD, 5_000)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert SHARD in refusal(source, store, "bf16")


# ---- a source that changes between runs ----------------------------------------------------------


def flip(path: Path, at: int) -> None:
    """Flips the lowest bit of a byte, so that the number is another finite one."""
    content = bytearray(path.read_bytes())
    while content[at] & 0x7F in (0x7E, 0x7F, 0x80, 0):
        at += 1
    content[at] ^= 1
    write_unnoticed(path, bytes(content))


def write_unnoticed(path: Path, content: bytes) -> None:
    """Writes a file without changing its modification time and mostly not its size."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip_tensor(source: Path, name: str) -> None:
    path = source / json.loads((source / INDEX).read_text())["weight_map"][name]
    header, _ = files.split(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, 8 + length + header[name]["data_offsets"][0])


KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("fp8", "model.layers.0.input_layernorm.weight"),
        ("fp8", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("fp8", "model.norm.weight"),
        ("fp8", KV_A),
        ("fp8", f"{KV_A}_scale_inv"),
        ("bf16", KV_A),
        ("bf16", f"{KV_A}_scale_inv"),
        ("int8", EXPERT),
        ("int4", f"{EXPERT}_scale_inv"),
    ],
)
def test_a_converted_tensor_that_changed(source, wholes, interrupted, target, name):
    store = interrupted(target)
    assert name in converted_tensors(store)
    sound = {path: path.read_bytes() for path in source.glob("*.safetensors")}
    flip_tensor(source, name)
    assert name in refusal(source, store, target, resume=True)
    assert name in refusal(source, store, target, resume=True)  # a refusal repairs nothing
    for path, content in sound.items():
        write_unnoticed(path, content)
    convert(source, store, target, resume=True)
    assert_whole(store, wholes[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "share"),
    slow_except([*itertools.product(["fp8", "int8"], [0.05, 0.3, 0.6, 0.95])], quick=(1, 7)),
)
def test_any_tensor_that_changed(source, interrupted, tmp_path, target, share):
    """If the tensor was not converted yet, all of its new values are used."""
    store = interrupted(target, share=share)
    names = sorted(json.loads((source / INDEX).read_text())["weight_map"])
    copied = ("embed_tokens.weight", "head.weight")
    rng = random.Random(f"{target} {share}")
    name = rng.choice([name for name in names if not name.endswith(copied)])
    done = name in converted_tensors(store)
    flip_tensor(source, name)
    fresh = tmp_path / "fresh"
    convert(source, fresh, target)
    assert assert_right_or_refused(source, store, target, fresh) == done


def another_seed(source: Path) -> None:
    config = small_config()
    fp8_checkpoint(source.with_name("other"), config, seed=1)
    shutil.copy(source.with_name("other") / SHARD, source / SHARD)


def another_constant(source: Path) -> None:
    files.edit_json(source / CONFIG, lambda config: config.update(routed_scaling_factor=2.0))


def another_split(source: Path) -> None:
    """Writes the same tensors, one of them in another shard."""
    name = next(iter(files.read(source / SHARD)))
    moved = files.read(source / SHARD)[name]
    other = "model-00003-of-00003.safetensors"
    files.edit(source / SHARD, lambda tensors: tensors.pop(name))
    files.edit(source / other, lambda tensors: tensors.update({name: moved}))
    files.edit_json(source / INDEX, lambda index: index["weight_map"].update({name: other}))


def another_order(source: Path) -> None:
    header, data = files.split(source / SHARD)
    files.join(source / SHARD, dict(reversed(header.items())), data)


def without_mtp(source: Path) -> None:
    def is_mtp(name: str) -> bool:
        return name.startswith("model.layers.2.")

    for path in source.glob("*.safetensors"):
        remaining = {name: t for name, t in files.read(path).items() if not is_mtp(name)}
        files.write(path, remaining)
    index = json.loads((source / INDEX).read_text())
    remaining = {name: file for name, file in index["weight_map"].items() if not is_mtp(name)}
    (source / INDEX).write_text(json.dumps(index | {"weight_map": remaining}))


CHANGES = {
    "shard of another model": (another_seed, rf"{SHARD}|model\.\S+"),
    "a constant": (another_constant, "config.json|routed_scaling_factor"),
    "shards split otherwise": (another_split, r"model-0000\d-of-00003|model\.\S+"),
    "header in another order": (another_order, SHARD),
    "MTP layer removed": (without_mtp, r"config|model"),
}


@pytest.mark.parametrize(
    ("target", "change"), [*(("fp8", change) for change in CHANGES), ("int8", "a constant")]
)
def test_another_source(source, interrupted, target, change):
    store = interrupted(target)
    make, message = CHANGES[change]
    make(source)
    before = contents(store)
    assert re.search(message, refusal(source, store, target, resume=True))
    # The store is unchanged by the refusal, and the source may be restored.
    weights = {n: data for n, data in before.items() if n.startswith("weights")}
    after = contents(store)
    assert {n: after.get(n, b"none") for n in weights} == weights


def test_a_tokenizer_that_changed(source, interrupted, tmp_path):
    store = interrupted()
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    fresh = tmp_path / "fresh"
    convert(source, fresh, "fp8")
    assert_right_or_refused(source, store, "fp8", fresh)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fp8", "int4"])
def test_timestamps_and_paths_do_not_matter(source, wholes, interrupted, tmp_path, target):
    """The same bytes are in another directory, with later times, and in another order of files."""
    store = interrupted(target, share=0.6)
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    shutil.rmtree(source)
    for number, path in enumerate(sorted(moved.iterdir(), reverse=True)):
        os.utime(path, (10**9 + number, 10**9 + number))
    convert(moved, store, target, resume=True)
    assert_whole(store, wholes[target])


# ---- a store that is spoiled between runs --------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line(source, wholes, interrupted, cut):
    store = interrupted()
    journal = store / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    convert(source, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


def test_a_line_without_its_end_does_not_count():
    """An appended line would otherwise become part of it."""
    whole = b'{"to": "fp8"}\n'
    assert journal._parse(whole + b'{"unit": "a"}') == ([{"to": "fp8"}], len(whole))


@pytest.mark.slow
@pytest.mark.parametrize("tail", [b'{"unit": "lay', b"\0" * 64, b"\xff\xfe", b"{", b"[]\n", b"\n"])
def test_garbage_after_the_last_line(source, wholes, interrupted, tail):
    """A power cut may leave such bytes of a block that was never written."""
    store = interrupted()
    with (store / JOURNAL).open("ab") as file:
        file.write(tail)
    convert(source, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "gone", "first line torn", "garbage", "middle lost"])
def test_a_spoiled_journal(source, wholes, interrupted, damage):
    store = interrupted()
    journal = store / JOURNAL
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    spoiled = {
        "empty": b"",
        "first line torn": content[:20],
        "garbage": b"\0" * len(content),
        "middle lost": b"".join(lines[:5] + lines[-5:]),
    }
    journal.unlink()
    if damage in spoiled:
        journal.write_bytes(spoiled[damage])
    assert_right_or_refused(source, store, "fp8", wholes["fp8"])


@pytest.mark.slow
def test_odd_lines_in_a_journal(source, wholes, interrupted):
    """JSON that no conversion writes is refused with its line number, and nothing is changed."""
    store = interrupted("int8")
    journal = store / JOURNAL
    content = journal.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    copy = next(i for i, line in enumerate(lines) if "model.layers.2.embed" in line.get("unit", ""))
    unit = next(i for i, line in enumerate(lines) if "error" in line)
    error = lines[unit]["error"]
    odd = [
        *((0, {key: value}) for key in lines[0] for value in (None, 5, [1])),
        (0, {"files": {SHARD: 5}}),
        *((unit, {key: value}) for key in lines[unit] for value in (None, 5, [[]], {"a": 1})),
        *((unit, {"error": error | {key: value}}) for key in error for value in (None, [], -1)),
        (unit, {"error": error | {"weight": 10**400}}),
        (unit, {"error": None, "source": {}}),
        (unit, {"source": {"model.norm.weight": "00"}}),
        (unit, {"source": lines[unit]["source"] | {"no such tensor": "00"}}),
        (unit, {"unit": "no such unit", "source": {"no such tensor": "00"}}),
        (copy, {"source": {}}),
        (copy, {"stored": {"model.norm.weight": "00"}}),
    ]
    cases = [(i, lines[i] | change) for i, change in odd]
    cases += [(unit, {"undo": []}), (unit, {"stats": 5}), (unit, {}), (unit, {"done": "x"})]
    for number, line in cases:
        changed = [*lines[:number], line, *lines[number + 1 :]]
        journal.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in changed))
        before = contents(store)
        message = refusal(source, store, "int8", resume=True)
        assert f"{JOURNAL}, line {number + 1}: expected " in message, line
        assert contents(store) == before
    journal.write_bytes(content + b"[" * 10**5 + b"\n")  # deeper than Python's parser goes
    convert(source, store, "int8", resume=True)
    assert_whole(store, wholes["int8"])


@pytest.mark.parametrize(("first", "then"), [("fp8", "bf16"), ("int8", "int4"), ("bf16", "fp8")])
def test_a_journal_of_another_target(source, wholes, interrupted, first, then):
    store = interrupted(first)
    before = contents(store)
    line = refusal(source, store, then, resume=True)
    assert re.search(rf"\b{first}\b", line)
    assert re.search(rf"\b{then}\b", line)
    assert contents(store) == before
    convert(source, store, first, resume=True)
    assert_whole(store, wholes[first])


def test_a_journal_out_of_another_store(source, wholes, interrupted, store):
    """Its lines list all units as done, although this store has none."""
    journal = (interrupted() / JOURNAL).read_bytes()
    shutil.rmtree(store)
    store.mkdir()
    (store / JOURNAL).write_bytes(journal)
    assert_right_or_refused(source, store, "fp8", wholes["fp8"])


def spoil(path: Path, damage: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    changed = {
        "a bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "the first bit": bytes([content[0] ^ 1]) + content[1:],
        "zeros": bytes(len(content)),
        "truncated": content[:middle],
        "empty": b"",
        "longer": content + b"\0",
    }
    if damage == "deleted":
        path.unlink()
    else:
        write_unnoticed(path, changed[damage])


SPOILS = ["a bit", "the first bit", "zeros", "truncated", "empty", "longer", "deleted"]


def chunks(store: Path) -> list[Path]:
    """Returns the files of array data."""
    paths = (path for path in sorted((store / "weights").rglob("*")) if path.is_file())
    return [path for path in paths if path.name != "zarr.json" and not path.name.startswith("_")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "damage"),
    [*(("fp8", damage) for damage in SPOILS), ("int4", "a bit"), ("bf16", "deleted")],
)
def test_spoiled_chunks_are_written_again(source, wholes, interrupted, target, damage):
    store = interrupted(target)
    paths = chunks(store)
    assert len(paths) > 30
    for path in random.Random(damage).sample(paths, 5):
        spoil(path, damage)
    convert(source, store, target, resume=True)
    assert_whole(store, wholes[target])


OTHER_SPOILS = ["a bit", "truncated", "longer", "deleted"]


@pytest.mark.parametrize(
    "damages",
    ["alternately", *(pytest.param(damage, marks=pytest.mark.slow) for damage in OTHER_SPOILS)],
)
def test_other_spoiled_files(source, wholes, interrupted, tmp_path, damages):
    """Covers headers of arrays, orbax's own files, and copies of the source's small files."""
    cycle = itertools.cycle(OTHER_SPOILS if damages == "alternately" else [damages])
    store = interrupted("bf16")
    every = [path for path in sorted(store.rglob("*")) if path.is_file() and path.stat().st_size]
    others = [path for path in every if path not in chunks(store) and path.name != JOURNAL]
    headers = [path for path in others if path.name == "zarr.json"]
    assert headers
    backup = shutil.copytree(store, tmp_path / "backup")
    wrong = []
    for path in [path for path in others if path not in headers[1:-1]]:
        spoil(path, damage := next(cycle))
        if (line := resumed(source, store, "bf16")) is None:
            if contents(store) != contents(wholes["bf16"]):
                wrong.append(f"{path.relative_to(store)}: {damage}: not noticed")
        elif not re.fullmatch(r".{10,500}", line) or (store / MANIFEST).exists():
            wrong.append(f"{path.relative_to(store)}: {line}")
        shutil.rmtree(store)
        shutil.copytree(backup, store)
    assert not wrong, "\n".join(wrong)


def test_written_values_are_read_back(source, store, monkeypatch):
    """A disk may report success and store other bytes."""
    write = ArrayFiles.write

    def forgets(self, name, begin, block):
        write(self, name, begin, block * 0 if name == "norm.weight" else block)

    monkeypatch.setattr(ArrayFiles, "write", forgets)
    line = refusal(source, store, "fp8")
    assert re.search(
        r"model\.norm\.weight.*the data read back differs from the data written", line
    ), line


def test_files_of_a_killed_writer(source, wholes, interrupted):
    """TensorStore and the manifest write a file next to the target and rename it."""
    store = interrupted()
    leavings = [chunks(store)[0].with_name("0.__lock"), store / ".manifest.json.0a1b2c3d.partial"]
    for path in leavings:
        path.write_bytes(b"half")
    convert(source, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


# ---- where from and where to ---------------------------------------------------------------------


@pytest.mark.parametrize("where", ["source", "source/store", "source/deep/er", "link/store", "."])
def test_source_and_destination_are_separate(source, tmp_path, where):
    (tmp_path / "link").symlink_to(source)
    before = snapshot(source)
    for resume in (False, True):
        line = refusal(source, tmp_path / where, "fp8", resume=resume)
        assert Path(where).name in line or "source" in line
    assert snapshot(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "source"]


@pytest.mark.parametrize("what", ["file", "stranger", "checkpoint"])
def test_a_destination_that_is_something_else(source, sound, store, what):
    """Foreign files are never overwritten, with or without --resume."""
    if what == "file":
        store.write_text("mine")
    elif what == "stranger":
        store.mkdir()
        (store / "thesis.txt").write_text("mine")
    else:
        shutil.copytree(sound, store)
    before = store.read_text() if what == "file" else snapshot(store)
    for resume in (False, True):
        assert "store" in refusal(source, store, "fp8", resume=resume)
    assert (store.read_text() if what == "file" else snapshot(store)) == before


def test_an_unfinished_store_needs_resume(source, interrupted):
    store = interrupted()
    before = snapshot(store)
    assert "--resume" in refusal(source, store, "fp8")
    assert snapshot(store) == before


def test_an_unfinished_store_is_not_loaded(interrupted):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dsv3_jax.load(interrupted())
    assert re.fullmatch(r".*store.*", str(caught.value))


def test_a_source_that_may_not_be_written(source, wholes, store):
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        convert(source, store, "fp8")
    finally:
        source.chmod(0o755)
    assert_whole(store, wholes["fp8"])


# ---- a store that is whole -----------------------------------------------------------------------


@pytest.fixture
def complete(wholes, store) -> Callable[[str], Path]:
    return lambda target: shutil.copytree(wholes[target], store)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_whole_store_resumed(sound, complete, capsys, target):
    store = complete(target)
    before = snapshot(store)
    assert run("convert", sound, store, "--to", target, "--resume") == 0
    assert "complete" in capsys.readouterr().err
    assert snapshot(store) == before


def test_a_whole_store_of_a_younger_source(source, complete):
    store = complete("fp8")
    before = snapshot(store)
    for path in source.iterdir():
        os.utime(path)
    convert(source, store, "fp8", resume=True)
    assert snapshot(store) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_whole_store_is_not_written_over(sound, complete, capsys, resume):
    store = complete("fp8")
    before = snapshot(store)
    to = ("--to", "bf16" if resume else "fp8", *(("--resume",) if resume else ()))
    assert run("convert", sound, store, *to) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"dsv3 convert: error: .*store.*", line)
    assert snapshot(store) == before


@pytest.mark.slow
@pytest.mark.parametrize("change", [c for c in CHANGES if c != "shard of another model"])
def test_a_whole_store_of_another_source(source, complete, change):
    store = complete("fp8")
    before = snapshot(store)
    make, message = CHANGES[change]
    make(source)
    with pytest.raises(ValueError, match=message) as caught:
        convert(source, store, "fp8", resume=True)
    assert "\n" not in str(caught.value)
    assert snapshot(store) == before
