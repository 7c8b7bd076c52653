"""Every notebook, run by papermill at smoke size, and what it computed."""

import json
import os
import shutil

import numpy as np
import pytest
import torch

from attnlib import (
    CLAIMS,
    VERDICTS,
    InputError,
    apply,
    every_run,
    held_out_windows,
    interaction_ranks,
    kept_models,
    load,
    load_checkpoint,
    load_runs,
    load_text,
    position_losses,
    prescribe,
    run_folder,
    run_recipe,
    run_tokenizer,
    values_digest,
    window_losses,
    windows,
)
from attnlib.runner import notebook_names, preset_parameters, run_notebook

# The others are blank outside cones, where there is no fit, or for a seed that was not trained.
FINITE = ("01_data_and_models", "02_the_attention_field", "03_lag_and_sign")


@pytest.mark.parametrize("name", notebook_names())
def test_results_are_whole_and_say_where_they_come_from(smoke, name):
    data = load(smoke / f"{name}.nc")
    attrs = data.attrs
    expected = {k: v for k, v in preset_parameters("smoke", name).items() if k != "out"}
    recorded = json.loads(attrs["parameters"])
    assert {k: recorded[k] for k in expected} == expected
    assert len(attrs["corpus_hash"]) == 64
    assert attrs["device"] == "cpu"
    assert attrs["git_commit"]
    assert "torch" in json.loads(attrs["versions"])
    if name in FINITE:
        for variable in data.data_vars.values():
            assert variable.dtype.kind != "f" or np.isfinite(variable).all(), variable.name


def test_models_learn(smoke):
    data = load(smoke / "01_data_and_models.nc")
    assert data["bigram_loss"] < data["unigram_loss"]
    assert (data["val_loss"].isel(step=-1) < data["val_loss"].isel(step=0)).all()
    assert (data["gain"].sel(model="BASE") == 0).all()
    np.testing.assert_allclose(data["gain"], data["loss"] - data["loss"].sel(model="BASE"))
    parameters = data["parameters"]
    assert int(parameters.sel(model="EGA-1")) > int(parameters.sel(model="BASE"))
    assert len(set(data["fingerprint"].values.ravel())) == data["fingerprint"].size


def test_fields_are_attention(smoke):
    data = load(smoke / "02_the_attention_field.nc")
    np.testing.assert_allclose(data["mean_field"].sum("key"), 1, atol=1e-5)
    assert float(np.abs(np.triu(data["mean_field"].values, 1)).max()) == 0
    energy = data["fluctuation_energy"] / (data["fluctuation_energy"] + data["mean_energy"])
    np.testing.assert_allclose(data["fluctuation_share"], energy, rtol=1e-6)
    np.testing.assert_allclose(
        data["mean_by_lag"].isel(lag=0),
        np.diagonal(data["mean_field"].values, axis1=-2, axis2=-1).mean(-1),
        rtol=1e-5,
    )


def test_the_published_reading_sees_the_diagonal(smoke):
    data = load(smoke / "03_lag_and_sign.nc")
    assert data["mismatch"] < 1e-4
    assert data["published_spread"].item() == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(data["published_energy"], data["energy_from_diagonal"], rtol=1e-4)
    found = np.abs(data["planted_profile"]).idxmax("lag")
    assert abs(float(found.sel(reading="causal")) - 12) <= 1
    assert float(found.sel(reading="published")) == 0
    np.testing.assert_allclose(data["leading_share"].sum("band"), 1)


def test_scalogram_agrees_with_direct_computation(smoke):
    data = load(smoke / "04_scalogram.nc")
    assert data["form_difference"] < 1e-5
    assert data["pywt_difference"] < 1e-3
    assert np.isnan(data["power"].where(~data["in_cone"])).all()
    standardized = data["standardized_power"].sel(model=["BASE", "EGA-1", "EGA-2", "EGA-C"])
    assert (standardized.where(data["in_cone"], 1) >= 0).all()
    grid = data["scale"].values
    chosen = data["dominant"].values[np.isfinite(data["dominant"].values)]
    assert not set(chosen) & {grid[0], grid[-1]}
    assert np.isin(data["strongest_scale"].sel(model=standardized["model"]), grid).all()
    assert data.sizes["choice"] == 16
    ratio = data[["ratio_low", "ratio_high"]].sel(model="BASE")
    assert (ratio["ratio_low"] < ratio["ratio_high"]).all()


