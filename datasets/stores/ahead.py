"""Work that threads do some steps ahead, with the results in order."""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

_Item = TypeVar("_Item")


def work_ahead(
    items: Iterable[_Item],
    begin: Callable[[_Item], list[concurrent.futures.Future]],
    count: int,
) -> Generator[tuple[_Item, list[Any]], None, None]:
    """Yield (item, results of its tasks) in order. The next `count` items have begun before one is yielded.

    begin: called with an item in this thread; returns its tasks. No task runs after the generator is closed.
    The engines use it for the batches of an epoch, and packs for the samples that they write.
    """
    remaining = iter(items)
    begun: collections.deque[tuple[_Item, list[concurrent.futures.Future]]] = collections.deque()
    try:
        while True:
            for item in itertools.islice(remaining, count + 1 - len(begun)):
                begun.append((item, begin(item)))
            if not begun:
                return
            # it stays in `begun` until its tasks have ended: if one fails, the others are waited for below
            item, tasks = begun[0]
            results = [task.result() for task in tasks]
            begun.popleft()
            yield item, results
    finally:  # the caller has left, or a task has failed: its memory and files are free only without tasks
        tasks = [task for _, tasks in begun for task in tasks]
        for task in tasks:
            task.cancel()
        concurrent.futures.wait(tasks)
