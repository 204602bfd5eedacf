"""One record a storage: views, aliases, reused addresses and tensors of other kinds, in loops and one by one."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import comet_core
from comet_core.codecs.base import Encoded
from tests.comet_core.situations import BOUND, Lambda, Table, batches, check, loss_of, network, plain_loop

SITUATIONS = Table()
situation = SITUATIONS.add


def conv(inputs=6, outputs=6, size=3):
    return nn.Conv2d(inputs, outputs, size, padding=size // 2)


def model(function, *parts):
    """A stem of 6 channels, then the function on (parts, what comes out of the stem)."""
    return lambda: Lambda(lambda p, x: function(p[1:], p[0](x)), conv(2), *(part() for part in parts))


def head(inputs=600):
    return lambda: nn.Linear(inputs, 3)


LOOPS = {
    "a view, flattened": model(lambda p, h: p[1](h.flatten(1)) + p[0](h).mean(), conv, head()),
    "two halves of a storage, each for a convolution": model(
        lambda p, h: p[0](h[:, :3]) + p[1](h[:, 3:]), lambda: conv(3), lambda: conv(3)
    ),
    "a narrow view is the last owner of a large storage": model(
        lambda p, h: p[0](torch.cat([h, h, h], 1)[:, :6, ::2]), conv
    ),
    "overlapping windows": model(lambda p, h: p[0](h.unfold(3, 4, 2).flatten(3)), conv),
    "a skip connection through cat": model(
        lambda p, h: p[1](torch.cat([h, p[0](h).relu()], 1)), conv, lambda: conv(12)
    ),
    "a residual sum in place": model(
        lambda p, h: p[1]((h * 1).add_(p[0](h.relu())).relu_().flatten(1)), conv, head()
    ),
    "ReLU in place on a convolution's result": model(
        lambda p, h: p[1](p[0](h.relu_()).relu_().flatten(1)), conv, head()
    ),
    "one ReLU for a convolution, a pool and a linear layer": model(
        lambda p, h: p[1]((h := h.relu()).flatten(1)) + p[0](h).mean() + F.max_pool2d(h, 2).mean(), conv, head()
    ),
    "three convolutions on one input": model(
        lambda p, h: p[0](h := h.relu()) + p[1](h) + p[2](h), conv, conv, lambda: conv(size=5)
    ),
    "expanded samples": model(
        lambda p, h: p[0](h.mean(0, keepdim=True).expand(9, -1, -1, -1)).mean((0, 2, 3)), conv
    ),
    "expanded channels": model(lambda p, h: p[0](h.mean(1, keepdim=True).expand(-1, 6, -1, -1)), conv),
    "an expanded tensor beside the one it repeats": model(
        lambda p, h: p[0](h := h.mean(0, keepdim=True)) + p[0](h.expand(4, -1, -1, -1)), conv
    ),
    "a square and its transpose": model(
        lambda p, h: p[0](h := h.flatten()[:2304].view(48, 48)) + p[0](h.T), lambda: nn.Linear(48, 10)
    ),
    "permuted dimensions": model(
        lambda p, h: p[0](h) + p[1](h.transpose(2, 3)) + p[2](h.permute(0, 2, 3, 1)).mean(), conv, conv,
        lambda: nn.Linear(6, 4)
    ),
    "a detached alias": model(lambda p, h: p[0](h) + p[1](h.detach()), conv, conv),
    "an alias made by set_": model(
        lambda p, h: p[0](h) + p[1](torch.empty(0).set_(h.detach())), conv, conv
    ),
    "changes in place between what saves": model(
        lambda p, h: p[1](p[0](h.mul_(2).add_(1)).clamp_(-1, 1).sub_(1)), conv, conv
    ),
    "temporaries that come and go at one address": model(
        lambda p, h: sum(p[0](h * scale).relu().mean() for scale in range(1, 9)) + p[1](h).mean(), conv, conv
    ),
    "a deep chain of equal sizes": model(
        lambda p, h: p[7](p[6](p[5](p[4](p[3](p[2](p[1](p[0](h)))))))), *[conv] * 8
    ),
    "the product of a tensor with itself": model(lambda p, h: p[0](h * h) + p[0](h).square(), conv),
    "a convolution whose weight is an activation": model(
        lambda p, h: F.conv2d(h, h[:, :, :3, :3]).mean() + p[0](h), conv
    ),
    "real and imaginary parts, negated by a conjugate": model(
        lambda p, h: p[0]((z := torch.complex(h, h * 2)).imag) + p[0](z.conj().imag) + p[0](z.real), conv
    ),
    "masks, indices and gather": model(
        lambda p, h: p[0](h.masked_fill(h < 0, 0.5).flatten(1).gather(1, torch.arange(600).flip(0).expand(4, -1))),
        head(),
    ),
    "fake quantization": model(
        lambda p, h: p[0](torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)), conv
    ),
    "a plain subclass of Tensor": model(lambda p, h: p[0](h.as_subclass(Named).relu()).relu().as_subclass(torch.Tensor),
                                        conv),
    "values of one element and of none": model(
        lambda p, h: p[0](h.mean().view(1, 1)).sum() + p[0](h[:0, :1, 0, 0]).sum() + h.mean().relu(),
        lambda: nn.Linear(1, 3),
    ),
}  # fmt: skip


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return TwoTensor(x.clone(), 2 * x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.a


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.a.clone()

    @staticmethod
    def backward(ctx, gradient):
        return TwoTensor(gradient, gradient)


class Named(torch.Tensor):
    pass


class Scaled(nn.Module):
    """Buffers and parameters as operands, and as inputs of layers."""

    def __init__(self):
        super().__init__()
        self.prompt, self.conv = nn.Parameter(torch.randn(1, 2, 10, 10)), conv(2)
        self.register_buffer("grid", torch.randn(1, 2, 10, 10))

    def forward(self, x):
        return self.conv(self.prompt) + self.conv(self.grid) + self.conv(x * self.grid)


UPSTREAM = ("the product of a tensor with itself", "a convolution whose weight is an activation")  # where errors go

for name, build in LOOPS.items():
    situation(name, build, "none" if name in UPSTREAM else "sum |d|")(plain_loop)
situation("parameters and buffers as inputs", Scaled)(plain_loop)
situation("a part of a larger data set as the batch", network)(
    lambda run: plain_loop(run, given=lambda: torch.cat(batches()).split(4))
)
situation("a sparse matrix times activations", lambda: Lambda(
    lambda p, x: p[1](torch.sparse.mm(torch.eye(4).to_sparse(), p[0](x.flatten(1)))), nn.Linear(200, 8),
    nn.Linear(8, 3)))(plain_loop)  # fmt: skip
situation("a sparse matrix of activations", lambda: Lambda(
    lambda p, x: torch.sparse.mm(p[0](x.flatten(1)).relu().to_sparse(), p[1].weight), nn.Linear(200, 8),
    nn.Linear(3, 8)), "none")(plain_loop)  # fmt: skip
situation("a compressed sparse batch", lambda: Lambda(
    lambda p, x: p[0](torch.sparse.mm(x, p[0].weight.T)), nn.Linear(3, 3)), "none")(
    lambda run: plain_loop(run, given=lambda: [torch.eye(3).to_sparse_csr()])
)  # fmt: skip
situation("a subclass that wraps two tensors", lambda: Lambda(
    lambda p, x: p[1](Unwrap.apply(Wrap.apply(p[0](x)).sigmoid())), conv(2), conv()), "none")(plain_loop)  # fmt: skip
situation("sequences of different lengths in a nested tensor", lambda: Lambda(
    lambda p, x: p[1](p[0](torch.nested.as_nested_tensor([x[0, 0], x[1, 0, :5]], layout=torch.jagged)).relu())
    .values(), nn.Linear(10, 6), nn.Linear(6, 3)), "none")(plain_loop)  # fmt: skip
situation("oneDNN's own layout", lambda: Lambda(
    lambda p, x: p[1](p[0](x).to_mkldnn().relu().to_dense()), conv(2), conv()), "none")(plain_loop)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_storage_of_this_kind_gets_its_gradients_and_its_bytes_are_the_truth(name):
    check(SITUATIONS[name])


def records():
    """What records exist now, beside those that existed before the last gc.freeze()."""
    return [found for found in gc.get_objects() if type(found) is Encoded]


@pytest.fixture
def fresh():
    """`records` finds this test's own."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("name", "count"), [
    ("a square and its transpose", 1), ("an expanded tensor beside the one it repeats", 1), ("expanded samples", 1),
    ("permuted dimensions", 2),  # linear saves a copy of its own
    ("a view, flattened", 1), ("a detached alias", 1),
    ("three convolutions on one input", 1), ("ReLU in place on a convolution's result", 2),
    ("one ReLU for a convolution, a pool and a linear layer", 2),  # the pool's indices are the second
    ("two halves of a storage, each for a convolution", 2), ("a deep chain of equal sizes", 8),
    ("real and imaginary parts, negated by a conjugate", 3),
])  # fmt: skip
def test_a_storage_has_as_many_records_as_it_has_contents(fresh, name, count):
    torch.manual_seed(0)
    net = LOOPS[name]()
    with comet_core.attach(net, None, controller="fixed", error_bound=BOUND, tune_allocator=False) as session:
        for batch in batches(2):  # the first iteration learns who shares a ReLU's result
            output = net(batch)
            found = len(records())
            loss_of(output).backward()
            del output
            session.step()
    assert found == count


