"""Damaged records: refused by a sentence, or decoded to other values; never anything else."""

import dataclasses
import math
import random

import pytest
import torch
import zstandard

from benchmarks import codec_fuzz
from comet_core.codecs import CODECS, get_codec
from comet_core.codecs.base import DamagedRecord, ErrorBound
from comet_core.codecs.kernels import chunks


def records(name):
    """A codec and records of it, that take each of its ways to store."""
    codec = codec_fuzz.random_codec(random.Random(1), name)
    rng = random.Random(name)
    bounds = (0.25, ErrorBound("pw_rel", 0.25))
    encoded = [
        codec.encode(codec_fuzz.random_input(rng, name), bounds[index // 2 % 2], sign_exact=bool(index % 2))
        for index in range(16)
    ]
    return codec, [record for record in encoded if record.parts and math.prod(record.shape)]


def with_part(encoded, index, part):
    return dataclasses.replace(encoded, parts=(*encoded.parts[:index], part, *encoded.parts[index + 1 :]))


@pytest.mark.parametrize("name", CODECS)
def test_a_part_that_is_shorter_longer_missing_or_of_another_kind_is_refused(name):
    codec, encoded = records(name)
    assert encoded
    for record in encoded:
        codec.decode(record)
        for index, part in enumerate(record.parts):
            if isinstance(part, bytes):
                others = [part[:-1], part + b"\0", b"", torch.zeros(len(part))]
            else:
                others = [part[:-1], torch.cat([part, part[:1]]), part[:0], part.bool(), part[None], b"\0"]
            for other in others:
                with pytest.raises(DamagedRecord, match="this record is damaged: "):
                    codec.decode(with_part(record, index, other))
        for parts in ((), record.parts * 2, (*record.parts, record.parts[-1])):
            with pytest.raises(DamagedRecord):
                codec.decode(dataclasses.replace(record, parts=parts))


@pytest.mark.parametrize("name", CODECS)
def test_a_shape_that_does_not_fit_is_refused_before_memory_is_taken(name):
    codec, encoded = records(name)
    for record in encoded:
        for shape in (
            (1 << 40,),
            (1, 1, 1 << 20, 1 << 20),
            (1 << 62, 1 << 62),
            (-1,),
            (math.prod(record.shape) + 1000,),
        ):
            stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            with pytest.raises(DamagedRecord):
                codec.decode(dataclasses.replace(record, shape=torch.Size(shape), stride=stride))
        for stride in ((), tuple(step * 2 for step in record.stride), tuple(-step for step in record.stride)):
            if len(record.shape) and max(record.shape) > 1:
                with pytest.raises(DamagedRecord, match="strides"):
                    codec.decode(dataclasses.replace(record, stride=stride))


@pytest.mark.parametrize("name", CODECS)
def test_whatever_is_damaged_decode_refuses_or_gives_the_records_shape(name):
    rng = random.Random(name)
    codec, encoded = records(name)
    outcomes = set()
    for _ in range(600):
        record = codec_fuzz.damaged_record(rng, rng.choice(encoded), rng.choice(encoded))
        outcomes.add(codec_fuzz.outcome_of(codec, record))
    assert outcomes == {"decoded", "refused"}


@pytest.mark.parametrize("damage", [
    {"num_bits": 3}, {"num_bits": 4}, {"num_bits": 8}, {"signed": True}, {"num_bits": 0},
    {"num_outliers": -1}, {"num_outliers": 1},
])  # fmt: skip
def test_numbers_of_a_group_quantized_record_that_do_not_fit_are_refused(damage):
    codec = get_codec("group_quantized")
    encoded = codec.encode(torch.rand(999))
    with pytest.raises(DamagedRecord):
        codec.decode(dataclasses.replace(encoded, meta=dataclasses.replace(encoded.meta, **damage)))


def test_an_outlier_beyond_the_values_is_refused():
    x = torch.rand(999)
    x[7] = math.nan
    for name in ("group_quantized", "cast"):
        codec = get_codec(name)
        encoded = codec.encode(x)
        assert len(encoded.parts[-1]) == 12
        for index in (-1, 999, 1 << 40):
            part = encoded.parts[-1].clone()
            part[:8] = torch.tensor([index]).view(torch.uint8)
            with pytest.raises(DamagedRecord, match="index of an outlier"):
                codec.decode(with_part(encoded, len(encoded.parts) - 1, part))


def test_a_frame_that_claims_or_holds_more_than_belongs_there_is_refused():
    raw = bytes(1 << 20)
    frame = chunks.compress(raw)
    assert chunks.decompress(frame, len(raw)).tobytes() == raw
    unknown_size = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    # A header that claims 2**50 bytes: magic, descriptor (8-byte size, single segment), size.
    claims_much = bytes.fromhex("28b52ffd e0") + (1 << 50).to_bytes(8, "little") + bytes(16)
    for data in (frame[:-1], frame + b"\0", frame + frame, unknown_size, claims_much, b"", bytes(9), frame[4:]):
        with pytest.raises(DamagedRecord):
            chunks.decompress(data, len(raw))
    for size_bytes in (len(raw) - 1, len(raw) + 1, 1 << 50):
        with pytest.raises(DamagedRecord):
            chunks.decompress(frame, size_bytes)
    with pytest.raises(DamagedRecord):
        chunks.decompress(claims_much, 1 << 50)
