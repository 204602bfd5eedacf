"""`session.audit()`: it names whoever keeps a saved storage alive, and nobody else."""

import gc
import threading

import pytest
import torch
from torch import nn

import comet_core
from tests.comet_core.situations import Lambda, batches, loss_of, network

kept_globally: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def fresh():
    """An audit walks all objects: only those of the test, which is a matter of time."""
    gc.freeze()
    yield
    gc.unfreeze()


def attached(model, **options):
    return comet_core.attach(
        model, None, **{"controller": "fixed", "error_bound": 0.01, "tune_allocator": False, **options}
    )


def wide(*parts):
    """A model of which nothing stays: a stem and a convolution behind a ReLU, and what a test adds."""
    return nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), *parts, nn.Conv2d(16, 4, 3))


def found(session):
    """(kind, name, why) of whoever keeps a storage, but for the batch."""
    keepers = {keeper for storage in session.audit() for keeper in storage.keepers}
    return sorted((keeper.kind, keeper.name, keeper.why) for keeper in keepers if keeper.why != "it is the batch")


def test_nothing_is_alive_before_and_after_a_step():
    model = network()
    with attached(model) as session:
        for _ in range(2):
            assert session.audit() == []
            assert str(session.audit()) == "nothing: no storage that was saved for backward is alive"
            loss_of(model(batches(1)[0])).backward()
            session.step()
        assert session.audit() == []


def test_nothing_but_the_batch_is_alive_in_a_model_of_which_all_is_packed():
    model = wide()
    with attached(model) as session:
        output = model(batches(1)[0])
        assert found(session) == []
        (batch,) = session.audit()
        assert (batch.num_bytes, batch.savers[0].layer, batch.savers[0].operator) == (4 * 2 * 100 * 4, "0", "conv2d")
        del output


def test_an_operator_without_a_rule_is_named_with_the_module_that_calls_it():
    model = wide(Lambda(lambda p, x: torch.erfinv(x * 0.1)))
    with attached(model) as session:
        output = model(batches(1)[0])
        assert found(session) == [("saver", "erfinv in 2", "no rule for this operator")]
        (kept,) = [storage for storage in session.audit() if storage.num_bytes == 4 * 16 * 64 * 4]
        assert [(saver.layer, saver.operator) for saver in kept.savers] == [("2", "erfinv")]
        del output


def test_a_policy_and_a_layer_that_keep_exactly_say_so():
    model = wide()
    with attached(model, policy="baseline") as session:
        output = model(batches(1)[0])
        assert {why for _, _, why in found(session)} == {"the policy keeps every tensor as it is"}
        del output
    with attached(model, controller="noise", collect_every=1) as session:
        (model(batches(1)[0]) * 0).sum().backward()  # no gradient arrives: its bound is exact from now on
        session.step()
        output = model(batches(1)[0])
        assert found(session) == [
            ("saver", "conv2d in 2", "another operator keeps it anyway"),
            ("saver", "relu in 1", "its bound is exact: no gradient arrived, or its values are not finite"),
        ]
        del output


def test_a_storage_that_one_operator_keeps_is_not_stored_for_another():
    model = wide()
    model[1] = Lambda(lambda p, x: torch.erfinv(x).relu() + x.relu())
    with attached(model) as session:
        output = model(batches(1)[0])
        assert ("saver", "erfinv in 1", "no rule for this operator") in found(session)
        del output


def test_a_module_that_keeps_its_output_is_named_with_the_attribute():
    class Caches(nn.Module):
        def forward(self, x):
            self.cache = {"last": [x]}
            return x

    model = wide(nn.Sequential(Caches()))
    with attached(model) as session:
        output = model(batches(1)[0])
        assert found(session) == [("module", "2.0.cache", "an attribute of the module keeps it")]
        (kept,) = [storage for storage in session.audit() if storage.num_bytes == 4 * 16 * 64 * 4]
        assert {saver.layer for saver in kept.savers} == {"1", "3"}, "saved by the ReLU and by the convolution"
        del output


def test_a_hook_that_keeps_outputs_is_named_with_its_module():
    model, kept = wide(), []

    def collect(module, args, output):
        kept.append(output)

    def collect_globally(module, args):
        kept_globally.append(args[0])

    handles = [model[1].register_forward_hook(collect), model[2].register_forward_pre_hook(collect_globally)]
    with attached(model) as session:
        output = model(batches(1)[0])
        names = {name.rpartition(".")[2] for kind, name, _ in found(session) if kind == "hook"}
        assert names == {"collect on 1", "collect_globally on 2"}
        del output
    kept_globally.clear()
    for handle in handles:
        handle.remove()


def test_a_variable_is_named_with_its_function_also_in_another_thread():
    model, kept, ready, done = wide(), [], threading.Event(), threading.Event()
    model[1].register_forward_hook(lambda module, args, output: kept.append(output))

    def other():
        features = {"features": kept.pop()}
        ready.set()
        done.wait()
        del features

    with attached(model) as session:
        output = model(batches(1)[0])
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait()
        ((kind, name, why),) = found(session)
        done.set()
        thread.join()
        assert (kind, name) == ("variable", "features") and "a variable of other (test_storage_audit.py:" in why
        assert found(session) == [], "the audit itself keeps nothing"
        del output


def test_an_operator_behind_the_model_is_named():
    model = nn.Sequential(*wide(), nn.ReLU())
    with attached(model) as session:
        loss = model(batches(1)[0]).square().mean()
        assert found(session) == [("graph", "PowBackward0", "an operator outside the model saved it too")]
        loss.backward()
        assert session.audit() == []


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = {"x": x}
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.kept["x"]


def test_a_function_that_keeps_a_tensor_without_saving_it_is_named():
    model = wide(Lambda(lambda p, x: Squares.apply(x)))
    with attached(model) as session:
        output = model(batches(1)[0])
        assert found(session) == [("graph", "SquaresBackward", "an attribute of its context keeps it, unsaved")]
        del output


def test_the_table_has_a_line_for_each_keeper():
    model = wide(Lambda(lambda p, x: torch.erfinv(x * 0.1)))
    with attached(model) as session:
        kept = []
        hook = model[2].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        output = model(batches(1)[0])
        lines = str(session.audit()).splitlines()
        assert lines[0].split() == ["bytes", "saved", "by", "kept", "by", "why"]
        assert len(lines) == 1 + sum(len(storage.keepers) for storage in session.audit())
        assert any(line.split()[:4] == ["16,384", "erfinv", "in", "2"] for line in lines)
        hook.remove()
        del output


def test_sessions_see_their_own_storages_only():
    models = wide(), wide(Lambda(lambda p, x: torch.erfinv(x * 0.1)))
    with attached(models[0]) as first, attached(models[1]) as second:
        outputs = [model(batches(1)[0]) for model in models]
        assert found(first) == [] and len(found(second)) == 1
        del outputs


@pytest.mark.parametrize("codec", ["error_bounded", "lossless"])
def test_an_audit_changes_neither_gradients_nor_bytes(codec):
    model = network()
    results = []
    for asks in (False, True):
        model.zero_grad()
        with attached(model, codec=codec) as session:
            loss = loss_of(model(batches(1)[0]))
            if asks:
                session.audit()
            loss.backward()
            step = session.step()
        results.append((step.saved_bytes, step.held_bytes, [p.grad.clone() for p in model.parameters()]))
    assert results[0][:2] == results[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))
