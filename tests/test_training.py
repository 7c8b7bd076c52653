"""Training: the same end after a kill, and refusals before hours are spent."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnlib import (
    GPT,
    GPTConfig,
    InputError,
    TrainConfig,
    device,
    load_checkpoint,
    train,
    training,
)
from attnlib.checkpoints import read_checkpoint
from attnlib.optimizers import Optimizers, learning_rate

TEXT = "".join(chr(97 + (i * i + i // 7) % 13) for i in range(4000))
SHAPE = GPTConfig(n_layer=1, n_head=2, d_model=8, context=16, dropout=0.2)
SHORT = TrainConfig(
    steps=12, batch_size=4, warmup=3, eval_every=5, eval_windows=4, checkpoint_every=4, device="cpu"
)


def weights(model):
    return {k: v.numpy().tobytes() for k, v in model.state_dict().items()}


def test_loss_falls_and_history_is_complete():
    _, meta = train(SHAPE, TEXT, replace(SHORT, steps=202, learning_rate=0.02), progress=False)
    history = meta["history"]
    assert history["step"] == [*range(5, 201, 5), 202]
    assert history["val_loss"][-1] < history["val_loss"][0] - 0.1
    assert all(np.isfinite(v) for values in history.values() for v in values)
    assert len(meta["characters"]) == meta["model"]["vocab_size"] == len(set(TEXT))


KILLED = """
    import sys, pathlib
    sys.path.insert(0, {tests!r})
    import attnlib.training as t
    from test_training import SHAPE, SHORT, TEXT
    import torch
    torch.set_num_threads(1)
    save = t._Run.save
    def slow_save(self, step, *rest):
        save(self, step, *rest)
        if step == 8:
            print("saved", flush=True)
            import time; time.sleep(60)
    t._Run.save = slow_save
    from dataclasses import replace
    shape, config = replace(SHAPE, attention={kind!r}), replace(SHORT, optimizer={optimizer!r})
    t.train(shape, TEXT, config, {out!r}, progress=False)
