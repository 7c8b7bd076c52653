"""Plans: allocation, budgets, the choice against brute force, and what a plan does to a model."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conversion import hugging_face, ours, tokens_of, weights_of

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    allocate,
    apply,
    linearize,
    load,
    load_checkpoint,
    lower_rank,
    model_budget,
    prescribe,
    save,
    save_checkpoint,
    window_losses,
)
from attnlib.__main__ import main
from attnlib.budgets import attention_budget
from attnlib.capture import LayerShape
from attnlib.plans import plan_table
from attnlib.prescription import _most_saved

RANKS = st.lists(st.floats(0.5, 60), min_size=1, max_size=12)


@given(RANKS, st.sampled_from([2, 4]), st.one_of(st.none(), st.floats(0.3, 1)))
def test_head_sizes_follow_the_ranks(ranks, multiple, share):
    sizes = allocate(ranks, largest=32, smallest=4, multiple=multiple, share=share)
    assert all(4 <= s <= 32 and s % multiple == 0 for s in sizes)
    order = np.argsort(ranks)
    assert list(np.array(sizes)[order]) == sorted(sizes)
    if share is None:
        assert sizes[int(np.argmax(ranks))] == 32
    else:
        assert sum(sizes) <= share * 32 * len(ranks)


def test_a_share_is_used_as_far_as_rounding_allows():
    assert allocate([1, 2, 4], largest=16, share=0.5) == (4, 6, 14)  # 24 = 0.5 x 48
    assert allocate([3, 3, 3], largest=16, share=0.5) == (8, 8, 8)
    assert allocate([1, 8], largest=16, share=1.0) == (16, 16)
    assert allocate([2.0, 4.0, 16.0], largest=64, smallest=8, multiple=8) == (8, 16, 64)


def test_ranks_may_be_a_tensor_with_a_gradient():
    ranks = torch.tensor([1.0, 2.0], requires_grad=True)
    assert allocate(ranks, largest=16) == (8, 16)


def test_what_cannot_be_allocated_is_refused():
    for ranks in ([1, np.nan], [1, 0], [np.inf, 1], [-1]):
        with pytest.raises(InputError, match="finite and positive"):
            allocate(ranks, largest=8)
    with pytest.raises(InputError, match="one number a layer"):
        allocate([[1, 2]], largest=8)
    with pytest.raises(InputError, match="ranks are numbers"):
        allocate("high", largest=8)
    with pytest.raises(InputError, match="cannot be met"):
        allocate([1, 2], largest=8, share="half")
    with pytest.raises(InputError, match="do not fit"):
        allocate([1, 2], largest=9)
    with pytest.raises(InputError, match="cannot be met"):
        allocate([1, 2], largest=8, smallest=4, share=0.3)
    with pytest.raises(InputError, match="largest is a whole number"):
        allocate([1, 2], largest=8.5)


@pytest.mark.parametrize("kind", ["softmax", "sd", "linear", "linear-sd"])
def test_budgets_count_what_the_models_hold(kind):
    """The parameters are the module's, the cache is what decoding keeps."""
    model = GPT(GPTConfig(1, 2, 12, 10, 11, kind, dropout=0.0)).eval()
    shape = LayerShape(kind, 2, 2, 6)
    budget = attention_budget(shape, 12, 10)
    attention = model.blocks[0].attention
    matrices = attention.qkv.weight.numel() + attention.proj.weight.numel()
    assert budget["parameters"] == matrices
    _, caches = model.decode(tokens_of(1, 10))
    kept = sum(x.numel() for x in caches[0])
    assert budget["cache"] == kept
    assert attention_budget(shape, 12, 10, 2)["cache"] < budget["cache"]
    assert model_budget(model, 10) == budget
    with pytest.raises(InputError, match="ega-1: gates are not counted"):
        model_budget(ours("ega-1"), 10)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.floats(0, 1.5))
