"""`python -m launch report` reads runs of real jobs and damaged folders; a browser shows the page."""

import html
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import types
from html.parser import HTMLParser

import numpy as np
import pytest

from bootfile.ground.errors import BadInput
from common.run.starts import KILLED
from launch.report import charts, tables
from launch.report import cli as report
from launch.report.tables import NONE
from tests.conftest import QUICK, environment, finish, records, run, start

# 12 steps of the 89 of an epoch
JOB = (
    "jobs/train.py", *QUICK, "--batch_size=16", "--max_steps=12", "--report_every=1",
    "--save_every=5",
)  # fmt: skip
HOSTILE = "<script>document.title='taken'</script>"


class Page(HTMLParser):
    """tables: label -> rows of cells. tags: (name, attributes) of each tag. text: text outside the rows."""

    def __init__(self, content: str):
        super().__init__()
        self.tables, self.tags, self.text, self._row = {}, [], "", None
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "div" and "aria-label" in dict(attributes):
            self._table = self.tables[dict(attributes)["aria-label"]] = []
        if tag == "tr":
            self._row = []
            self._table.append(self._row)
        if tag in ("td", "th"):
            self._row.append("")

    def handle_endtag(self, tag):
        if tag == "tr":
            self._row = None

    def handle_data(self, data):
        if self._row:
            self._row[-1] += data.strip()
        else:
            self.text += data

    def row(self, table: str, name: str) -> list[str]:
        return next(row[1:] for row in self.tables[table] if row[0] == name)


def made(folder, *runs, title=None) -> Page:
    """Return the page of these runs, written in this process."""
    target = folder / "page.html"
    report.main([*map(str, runs), "--to", str(target), *(["--title", title] if title else [])])
    return Page(target.read_text())


def write_run(folder, lines, starts=()):
    folder.mkdir(parents=True)
    for name, each in (("metrics.jsonl", lines), ("starts.jsonl", starts)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in each))
    return folder


