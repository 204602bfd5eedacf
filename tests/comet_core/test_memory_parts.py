"""The parts of the peak: each is there at the moment they are given for, and together they are the peak."""

import gc
import weakref

import pytest
import torch
from torch import nn

import comet_core
from comet_core.metrics import PEAK_PARTS

MIB = 2**20


def wide(count=1):
    """A layer of exactly 1 MiB of weights, without bias, `count` times."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(count)))


def iterate(model, optimizer, session, *, batch=4, zero_first=True, **zero):
    """One iteration; `zero_first`: gradients are dropped before the forward, else right before `session.step()`."""
    if zero_first:
        optimizer.zero_grad(**zero)
    model(torch.ones(batch, 512)).sum().backward()
    optimizer.step()
    if not zero_first:
        optimizer.zero_grad(**zero)
    return session.step()


@pytest.mark.parametrize("policy", ["baseline", "compress"])
def test_the_parts_sum_to_the_measured_peak_and_each_is_what_there_was(policy):
    model = wide(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with comet_core.attach(model, optimizer, policy=policy, tune_allocator=False) as session:
        for _ in range(3):
            step = iterate(model, optimizer, session)
            assert sum(getattr(step, name) for name in PEAK_PARTS) == step.peak_rss_bytes == step.peak_bytes
            parts = step.parameter_bytes, step.optimizer_bytes, step.gradient_bytes, step.batch_bytes
            assert parts == (3 * MIB, 3 * MIB, 3 * MIB, 8192)
            assert step.static_bytes == 9 * MIB


def test_adam_keeps_two_values_a_weight_and_no_optimizer_keeps_none():
    model = wide(2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        assert iterate(model, optimizer, session).optimizer_bytes // MIB == 4
    model = wide(2)
    with comet_core.attach(model, None, policy="baseline", tune_allocator=False) as session:
        model(torch.ones(4, 512)).sum().backward()
        assert session.step().optimizer_bytes == 0


def test_what_is_never_there_together_is_not_added_up():
    """8 MiB are saved for backward before there is a gradient, and 1 MiB of gradient comes when they are free."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Sigmoid(), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        for _ in range(2):
            step = iterate(model, optimizer, session, batch=2048)
            assert (step.peak_held_bytes, step.gradient_bytes) == (8 * MIB, 0)
            step = iterate(model, optimizer, session, batch=2048, set_to_none=False)
            assert (step.peak_held_bytes, step.gradient_bytes) == (8 * MIB, MIB)


def test_gradients_that_arrive_while_activations_are_still_saved_are_there_together_with_them():
    """As in AlexNet: the last layers have the weights, the first ones the activations."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Sigmoid(), nn.Sigmoid(), nn.Linear(512, 4096, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        step = iterate(model, optimizer, session, batch=1024)
    assert step.held_bytes == 4 * MIB and step.gradient_bytes == 8 * MIB
    assert step.peak_held_bytes == 2 * MIB + 2 * MIB  # both results: the second sigmoid has yet to read its own


@pytest.mark.parametrize("zero_first", [True, False])
def test_it_does_not_matter_when_gradients_are_dropped(zero_first):
    model = wide(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        for _ in range(3):
            assert iterate(model, optimizer, session, zero_first=zero_first).gradient_bytes == 2 * MIB


def test_a_gradient_that_is_used_and_dropped_in_backward_is_never_there_beside_the_next():
    model = wide(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        assert iterate(model, optimizer, session).gradient_bytes == MIB


def test_a_shared_weight_and_a_buffer_on_the_same_storage_count_once():
    model = wide(1)
    model.append(nn.Linear(512, 512, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[:4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        step = iterate(model, optimizer, session)
    assert (step.parameter_bytes, step.gradient_bytes) == (MIB, MIB)


def test_layers_that_come_go_or_freeze_are_followed_and_kept_alive_by_nobody():
    model = wide(1)
    with comet_core.attach(model, None, policy="baseline", tune_allocator=False) as session:

        def gradient_bytes():
            model.zero_grad()
            model(torch.ones(4, 512)).sum().backward()
            return session.step().gradient_bytes

        model.append(nn.Linear(512, 512, bias=False))
        assert gradient_bytes() == 2 * MIB  # of the new layer from the first step on: its gradient is there at the end
        assert gradient_bytes() == 2 * MIB
        gone = weakref.ref(model[0].weight)
        model[0] = nn.Linear(512, 512, bias=False)
        gc.collect()
        assert gone() is None
        assert gradient_bytes() == 2 * MIB
        model[1].requires_grad_(False)
        assert gradient_bytes() == MIB


def test_a_lazy_layer_counts_once_it_has_a_size():
    model = nn.Sequential(nn.LazyLinear(512, bias=False))
    with comet_core.attach(model, None, policy="baseline", tune_allocator=False) as session:
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(4, 512)).sum().backward()
            step = session.step()
            assert (step.parameter_bytes, step.gradient_bytes) == (MIB, MIB)


def test_what_is_decoded_is_scratch_and_what_was_replaced_stands_beside():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten())
    with comet_core.attach(model, None, tune_allocator=False) as session:
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(32, 1, 64, 64)).square().sum().backward()
            step = session.step()
    assert step.scratch_bytes == 8 * MIB  # the second convolution's input, which the ReLU is about to ask for too
    assert step.peak_saved_bytes == 8 * MIB and step.peak_held_bytes < 2 * MIB


def test_a_closed_session_watches_no_parameter():
    model = wide(2)
    session = comet_core.attach(model, None, policy="baseline", tune_allocator=False)
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    session.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.gpu
def test_on_a_gpu_what_is_known_was_allocated():
    model = wide(3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with comet_core.attach(model, optimizer, policy="baseline", tune_allocator=False) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 512, device="cuda")).sum().backward()
            optimizer.step()
            step = session.step()
            assert step.other_bytes >= 0 and step.gradient_bytes == 3 * MIB
            assert sum(getattr(step, name) for name in PEAK_PARTS) == step.peak_allocated_bytes
