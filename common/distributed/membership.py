"""The members of an elastic job, as other rooms find them (members.py). This module imports no torch."""

from typing import Any

current: Any = None  # the Members of this process; None in a job that ends with its first process


class Changed(BaseException):
    """The members of the job change: main() ends, and runs again. Not an Exception, which a job may catch."""
