"""Solutions to the exercises of notebook 60."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch

# %% 60.1 the tests know one dtype, one layout and numbers near zero
planted = ("x_ptr + row * stride_m + cols * stride_n", "x_ptr + row * stride_m + cols")


# %% 60.2 each line is there for a room of the museum
def tests(op):
    torch.manual_seed(0)
    wide = torch.randn(6, 40)
    inputs = [
        torch.randn(1, 1),
        torch.randn(5, 7),  # padding
        torch.randn(7, 5).t(),  # a view
        wide[:, 3:24:2],
        torch.randn(130, 3),  # more rows than a small test has
        torch.randn(3, 1500),  # longer than one tile
        torch.full((2, 5), 200.0) + torch.randn(2, 5),  # exp overflows from 89 on
        torch.tensor([[1.0, torch.nan, 2.0], [0.0, 1.0, 2.0]]),
        1000 * torch.randn(4, 9).half(),  # 100 times as much is above 65504
    ]
    for x in inputs:
        for scale in (0.5, -2.0) if x.dtype == torch.float32 else (100.0,):
            compare(op, x, scale)


def compare(op, x, scale):
    x = x.detach().requires_grad_()
    y, right = op(x, scale), torch.softmax(scale * x.double(), dim=1)
    tolerance = 1e-4 if x.dtype == torch.float32 else 1e-2
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(y, right, **close)
    assert y.dtype == x.dtype
    for dy in (torch.randn(y.shape).to(y.dtype), torch.ones(1).to(y.dtype).expand(y.shape)):
        before = dy.clone()
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (dx_right,) = torch.autograd.grad(right, x, dy.double(), retain_graph=True)
        torch.testing.assert_close(dx, dx_right, **close | {"atol": tolerance * abs(scale)})
        assert torch.equal(dy, before), "the incoming gradient was changed"


# %% 60.3 halve while that fails, then take one away at a time
def shrink(fails, shape):
    shape = tuple(shape)
    step = [max(1, n // 2) for n in shape]
    while True:
        for k in range(2):
            smaller = list(shape)
            smaller[k] -= step[k]
            if smaller[k] >= 1 and fails(tuple(smaller)):
                shape = tuple(smaller)
                step[k] = max(1, min(step[k], shape[k] // 2))
                break
            if step[k] > 1:
                step[k] //= 2
                break
        else:
            return shape
