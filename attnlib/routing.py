"""Routing and filtering: the skew-symmetric and the symmetric part of what heads compute.

An interaction Q K^T ``(N, N)`` of a text, or the kernel W_Q W_K^T ``(d, d)`` of a head, is the sum
of a skew part, the routing, and a symmetric one, the filtering. Both are products of two thin
factors, so every spectrum here comes from matrices of twice the head size at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import InputError

METHODS = ("participation", "entropy", "energy")


class Spectrum(NamedTuple):
    """Spectra of a product of factors ``(..., n, r)``; see :func:`kernel_spectrum`."""

    eigenvalues: torch.Tensor
    routing: torch.Tensor
    filtering: torch.Tensor


def _check(matrix: torch.Tensor, what: str, square: bool) -> torch.Tensor:
    if not isinstance(matrix, torch.Tensor) or matrix.dim() < 2:
        raise InputError(f"{what} is a tensor (..., n, n)" if square else f"{what} is (..., n, r)")
    if matrix.is_complex() or not matrix.is_floating_point():
        raise InputError(f"{what} is real and floating point, not {matrix.dtype}")
    if square and matrix.shape[-1] != matrix.shape[-2]:
        raise InputError(
            f"{what} is square: {matrix.shape[-2]} x {matrix.shape[-1]} has no transpose to "
            "compare with"
        )
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(f"{what} holds a value that is not finite")
    return matrix


def split_interaction(interaction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing and filtering, M = R + F with R = (M - M^T) / 2 and F = (M + M^T) / 2.

    Parameters
    ----------
    interaction : torch.Tensor
        M ``(..., N, N)``, real: an interaction Q K^T, query before key, or a kernel.

    Returns
    -------
    routing, filtering : torch.Tensor
        ``(..., N, N)``, in the precision and on the device of `interaction`. They are orthogonal:
        the squares of their entries add up to those of M.

    Raises
    ------
    InputError
        A matrix that is not square, not real, or not finite.

    References
    ----------
    Jamil & Kapadia 2026 (arXiv 2605.18826).
    """
    transposed = _check(interaction, "an interaction", True).mT
    return (interaction - transposed) / 2, (interaction + transposed) / 2


def singular_rank(values: torch.Tensor, method: str = "participation", share: float = 0.9):
    """Effective rank from singular values.

    Parameters
    ----------
    values : torch.Tensor
        s ``(..., R)``, not negative, in any order.
    method : {"participation", "entropy", "energy"}
        ``"participation"``: (sum s^2)^2 / sum s^4. ``"entropy"``: the exponential of the entropy of
        s / sum s. ``"energy"``: the fewest that hold `share` of the sum of s^2. Of R equal values
        the first two give R, so one plane of rotation, two equal values, gives 2.
    share : float
        For ``"energy"``.

    Returns
    -------
    torch.Tensor
        ``(...)``, float64; 0 where all values are 0.

    Raises
    ------
    InputError
        An unknown method, a share outside (0, 1), values that are negative or not finite.

    References
    ----------
    Roy & Vetterli 2007 (entropy); Jamil & Kapadia 2026.
    """
    if method not in METHODS:
        raise InputError(f"method is one of {METHODS}, not {method!r}")
    if not 0 < share < 1:
        raise InputError(f"share lies between 0 and 1, not {share}")
    values = values.double()
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise InputError("singular values are finite and not negative")
    largest = values.amax(-1, keepdim=True)
    values = values / torch.where(largest > 0, largest, 1.0)  # squares under- and overflow
    square = values.square()
    if method == "participation":
        fourth = square.square().sum(-1)
        return square.sum(-1).square() / torch.where(fourth > 0, fourth, 1.0)
    if method == "entropy":
        total = values.sum(-1, keepdim=True)
        part = values / torch.where(total > 0, total, 1.0)
        rank = torch.exp(-torch.special.xlogy(part, part).sum(-1))
    else:
        kept = square.sort(-1, descending=True).values.cumsum(-1)
        # A little less than the share, so that rounding does not ask for one more.
        short = kept < share * kept[..., -1:] * (1 - 1e-12)
        rank = 1.0 + short.sum(-1)
    return torch.where(largest[..., 0] > 0, rank, 0.0)


