"""The functions of the field analysis: against each other, and against the floor of their sums."""

from __future__ import annotations

import numpy as np
import torch

from .timing import apart, in_turn, middle, ratio, row

N, T = 150, 256  # the paper's ensemble
SCALES = 2 ** np.linspace(1, 6, 20)
POD_SCALES = [2.0, 4.0, 8.0, 16.0]


def make_fields(n: int = N, t: int = T) -> torch.Tensor:
    """One layer of causal row-stochastic fields, ``(1, N, T, T)``, float32."""
    logits = torch.randn(n, t, t, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(t, t).tril() == 0
    return logits.masked_fill(mask, float("-inf")).softmax(-1)[None]


def measure_fields() -> list[dict]:
    """Scalogram, POD, Grams and resamples of one layer, beside the plain ways."""
    from attnlib import bootstrap, lag_rows, morlet_cwt, pod, scale_gram, scalogram

    layer = make_fields()
    u = layer[0] - layer[0].mean(0)

    def transforms():
        """The row-averaged scalogram by batched transforms of every row, document by document."""
        total = torch.zeros(len(SCALES), T)
        for document in u:
            rows, _ = lag_rows(document[None])
            total += morlet_cwt(rows[0], SCALES).abs().square().mean(0)
        return total / N

    gram = scale_gram(layer, [4.0])
    calls = {
        "form": lambda: scalogram(layer, SCALES, rows="all"),
        "cone": lambda: scalogram(layer, SCALES),
        "pod": lambda: pod(layer, POD_SCALES, 5),
    }
    times = in_turn(calls)
    slow = in_turn({"transforms": transforms, "form": calls["form"]}, 3)
    grams = in_turn(
        {
            "one": lambda: scale_gram(layer, [4.0]),
            "many": lambda: scale_gram(layer, np.geomspace(2, 40, 64)),
        },
        41,
    )
    resamples = in_turn({"bootstrap": lambda: bootstrap(gram, lambda v: v[:, 0], 1000)}, 3)
    ours = calls["form"]()["power"].values[0]
    both = [a + b for a, b in zip(times["cone"], times["pod"], strict=True)]
    return [
        row("scalogram, each row's cone, 20 scales", times["cone"]),
        row("scalogram, all rows, 20 scales", times["form"]),
        row("the same by batched transforms of every row", slow["transforms"]),
        ratio(
            "quadratic form against batched transforms",
            slow["transforms"],
            slow["form"],
            apart(ours, transforms()),
        ),
        row("POD at 4 scales, 5 modes each, mode fields included", times["pod"]),
        row("scalogram and POD together (goal: under 1 s a layer)", both),
        row("Gram at 1 scale", grams["one"]),
        row("Gram at 64 scales", grams["many"]),
        ratio(
            "64 scales against 1 (goal: at most 1.2x)",
            grams["many"],
            grams["one"],
            f"sums over lags at 64 scales: at most {64 * 2 / T:.2f} of the Gram's operations",
        ),
        row("1,000 bootstrap resamples of one spectrum (goal: under 5 s)", resamples["bootstrap"]),
    ]


# ------------------------------------------------------------------ the floor


def matrix_speed(dtype: torch.dtype, size: int = 2048) -> float:
    """Operations a second in the product of two large square matrices."""
    a = torch.randn(size, size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    median, _ = middle(in_turn({"product": lambda: a @ a})["product"])
    return 2 * size**3 / median


def gram_speed(rows: int, columns: int, dtype: torch.dtype) -> float:
    """Operations a second in the product of a wide matrix with its transpose.

    The result is small, so less of the work can overlap than in a large square product.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, columns, dtype=dtype, generator=generator)
    median, _ = middle(in_turn({"product": lambda: a @ a.T})["product"])
    return 2 * rows**2 * columns / median


def products_of_all_rows(n: int = N, t: int = T, n_scales: int = len(SCALES)) -> float:
    """Operations in the matrix products of the scalogram over all rows.

    Only entries that can differ from 0 count, and symmetry saves nothing. The row of query i has
    i + 1 lags, so its part of the covariance is an outer product of that size for each document.
    Each scale is one product of the T x T covariance with the real and one with the imaginary
    part of the wavelets at T places; the elementwise rest of the form is not a matrix product.
    """
    covariance = 2 * n * sum((i + 1) ** 2 for i in range(t))
    forms = n_scales * 2 * 2 * t**3
    return covariance + forms


def products_in_cone(n: int = N, t: int = T, scales=SCALES) -> float:
    """The same where each pair (a, b) has its own covariance, that of rows b + reach and up.

    The covariance grows row by row, and costs what it costs above. A pair needs its product with
    one wavelet, real and imaginary; it holds longer rows as well, so all T lags take part.
    """
    covariance = 2 * n * sum((i + 1) ** 2 for i in range(t))
    reach = np.ceil(np.sqrt(2) * np.asarray(scales)).astype(int)
    pairs = sum(int((i - reach >= reach).sum()) for i in range(t))
    return covariance + 2 * 2 * pairs * t**2


def products_of_gram(n: int = N, t: int = T) -> float:
    """Operations in the Gram of N snapshots: an N x N product over the T (T + 1) / 2 pairs."""
    return 2 * n**2 * t * (t + 1) / 2


def measure_floor() -> list[dict]:
    """Our times over what their matrix products alone would take at full speed."""
    from attnlib import scale_gram, scalogram

    layer = make_fields()
    single, double = matrix_speed(torch.float32), matrix_speed(torch.float64)
    wide = T * (T + 1) // 2
    own = gram_speed(N, wide, torch.float64)
    times = in_turn(
        {
            "all": lambda: scalogram(layer, SCALES, rows="all"),
            "cone": lambda: scalogram(layer, SCALES),
            "raw": lambda: scale_gram(layer, [np.inf]),
            "bands": lambda: scale_gram(layer, POD_SCALES),
        }
    )

    def over_floor(what, name, operations, speed):
        floor = operations / speed
        note = f"{operations / 1e9:.2f} Gflop, floor {floor:.3f} s"
        return ratio(f"{what} (goal: within 3x)", times[name], [floor] * len(times[name]), note)

    return [
        {
            "what": "matrix product, 2,048 x 2,048",
            "figure": f"float32 {single / 1e9:.0f} Gflop/s, float64 {double / 1e9:.0f} Gflop/s",
        },
        over_floor("scalogram, all rows, float32", "all", products_of_all_rows(), single),
        over_floor("scalogram, each row's cone, float32", "cone", products_in_cone(), single),
        over_floor("Gram of the unfiltered fields, float64", "raw", products_of_gram(), double),
        # The sums over lags at 4 scales add 1% to the operations, which is left out.
        over_floor("Gram at 4 scales, float64", "bands", products_of_gram(), double),
        {
            "what": f"matrix product, {N} x {wide:,} with its transpose, the Gram's own shape",
            "figure": f"float64 {own / 1e9:.0f} Gflop/s",
        },
        over_floor("Gram of the unfiltered fields, at that speed", "raw", products_of_gram(), own),
    ]
