"""Run a job: its options, output folder, log and evaluation.

A Run (run.py) takes the options of a JobParser, and gives the place of the process, its device, the Output
and the Log. Sums are over all ranks, and only rank 0 prints and writes. A file or a tracker that cannot be
written is one warning, and the training continues; an output folder that cannot be written ends the job
before it trains.
"""
