"""An object whose pickle calls a function when it is loaded."""


class Hostile:
    """An object that is pickled as the call function(*arguments)."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call
