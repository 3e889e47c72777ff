"""The interfaces of tools that Bootfile replaces: KSpeed, the article "Diving into DALI", Dpex.

A program of such a tool changes an import, and gets the loaders of this package behind the names and
arguments that it knows. The folder alias/ has modules with the tools' own names. The docstring of a module
names the differences. Outside are arguments that have no meaning here: they are accepted, without effect.
"""
