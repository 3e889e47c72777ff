"""What a command reads and writes: its words, its options, its files and its page.

Takes: the words of a command line.
Gives: options with types, refused with one line and exit code 2; the same words without credentials, for
logs; pages and files that replace only what an earlier command has written.
"""
