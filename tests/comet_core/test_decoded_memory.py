"""Memory for decoded tensors: used again once nobody holds it, never before, and given back."""

import threading

import pytest
import torch
from torch import nn

import comet_core
from comet_core.codecs import CODECS, get_codec
from comet_core.decoded_memory import DecodedMemory

POOLING = {
    "kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "input_size": (64, 64),
}  # fmt: skip
LOSSLESS = get_codec("lossless")


def field(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_block_serves_the_next_tensor_once_the_last_view_of_the_first_is_gone():
    memory, x = DecodedMemory(), field(8, 64, 32, 32)
    encoded = LOSSLESS.encode(x)
    first = LOSSLESS.decode(encoded, out=memory.take(encoded))
    place, view = first.data_ptr(), first[3, 2:5]
    del first
    second = LOSSLESS.decode(encoded, out=memory.take(encoded))
    assert second.data_ptr() != place and torch.equal(view, x[3, 2:5])
    del view
    third = LOSSLESS.decode(encoded, out=memory.take(encoded))
    assert third.data_ptr() == place and torch.equal(third, x) and torch.equal(second, x)
    assert memory.nbytes == 2 * x.nbytes


def test_a_smaller_tensor_takes_part_of_a_block_and_a_larger_one_replaces_it():
    memory = DecodedMemory()
    for values, expected in ((1 << 20, 4), (1 << 19, 4), (1 << 21, 8), (1 << 20, 8)):
        encoded = LOSSLESS.encode(torch.ones(values))
        assert LOSSLESS.decode(encoded, out=memory.take(encoded)).sum() == values
        assert memory.nbytes == expected << 20
    memory.give_back()
    assert memory.nbytes == 0


def test_small_tensors_take_new_memory():
    memory = DecodedMemory()
    assert memory.take(LOSSLESS.encode(torch.ones(1000))) is None
    assert memory.take(LOSSLESS.encode(torch.ones(0))) is None
    assert memory.nbytes == 0


@pytest.mark.parametrize("name", [*CODECS, "sign_mask", "window_index"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_codec_decodes_into_given_memory_what_it_decodes_into_new(name, memory_format):
    codec, memory = get_codec(name, **(POOLING if name == "window_index" else {})), DecodedMemory()
    x = field(8, 32, 64, 64)
    if name == "window_index":
        x = nn.functional.max_pool2d(x, 2, return_indices=True)[1]
    encoded = codec.encode(x.to(memory_format=memory_format), 0.1)
    new = codec.decode(encoded)
    block = memory.take(encoded)
    given = codec.decode(encoded, out=block)
    assert given.data_ptr() == block.data_ptr()
    assert torch.equal(given, new) and given.stride() == new.stride() and given.dtype == new.dtype


def test_tensors_taken_by_several_threads_do_not_share_memory():
    memory, encoded = DecodedMemory(), LOSSLESS.encode(torch.ones(1 << 19))
    wrong = []

    def work(value):
        for _ in range(200):
            tensor = memory.take(encoded)
            tensor.fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(float(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and memory.nbytes <= 2 * 4 * 2**21  # each holds its last one while it takes the next


def test_backward_takes_one_block_and_the_step_gives_it_back():
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    with comet_core.attach(model, None, tune_allocator=False) as session:
        memory = session._ledger.memory
        loss = model(field(16, 8, 64, 64)).square().mean()
        assert memory.nbytes == 0
        loss.backward()
        assert memory.nbytes == 16 * 8 * 64 * 64 * 4
        session.step()
        assert memory.nbytes == 0