def test_pod_is_consistent(smoke):
    data = load(smoke / "05_scale_selective_pod.nc")
    n = data.sizes["mode"]
    np.testing.assert_allclose(
        data["spectrum"].isel(rank_order=slice(n)).values, data["eigenvalue"].values, rtol=1e-6
    )
    assert data["multiplet_open"].dtype == bool
    assert data["measured_error"].item() == pytest.approx(data["predicted_error"].item(), abs=1e-5)
    norms = np.square(data["mode_field"]).sum(("query", "key"))
    np.testing.assert_allclose(norms, 1, atol=1e-4)
    assert "untrained" in data["model"].values
    share = data["spectrum"].isel(rank_order=slice(n)).sum("rank_order")
    share = (share / data["spectrum"].sum("rank_order")).sel(scale=np.inf)
    first_seed = data["share_estimate"].isel(seed=0)
    np.testing.assert_allclose(first_seed.sel(model=share["model"]), share, rtol=1e-6)
    late = first_seed.isel(layer=slice(-2, None)).mean("layer")
    early = first_seed.isel(layer=slice(0, 2)).mean("layer")
    np.testing.assert_allclose(data["late_less_early_estimate"].isel(seed=0), late - early)


def test_complexity_is_that_of_the_spectra(smoke):
    data = load(smoke / "07_complexity.nc")
    spectra = data["spectrum"].sel(model="BASE").values  # (seed, layer, rank_order)
    estimate = data["estimate"].sel(model="BASE")
    np.testing.assert_allclose(
        estimate.sel(statistic="participation"),
        spectra.sum(-1) ** 2 / np.square(spectra).sum(-1),
        rtol=1e-6,
    )
    tails = 1 - np.cumsum(spectra, -1) / spectra.sum(-1, keepdims=True)
    np.testing.assert_array_equal(estimate.sel(statistic="H"), (tails > 0.1 + 1e-12).sum(-1) + 1)
    raw = data["H"].sel(model="BASE", scale=np.inf)
    np.testing.assert_array_equal(raw, estimate.sel(statistic="H").isel(seed=0))
    low, high = data["low"], data["high"]
    inside = (low <= data["estimate"]) & (data["estimate"] <= high)
    assert (inside | low.isnull()).all()
    streamed = data.sel(model=["BASE", "EGA-1", "untrained", "shuffled"])
    assert (streamed["bracket_low"] <= streamed["bracket_high"]).all()
    assert set(data["model"].values) >= {"untrained", "shuffled", "phases"}


def test_modes_are_optimal_and_their_overlaps_are_overlaps(smoke):
    data = load(smoke / "06_modes.nc")
    assert data["tail_gap"] < 1e-4
    assert data["margin"] > 0
    assert ((data["overlap"] >= 0) & (data["overlap"] <= 1 + 1e-9)).all()
    assert ((data["low"] <= data["overlap"]) & (data["overlap"] <= data["high"])).all()
    counted = data["back_alone"] + data["back_as_a_pair"] + data["not_back"]
    assert (counted == data.sizes["layer"] * data.sizes["scale"] * data.sizes["mode"]).all()
    verdict = data["claim_verdict"].sel(claim="A4").item()
    assert verdict == "not measurable at this size"


def test_coherence_is_a_coherence(smoke):
    data = load(smoke / "08_coherence.nc")
    inside = data["coherence"].values[np.isfinite(data["coherence"].values)]
    assert inside.size
    assert (inside >= 0).all()
    assert (inside <= 1 + 1e-5).all()
    assert not (data["significant"] & data["footprint"]).any()
    diagonal = np.diagonal(data["coherence"].values, axis1=-2, axis2=-1)
    np.testing.assert_allclose(diagonal[np.isfinite(diagonal)], 1, atol=1e-5)


def test_heads_are_counted_and_moved(smoke):
    data = load(smoke / "09_heads.nc")
    heads = data.sizes["head"]
    assert ((data["effective_heads"] >= 1) & (data["effective_heads"] <= heads + 1e-9)).all()
    np.testing.assert_allclose(np.diagonal(data["correlation"].values, axis1=-2, axis2=-1), 1)
    assert len(set(data["parameters"].values)) == 1  # the same total in every allocation
    assert "uniform" in data["variant"].values
    assert data.sizes["variant"] == 2
    np.testing.assert_allclose(data["pruned"].sel(kept=heads), 0, atol=1e-6)


