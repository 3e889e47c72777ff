"""The tables of options, environment variables and exit codes agree with the code."""

import re
from typing import Any

import pytest

from bootfile.ground import errors
from common.checkpoint.options import TrainingParser
from common.console.arguments import IDENTITY, OPERATION, REMOVED, interval
from common.ground import endings
from datasets.loaders import aliases
from launch.__main__ import VERBS
from tests.support.options import ROOT, documents, read_parsers, render, rewrite

# between processes that Bootfile starts itself: no user sets them
INTERNAL = {
    "PROCESSES_OF",
    "ONLY_FROM_STEP",
    "SLOW_DATA",
    "ERROR_PIPE",
    "HELP_IMPORTS",
    "RUN_FOLDER",
    "SIMULATED_NODE",
}
INTERNAL |= {"MEMBER", "OUTPUT_HELD", "STARTED", "STARTED_BY", "STORE_IS_PARENTS"}
# The options of the jobs are frozen. These jobs -> the options that they have, and no other job.
IMAGES = "train train_dp train_amp train_ddp train_exact train_fsdp train_fast train_ray"
OPTIONS = {
    IMAGES: "--dataset",
    f"{IMAGES} train_text": "--width",
    f"{IMAGES} imagenet loader loader_dali": "--custom_data",
    f"{IMAGES} train_text train_own imagenet loader loader_dali": """
        --config --ignore_unknown --data_url --output_dir --train_url --enable_gpu --batch_size --epochs
        --seed""",
    f"{IMAGES} train_text train_own imagenet": """
        --lr --max_steps --epoch_steps --report_every --resume --weights
        --from --at_step --skip_steps --without --keep_every
        --evaluate --save_every --keep --evaluate_every --epoch_weights --grace --preemption
        --stuck_after --stuck_exit --survivors --recheck --max_bad_steps --slow_rank --sample_losses --tracker
        --threads --cpu_level""",
    "train_ddp train_exact train_fsdp imagenet loader loader_dali": """
        --init_method --rank --world_size --local_rank --processes_per_node --timeout""",
    "train_exact imagenet": "--exact_shards",
    "train_exact": "--elastic",
    "train_fsdp": "--precision --checkpoint_format",
    "train_fsdp imagenet": "--grad_checkpointing",
    "train_fast": "--short_recipe",
    "train_fast imagenet": "--compile",
    "train_ray": "--distribute_mode",
    "train_ray imagenet": "--ray_address",
    "train_ray train_own imagenet": "--workers",
    "train_text": "--context --layers --heads --dropout",
    "train_text imagenet": "--accumulate --clip_grad --warmup --weight_decay",
    "imagenet": """
        -a -b -j -p --print_freq --model --pretrained --fp16 --use_dali --dali_cpu --gather_checkpoints
        --val_share --splits --data_backend --pack --pack_form --cache --cache_mode --max_bad_images
        --class_weights --mean --std --crop_share --interpolation --image_size --val_image_size
        --first_image_size --trivial_augment --rand_augment --color_jitter --random_erasing --mixup --cutmix
        --arch --model_kwargs --freeze --amp --ema --optimizer --momentum
        --layer_decay --lr_schedule --min_lr --loss --label_smoothing
        --best_metric --early_stopping --prof --training_only""",
    "imagenet loader loader_dali": "--cache_dir",
    "loader loader_dali": "--data_source --split --resize --crop --num_workers --result_dir --preview",
    "loader_dali": "--dali_device",
}
COMMON = (ROOT / "common" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def parsers() -> dict[str, Any]:
    return read_parsers()


def read_names(rows: list[list[str]]) -> set[str]:
    """Return the names of the options of a job."""
    return {word.strip(",") for _, option, _ in rows for word in option.split() if word.startswith("-")}


def test_the_options_of_the_jobs_are_frozen(parsers):
    frozen = [(jobs.split(), names.split()) for jobs, names in OPTIONS.items()]
    have = {(f"jobs/{job}.py", name) for jobs, names in frozen for job in jobs for name in names}
    found = {(job, name) for job in parsers if job.endswith(".py") for name in read_names(parsers[job])}
    assert sorted(found - have) == [], "options are frozen: a new knob goes into a block (CONTRIBUTING.md)"
    assert sorted(have - found) == [], "a removed option is entered in REMOVED of common/console/arguments.py"
    assert not {name for _, name in have} & {f"--{name}" for name in REMOVED}


def test_each_option_takes_a_value(parsers):
    """The console of a platform knows only NAME = VALUE, and `launch submit` passes --NAME=VALUE."""
    switches = {
        option
        for job, rows in parsers.items()
        if job.endswith(".py")
        for _, option, _ in rows
        if re.fullmatch(r"-+\w+(, -+\w+)*", option)
    }
    assert not switches - {"-h, --help"}


@pytest.mark.parametrize(("words", "weights"), [
    (["--pretrained"], "DEFAULT"), (["--pretrained=true"], "DEFAULT"), (["--pretrained", "false"], None),
    (["--pretrained", "/images"], "DEFAULT"), (["--weights=best.pth", "--pretrained=false"], "best.pth"),
])  # fmt: skip
def test_switches_with_and_without_a_value(words, weights):
    def parse(*words):
        parser = TrainingParser(None)
        aliases.add_arguments(parser)
        return parser.parse_args(words)

    args = parse(*words)
    assert args.weights == weights and args.evaluate is False
    assert args.data == ("/images" if "/images" in words else None)
    if weights:
        assert parse(*words, "--evaluate=true").evaluate is True
        assert parse("--evaluate", "/images", "--weights=best.pth").data == "/images"


def test_the_experimental_options_are_options(parsers):
    page = (ROOT / "jobs" / "options.md").read_text(encoding="utf-8")
    paragraph = re.search(r"^- \*\*Experimental\*\*.*?(?=^- )", page, re.MULTILINE | re.DOTALL)[0]
    jobs = [rows for name, rows in parsers.items() if name.endswith(".py")]
    named = set(re.findall(r"`(--\w+)`", paragraph))
    assert named and named <= set().union(*map(read_names, jobs))


def test_a_job_may_define_an_option_of_a_run_itself():
    """As imagenet.py does, and copies of the jobs of version 0.28."""
    parser = TrainingParser(None)
    own = parser.add_argument_group("own").add_argument
    for names in (["--data_url"], ["--output_dir", "--train_url"], ["--enable_gpu"], ["--max_steps"]):
        own(*names, role=IDENTITY)
    own("-p", "--report_every", "--print_freq", default="7s")
    args = parser.parse_args(["-p", "3s", "--max_steps=4", "--train_url=there", "--epoch_steps=2"])
    assert (args.report_every, args.max_steps, args.output_dir, args.epoch_steps) == ("3s", "4", "there", 2)
    assert args.roles["data_url"] == args.roles["epoch_steps"] == IDENTITY and not args.roles["report_every"]


def test_an_option_of_the_job_counts_in_any_spelling():
    parser = TrainingParser(None)
    parser.add_argument("--max-steps", type=int, default=7, role=IDENTITY)
    parser.add_argument("--enable-gpu", action="store_true")
    parser.add_argument("--folder", dest="output_dir", role=IDENTITY)
    args = parser.parse_args(["--enable_gpu", "--folder=there"])
    assert (args.max_steps, args.enable_gpu, args.output_dir) == (7, True, "there")
    assert args.roles["max_steps"] == args.roles["output_dir"] == IDENTITY


def test_a_job_may_set_the_defaults_of_the_options_that_the_parser_adds():
    parser = TrainingParser(None)
    parser.set_defaults(report_every="3s", max_steps=7, save_every="90s", keep=2, lr=0.4)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args(["--keep=5"])
    assert args.lr == 0.1, "argparse: the default of a later option counts"
    assert (args.report_every, args.save_every) == (interval("3s"), interval("90s"))
    assert (args.max_steps, args.keep) == (7, 5)


def test_the_roles_of_the_options_of_a_run():
    roles = TrainingParser(None).parse_args([]).roles
    assert {roles[name] for name in ("output_dir", "report_every", "enable_gpu")} == {OPERATION}
    assert (roles["epoch_steps"], roles["max_steps"]) == (IDENTITY, "")


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_options_are_those_of_the_parsers(path, parsers):
    text = path.read_text(encoding="utf-8")
    assert rewrite(text, parsers) == text, "python -m tests.support.options rewrites the tables"


def test_every_job_and_verb_has_its_options_in_a_table(parsers):
    for job in ("train_dp", "train_amp"):
        assert parsers[f"jobs/{job}.py"] == parsers["jobs/train.py"]
    shown = {name for path in documents() for name in re.findall(r"\w+\.py", path.read_text())}
    assert {name.removeprefix("jobs/") for name in parsers if name.endswith(".py")} <= shown
    page = (ROOT / "launch" / "options.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == set(VERBS)
    rows = render("launch", parsers).splitlines()[1:-1]
    assert len(rows) > 15 and all(re.fullmatch(r"[a-z ]+  +\S.*", row) for row in rows)


@pytest.mark.thorough
def test_a_path_may_begin_with_the_home_folder():
    """Each argument of text is one of the parser that expands ~, so none makes a folder of this name."""
    paths = read_parsers("--paths")
    assert {"data_url", "output_dir", "weights", "config"} <= {*paths["jobs/imagenet.py"]}
    assert {"to", "code_dir", "job"} <= {*paths["pack"]} and {"url", "to"} <= {*paths["fetch"]}
    assert [each for name in paths.keys() - {"verbs"} for each in paths[name] if " is ~" in each] == []


def test_environment_variables_are_all_in_the_table():
    code = [
        path
        for room in ("bootfile", "common", "datasets", "launch", "jobs")
        for path in (ROOT / room).rglob("*.py")
    ]
    used = {name for path in code for name in re.findall(r"BOOTFILE_(\w+)", path.read_text(encoding="utf-8"))}
    items = re.findall(r"^- ((?:`\w+`,? ?)+)", COMMON, re.MULTILINE)
    told = {name for item in items for name in re.findall(r"`BOOTFILE_(\w+)`", item)}
    assert told == used - INTERNAL


def test_exit_codes_are_all_in_the_table():
    known = vars(errors) | vars(endings)
    codes = {str(value) for name, value in known.items() if name.isupper() and isinstance(value, int)}
    page = (ROOT / "guides" / "trouble.md").read_text(encoding="utf-8")
    assert codes <= set(re.findall(r"^\| `(\d+)`", page, re.MULTILINE)) and len(codes) == 6
