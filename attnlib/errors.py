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


def check_windows(
    tokens, context: int | None = None, *, extra: int = 0, least: int = 3, vocab: int | None = None
) -> None:
    """Refuse what is not `least` or more document windows ``(N, T)`` of token ids below `vocab`.

    `extra` is 1 for windows whose last token is only scored.
    """
    import torch

    if not isinstance(tokens, torch.Tensor):
        raise InputError(f"tokens are a tensor (snapshot, position), not {type(tokens).__name__}")
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"tokens are whole numbers of shape (snapshot, position), not {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    if len(tokens) < least:
        raise InputError(
            f"{len(tokens)} window(s): at least {least} are needed; take more document windows"
        )
    if context is not None and tokens.shape[1] > context + extra:
        raise InputError(
            f"windows of {tokens.shape[1]} tokens are longer than the model's context of {context}"
            + (" and one more to score" if extra else "")
        )
    if tokens.shape[1] < 1 + extra:
        raise InputError(f"windows of {tokens.shape[1]} token(s) are too short")
    if vocab is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise InputError(
            f"token ids run from {int(tokens.min())} to {int(tokens.max())}, but the model's "
            f"vocabulary from 0 to {vocab - 1}: these tokens were made by another tokenizer"
        )
