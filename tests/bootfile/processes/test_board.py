"""Texts in the store that all ranks share: no call of two threads is lost."""

import threading

import torch.distributed as dist

from bootfile.processes.board import Board


def test_calls_of_two_threads_at_the_same_moment_are_all_made():
    board = Board(dist.HashStore(), "test")
    begin = threading.Barrier(2)
    answers = []

    def call():
        begin.wait()
        answers.extend(board.count("calls", 1) for _ in range(300))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    board.close()
    assert sorted(answers) == list(range(1, 601))
