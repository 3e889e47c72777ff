"""Networks, optimizers, losses and precision of the jobs, by name.

Takes: the options of a job.
Gives: a module or an optimizer with its defaults; a name that is not known is refused with the names that
are.
Outside: training: nothing here knows ranks, steps or files.
"""
