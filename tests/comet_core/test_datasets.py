import gzip
import io
import os
import pickle
import random
import struct
import tarfile
import threading
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import make_cifar10_small
from comet_core.config import RunConfig
from comet_core.datasets import DatasetError, fashion_mnist, image_folder, image_sources, load_dataset
from comet_core.datasets.base import alone_in
from comet_core.datasets.batches import cropped_and_flipped
from comet_core.models import build_model


def picture(number: int, size=(8, 8), mode="RGB", kind="PNG") -> bytes:
    """An encoded image whose pixels come from its number."""
    values = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    values[..., 3] |= 1
    file = io.BytesIO()
    Image.fromarray(values, "RGBA").convert("RGB" if mode != "RGBA" else mode).convert(mode).save(file, kind)
    return file.getvalue()


def class_folders(prefix="", per_class=5, **options) -> dict[str, bytes]:
    return {
        f"{prefix}{name}/{number}.png": picture(100 * place + number, **options)
        for place, name in enumerate(("cat", "dog"))
        for number in range(per_class)
    }


def as_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def as_zip(path: Path, files: dict[str, bytes], **options) -> Path:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w", **options) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path.with_suffix(".zip")


def config(path: Path | str = "", **options) -> RunConfig:
    kind = {"dataset": "image_folder", "dataset_path": str(path)} if path else {}
    return RunConfig(**{"batch_size": 2, "augment": False, **kind, **options})


def load(path, **options):
    return load_dataset(config(path, **options))


def all_batches(dataset, epoch=1):
    return [*dataset.train_batches(epoch), *dataset.test_batches()]


