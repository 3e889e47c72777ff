"""jobs/imagenet.py trains on the same data with a cache, also if its servers fail."""

import re
import signal
from pathlib import Path

import pytest
import torch

from bootfile.receipt import receipt
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends
from datasets.stores import connection, redis_store
from tests.conftest import environment, finish, names, run, start, start_ranks
from tests.support.redis_server import PASSWORD, Opened, RedisServer, files_with, needed, until, with_user

pytest.importorskip("redis", reason="redis-py is not installed")

DALI = backends.reasons(torch.device("cpu"))["dali"]
JOB = ("jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--print_freq=1",
       "--lr=0.001", "--batch_size=64", "--epochs=2", "--training_only")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return (arguments for generated images; their index; the receipt without a cache)."""
    root = tmp_path_factory.mktemp("data")
    folder = random_folder.make(str(root / "images"))
    for path in Path(folder, "train").glob("*/0[2-6]*"):  # 240 of 640 are enough
        path.unlink()
    arguments = f"--data_url={folder}", f"--cache_dir={root / 'cache'}"
    run(*JOB, *arguments, "--data_backend=threads", f"--output_dir={root / 'plain'}")
    index = image_folder.load(folder, "train", str(root / "cache"))
    return arguments, index, (root / "plain" / receipt.FILE).read_bytes()


def job(data, output, *more):
    return *JOB, *data[0], f"--output_dir={output}", *more


def trained(process, at_first_step=lambda: None) -> str:
    """Return the output up to the last step. The job is then killed, because its end takes longer."""
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("epoch=1 step=1/"):
            at_first_step()
        if line.startswith("epoch=2 step=6/"):
            break
    process.kill()
    result = finish(process, None)
    return printed + result.stdout + result.stderr


def delivered(output) -> bytes:
    return (Path(output) / receipt.FILE).read_bytes()


@pytest.mark.thorough
@needed
def test_an_offline_set_is_shared_by_two_jobs(data, tmp_path):
    with RedisServer(tmp_path) as server:
        url = server.url(tail="?form=encoded")
        with Opened(url, data[1]) as opened:
            opened.store.reference.register(offline=True)
            opened.put_all()
            client = server.client()
            client.config_set("slowlog-max-len", 10**6)
            client.config_set("slowlog-log-slower-than", 0)
            offline, running = (f"--cache={url}", "--cache_mode=offline"), {}
            for backend in ("pytorch", "kspeed" if DALI else "dali-kspeed"):
                arguments = job(data, tmp_path / backend, f"--data_backend={backend}", *offline)
                running[backend] = start(*arguments)
            for backend, process in running.items():
                finish(process)
                assert delivered(tmp_path / backend) == data[2]
            (stored,) = opened.sets()
            commands = [entry["command"].split() for entry in client.slowlog_get(-1)]
            seen = {each[-1] for each in commands if each[0] == b"ZADD"}
            assert stored.mode == "offline" and len(seen) == 2
            assert (opened.store.lengths(range(len(data[1]))) > 0).all()


@pytest.mark.thorough
@needed
def test_a_killed_job_resumes_and_its_reference_expires(data, tmp_path):
    arguments = job(data, tmp_path / "out", "--data_backend=kspeed", "--save_every=1")
    with RedisServer(tmp_path) as server:
        killed = start(*arguments, f"--cache={server.url()}")
        for line in killed.stdout:
            if line.startswith("epoch=2 step=5/"):
                killed.kill()
                break
        finish(killed, -signal.SIGKILL)
        with Opened(server.url(), data[1]) as opened:
            (stored,) = opened.sets()
            assert len(stored.references) == 1 and 0 < stored.references[0][1] <= redis_store.LIFETIME
            server.client().zadd(
                f"bootfile:{stored.name}:leases", {stored.references[0][0]: 1}
            )  # a minute later
        running = start_ranks(*arguments, f"--cache={server.url()}")
        with Opened(server.url(), data[1]) as opened:
            until(lambda: len(each := opened.sets()) == 1 and len(each[0].references) == 2)
            printed = "".join(finish(each).stdout for each in running)
            assert opened.sets() == []
        assert "resumed from" in printed and delivered(tmp_path / "out") == data[2]
        assert re.search(r"waited for data .*[\d.]+% .*\bkspeed\b", printed)
        assert server.client().dbsize() == 0
        assert server.client().info("commandstats")["cmdstat_mget"]["calls"] > 4


@needed
@pytest.mark.thorough
def test_its_server_dies_and_no_secret_is_left(data, tmp_path):
    """The job continues and reports the lost server once. The password is in no output and in no file."""
    with with_user(tmp_path) as server:
        out, env = tmp_path / "out", environment(**{connection.PASSWORD: PASSWORD})
        where = f"--cache={server.url('bootfile')}"
        command = job(data, out, "--data_backend=kspeed", where, "--save_every=2")
        running = start(*command, env=env, fresh=True)
        shown = Path(f"/proc/{running.pid}/cmdline").read_text()
        printed = trained(running, server.kill)
        lost = f"cache 127.0.0.1:{server.port}"
        assert sum(names(line, lost, "next tier") for line in printed.splitlines()) == 1
        assert delivered(out) == data[2]
        assert PASSWORD not in shown + printed
        assert (out / "checkpoints").exists() and files_with(PASSWORD, out) == []
        assert files_with(PASSWORD, data[0][1].partition("=")[2]) == []
        refused = run(*job(data, out, f"--cache=redis://bootfile:{PASSWORD}@127.0.0.1"), code=2)
        assert PASSWORD not in refused.stdout + refused.stderr
        assert names(refused.stderr, "--cache", "password", connection.PASSWORD)
        server.start()
        options = job(data, tmp_path / "wrong", where, "--processes_per_node=2")
        result = run(*options, code=2, env=environment(**{connection.PASSWORD: "wrong-and-secret"}))
        (line,) = [line for line in result.stderr.splitlines() if "error: " in line]
        assert names(line, f"cache 127.0.0.1:{server.port}", "refuses", "password")
        assert "wrong-and-secret" not in result.stdout + result.stderr and "step=1/" not in result.stdout
