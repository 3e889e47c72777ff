"""`launch report`: make one page of runs.

It takes output folders, and reads metrics.jsonl, starts.jsonl and the receipts: a line that cannot be read is
left out, and noted. It gives one file of HTML that loads nothing and runs no script. Outside, and refused: a
folder with neither file. runs.py reads, tables.py and charts.py make the parts, cli.py joins them.
"""
