"""What a run depends on, apart from code and data: threads, instruction sets, and their comparison."""

import re
import sys

import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.machine import instructions, levels, processor, threads
from bootfile.machine.cores import physical_cores
from bootfile.machine.differences import find_differences, other_instructions
from bootfile.machine.facts import describe, onednn_instructions
from bootfile.machine.threads import Place
from bootfile.receipt.compare import first_difference
from tests.conftest import environment, run

MACHINE = {"threads": 2, "ATen": "AVX2", "oneDNN": "AVX2", "MKL": "AMD AVX2", "CPU": "A", "torch": "2.14.1"}


def place(cores=8, wish=0, host="a", quota=8, first=0):
    names = [f"0:{number}" for number in range(first, first + cores)]
    return Place(host, names, quota, wish, "")


@pytest.mark.parametrize(
    "places, expected",
    [
        ([place()], 8),
        ([place(), place()], 4),
        ([place()] * 16, 1),
        ([place(quota=3)], 3),
        ([place(quota=4), place(quota=4)], 2),
        ([place(wish=3), place(wish=3)], 3),
        ([place(host="a"), place(host="b")], 8),
        ([place(host="a"), place(host="b", cores=4, quota=4)], 4),  # the same number on each node
        # A launcher has bound each process to cores of its own: a node of 8 cores
        ([place(cores=4, quota=4), place(cores=4, quota=4, first=4)], 4),
        ([place(cores=1, quota=1), place(cores=1, quota=1, first=1)], 1),
    ],
)
def test_processes_divide_the_cores_of_their_node(places, expected):
    assert threads.choose([list(each) for each in places]) == expected


def find_wish(**variables):
    script = "from bootfile.machine.threads import find_place; print(find_place().wish)"
    kept = {name: value for name, value in environment().items() if name not in threads.VARIABLES}
    return int(run("-c", script, fresh=True, env=kept | variables).stdout)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, 0),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"MKL_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, 0),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, 4),
    ],
)
def test_the_default_of_torchrun_is_not_a_wish(variables, expected):
    assert find_wish(**variables) == expected


TORCHRUN_OF_2 = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "variables, in_use, wish, source",
    [
        ({}, 4, 0, ""),
        ({}, 3, 3, "torch.set_num_threads(3)"),
        ({"OMP_NUM_THREADS": "2"}, 2, 2, "OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "2,4"}, 2, 2, "OMP_NUM_THREADS=2"),  # of nested regions
        ({"OMP_NUM_THREADS": "none"}, 4, 0, ""),
        ({"MKL_NUM_THREADS": "9"}, 4, 9, "MKL_NUM_THREADS=9"),  # MKL takes one for each core
        ({"OMP_NUM_THREADS": "2"}, 3, 3, "torch.set_num_threads(3)"),
        (TORCHRUN_OF_2, 1, 0, ""),
        (TORCHRUN_OF_2 | {"LOCAL_WORLD_SIZE": "1"}, 1, 1, "OMP_NUM_THREADS=1"),  # torchrun did not set it
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 1, 0, ""),
    ],
)
def test_the_threads_that_a_user_asks_for(monkeypatch, variables, in_use, wish, source):
    """On four cores, with `in_use` threads of torch."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: in_use)
    monkeypatch.setattr(threads, "physical_cores", lambda: ["0", "1", "2", "3"])
    place = threads.find_place(variables)
    assert (place.wish, place.source) == (wish, source)


def test_set_num_threads_is_a_wish():
    number = len(physical_cores()) + 3
    script = (
        f"import torch; torch.set_num_threads({number}); "
        "from bootfile.machine.threads import find_place; print(find_place().wish)"
    )
    assert run("-c", script, fresh=True).stdout == f"{number}\n"


def test_two_hardware_threads_are_one_core(tmp_path):
    for cpu, core in enumerate([0, 1, 0, 1]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert len(physical_cores(range(4), str(tmp_path))) == 2
    assert len(physical_cores([0, 2], str(tmp_path))) == 1
    assert len(physical_cores(range(6), str(tmp_path))) == 4  # nothing is known of two CPUs


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], None),
        (["--cpu_level", "avx2"], "avx2"),
        (["--cpu-level=any", "--lr", "1"], "any"),
        (["--cpu_level", "native"], "native"),
        (["--cpu_level", "sse9"], None),  # the parser refuses it
        (["--cpu_level"], None),
    ],
)
def test_the_level_is_read_from_a_command_line(words, expected):
    assert levels.read_level(words) == expected
    variables = {}
    levels.apply(words, variables)
    assert variables == levels.VARIABLES.get(expected, {})


def test_a_level_after_the_import_of_torch_is_refused(monkeypatch):
    with pytest.raises(BadInput, match=r"avx2.*after the import of torch"):
        instructions.use("avx2")
    instructions.use("native")
    with pytest.raises(BadInput, match="'sse9' is not a level"):
        instructions.use("sse9")
    monkeypatch.setattr(processor, "widest", lambda: "AVX512")
    with pytest.raises(BadInput, match="--cpu_level avx2: torch was imported before "):
        instructions.check("avx2")


def test_a_cpu_without_avx2_is_named(monkeypatch):
    monkeypatch.setattr(processor, "widest", lambda: "SSE41")
    monkeypatch.setattr(processor, "name", lambda: "A")
    monkeypatch.delitem(sys.modules, "torch")  # a loop of one's own calls use() before its import
    for function in (instructions.check, instructions.use):
        with pytest.raises(BadInput, match=r"level avx2: A has no AVX2\b.*--cpu_level any"):
            function("avx2")


@pytest.mark.thorough
@pytest.mark.parametrize("level, used", [("avx2", "AVX2"), ("any", "DEFAULT")])
def test_torch_computes_with_the_level(level, used):
    if level == "avx2" and processor.widest() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    script = f"""
        from bootfile.machine import instructions
        instructions.use("{level}")
        from bootfile.machine.facts import describe
        facts = describe()
        print(facts["ATen"], facts["MKL"], facts["oneDNN"])
    """
    words = run("-c", "\n".join(map(str.strip, script.splitlines())), fresh=True).stdout.split()
    assert words == [used, "COMPATIBLE", {"avx2": "AVX2", "any": "SSE41"}[level]]


@pytest.mark.parametrize(
    "limit, expected", [("AVX2", "AVX2"), ("SSE41", "SSE41"), ("avx512_core_vnni", None)]
)
def test_a_limit_of_onednn_counts(limit, expected, monkeypatch):
    if processor.widest() != "AVX512" and expected != "SSE41":
        pytest.skip("this CPU has no AVX-512")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    own = onednn_instructions()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert onednn_instructions() == expected or (expected is None and onednn_instructions() == own)


def test_the_facts_are_plain_and_complete():
    facts = describe()
    assert facts["threads"] == torch.get_num_threads()
    names = "ATen oneDNN MKL CPU torch libraries numpy OpenBLAS settings"
    assert {*names.split()} <= facts.keys()
    assert all(isinstance(value, str | int) and value != "" for value in facts.values()), facts


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="fp32_precision is of torch 2.9")
def test_a_precision_that_the_newer_setting_chose_is_described():
    """torch refuses to read the older settings then."""
    script = """
