"""`pack` finds secrets in many forms, and does not report placeholders."""

import time

import pytest

from launch import secret_scan
from launch.bundle.cli import pack
from tests.support.packed import paths, refused, tree

NAMES, DIGITS = "abcdefghij", "0123456789"
SECRETS = [  # concatenated, so that a secret scanner does not report this file
    ("key.txt", "-----BEGIN " + "RSA PRIVATE KEY-----", "a private key"),
    ("key.py", 'KEY = """-----BEGIN ' + 'PRIVATE KEY-----"""', "a private key"),
    ("a.py", "ACCESS = 'AKIA" + "B2C3D4E5F6G7H8J9'", "an AWS access key"),
    ("a.py", "# HPUA" + "B2C3D4E5F6G7H8J9", "a Huawei Cloud access key"),
    ("keys.csv", "demo,B2C3D4E5F6G7H8J9KLMN," + 4 * DIGITS, "an access key and its secret key"),
    ("a.yaml", f"secret_access_key: {NAMES}{DIGITS}{NAMES}{DIGITS}", "a key or token"),
    ("a.py", f'sk = "{NAMES}{DIGITS}{NAMES}{DIGITS}"', "a key or token"),
    ("a.sh", f"export OBS_SECRET_ACCESS_KEY={NAMES}{DIGITS}{NAMES}", "a key or token"),
    ("a.py", f"login('hf_{NAMES}{DIGITS}{NAMES}{DIGITS}')", "a token of a service"),
    ("a.py", f"x = 'ghp_{NAMES}{DIGITS}{NAMES}{DIGITS}'", "a token of a service"),
    ("a.toml", 'password = "correct' + '-horse"', "a password"),
    ("a.json", '{"db_password": "correct' + '-horse"}', "a password"),
    ("a.py", "connect(user='me', password='correct" + "-horse')", "a password"),
    ("a.py", "open_url('redis://me:correct" + "-horse@host:6379')", "a URL with a password"),
    ("pip.conf", "index-url = https://me:correct" + "-horse@host/simple", "a URL with a password"),
    ("prod.env", "A=1", "a file that holds credentials, by its name"),
    ("id_rsa", "x", "a file that holds credentials, by its name"),
]  # fmt: skip


@pytest.mark.parametrize("name, line, kind", SECRETS, ids=range(len(SECRETS)))
def test_what_looks_like_a_secret_is_refused(name, line, kind, mine, tmp_path):
    tree(mine, {name: "\n" + line})
    by_name = kind.startswith("a file")
    message = refused(str(mine / "job.py"), str(tmp_path / "to"))
    assert f"secrets would be uploaded: {name}{'' if by_name else ':2'} ({kind}); " in message
    for word in ("correct-horse", "B2C3", "abcdef", "0123"):
        assert word not in message
    packed = pack(str(mine / "job.py"), str(tmp_path / "to"), allow_secret=[name])
    assert name in paths(packed)


def test_a_secret_stays_out_of_what_is_printed(mine, tmp_path, capsys):
    """Neither an error nor the command's output contains the secret, also for a dependency list."""
    secret = "correct" + "-horse"
    tree(mine, {"requirements.txt": f"numpy\n--extra-index-url https://me:{secret}@host/simple\n"})
    message = refused(str(mine / "job.py"), str(tmp_path / "to"))
    assert message.startswith("suspected secrets") and "\n" not in message
    assert "pip-requirements.txt:2 (a URL with a password)" in message
    assert secret not in message + capsys.readouterr().out
    message = refused(str(mine / "job.py"), str(tmp_path / "to"), allow_secret=["base.txt"])
    assert "--allow_secret base.txt: no file of this path is packed" in message


@pytest.mark.parametrize(
    "line",
    [
        "password = os.environ['BOOTFILE_CACHE_PASSWORD']", 'PASSWORD = "BOOTFILE_CACHE_PASSWORD"',
        'password = ""', "password: <your password>", "password: ${PW}", "pwd: /home/me", "secret = None",
        "parser.add_argument('--password', help='the password of the server')", "max_tokens: 4096",
        '"pad_token": "<pad>"', '"eos_token": "</s>"', "token: 123456", "AKIAIOSFODNN7EXAMPLE",
        "redis://[user@]host[:port]", "https://user:password@host/data", "redis://user:***@host",
        'f"redis://{user}:{password}@{host}"', "sha256: " + 64 * "a", "key = 'layer4.2.conv3.weight'",
        "git+https://git@host/repository.git", "http://host:8080/@scope/x", "task = 'risk-assessment'",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.py", "a.yaml"])
def test_false_alarms(name, line):
    assert secret_scan.scan(name, line.encode()) == []


def test_long_lines_are_searched_in_time():
    begin = time.monotonic()
    for piece in ("a", "1", "A1", "-", "=", "'", "token=", "a://"):
        secret_scan.scan("data.json", piece.encode() * (200_000 // len(piece)))
    assert time.monotonic() - begin < 10
