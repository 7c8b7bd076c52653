"""The published analysis by plain loops: what the fast functions are measured and tested against.

Algorithm 1 of Zeris 2026 (arXiv 2606.06573) as its public code carries it out, written anew: one
loop each over documents, rows, lags and scales, and nothing taken out of a loop that the public
code leaves in it (the wavelet is evaluated for each row and scale, the window for each entry). All
numbers are float64, so that it can serve as an oracle; the public code keeps the snapshots in
float32.

``forward=True`` is the published lag, key minus query, with the last key repeated past the end.
``forward=False`` is the causal one, query minus key, with zeros past the first key. One thing is
left out on purpose: the public H* comes out one higher than its definition, which is used here.
"""

from __future__ import annotations

import math

import numpy as np

OMEGA0 = 5.0
SCALES = 2 ** np.linspace(1, 6, 20)


def wavelet_rows(field: np.ndarray, scales=SCALES, forward: bool = True) -> np.ndarray:
    """Mean over the rows of a field ``(T, T)`` of abs(W(a, b))^2: ``(S, T)``."""
    t = len(field)
    energy = np.zeros((len(scales), t))
    for query in range(t):
        row = np.zeros(t)
        for lag in range(t):
            if forward:
                row[lag] = field[query, min(query + lag, t - 1)]
            elif query - lag >= 0:
                row[lag] = field[query, query - lag]
        row_hat = np.fft.fft(row, 2 * t)
        f = np.fft.fftfreq(2 * t)
        for s, a in enumerate(scales):
            psi_hat = math.sqrt(2 * math.pi * a) * np.exp(
                -((2 * math.pi * f * a - OMEGA0) ** 2) / 2
            )
            w = np.fft.ifft(row_hat * psi_hat * (f > 0))[:t]
            energy[s] += np.abs(w) ** 2
    return energy / t


def scalogram_by_loops(fields: np.ndarray, scales=SCALES, forward: bool = True) -> np.ndarray:
    """The same averaged over documents ``(N, T, T)``."""
    total = np.zeros((len(scales), fields.shape[-1]))
    for field in fields:
        total += wavelet_rows(field, scales, forward)
    return total / len(fields)


def filter_by_loops(fields: np.ndarray, a: float, forward: bool = True) -> np.ndarray:
    """Every entry weighted by exp(-lag^2 / 2 a^2), those of negative lag by 0: ``(N, T, T)``."""
    t = fields.shape[-1]
    filtered = np.zeros(fields.shape)
    for s in range(len(fields)):
        for query in range(t):
            for lag in range(t):
                key = query + lag if forward else query - lag
                if 0 <= key < t:
                    weight = np.exp(-(lag**2) / (2 * a**2))
                    filtered[s, query, key] = weight * fields[s, query, key]
    return filtered


def decompose(filtered: np.ndarray, n_modes: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues ``(N,)`` of C = U U^T / N, descending, and the first modes ``(K, T, T)``."""
    n, t, _ = filtered.shape
    u = filtered.reshape(n, -1)
    u = u - u.mean(0)
    values, vectors = np.linalg.eigh(u @ u.T / n)
    values, vectors = values[::-1].clip(min=0), vectors[:, ::-1]
    modes = np.zeros((n_modes, t, t))
    for k in range(n_modes):
        modes[k] = (u.T @ vectors[:, k] / math.sqrt(n * values[k])).reshape(t, t)
    return values, modes


def decay(values: np.ndarray, n_fit: int = 30) -> float:
    """beta of lambda_k ~ k^-beta, by least squares in log-log over the first eigenvalues."""
    x, y = [], []
    for k, value in enumerate(values[:n_fit], start=1):
        if value > 1e-12 * values[0]:
            x.append(math.log(k))
            y.append(math.log(value))
    x, y = np.array(x) - np.mean(x), np.array(y) - np.mean(y)
    return -float((x * y).sum() / (x * x).sum())


def width(values: np.ndarray, epsilon: float) -> int:
    """H*(epsilon), the fewest modes that leave at most a share epsilon of the variance."""
    total = 0.0
    for value in values:
        total += value
    for n in range(len(values) + 1):
        tail = 0.0
        for value in values[n:][::-1]:
            tail += value
        if tail <= epsilon * total:
            return n
    raise AssertionError("the empty tail is below any share")


def by_loops(
    fields: np.ndarray,
    scales=SCALES,
    *,
    n_scales: int = 4,
    n_modes: int = 5,
    epsilon: float = 0.1,
    forward: bool = True,
) -> dict[str, np.ndarray]:
    """The whole analysis of one layer ``(N, T, T)``.

    Returns the scalogram ``energy (S, T)``, the ``chosen`` scales of most energy, and for each of
    them ``eigenvalues (N,)``, ``modes (K, T, T)``, ``beta`` and ``H``.
    """
    fields = np.asarray(fields, dtype=np.float64)
    energy = scalogram_by_loops(fields, scales, forward)
    chosen = np.asarray(scales)[np.argsort(-energy.sum(1))[:n_scales]]
    spectra, modes = [], []
    for a in chosen:
        values, some = decompose(filter_by_loops(fields, a, forward), n_modes)
        spectra.append(values)
        modes.append(some)
    return {
        "energy": energy,
        "chosen": chosen,
        "eigenvalues": np.stack(spectra),
        "modes": np.stack(modes),
        "beta": np.array([decay(values) for values in spectra]),
        "H": np.array([width(values, epsilon) for values in spectra]),
    }


def by_attnlib(
    fields,
    scales=SCALES,
    *,
    n_scales: int = 4,
    n_modes: int = 5,
    epsilon: float = 0.1,
    forward: bool = True,
) -> dict[str, np.ndarray]:
    """The same by the functions of attnlib, from a tensor or array of fields ``(N, T, T)``."""
    import torch

    from attnlib import effective_rank, pod, scalogram, spectral_concentration, spectrum

    fields = torch.as_tensor(fields)
    convention = "published" if forward else "causal"
    transformed = scalogram(
        fields, scales, OMEGA0, convention=convention, rows="all", center=False, norm="L2"
    )
    # The unit-energy wavelet has a factor pi^(-1/4) that the public code leaves out.
    energy = transformed["power"].values[0] * math.sqrt(math.pi)
    chosen = np.asarray(scales)[np.argsort(-energy.sum(1))[:n_scales]]
    modes = pod(
        fields, chosen, n_modes, center="zero", width=1.0, convention=convention, with_gram=True
    )
    spectra = spectrum(modes["gram"])
    return {
        "energy": energy,
        "chosen": chosen,
        "eigenvalues": spectra.values[0],
        "modes": modes["mode_field"].values[0],
        "beta": spectral_concentration(spectra)["beta"].values[0],
        "H": effective_rank(spectra, epsilon)["H"].values[0],
    }
