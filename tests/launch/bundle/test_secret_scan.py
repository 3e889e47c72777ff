"""`pack` finds secrets in many forms, and does not report placeholders."""

import base64
import re
import time

import pytest

from launch import secret_scan
from launch.bundle.cli import pack
from tests.conftest import ROOT
from tests.support.packed import paths, refused, tree

NAMES, DIGITS = "abcdefghij", "0123456789"
MIXED = NAMES + DIGITS
HEX = 2 * f"{DIGITS}abcdef" + "01234567"
WORD = "hunter" + "2"
BASIC = base64.b64encode(f"me:{WORD}-{WORD}".encode()).decode()
SECRETS = [  # concatenated, so that a secret scanner does not report this file
    ("key.txt", "-----BEGIN " + "RSA PRIVATE KEY-----", "a private key"),
    ("key.py", 'KEY = """-----BEGIN ' + 'PRIVATE KEY-----"""', "a private key"),
    ("a.py", "ACCESS = 'AKIA" + "B2C3D4E5F6G7H8J9'", "an AWS access key"),
    ("a.py", "# HPUA" + "B2C3D4E5F6G7H8J9", "a Huawei Cloud access key"),
    ("keys.csv", "demo,B2C3D4E5F6G7H8J9KLMN," + 4 * DIGITS, "an access key .*secret key.*"),
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
    ("prod.env", "A=1", "a file .*credentials.*"),
    ("id_rsa", "x", "a file .*credentials.*"),
]  # fmt: skip


@pytest.mark.parametrize("name, line, kind", SECRETS, ids=range(len(SECRETS)))
def test_what_looks_like_a_secret_is_refused(name, line, kind, mine, tmp_path):
    tree(mine, {name: "\n" + line})
    by_name = kind.startswith("a file")
    message = refused(str(mine / "job.py"), str(tmp_path / "to"))
    assert re.search(rf"secrets .*: {re.escape(name)}{'' if by_name else ':2'} \({kind}\); ", message)
    for word in ("correct-horse", "B2C3", "abcdef", "0123"):
        assert word not in message
    packed = pack(str(mine / "job.py"), str(tmp_path / "to"), allow_secret=[name])
    assert name in paths(packed)


# Forms of a secret, under names that say nothing. (name, text, line, kind)
KINDS = [
    ("x.yaml", f"env:\n- name: WANDB_API_KEY\n  value: {HEX}", 3, "a key or token"),
    ("x.yaml", f"env:\n- name: DB_PASSWORD\n  value: '{WORD}{DIGITS}'", 3, "a key or token"),
    ("x.py", f'KEYS = ["{DIGITS}ABCDEFGHIJ", "{HEX}"]', 1, "an access key and its secret key"),
    ("k8s.txt", "client-key-data: LS0tLS1CRUdJTi" + "BSU0EgUFJJ", 1, "a private key"),
    ("a.sh", f"wandb login --relogin {HEX}", 1, "a key or token"),
    ("x.json", f'{{"env": [{{"name": "HF_TOKEN", "value": "{MIXED}"}}]}}', 1, "a key or token"),
    ("x.json", f'{{"args": ["--wandb_api_key", "{HEX}"]}}', 1, "a key or token"),
    ("x.py", f"run(['job', '--token', '{MIXED}'])", 1, "a key or token"),
    ("x.py", f'os.environ["API_TOKEN"] = "{MIXED}"', 1, "a key or token"),
    ("netrc.txt", f"machine api.wandb.ai\n  login user\n  password {HEX}", 3, "a key or token"),
    ("h.py", f'H = {{"Authorization": "Bearer {MIXED}"}}', 1, "an HTTP header with a key"),
    ("h.py", f'h["Authorization"] = "Bearer {MIXED}"', 1, "an HTTP header with a key"),
    ("h.py", f'x.add_header("Authorization", "Basic {BASIC}")', 1, "an HTTP header with a key"),
    ("h.sh", f'curl -H "Authorization: Basic {BASIC}" u', 1, "an HTTP header with a key"),
    ("h.sh", f"curl -H 'authorization: token {HEX}' u", 1, "an HTTP header with a key"),
    ("h.ipynb", f'["h = {{\\"Authorization\\": \\"Bearer {MIXED}\\"}}"]', 1, "an HTTP header with a key"),
    ("a.ipynb", '["password = \\"correct' + '-horse\\"\\n"]', 1, "a password"),
    ("a.sh", f"tool --api-key {MIXED}", 1, "a key or token"),
    ("a.sh", f"wandb login {HEX}", 1, "a key or token"),
    ("a.py", f"wandb.login(key='{HEX}')", 1, "a key or token"),
    ("d.json", f'{{"auths": {{"r": {{"identitytoken": "{MIXED}"}}}}}}', 1, "a key or token"),
    ("npm.txt", f"//registry.npmjs.org/:_authToken={MIXED}", 1, "a key or token"),
    ("pypi.txt", f"[pypi]\nusername = __token__\npassword = pypi-{HEX}", 3, "a password"),
    ("store", f"https://me:{WORD}@github.com", 1, "a URL with a password"),
    ("sa.json", '{"private_key": "-----BEGIN ' + 'PRIVATE KEY-----\\nMII"}', 1, "a private key"),
    ("adc.json", f'{{"client_id": "a", "refresh_token": "1//0{MIXED}"}}', 1, "a key or token"),
    ("k.txt", "-----BEGIN " + "OPENSSH PRIVATE KEY-----", 1, "a private key"),
    ("a.py", "x = 'xox" + f"b-{DIGITS}-{NAMES}'", 1, "a token of a service"),
    ("settings.bak", f"password: {WORD}", 1, "a password"),
    ("kaggle.json", "{}", 0, "a file .*credentials.*"),
    ("netrc", "", 0, "a file .*credentials.*"),
    (".pgpass", "", 0, "a file .*credentials.*"),
]  # fmt: skip