def test_an_expanded_input_is_stored_without_its_repetitions(fresh):
    net = Lambda(lambda p, x: p[1](p[0](x).expand(64, -1, -1, -1)), conv(2), conv())
    with comet_core.attach(net, None, controller="fixed", error_bound=BOUND, tune_allocator=False) as session:
        loss_of(net(batches(1, size=1)[0])).backward()
        step = session.step()
    assert step.saved_bytes == 6 * 100 * 4
    assert step.held_bytes < step.saved_bytes


def test_norms_whose_channels_are_other_elements_of_one_storage_keep_their_own_bounds():
    """One view's channel 0 is wide, the other's narrow: a bound for the first must not serve the second."""
    norms = [nn.BatchNorm1d(64, affine=False, eps=1e-30) for _ in range(2)]
    net = Lambda(lambda p, x: p[1](h := p[0](x)) + p[2](h.T), nn.Linear(64, 64, bias=False), *norms)
    net.parts[0].weight = nn.Parameter(torch.eye(64))
    batch = torch.randn(64, 64) * torch.logspace(0, -6, 64)  # columns of all sizes
    with comet_core.attach(net, None, norm_budget=0.2, collect_every=1, tune_allocator=False) as session:
        for _ in range(2):
            net.zero_grad()
            loss_of(net(batch)).backward()
            session.step()
        first, second = [node._saved_input for node, _ in net(batch).grad_fn.next_functions]
    for tensor, true in ((first, batch), (second, batch.T)):
        assert ((tensor - true).abs().amax(0) <= true.std(0, correction=0)).all()


