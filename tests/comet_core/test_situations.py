"""Training loops as people write them: gradients equal plain autograd's, bytes equal the truth, with any policy."""

import concurrent.futures
import gc
import threading

import pytest
import torch

import comet_core
from tests.comet_core.situations import Table, batches, check, loss_of, network, plain_loop

SITUATIONS = Table()
situation = SITUATIONS.add


# Optimizers


@situation("SGD with momentum")
def _(run):
    plain_loop(run, optimizer=torch.optim.SGD(run.model.parameters(), lr=0.01, momentum=0.9))


@situation("Adam with a closure")
def _(run):
    optimizer = torch.optim.Adam(run.model.parameters())

    for batch in batches():

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(run.model(batch))
            loss.backward()
            return loss

        optimizer.step(closure)
        run.done()


@situation("LBFGS, whose closure runs several times a step", limit="none")
def _(run):
    optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.01, max_iter=3)
    for batch in batches(2):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = run.model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        run.done()


@situation("two optimizers on parts of the model")
def _(run):
    both = [torch.optim.SGD(run.model[:4].parameters(), lr=0.01), torch.optim.Adam(run.model[4:].parameters())]
    for batch in batches():
        run.model.zero_grad()
        loss = loss_of(run.model(batch))
        run.look()
        loss.backward()
        for optimizer in both:
            optimizer.step()
        run.done()


@situation("no optimizer: torch.autograd.grad, and steps by hand")
def _(run):
    for batch in batches():
        parameters = list(run.model.parameters())
        found = torch.autograd.grad(loss_of(run.model(batch)), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=0.01)
        run.done()


@situation("an optimizer that steps inside backward, in post-accumulate hooks")
def _(run):
    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in run.model.parameters()]
    plain_loop(run)
    for hook in hooks:
        hook.remove()


# Passes


@situation("gradient accumulation over three micro-batches")
def _(run):
    for _ in range(2):
        run.model.zero_grad()
        for batch in batches():
            loss = loss_of(run.model(batch)) / 3
            run.look()
            loss.backward()
        run.done()


@situation("two forwards for one backward")
def _(run):
    first, second, third = batches()
    for batch in (first, second):
        run.model.zero_grad()
        loss = loss_of(run.model(batch)) + loss_of(run.model(third))
        run.look()
        loss.backward()
        run.done()


@situation("retain_graph: two backwards through one forward")
def _(run):
    for batch in batches(2):
        run.model.zero_grad()
        output = run.model(batch)
        run.look()
        loss_of(output).backward(retain_graph=True)
        output.mean().backward()
        run.done()


@situation("several losses with gradients of their own in one backward call")
def _(run):
    for batch in batches(2):
        run.model.zero_grad()
        output = run.model(batch)
        run.look()
        torch.autograd.backward([output[:, 0], output[:, 1]], [torch.ones(4), torch.full((4,), 0.5)])
        run.done()


@situation("backward for chosen parameters only")
def _(run):
    for batch in batches(2):
        run.model.zero_grad()
        loss_of(run.model(batch)).backward(inputs=[run.model[2].weight, run.model[6].bias])
        run.done()


@situation("forwards whose graph is thrown away before the one that counts")
def _(run):
    for batch in batches(2):
        run.model.zero_grad()
        for _ in range(3):
            run.model(batch)
        loss = loss_of(run.model(batch))
        run.look()
        loss.backward()
        run.done()


@situation("evaluation between steps: no_grad, inference_mode, eval()")
def _(run):
    for batch in batches():
        run.model.zero_grad()
        loss = loss_of(run.model(batch))
        run.look()
        with torch.no_grad():
            run.model.eval()(batch)
        with torch.inference_mode():
            run.model(batch)
        run.model.train()
        loss.backward()
        run.done()


@situation("double backward: a gradient penalty", limit="none")
def _(run):
    for batch in batches():
        run.model.zero_grad()
        batch.requires_grad_()
        output = run.model(batch)
        run.look()
        (gradient,) = torch.autograd.grad(loss_of(output), batch, create_graph=True)
        (loss_of(output) + gradient.square().sum()).backward()
        run.done()


@situation("adversarial: the batch itself asks for a gradient")
def _(run):
    for batch in batches():
        run.model.zero_grad()
        batch.requires_grad_()
        loss = loss_of(run.model(batch))
        run.look()
        loss.backward()
        run.model.zero_grad()
        loss = loss_of(run.model((batch + 0.1 * batch.grad.sign()).detach()))
        run.look()
        loss.backward()
        run.done()


