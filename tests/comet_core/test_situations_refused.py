"""What cannot be compressed is left alone or refused, in a sentence, and no saving is claimed for it."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import comet_core
from tests.comet_core.situations import Lambda, batches, loss_of, network


def attached(model, **options):
    return comet_core.attach(
        model, None, **{"controller": "fixed", "error_bound": 0.01, "tune_allocator": False, **options}
    )


def gradients(model, batch):
    model.zero_grad()
    loss_of(model(batch)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("way", ["torch.compile of the model", "model.compile", "torch.compile of a part"])
def test_a_model_that_is_compiled_after_attach_is_refused_and_no_saving_is_reported(way):
    model, batch = network(), batches(1)[0]
    with attached(model) as session:
        loss_of(model(batch)).backward()
        assert session.step().compression_ratio > 1
        with pytest.raises(ValueError, match=r"compiled by torch\.compile, which ignores saved-tensor hooks; attach"):
            if way == "torch.compile of the model":
                torch.compile(model, backend="eager")(batch)
            elif way == "model.compile":
                model.compile(backend="eager")
                model(batch)
                session.step()
            else:
                model[2] = torch.compile(model[2], backend="eager")
                model(batch)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert session.num_steps == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for forward-mode formulas
@pytest.mark.parametrize("way", ["func.grad", "func.vjp", "vmap", "jvp"])
def test_a_transform_of_torch_func_around_the_model_is_right_uncompressed_and_said_once(way):
    model, batch = network(), batches(1)[0]
    parameters = dict(model.named_parameters())

    def loss(values, x):
        return loss_of(torch.func.functional_call(model, values, (x,)))

    def run():
        if way == "func.grad":
            return list(torch.func.grad(loss)(parameters, batch).values())
        if way == "func.vjp":
            output, back = torch.func.vjp(loss, parameters, batch)
            return [*back(torch.ones_like(output))[0].values(), output]
        if way == "vmap":
            return [torch.vmap(lambda x: model(x[None]))(batch)]
        return list(torch.func.jvp(model, (batch,), (torch.ones_like(batch),)))

    expected = run()
    with attached(model) as session, pytest.warns(UserWarning) as caught:
        for _ in range(2):
            assert all(torch.equal(one, other) for one, other in zip(run(), expected, strict=True))
        step = session.step()
    assert [str(warning.message) for warning in caught] == [
        "a torch.func transform runs the model: such a forward is neither compressed nor counted."
    ]
    assert (step.saved_bytes, step.held_bytes, step.compression_ratio) == (0, 0, None)


def test_a_transform_of_torch_func_inside_the_model_fails_with_a_note_on_what_to_do():
    model = Lambda(lambda p, x: p[0](torch.func.grad(lambda t: t.square().sum())(x.detach())), nn.Conv2d(2, 3, 3))
    with attached(model), pytest.raises(RuntimeError, match="saved tensor hooks") as raised:
        model(batches(1)[0])
    assert any("use torch.autograd.grad in its place" in note for note in raised.value.__notes__)
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_derivatives_are_right():
    model, batch = network(), batches(1)[0]

    def run():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(batch, torch.ones_like(batch))
            return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent

    expected = run()
    with attached(model):
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("way", ["checkpoint", "save_on_cpu", "hooks", "disabled"])
def test_others_hooks_around_the_model_decide_alone_and_it_is_said_once(way):
    model, batch = network(), batches(1)[0]
    unpacked = []
    around = {
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
        "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(1) or t),
        "disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
    }

    def run():
        model.zero_grad()
        if way == "checkpoint":
            output = checkpoint(model, batch, use_reentrant=False)
        else:
            with around[way]():
                output = model(batch)
        loss_of(output).backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients(model, batch)
    with attached(model) as session, pytest.warns(UserWarning) as caught:
        for _ in range(2):
            assert all(torch.equal(one, other) for one, other in zip(run(), expected, strict=True))
        step = session.step()
        assert (step.saved_bytes, step.compression_ratio) == (0, None)
    said = "saved-tensor hooks are disabled" if way == "disabled" else "saved-tensor hooks of a checkpoint"
    assert len(caught) == 1 and said in str(caught[0].message)
    assert bool(unpacked) == (way == "hooks")


def test_a_model_in_a_reentrant_checkpoint_is_left_alone():
    model = network()
    batch = batches(1)[0].requires_grad_()
    expected = gradients(model, batch)
    with attached(model) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        model.zero_grad()
        loss_of(checkpoint(model, batch, use_reentrant=True)).backward()
        assert session.step().saved_bytes == 0
    assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), expected, strict=True))


def test_an_attached_model_inside_another_attached_one_is_its_own_sessions():
    inner = network()
    outer = Lambda(lambda p, x: p[1](p[0](x).relu()), nn.Conv2d(2, 2, 3, padding=1), inner)
    batch = batches(1)[0]
    expected = gradients(copy.deepcopy(outer), batch)
    with (
        attached(outer, codec="lossless") as first,
        attached(inner, codec="lossless") as second,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        found = gradients(outer, batch)
        assert first.step().saved_bytes > 0 and second.step().saved_bytes > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", ["gradient penalty", "through the weights"])
def test_second_derivatives_through_a_stored_approximation_are_refused_with_what_to_do(way):
    model, batch = network(), batches(1)[0].requires_grad_()
    with attached(model):
        wanted = [batch] if way == "gradient penalty" else list(model.parameters())
        with pytest.raises(
            RuntimeError, match=r"create_graph=True .* linear 6, .*codec='lossless' or policy='baseline'"
        ):
            torch.autograd.grad(loss_of(model(batch)), wanted, create_graph=True)
        gradients(model, batch)  # first derivatives go on


def test_second_derivatives_through_what_is_exact_in_few_bits_are_right():
    """Signs behind a ReLU, a pool's windows and dropout's mask say all that backward reads."""
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), Lambda(lambda p, x: x**3))
    batch = batches(1)[0].requires_grad_()

    def run():
        torch.manual_seed(3)
        (gradient,) = torch.autograd.grad(model(batch * 2).sum(), batch, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), batch)[0]

    expected = run()
    with attached(model) as session:
        assert torch.equal(run(), expected)
        assert session.step().compression_ratio > 1


def test_weights_that_change_between_forward_and_backward_raise_as_without_a_session():
    model, batch = network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = loss_of(model(batch))
    first.backward()
    with attached(model):
        loss = loss_of(model(batch))
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_second_backward_through_a_freed_graph_raises_as_without_a_session():
    model = network()
    with attached(model):
        loss = loss_of(model(batches(1)[0]))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
