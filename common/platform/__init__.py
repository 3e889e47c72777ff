"""Where a process runs: the platform's variables, the layout of the job, and the checks of a node.

It takes options and environment, and gives one Topology: table.py names what each platform sets, platforms.py
and topology.py refuse values that contradict each other, once. Outside are nodes with different numbers of
processes, and launchers that neither the table nor torchrun's variables describe.
"""