def some_lines(count: int, epochs: int = 3, **extra) -> list[dict]:
    lines = []
    for step in range(1, count + 1):
        epoch = (step - 1) * epochs // count + 1
        lines.append(
            {
                "epoch": epoch, "step": step, "loss": 2.5 / step**0.3, "acc": 1 - 1 / (step + 1),
                "lr": 0.1 * (1 - step / count), "images_per_s": 900 + 50 * math.sin(step),
                "data_time": 0.1, "compute_time": 0.4, "time": 1.7e9 + step / 2,
            } | extra
        )  # fmt: skip
        if step % (count // epochs) == 0:
            ends = {"val_loss": 2.7 / step**0.3, "val_acc": 1 - 2 / (step + 2), "val_count": 100}
            lines.append({"epoch": epoch, "step": step, "time": 1.7e9 + step / 2 + 0.2} | ends)
    return lines


def a_start(step: int, time: float, steps: int = 40, settings=None, **more) -> dict:
    return {
        "time": time, "step": step, "steps": steps, "laps": {"set-up": 2.0, "model": 0.5},
        "settings": {"lr": 0.1, "resume": "auto", "dataset": "digits"} | (settings or {}),
        "environment": {"torch": "2.14.1", "world size": 1},
    } | more  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return (output of a run that was killed after step 5 and resumed, output of an uninterrupted run)."""
    folder = tmp_path_factory.mktemp("outputs")
    killed, whole = folder / "killed", folder / "whole"
    options = {"env": environment(OMP_NUM_THREADS="1")}
    job = start(*JOB, f"--output_dir={killed}", **options)
    for line in job.stdout:
        step = re.match(r"epoch=1 step=(\d+)/", line)
        if step and int(step[1]) > 5 and (killed / "checkpoints" / "step_5.pt").exists():
            os.kill(job.pid, signal.SIGKILL)
    finish(job, -signal.SIGKILL)
    again = start(*JOB, f"--output_dir={killed}", "--keep=2", **options)
    run(*JOB, f"--output_dir={whole}", **options)
    finish(again)
    return killed, whole


def test_a_run_that_was_killed_and_one_that_was_not(runs, tmp_path):
    target = tmp_path / "report.html"
    said = run("-m", "launch", "report", *runs, "--to", target).stdout
    assert re.fullmatch(rf"{target}: 2 runs, \d+ kB\n", said)
    page = Page(target.read_text())
    [[first, second, data, state]] = page.tables["Receipts"][1:]
    assert (first, second) == ("killed", "whole")
    assert data == "equal for 12 steps: the same ids, labels and augmentation"
    assert re.fullmatch(r"equal at steps? [\d, ]*12", state)
    assert page.tables["Settings that differ"][1:] == [["keep", "2", "3"]]
    assert page.row("All settings", "save_every") == ["5step", "5step"]
    assert page.row("Final figures", "done") == ["12 of 12 steps (finished)"] * 2
    assert page.row("Final figures", "restarts") == ["1", "0"]
    again = json.loads((runs[0] / "starts.jsonl").read_text().splitlines()[1])
    resumed, lost = again["step"], again["lost"]["step"]
    assert 5 <= resumed < lost <= 12
    first, second, other = page.tables["Starts and restarts"][1:]
    assert [first[0], first[1], first[3]] == ["killed", "1", "0"] and other[:2] == ["whole", "1"]
    assert second[1] == "2" and second[3] == str(resumed)
    assert first[8:] == [KILLED] and second[6:] == [str(lost - resumed), "keep: 3 → 2", "done"]
    assert page.row("Environment", "job") == ["train.py"] * 2
    named = [types.SimpleNamespace(path=str(path), name=path.name) for path in (tmp_path, *runs)]
    [without, [first, second, verdict, _]] = tables.compare_receipts(named)
    assert (without[0], first, second) == (tmp_path.name, "killed", "whole") and "equal for 12" in verdict
    for folder, place in zip(runs, (0, 1), strict=True):
        ends = [line for line in records(folder) if "val_acc" in line]
        assert page.row("Final figures", "validation accuracy")[place] == f"{ends[-1]['val_acc']:.2%}"
        columns, *rows = page.tables[f"Epochs of {folder.name}"]
        losses = [row[columns.index("val_loss")] for row in rows]
        assert losses == [f"{each['val_loss']:.5g}" for each in ends]
    marked = [attributes for tag, attributes in page.tags if attributes.get("class") == "mark"]
    assert len(marked) == 5  # loss, accuracy, images per second, learning rate, memory


def test_seconds_are_those_of_the_run(runs, tmp_path):
    """The parts of the epochs add up to the time between the first and the last line of the job."""
    page = made(tmp_path, runs[1])
    lines = records(runs[1])
    computing = sum(line.get("compute_time", 0) for line in lines)
    said = page.row("Final figures", "computing")[0]
    assert float(said.split(" s ")[0]) == pytest.approx(computing, abs=0.1)
    columns, *rows = page.tables["Epochs of whole"]
    column = columns.index("evaluating and saving")
    evaluating = sum(
        line["time"] - before["time"] for before, line in itertools.pairwise(lines) if "val_acc" in line
    )
    assert sum(float(row[column].removesuffix(" s")) for row in rows) == pytest.approx(evaluating, abs=0.1)


def test_what_a_restart_did_again_and_how_long_nothing_ran(tmp_path):
    lines = some_lines(40)
    for line in lines:
        line["time"] += 100 if line["step"] > 16 else 0
    lost = {"step": 20, "time": 1.7e9 + 10}
    starts = [
        a_start(0, 1.7e9, code="c0ffee"),
        a_start(16, 1.7e9 + 108, settings={"lr": 0.2}, lost=lost, code="c0ffee-dirty"),
    ]
    page = made(tmp_path, write_run(tmp_path / "run", lines, starts))
    changed = "lr: 0.1 → 0.2; code: c0ffee → c0ffee-dirty"
    assert page.tables["Starts and restarts"][2][3:] == ["16", "2.50 s", "95.5 s", "4", changed, NONE]
    assert page.row("Final figures", "repeated steps") == ["4"]
    starts[1]["settings"]["output_dir"] = "s3://bucket/run"  # reports after the last upload are lost
    page = made(tmp_path, write_run(tmp_path / "at a URL", lines, starts))
    assert page.row("Final figures", "repeated steps") == ["at least 4"]
    assert page.tables["Starts and restarts"][2][6] == "at least 4"


def test_resume_never_begins_anew(tmp_path):
    starts = [
        a_start(0, 1.6e9),
        a_start(0, 1.7e9, settings={"resume": "never"}, lost={"step": 9, "time": 1.6e9}),
    ]
    page = made(tmp_path, write_run(tmp_path / "run", some_lines(20), starts))
    assert page.row("Final figures", "restarts") == ["0"]
    assert "repeated steps" not in [row[0] for row in page.tables["Final figures"]]
    assert len(page.tables["Starts and restarts"]) == 2


@pytest.mark.parametrize(("content", "note"), [
    ("", "metrics.jsonl is missing or empty"),
    ('{"step": 1, "epoch": 1, "loss": 2.0}\n{"step": 2, "lo', "jsonl: 1 lines could not be read"),
    ('{"step": 1, "loss": 2}\nnon\n[1]\n{"step": 2, "loss": 1}\n', "2 lines could not be read"),
    ('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e999}\n', "loss: 2 of 2 values are NaN"),
    ('{"step": 1, "epoch": 1e300, "loss": 1' + "0" * 400 + ', "time": 1e300}\n', "1 of 1 values are NaN"),
])  # fmt: skip
def test_files_that_are_not_whole(content, note, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    page = made(tmp_path, tmp_path / "run")
    assert note in capsys.readouterr().out and note in page.text
    assert "no start in starts.jsonl" in page.text


def test_starts_that_are_strange(tmp_path):
    folder = write_run(tmp_path / "run", some_lines(10))
    long = '{"time": 5, "step": 0, "settings": {"a": {"b": [1]}, "c": "LONG"}, "lost": {"step": "a"}}'
    for line in (
        '{"time": 1e300, "step": 1e300, "steps": NaN, "laps": {"a": NaN}}',
        '{"time": -1e18, "step": 0, "settings": [1], "environment": "x", "lost": 7, "laps": 3}',
        long.replace("LONG", "x" * 100_000),
        '{"time": 1700000000, "step": 0, "settings": {"resume": ["never"], "\\ud800": "\\ud800"}}',
    ):
        (folder / "starts.jsonl").write_text(f"{line}\n{line[:-9]}")
        made(tmp_path, folder)


def test_errors_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    good = write_run(tmp_path / "good", some_lines(9))
    (write_run(tmp_path / "odd", []) / "metrics.jsonl").unlink()
    (tmp_path / "odd" / "metrics.jsonl").mkdir()
    for arguments, words in [
        ([tmp_path / "gone"], f"no run at {tmp_path / 'gone'}: neither metrics.jsonl nor starts"),
        ([tmp_path / "empty"], f"no run at {tmp_path / 'empty'}: neither metrics.jsonl nor starts.jsonl"),
        ([tmp_path / "odd"], f"{tmp_path / 'odd' / 'metrics.jsonl'} cannot be read: Is a directory"),
        ([good, "--to", tmp_path / "no" / "page.html"], "not a folder"),
        ([good, "--to", tmp_path / "gone.html" / "a.html"], "not a folder"),
        ([good, "--to", tmp_path / "best.pth"], "best.pth: expected"),
    ]:
        with pytest.raises(BadInput) as error:
            report.main([*map(str, arguments)])
        assert words in str(error.value)
    assert not list(tmp_path.glob("**/*.partial"))


def test_only_an_earlier_report_is_replaced(tmp_path, capsys):
    folder, mine = write_run(tmp_path / "run", some_lines(9)), tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    os.mkfifo(tmp_path / "pipe.html")
    for to in (folder / "metrics.jsonl", folder / "receipt.bin", tmp_path / "pipe.html", mine):
        with pytest.raises(BadInput, match=r"expected a name|--force"):
            report.main([str(folder), "--to", str(to)])
    assert mine.read_text() == "<p>mine</p>" and not (folder / "receipt.bin").exists()
    for to in (tmp_path / "page.html", folder / "page.html"):
        for _ in range(2):
            assert report.main([str(folder), f"{folder}/", "--to", str(to)]) == 0
            assert ": 1 run, " in capsys.readouterr().out
    assert report.main([str(folder), "--to", str(mine), "--force"]) == 0
    assert "<!DOCTYPE html>" in mine.read_text()


@pytest.mark.thorough
def test_a_long_run_is_thinned(tmp_path):
    lines = some_lines(50_000, epochs=500)
    folder = write_run(tmp_path / "run", lines, [a_start(0, 1.7e9), a_start(90, 1.7e9 + 50)])
    page = made(tmp_path, folder)
    assert (tmp_path / "page.html").stat().st_size < 300_000
    assert 100 < len(page.tables["Epochs of run"]) <= 201
    x, values = np.arange(480.0), np.arange(480.0) % 2 * 6
    values[1], values[4:8] = np.nan, np.nan
    x, mean, low, high = charts._summarize(x, values)
    assert x[0] == pytest.approx(5 / 3) and [*mean[:3]] == pytest.approx([2, np.nan, 3], nan_ok=True)
    assert {*low[2:]} == {0} and {*high[2:]} == {6} and len(x) == 120


def test_the_time_that_was_lost_to_the_slowest_rank(tmp_path):
    lines = [line | {"ranks": {"lost": 0.123}} for line in some_lines(40)]
    lines[-1]["ranks"] = {"lost": "x"}  # damaged
    page = made(tmp_path, write_run(tmp_path / "several", lines), write_run(tmp_path / "one", some_lines(9)))
    assert page.row("Final figures", "lost to the slowest rank") == ["12.30%", "–"]


def test_other_figures_have_charts_too(tmp_path):
    """Other figures, such as the pairs and seconds of jobs/loader.py, also have charts."""
    lines = [{"epoch": n, "step": n * 9, "pairs": 96, "seconds": 1.5 / n} for n in (1, 2, 3)]
    page = made(tmp_path, write_run(tmp_path / "run", lines))
    assert page.tables["Epochs of run"][1][:3] == ["1", "96", "1.5"]
    assert sum(tag == "svg" and attributes.get("role") == "img" for tag, attributes in page.tags) == 2


def of_own_metric(best: str = "lowest rmse") -> tuple[list[dict], dict]:
    """Return the lines and the start of a job without accuracy, whose metric is best at step 20 of 30."""
    lines = some_lines(30)
    for line in lines:
        for name in ("acc", "val_acc"):
            line.pop(name, None)
        if "val_loss" in line:
            line |= {"val_rmse": abs(line["step"] - 20) + 0.5, "val_r2": line["step"] / 100}
    return lines, a_start(0, 1.7e9, 30) | {"best": best, "environment": {"job": "own.py"}}


def test_the_best_value_of_a_metric_of_ones_own(tmp_path):
    lines, start = of_own_metric()
    page = made(tmp_path, write_run(tmp_path / "run", lines, [start]))
    assert page.row("Final figures", "validation rmse") == ["10.5"]
    assert page.row("Final figures", "lowest validation rmse") == ["0.5 at step 20"]
    assert page.row("Final figures", "validation r2, all evaluations") == ["0.1 to 0.3"]
    assert re.search(r"30 of 30 steps .*lowest .*rmse 0\.5 .*step 20", page.text)
    title = next(line for line in page.text.splitlines() if line.strip())
    assert title.strip() == "own.py on digits: run"
    _, start = of_own_metric("highest gone")
    page = made(tmp_path, write_run(tmp_path / "other", lines, [start]))
    assert "lowest validation loss" in page.text, "a name that the run does not have chooses nothing"
    assert made(tmp_path, tmp_path / "other", title="Mine").text.strip().startswith("Mine")


def test_charts_are_named_in_words_and_begin_at_0_where_a_small_change_must_look_small(tmp_path):
    lines, start = of_own_metric()
    for line in lines:
        if "loss" in line:
            line["memory_mb"] = 868 + line["step"] / 10
    page = made(tmp_path, write_run(tmp_path / "run", lines, [start]))
    labels = [tags["aria-label"].split(" by step")[0] for _, tags in page.tags if tags.get("role") == "img"]
    assert labels[:3] == ["Loss. Loss", "Validation rmse. Validation rmse", "Validation r2. Validation r2"]
    assert labels[-1] == "Peak memory of rank 0 in MB. Peak memory of rank 0 in MB"
    assert "val_" not in page.text and "memory_mb" not in page.text and "optimizer step" in page.text


def test_the_first_of_two_runs_is_the_broad_line(tmp_path):
    """A reader sees both of two equal curves."""
    first, second = (write_run(tmp_path / name, some_lines(40)) for name in "AB")
    page = made(tmp_path, first, second)
    widths = [tags["stroke-width"] for tag, tags in page.tags if tag == "path" and "stroke-width" in tags]
    assert "broad line" in page.text and widths[:2] == ["5.0", "1.5"]


@pytest.mark.parametrize(("change", "rows"), [
    ({}, [["owl", "0", "0", "–", "–"], ["cat", "10", "9", "90.00%", "dog (1)"]]),
    ({"matrix": [[], [], []]}, [["dog", "10", "6", "60.00%", "–"]]),
    ({"classes": ["one"]}, [["1", "10", "6", "60.00%", "0 (3)"]]),
    ({"correct": [1]}, None),
])  # fmt: skip
def test_a_table_of_classes(change, rows, tmp_path):
    matrix = [[9, 1, 0], [3, 6, 1], [0, 0, 0]]
    counts = {"step": 40, "classes": ["cat", "dog", "owl"], "count": [10, 10, 0], "correct": [9, 6, 0]}
    folder = write_run(tmp_path / "run", some_lines(40))
    (folder / "confusion.json").write_text(json.dumps(counts | {"matrix": matrix} | change))
    page = made(tmp_path, folder)
    if rows is None:
        assert "Classes of run" not in page.tables
        return
    table = page.tables["Classes of run"][1:]
    assert [row[2] for row in table] == ["6", "9", "0"], "the worst class first, one without images last"
    assert all(row in table for row in rows)


def test_nothing_is_loaded_from_anywhere(tmp_path):
    page = made(tmp_path, write_run(tmp_path / "run", some_lines(9), [a_start(0, 1.7e9)]))
    assert {"script", "link", "img", "iframe", "object", "base", "a"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert {"src", "href", "srcset"}.isdisjoint(attributes)
        assert attributes.get("xlink:href", "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]
    content = (tmp_path / "page.html").read_text()
    assert "@import" not in content and not re.search(r"url\((?!#)", content)
    policy = next(each["content"] for tag, each in page.tags if "http-equiv" in each)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")


LAID_OUT = """page => {
  const root = page.documentElement, width = page.defaultView.innerWidth, wrong = [];
  page.querySelectorAll("details").forEach(each => each.open = true);
  if (root.scrollWidth > width) wrong.push(`page ${root.scrollWidth} of ${width} px`);
  for (const svg of page.querySelectorAll("figure > svg")) {
    const frame = svg.getBoundingClientRect(), title = svg.getAttribute("aria-label").split(".")[0];
    const labels = [...svg.querySelectorAll("text")].filter(each => each.textContent);
    const boxes = labels.map(each => each.getBoundingClientRect());
    boxes.forEach((a, i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 ||
          a.bottom > frame.bottom + 1)
        wrong.push(`${title}: ${labels[i].textContent} is cut`);
      if (a.height < 10.99) wrong.push(`${title}: ${labels[i].textContent} is ${a.height} px high`);
      for (let j = 0; j < i; j++) {
        const b = boxes[j];
        if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
          wrong.push(`${title}: ${labels[i].textContent} over ${labels[j].textContent}`);
      }
    });
  }
  const background = page.defaultView.getComputedStyle(page.body).backgroundColor;
  return {width, background, wrong: [...new Set(wrong)], title: page.title,
          charts: page.querySelectorAll("figure > svg[role=img][aria-label]").length,
          tags: page.querySelectorAll("script, img, b, [onload], [onerror]").length};
}"""
SCREENS = {360: "light", 390: "dark", 1280: "light"}  # width in pixels: the colours that the reader prefers


def show(folder) -> list[dict]:
    """Return what a browser lays out of folder/page.html, on each of SCREENS."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        pytest.skip("chromium is not installed")
    page = html.escape((folder / "page.html").read_text())
    frames = [
        f'<iframe srcdoc="{page}" width={width} height=844 style="border:0; color-scheme:{scheme}"></iframe>'
        for width, scheme in SCREENS.items()
    ]
    script = f"""onload = () => document.body.textContent = "SHOWN" + JSON.stringify(
        [...document.querySelectorAll("iframe")].map(each => ({LAID_OUT})(each.contentDocument)))"""
    (folder / "frames.html").write_text(f"<!DOCTYPE html><body>{''.join(frames)}<script>{script}</script>")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    words += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"]
    command = [program, *words, f"file://{folder}/frames.html"]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(html.unescape(re.search(r"SHOWN(.*)</body>", dumped, re.DOTALL)[1]))