def test_the_choice_is_the_best_of_all(seed, tolerance):
    generator = np.random.default_rng(seed)
    cost = np.concatenate([np.zeros((4, 1)), generator.normal(0.3, 0.3, (4, 2))], 1)
    saved = np.concatenate([np.zeros((4, 1)), generator.integers(-2, 9, (4, 2))], 1)
    picked = _most_saved(cost, saved, tolerance)
    price, rows = np.clip(cost, 0, None), np.arange(4)
    best = max(
        saved[rows, list(choice)].sum()
        for choice in itertools.product(range(3), repeat=4)
        if price[rows, list(choice)].sum() <= tolerance
    )
    assert saved[rows, picked].sum() == best
    assert price[rows, picked].sum() <= tolerance + 1e-6
    # No other plan that saves as much costs less.
    cheapest = min(
        price[rows, list(choice)].sum()
        for choice in itertools.product(range(3), repeat=4)
        if saved[rows, list(choice)].sum() == best
    )
    assert price[rows, picked].sum() == pytest.approx(cheapest, abs=1e-6)


@pytest.mark.parametrize("make", [ours, lambda: ours("sd"), lambda: hugging_face("llama", 3)])
def test_a_plan_tells_what_it_does(make, tmp_path):
    model, tokens = make(), tokens_of(8, 10)
    before = weights_of(model)
    plan = prescribe(model, tokens, tolerance=0.02, context=64)
    assert torch.equal(weights_of(model), before)
    actions = [str(a) for a in plan["recommendation"].values]
    assert set(actions) <= set(plan["action"].values)
    # Each cost is that of the change alone, on the windows that made no map.
    base = window_losses(model, tokens[4:])
    rank = int(str(plan["action"].values[1]).split()[1])
    for action, changed in (
        ("linear", linearize(model, [2])),
        (f"rank {rank}", lower_rank(model, rank, [2], reference=tokens[:4, :-1])),
    ):
        found = plan["cost"].sel(layer=2, action=action)
        expected = window_losses(changed, tokens[4:]) - base
        assert float(found) == pytest.approx(float(expected.mean()), abs=1e-6)
        error = float(plan["cost_se"].sel(layer=2, action=action))
        assert error == pytest.approx(float(expected.std()) / 2, abs=1e-6)
    predicted = plan["predicted_cost"].values
    assert plan.attrs["predicted_cost"] == pytest.approx(predicted.sum())
    assert np.clip(predicted, 0, None).sum() <= 0.02 + 1e-6
    # Carried out, also after a way through a file, it is those changes together.
    save(plan, tmp_path / "plan.nc")
    new = apply(load(tmp_path / "plan.nc"), model)
    expected = model
    for layer, action in enumerate(actions, start=1):
        if action.startswith("rank"):
            expected = lower_rank(
                expected, int(action.split()[1]), [layer], reference=tokens[:4, :-1]
            )
    straight = [i for i, a in enumerate(actions, start=1) if a == "linear"]
    expected = linearize(expected, straight) if straight else expected
    with torch.no_grad():
        torch.testing.assert_close(
            new(tokens[:, :-1])[0], expected(tokens[:, :-1])[0], atol=1e-3, rtol=1e-3
        )
    assert torch.equal(weights_of(model), before)
    # Another tolerance needs no new measurement; more of it saves no less.
    none, all_of_it = prescribe(plan, tolerance=0.0), prescribe(plan, tolerance=1e3)
    assert none.attrs["saving"] <= plan.attrs["saving"] <= all_of_it.attrs["saving"]
    assert (np.diff(plan["frontier_saving"]) >= -1e-9).all()
    assert none["cost"].equals(plan["cost"])
    # Costs that count more, or are feared to be higher, allow no more saving.
    dear, bold = (
        prescribe(plan, tolerance=0.02, factor=3.0),
        prescribe(plan, tolerance=0.02, caution=0),
    )
    assert dear.attrs["saving"] <= plan.attrs["saving"] <= bold.attrs["saving"]
    if list(dear["recommendation"].values) == actions:
        assert dear.attrs["predicted_cost"] == pytest.approx(3 * plan.attrs["predicted_cost"])


def test_the_frontier_of_another_factor_is_that_of_a_fresh_choice():
    plan = prescribe(ours(), tokens_of(8, 10), ranks=[2, 3])
    again = prescribe(plan, factor=2.5)
    names = ["frontier_saving", "frontier_cost"]
    fresh = prescribe(plan.drop_vars(names), factor=2.5)
    for name in names:
        np.testing.assert_allclose(again[name], fresh[name], rtol=1e-12)
    assert float(again["frontier_cost"].max()) > float(plan["frontier_cost"].max()) > 0