"""


@pytest.mark.parametrize(
    ("kind", "optimizer"), [("softmax", "adamw"), ("ega-1", "muon"), ("sd", "muon-vo")]
)
def test_a_killed_run_ends_as_an_unbroken_one_bit_for_bit(tmp_path, kind, optimizer):
    shape, config = replace(SHAPE, attention=kind), replace(SHORT, optimizer=optimizer)
    unbroken, whole = train(shape, TEXT, config, tmp_path / "unbroken", progress=False)
    code = textwrap.dedent(KILLED).format(
        tests=os.path.dirname(__file__), out=str(tmp_path / "run"), kind=kind, optimizer=optimizer
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [p.name for p in (tmp_path / "run").glob("step-*")] == ["step-00000008"]
    torch.manual_seed(99)  # whatever the global state is, the run's own is restored
    resumed, again = train(shape, TEXT, config, tmp_path / "run", progress=False)
    assert weights(resumed) == weights(unbroken)
    assert again["history"] == whole["history"]
    assert not list((tmp_path / "run").glob("step-*"))


def test_a_finished_run_is_loaded_not_trained(tmp_path, monkeypatch):
    first, _ = train(SHAPE, TEXT, SHORT, tmp_path, progress=False)
    monkeypatch.setattr("attnlib.training._train_loop", None)  # calling it would fail
    second, meta = train(SHAPE, TEXT, SHORT, tmp_path, progress=False)
    assert weights(first) == weights(second)
    assert meta["step"] == 12


@pytest.mark.parametrize(
    "other", [{"config": replace(SHORT, learning_rate=1e-2)}, {"text": TEXT[:-1]}, {"seed": 1}]
)
def test_another_run_is_set_aside_not_deleted(tmp_path, other):
    train(SHAPE, TEXT, SHORT, tmp_path, progress=False)
    mark = json.loads((tmp_path / "final" / "meta.json").read_text())["fingerprint"]
    arguments = {"config": SHORT, "text": TEXT, "seed": 0} | other
    train(
        SHAPE, arguments["text"], arguments["config"], tmp_path, seed=arguments["seed"],
        progress=False,
    )  # fmt: skip
    aside = tmp_path / f"superseded-{mark[:10]}-final"
    assert (aside / "model.safetensors").is_file()


def test_a_half_written_checkpoint_is_never_read(tmp_path):
    train(SHAPE, TEXT, SHORT, tmp_path / "a", progress=False)
    litter = tmp_path / "b" / ".step-00000008.1.tmp"
    litter.mkdir(parents=True)
    (litter / "model.safetensors").write_bytes(b"half")
    model, _ = train(SHAPE, TEXT, SHORT, tmp_path / "b", progress=False)
    assert not litter.exists()
    assert weights(model) == weights(train(SHAPE, TEXT, SHORT, tmp_path / "a", progress=False)[0])


def test_two_processes_do_not_share_a_run(tmp_path, monkeypatch):
    import filelock

    monkeypatch.setattr(filelock.FileLock, "acquire", lambda self: _raise(filelock.Timeout("x")))
    with pytest.raises(InputError, match="another process"):
        train(SHAPE, TEXT, SHORT, tmp_path, progress=False)


def _raise(error):
    raise error


def test_weights_that_are_not_finite_are_never_checkpointed(tmp_path):
    config = replace(SHORT, learning_rate=1e30, eval_every=12, checkpoint_every=2)
    with pytest.raises(InputError, match="not finite at step"):
        train(SHAPE, TEXT, config, tmp_path, progress=False)
    assert not list(tmp_path.glob("step-*"))


def test_accumulation_gives_the_same_steps():
    plain = replace(SHAPE, dropout=0.0)
    one, _ = train(plain, TEXT, SHORT, progress=False)
    four, _ = train(plain, TEXT, replace(SHORT, accumulate=4), progress=False)
    for a, b in zip(one.state_dict().values(), four.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_schedule():
    config = TrainConfig(steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert all(a <= b for a, b in itertools.pairwise(rates[:11]))
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def test_decay_is_for_matrices_alone():
    model = GPT(replace(SHAPE, vocab_size=5, attention="ega-1"))
    decay, rest = Optimizers(model, SHORT)._all[0].param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert all(names[id(p)].endswith("weight") for p in decay["params"])
    free = {names[id(p)] for p in rest["params"]}
    gate = "blocks.0.attention."
    assert {gate + "alpha", gate + "tau", gate + "mix", gate + "energy.bias"} <= free
    assert {"norm.weight", "norm.bias", gate + "proj.bias"} <= free
    assert rest["weight_decay"] == 0
    assert len(decay["params"]) + len(rest["params"]) == len(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "abcd" * 20}, "windows of 17 tokens"),
        ({"config": replace(SHORT, device="cuda")}, "this machine has none"),
        ({"config": replace(SHORT, device="gpu")}, "device is 'auto'"),
        ({"out": "/proc/nowhere"}, "cannot be written"),
        ({"model": GPT(replace(SHAPE, vocab_size=3))}, "pass a GPTConfig"),
        ({"config": replace(SHORT, learning_rate=1e30)}, "lower learning_rate"),
    ],
)
def test_refusals(arguments, message):
    if "cuda" in str(arguments) and torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so asking for one is no error")
    given = {"model": SHAPE, "text": TEXT, "config": SHORT, "progress": False} | arguments
    with pytest.raises(InputError, match=message):
        train(**given)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"batch_size": 5, "accumulate": 2}, "does not divide"),
        ({"precision": "half"}, "precision"),
        ({"steps": 0}, "steps is at least 1"),
        ({"learning_rate": float("nan")}, "positive and finite"),
        ({"warmup": -1}, "positive and finite"),
        ({"checkpoint_every": 0}, "checkpoint_every is at least 1"),
        ({"eval_windows": 2}, "eval_windows is at least 3"),
        ({"seed": -1}, "seed is at least 0"),
    ],
)
def test_impossible_settings(bad, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(**bad)


def test_the_precision_is_chosen_by_measurement_once_and_kept(tmp_path, monkeypatch):
    wide = replace(SHAPE, d_model=128, n_head=4)
    fast = {}
    monkeypatch.setattr(device, "bfloat16_ratio", lambda threads: fast["ratio"])
    for ratio, wanted in ((0.02, "float32"), (1.1, "float32"), (2.4, "bfloat16")):
        fast["ratio"] = ratio
        _, meta = train(wide, TEXT, replace(SHORT, steps=2), progress=False)
        assert meta["precision"] == wanted
        assert np.isfinite(meta["history"]["val_loss"]).all()
    assert train(SHAPE, TEXT, SHORT, progress=False)[1]["precision"] == "float32"  # narrow

    # What has begun in bfloat16 goes on in it, on a machine that would have begun in float32.
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(wide, TEXT, SHORT, tmp_path, progress=False)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000004"]
    fast["ratio"] = 0.02
    assert train(wide, TEXT, SHORT, tmp_path, progress=False)[1]["precision"] == "bfloat16"


def test_bfloat16_where_the_hardware_lacks_it_is_refused(monkeypatch):
    monkeypatch.setattr(device, "bfloat16_ratio", lambda threads: 0.02)
    with pytest.raises(InputError, match="lacks the hardware for it: take 'auto' or 'float32'"):
        train(SHAPE, TEXT, replace(SHORT, precision="bfloat16"), progress=False)
    monkeypatch.undo()
    assert device.bfloat16_ratio(1) > 0


def test_a_batch_that_breaks_the_loss_is_kept_with_the_last_good_weights(tmp_path, monkeypatch):
    forward, calls = GPT.forward, []

    def broken(self, tokens, targets=None, on_attention=None):
        logits, loss = forward(self, tokens, targets, on_attention)
        if targets is not None and self.training:
            calls.append(tokens.clone())
            loss = loss * (math.nan if len(calls) == 7 else 1)
        return logits, loss

    monkeypatch.setattr(GPT, "forward", broken)
    with pytest.raises(InputError, match=r"not finite at step 7.*batch of that step are in"):
        train(SHAPE, TEXT, replace(SHORT, optimizer="muon"), tmp_path, progress=False)
    meta, kept, batch = read_checkpoint(tmp_path / "not-finite")
    assert torch.equal(batch["inputs"], calls[-1])
    monkeypatch.undo()
    six = replace(SHORT, optimizer="muon", keep_steps=(6,))
    train(SHAPE, TEXT, six, tmp_path / "whole", progress=False)
    good, _ = load_checkpoint(tmp_path / "whole" / "kept-00000006")
    assert {k: v.numpy().tobytes() for k, v in kept.items()} == weights(good)
    assert meta["step"] == 6


def test_the_progress_bar_shows_loss_speed_and_time_left(capsys):
    started = time.monotonic()
    train(SHAPE, TEXT, SHORT, name="mine")
    shown = capsys.readouterr().err
    assert time.monotonic() - started < 60
    for part in ("mine", "tok/s", "train=", "val=", "100%"):
        assert part in shown


def test_weights_are_kept_at_the_steps_asked_for(tmp_path):
    config = replace(SHORT, keep_steps=(3, 12))
    model, _ = train(SHAPE, TEXT, config, tmp_path, progress=False)
    kept = sorted(p.name for p in tmp_path.glob("kept-*"))
    assert kept == ["kept-00000003", "kept-00000012"]
    last, meta = load_checkpoint(tmp_path / kept[1])
    assert weights(last) == weights(model)
    early, meta = load_checkpoint(tmp_path / kept[0])
    assert meta["step"] == 3
    assert weights(early) != weights(model)
    with pytest.raises(InputError, match="keep_steps lie between 1 and 12"):
        replace(SHORT, keep_steps=(13,))


def test_a_diverged_run_is_an_error_or_ends_at_its_last_finite_weights(tmp_path, monkeypatch):
    forward = GPT.forward
    calls = []

    def broken(self, tokens, targets=None, on_attention=None):
        logits, loss = forward(self, tokens, targets, on_attention)
        calls.append(1)
        if targets is not None and self.training and len(calls) > 30:
            loss = loss * math.inf
        return logits, loss

    monkeypatch.setattr(GPT, "forward", broken)
    with pytest.raises(InputError, match="not finite at step"):
        train(SHAPE, TEXT, replace(SHORT, steps=60, eval_every=6), tmp_path / "a", progress=False)
    calls.clear()
    stop = replace(SHORT, steps=60, eval_every=6, stop_if_diverged=True)
    model, meta = train(SHAPE, TEXT, stop, tmp_path / "b", progress=False)
    assert meta["diverged_at"] == meta["step"] < 60
    assert meta["history"]["step"][-1] < meta["diverged_at"]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    monkeypatch.undo()
    assert train(SHAPE, TEXT, SHORT, tmp_path / "c", progress=False)[1]["diverged_at"] is None
