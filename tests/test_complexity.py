"""Decay and rank: right on spectra that are known, and honest about those that are not."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from attnlib import InputError, effective_rank, spectral_concentration

K = np.arange(1, 61)


@given(st.floats(0.1, 4), st.floats(1e-6, 1e6))
def test_a_power_law_is_recovered(beta, size):
    fit = spectral_concentration(size * K ** (-beta))
    assert fit["beta"].item() == pytest.approx(beta, rel=1e-6)
    assert fit["T_spec"].item() == pytest.approx(1 / beta, rel=1e-6)
    assert fit["r_squared"].item() == pytest.approx(1)
    assert fit["fit_ok"].item()
    assert fit["delta_aic"].item() > 0


@given(st.floats(0.05, 0.6))
def test_an_exponential_is_not_a_power_law(rate):
    fit = spectral_concentration(np.exp(-rate * K))
    assert fit["exponential_rate"].item() == pytest.approx(rate, rel=1e-6)
    assert fit["exponential_r_squared"].item() == pytest.approx(1)
    assert not fit["fit_ok"].item()
    assert fit["delta_aic"].item() < 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [60, 150])
def test_white_noise_is_not_a_power_law(seed, n):
    noise = np.random.default_rng(seed).standard_normal((n, 20 * n))
    noise -= noise.mean(0)
    spectrum = np.linalg.eigvalsh(noise @ noise.T)[:0:-1]
    fit = spectral_concentration(spectrum)
    assert 0.8 < fit["r_squared"].item() < 0.95  # respectable, and meaningless
    assert not fit["fit_ok"].item()


@pytest.mark.parametrize("values", [[1.0, 0.5], [1.0], [3.0, 2.0, 1.0, 0.0, 0.0, 0.0]])
def test_too_few_values_give_no_number(values):
    fit = spectral_concentration(values)
    for name in ("beta", "T_spec", "r_squared", "delta_aic"):
        assert np.isnan(fit[name].item()), name
    assert not fit["fit_ok"].item()
    assert fit["n_fitted"].item() < 5
    assert np.isfinite(fit["participation_ratio"].item())


def test_a_flat_spectrum_has_no_temperature():
    fit = spectral_concentration(np.ones(40))
    assert fit["beta"].item() == pytest.approx(0, abs=1e-12)
    assert np.isnan(fit["T_spec"].item()) or fit["T_spec"].item() > 1e9
    assert not fit["fit_ok"].item()


def test_against_least_squares():
    values = np.sort(np.random.default_rng(0).uniform(0.1, 5, 50))[::-1]
    fit = spectral_concentration(values, n_fit=20, first=3)
    k = np.arange(3, 21)
    slope, intercept = np.polyfit(np.log(k), np.log(values[2:20]), 1)
    rest = np.log(values[2:20]) - slope * np.log(k) - intercept
    total = np.log(values[2:20]) - np.log(values[2:20]).mean()
    assert fit["beta"].item() == pytest.approx(-slope)
    assert fit["r_squared"].item() == pytest.approx(1 - (rest @ rest) / (total @ total))
    assert fit["n_fitted"].item() == 18


@given(st.integers(1, 30))
def test_equal_eigenvalues_count_themselves(m):
    fit = spectral_concentration(np.r_[np.full(m, 2.5), np.zeros(10)])
    assert fit["participation_ratio"].item() == pytest.approx(m)
    assert fit["entropy_rank"].item() == pytest.approx(m)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40),
    st.sampled_from([0.01, 0.1, 0.5, 0.9]),
)
def test_effective_rank_is_its_definition(values, epsilon):
    values = np.sort(values)[::-1]
    h = effective_rank(values, epsilon)["H"].item()
    total = values.sum()
    slack = 1e-9 * total
    assert values[h:].sum() <= epsilon * total + slack
    if h > 0:
        assert values[h - 1 :].sum() > epsilon * total - slack
    assert h <= len(values)


def test_the_published_rank_is_one_too_high():
    values = np.array([0.6, 0.3, 0.06, 0.04])
    assert effective_rank(values, 0.1)["H"].item() == 2  # 0.06 + 0.04 are left
    tail_with_mode_n = np.cumsum(values[::-1])[::-1]  # the public code's tail
    published = int(np.searchsorted(-tail_with_mode_n, -0.1 - 1e-12)) + 1
    assert published == 3


def test_saturation_is_flagged():
    flat, steep = np.ones(100), 2.0 ** -np.arange(100)
    spectra = xr.DataArray([flat, steep], dims=("layer", "mode"), coords={"layer": [1, 2]})
    rank = effective_rank(spectra)
    assert rank["H"].values.tolist() == [90, 4]
    assert rank["saturated"].values.tolist() == [True, False]
    assert rank["largest"].item() == 100
    assert rank["layer"].values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "descending"),
        ([1.0, -0.1], "not negative"),
        ([1.0, np.nan], "finite"),
    ],
)
def test_bad_spectra(values, message):
    for function in (spectral_concentration, effective_rank):
        with pytest.raises(InputError, match=message):
            function(values)


def test_other_refusals():
    with pytest.raises(InputError, match="epsilon"):
        effective_rank([1.0], 0.0)
    with pytest.raises(InputError, match="spectrum of zeros"):
        effective_rank([0.0, 0.0])
    with pytest.raises(InputError, match="at least 5 of them"):
        spectral_concentration(np.ones(9), n_fit=1)
    with pytest.raises(InputError, match="dimension 'mode'"):
        effective_rank(xr.DataArray([1.0], dims="k"))


def test_the_first_few_eigenvalues_are_not_a_spectrum(make_fields):
    from attnlib import pod, scale_gram, spectrum

    fields = make_fields(n=20)
    modes = pod(fields, [2.0], 5)
    for function in (effective_rank, spectral_concentration):
        with pytest.raises(InputError, match=r"first 5 of 19 eigenvalues.*spectrum\(scale_gram"):
            function(modes["eigenvalue"])
    whole = spectrum(scale_gram(fields, [2.0]))
    assert effective_rank(whole)["largest"] == 19
    np.testing.assert_allclose(whole.isel(mode=slice(5)), modes["eigenvalue"], rtol=1e-6)