def test_where_nothing_saves_nothing_is_changed():
    plan = prescribe(ours(), tokens_of(8, 10), ranks=[6], linear=False)
    assert set(plan["recommendation"].values) == {"full"}
    assert plan.attrs["saving"] == 0


def test_a_plan_builds_the_model_to_train():
    model, tokens = ours("sd"), tokens_of(8, 10)
    plan = prescribe(model, tokens, tolerance=1e3, ranks=[2])
    config = GPTConfig.from_plan(plan)
    expected = ["linear-sd" if a == "linear" else "sd" for a in plan["recommendation"].values]
    assert list(config.per_layer("attention")) == expected
    assert list(config.per_layer("head_size")) == [int(x) for x in plan["head_size"].values]
    assert max(config.head_size) == 6
    GPT(config)
    with pytest.raises(InputError, match="3 layers, the model 2"):
        GPTConfig.from_plan(plan, GPTConfig(n_layer=2))
    with pytest.raises(InputError, match="base is a GPTConfig, not dict"):
        GPTConfig.from_plan(plan, {"n_layer": 3})
    straight = plan.assign(recommendation=("layer", ["linear", "full", "full"]))
    with pytest.raises(InputError, match="layer 1 of `base` is of the kind 'ega-1'"):
        GPTConfig.from_plan(straight, ours("ega-1").config)
    foreign = prescribe(hugging_face("gpt2", 2), tokens, tolerance=0.1, ranks=[2])
    with pytest.raises(InputError, match="not a GPT: give as `base`"):
        GPTConfig.from_plan(foreign)


def test_a_plan_for_another_model_or_a_damaged_one_is_refused():
    model, tokens = ours(), tokens_of(8, 10)
    plan = prescribe(model, tokens, ranks=[2], layers=[1, 3])
    assert plan["cost"].sel(layer=2, action="linear").isnull()
    assert str(plan["recommendation"].sel(layer=2).item()) == "full"
    for other in (ours("sd"), hugging_face("llama")):
        with pytest.raises(InputError, match="for another architecture, GPT, 3 layers"):
            apply(plan, other)
    with pytest.raises(InputError, match="this is no plan"):
        apply(xr.Dataset({"cost": 1.0}), model)
    with pytest.raises(InputError, match="this is no plan"):
        prescribe(xr.Dataset({"cost": 1.0}))
    bad = plan.copy(deep=True)
    bad["routing_rank"][1] = np.nan
    with pytest.raises(InputError, match="ranks of this plan are not finite"):
        apply(bad, model)
    with pytest.raises(InputError, match="ranks of this plan are not finite"):
        prescribe(bad)
    with pytest.raises(InputError, match="another choice from it has only"):
        prescribe(plan, ranks=[2])
    with pytest.raises(InputError, match="this is no plan"):
        apply(plan.drop_attrs(), model)
    with pytest.raises(InputError, match="12 tokens"):
        apply(plan, GPT(GPTConfig(3, 2, 12, 10, 12)))
    bad = plan.copy(deep=True)
    bad["recommendation"][0] = "much"
    with pytest.raises(InputError, match="recommends much"):
        apply(bad, model)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": tokens_of(5, 10)}, "at least 6"),
        ({"tokens": tokens_of(8, 13)}, "longer than the model's context"),
        ({"tolerance": float("nan")}, "tolerance is a number"),
        ({"tolerance": -1.0}, "tolerance is a number"),
        ({"save": "money"}, "save is one of"),
        ({"caution": -1.0}, "caution is a number"),
        ({"caution": "x"}, "caution is a number"),
        ({"factor": 1e7}, "factor is a number from 0 to a million"),
        ({"ranks": 4}, "ranks are a list"),
        ({"ranks": [2.5]}, "ranks are a list"),
        ({"context": 0}, "context is a whole number"),
        ({"layers": 9}, "layers are among 1 to 3"),
        ({"factor": 0.0}, "factor is positive"),
        ({"ranks": [7]}, "cut to a rank from 1 to 6"),
        ({"ranks": [], "linear": False}, "ranks, each once, or linear attention"),
        ({"ranks": [2, 2]}, "ranks, each once, or linear attention"),
        ({"ranks": (r for r in (2, 2))}, "ranks, each once, or linear attention"),
        ({"ranks": [True]}, "ranks are a list"),
        ({"ranks": "24"}, "ranks are a list"),
        ({"ranks": [2, 3], "model": ours("sd")}, "layer 1 .* which is even"),
        ({"layers": [4]}, "layers are among 1 to 3"),
        ({"model": ours("ega-1")}, "layer 1 is of the kind 'ega-1'"),
        ({"model": ours(("softmax", "softmax", "ega-1")), "layers": [1]}, "layer 3 is of the kind"),
        ({"model": linearize(ours(), [3])}, "layer 3 is of the kind 'linear'"),
        ({"model": hugging_face("mistral")}, "sliding window only"),
        ({"model": linearize(hugging_face("llama"), [2])}, "layer 2 is changed already"),
        ({"model": hugging_face("bert")}, "not causal"),
    ],
)
def test_what_cannot_be_prescribed_is_refused_before_it_is_measured(changes, words, monkeypatch):
    def measure(*arguments, **options):
        raise AssertionError("measured")

    for name in ("window_losses", "interaction_ranks"):
        monkeypatch.setattr(f"attnlib.prescription.{name}", measure)
    asked = {"model": ours(), "tokens": tokens_of(8, 10)} | changes
    with pytest.raises(InputError, match=words):
        prescribe(**asked)


