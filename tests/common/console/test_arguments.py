"""Options are read as users and platforms write them; unknown options and invalid values are errors."""

import argparse
import sys
from pathlib import Path

import pytest

from bootfile.console.words import NAMELESS, mask_words
from bootfile.ground import errors, secrets
from bootfile.ground.errors import BadInput, printable
from common.checkpoint.options import TrainingParser
from common.console import arguments
from common.console.arguments import FLAG, Parser
from common.ground import endings
from common.run.run import JobParser
from datasets.folders import image_folder

INJECTED = ["--init_method=tcp://127.0.0.1:6666", "--rank=0", "--world_size=1"]


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Return a function that parses words as a job with a positional folder does, outside a platform."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MA_NUM_HOSTS"):
        monkeypatch.delenv(name, raising=False)

    def of(*words):
        parser = JobParser("")
        parser.add_argument("data", nargs="?")
        parser.add_argument("-b", "--batch_size", type=int)
        parser.add_argument("--lr", type=arguments.positive_float)
        parser.add_argument("--epochs", type=int)
        parser.add_argument("--title")
        parser.add_argument("--output_dir", default=str(tmp_path))
        parser.add_argument("--prof", nargs="?", type=arguments.positive_int, const=100)
        parser.add_argument("--table", nargs="?", const="-")
        parser.add_argument("--amp", **FLAG)
        parser.add_argument("--local-rank", type=int)
        monkeypatch.setattr(sys, "argv", ["job.py", *words])
        args = parser.parse_args()
        of.ignored = args.ignored
        return {name: value for name, value in vars(args).items() if value and name != "output_dir"}

    return of


def test_a_path_begins_with_the_home_folder(parse, config, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse("--title=~/x")["title"] == parse("--title", "~/x")["title"] == "/home/me/x"
    assert parse("--table=~/t", "~")["table"] == "/home/me/t" and parse("~")["data"] == "/home/me"
    assert parse(*config('title = "~/x"'))["title"] == "/home/me/x"
    for other in ("s3://~/x", "./~/x", "a~/x", "~no-such-user", "-1"):
        assert parse(f"--title={other}")["title"] == other
    with pytest.raises(BadInput, match=r"^~no-such-user .*not .*home folder .*: .*\./~no-such-user "):
        parse("--title=~no-such-user/x")
    parser = arguments.Parser(None)
    parser.add_argument("--cache_dir", default="~/cache")  # as from the environment
    assert parser.parse_args([]).cache_dir == "/home/me/cache"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--batch-size", "4"], {"batch_size": 4}),
        (["-b", "4"], {"batch_size": 4}),
        (["-b4"], {"batch_size": 4}),
        (["--local_rank=1"], {"local_rank": 1}),
        (["--title=--batch-size=4"], {"title": "--batch-size=4"}),
        (["--title", "--batch-size 4"], {"title": "--batch-size 4"}),
        (["--lr", "1", "--", "--batch-size"], {"lr": 1, "data": "--batch-size"}),
        (["--prof"], {"prof": 100}),
        (["--prof", "7", "/images"], {"prof": 7, "data": "/images"}),
        (["--prof", "/images"], {"prof": 100, "data": "/images"}),
        (["/images", "--prof"], {"prof": 100, "data": "/images"}),
        (["--prof", "--amp", "/images"], {"prof": 100, "amp": True, "data": "/images"}),
        (["--amp", "false", "/images"], {"data": "/images"}),
        (["--table", "/a/table.json"], {"table": "/a/table.json"}),
    ],
)
def test_spellings(words, expected, parse):
    assert parse(*words) == expected and parse.ignored == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epoch", "1"], "--epoch (did you mean --epochs?)"),
        (["--learning_rate=0.01"], "--learning_rate (did you mean --lr?)"),
        (["--batch", "64"], "--batch (did you mean --batch_size?)"),
        (["--stage", "false"], "unknown option: --stage (removed: data"),
        (["--pretrained", "/images"], "unknown option: --pretrained;"),
        (["-x", "hunter2"], "unknown option: -x;"),
        (["--secret=hunter2", "--other", "hunter2"], "unknown options: --secret, --other;"),
        (["/images", "hunter2"], NAMELESS),
        (["--prof", "nonsense"], "'nonsense' is not a whole number"),
        (["--lr", "--unheard", "0.1"], "--lr: expected one argument"),
    ],
)
def test_outside_a_platform_an_unknown_option_is_an_error(words, said, parse):
    with pytest.raises(BadInput) as error:
        parse(*words)
    assert said in str(error.value) and error.value.code == errors.BAD_INPUT
    assert "hunter2" not in str(error.value)


