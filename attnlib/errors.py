"""The one exception that means: what was asked for cannot be done, and here is what to do."""


class InputError(ValueError):
    """Bad input, named together with its remedy.

    The command line prints the message alone; in Python it is an ordinary `ValueError`.
    """
