"""Lint: find restart bugs in training scripts by following their values, without running them.

It takes Python files and the modules of their project. It gives findings: a rule, a line, and the event,
object, save and load that a repair needs (table.Finding.evidence).

A script is read by sources, and walked over once by trace: statements, names, expressions, calls. What is
known of other packages is in the tables of values, methods and functions. The walk gives a list of
record.Event. facts answers what the loop changes, what the files have and what is read back; the rules ask.

A newcomer adds a row: of values.CLASSES for the name of a class, of methods.MEANINGS, RESULTS or ENTRIES for
a method, of functions.BUILTINS or PACKAGES for a function, of table.RULES for a rule (its function is in a
rules file), of known_defects.KNOWN for a report about another package.

Outside: values that pass through other packages, exec or several layers of objects. They are "unknown",
which no rule reports. A file that cannot be parsed, or is larger than 2 MB, is refused by sources.read().
"""