EXTRAS = [
    (["--foo", "-1"], ["--foo"]),
    (["--foo", "--lr", "2"], ["--foo"]),
    (["--aws_secret_access_key=hunter2", "--foo=1", "--foo=2"], ["--aws_secret_access_key", "--foo"]),
    (["--x\nepoch=9"], ["--x"]),
    (["--num_gpus=8"], ["--num_gpus"]),
]


@pytest.mark.parametrize("how", ["environment", "arguments", "ignore_unknown"])
@pytest.mark.parametrize(("words", "ignored"), EXTRAS)
def test_on_a_platform_others_pass_by_name(words, ignored, how, parse, monkeypatch, capsys):
    if how == "environment":
        monkeypatch.setenv("MA_NUM_HOSTS", "1")
    added = {"environment": [], "arguments": ["--num-gpus=0"], "ignore_unknown": ["--ignore-unknown", "true"]}
    known = parse("/images", *words, *added[how])
    ignored = list(dict.fromkeys(ignored + ["--num-gpus"] * (how == "arguments")))
    assert known == {"data": "/images"} | ({"lr": 2} if "--lr" in words else {})
    assert parse.ignored == ignored
    assert capsys.readouterr().out.startswith(f"ignored arguments: {' '.join(ignored)}\nsettings ")


@pytest.mark.parametrize(
    "words", [["--epoch=1"], ["--batchsize", "3"], ["--learning-rate=1"], ["--output-url=x"]]
)
def test_on_a_platform_what_resembles_an_option_is_an_error(words, parse, monkeypatch):
    for injected in (INJECTED, ["--num_gpus=0"]):
        with pytest.raises(BadInput, match="did you mean"):
            parse(*words, *injected)
    monkeypatch.setenv("AZUREML_NODE_COUNT", "1")
    with pytest.raises(BadInput, match="did you mean"):
        parse(*words)
    assert parse(*words, "--ignore_unknown") == {}


@pytest.fixture
def config(tmp_path):
    """Return a function that writes a file of options and returns the option that names it."""

    def write(*lines):
        path = tmp_path / ("run.json" if lines[0][0] in "[{" else "run.toml")
        path.write_text("\n".join(lines))
        return ["--config", str(path)]

    return write


def test_a_file_of_options_comes_after_the_command_line(config, parse, capsys):
    words = config(
        'title = "s3://me:testing@host/x"', "batch-size = 8", "lr = 1e-3", "amp = true", "prof = 7"
    )
    known = parse("--lr", "2", *words, "--batch_size=4")
    expected = {"title": "s3://me:testing@host/x", "batch_size": 4, "lr": 2, "amp": True, "prof": 7}
    assert known == expected | {"config": words[1]}
    shown = f"settings batch_size=4 lr=2.0 title=s3://host/x prof=7 amp=True config={words[1]}\n"
    assert capsys.readouterr().out == shown
    parse("--amp", "false")
    assert capsys.readouterr().out == "settings (all defaults)\n"
    words = config('{"epochs": 3, "amp": true, "title": "a \\" b"}')
    assert parse(*words) == {"epochs": 3, "amp": True, "title": 'a " b', "config": words[1]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("epoch = 1", "unknown option: --epoch (did you mean --epochs?)"),
        ('epochs = "many"', "--epochs: invalid int value"),
        ("lr = true", "'true' is not a number above 0"),
        ("lr = [1]", "lr = [1]: expected one"),
        ("lr = {a = 1}", "or a table as a text: '{a = 1}'"),
        ('config = "other.toml"', "config cannot be set"),
        ("lr = ", "is not TOML"),
        ("{", "is not JSON"),
        ('{"lr": 1, "epochs": 2, "lr": 2}', "JSON: lr is there twice"),
        ("batch-size = 8\nbatch_size = 4", "batch-size and batch_size are one option"),
        ('{"lr": null}', "lr = None: expected"),
    ],
)
def test_a_file_of_options_with_a_mistake(line, said, config, parse, monkeypatch):
    monkeypatch.setenv("MA_NUM_HOSTS", "1")  # also on a platform: only the user of the job writes the file
    words = config(line)
    with pytest.raises(BadInput) as error:
        parse(*words, "--ignore_unknown")
    assert str(error.value).startswith(f"--config {words[1]}: ") and said in str(error.value)
    with pytest.raises(BadInput, match=r"missing.toml: No such file or directory"):
        parse("--config=missing.toml")