def test_texts_and_models_that_give_no_number_are_refused():
    with pytest.raises(InputError, match=r"no routing at all .* take longer windows"):
        prescribe(ours(), tokens_of(8, 2))
    broken = ours()
    broken.norm.weight.data[:] = float("nan")
    with pytest.raises(InputError, match="own loss is not finite"):
        prescribe(broken, tokens_of(8, 10))


def test_ranks_of_any_list_and_tokens_of_32_bits():
    plans = [
        prescribe(ours(), tokens, ranks=ranks, linear=False)
        for tokens, ranks in (
            (tokens_of(8, 10), [2, 3]),
            (tokens_of(8, 10).int(), np.array([2, 3])),
            (tokens_of(8, 10), (r for r in (2, 3))),
        )
    ]
    assert all(plan.equals(plans[0]) for plan in plans)
    with pytest.raises(InputError, match="another choice from it has only"):
        prescribe(plans[0], ranks=np.array([2, 3]))
    # A model that sees a window of the text can be cut, if not made linear.
    prescribe(hugging_face("mistral"), tokens_of(8, 10), linear=False)


def test_extreme_factors_and_tolerances_are_kept():
    plan = prescribe(ours(), tokens_of(8, 10), tolerance=0.02)
    for more in ({"factor": 1e6}, {"caution": 1e6}, {"factor": 1e-300}, {"tolerance": 1e6}):
        again = prescribe(plan, **{"tolerance": 0.02} | more)
        assert np.isfinite(again.attrs["saving"])
    tiny = plan.copy(deep=True)
    tiny["cost"].values[:, 1:] = 1e-9
    tiny["cost_se"].values[:] = 0
    for tolerance, n in ((5e-10, 0), (1.5e-9, 1), (2.5e-9, 2), (1e-8, 3)):
        changed = prescribe(tiny, tolerance=tolerance)["recommendation"] != "full"
        assert int(changed.sum()) == n


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.assign(head_size=("layer", [2, 0, 2])), "head sizes are positive"),
        (lambda p: p.assign(head_size=("layer", [2.0, 2.0, 2.0])), "head sizes are positive"),
        (lambda p: p.assign(reference=p["reference"] * 1.5), "reference of a plan is tokens"),
        (lambda p: p.assign(reference=p["reference"][0]), "this is no plan"),
        (lambda p: p.drop_vars("potential_share"), "this is no plan"),
        (lambda p: p.assign_coords(layer=[1, 2, 4]), "layers of a plan are 1, 2"),
        (lambda p: p.assign_coords(action=["full", "half", "linear"]), "'rank N', each once"),
        (lambda p: p.assign_coords(action=["rank 1", "rank 3", "linear"]), "'full' first"),
        (lambda p: p.isel(action=[1, 2]), "'full' first"),
        (lambda p: p.assign(recommendation=("layer", [1, 2, 3])), "recommends 1, 2, 3"),
        (lambda p: p.assign(cost=p["cost"] + 1), "costs or budgets"),
        (lambda p: p.assign(cache=p["cache"] * np.nan), "costs or budgets"),
    ],
)
def test_a_plan_edited_by_hand_is_refused(damage, words):
    plan = prescribe(ours(), tokens_of(8, 10), ranks=[2])
    for use in (
        lambda p: apply(p, ours()),
        plan_table,
        GPTConfig.from_plan,
        prescribe,
    ):
        with pytest.raises(InputError, match=words):
            use(damage(plan))