@pytest.mark.parametrize("codec", ["lossless", "error_bounded"])
def test_what_was_changed_in_place_since_is_another_record(fresh, codec):
    """Plain autograd refuses to go back here; with the old content stored there is no reason to."""
    net = Lambda(lambda p, x: p[1](h := p[0](x)) + p[2](h.mul_(0)), conv(2), conv(), conv())
    batch = batches(1, size=16)[0]
    options = {"controller": "fixed", "error_bound": BOUND, "codec": codec}
    with comet_core.attach(net, None, tune_allocator=False, **options):
        output = net(batch)
        assert len(records()) == 2
        loss_of(output).backward()
    assert net.parts[1].weight.grad.abs().min() > 0 and not net.parts[2].weight.grad.any()


def test_an_address_that_a_record_set_free_is_used_again_and_not_mistaken_for_the_old_tensor():
    net = LOOPS["a deep chain of equal sizes"]()
    addresses, tensors = [], []

    def note(module, args):
        addresses.append(args[0].data_ptr())
        tensors.append(weakref.ref(args[0]))

    for part in net.parts:
        part.register_forward_pre_hook(note)
    batch = batches(1)[0]
    with comet_core.attach(net, None, controller="fixed", error_bound=BOUND, tune_allocator=False):
        loss_of(net(batch)).backward()
    assert len(set(addresses)) < len(addresses)
    assert all(reference() is None for reference in tensors[1:])


@pytest.mark.parametrize("codec", ["lossless", "error_bounded"])
def test_when_all_savers_are_packed_the_original_storage_is_free(codec):
    net = network()
    references, sizes = [], []

    def note(module, args, output):
        references.append(StorageWeakRef(output.untyped_storage()))
        sizes.append(output.untyped_storage().nbytes())

    for layer in net:
        layer.register_forward_hook(note)
    with comet_core.attach(net, None, codec=codec, tune_allocator=False) as session:
        output = net(batches(1, size=32)[0])
        large = [reference for reference, size in zip(references, sizes, strict=True) if size > 4096]
        assert len(large) == 6 and all(reference.expired() for reference in large)
        assert {keeper.why for storage in session.audit() for keeper in storage.keepers} <= {
            "it is the batch", "a record would not be smaller",
        }  # fmt: skip
    del output