import torch
from bootfile.machine import facts, gpu_facts
torch.backends.mkldnn.conv.fp32_precision, torch.backends.mkldnn.rnn.fp32_precision = "bf16", "ieee"
print(facts.describe()["settings"])
torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "ieee"
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
of_matmul, of_cudnn = gpu_facts._uses_tf32(matmul, matmul), gpu_facts._uses_tf32(cudnn, cudnn.conv)
print(facts.describe()["settings"], of_matmul, of_cudnn)
facts.accelerator.kind = lambda: "cuda"
print(gpu_facts.describe(None)["cuDNN"].partition(" ")[2])
"""
    lines = ["conv=bf16", "matmul=tf32/tf32 conv=bf16 True False", "TF32 of RNN True"]
    assert run("-c", script, fresh=True).stdout.splitlines() == lines


def test_the_most_important_difference_comes_first():
    other = MACHINE | {"threads": 1, "CPU": "B", "ATen": "AVX512"}
    assert find_differences(MACHINE, other)[0] == ("threads", 2, 1)
    assert other_instructions(MACHINE, other) == ("ATen", "AVX2", "AVX512")
    assert other_instructions(MACHINE, MACHINE | {"CPU": "B", "threads": 3}) is None
    assert find_differences(MACHINE, {}) == []


def test_a_difference_in_words():
    one, two = [{"step": 1, **MACHINE}], [{"step": 1, **MACHINE, "threads": 1}]
    assert first_difference(("A", "B"), one, two) == "A computed with 2 threads, B with 1 thread"
    assert first_difference(("A", "B"), one, one) == ""
    moved = [*one, {"step": 7, **MACHINE, "CPU": "Z"}]
    pattern = r"B computed .*\bCPU A\b.*\bCPU Z\b.*\bstep 7\b.*"
    assert re.fullmatch(pattern, first_difference(("A", "B"), one, moved))


@pytest.mark.parametrize(
    "known, expected",
    [
        ({}, "AMD EPYC 9354 32-Core Processor"),
        ({"cpu_name": "AMD EPYC 9354"}, "AMD EPYC 9354 32-Core Processor"),
        ({"cpu_name": "Intel Xeon (Haswell)"}, "Intel Xeon (Haswell)"),  # under an emulator
    ],
)
def test_the_name_of_a_cpu_is_what_its_instruction_says(monkeypatch, known, expected):
    """An emulator shows the file of its host."""
    fields = {"model name": "AMD EPYC 9354 32-Core Processor", "vendor_id": "AuthenticAMD"}
    monkeypatch.setattr(processor, "read_cpuinfo", lambda field: fields[field])
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert processor.name.__wrapped__() == expected
    monkeypatch.setattr(processor, "name", lambda: expected)
    assert processor.vendor.__wrapped__() == ("Intel" if "Haswell" in expected else "AMD")
    monkeypatch.setattr(processor, "name", lambda: "KVM processor")
    assert processor.vendor.__wrapped__() == "AuthenticAMD"


def test_a_run_on_more_machines_than_the_other_one():
    one = [{"step": 1, **MACHINE}]
    two = [*one, {"step": 9, **MACHINE, "ATen": "AVX512"}]
    text = "computed with ATen AVX2 first, and with ATen AVX512 from step 9 on"
    assert first_difference(("a", "b"), two, one) == f"a {text}"
    assert first_difference(("a", "b"), one, two) == f"b {text}"
    assert first_difference(("a", "b"), two, two) == first_difference(("a", "b"), one, one) == ""
    assert first_difference(("a", "b"), one, []) == ""