def test_only_gates_over_the_whole_window_look_ahead(smoke):
    data = load(smoke / "10_energy_gates.nc").isel(seed=0)
    causal = ["BASE", "EGA-1-query", "EGA-1-key"]
    assert (data["look_ahead"].sel(model=causal) == 0).all()
    assert (data["look_ahead"].sel(model=["EGA-1", "EGA-2", "EGA-C"]) > 0).all()
    np.testing.assert_allclose(data["without_future"].sel(model=causal), 0, atol=1e-5)
    np.testing.assert_allclose(
        data["without_future"], data["prefix_gain"] - data["same_gain"], atol=1e-5
    )
    assert (data[["gain", "prefix_gain"]].sel(model="BASE").to_array() == 0).all()
    ratio = data[["energy_ratio_low", "energy_ratio_high"]].sel(model="EGA-1")
    assert (ratio["energy_ratio_low"] < ratio["energy_ratio_high"]).all()


def test_parts_of_heads_are_parts(smoke):
    data = load(smoke / "11_routing_and_filtering.nc")
    for name in ("routing_share", "interaction_routing_share", "interaction_potential_share"):
        known = data[name].values[np.isfinite(data[name].values)]
        assert known.size >= 12
        assert known.min() >= 0
        assert known.max() <= 1
    encoder = data.sel(model="minilm-l6")
    capacity = 64
    for part in ("routing", "filtering"):
        ranks = encoder[f"{part}_rank"]
        assert float(ranks.max()) <= capacity
        assert float(ranks.min()) >= (2 if part == "routing" else 1) - 1e-9
    assert 0 < float(data["random_routing_share"].sel(model="minilm-l6")) < 0.5
    heads = float((encoder["largest_real"] > 0).mean())
    assert f"minilm-l6: {heads:.0%} of 72 heads" in str(
        data["claim_measured"].sel(claim="B3").values
    )


def test_s_d_models_are_trained_and_stable(smoke):
    data = load(smoke / "12_sd_attention.nc")
    names = ["standard", "standard-bare", "SD", "SD-bare", "SD-bare-2x16x2", "SD-bare-h4"]
    assert list(data["model"].values) == names
    runs = every_run(smoke, device="cpu", source="12_sd_attention.nc")
    both = {(n, s) for n in names[:4] for s in (0, 1)}
    assert set(runs) == both | {(n, 0) for n in names[4:]}
    held_out = held_out_windows(smoke, 8, 25, seed=1)
    for (name, seed), model in runs.items():
        loss = float(data["loss"].sel(model=name, seed=seed))
        assert loss == pytest.approx(float(window_losses(model, held_out).mean()), abs=1e-6)
        assert ("bare" not in name) == isinstance(model.norm, torch.nn.LayerNorm)
    skew = data.sel(kind=["SD", "SD-bare"])
    assert (skew["largest_real"] <= skew["bound"] + 1e-9).all()
    assert str(data["claim_verdict"].sel(claim="B4").values) == "reproduced"
    kept = kept_models(smoke, "SD-bare", 0, device="cpu", source="12_sd_attention.nc")
    assert list(kept) == [0, 5, 10, 16]
    last = kept[16].state_dict()
    assert all(torch.equal(v, last[k]) for k, v in runs["SD-bare", 0].state_dict().items())
    assert not torch.equal(kept[0].position_embedding.weight, last["position_embedding.weight"])


def test_the_cascade_is_that_of_the_models(smoke):
    data = load(smoke / "13_cascade.nc")
    model = every_run(smoke, names=["SD"], device="cpu", source="12_sd_attention.nc")["SD", 1]
    texts = held_out_windows(smoke, 4, 24, seed=0)
    ranks = interaction_ranks(model, texts)["routing_rank"].mean(("head", "snapshot"))
    found = data["routing_rank"].sel(model="SD", seed=1)
    np.testing.assert_allclose(found, ranks.sel(rank_by=found["rank_by"]), rtol=1e-6)
    steps = data["routing_rank_by_step"].sel(bare_or_sd="SD-bare")
    assert list(steps["step"].values) == [0, 5, 10, 16]
    last = data["routing_rank"].sel(model="SD-bare", seed=0, rank_by="participation")
    np.testing.assert_allclose(steps.sel(step=16), last, rtol=1e-6)
    assert (data["routing_rank"].sel(rank_by="participation").fillna(2) >= 2 - 1e-9).all()