@pytest.mark.parametrize(
    "name", ["weights", "from", "resume", "without", "output_dir", "train_url", "data_url", "config", "pack"]
)
def test_an_empty_value_of_a_path_is_refused(name, config, monkeypatch):
    """--weights "$WEIGHTS" of a variable that is not set: the run would begin with random weights."""
    monkeypatch.setattr(sys, "argv", ["job.py"])
    ways = [[f"--{name}", ""], [f"--{name}="]]
    if name != "config":
        ways.append(config(f'{name} = ""'))
    for words in ways:
        parser = TrainingParser("")
        parser.add_argument("--data_url")
        parser.add_argument("--pack", metavar="FOLDER")
        parser.add_argument("--title")
        with pytest.raises(BadInput, match=rf"--{name}\b.*: '' is empty: expected ") as error:
            parser.parse_args(["--title=", *words])
        assert "\n" not in str(error.value)


def test_a_file_of_options_on_a_python_without_a_reader(config, parse, monkeypatch):
    """Python 3.10 has no tomllib."""
    for module in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=r"run\.toml: .*Python 3\.10 .*pip install tomli$"):
        parse(*config("epochs = 1"))


def test_the_options_are_read_only_and_have_roles(monkeypatch):
    parser = JobParser("")
    group = parser.add_argument_group("data", role=arguments.IDENTITY)
    group.add_argument("--seed", type=int, default=3)
    group.add_argument("--api_key", default="hunter2")
    group.add_argument("--workers", role=arguments.OPERATION, type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.1)
    monkeypatch.setattr(sys, "argv", ["job.py"])
    args = parser.parse_args()
    with pytest.raises(AttributeError, match=r"args\.lr = 1: .*read only"):
        args.lr = 1
    assert arguments.identity(args) == {"--seed": 3}
    assert arguments.without_operation(args, vars(args)).keys() == {"seed", "api_key", "lr"}
    other = args.replaced({"lr": 1})
    assert (other.lr, args.lr, arguments.identity(other)) == (1, 0.1, {"--seed": 3})


def test_an_option_that_is_a_path_may_change_at_a_restart(monkeypatch):
    parser = JobParser("")
    group = parser.add_argument_group("data", role=arguments.IDENTITY)
    group.add_argument("--table", type=Path)
    group.add_argument("--labels", type=Path, role=arguments.IDENTITY)
    group.add_argument("--lists", type=Path, nargs="+", role=arguments.IDENTITY)
    parser.add_argument("--names", type=Path)
    words = ["--table=a.csv", "--labels=b.csv", "--lists", "c", "d", "--names=e"]
    monkeypatch.setattr(sys, "argv", ["job.py", *words])
    args = parser.parse_args()
    assert arguments.identity(args) == {"--labels": "b.csv", "--lists": ["c", "d"]}
    shown = arguments.settings(args)
    assert shown == {"table": "a.csv", "labels": "b.csv", "names": "e"}
    assert arguments.without_operation(args, shown) == {"labels": "b.csv"}


def test_what_a_launcher_adds_is_always_known(parse, monkeypatch):
    for word in ("--local-rank=0", "--local_rank=0"):
        parser = JobParser("")
        monkeypatch.setattr(sys, "argv", ["job.py", word, "--output_dir=x"])
        parser.add_argument("--output_dir")
        assert parser.parse_args().ignored == [word[:12]]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="--unheard_of"):  # torchrun on a laptop is not a platform
        parse("--unheard_of", "--local_rank=0")


