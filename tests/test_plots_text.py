"""Attention drawn on text: every character in its cell, and nothing after the query coloured."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgba

from attnlib import InputError
from attnlib.plots import attention_on_text


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def parts(axis):
    """Characters by (column, row), picture and outlined cells of one window."""
    characters = {t.get_position(): t.get_text() for t in axis.texts}
    boxes = [(p.get_x() + 0.5, p.get_y() + 0.5) for p in axis.patches]
    return characters, axis.images[0].get_array(), boxes


def test_each_character_has_its_cell():
    values = np.linspace(-1, 1, 7)
    figure = attention_on_text(["ab\ncd e"], [values], [4], ["a window"], columns=4)
    characters, cells, boxes = parts(figure.axes[0])
    assert characters[(0, 0)] == "a"
    assert characters[(2, 0)] == "↵"
    assert characters[(0, 1)] == "d"
    assert boxes == [(0, 1)]
    assert cells.shape == (2, 4)
    np.testing.assert_allclose(cells[0], values[:4])
    assert cells[1, 0] == values[4]
    assert np.ma.masked_invalid(cells)[1, 1:].mask.all()  # after the query, and past the end
    after = [t.get_color() for t in figure.axes[0].texts if t.get_position() == (2, 1)]
    assert to_rgba(after[0]) != to_rgba("black")


def test_windows_share_one_scale_about_zero():
    figure = attention_on_text(
        ["abc", "abcdef"], [[0.1, 0, -0.1], [0, 0, 0, 0, 4, 9]], [2, 4], ["one", "two"]
    )
    limits = {axis.images[0].get_clim() for axis in figure.axes[:2]}
    ((low, high),) = limits
    assert low == -high
    assert high < 5  # what comes after the query does not count
    assert figure.axes[0].get_title(loc="left") == "one"


def test_long_tokens_take_a_cell_a_character():
    figure = attention_on_text([["the", " cat"]], [[0.5, -0.5]], [1], [""])
    _, cells, boxes = parts(figure.axes[0])
    np.testing.assert_allclose(cells[0, :7], [0.5] * 3 + [-0.5] * 4)
    assert len(boxes) == 4


def test_signs_that_mean_something_elsewhere_are_drawn_as_they_are(tmp_path):
    figure = attention_on_text(["$x_^\\{$"], [np.zeros(7)], [6], [""])
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize(
    ("texts", "values", "queries", "message"),
    [
        (["abc"], [[0, 0]], [1], "as many values"),
        (["abc"], [[0, 0, 0]], [3], "one of them, not 3"),
        (["abc"], [[0, 0, 0]], [-1], "one of them, not -1"),
        (["abc"], [[0, 0, 0]], [0, 1], "one text, one row"),
        ([], [], [], "one text, one row"),
    ],
)
def test_what_does_not_fit(texts, values, queries, message):
    with pytest.raises(InputError, match=message):
        attention_on_text(texts, values, queries, [""] * len(texts))