@pytest.mark.parametrize("name, text, line, kind", KINDS, ids=range(len(KINDS)))
def test_a_secret_is_found_by_its_form(name, text, line, kind):
    assert any(at == line and re.fullmatch(kind, is_) for at, is_ in secret_scan.scan(name, text.encode()))


def test_text_of_windows_is_read():
    assert secret_scan.scan("a.txt", f"a\r\npassword: {WORD}".encode("utf-16")) == [(2, "a password")]


def test_each_refused_file_has_a_line(mine, tmp_path, capsys):
    files = {
        f"more/{number}.txt": f"a\npassword: {WORD}\npassword: {WORD}\nsk = {MIXED}" for number in range(7)
    }
    tree(mine, files)
    message = refused(str(mine / "job.py"), str(tmp_path / "to"))
    assert re.match("suspected secrets .*: 7 files, ", message)
    printed = capsys.readouterr()
    for name, line in zip(files, printed.err.splitlines(), strict=True):
        assert re.fullmatch(rf"refused  {name}:2 \(a password, .*\b1 more\), line 4 \(a key or token\)", line)
    assert (
        WORD not in printed.out + printed.err + message and MIXED not in printed.out + printed.err + message
    )


# Files that a project may well have. (name, text)
ORDINARY = [
    ("x.yaml", "env:\n- name: SECRET_NAME\n  value: training\n- name: MAX_TOKENS\n  value: '512'"),
    ("x.yaml", "- name: pad_token\n  value: '<pad>'\n- name: password\n  value: ${PASSWORD}"),
    ("x.yaml", "description: |\n  a password\ntoken: |\n  two words\n"),
    ("x.py", "parser.add_argument('--token', 'number_of_tokens')"),
    ("a.py", "password = os.environ['PW']\ntoken = getpass.getpass('Token: ')\nauth = None"),
    ("a.yaml", "auth: none\nuser: me\nlogin: required\npassword: ${PW}"),
    ("a.yaml", "auth: basic\nuser: me\nkey: experiment_001_resnet50"),
    ("a.yaml", "data:\n  key: value\n  name: x\nmodel:\n  key: layer4.2.conv3"),
    ("vocab.json", '{"password": 20786, "token": 345, "Ġsecret": 12, "key": 77}'),
    ("vocab.txt", "token 1234\npassword 5678\nuser 12\npassword 1.2e-05\n"),
    ("merges.txt", "pass word\ntok en\nsecret s\nuser name\n"),
    ("tokenizer.json", '{"added_tokens": [{"id": 0, "content": "<pad>"}], "vocab": {"password": 1}}'),
    ("tokenizer_config.json", '{"pad_token": "<pad>", "auth_token": null, "tokenizer_class": "GPT2"}'),
    ("poetry.lock", f'content-hash = "{HEX}"\nhash = "sha256:{HEX}"'),
    ("package-lock.json", f'"integrity": "sha512-{2 * HEX}=="'),
    ("requirements.txt", f"git+https://github.com/x/y@{HEX}\nnumpy --hash=sha256:{HEX}"),
    ("a.ipynb", f'{{"image/png": "iVBORw0KGgoAAAANSUhEUg{50 * HEX}", "metadata": {{}}}}'),
    ("a.html", f'<img src="data:image/png;base64,{50 * MIXED}=="><a href="https://host/?id={HEX}">'),
    ("a.md", "Send `Authorization: Bearer <token>` or `Bearer $TOKEN`: Bearer authentication."),
    ("a.md", "    curl -u user:password -H 'Authorization: Bearer YOUR_TOKEN' https://host"),
    ("a.md", "    machine api.wandb.ai login user password <key>"),
    ("a.md", "The default password is required. Machine learning login and password protected pages."),
    ("a.txt", "machine learning login and password protected"),
    ("a.py", 'h = {"Authorization": f"Bearer {token}"}; h["Authorization"] = "Bearer " + token'),
    ("a.py", 'h = {"authorization": "Bearer hf_***", "x": "Bearer %s" % token}'),
    ("a.sh", 'curl -H "Authorization: Bearer $(cat token)" -u "$USER:$PASSWORD" https://host'),
    ("a.py", 'parser.add_argument("--token", "-t", help="the token of the service")'),
    ("a.py", 'names = ["username", "password", "email_address_2", "gcp_oauth_token", "r2_credentials"]'),
    ("a.py", "connect(host=host, user=user, password=password); smtp.login(user, password)"),
    ("a.py", "key = jax.random.PRNGKey(0); cache_key = 'user_123456789012345'"),
    ("a.xml", f'<assembly name="x" publicKeyToken="{HEX[:16]}"/>'),
    ("a.json", f'{{"AWS::ApiGateway::ApiKey": "{HEX[:16]}"}}'),
    ("a.txt", "src/a.py:10:5:E501:line_too_long\n12:30:45:123:abcd\nroot:x:0:0:root"),
    ("a.csv", "user,key\nme,3\n"), ("commit.txt", HEX), ("token.txt", "<pad>\n"), ("keys.txt", "label"),
    ("tokens.txt", "a1\nb2\n"), ("a.py", 'next = {"page_token": "eyJpbmRleCI6IDExfQ=="}'),
]  # fmt: skip


