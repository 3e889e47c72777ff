"""Name what a loop of one's own changes between a save and its next batch: a restart does not do it again."""

from typing import TYPE_CHECKING

from bootfile.exact import digest

if TYPE_CHECKING:
    from bootfile.exact.loop import Exact


def warn(run: "Exact", step: int, before: list[tuple[str, str]]) -> None:
    """Print a warning if the state is not the one that was saved after a step.

    before: RunState.outline() at the save. Exact calls this once, when another outline shows that something
    was changed: an evaluation may have put other weights in, and the right ones back.
    """
    run.compares_saved = False  # to compute a digest of the state after each save would take long
    names = {name for name, _ in set(run.state.outline()) - set(before)}
    changed = "the scheduler" if "the scheduler" in names else _find_changed(run, step, names)
    if changed:
        run.say(
            f"warning: the loop has changed {changed} after run.save() of step {step}: the checkpoint lacks "
            "it, and a restart will not be exact. Call end_step() and save() at the end of the loop's body"
        )


def _find_changed(run: "Exact", step: int, names: set[str]) -> str:
    """Return the first of these names whose value differs from the checkpoint of a step; "" without one."""
    run.saver.collect(wait=True)
    newest = run.saver.newest
    if newest is None or newest["step"] != step:  # the write has failed
        return ""
    saved = newest["parts"]
    for name, part in digest.summarize(step, run.state.capture(step)["objects"])["parts"].items():
        if name in names and part != saved.get(name):
            return str(name)
    return ""
