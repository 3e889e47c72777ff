"""Fix: change a training script so that the findings of `bootfile lint` about it are gone.

It takes a script and the modules of its project that it imports. It gives their new texts, as a diff, as
ranges or as files, and the findings that are left with the reason.

A repair changes restarts only: a run without an interruption has the same weights, unless the note of the
repair says what it changes (the order of a loader). Each repair is checked on the new text: it compiles, lint
no longer has the finding, and has no new one. Otherwise the repair is withdrawn. A name is used only if it is
bound there in each case. What a repair does not touch stays byte for byte.

engine repairs one finding after another by its table; repairs_*.py has a function for each kind of finding;
checkpoint finds the dicts that are saved and loaded; scope tells by which name an object can be reached at a
place; edits changes the text of one file. lint gives all facts. A function that cannot repair raises
CannotEdit with the reason, by require().

Outside: checkpoints that another package writes, saves within an epoch in several places, names bound within
try or with, and more than one process where a repair would need all of them. These findings are left with the
reason.
"""