@pytest.mark.parametrize("name, text", ORDINARY, ids=range(len(ORDINARY)))
def test_ordinary_files_are_packed(name, text):
    assert secret_scan.scan(name, text.encode()) == []


@pytest.mark.thorough
def test_the_programs_of_this_project_are_packed():
    """The scan of hundreds of real files has no false alarm. Tests are not packed: they hold examples."""
    files = [
        path
        for room in ("bootfile", "common", "datasets", "jobs", "launch")
        for path in (ROOT / room).rglob("*")
    ]
    for path in [*files, *(ROOT / "guides").rglob("*")]:
        if path.is_file() and path.suffix != ".pyc":
            assert secret_scan.scan(str(path.relative_to(ROOT)), str(path)) == [], path


def test_a_secret_stays_out_of_what_is_printed(mine, tmp_path, capsys):
    """Neither an error nor the command's output contains the secret, also for a dependency list."""
    secret = "correct" + "-horse"
    tree(mine, {"requirements.txt": f"numpy\n--extra-index-url https://me:{secret}@host/simple\n"})
    message = refused(str(mine / "job.py"), str(tmp_path / "to"))
    assert message.startswith("suspected secrets") and "\n" not in message
    assert "pip-requirements.txt:2 (a URL with a password)" in message
    assert secret not in message + capsys.readouterr().out
    message = refused(str(mine / "job.py"), str(tmp_path / "to"), allow_secret=["base.txt"])
    assert re.search(r"--allow_secret base\.txt: no file .*packed", message)


@pytest.mark.parametrize("line", [
    "password = os.environ['BOOTFILE_CACHE_PASSWORD']", 'PASSWORD = "BOOTFILE_CACHE_PASSWORD"',
    'password = ""', "password: <your password>", "password: ${PW}", "pwd: /home/me", "secret = None",
    "parser.add_argument('--password', help='the password of the server')", "max_tokens: 4096",
    '"pad_token": "<pad>"', '"eos_token": "</s>"', "token: 123456", "AKIAIOSFODNN7EXAMPLE",
    "redis://[user@]host[:port]", "https://user:password@host/data", "redis://user:***@host",
    'f"redis://{user}:{password}@{host}"', "sha256: " + 64 * "a", "key = 'layer4.2.conv3.weight'",
    "git+https://git@host/repository.git", "http://host:8080/@scope/x", "task = 'risk-assessment'",
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.py", "a.yaml"])
def test_false_alarms(name, line):
    assert secret_scan.scan(name, line.encode()) == []


@pytest.mark.thorough
def test_long_lines_are_searched_in_time():
    begin = time.process_time()
    pieces = ("a", "1", "A1", "-", "=", "'", "token=", "a://", "machine a.b login ", "curl -u ", "basic ")
    for piece in (*pieces, "a.", "user=a;", "<token>", "login ", "authorization:", '\\"', '"key":', "key "):
        for name in ("data.json", "data.txt"):
            secret_scan.scan(name, piece.encode() * (200_000 // len(piece)))
    assert time.process_time() - begin < 20
