"""Texts of the prefix cache in a folder: restarts, several processes, crashes, full disks, damaged files."""

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVCache, PrefixCache, PrefixCacheFolder, prefix_cache, save_prompt_cache
from mlxlm.cache.policies import RotationPolicy, SlidingWindow
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.utils.errors import GenerationError
from tests.paths import ROOT

H, D = 2, 32
IDENTITY = {"model": "m", "cache": "all tokens"}
LIMIT = 1 << 30
KINDS = {
    "plain": [{}],
    "quantized": [{"key_bits": 8, "value_bits": 4}],
    "windowed": [{"window": SlidingWindow(4, slack=3)}],
    "rotating": [{"rotation": RotationPolicy(200, 4)}],
    "recurrent": [None],
    "recurrent, windowed and plain": [None, {"window": SlidingWindow(4, slack=3)}, {}],
}
TEXT = [int(i) for i in np.random.default_rng(0).integers(0, 50, 600)]
VECTORS = np.random.default_rng(1).normal(size=(50, 1000, H, D)).astype(np.float32)  # by token and position


def make_caches(kind):
    return [RecurrentCache([(H, D)]) if options is None else KVCache(**options) for options in KINDS[kind]]


def update(caches, ids, begin):
    """What each layer returns for `ids[begin:]`."""
    x, out = mx.array(VECTORS[ids[begin:], range(begin, len(ids))].swapaxes(0, 1)[None]), []
    for cache in caches:
        if isinstance(cache, RecurrentCache):
            cache.begin_update(1, len(ids) - begin)
            for t in range(x.shape[2]):
                cache[0] = x[:, :, t] if cache[0] is None else cache[0] / 2 + x[:, :, t]
            out.append(cache[0])
        else:
            out += [y.dequantized() if hasattr(y, "dequantized") else y for y in cache.update_and_fetch(x, -x)]
    return [np.array(y) for y in out]


def read(ids, kind="plain"):
    caches, begin = make_caches(kind), 0
    while begin < len(ids):
        end = min([len(ids), begin + 64, *(begin + (getattr(c, "max_update_size", None) or 64) for c in caches)])
        update(caches, ids[:end], begin)
        begin = end
    return caches


def open_cache(path, kind="plain", max_bytes=LIMIT, folder_bytes=LIMIT, identity=IDENTITY):
    folder = PrefixCacheFolder(path, folder_bytes, {**identity, "cache": kind}, lambda: make_caches(kind))
    return PrefixCache(lambda: make_caches(kind), max_bytes, folder)


def saved(path, *texts, kind="plain", **options):
    """Write texts as the end of a program does."""
    tree = open_cache(path, kind, **options)
    for ids in texts:
        tree.insert(ids, read(ids, kind))
    tree.evict(0)
    assert tree.nbytes == 0
    return tree


def files(path):
    return sorted(path.glob("prefix-*.safetensors"), key=lambda file: file.stat().st_mtime_ns)