def test_verbs_name_unknown_options_without_their_values():
    parser = Parser("")
    parser.add_argument("--from_start", action="store_true")
    assert parser.parse_args(["--from-start"]).from_start
    with pytest.raises(BadInput, match=r"^unknown option: --password$"):
        parser.parse_args(["--password", "hunter2"])
    _, unknown = parser.parse_known_args(["--password", "hunter2", "-p", "x", "word", "--a=b", "c"])
    assert unknown == ["--password", "-p", "--a", NAMELESS]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (arguments.interval, ["9" * 400 + "s", "1e9", "", "0", "-3", "1.5epoch", "0.5", "s", "10m"]),
        (arguments.positive_float, ["1e308", "inf", "nan", "-1", "9" * 5000]),
        (arguments.non_negative_float, ["1e308", "inf", "nan", "-1"]),
        (arguments.positive_int, ["9" * 400, "9" * 5000, "1e3", "0", "1_0", "\N{ARABIC-INDIC DIGIT TWO}"]),
        (arguments.seed, ["-1", str(2**63), "1_0", "\N{FULLWIDTH DIGIT ONE}", "x", ""]),
    ],
)
def test_numbers_without_sense(kind, texts):
    forms = {"200": (200, "step"), "1.5s": (1.5, "s"), "1epoch": (1, "epoch"), "2epochs": (2, "epoch")}
    assert {text: arguments.interval(text) for text in forms} == forms
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_errors_and_notes_about_files_are_printable(capsys):
    assert printable("a b é 好") == "a b é 好"
    assert printable("a\nb\x1b]0;x\x07\udcff\t\u202e") == r"a\nb\x1b]0;x\x07\udcff\t\u202e"
    endings.say_error("no\nsuch file \x1b[2J\udcff")
    assert capsys.readouterr().err == "error: no such file \\x1b[2J\\udcff\n"
    image_folder.one_line(print)("bad\nfile \x1b[2J\udcff")
    assert capsys.readouterr().out == "bad file \\x1b[2J\\udcff\n"


PASSWORDS = [
    "hunter2", "a/hunter2", "p@hunter2", "a?hunter2", "a#hunter2", "hun hunter2", "hunter2,x", "hunter2://x",
    "[hunter2]", ":hunter2", "hunter2;", "&hunter2", "1/hunter2", "hunter2%40", "@hunter2@", "hunter2=",
]  # fmt: skip
HOLDS_USERS = [
    "redis://u:{}@h:1", "redis://:{}@h", "rediss://u:{}@h:1,i:2/3/team", "redis://h,u:{}@i", "tcp://u:{}@h:1",
    "redis://u:p@h,redis://u:{}@i", "redis:u:{}@h", "u:{}@h", "s3://me:{}@bucket/x", "://u:{}@h",
    "https://u:{}@[::1]:80/x", "obs://{}:p@b", "HTTPS://U:{}@h",
]  # fmt: skip
OTHERS = [
    "redis://h?password=hunter2", "redis://h/?auth=hunter2", "redis://h/hunter2/x/y", "redis://h#hunter2",
    "redis://u:hunter2", "redis://h:6379:hunter2", "https://h/x?token=hunter2", "https://h/x?a=1&b=hunter2#c",
    "https://h/x#hunter2", "https://h/x?token=a@hunter2", "https://h/x;token=hunter2", "https://h/x&b=hunter2",
    "h,password=hunter2", "redis:h?password=hunter2", "redis:/u:hunter2@h", "redis//u:hunter2@h",
]  # fmt: skip


@pytest.mark.parametrize("text", ["{}", "--cache {} is no", "--cache='{}': no", "a {}, b s3://c/d", "x={}"])
def test_no_part_of_an_address_that_may_be_secret_is_shown(text):
    for address in [form.format(each) for form in HOLDS_USERS for each in PASSWORDS] + OTHERS:
        shown = secrets.mask(text.format(address))
        assert "hunter2" not in shown, address


def test_addresses_in_the_settings_and_in_errors_are_masked(parse, capsys):
    for address in OTHERS:
        parse("--title", address)
        endings.say_error(f"--title {address}: no such file")
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out + printed.err and printed.err.count("error: ") == len(OTHERS)


SECRET_NAMES = """
    totp pass_phrase sk ak SK my-sk pin pat pwd bearer cookie webhook webhook_url header auth hf_token
    token2 secret db-password passphrase apikey apiKey access_key_id dsn private_key key accessToken
    X-Amz-Signature
"""
HARMLESS = """
    skip=x task=x keep=x pinned_memory=x pin_memory=x pattern=x max_tokens=512 tokenizer=x author=x monkey=x
    keypoints=x token_dim=x pad_token=x image_key=x patience=x path=x disk=x header_rows=3 use_auth=true
    allow_secret=x
"""


def test_names_of_secrets():
    assert [name for name in SECRET_NAMES.split() if not secrets.is_secret(name, "x")] == []
    assert [each for each in HARMLESS.split() if secrets.is_secret(*each.split("="))] == []


