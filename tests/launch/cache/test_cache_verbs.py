"""`launch cache` fills, checks, lists and deletes packs and the data sets of real Redis servers."""

import os
import random
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bootfile.ground.errors import BadInput
from datasets.folders import image_folder
from datasets.stores import connection, forms, pack
from datasets.stores.files import FileStore
from launch.cache import cli as cache
from launch.cache import places as cache_server
from tests.conftest import environment, finish, free_port, names, run, start
from tests.support import pictures
from tests.support.redis_server import (
    PASSWORD,
    Opened,
    RedisServer,
    files_with,
    needed,
    patient,  # noqa: F401
    until,
    with_user,
)

pytest.importorskip("redis", reason="redis-py is not installed")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return pictures.make(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return pictures.make(tmp_path_factory.mktemp("many"), 400, 3)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("index")


@pytest.fixture
def launch(cache_dir, capsys):
    """A function that runs a verb in this process: (exit code, stdout). launch.said: stderr."""

    def call(verb, to, data=None, *options):
        capsys.readouterr()
        where = [] if data is None else ["--data_url", str(data), "--cache_dir", str(cache_dir)]
        code = cache.main([verb, "--to", str(to), *where, *options])
        captured = capsys.readouterr()
        call.said = captured.err
        return code, captured.out

    return call


def loaded(folder, cache_dir, split="train"):
    train = image_folder.load(str(folder), "train", str(cache_dir))
    if split == "train":
        return train
    return image_folder.load(str(folder), split, str(cache_dir), 0, train.classes)


# both kinds of places


@needed
@pytest.mark.parametrize(
    "kind, form", [*(("pack", form) for form in forms.FORMS), *(("redis", form) for form in forms.SIZED)]
)
def test_from_preload_to_rm(kind, form, images, cache_dir, empty_redis, launch, tmp_path):
    to = tmp_path / "packs" if kind == "pack" else empty_redis.url()
    code, printed = launch("preload", to, images, "--form", form)
    assert code == 0 and "train: 40 of 40 samples are stored\n" in printed
    assert "val: 12 of 12 samples are stored\n" in printed
    assert launch("preload", to, images, "--form", form)[0] == 0
    if kind == "redis":
        assert empty_redis.client().info("commandstats")["cmdstat_set"]["calls"] <= 52, (
            "the second preload sent no samples"
        )
    code, printed = launch("check", to, images, "--form", form)
    assert code == 0 and re.fullmatch("train: 40 of 40 .*equal.*\nval: 12 of 12 .*equal.*\n", printed)
    other = next(each for each in forms.SIZED if each != form)
    code, printed = launch("check", to, images, "--form", other)
    assert code == 1 and "train: 0 of 40 samples" in printed
    assert re.search(r"^missing: /.*; /.*; and 30 more$", printed, re.M)
    if kind == "pack":
        with pytest.raises(BadInput, match=f"ls: --to {to} .*folder: .* ls .*rm -r"):
            launch("ls", to)
        return
    code, printed = launch("ls", to)
    label = {"encoded": "encoded", "decoded": "decoded256"}[form]
    assert code == 0
    assert len(re.findall(rf" {label} +(40/40|12/12) +0.0\d\d +offline +0$", printed, re.M)) == 2
    assert re.search(r": \d+\.\d+ GB used of ", printed)
    assert launch("rm", to, None, loaded(images, cache_dir, "val").fingerprint[:9])[0] == 0
    assert len(launch("ls", to)[1].splitlines()) == 3
    assert launch("rm", to, None, "--all")[0] == 0
    assert len(launch("ls", to)[1].splitlines()) == 2 and empty_redis.client().dbsize() == 0


def test_class_folders_alone_are_divided_as_in_a_job(images, cache_dir, launch, tmp_path):
    code, printed = launch("preload", tmp_path, images / "train", "--val_share", "30%")
    splits = [
        image_folder.load(str(images / "train"), split, str(cache_dir), val_share=0.3)
        for split in ("train", "val")
    ]
    assert code == 0 and sum(map(len, splits)) == 40
    for index in splits:
        assert f"{index.split}: {len(index)} of {len(index)} samples are stored\n" in printed
        assert Path(pack.place(str(tmp_path), index)).is_dir()


def test_a_damaged_pack_is_named(images, cache_dir, launch, tmp_path):
    assert launch("preload", tmp_path, images, "--split", "train")[0] == 0
    index = loaded(images, cache_dir)
    part = Path(pack.place(str(tmp_path), index)) / "000000.arrow"
    content = bytearray(part.read_bytes())
    content[content.find(bytes(forms.make(FileStore(index), 7, "decoded").content)) + 100] ^= 1
    part.write_bytes(content)
    code, printed = launch("check", tmp_path, images, "--split", "train")
    assert code == 1 and f"different: {index.path(7)}\n" in printed and "39 of 40" in printed
    part.write_bytes(content[:5000])
    code, printed = launch("check", tmp_path, images, "--split", "train")
    assert code == 1 and re.search(r"\b0 of 40 .*equal .*, 40 missing", printed)
    meta = Path(pack.place(str(tmp_path), index)) / "meta.json"
    meta.write_text(meta.read_text().replace("true", "false"))
    assert launch("check", tmp_path, images, "--split", "train")[0] == 1


# interrupted preloads


@needed
@pytest.mark.thorough
def test_a_preload_killed_ten_times(many, cache_dir, empty_redis, launch):
    """A preload killed at random moments sends no stored sample again. At load it may end before a kill."""
    words = ("cache", "preload", "--to", empty_redis.url(), "--data_url", many, "--cache_dir", cache_dir)
    command = ("-m", "launch", *words, "--workers", "1", "--split", "train")
    client, draw = empty_redis.client(), random.Random(7)
    loaded(many, cache_dir)
    put = 0
    for kill in range(1, 11):
        moment = draw.randrange(36 * kill - 35, 36 * kill)
        process = start(*command)
        try:
            until(lambda moment=moment: client.dbsize() >= moment)
        finally:
            process.send_signal(signal.SIGKILL)
            finish(process, None)
        put = client.dbsize()
    result = run(*command)
    there = int(re.search(r"train: (\d+) of 400 samples are stored", result.stderr)[1])
    assert put - 3 <= there <= put and "train: 400 of 400 samples are stored" in result.stdout
    sent = client.info("commandstats")["cmdstat_set"]["calls"]
    assert sent <= 400, "samples whose answers were lost are also found"
    assert launch("check", empty_redis.url(), many, "--split", "train")[0] == 0
    assert {client.ttl(key) for key in client.scan_iter()} == {-1}


@needed
def test_a_server_that_is_lost_meanwhile(many, tmp_path, launch):
    with RedisServer(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        client = server.client()
        pool.submit(lambda: (until(lambda: client.dbsize() > 60), server.kill()))
        with pytest.raises(BadInput, match="cannot reach the cache: "):
            launch("preload", server.url(), many, "--workers", "1")


@needed
def test_a_full_server(images, tmp_path, launch):
    with RedisServer(tmp_path, "maxmemory 4mb", "maxmemory-policy noeviction") as server:
        code, printed = launch("preload", server.url(), images)
        assert code == 1 and "stores no more samples" in launch.said
        found = re.search(r"train: (\d+) of 40 .*stored, (\d+) .*not", printed)
        taken, left = map(int, found.groups())
        assert 0 < taken < 40 and taken + left == 40
        assert launch("check", server.url(), images)[0] == 1
        assert f" {taken}/40 " in launch("ls", server.url())[1]


# changed and damaged data


@needed
def test_changed_data_are_another_set(images, cache_dir, tmp_path, empty_redis, launch):
    root, url = tmp_path / "images", empty_redis.url("", "?form=encoded")
    shutil.copytree(images, root)
    assert launch("preload", url, root)[0] == 0
    old = loaded(root, tmp_path / "old")
    victim = Path(old.path(11))
    content = bytearray(victim.read_bytes())
    content[-3] ^= 1  # of the same size
    victim.write_bytes(content)
    code, printed = launch("check", url, root, "--split", "train")
    assert code == 1 and "0 of 40" in printed, "no old sample is served"
    empty_redis.client().flushall()
    shared = cache_server.Shared(url, print)
    with pytest.raises(BadInput, match="changed since"):
        shared.preload(old, "encoded", 2)
    shared.close()
    with Opened(url, old) as opened:
        assert opened.store.read([11]) == [None], "the old name has no samples of the new data"
    assert launch("preload", url, root)[0] == 0
    with Opened(url, loaded(root, cache_dir)) as opened:
        assert opened.store.read([11])[0] == bytes(content)
    assert launch("check", url, root)[0] == 0


@needed
def test_what_is_not_as_the_files_say_is_named(images, cache_dir, empty_redis, launch):
    assert launch("preload", empty_redis.url(), images)[0] == 0
    index, client = loaded(images, cache_dir), empty_redis.client()
    with Opened(empty_redis.url(), index) as opened:
        opened.store.reference.is_offline = True
        sample = forms.make(FileStore(index), 4, "decoded")
        wrong = np.frombuffer(sample.content, np.uint8).copy()
        wrong[1000] ^= 1
        assert opened.store.put([4], [sample._replace(content=wrong)]) == 1  # whole, but not those pixels
        value = bytearray(client.get(opened.key(9)))
        value[-5] ^= 1
        client.set(opened.key(9), bytes(value))
        client.set(opened.key(10), bytes(value[:100]))
        client.delete(*(opened.key(id) for id in (11, 20, 21)))
        client.lpush(opened.key(11), "a list")
    code, printed = launch("check", empty_redis.url(), images)
    assert code == 1 and re.search("train: 34 of 40 .*equal", printed)
    expected = {"different": [4], "damaged": [9, 10, 11], "missing": [20, 21]}
    for kind, ids in expected.items():
        assert f"{kind}: {'; '.join(index.path(id) for id in ids)}\n" in printed
    client.delete(opened.key(4), opened.key(9))
    assert launch("preload", empty_redis.url(), images)[0] == 0
    assert "train: 34 of 40 samples are stored" in launch.said, (
        "values of another length or type do not count"
    )
    assert launch("check", empty_redis.url(), images)[0] == 0


# users of a data set


@needed
def test_what_a_job_uses_stays(images, cache_dir, empty_redis, launch):
    assert launch("preload", empty_redis.url(), images)[0] == 0
    index = loaded(images, cache_dir)
    with Opened(empty_redis.url(), index, "offline") as job:
        until(lambda: job.stored().references)
        for what in (index.fingerprint, "--all"):
            with pytest.raises(BadInput, match=rf"{job.store.name} is in use: .*:{os.getpid()}:.*expires in"):
                launch("rm", empty_redis.url(), None, what)
        printed = launch("ls", empty_redis.url())[1]
        assert "40/40" in printed, "nothing was deleted"
        assert re.search(rf"used by \S+:{os.getpid()}:\w+ \(.*expires in \d+ s\)", printed)
    with Opened(empty_redis.url(), index, "offline") as job:
        until(lambda: job.stored().references)
        assert launch("rm", empty_redis.url(), None, "--all", "--force")[0] == 0
        assert job.store.read([0]) == [None]


@needed
def test_what_an_active_job_put_stays_after_a_preload(images, cache_dir, empty_redis, launch):
    index, client = loaded(images, cache_dir), empty_redis.client()
    with Opened(empty_redis.url(), index, "active") as job:
        job.store.put(range(20), [forms.make(FileStore(index), id, "decoded") for id in range(20)])
        assert client.ttl(job.key(3)) > 0
        assert launch("preload", empty_redis.url(), images)[0] == 0
        assert {client.ttl(job.key(id)) for id in range(40)} == {-1}
        assert job.stored().mode == "offline"
    assert client.info("commandstats")["cmdstat_set"]["calls"] <= 52, "the job's samples were not sent again"
    assert launch("check", empty_redis.url(), images)[0] == 0, "the job's end deletes nothing"
    assert client.ttl(f"bootfile:{job.store.name}:about") == -1


# arguments and secrets


def test_without_a_server_it_is_one_line(images, cache_dir, launch):
    port, reason = free_port(), "Connection refused"
    where = ("--to", f"redis://127.0.0.1:{port}", "--data_url", images, "--cache_dir", cache_dir)
    result = run("-m", "launch", "cache", "preload", *where, code=2)
    assert result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: cache 127.0.0.1:{port}: ") and reason in result.stderr
    quick = "import sys, launch.cache.places, launch.cache.cli; sys.exit('torch' in sys.modules)"
    run("-c", quick, fresh=True)  # importing torch takes longer than a server may take to answer
    for verb, data in (("check", images), ("ls", None), ("rm", None)):
        with pytest.raises(BadInput, match=reason):
            launch(verb, f"redis://127.0.0.1:{port}", data)


@pytest.mark.thorough
@needed
def test_no_secret_in_what_is_said(images, cache_dir, tmp_path, launch, monkeypatch):
    """No output or argument contains the password. The Redis user has the rights that the guide lists."""
    seen = []
    with with_user(tmp_path) as server:
        to = ("--to", server.url("bootfile"))
        data = ("--data_url", images, "--cache_dir", cache_dir)
        secret = tmp_path / "secret"
        secret.write_text(PASSWORD + "\n")
        right, wrong = {connection.PASSWORD_FILE: str(secret)}, {connection.PASSWORD: f"not {PASSWORD}"}
        for words, env, code in ((("preload", *to, *data), right, 0), (("ls", *to), wrong, 2)):
            process = start("-m", "launch", "cache", *words, env=environment(**env), fresh=True)
            seen.append(Path(f"/proc/{process.pid}/cmdline").read_text())
            result = finish(process, code)
            seen += result.stdout, result.stderr
            assert code == 0 or names(result.stderr, "refuses the user", "--to")
        monkeypatch.setenv(connection.PASSWORD, PASSWORD)
        for verb, *words in (("check", images), ("ls",), ("rm", None, "--all")):
            code, printed = launch(verb, to[1], *words)
            seen += printed, launch.said
            assert code == 0
    user = f"bootfile:{PASSWORD}"
    for words in (
        ("--to", f"redis://{user}@a"), ("--to", f"{user}@a:1"), ("--to", f"redis:/{user}@a:1"),
        ("--to", "redis://a", "--password", PASSWORD), ("--to", "redis://a", f"--password={PASSWORD}"),
        ("--to", "redis://a", PASSWORD),
    ):  # fmt: skip
        with pytest.raises(BadInput) as caught:
            cache.main(["ls", *words])
        seen.append(str(caught.value))
    assert not [text for text in seen if PASSWORD in text] and files_with(PASSWORD, cache_dir) == []


@needed
@pytest.mark.parametrize("words, reason", [
    (["preload", "--form", "raw"], "invalid choice"),
    (["check", "--data_url", "/nothing", "--form", "jpeg"], "--form jpeg is for folders of packs"),
    (["preload", "--data_url", "/nothing"], "/nothing does not exist"),
    (["rm"], "name a data set"), (["rm", "x", "--all"], "name a data set"),
    (["rm", "abc"], "matches 0 data sets; stored: nothing"),
])  # fmt: skip
def test_arguments_that_do_not_fit(words, reason, images, cache_dir, empty_redis):
    if words[0] == "preload":
        words = [words[0], "--data_url", str(images), "--cache_dir", str(cache_dir), *words[1:]]
    with pytest.raises(BadInput, match=re.escape(reason)):
        cache.main([words[0], "--to", empty_redis.url(), *words[1:]])
    assert empty_redis.client().dbsize() == 0


def test_help_and_no_verb(capsys):
    assert cache.main(["--help"]) == 0 and "BOOTFILE_CACHE_PASSWORD" in capsys.readouterr().out
    with pytest.raises(BadInput, match="'fill', expected one of preload, check, ls, rm"):
        cache.main(["fill"])
    with pytest.raises(SystemExit) as caught:
        cache.main(["preload", "--help"])
    assert caught.value.code == 0 and "--form" in capsys.readouterr().out