def check_restored(tree, ids, n, kind="plain"):
    found, wanted = tree.restore(ids, n), read(ids[:n], kind)
    for end in (n + 1, n + 2):
        following = [*ids, 7, 7][:end]
        for one, other in zip(update(found, following, end - 1), update(wanted, following, end - 1), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_text_survives_a_restart(tmp_path):
    path = tmp_path / "new" / "folder"
    saved(path, TEXT[:500], TEXT[:100])
    tree = open_cache(path)
    assert tree.nbytes == 0 and tree.match(TEXT) == 500
    check_restored(tree, TEXT, 500)
    (file,) = files(path)  # the text of 100 tokens is too short
    assert file.stat().st_mode & 0o777 == 0o600 and path.stat().st_mode & 0o777 == 0o700
    file.unlink()
    assert tree.match(TEXT) == 500  # it is in memory now


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 5, 99]), st.integers(1, 120)), min_size=1, max_size=5)
)
def test_a_restart_changes_no_match(tmp_path_factory, kind, turns):
    """Wherever a prompt leaves the texts."""
    path = tmp_path_factory.mktemp("folder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "_MIN_SAVED", 1)
        patch.setattr(prefix_cache, "_MIN_LOADED", 1)
        tree, texts = open_cache(path, kind), [[]]
        for start, cut, count in turns:
            before = texts[start % len(texts)]
            before = before[: max(0, len(before) - cut)]
            ids = [*before, *TEXT[len(texts) * 9 :][:count]]
            tree.insert(ids, read(ids, kind))
            texts.append(ids)
        prompts = [[*ids[: len(ids) - cut], 49, 3] for ids in texts[1:] for cut in (0, 1, 30) if cut < len(ids)]
        matches = [tree.match(ids) for ids in prompts]
        tree.evict(tree.nbytes // 2)
        tree.evict(0)
        assert [open_cache(path, kind).match(ids) for ids in prompts] == matches
        tree = open_cache(path, kind)
        for ids, n in zip(prompts, matches, strict=True):
            assert tree.match(ids) == n
            check_restored(tree, ids, n, kind)


def test_keys_and_values_of_all_tokens_are_written_once(tmp_path):
    kind, ends = "recurrent, windowed and plain", (300, 400, 500)
    saved(tmp_path, *(TEXT[:end] for end in ends), kind=kind)
    assert sum(file.stat().st_size for file in files(tmp_path)) < 1.5 * 2 * H * D * 4 * 500
    assert [open_cache(tmp_path, kind).match(TEXT[:end]) for end in ends] == list(ends)


def test_evicted_texts_are_written_and_come_back(tmp_path):
    per_token = 2 * H * D * 4 + 4
    tree = open_cache(tmp_path, max_bytes=700 * per_token)
    one, other = TEXT[:400], TEXT[100:500]
    for ids in (one, other, TEXT[:90]):
        tree.insert(ids, read(ids))
    assert len(files(tmp_path)) == 1
    assert tree.match(one) == 400 and tree.nbytes <= 700 * per_token  # other is evicted for it
    assert len(files(tmp_path)) == 2
    check_restored(tree, [*one, 1], 400)
    tree.evict(0)
    assert tree.match(other[:200]) == 200 and len(files(tmp_path)) == 2


def test_few_more_tokens_than_in_memory_are_not_loaded(tmp_path):
    saved(tmp_path, TEXT[:300])
    tree = open_cache(tmp_path)
    tree.insert(TEXT[:237], read(TEXT[:237]))
    assert tree.match(TEXT) == 237
    tree.clear()
    tree.insert(TEXT[:236], read(TEXT[:236]))
    assert tree.match(TEXT) == 300


def test_a_text_larger_than_memory_is_not_loaded(tmp_path, monkeypatch):
    saved(tmp_path, TEXT[:300])
    tree = open_cache(tmp_path, max_bytes=1000)
    monkeypatch.setattr(PrefixCacheFolder, "load", lambda *args: pytest.fail("loaded"))
    assert tree.match(TEXT) == 0


def test_other_models_options_and_groups_are_ignored(tmp_path):
    tree = open_cache(tmp_path)
    tree.insert(TEXT[:300], read(TEXT[:300]), group="long")
    tree.evict(0)
    assert open_cache(tmp_path).match(TEXT) == 0 and open_cache(tmp_path).match(TEXT, "long") == 300
    assert open_cache(tmp_path, kind="quantized").match(TEXT, "long") == 0
    assert open_cache(tmp_path, identity={"model": "other"}).match(TEXT, "long") == 0
    assert open_cache(tmp_path, identity={}).match(TEXT, "long") == 0


def test_a_file_that_cannot_be_trimmed_so_far_is_no_match(tmp_path):
    saved(tmp_path, TEXT[:400], kind="windowed")
    folder = open_cache(tmp_path, "windowed")._folder
    assert folder.match(TEXT) == 400 and folder.match(TEXT[:100]) == 0


def test_a_longer_text_replaces_its_beginning(tmp_path):
    saved(tmp_path, TEXT[:300])
    saved(tmp_path, TEXT[:400])
    saved(tmp_path, TEXT[:350])
    assert len(files(tmp_path)) == 1 and open_cache(tmp_path).match(TEXT) == 400
    saved(tmp_path, TEXT[:300], kind="windowed")
    saved(tmp_path, TEXT[:400], kind="windowed")
    tree = open_cache(tmp_path, "windowed")
    assert len(files(tmp_path)) == 3 and tree.match(TEXT[:300]) == 300  # can't be trimmed so far


def test_the_least_recently_used_files_are_removed(tmp_path):
    texts = [TEXT[first : first + 300] for first in (0, 50, 100, 150)]
    (tmp_path / "notes.txt").write_text("x" * 10_000)
    (tmp_path / f"prefix-{'0' * 64}.safetensors").write_bytes(b"x" * 10_000)  # not a text
    saved(tmp_path, texts[0])
    size = files(tmp_path)[-1].stat().st_size
    saved(tmp_path, texts[1], identity={"model": "other"})  # counts as well
    saved(tmp_path, texts[2])
    for age, file in enumerate(files(tmp_path)[1:]):
        os.utime(file, (1000 + age, 1000 + age))
    assert open_cache(tmp_path).match(texts[0]) == 300  # a use
    saved(tmp_path, texts[3], folder_bytes=3 * size + 100)
    matches = [open_cache(tmp_path).match(ids) for ids in texts]
    assert matches == [300, 0, 300, 300] and open_cache(tmp_path, identity={"model": "other"}).match(texts[1]) == 0
    saved(tmp_path, texts[1], folder_bytes=size + 100)
    assert len(files(tmp_path)) == 2 and open_cache(tmp_path).match(texts[1]) == 300
    saved(tmp_path, texts[0], folder_bytes=size - 1000)  # larger than all files may be
    assert open_cache(tmp_path).match(texts[0]) == 0 and open_cache(tmp_path).match(texts[1]) == 300
    assert (tmp_path / "notes.txt").exists() and (tmp_path / f"prefix-{'0' * 64}.safetensors").exists()


def test_a_file_that_another_process_removes_is_read_again(tmp_path, caplog):
    saved(tmp_path, TEXT[:300], TEXT[100:400])
    tree = open_cache(tmp_path)
    load = tree._folder.load

    def late(*args):
        for file in files(tmp_path):
            file.unlink()
        tree._folder._scanned = tmp_path.stat().st_mtime_ns  # as if it happened after the scan
        return load(*args)

    tree._folder.load = late
    assert tree.match(TEXT) == 0 and tree.restore(TEXT, 0)[0].offset == 0
    assert not caplog.records


def damage_tail(content):
    return content[:-100]


def damage_values(content):  # as long as before
    header = int.from_bytes(content[:8], "little")
    return content[:8] + content[8 : 8 + header].replace(b'"0.keys.0"', b'"0.kexs.0"') + content[8 + header :]


@pytest.mark.parametrize("damage, warned", [(damage_tail, False), (damage_values, True), (lambda _: b"", False)])
def test_damaged_files_are_ignored_and_stay(tmp_path, caplog, damage, warned):
    saved(tmp_path, TEXT[:300])
    (file,) = files(tmp_path)
    saved(tmp_path, TEXT[100:400])
    tree = open_cache(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert tree.match(TEXT) == 0 and tree.match(TEXT[100:]) == 300
    assert len(caplog.records) == warned and (not warned or "ignoring a file of the prefix cache" in caplog.text)
    assert tree.match(TEXT) == 0 and len(caplog.records) == warned  # once
    tree.insert(TEXT[:300], read(TEXT[:300]))
    tree.evict(0)
    assert file.exists()


@settings(max_examples=60)
@given(data=st.data())
def test_any_header_is_read_or_ignored(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("folder")
    saved(path, TEXT[:256])
    (file,) = files(path)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    part = data.draw(st.sampled_from([header, header["__metadata__"], header["ids"], header["0.keys.0"]]))
    name = data.draw(st.sampled_from(sorted(part)))
    simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    values = simple | st.lists(st.integers(-9, 1 << 40), max_size=2) | st.dictionaries(st.text(max_size=3), simple)
    part[name] = data.draw(values | st.sampled_from(["[]", "{}", '{"group": 1, "restorable_from": []}', "9" * 5000]))
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + length :])
    tree = open_cache(path)
    assert tree.match(TEXT) in (0, 256)
    tree.evict(0)


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saved(tmp_path, TEXT[:300])
    with monkeypatch.context() as patch:
        patch.setattr("mlxlm.cache.prompt_cache_file.write_tensors", full)
        tree = saved(tmp_path, TEXT[100:400])
        tree.evict(0)
    assert tree.nbytes == 0 and "can't keep a text of the prefix cache" in caplog.text and "space" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == [files(tmp_path)[0].name]
    assert tree.match(TEXT) == 300


@pytest.mark.parametrize("name", ["mkdir", "unlink", "iterdir"])
def test_a_read_only_folder_is_a_warning(tmp_path, monkeypatch, caplog, name):
    def denied(*args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    saved(tmp_path, TEXT[:300])
    monkeypatch.setattr(Path, name, denied)
    monkeypatch.setattr(os, "utime", denied)
    assert open_cache(tmp_path).match(TEXT) == 300
    saved(tmp_path, TEXT[100:400], folder_bytes=files(tmp_path)[0].stat().st_size + 100)
    assert "prefix cache" in caplog.text and "Permission denied" in caplog.text


def test_a_path_that_is_a_file_is_a_warning(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_text("mine")
    tree = saved(path, TEXT[:300])
    assert tree.match(TEXT) == 0 and path.read_text() == "mine"
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_caches_of_other_types_are_refused(tmp_path):
    with pytest.raises(GenerationError, match="own cache type.*in memory only"):
        PrefixCacheFolder(tmp_path, LIMIT, IDENTITY, lambda: [object()])


CHILD = """
import sys
from pathlib import Path
from tests.cache.test_prefix_cache_folder import TEXT, saved
path, first = Path(sys.argv[1]), int(sys.argv[2])
"""


def start(code, *args):
    command = [sys.executable, "-c", CHILD + code, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_at_once(tmp_path):
    code = """
print("ready", flush=True)
input()
for n in range(8):
    saved(path, TEXT[first * n : first * n + 260 + n], TEXT[:300])
"""
    children = [start(code, tmp_path, first) for first in (3, 5)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        child.communicate()
        assert child.returncode == 0
    tree = open_cache(tmp_path)
    for first in (3, 5):
        for n in range(8):
            ids = TEXT[first * n : first * n + 260 + n]
            assert tree.match(ids) == 260 + n
    tree.clear()
    assert tree.match(TEXT) == 300
    check_restored(tree, TEXT, 300)
    assert not list(tmp_path.glob(".*"))


def test_a_process_killed_while_it_writes(tmp_path):
    code = """
from mlxlm.cache import prompt_cache_file
def half(file, *args, **options):
    file.write(b"x" * 1000)
    file.flush()
    print("writing", flush=True)
    input()
prompt_cache_file.write_tensors = half
saved(path, TEXT[:300])
"""
    saved(tmp_path, TEXT[100:400])
    child = start(code, tmp_path, 0)
    assert child.stdout.readline() == "writing\n"
    child.kill()
    child.communicate()
    assert len(list(tmp_path.glob(".*.partial"))) == 1
    tree = open_cache(tmp_path)
    assert tree.match(TEXT) == 0 and tree.match(TEXT[100:]) == 300
    saved(tmp_path, TEXT[200:500])
    assert not list(tmp_path.glob(".*")) and len(files(tmp_path)) == 2


def test_what_a_process_is_writing_is_left_alone(tmp_path):
    name = f".prefix-{'a' * 64}.safetensors.%d.partial"
    others = tmp_path / (name % os.getppid())
    own, earlier = tmp_path / (name % os.getpid()), tmp_path / (name.replace("a" * 64, "b" * 64) % os.getpid())
    for file in (others, own, earlier):
        file.write_text("x")
    os.utime(earlier, (1000, 1000))  # an earlier process with the same number, as in containers
    saved(tmp_path, TEXT[:300])
    assert others.exists() and own.exists() and not earlier.exists()


def test_a_file_of_a_user_is_not_a_text(tmp_path):
    save_prompt_cache(tmp_path / "mine.safetensors", read(TEXT[:300]), TEXT[:300], IDENTITY)
    save_prompt_cache(tmp_path / f"prefix-{'0' * 64}.safetensors", read(TEXT[:300]), TEXT[:300], IDENTITY)
    tree = saved(tmp_path, TEXT[100:400], folder_bytes=500_000)
    tree.clear()
    assert tree.match(TEXT) == 0 and len(list(tmp_path.iterdir())) == 3