@pytest.mark.thorough
def test_the_page_in_a_browser(runs, tmp_path):
    """No element overflows, overlaps or is cut, on a phone and on a desktop."""
    exploded = some_lines(40)
    for line in exploded:
        if "loss" in line and line["step"] > 30:
            line["loss"] *= 10.0 ** (line["step"] - 30)
    name = "a_rather_long_name_of_a_run_without_any_blank" * 3
    long = write_run(tmp_path / name, some_lines(5000, epochs=200))
    starts = [a_start(0, 1.7e9), a_start(8, 1.7e9 + 12, lost={"step": 12, "time": 1.7e9 + 6})]
    others = [write_run(tmp_path / f"run{number}", some_lines(40), starts) for number in range(4)]
    made(tmp_path, *runs, long, write_run(tmp_path / "exploded", exploded), *others)
    for shown, (width, scheme) in zip(show(tmp_path), SCREENS.items(), strict=True):
        assert (shown["width"], shown["wrong"]) == (width, []) and shown["charts"] >= 5
        assert shown["background"] == ("rgb(20, 23, 26)" if scheme == "dark" else "rgb(255, 255, 255)")


@pytest.mark.thorough
def test_names_and_values_are_only_text(tmp_path):
    image = '<img src=x onerror="document.title=1">#0000ff #000001 $x$'
    lines = some_lines(20, **{HOSTILE: 1.0, f'"><svg onload=alert(1)>{image}': 2.0, "]]>-->": 3.0})
    lines[0]["receipt"] = lines[-2]["receipt"] = f"</style>{HOSTILE}"
    settings = {HOSTILE: HOSTILE, "b": f"</td></table></svg>{HOSTILE}{image}", "c\u202e": "\u202e\0\x1b[0m"}
    starts = [a_start(0, 1.7e9, settings=settings), a_start(8, 1.7e9 + 5, settings={HOSTILE: image})]
    folders = [
        write_run(tmp_path / name.replace("/", "\u2215"), lines, starts) for name in (HOSTILE, f"'\"&{image}")
    ]
    os.rename(folders[1], (odd := os.fsencode(tmp_path) + b"/\xff\xfe<b>"))
    page = made(tmp_path, folders[0], os.fsdecode(odd), title=f"</title>{HOSTILE}")
    assert not [tag for tag, _ in page.tags if tag in ("script", "img", "b")]
    for shown in show(tmp_path):
        assert (shown["title"], shown["tags"], shown["wrong"]) == (f"</title>{HOSTILE}", 0, [])


def test_a_table_of_many_epochs_reaches_over_the_whole_run():
    run = types.SimpleNamespace(ends={number: {"val_loss": 1 / number} for number in range(1, 502)}, split={})
    columns, rows = tables.make_epoch_table(run)
    assert columns[:2] == ["epoch", "val_loss"] and [int(row[0]) for row in rows] == [*range(1, 502, 3)]
