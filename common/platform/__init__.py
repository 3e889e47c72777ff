"""Where a process runs: the platform's variables, the layout of the job, and the checks of a node.

It takes options and environment, and gives one Topology (place.py). If there is a sign of a platform
(signs.py), table.py names what each platform sets, and platforms.py and layout.py refuse values that
contradict each other, once. Outside are nodes with different numbers of processes, and launchers that neither
the table nor torchrun's variables describe.
"""
