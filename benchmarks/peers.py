"""POD against xeofs and scikit-learn, transforms against PyWavelets and ssqueezepy."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from .fields import SCALES, make_fields
from .timing import apart, apart_each, in_fresh_process, in_turn, installed, missing, ratio, row

MODES = 5
OMEGA0 = 5.0


# ------------------------------------------------------------------ POD


def ours(fields: np.ndarray, n_modes: int | None = MODES) -> np.ndarray:
    """Eigenvalues of the unfiltered fields ``(N, T, T)``, with modes, or all of them without."""
    from attnlib import pod, scale_gram, spectrum

    layer = torch.from_numpy(fields)
    if n_modes is None:
        return spectrum(scale_gram(layer, [np.inf])).values[0, 0]
    return pod(layer, [np.inf], n_modes)["eigenvalue"].values[0, 0]


def scikit_learn(fields: np.ndarray, n_modes: int | None = MODES, solver="full") -> np.ndarray:
    """The same by scikit-learn's PCA: ``(N, ...)``, all but the first dimension flattened.

    Of its exact solvers, ``"covariance_eigh"`` would need the covariance of T^2 entries, 17 GB;
    ``"full"`` is an SVD; ``"arpack"`` iterates for a few modes and cannot give all of them.
    """
    from sklearn.decomposition import PCA

    n = len(fields)
    found = PCA(n_modes or n - 1, svd_solver=solver, random_state=0).fit(fields.reshape(n, -1))
    return found.explained_variance_ * (n - 1) / n


def xeofs(fields: np.ndarray, n_modes: int | None = MODES, solver="full") -> np.ndarray:
    """The same by xeofs. Its SVD is told not to make the T^2 x T^2 square of right vectors."""
    import xarray as xr
    from xeofs.single import EOF

    n = len(fields)
    coords = {f"dim_{i}": np.arange(size) for i, size in enumerate(fields.shape)}
    options = {"full_matrices": False} if solver == "full" else {}
    model = EOF(n_modes or n - 1, solver=solver, random_state=0, solver_kwargs=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its own, about xarray
        model.fit(xr.DataArray(fields, coords), dim="dim_0")
    return model.explained_variance().values * (n - 1) / n


PODS: dict[str, Callable] = {"attnlib": ours, "scikit-learn": scikit_learn, "xeofs": xeofs}


def measure_pod() -> list[dict]:
    """Unfiltered POD of one layer; every package gets the same float32 array in memory.

    The peers are timed on the whole fields, as they come, and on the entries up to the query
    alone, picked out beforehand and not counted: half the work, and no less of a result.
    """
    fields = make_fields()[0].numpy()
    t = fields.shape[-1]
    entries = np.ascontiguousarray(fields[:, np.tri(t, dtype=bool)])
    calls = {"5 modes": lambda: ours(fields), "all": lambda: ours(fields, None)}
    # name: (package, solver, modes, on which entries, goal)
    trials = {}
    for package, solver, modes, goal in (
        ("xeofs", "full", MODES, " (goal: 8x)"),
        ("xeofs", "full", None, ""),
        ("xeofs", "auto", MODES, ""),
        ("scikit-learn", "full", MODES, " (goal: 5x)"),
        ("scikit-learn", "full", None, ""),
        ("scikit-learn", "arpack", MODES, ""),
        ("scikit-learn", "auto", MODES, ""),
    ):
        if not installed(package):
            continue
        for which, data in (("whole fields", fields), ("causal entries", entries)):
            count = f"{modes} modes" if modes else "all eigenvalues"
            name = f"{package} ({solver}), {count}, {which}"
            trials[name] = (modes, goal if which == "whole fields" else "")
            calls[name] = lambda f=PODS[package], x=data, m=modes, s=solver: f(x, m, s)
    times = in_turn(calls, 5)
    spectrum = ours(fields, None)
    rows = [
        row("POD, 5 modes and mode fields", times["5 modes"]),
        row("all eigenvalues", times["all"]),
    ]
    for name, (modes, goal) in trials.items():
        found = calls[name]()
        note = "eigenvalues: " + apart_each(spectrum[: len(found)], found)
        if np.abs(spectrum[: len(found)] / found - 1).max() > 1e-5:
            note += ", so not the same result"
        base = times["5 modes" if modes else "all"]
        rows.append(ratio(f"against {name}{goal}", times[name], base, note))
    rows += [missing(p) for p in ("xeofs", "scikit-learn") if not installed(p)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fields.npy"
        np.save(file, fields)
        for package in (p for p in PODS if p == "attnlib" or installed(p)):
            found = in_fresh_process("benchmarks.memory", package, str(file))
            goal = " (goal: at most 1.3x)" if package == "attnlib" else ""
            what = f"{package}: peak resident memory, fields included, over the fields{goal}"
            figure = "skipped: measured on Linux only"
            if found["growth"] is not None:
                size = 1 + found["growth"] / fields.nbytes
                figure = f"{size:.2f}x; growth while it runs in a fresh process"
            rows.append({"what": what, "figure": figure})
    return rows


# ------------------------------------------------------------------ transforms


def pywavelets(x: np.ndarray, scales, method: str = "fft", precision: int = 12) -> np.ndarray:
    """Transforms of rows ``(R, T)`` by PyWavelets: ``(S, R, T)``.

    With bandwidth 2 its complex Morlet is (2 pi)^(-1/2) exp(-t^2 / 2 + i omega0 t), over sqrt(a):
    ours with ``norm="L2"`` is 2^(1/2) pi^(1/4) times that.
    """
    import pywt

    name = f"cmor2.0-{OMEGA0 / (2 * math.pi)}"
    scales = np.asarray(scales)
    return pywt.cwt(x, scales, name, method=method, axis=-1, precision=precision)[0]


def like_pywavelets(x: np.ndarray, scales) -> torch.Tensor:
    """Our transforms of rows ``(R, T)``, of the signal that PyWavelets sees: ``(S, R, T)``.

    It integrates the wavelet over each token: in frequency a factor sinc(f), which takes 43% off
    the power at a = 2. Its samples of the wavelet begin at t = -8, so their middle, where 8 a
    tokens have passed, falls between two of them, and what it calls lag b is up to a token off.
    """
    from attnlib import morlet_cwt

    t = x.shape[-1]
    f = np.fft.fftfreq(4 * t)
    found = []
    for a in scales:
        samples = math.floor(16 * a) + 1
        ahead = (samples - 2) // 2 + 1.5 - samples + 8 * a
        response = np.sinc(f) * np.exp(2j * np.pi * f * ahead)
        seen = np.fft.ifft(np.fft.fft(x, len(f)) * response).real[:, :t]
        found.append(morlet_cwt(torch.from_numpy(seen), [a], OMEGA0, "L2")[:, 0])
    return torch.stack(found)


def ssqueezepy_wavelet():
    threads = torch.get_num_threads()
    from ssqueezepy import Wavelet

    torch.set_num_threads(threads)  # which its import sets to all cores
    return Wavelet(("morlet", {"mu": OMEGA0}))


def ssqueezepy(x: np.ndarray, scales, wavelet) -> np.ndarray:
    """Transforms of rows ``(R, T)`` by ssqueezepy: ``(R, S, T)``.

    Its Morlet wavelet has the top 2^(1/2) pi^(1/4) c instead of our 2 (``norm="L1"``), with
    c = (1 + exp(-mu^2) - 2 exp(-3 mu^2 / 4))^(-1/2), and a small term that takes off its mean.
    """
    from ssqueezepy import cwt

    return cwt(x, wavelet, scales=np.asarray(scales), padtype="zero", l1_norm=True)[0]


def trusted(t: int, scales) -> np.ndarray:
    """Where transforms by different routes should agree: ``(S, T)``.

    Below a = 3 the wavelet reaches past the highest frequency, where ours is cut off and another
    may be folded back; within 3 a of either end they pad differently.
    """
    lag, a = np.arange(t), np.asarray(scales)[:, None]
    return (a >= 3) & (lag >= 3 * a) & (t - 1 - lag >= 3 * a)


def measure_transforms() -> list[dict]:
    """The row-averaged scalogram, and plain batches of transforms, against the peers."""
    from attnlib import lag_rows, morlet_cwt, scalogram

    layer = make_fields()[0]
    n, t, _ = layer.shape
    u = layer - layer.mean(0)
    some = 3  # documents whose rows PyWavelets transforms
    batch = lag_rows(u[:some])[0].flatten(0, 1)
    x = batch.numpy()
    inside = trusted(t, SCALES)
    where = "a >= 3 and 3 a from the ends"

    def averaged(method):
        return np.square(np.abs(pywavelets(x, SCALES, method))).mean(1)

    times = in_turn(
        {
            "ours": lambda: scalogram(u, SCALES, rows="all", center=False, norm="L2"),
            "fft": lambda: averaged("fft"),
            "conv": lambda: averaged("conv"),
        },
        5,
    )
    best = min(("fft", "conv"), key=lambda name: np.median(times[name]))
    # Values on the same rows: our transforms of them, filtered and shifted like theirs, which at
    # the default precision are rough. The form itself is compared with transforms in "fields".
    exact = x.astype(np.float64)
    mine = like_pywavelets(exact, SCALES).numpy()
    theirs = pywavelets(exact, SCALES, precision=18) * math.sqrt(2) * math.pi**0.25
    power = [np.square(np.abs(y)).mean(1)[inside] for y in (mine, theirs)]
    note = (
        f"its method {best!r}, timed on the rows of {some} of {n} documents, times {n / some:.0f}; "
        f"power at {where}, its wavelet at precision 18, our rows filtered and shifted like its: "
        f"{apart(*power)}"
    )
    rows = [
        row(f"scalogram, all rows of {n} documents", times["ours"]),
        ratio(
            "against pywt.cwt over the same rows (goal: 30x)",
            times[best],
            times["ours"],
            note,
            n / some,
        ),
    ]
    calls = {"ours": lambda: morlet_cwt(batch, SCALES), "pywt": lambda: pywavelets(x, SCALES)}
    if installed("ssqueezepy"):
        wavelet = ssqueezepy_wavelet()  # made once: it keeps its samples from call to call
        calls["ssqueezepy"] = lambda: ssqueezepy(x, SCALES, wavelet)
    times = in_turn(calls, 7)
    pairs = {"pywt": [y.swapaxes(0, 1) for y in (mine, theirs)]}
    if installed("ssqueezepy"):
        c = (1 + math.exp(-(OMEGA0**2)) - 2 * math.exp(-0.75 * OMEGA0**2)) ** -0.5
        factor = 2 / (math.sqrt(2) * math.pi**0.25 * c)
        pairs["ssqueezepy"] = [calls["ours"]().numpy(), factor * calls["ssqueezepy"]()]
    rows.append(row(f"{len(x)} transforms at once, 20 scales", times["ours"]))
    for name, pair in pairs.items():
        note = f"{where}: {apart(*(y[:, inside] for y in pair))}"
        if name == "pywt":
            note += " (as above)"
        what = f"against {name}.cwt (goal: no slower, 1x)"
        rows.append(ratio(what, times[name], times["ours"], note))
    if not installed("ssqueezepy"):
        rows.append(missing("ssqueezepy"))
    return rows