def test_parts_of_routing_add_up_and_cuts_cost(smoke):
    data = load(smoke / "14_what_rank_two_means.nc")
    parts = data[["position_part", "content_part", "mixed_part"]].to_array().sum("variable")
    known = parts.sel(part="routing")
    np.testing.assert_allclose(known, 1, atol=1e-6)
    share = data["potential_share"]
    assert ((share >= 0) & (share <= 1)).all()
    assert (data["mean_share"] <= share + 1e-9).all()
    cost = data["cost"].sel(model="standard", seed=0)
    assert cost.notnull().all()
    assert (data["pretrained_cost"].sel(pretrained="minilm-l6", cut="no routing").dropna(
        "cut_group") > 0).all()  # fmt: skip


def test_a_cut_to_full_rank_costs_nothing(smoke):
    data = load(smoke / "15_trimming.nc")
    for name, part in (("standard", "routing"), ("standard", "filtering"), ("SD", "routing")):
        one = data["increase"].sel(model=name, part=part, seed=0)
        np.testing.assert_allclose(one.sel(kept=16), 0, atol=1e-5)
        assert (np.abs(one.sel(kept=0)) > 1e-6).all()
    assert data["increase"].sel(model="SD", part="filtering", kept=2).isnull().all()
    assert data["increase"].sel(model="SD", part="filtering", kept=-1).notnull().all()
    assert data["layer_increase"].notnull().all()


def test_linear_layers_cost_the_same_however_they_are_counted(smoke):
    data = load(smoke / "16_linearising.nc")
    whole, n_layer = data["first_increase"], int(data["n_layer"].sel(model="SD", seed=0))
    one = {k: data[f"{k}_increase"].sel(model="SD", seed=0) for k in ("first", "last", "alone")}
    # One first layer is layer 1 alone; one last layer is the last alone; all are all.
    assert float(one["first"].sel(changed=1)) == float(one["alone"].sel(changed=1))
    assert float(one["last"].sel(changed=1)) == float(one["alone"].sel(changed=n_layer))
    assert float(one["first"].sel(changed=n_layer)) == float(one["last"].sel(changed=n_layer))
    assert whole.sel(model="SD-bare-2x16x2", seed=0).notnull().sum() == 2
    assert data["plan_cost"].sel(action="full").dropna("model").max() == 0
    assert (data["rho_low"] <= data["rho_high"]).where(data["rho_low"].notnull(), True).all()


def test_hybrids_and_head_sizes_are_what_they_are_called(smoke):
    data = load(smoke / "17_hybrids_and_head_sizes.nc")
    sizes = data["head_size"].to_pandas()
    assert list(sizes.loc["cascade"]) == list(sizes.loc["reversed"])[::-1]
    assert sizes.loc["cascade"].is_monotonic_increasing
    assert (sizes.sum(axis=1) <= sizes.loc["cascade"].sum()).all()
    uniform = data.sel(model="SD-bare", seed=0)
    assert float(uniform["increase"]) == 0
    assert float(uniform["parameters_left"]) == 1
    both = data.sel(model=["SD-bare, cascade", "SD-bare, reversed"], seed=0)
    for what in ("parameters_left", "cache_left", "flops_left"):
        assert float(both[what][0]) == pytest.approx(float(both[what][1]))
        assert float(both[what][0]) < 1
    models, _, _ = load_runs(smoke, 3, names=["SD-bare"], source="12_sd_attention.nc")
    name = next(str(n) for n in data["model"].values if "SD-bare, first" in str(n))
    hybrid = load_checkpoint(run_folder(smoke / "models-hybrids", name, 0) / "final")[0]
    n = int(name.split()[2])
    kinds = hybrid.config.per_layer("attention")
    assert kinds == ("linear-sd",) * n + ("sd",) * (len(kinds) - n)
    assert hybrid.n_parameters() == models["SD-bare"].n_parameters()


