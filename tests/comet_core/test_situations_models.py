"""Models as people write them: gradients equal plain autograd's, bytes equal the truth, with any policy."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.comet_core.situations import Lambda, Table, batches, check, loss_of, network, plain_loop

SITUATIONS = Table()
situation = SITUATIONS.add


@situation("the first layers are frozen")
def _(run):
    run.model[:3].requires_grad_(False)
    plain_loop(run)


@situation("a layer in the middle is frozen, and thawed after a while")
def _(run):
    run.model[2].requires_grad_(False)
    plain_loop(run, given=lambda: batches(2))
    run.model[2].requires_grad_(True)
    plain_loop(run)


def tower():
    return Lambda(lambda p, x: p[2](p[1](p[1](p[0](x).relu()).relu()).relu().mean((2, 3))),
                  nn.Conv2d(2, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 3))  # fmt: skip


@situation("a layer is used twice", tower)
def _(run):
    plain_loop(run)


@situation("input and output embeddings are one tensor", lambda: Lambda(
    lambda p, x: F.linear(p[1](p[0](x.flatten(1).sign().long() + 1).mean(1)).relu(), p[0].weight),
    nn.Embedding(3, 8), nn.Linear(8, 8)), limit="none")  # fmt: skip
def _(run):
    plain_loop(run)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Conv2d(2, 6, 3), nn.Conv2d(6, 3, 3), nn.Conv2d(6, 3, 3)
        self.turn = 0

    def forward(self, x):
        self.turn += 1
        h = self.stem(x).relu()
        unused = self.right(h).relu()
        return self.left(h) if self.turn % 2 else unused + self.left(h)


@situation("a branch that only every other iteration uses", Branches)
def _(run):
    plain_loop(run, given=lambda: batches(4))


@situation("layers are added, replaced and converted on the way", limit="none")
def _(run):
    plain_loop(run)
    torch.manual_seed(4)
    run.model[8] = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    run.model[0].weight.data = run.model[0].weight.data * 0.5
    plain_loop(run)
    run.model.double()
    plain_loop(run, given=lambda: batches(dtype=torch.float64))


@situation("batch norm, with momentum, in two modes", lambda: nn.Sequential(
    nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, bias=False),
    nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3)), limit="norm")  # fmt: skip
def _(run):
    plain_loop(run, given=lambda: batches(size=16))
    run.model[1].eval()
    plain_loop(run, given=lambda: batches(size=16))


@situation("dropout of values and of channels", lambda: nn.Sequential(
    nn.Conv2d(2, 6, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(384, 3)))  # fmt: skip
def _(run):
    plain_loop(run)


@situation("weights that are computed: weight norm and spectral norm", lambda: nn.Sequential(
    nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 6, 3)), nn.ReLU(), nn.Flatten(),
    nn.utils.parametrizations.spectral_norm(nn.Linear(384, 3))), limit="none")  # fmt: skip
def _(run):
    plain_loop(run)


@situation("attention with layer norm and gelu", lambda: nn.Sequential(
    nn.Flatten(2), nn.TransformerEncoderLayer(100, 4, 32, dropout=0.0, activation="gelu", batch_first=True),
    nn.Linear(100, 3)), limit="none")  # fmt: skip
def _(run):
    plain_loop(run)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.lstm, self.head = nn.RNNCell(20, 16), nn.LSTM(16, 8), nn.Linear(8, 3)

    def forward(self, x, hidden):
        steps = []
        for part in x.flatten(2).mean(1).split(20, 1):
            hidden = self.cell(part, hidden)
            steps.append(hidden)
        return self.head(self.lstm(torch.stack(steps))[0]), hidden


@situation("truncated backpropagation through time, with an LSTM", Recurrent, limit="none")
def _(run):
    hidden = torch.zeros(4, 16)
    for batch in batches():
        run.model.zero_grad()
        output, hidden = run.model(batch, hidden.detach())
        loss_of(output).backward()
        run.done()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.judge = nn.Linear(2, 200), network()

    def forward(self, noise=None, images=None):
        made = self.generator(noise).view(-1, 2, 10, 10).relu() if images is None else images
        return {"judged": self.judge(made), "made": [made]}


@situation("a generator against its judge, with keywords, dicts and detached images", Pair)
def _(run):
    for batch in batches():
        run.model.zero_grad()
        made = run.model(noise=batch[:, :, 0, 0])["made"][0]
        loss_of(run.model(images=torch.cat([made.detach(), batch]))["judged"]).backward()
        loss_of(run.model(noise=batch[:, :, 0, 0])["judged"]).backward()
        del made
        run.done()


@situation("a teacher's output, without gradient, inside forward", lambda: Lambda(
    lambda p, x: p[0](x) - p[1](x).detach() + teach(p[1], x), network(), network()))  # fmt: skip
def _(run):
    plain_loop(run)


def teach(model, x):
    with torch.no_grad():
        return model(x)


def region(reentrant):
    inner = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
    return Lambda(
        lambda p, x: p[2](checkpoint(p[1], p[0](x).relu(), use_reentrant=reentrant).relu().flatten(1)),
        nn.Conv2d(2, 6, 3), inner, nn.Linear(384, 3),
    )  # fmt: skip


@situation("a checkpointed region", lambda: region(False))
def _(run):
    plain_loop(run)


@situation("a checkpointed region, reentrant", lambda: region(True))
def _(run):
    plain_loop(run)


@situation("checkpointed segments with batch norm", lambda: Lambda(
    lambda p, x: p[1](checkpoint_sequential(p[0], 2, x, use_reentrant=False).flatten(1)),
    nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3)),
    nn.Linear(216, 3)))  # fmt: skip
def _(run):
    plain_loop(run)


def keep_convolutions(context, operator, *args, **kwargs):
    kept = operator is torch.ops.aten.convolution.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(respect):
    inner = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3))
    options = {
        "use_reentrant": False,
        "respect_saved_tensors_hooks": respect,
        "context_fn": lambda: create_selective_checkpoint_contexts(keep_convolutions),
    }
    return Lambda(lambda p, x: p[1](checkpoint(p[0], x, **options).relu().flatten(1)), inner, nn.Linear(216, 3))


@situation("selective checkpointing whose cache bypasses hooks", lambda: selective(False))
def _(run):
    plain_loop(run)


@situation("selective checkpointing whose cache goes through hooks", lambda: selective(True))
def _(run):
    plain_loop(run)


# The user's own hooks and functions


@situation("save_on_cpu around a part of the model", lambda: Lambda(
    lambda p, x: p[1](saved_on_cpu(p[0], x).relu().flatten(1)),
    nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3)), nn.Linear(216, 3)))  # fmt: skip
def _(run):
    plain_loop(run)


def saved_on_cpu(module, x):
    with torch.autograd.graph.save_on_cpu():
        return module(x)


@situation("hooks of the user's own: inputs and outputs replaced, gradients scaled, modules watched")
def _(run):
    seen = []
    hooks = [
        run.model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        run.model[1].register_forward_hook(lambda module, args, output: output + 1),
        run.model[3].register_full_backward_hook(lambda module, given, got: seen.append(module)),
        run.model[6].weight.register_hook(lambda gradient: gradient * 0.5),
    ]
    plain_loop(run)
    assert len(seen) == 3
    for hook in hooks:
        hook.remove()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x**3
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        assert torch.equal(result, x**3)
        return gradient * 3 * x**2


@situation("a function of the user's own, which saves its input and its output", lambda: Lambda(
    lambda p, x: p[1](Cube.apply(p[0](x)).flatten(1)), nn.Conv2d(2, 6, 3), nn.Linear(384, 3)),
    limit="none")  # fmt: skip
def _(run):
    plain_loop(run)


@situation("functional_call with other weights than the model's")
def _(run):
    for batch in batches():
        weights = {name: (2 * p).detach().requires_grad_() for name, p in run.model.named_parameters()}
        run.model.zero_grad()
        loss = loss_of(torch.func.functional_call(run.model, weights, (batch,)))
        for (_, parameter), gradient in zip(
            run.model.named_parameters(), torch.autograd.grad(loss, list(weights.values())), strict=True
        ):
            parameter.grad = gradient
        run.done()


@torch.compile(backend="eager")
def compiled(x):
    return x.relu() * 2


@situation("a compiled function inside the model", lambda: Lambda(
    lambda p, x: p[1](compiled(p[0](x)).flatten(1)), nn.Conv2d(2, 6, 3), nn.Linear(384, 3)))  # fmt: skip
def _(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # while dynamo looks at tensors
        plain_loop(run)


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_model_of_this_kind_gets_its_gradients_and_its_bytes_are_the_truth(name):
    check(SITUATIONS[name])
