"""What every other room of a job uses: the end of a job, its secrets, its streams, locks of files.

What a job does at its end is registered with at_end() (endings.py), in one order for all. Text that reaches a
terminal or a file goes through errors.print_line() and say_error(), which hide secrets. It imports no torch.
"""