def test_plans_are_carried_out_as_they_are_written(smoke):
    data = load(smoke / "18_prescription.nc")
    plan = load(smoke / "plans" / "SD-bare-0.nc")
    models, tokens, _ = load_runs(smoke, 6, names=["SD-bare"], source="12_sd_attention.nc")
    chosen = prescribe(plan, tolerance=0.2)
    one = data.sel(model="SD-bare", seed=0, allowed=0.2)
    assert float(one["saving"]) == pytest.approx(chosen.attrs["saving"])
    assert float(one["predicted"]) == pytest.approx(chosen.attrs["predicted_cost"])
    changed = apply(chosen, models["SD-bare"])
    if set(chosen["recommendation"].values) != {"full"}:
        assert (
            position_losses(changed, tokens) != position_losses(models["SD-bare"], tokens)
        ).any()
    assert (data["saving"].diff("allowed").dropna("model", how="all") >= -1e-9).all()


def test_the_ledger_has_every_claim(smoke):
    data = load(smoke / "20_claims.nc")
    assert set(data["claim"].values) == set(CLAIMS)
    assert set(data["claim_verdict"].values) <= set(VERDICTS)
    for claim in data["claim"].values:
        assert any(c.isdigit() for c in str(data["claim_measured"].sel(claim=claim).values))


@pytest.mark.parametrize("name", notebook_names())
def test_executed_notebooks_have_pictures_and_no_errors(smoke, name):
    notebook = json.loads((smoke / "notebooks" / f"{name}.ipynb").read_text())
    outputs = [o for c in notebook["cells"] for o in c.get("outputs", [])]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert sum("parameters" in c["metadata"].get("tags", []) for c in notebook["cells"]) == 1


@pytest.mark.parametrize(
    ("name", "threads"), [("01_data_and_models", os.cpu_count()), ("05_scale_selective_pod", 1)]
)
def test_the_same_command_gives_the_same_values(smoke, tmp_path, monkeypatch, name, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))  # as in the graph: sums depend on it
    if name != "01_data_and_models":  # which trains anew
        shutil.copy(smoke / "01_data_and_models.nc", tmp_path)
        shutil.copytree(smoke / "models", tmp_path / "models")
    run_notebook(name, out=tmp_path, preset="smoke", progress=False)
    again, before = load(tmp_path / f"{name}.nc"), load(smoke / f"{name}.nc")
    assert values_digest(again) == values_digest(before)


def test_a_notebook_without_its_inputs_says_what_to_run(tmp_path):
    with pytest.raises(InputError, match="run the notebook 01_data_and_models first"):
        run_notebook("04", out=tmp_path, preset="smoke", progress=False)


def test_a_run_on_a_text_of_ones_own(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("the cat sat on the mat, and the dog sat on the cat. " * 200)
    parameters = {"corpus": str(text), "steps": 4, "eval_every": 2, "eval_windows": 3}
    run_notebook("01", parameters, tmp_path, preset="smoke", progress=False)
    run_notebook("02", {"n_snapshots": 4}, tmp_path, preset="smoke", progress=False)
    assert load(tmp_path / "02_the_attention_field.nc").sizes["layer"] == 6


def test_windows_come_from_the_part_that_is_asked_for(smoke):
    parts = {p: held_out_windows(smoke, 5, 30, part=p) for p in ("training", "validation", "all")}
    text = load_text("shakespeare")
    tokens = run_tokenizer(smoke).encode(text)
    cut = int(0.9 * len(tokens))
    assert torch.equal(parts["training"], windows(tokens[:cut], 5, 30))
    assert torch.equal(parts["validation"], windows(tokens[cut:], 5, 30))
    assert torch.equal(parts["all"], windows(tokens, 5, 30))
    with pytest.raises(InputError, match="part is 'training'"):
        held_out_windows(smoke, 5, 30, part="test")


def test_recipes_are_those_of_the_notebook_that_trained(smoke):
    own = run_recipe(smoke, source="12_sd_attention.nc")
    assert (own.steps, own.keep_steps) == (16, (5, 10))
    assert run_recipe(smoke).steps != own.steps


def test_every_training_is_found_again(smoke):
    runs = every_run(smoke, device="cpu")
    assert set(runs) == {(n, s) for n in ("BASE", "EGA-1", "EGA-2", "EGA-C") for s in (0, 1)}
    models, _, _ = load_runs(smoke, 3, training_seed=1, names=["EGA-C"], device="cpu")
    for a, b in zip(models["EGA-C"].parameters(), runs["EGA-C", 1].parameters(), strict=True):
        assert (a == b).all()
    with pytest.raises(InputError, match=r"trained .*, not EGA-9"):
        every_run(smoke, names=["EGA-9"], device="cpu")
