"""Solutions to the exercises of notebook 05."""

# %%
import lib  # noqa: F401  before triton: with no GPU it switches the interpreter on

import torch


# %% 05.1 reset first: otherwise the ninth question about one function reaches the recompile limit
def graph_sizes(fn, *calls):
    sizes = []

    def counting(graph, example_inputs):
        sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    version = torch.compile(fn, backend=counting)
    for args in calls:
        version(*args)
    return sizes


# %% 05.2 a size is decided at compile time; a break in a helper splits its caller too; a loop is given up
n_graphs = (1, 2, 4, 0)


# %% 05.3 .item() gives a number without history, so the norm is a constant to autograd: detach it
def clip_in_one_graph(x, limit):
    norm = x.detach().norm()
    # x is multiplied once, by a factor chosen before: 0 * inf never happens
    return x * torch.where(norm > limit, limit / norm, 1.0)


# %% 05.4 a tensor's number is never guarded; the second length makes the first dimension dynamic
class Steady(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x):
        self.step += 1
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)
        return x + wave[:, None]