def assert_equal_batches(one, other):
    assert len(one) == len(other)
    for (images, labels), (other_images, other_labels) in zip(one, other, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


def refused(path, **options) -> str:
    with pytest.raises(DatasetError) as caught:
        all_batches(load(path, **options))
    sentence = str(caught.value)
    del caught  # it holds this frame: open files would wait for the collector
    assert sentence.endswith(".") and "\n" not in sentence and "object at 0x" not in sentence
    return sentence


@pytest.fixture(params=[as_folder, as_zip])
def store(request, tmp_path):
    """Lays files down as a folder or as a zip; afterwards nothing stands beside them."""
    given = []

    def stored(files, **options):
        given.append(request.param(tmp_path / "set", files, **options))
        given.append(listing(tmp_path))
        return given[0]

    yield stored
    assert listing(tmp_path) == given[1], "something was written beside the data"


def listing(path: Path) -> list[tuple[str, int]]:
    return sorted((str(found), found.lstat().st_mtime_ns) for found in path.rglob("*"))


# --- what a run trains on ---------------------------------------------------------------------------------------------


def test_digits_are_split_by_the_seed_and_keep_every_image():
    dataset = load_dataset(config(batch_size=128))
    assert dataset.num_train + dataset.num_test == 1797
    assert (dataset.num_classes, dataset.num_channels, dataset.image_size) == (10, 1, 8)
    assert dataset.classes == [str(digit) for digit in range(10)]
    assert dataset.num_test == pytest.approx(0.2 * 1797, abs=10)
    assert_equal_batches(all_batches(dataset), all_batches(load_dataset(config(batch_size=128))))
    other = load_dataset(config(batch_size=128, seed=1))
    assert not torch.equal(next(dataset.test_batches())[0], next(other.test_batches())[0])


def test_values_are_normalised_a_channel_over_the_training_images(tmp_path):
    dataset = load(as_folder(tmp_path, class_folders(per_class=40)), batch_size=64)
    images = torch.cat([images for images, _ in dataset.train_batches(1)])
    assert images.dtype == torch.float32
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_one_colour_everywhere_does_not_divide_by_zero(tmp_path):
    black = io.BytesIO()
    Image.new("RGB", (8, 8)).save(black, "PNG")
    images, _ = next(load(as_folder(tmp_path, dict.fromkeys(class_folders(), black.getvalue()))).train_batches(1))
    assert torch.equal(images, torch.zeros_like(images))


def test_an_epoch_gives_every_image_once_and_keeps_a_smaller_last_batch(tmp_path):
    dataset = load(as_folder(tmp_path, class_folders("train/") | class_folders("test/")), batch_size=4)
    batches = list(dataset.train_batches(1))
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert dataset.steps_per_epoch == 3
    assert [len(labels) for _, labels in dataset.test_batches()] == [4, 4, 2], "no more at once than in training"
    assert len(torch.cat([images for images, _ in batches]).flatten(1).unique(dim=0)) == 10
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [5, 5]


def test_an_epoch_can_end_early(tmp_path):
    dataset = load(as_folder(tmp_path, class_folders()), max_steps_per_epoch=3)
    assert dataset.steps_per_epoch == len(list(dataset.train_batches(1))) == 3


def test_twins_see_equal_batches_whatever_their_policy_draws_and_epochs_differ(tmp_path):
    path = as_folder(tmp_path, class_folders(per_class=10))
    torch.manual_seed(1)
    compressed = load(path, augment=True, policy="compress")
    one = [(torch.rand(3), batch)[1] for batch in compressed.train_batches(2)]
    torch.manual_seed(2)
    baseline = load(path, augment=True, policy="baseline")
    assert_equal_batches(one, list(baseline.train_batches(2)))
    assert not torch.equal(next(baseline.train_batches(1))[0], next(baseline.train_batches(2))[0])


@pytest.mark.parametrize("streamed", [False, True])
def test_loading_and_reading_leave_the_global_generators_alone(tmp_path, monkeypatch, streamed):
    monkeypatch.setattr(image_folder, "LARGEST_IN_MEMORY_BYTES", 0 if streamed else 2**30)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    all_batches(load(as_folder(tmp_path, class_folders()), augment=True))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("size", [1, 8, 33])
def test_an_augmented_image_is_its_original_shifted_and_perhaps_mirrored(size):
    images = torch.randint(1, 256, (200, 3, size, size), generator=torch.Generator().manual_seed(0)).byte()
    margin = max(1, size // 8)
    outputs = cropped_and_flipped(images, torch.Generator().manual_seed(1))
    seen = set()
    for image, output in zip(images, outputs, strict=True):
        padded = torch.nn.functional.pad(image, (margin,) * 4)
        origins = [
            (top, left, flipped)
            for top in range(2 * margin + 1)
            for left in range(2 * margin + 1)
            for flipped in (False, True)
            if torch.equal(output.flip(2) if flipped else output, padded[:, top : top + size, left : left + size])
        ]
        assert origins
        seen.add(origins[0])
    if size == 8:
        assert len(seen) == 3 * 3 * 2, "every shift, mirrored or not, occurs"


# --- folders and zips -------------------------------------------------------------------------------------------------


def test_train_and_test_folders_are_taken_as_they_are(store):
    files = class_folders("train/") | class_folders("test/", per_class=2)
    dataset = load(store(files))
    assert (dataset.num_train, dataset.num_test, dataset.classes) == (10, 4, ["cat", "dog"])
    assert (dataset.num_channels, dataset.image_size) == (3, 8)


def test_the_pixels_and_labels_are_those_of_the_files(store):
    files = class_folders("train/") | class_folders("test/", per_class=2)
    dataset = load(store(files), batch_size=10)
    [(images, labels)] = dataset.test_batches()
    assert labels.tolist() == [0, 0, 1, 1]
    expected = torch.from_numpy(
        np.stack(
            [
                np.asarray(Image.open(io.BytesIO(files[f"test/{name}"])))
                for name in ("cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png")
            ]
        )
    ).permute(0, 3, 1, 2)
    raw = images * dataset._std + dataset._mean
    torch.testing.assert_close(raw, expected.float(), atol=1e-3, rtol=0)


def test_class_folders_alone_are_split_a_class_by_the_seed(store):
    path = store(class_folders(per_class=10))
    dataset = load(path, test_fraction=0.3)
    assert (dataset.num_train, dataset.num_test) == (14, 6)
    assert torch.cat([labels for _, labels in dataset.test_batches()]).bincount().tolist() == [3, 3]
    assert_equal_batches(all_batches(dataset), all_batches(load(path, test_fraction=0.3)))
    other = load(path, test_fraction=0.3, seed=1)
    assert not torch.equal(next(dataset.test_batches())[0], next(other.test_batches())[0])


def test_train_alone_is_split_by_the_seed(store):
    dataset = load(store(class_folders("train/")))
    assert (dataset.num_train, dataset.num_test, dataset.classes) == (8, 2, ["cat", "dog"])


@pytest.mark.parametrize("around", ["photos/", "a/b/", "photos/train/"])
def test_one_folder_around_everything_is_looked_through(store, around):
    dataset = load(store(class_folders(around) | {"photos/readme.txt": b"hello", f"{around}preview.png": picture(1)}))
    assert (dataset.num_train + dataset.num_test, dataset.classes) == (10, ["cat", "dog"])


def test_hidden_files_what_a_mac_adds_and_other_files_are_left_out(store):
    extra = {
        "__MACOSX/cat/._0.png": b"junk", ".git/x.png": b"junk", "cat/.0.png": b"junk", "cat/Thumbs.db": b"junk",
        "cat/notes.txt": b"junk", ".DS_Store": b"junk",
    }  # fmt: skip
    dataset = load(store(class_folders() | extra))
    assert (dataset.num_train + dataset.num_test, dataset.classes) == (10, ["cat", "dog"])


def test_a_large_file_that_is_no_image_does_not_matter(store, monkeypatch):
    monkeypatch.setattr(image_sources, "LARGEST_FILE_BYTES", 1000)
    assert load(store(class_folders() | {"cat/film.mp4": bytes(5000)})).num_classes == 2


@pytest.mark.parametrize("mode, channels", [("L", 1), ("1", 1), ("LA", 1), ("RGB", 3), ("RGBA", 3), ("P", 3)])
def test_grey_images_have_one_channel_and_all_others_three(store, mode, channels):
    assert load(store(class_folders(mode=mode))).num_channels == channels


def test_a_set_is_in_colour_if_some_of_its_images_are(store):
    dataset = load(store(class_folders(mode="L") | class_folders("", per_class=2)))
    assert dataset.num_channels == 3


def test_a_palette_with_transparency_is_read_without_a_warning(store):
    file = io.BytesIO()
    Image.new("P", (8, 8), 1).save(file, "PNG", transparency=bytes([0, 128, 255]))
    assert load(store({name: file.getvalue() for name in class_folders()})).num_channels == 3


def test_sixteen_bits_are_scaled_to_eight_not_clipped(store):
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8), 0x4000, dtype=np.uint16)).save(file, "PNG")
    dataset = load(store({name: file.getvalue() for name in class_folders()}))
    assert dataset.num_channels == 1
    assert dataset._mean.item() == 0x40


