"""Results files: whole, ours, with provenance, the same values out as in."""

import json

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from attnlib import InputError, load, save, values_digest
from attnlib.store import check_writable


def example():
    rng = np.random.default_rng(0)
    return xr.Dataset(
        {
            "power": (("layer", "scale"), rng.normal(size=(2, 3))),
            "wave": ("scale", rng.normal(size=3) + 1j * rng.normal(size=3)),
            "flag": ("layer", [True, False]),
            "name": ("layer", ["BASE", "π"]),
            "count": ("layer", [1, 2]),
            "missing": ("layer", [np.nan, 1.0]),
        },
        coords={"layer": [1, 2], "scale": [2.0, 4.0, np.inf], "period": ("scale", [1.0, 2.0, 3.0])},
        attrs={"note": "x"},
    )


def test_round_trip_with_complex_flags_text_and_infinity(tmp_path):
    path = save(
        example(), tmp_path / "deep" / "r.nc", parameters={"n": 3}, corpus_hash="abc", device="cpu"
    )
    back = load(path)
    xr.testing.assert_equal(back, example())
    assert back["flag"].dtype == bool
    assert np.iscomplexobj(back["wave"])
    assert [p.name for p in path.parent.iterdir()] == ["r.nc"]


def test_provenance(tmp_path):
    attrs = load(save(example(), tmp_path / "r.nc", parameters={"b": 1, "a": [2.0]})).attrs
    assert json.loads(attrs["parameters"]) == {"a": [2.0], "b": 1}
    versions = json.loads(attrs["versions"])
    assert {"torch", "numpy", "xarray"} <= set(versions)
    assert len(attrs["git_commit"].removesuffix("+changes")) in (40, len("unknown"))
    assert {"corpus_hash", "device", "values_sha256"} <= set(attrs)
    assert attrs["note"] == "x"


@given(st.integers(0, 5), st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_the_digest_sees_every_value(at, value):
    a = example()
    b = example()
    b["power"].values.flat[at] = value
    same = a["power"].values.flat[at] == value
    assert (values_digest(a) == values_digest(b)) == same


def test_the_digest_does_not_see_attributes_but_names_and_dimensions():
    a = example()
    assert values_digest(a) == values_digest(a.assign_attrs(git_commit="other"))
    assert values_digest(a) != values_digest(a.rename(power="energy"))
    assert values_digest(a) != values_digest(a.transpose())


def test_an_earlier_file_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = save(example(), tmp_path / "r.nc")
    monkeypatch.setattr("os.replace", _fail)
    with pytest.raises(InputError, match="cannot write"):
        save(example().drop_vars("power"), path)
    monkeypatch.undo()
    assert "power" in load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.nc"]


def _fail(*_):
    raise OSError("disk full")


def test_a_cut_file_is_refused(tmp_path):
    path = save(example(), tmp_path / "r.nc")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match="delete it and run again"):
        load(path)


def test_a_changed_value_is_refused(tmp_path):
    path = save(example(), tmp_path / "r.nc")
    content = path.read_bytes()
    needle = example()["power"].values.astype("<f8").tobytes()[:16]
    assert content.count(needle) == 1
    path.write_bytes(content.replace(needle, bytes(16)))
    with pytest.raises(InputError, match="damaged"):
        load(path)


def test_a_foreign_file_is_refused(tmp_path):
    example().drop_vars("wave").to_netcdf(tmp_path / "f.nc", engine="h5netcdf")
    with pytest.raises(InputError, match="not a results file"):
        load(tmp_path / "f.nc")


def test_what_netcdf_would_change_is_refused_before_it_replaces_anything(tmp_path):
    path = save(example(), tmp_path / "r.nc")
    days = xr.Dataset({"t": ("x", [1.0, 2.0], {"units": "days since 2000-01-01"})})
    for bad in (days, xr.Dataset({"t": ("x", np.array(["2000"], dtype="M8[ns]"))})):
        with pytest.raises(InputError):
            save(bad, path)
    assert "power" in load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.nc"]


def test_a_missing_file_names_the_notebook_to_run(tmp_path):
    with pytest.raises(InputError, match="run the notebook 05_scale_selective_pod first"):
        load(tmp_path / "05_scale_selective_pod.nc")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose another folder"):
        save(example(), tmp_path / "file" / "r.nc")


def test_where_no_results_file_can_be_written_is_told_before(tmp_path):
    folder = tmp_path / "folder.nc"
    folder.mkdir()
    with pytest.raises(InputError, match="is a folder"):
        check_writable(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write to"):
        check_writable(tmp_path / "file" / "plan.nc")
    assert check_writable(tmp_path / "new" / "plan.nc").parent.is_dir()
    assert not list((tmp_path / "new").iterdir())
