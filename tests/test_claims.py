"""The ledger keeps claims, figures and verdicts together, and refuses empty ones."""

import pytest
import xarray as xr

from attnlib import CLAIMS, InputError, claim_results, claim_row, claim_table, ledger, save


def test_every_claim_has_its_text():
    both = [f"{part}{n}" for part, last in (("A", 12), ("B", 16)) for n in range(1, last + 1)]
    assert list(CLAIMS) == [*both, "X1", "X6"]
    assert all(claim and published for claim, published in CLAIMS.values())


def test_a_table_holds_what_it_was_given():
    rows = [claim_row("A5", "H* 90 [80, 100] | more", "partly"), claim_row("A1", "2.0", "partly")]
    lines = claim_table(rows).splitlines()
    assert lines[0] == "|  | claim | published | measured | verdict |"
    assert lines[2].startswith("| A5 | effective rank")
    assert "H* 90 [80, 100] \\| more | **partly** |" in lines[2]
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("A99", "1.0", "partly"), "no claim 'A99'"),
        (("A1", "1.0", "true"), "a verdict is one of"),
        (("A1", " ", "partly"), "are missing"),
        (("A1", "ratio nan [nan, nan]", "partly"), "are missing"),
        (("A1", "ratio 1.0 [nan, 2.0]", "partly"), "are missing"),
    ],
)
def test_a_row_without_figures_is_refused(arguments, match):
    with pytest.raises(InputError, match=match):
        claim_row(*arguments)


def test_the_ledger_gathers_results_in_its_own_order(tmp_path):
    parts = {
        "10_last": [claim_row("A12", "a", "partly"), claim_row("A2", "b", "reproduced")],
        "04_first": [claim_row("A2", "c", "not reproduced")],
    }
    for name, rows in parts.items():
        save(claim_results(rows), tmp_path / f"{name}.nc")
    save(xr.Dataset({"x": 1.0}), tmp_path / "05_without.nc")
    names = ("10_last", "05_without", "04_first")
    rows = ledger([tmp_path / f"{name}.nc" for name in names])
    assert [(r["claim"], r["notebook"], r["measured"]) for r in rows] == [
        ("A2", "04", "c"),
        ("A2", "10", "b"),
        ("A12", "10", "a"),
    ]
    assert claim_table(rows).splitlines()[0].endswith("| in |")


def test_a_missing_notebook_is_named(tmp_path):
    with pytest.raises(InputError, match="run the notebook 04_first first"):
        ledger([tmp_path / "04_first.nc"])