@pytest.mark.parametrize("kind, suffix", [("JPEG", "JPG"), ("BMP", "bmp"), ("GIF", "gif"), ("TIFF", "tif")])
def test_other_formats_are_read_too(store, kind, suffix):
    files = {name.replace("png", suffix): data for name, data in class_folders(kind=kind).items()}
    assert load(store(files)).num_classes == 2


def test_images_of_other_sizes_are_scaled_to_the_first_ones_smaller_side(store):
    files = class_folders(size=(12, 9)) | {"dog/wide.png": picture(1, size=(40, 10)), "dog/dot.png": picture(1, (1, 1))}
    dataset = load(store(files))
    assert dataset.image_size == 9
    assert load(dataset._config.dataset_path, image_size=16).image_size == 16


def test_names_with_any_letters_lines_and_lengths_are_read(store):
    files = {
        f"{folder}/{name}{number}.png": picture(number)
        for folder in ("кот 猫", "two\nlines")
        for name in ("ü ñ", "new\nline", "x" * 200)
        for number in range(2)
    }
    dataset = load(store(files))
    assert dataset.num_train + dataset.num_test == 12
    assert dataset.classes == ["two\nlines", "кот 猫"]


def test_a_zip_packed_on_windows_is_read(tmp_path):
    data = as_zip(tmp_path / "set", {name.replace("/", "|"): file for name, file in class_folders().items()})
    data.write_bytes(data.read_bytes().replace(b"cat|", b"cat\\").replace(b"dog|", b"dog\\"))
    assert load(data).classes == ["cat", "dog"]