@situation("anomaly detection is on")
def _(run):
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        plain_loop(run)


@situation("backward runs in another thread")
def _(run):
    for batch in batches():
        run.model.zero_grad()
        loss = loss_of(run.model(batch))
        run.look()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        run.done()


@situation("each forward in a new thread, all backwards in the main one")
def _(run):
    for _ in range(2):
        run.model.zero_grad()
        for batch in batches():
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                output = pool.submit(run.model, batch).result()
            run.look()
            loss_of(output).backward()
            del output
        run.done()


@situation("an exception in forward, then on")
def _(run):
    hook = run.model[4].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.model(batches(1)[0])
    hook.remove()
    plain_loop(run)


@situation("an exception in backward, then on")
def _(run):
    def fail(gradient):
        raise KeyError("in backward")

    output = run.model(batches(1)[0])
    output.register_hook(fail)
    with pytest.raises(KeyError):
        loss_of(output).backward()
    del output
    plain_loop(run)


@situation("the loss is not finite once", limit="none")
def _(run):
    for index, batch in enumerate(batches()):
        run.model.zero_grad()
        loss = loss_of(run.model(batch)) * (float("inf") if index == 1 else 1.0)
        run.look()
        loss.backward()
        run.done()


@situation("clipped gradients, zero_grad that keeps the tensors")
def _(run):
    for batch in batches():
        run.model.zero_grad(set_to_none=False)
        loss = loss_of(run.model(batch))
        run.look()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e6)
        run.done()


@situation("the last batch is smaller, and one sample alone")
def _(run):
    plain_loop(run, given=lambda: [*batches(2), batches(1)[0][:3], batches(1)[0][:1]])


# Numbers


@situation("bfloat16 autocast", dtype=torch.bfloat16)
def _(run):
    for batch in batches():
        run.model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(run.model(batch))
        run.look()
        loss.backward()
        run.done()


@situation("float16 autocast with a loss scaler, one step of which is skipped", limit="none")
def _(run):
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(run.model(batch))
        run.look()
        scaler.scale(loss * (float("inf") if index == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        run.done()
    assert scaler.get_scale() == 512.0


@situation("a bfloat16 model", lambda: network(dtype=torch.bfloat16), dtype=torch.bfloat16)
def _(run):
    plain_loop(run, given=lambda: batches(dtype=torch.bfloat16))


@situation("a float16 model", lambda: network(dtype=torch.float16), dtype=torch.float16)
def _(run):
    plain_loop(run, given=lambda: batches(dtype=torch.float16))


@situation("a float64 model", lambda: network(dtype=torch.float64))
def _(run):
    plain_loop(run, given=lambda: batches(dtype=torch.float64))


@situation("channels_last", lambda: network(memory_format=torch.channels_last))
def _(run):
    plain_loop(run, given=lambda: batches(memory_format=torch.channels_last))


@situation("a channels_last batch in a contiguous model, and the other way round")
def _(run):
    plain_loop(run, given=lambda: batches(memory_format=torch.channels_last))
    run.model.to(memory_format=torch.channels_last)
    plain_loop(run)


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_loop_of_this_kind_gets_its_gradients_and_its_bytes_are_the_truth(name):
    check(SITUATIONS[name])


@pytest.mark.parametrize("codec", ["lossless", "error_bounded"])
def test_threads_that_train_one_model_at_the_same_time_get_their_own_gradients(codec):
    model = network()
    parameters = list(model.parameters())
    given = batches(8)
    expected = [torch.autograd.grad(loss_of(model(batch)), parameters) for batch in given]
    together = threading.Barrier(4)

    def work(batch):
        found = []
        for _ in range(5):
            together.wait()
            found.append(torch.autograd.grad(loss_of(model(batch)), parameters))
        return found

    options = {"controller": "fixed", "error_bound": 1e-3, "codec": codec}
    with comet_core.attach(model, None, tune_allocator=False, **options) as session:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(work, given))
        assert session.step().saved_bytes > 0
        gc.collect()
        assert (session._ledger.now.saved, session._ledger.now.held) == (0, 0)
    for found, plain in zip(results, expected, strict=True):
        for gradients in found:
            for one, other in zip(gradients, plain, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0 if codec == "lossless" else 0.05)
