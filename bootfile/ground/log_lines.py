"""The lines of a log that tell a watcher how a run is: PROGRESS, and END. guides/log_format.md explains them.

A launcher may put a name in brackets before a line. `re.match` and `grep -P` take both patterns.
"""

import re

# Of a job, and what `launch simulate` reads of a script of the user. figures: " name=value ..."
PROGRESS = re.compile(
    r"(?:\[[^]]*\]:? ?)?epoch=(?P<epoch>\d+) step=(?P<step>\d+)(?:/(?P<steps>\d+))?"
    r"(?: time=(?P<time>\S+))?(?: eta=(?P<eta>\S+))?(?P<figures>(?: [^\s=]+=\S+)*)"
)
# A job that ends by itself prints `end:`; it and a loop with Exact print the others, Python the tracebacks.
END = re.compile(
    r"(?:\[[^]]*\]:? ?)?(?:"
    r"end: (?P<reason>.+) at step (?P<step>\d+)(?:/(?P<steps>\d+))?, exit code (?P<code>\d+)$"
    r"|stopped as asked after step (?P<stopped>\d+); the newest checkpoint is that of step (?P<saved>\d+)$"
    r"|(?P<hang>(?:error: )?(?:stuck|nothing moved) for (?P<seconds>\d+) s at step (?P<stuck>\d+): .+)$"
    r"|ranks? (?P<lost>\d+)[\d, -]*(?: on node \S+)?(?: \(pid \d+\))?"
    r" (?:was killed|ha(?:s|ve) ended|ended (?:with|by))\b"
    r"|(?P<error>(?:\S+: )?error: \S.*|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Exit)(?:: \S.*)?)$)"
)