def test_the_command_prescribes_checks_and_writes(tmp_path, capsys):
    text = "a rose is a rose is a rose, and so on, and so on to the end. " * 40
    (tmp_path / "text.txt").write_text(text)
    characters = "".join(sorted(set(text)))
    model = GPT(GPTConfig(2, 2, 8, 16, len(characters), dropout=0.0))
    folder = tmp_path / "final"
    save_checkpoint(folder, model, meta={"characters": characters})
    asked = ["prescribe", str(folder), "--text", str(tmp_path / "text.txt"), "--length", "12"]
    out = tmp_path / "deep" / "plan.nc"
    assert main([*asked, "--check", "--out", str(out), "--no-progress"]) == 0
    printed = capsys.readouterr().out
    assert "recommendation" in printed
    assert "measured on 8 other windows" in printed
    plan = load(out)
    assert "measured_cost" in plan.attrs
    apply(plan, load_checkpoint(folder)[0])
    for wrong, words in (
        ([*asked, "--out", str(tmp_path / "plan.csv")], "ends in .nc"),
        ([*asked, "--out", str(tmp_path)], "ends in .nc"),
        ([*asked, "--windows", "2"], "at least 6"),
        ([*asked, "--layers", "3"], "layers are among 1 to 2"),
        ([*asked, "--length", "4000"], "window"),
        (["prescribe", str(tmp_path / "none"), "--text", str(tmp_path / "text.txt")], "no folder"),
        (["prescribe", "smollm3", "--text", str(tmp_path / "text.txt")], "smollm2-135m"),
        (["prescribe", str(folder), "--text", str(tmp_path / "none.txt")], "nor a text file"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err


def test_a_kill_while_a_file_is_written_leaves_nothing(tmp_path):
    text = "a rose is a rose is a rose, and so on, and so on to the end. " * 40
    (tmp_path / "text.txt").write_text(text)
    characters = "".join(sorted(set(text)))
    save_checkpoint(
        tmp_path / "model",
        GPT(GPTConfig(1, 2, 8, 16, len(characters), dropout=0.0)),
        meta={"characters": characters},
    )
    killed = """
import os, pathlib, signal, sys, time, xarray
def half_written(dataset, path, **options):
    pathlib.Path(path).write_text("half")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
xarray.Dataset.to_netcdf = half_written
from attnlib.__main__ import main
main(sys.argv[1:])
"""
    asked = ["prescribe", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    asked += ["--length", "12", "--out", str(tmp_path / "out" / "plan.nc"), "--no-progress"]
    done = subprocess.run([sys.executable, "-c", killed, *asked], capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    assert not list((tmp_path / "out").iterdir())


def test_the_command_goes_on_after_a_kill(tmp_path, capsys):
    text = "a rose is a rose is a rose, and so on, and so on to the end. " * 40
    (tmp_path / "text.txt").write_text(text)
    characters = "".join(sorted(set(text)))
    model = GPT(GPTConfig(3, 2, 8, 16, len(characters), dropout=0.0))
    save_checkpoint(tmp_path / "model", model, meta={"characters": characters})
    killed = """
import os, signal, sys, time
from attnlib.restarts import KeptCosts
write = KeptCosts.write
def written(self, cost):
    write(self, cost)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
KeptCosts.write = written
from attnlib.__main__ import main
main(sys.argv[1:])
"""
    out = tmp_path / "out" / "plan.nc"
    asked = ["prescribe", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    asked += ["--length", "12", "--out", str(out)]
    done = subprocess.run([sys.executable, "-c", killed, *asked], capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    assert [path.name for path in out.parent.iterdir()] == ["plan.begun.nc"]
    assert main(asked) == 0
    assert "3/9" in capsys.readouterr().err  # the bar starts where the killed run was
    assert [path.name for path in out.parent.iterdir()] == ["plan.nc"]