def routing_rank(
    routing: torch.Tensor, method: str = "participation", share: float = 0.9
) -> torch.Tensor:
    """Effective rank of a skew matrix. Its singular values come in pairs, one a plane of rotation.

    Parameters
    ----------
    routing : torch.Tensor
        ``(..., N, N)``, skew, as from :func:`split_interaction`.
    method, share
        As in :func:`singular_rank`.

    Returns
    -------
    torch.Tensor
        ``(...)``, float64; 2 for a single plane, by participation and by entropy.

    Raises
    ------
    InputError
        A matrix that is not skew, and as :func:`singular_rank`.
    """
    _check(routing, "a routing matrix", True)
    size = routing.abs().amax()
    if bool((routing + routing.mT).abs().amax() > 1e-4 * size):
        raise InputError("a routing matrix is skew: take that of split_interaction")
    return singular_rank(torch.linalg.svdvals(routing.double()), method, share)


def kernel_spectrum(w_q: torch.Tensor, w_k: torch.Tensor) -> Spectrum:
    """Spectra of M = W_Q W_K^T and of its two parts, without ever forming M.

    M has rank r at most. Its eigenvalues other than 0 are those of W_K^T W_Q, ``(r, r)``. With a
    thin QR, [W_Q W_K] = Q T, its parts are Q (T J T^T / 2) Q^T with J = [[0, 1], [-1, 0]] for the
    routing and [[0, 1], [1, 0]] for the filtering: matrices of size 2 r.

    Parameters
    ----------
    w_q, w_k : torch.Tensor
        ``(..., n, r)``: weights by head (model width n, head size r), or queries and keys of a
        text (n tokens), scaled as the model scales them.

    Returns
    -------
    Spectrum
        ``eigenvalues`` (..., r), complex128, by size; ``routing`` (..., min(n, 2 r)), singular
        values of the skew part, descending, in pairs; ``filtering`` likewise, eigenvalues of the
        symmetric part, ascending. Float64, on the device of the factors (on the CPU for mps).

    Raises
    ------
    InputError
        Factors of different shapes, or not finite.
    """
    a, b = _check_factors(w_q, w_k)
    eigenvalues = torch.linalg.eigvals(b.mT @ a)
    order = eigenvalues.abs().argsort(-1, descending=True)
    skew, symmetric = small_parts(a, b)
    return Spectrum(
        eigenvalues.gather(-1, order),
        torch.linalg.svdvals(skew),
        torch.linalg.eigvalsh(symmetric),
    )


def _check_factors(w_q: torch.Tensor, w_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for name, factor in (("w_q", w_q), ("w_k", w_k)):
        _check(factor, name, False)
    if w_q.shape != w_k.shape:
        raise InputError(f"factors have one shape, not {tuple(w_q.shape)} and {tuple(w_k.shape)}")
    if w_q.device.type == "mps":  # has no float64
        w_q, w_k = w_q.cpu(), w_k.cpu()
    return w_q.double(), w_k.double()


def small_parts(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Skew and symmetric part of A B^T in the span of both: ``(..., m, m)``, m = min(n, 2 r).

    Their singular values are those of the parts themselves.
    """
    r = a.shape[-1]
    t = torch.linalg.qr(torch.cat([a, b], -1), mode="r").R  # (..., m, 2 r)
    return split_interaction(t[..., :r] @ t[..., r:].mT)


def hodge(routing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Potential and cyclic part of a skew matrix: S_ij = u_i - u_j + C_ij.

    The combinatorial Hodge decomposition on the complete graph of N tokens. The potential u is the
    mean of each row, so it adds up to 0; the rest C is skew, its rows add up to 0, and it is
    orthogonal to every difference of a potential. A potential has rank 2. Of S = Q K^T - K Q^T the
    potential is what the mean query and the mean key make, and C is the routing of queries and keys
    less their means: for P = 1 - 1 1^T / N, C = P S P.

    Parameters
    ----------
    routing : torch.Tensor
        S ``(..., N, N)``, skew.

    Returns
    -------
    potential : torch.Tensor
        u ``(..., N)``
    cyclic : torch.Tensor
        C ``(..., N, N)``

    Raises
    ------
    InputError
        A matrix that is not square, real, finite and skew.

    References
    ----------
    Jiang, Lim, Yao & Ye 2011 (HodgeRank).
    """
    _check(routing, "a routing matrix", True)
    if bool((routing + routing.mT).abs().amax() > 1e-4 * routing.abs().amax()):
        raise InputError("a routing matrix is skew: take that of split_interaction")
    potential = routing.mean(-1)
    cyclic = routing - (potential.unsqueeze(-1) - potential.unsqueeze(-2))
    return potential, cyclic
