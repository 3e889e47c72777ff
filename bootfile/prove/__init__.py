"""`bootfile prove`: whether a job continues exactly after a restart.

Takes a script, its options, and for one without Bootfile where its files are and how it continues. Gives a
verdict, an exit code, and a page and a file of proof. The script is run to its end several times.
Outside, and refused: no file of torch.save at the end; an output folder that exists; a job that does not know
--help. Outside: a script that asks questions, that needs more than one command, that writes no file of its
state during the run (the verdict is then "unverified"), or whose files have other names in each run. The disk
has room for the output folders of all runs, and for a copy at each SIGKILL.
"""
