"""Uploaded images: kept whole under a safe name or not at all, and checked before a run is made of them."""

import io
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from comet_core.config import RunConfig
from storage import runs


def images(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return data.getvalue()


def test_an_upload_is_kept_under_a_name_of_its_content(comet_home):
    data = images("train/cat/1.png")
    path = runs.save_upload(data, "../../My  cats & dogs.zip")
    assert path == runs.save_upload(io.BytesIO(data), "../../My  cats & dogs.zip")
    assert path.startswith(str(comet_home / "uploads" / "My-cats-dogs-")) and Path(path).read_bytes() == data
    assert runs.save_upload(images("train/dog/1.png"), "../../My  cats & dogs.zip") != path
    assert len(list(runs.uploads_dir().iterdir())) == 2


def test_what_is_no_zip_is_refused_and_leaves_nothing():
    with pytest.raises(ValueError, match=r"'cats.zip' is no zip file; upload a .zip with train"):
        runs.save_upload(b"PK\x03\x04 not really", "cats.zip")
    assert list(runs.uploads_dir().iterdir()) == []


def test_a_good_data_set_is_described():
    answer = runs.check_dataset(RunConfig(seed=1))
    assert (answer["num_train"] + answer["num_test"], answer["num_classes"]) == (1797, 10)


def test_a_refused_upload_says_why_and_goes_unless_a_run_uses_it():
    path = runs.save_upload(images("cats/1.png"), "cats.zip")
    config = RunConfig(dataset="image_folder", dataset_path=path)
    run_id = runs.create_run(config)
    with pytest.raises(ValueError, match="cats"):
        runs.check_dataset(config)
    assert Path(path).exists()
    runs.delete_run(run_id)
    with pytest.raises(ValueError, match="cats"):
        runs.check_dataset(config)
    assert list(runs.uploads_dir().iterdir()) == []


def test_a_check_that_breaks_is_not_the_data_sets_fault(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="The check of the data set broke"):
        runs.check_dataset(RunConfig())