def test_a_link_within_the_folder_is_followed(tmp_path):
    as_folder(tmp_path, class_folders())
    (tmp_path / "cat/again.png").symlink_to(tmp_path / "cat/0.png")
    dataset = load(tmp_path)
    assert dataset.num_train + dataset.num_test == 11


# --- sets that do not fit into memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_larger_set_is_streamed_in_the_same_batches(store, monkeypatch, threads):
    path = store(class_folders("train/", per_class=9, size=(10, 9)) | class_folders("test/"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        in_memory = all_batches(load(path, augment=True, batch_size=4), epoch=3)
        monkeypatch.setattr(image_folder, "LARGEST_IN_MEMORY_BYTES", 1000)
        dataset = load(path, augment=True, batch_size=4)
        assert not isinstance(dataset._train_images, torch.Tensor)
        assert (dataset.num_train, dataset.num_test, dataset.num_channels, dataset.image_size) == (18, 10, 3, 9)
        assert_equal_batches(in_memory, all_batches(dataset, epoch=3))
    finally:
        torch.set_num_threads(before)


def test_a_damaged_image_in_a_streamed_set_is_named_by_a_sentence(store, monkeypatch):
    monkeypatch.setattr(image_folder, "LARGEST_IN_MEMORY_BYTES", 0)
    damaged = picture(1, size=(64, 64))[:-2000]
    sentence = refused(store(class_folders("train/") | class_folders("test/") | {"test/dog/bad.png": damaged}))
    assert "'test/dog/bad.png'" in sentence and "no readable image" in sentence


# --- wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nowhere.zip", "no\0where.zip", "x" * 300 + ".zip", "pipe"])
def test_a_path_that_is_no_file_or_folder_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    assert "which does not exist as a file or folder; give a folder or a .zip" in refused(tmp_path / name)


def test_a_zip_with_names_in_no_encoding_is_refused(tmp_path):
    path = as_zip(tmp_path / "set", class_folders() | {"cat/ü.png": picture(1)})
    path.write_bytes(path.read_bytes().replace("ü".encode(), b"\xff\xff"))
    assert "set.zip is no .zip file" in refused(path)


@pytest.mark.parametrize("data", [b"", b"hello", b"PK\x03\x04" + bytes(50)])
def test_a_file_that_is_no_zip_is_refused(tmp_path, data):
    (tmp_path / "set.zip").write_bytes(data)
    assert "set.zip is no .zip file" in refused(tmp_path / "set.zip")


def test_a_zip_that_was_cut_off_is_refused(tmp_path):
    path = as_zip(tmp_path / "set", class_folders())
    path.write_bytes(path.read_bytes()[:-60])
    assert "set.zip is no .zip file" in refused(path)


@pytest.mark.parametrize(
    "files",
    [{}, {"1.png": picture(1), "2.png": picture(2)}, {"cat/notes.txt": b"x"}, {"__MACOSX/cat/1.png": b"x"}],
    ids=["empty", "images at the top", "no images", "only hidden"],
)
def test_data_without_classes_are_refused(store, tmp_path, files):
    (tmp_path / "set").mkdir()
    assert "has no images in <class>/. Expected is a folder of images per class" in refused(store(files))


def test_images_beside_the_class_folders_of_train_are_no_class(store):
    path = store({"train/1.png": picture(1), "test/1.png": picture(1)})
    assert "has no images in train/<class>/" in refused(path)


@pytest.mark.parametrize("around", ["", "train/", "photos/"])
@pytest.mark.parametrize("folder", ["cow/", "cow/empty/"])
def test_a_class_without_images_is_refused_by_name(tmp_path, around, folder):
    path = as_folder(tmp_path / "set", class_folders(around))
    (path / around / folder).mkdir(parents=True)
    expected = f"has no images in {'' if around == 'photos/' else around}cow/; add some, or remove the folder."
    assert expected in refused(path)
    packed = as_zip(tmp_path / "set", class_folders(around) | {f"{around}cow/": b""})
    assert expected in refused(packed)


def test_a_test_part_without_images_is_refused(tmp_path):
    path = as_folder(tmp_path / "set", class_folders("train/"))
    (path / "test").mkdir()
    assert "has no images in test/; add some" in refused(path)


@pytest.mark.parametrize("parts", [("training/", "validation/"), ("Train/", "Test/")])
def test_parts_by_other_names_are_no_classes(store, parts):
    sentence = refused(store(class_folders(parts[0]) | class_folders(parts[1])))
    assert "lies in a folder inside a class. Expected is " in sentence


def test_one_class_is_refused_by_name(store):
    path = store({"cat/1.png": picture(1), "cat/2.png": picture(2)})
    assert "has one class, 'cat'; training needs two or more." in refused(path)


def test_a_test_part_alone_is_refused(store):
    assert "has no images in train/<class>/" in refused(store(class_folders("test/")))


def test_a_class_of_the_test_part_alone_is_refused(store):
    path = store(class_folders("train/") | {"test/cow/1.png": picture(1)})
    assert "has test/cow/ but no train/cow/" in refused(path)


def test_a_third_folder_beside_train_and_test_is_refused(store):
    path = store(class_folders("train/") | class_folders("val/"))
    assert "has a folder 'val' beside train/ and test/" in refused(path)


def test_a_class_with_one_image_cannot_be_split(store):
    assert "class 'cow' has 1 image, but needs one to train on and one to test on" in refused(
        store(class_folders() | {"cow/1.png": picture(1)})
    )


def test_a_batch_larger_than_the_data_is_refused(store):
    assert refused(store(class_folders("train/") | class_folders("test/")), batch_size=11) == (
        "batch_size is 11, but there are 10 training images; choose a smaller batch."
    )


def test_images_smaller_than_the_network_allows_are_refused(tmp_path):
    dataset = load(as_folder(tmp_path, class_folders()))
    with pytest.raises(ValueError, match=r"alexnet needs images of 64 pixels or more, these have 8; set image_size=64"):
        build_model("alexnet", dataset.num_classes, dataset.num_channels, dataset.image_size)


def test_images_too_large_to_train_on_need_an_image_size(store):
    path = store(class_folders(size=(600, 520), per_class=2))
    assert "'cat/0.png' in set" in refused(path).replace(".zip", "")
    assert load(path, image_size=32).image_size == 32


DAMAGED = {
    "cut off": picture(1, size=(64, 64))[:-3000],
    "cut off jpeg": picture(1, size=(64, 64), kind="JPEG")[:-500],
    "a few bytes": b"\x89PNG\r\n\x1a\n",
    "a text": b"this is a text\n",
    "empty": b"",
    "another chunk": picture(1, size=(64, 64)).replace(b"IDAT", b"IDOT", 1),
    "bad numbers": picture(1)[:40] + bytes(20) + picture(1)[60:],
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("name", ["cat/0.png", "dog/wrong.jpg"])
def test_a_damaged_image_is_named(store, data, name):
    sentence = refused(store(class_folders() | {name: data}))
    assert f"'{name}' in set" in sentence
    assert "is no readable image (" in sentence and sentence.endswith("replace or remove it.")


def test_noise_over_an_image_gives_the_image_or_a_sentence(tmp_path):
    chosen = random.Random(0)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP"):
        for number in range(15):
            data = bytearray(picture(number, kind=kind))
            for _ in range(8):
                data[chosen.randrange(len(data))] = chosen.randrange(256)
            path = as_zip(tmp_path / "set", class_folders(per_class=2) | {"dog/9.png": bytes(data)})
            try:
                load(path, image_size=8)
            except DatasetError as error:
                assert "'dog/9.png' in set.zip" in str(error)


def test_noise_over_a_zip_gives_the_set_or_a_sentence(tmp_path):
    chosen = random.Random(0)
    whole = as_zip(tmp_path / "set", class_folders(per_class=2), compression=zipfile.ZIP_DEFLATED).read_bytes()
    for start in (0, whole.index(b"PK\x01\x02"), whole.index(b"PK\x05\x06")):
        for _ in range(100):
            data = bytearray(whole)
            for _ in range(3):
                data[chosen.randrange(start, len(data))] = chosen.randrange(256)
            (tmp_path / "set.zip").write_bytes(data)
            try:
                load(tmp_path / "set.zip")
            except DatasetError as error:
                assert "set.zip" in str(error) or "class" in str(error)


def test_a_damaged_member_of_a_zip_is_named(tmp_path):
    path = as_zip(tmp_path / "set", class_folders())
    data = path.read_bytes()
    path.write_bytes(data.replace(class_folders()["dog/3.png"], bytes(len(class_folders()["dog/3.png"]))))
    assert "'dog/3.png' in set.zip is no readable image (Bad CRC-32" in refused(path)


@pytest.mark.parametrize(
    "name", ["../s/a.png", "cat/../../a.png", "/s/a.png", "C:\\s\\a.png", "..\\a.png", "\\\\h\\s\\a"]
)
def test_an_entry_that_leaves_its_folder_is_refused_by_name(tmp_path, name):
    path = as_zip(tmp_path / "set", class_folders() | {name: picture(1)})
    before = listing(tmp_path.parent)
    assert f"set.zip has an entry {name!r} that leaves its folder" in refused(path)
    assert listing(tmp_path.parent) == before


def test_a_link_in_a_zip_is_not_followed(tmp_path):
    link = zipfile.ZipInfo("cat/link.png")
    link.external_attr = 0o120777 << 16
    path = as_zip(tmp_path / "set", class_folders() | {link: str(tmp_path / "set.zip")})
    assert "'cat/link.png' in set.zip is no readable image" in refused(path)


def test_an_encrypted_entry_is_refused_by_name(tmp_path):
    path = as_zip(tmp_path / "set", class_folders())
    change_directory(path, "cat/2.png", 8, b"\x01\x00")
    assert "'cat/2.png' in set.zip is encrypted" in refused(path)


def test_a_packing_that_cannot_be_bounded_is_refused_by_name(tmp_path):
    path = as_zip(tmp_path / "set", class_folders(), compression=zipfile.ZIP_BZIP2)
    assert "'cat/0.png' in set.zip is neither stored nor deflated" in refused(path)


def change_directory(path: Path, name: str, offset: int, value: bytes) -> None:
    """Change a field of one entry in a zip's directory; the fields' offsets are those of APPNOTE 4.3.12."""
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    while data[start + 46 : start + 46 + len(name)] != name.encode():
        start = data.index(b"PK\x01\x02", start + 4)
    data[start + offset : start + offset + len(value)] = value
    path.write_bytes(data)


def test_a_zip_bomb_that_declares_its_size_is_refused_unread(tmp_path):
    bomb = {"cat/bomb.png": bytes(image_sources.LARGEST_FILE_BYTES + 1)}
    path = as_zip(tmp_path / "set", class_folders() | bomb, compression=zipfile.ZIP_DEFLATED)
    assert "'cat/bomb.png' in set.zip has 67,108,865 bytes; allowed for one image: 67,108,864." in refused(path)


def test_a_zip_bomb_that_hides_its_size_is_not_unpacked(tmp_path):
    bomb = {"cat/bomb.png": bytes(50 * 2**20)}
    path = as_zip(tmp_path / "set", class_folders() | bomb, compression=zipfile.ZIP_DEFLATED)
    change_directory(path, "cat/bomb.png", 24, struct.pack("<I", 1000))
    tracemalloc.start()
    try:
        assert "'cat/bomb.png' in set.zip is no readable image (Bad CRC-32" in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [(9000, 8000), (10_000, 9500), (20_000, 20_000)])
def test_an_image_of_too_many_pixels_is_refused_undecoded(store, size):
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    header = struct.pack(">II", *size) + file.getvalue()[24:29]
    crc = struct.pack(">I", zlib.crc32(b"IHDR" + header))
    data = file.getvalue()[:16] + header + crc + file.getvalue()[33:]
    sentence = refused(store(class_folders() | {"dog/huge.png": data}), image_size=8)
    assert "'dog/huge.png' in set" in sentence and "pixels" in sentence


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "secret.png").write_bytes(picture(1))
    path = as_folder(tmp_path / "set", class_folders())
    (path / "cat/link.png").symlink_to(tmp_path / "secret.png")
    assert "link.png is a link that leaves" in refused(path)


@pytest.mark.parametrize("target", [".", "..", "/"])
def test_a_link_to_a_folder_is_refused_not_walked(tmp_path, target):
    path = as_folder(tmp_path / "set", class_folders())
    (path / "cow").symlink_to(target)
    assert "cow is a link to a folder; copy the images" in refused(path)


@pytest.mark.parametrize("target", ["link.png", "nowhere.png"])
def test_a_link_that_leads_nowhere_is_refused(tmp_path, target):
    path = as_folder(tmp_path, class_folders())
    (path / "cat/link.png").symlink_to(path / "cat" / target)
    assert "link.png cannot be read" in refused(path)


def test_a_pipe_named_like_an_image_is_refused_not_waited_for(tmp_path):
    path = as_folder(tmp_path, class_folders())
    os.mkfifo(path / "cat/pipe.png")
    assert "pipe.png is no regular file" in refused(path)


def test_a_file_too_large_for_an_image_is_refused_unread(tmp_path):
    path = as_folder(tmp_path, class_folders())
    with (path / "cat/large.png").open("wb") as file:
        file.truncate(image_sources.LARGEST_FILE_BYTES + 1)
    assert "large.png has 67,108,865 bytes" in refused(path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = as_folder(tmp_path, class_folders())
    whole = Path.read_bytes

    def guarded(self):  # root, which tests may run as, is denied nothing by a mode
        if self.name == "3.png":
            raise PermissionError(13, "Permission denied", str(self))
        return whole(self)

    monkeypatch.setattr(Path, "read_bytes", guarded)
    sentence = refused(path)
    assert "'cat/3.png' in" in sentence and "Permission denied" in sentence


# --- sets with files of their own -------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(length.to_bytes(4, "big") for length in values.shape)
    return gzip.compress(header + values.tobytes(), 1)


@pytest.fixture
def small_idx(tmp_path, monkeypatch):
    chosen = np.random.default_rng(0)
    for part, count in (("train", 20), ("t10k", 10)):
        images = chosen.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(count, dtype=np.uint8) % 10))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path)
    return tmp_path