@pytest.mark.parametrize(
    ("words", "shown", "masked"),
    [
        ("--api_key V --lr 0.1", "--api_key *** --lr 0.1", "--api_key"),
        ("--my-sk=V --SK V", "--my-sk=*** --SK ***", "--my-sk --SK"),
        ("--ignored V --lr 0.1", "--ignored *** --lr 0.1", "--ignored"),
        ("-iV --ignored=V -i V", "-i*** --ignored=*** -i ***", "-i --ignored"),
        ("--db postgres://u:V@h/db /data", "--db postgres://h/db /data", "--db"),
        ("--hook https://hooks.slack.com/services/T/V", "--hook https://hooks.slack.com/***", "--hook"),
        ("--task V --max_tokens 512 --keep=3", "--task V --max_tokens 512 --keep=3", ""),
    ],
)
def test_words_of_a_command_line_are_masked(words, shown, masked):
    got = mask_words(words.split(), ["-i", "--ignored"])
    assert got == (shown.split(), masked.split())


def test_a_value_without_an_option_is_masked():
    assert mask_words(["--lr", "0.1", "V", "--a=1", "V"], [NAMELESS])[0] == [
        "--lr", "0.1", "***", "--a=1", "***",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "Bearer hunter2X is wrong", "Authorization: Basic hunter2", "{'api_key': 'hunter2'}", "h?sig=hunter2",
        "a=token=hunter2==", "https://h/services/T/hunter2", "headers={'X-Api-Token': 'hunter2'}",
        "https://h/api/webhooks/1/hunter2/", "https://hooks.h/workflows/hunter2/x", "https://h/bot1:hunter2/x",
    ],
)  # fmt: skip
def test_a_secret_in_a_text_is_masked(text):
    assert "hunter2" not in secrets.mask(text) and "***" in secrets.mask(text)


@pytest.mark.parametrize(
    "words", [["--pin", "hunter2"], ["-phunter2"], ["--pin=hunter2"], ["--number=hunter2"]]
)
def test_an_error_does_not_quote_the_value_of_a_secret_option(words, capsys):
    def number(text):
        return int(arguments.secret(text))

    parser = Parser("")
    parser.add_argument("-p", "--pin", type=int)
    parser.add_argument("--number", type=number)
    with pytest.raises(BadInput) as caught:
        parser.parse_args(words)
    endings.say_error(str(caught.value))
    endings.say_traceback(caught.value)
    printed = capsys.readouterr().err
    assert "hunter2" not in printed and "invalid" in printed


@pytest.mark.parametrize("words", [["--to", "s3://bucket/new"], ["obs://bucket/data"]])
def test_a_url_is_not_a_path_of_this_machine(words):
    """A folder named `s3:` would be made."""
    parser = Parser("")
    parser.add_argument("folder", nargs="?", metavar="FOLDER")
    parser.add_argument("--to", metavar="FILE.csv")
    with pytest.raises(BadInput, match=f"{words[-1]}: .*path .*URL"):
        parser.parse_args(words)
    assert parser.parse_args(["--to", "a.csv"]).to == "a.csv"


def test_more_threads_than_a_machine_can_have_are_refused(monkeypatch, capsys):
    """Hundreds of thousands made the machine unusable for all users."""
    monkeypatch.setattr(sys, "argv", ["job.py"])
    assert TrainingParser("").parse_args(["--threads=1024"]).threads == 1024
    for text in ("1025", "999999"):
        with pytest.raises(BadInput, match=f"^argument --threads: '{text}' is more than 1024"):
            TrainingParser("").parse_args([f"--threads={text}"])
    with pytest.raises(BadInput, match=r"--threads: '0' is not .* at least 1"):
        TrainingParser("").parse_args(["--threads=0"])


def test_the_distance_of_kept_checkpoints_is_in_steps_or_epochs_and_zero_keeps_none(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["job.py"])
    for text in ("0", "0step", "0steps", "0epoch", "0epochs"):
        assert TrainingParser("").parse_args([f"--keep_every={text}"]).keep_every.number == 0
    for text in ("0s", "90s", "1.5epochs", "00", "x"):
        with pytest.raises(BadInput, match=f"--keep_every: '{text}' is not .*1000step.*5epochs.*, or 0"):
            TrainingParser("").parse_args([f"--keep_every={text}"])
