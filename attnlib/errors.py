"""The one exception that means: what was asked for cannot be done, and here is what to do."""


class InputError(ValueError):
    """Bad input, named together with its remedy.

    The command line prints the message alone; in Python it is an ordinary `ValueError`.
    """


def check_whole(name: str, value, least: int = 1) -> int:
    """A whole number of at least `least`, or an error that names it."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise InputError(f"{name} is a whole number, at least {least}, not {value!r}")
    return int(value)