def fashion(**options):
    return load_dataset(config(dataset="fashion_mnist", **options))


def test_fashion_mnist_as_debian_packs_it():
    if not fashion_mnist.DEBIAN_FOLDER.is_dir():
        pytest.skip("missing tool: fashion-mnist (on Debian: apt-get install dataset-fashion-mnist)")
    dataset = fashion()
    assert (dataset.num_train, dataset.num_test, dataset.num_classes) == (60_000, 10_000, 10)
    assert (dataset.num_channels, dataset.image_size) == (1, 28)


def test_fashion_mnist_reads_idx_files(small_idx):
    dataset = fashion(image_size=32)
    assert (dataset.num_train, dataset.num_test, dataset.image_size) == (20, 10, 32)
    assert torch.cat([labels for _, labels in dataset.test_batches()]).tolist() == list(range(10))


IDX_DAMAGE = {
    "missing": None, "empty": b"", "no gzip": b"hello", "cut off": idx(np.zeros((20, 28, 28), np.uint8))[:-20],
    "damaged": idx(np.arange(20, dtype=np.uint8))[:12] + b"\xff" * 30, "short": gzip.compress(bytes([0, 0, 8, 3])),
    "fewer values": gzip.compress(gzip.decompress(idx(np.zeros((20, 28, 28), np.uint8)))[:-1]),
}  # fmt: skip


