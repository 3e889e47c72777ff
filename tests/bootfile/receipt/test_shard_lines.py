"""The file of the sums of shards: each step once, also after a kill."""

from bootfile.records import SHARDS, cut_shards, read_shards, write_shards


def test_a_resumed_run_writes_later_steps_again(tmp_path):
    folder = str(tmp_path)
    cut_shards(folder, 3)
    assert read_shards(folder) == {} and not (tmp_path / SHARDS).exists()
    write_shards(folder, {1: [7, 2**48 - 1], 2: [8, 9]})
    write_shards(folder, {3: [1, 2]})
    with open(tmp_path / SHARDS, "a") as file:
        file.write('{"step": 4, "sha')  # a kill has cut it
    cut_shards(folder, 2)
    write_shards(folder, {3: [5, 6]})
    assert read_shards(folder) == {1: [7, 2**48 - 1], 2: [8, 9], 3: [5, 6]}
    assert len((tmp_path / SHARDS).read_text().splitlines()) == 3


def test_a_line_that_is_not_one_of_ours_is_left_out(tmp_path):
    (tmp_path / SHARDS).write_text(
        '{"step": "1", "shards": []}\n[]\n{"step": 2}\n{"step": 3, "shards": [4]}\n'
    )
    assert read_shards(str(tmp_path)) == {3: [4]}


def test_steps_after_a_line_that_a_full_disk_has_cut_are_kept(tmp_path):
    write_shards(str(tmp_path), {1: [7]})
    with open(tmp_path / SHARDS, "a") as file:
        file.write('{"step": 2, "sha')
    write_shards(str(tmp_path), {3: [1], 4: [2]})
    assert read_shards(str(tmp_path)) == {1: [7], 3: [1], 4: [2]}