@pytest.mark.parametrize("data", IDX_DAMAGE.values(), ids=IDX_DAMAGE.keys())
def test_a_damaged_idx_file_is_named(small_idx, data):
    path = small_idx / "train-images-idx3-ubyte.gz"
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"train-images-idx3-ubyte.gz is missing or no gzipped IDX file"):
        fashion()


@pytest.mark.parametrize("labels", [np.zeros(19, np.uint8), np.full(20, 10, np.uint8), np.zeros((20, 1), np.uint8)])
def test_idx_labels_that_do_not_fit_the_images_are_refused(small_idx, labels):
    (small_idx / "train-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    with pytest.raises(DatasetError, match="do not belong together"):
        fashion()


CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar_batches(folder: Path, per_batch: int) -> Path:
    """The official layout with fewer images; the red channel tells the label."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = np.random.default_rng(len(list(folder.iterdir()))).integers(0, 256, (per_batch, 3, 32, 32), np.uint8)
        labels = [place % 10 for place in range(per_batch)]
        data[:, 0] = np.array(labels, np.uint8)[:, None, None] * 20
        content = {"data": data.reshape(per_batch, 3072), "labels": labels}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": CIFAR_CLASSES}, protocol=2))
    return folder


def test_cifar10_is_read_where_it_was_unpacked(comet_home, monkeypatch):
    from torchvision.datasets import CIFAR10

    cifar_batches(comet_home / "datasets", per_batch=20)
    for name in ("train_list", "test_list"):  # the official check sums are those of the whole set
        monkeypatch.setattr(CIFAR10, name, [[file, None] for file, _ in getattr(CIFAR10, name)])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})
    dataset = load_dataset(config(dataset="cifar10", batch_size=20))
    assert (dataset.num_train, dataset.num_test, dataset.num_channels, dataset.image_size) == (100, 20, 3, 32)
    assert dataset.classes == CIFAR_CLASSES
    [(images, labels)] = dataset.test_batches()
    raw = images * dataset._std + dataset._mean
    torch.testing.assert_close(raw[:, 0, 0, 0], labels.float() * 20, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_a_download_that_fails_says_what_to_do_and_leaves_nothing(comet_home, monkeypatch, tmp_path, name):
    def no_network(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("socket.create_connection", no_network)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "absent")
    with pytest.raises(
        DatasetError, match=rf"{name} is not .* could not be downloaded \(.*no network.*check the network"
    ):
        load_dataset(config(dataset=name))
    assert not [found for found in comet_home.rglob("*") if found.is_file()]


def test_a_second_process_waits_while_one_downloads(tmp_path):
    order = []

    def second():
        with alone_in(tmp_path / "new"):
            order.append("second")

    with alone_in(tmp_path / "new"):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


# --- benchmarks/make_cifar10_small.py ---------------------------------------------------------------------------------


def test_the_small_cifar10_has_the_files_of_the_readmes_set_and_is_made_alike_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(make_cifar10_small, "CHOSEN", {"test": 2, "train": 4})
    folder = cifar_batches(tmp_path, per_batch=40)
    for name in ("one.zip", "two.zip"):
        make_cifar10_small.main([str(folder), "--output", str(tmp_path / name)])
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        names = archive.namelist()
        assert names == sorted(names) and len(names) == 10 * (2 + 4)
        with Image.open(archive.open(names[-1])) as image:
            assert image.size == (32, 32) and image.format == "JPEG"
    dataset = load(tmp_path / "one.zip", batch_size=20)
    assert (dataset.num_train, dataset.num_test, dataset.classes) == (40, 20, CIFAR_CLASSES)
    [(images, labels)] = dataset.test_batches()
    red = (images * dataset._std + dataset._mean)[:, 0].mean((1, 2))
    assert (red - labels * 20).abs().max() < 25, "an image lies in the folder of its class"


def test_the_choice_of_images_is_that_of_the_readmes_set():
    chosen = make_cifar10_small.chosen_numbers({"test": 1000, "train": 5000})
    assert chosen["test", "airplane"][:5] == [2, 3, 6, 10, 11]
    assert chosen["train", "truck"][-5:] == [4988, 4990, 4991, 4993, 4999]
    assert {part: len(numbers) for (part, _), numbers in chosen.items()} == {"test": 400, "train": 2000}


@pytest.mark.parametrize("content", [None, {}, {"data_batch_1": b"junk"}])
def test_a_folder_without_the_official_files_is_refused_and_no_zip_is_left(tmp_path, capsys, content):
    if content is not None:
        as_folder(tmp_path / "batches", {"keep": b"", **content})
    with pytest.raises(SystemExit) as stopped:
        make_cifar10_small.main([str(tmp_path / "batches"), "--output", str(tmp_path / "small.zip")])
    assert stopped.value.code != 0
    assert not list(tmp_path.glob("*.zip*"))


def test_the_official_archive_is_read_without_unpacking_it(tmp_path, monkeypatch):
    monkeypatch.setattr(make_cifar10_small, "CHOSEN", {"test": 2, "train": 4})
    folder = cifar_batches(tmp_path / "in", per_batch=40)
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    make_cifar10_small.main([str(folder), "--output", str(tmp_path / "one.zip")])
    make_cifar10_small.main([str(tmp_path / "cifar-10-python.tar.gz"), "--output", str(tmp_path / "two.zip")])
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
