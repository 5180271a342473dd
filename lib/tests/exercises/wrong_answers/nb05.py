"""Plausible wrong answers to the exercises of notebook 05: <answer>__<what is wrong>."""

from lib import machine
from lib.exercises import nb05

import torch

# --- 05.1 graph_sizes


def _compile_and_call(backend, fn, calls):
    torch.compiler.reset()
    version = torch.compile(fn, backend=backend)
    for args in calls:
        version(*args)


def graph_sizes__all_nodes(fn, *calls):
    sizes = []

    def backend(graph, example_inputs):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    _compile_and_call(backend, fn, calls)
    return sizes


def graph_sizes__functions_but_not_methods(fn, *calls):
    sizes = []

    def backend(graph, example_inputs):
        sizes.append(sum(n.op == "call_function" for n in graph.graph.nodes))
        return graph.forward

    _compile_and_call(backend, fn, calls)
    return sizes


def graph_sizes__sum_of_all(fn, *calls):
    return sum(nb05._graph_sizes(fn, *calls))


def graph_sizes__first_call_only(fn, *calls):
    return nb05._graph_sizes(fn, calls[0])


def graph_sizes__every_run(fn, *calls):
    sizes = []

    def backend(graph, example_inputs):
        def run(*args):
            sizes.append(sum(n.op.startswith("call") for n in graph.graph.nodes))
            return graph(*args)

        return run

    _compile_and_call(backend, fn, calls)
    return sizes


def graph_sizes__without_reset(fn, *calls):
    sizes = []

    def backend(graph, example_inputs):
        sizes.append(sum(n.op.startswith("call") for n in graph.graph.nodes))
        return graph.forward

    version = torch.compile(fn, backend=backend)
    for args in calls:
        version(*args)
    return sizes


_sizes = []


def graph_sizes__list_kept_from_before(fn, *calls):
    def backend(graph, example_inputs):
        _sizes.append(sum(n.op.startswith("call") for n in graph.graph.nodes))
        return graph.forward

    _compile_and_call(backend, fn, calls)
    return list(_sizes)


def graph_sizes__graph_not_run(fn, *calls):
    sizes = []

    def backend(graph, example_inputs):
        sizes.append(sum(n.op.startswith("call") for n in graph.graph.nodes))
        outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        return lambda *args: [torch.ones(4, 8)] * len(outputs)

    _compile_and_call(backend, fn, calls)
    return sizes


# --- 05.2 n_graphs

n_graphs__breaks_counted_instead = (0, 1, 2, 3)
n_graphs__a_size_breaks = (2, 2, 4, 0)
n_graphs__helper_without_its_caller = (1, 2, 2, 0)
n_graphs__one_graph_per_round = (1, 2, 4, 3)
n_graphs__only_one_number = 4


# --- 05.3 clip_in_one_graph


def clip_in_one_graph__still_breaks(x, limit):
    norm = x.norm().item()
    return x * (limit / norm) if norm > limit else x * 1


def clip_in_one_graph__gradient_through_the_norm(x, limit):
    return x * torch.clamp(limit / (x.norm() + 1e-12), max=1.0)


def clip_in_one_graph__chosen_too_late(x, limit):
    norm = x.detach().norm()
    return torch.where(norm > limit, x * (limit / norm), x)


def clip_in_one_graph__always_scaled(x, limit):
    return x * (limit / x.detach().norm().clamp_min(1e-12))


def clip_in_one_graph__element_by_element(x, limit):
    return x.clamp(-limit, limit)


def clip_in_one_graph__detached_altogether(x, limit):
    return x.detach() * torch.clamp(limit / x.detach().norm(), max=1.0)


def clip_in_one_graph__if_on_a_tensor(x, limit):
    norm = x.detach().norm()
    if norm > limit:
        return x * (limit / norm)
    return x * 1


def clip_in_one_graph__in_double(x, limit):
    norm = x.detach().double().norm()
    return x.double() * torch.where(norm > limit, limit / norm, 1.0)


@torch.compiler.disable
def _factor(x, limit):
    return min(1.0, limit / max(x.norm().item(), 1e-12))


def clip_in_one_graph__a_helper_kept_from_the_compiler(x, limit):
    return x * _factor(x, limit)


# --- 05.4 Steady


class Steady__as_it_was(nb05.Noisy):
    pass


class Steady__marks_inside(nb05.Noisy):
    def forward(self, x):
        torch._dynamo.mark_dynamic(x, 0)
        return super().forward(x)


class Steady__never_moves(torch.nn.Module):
    def forward(self, x):
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1)
        return x + wave[:, None]


class Steady__tensor_made_from_the_int(torch.nn.Module):
    step = 0

    def forward(self, x):
        self.step += 1
        step = torch.full((), self.step, device=x.device)
        return x + torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * step)[:, None]


class Steady__step_shared_by_all_modules(torch.nn.Module):
    step = torch.zeros(())

    def forward(self, x):
        self.step += 1
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step.to(x.device))
        return x + wave[:, None]


class Steady__one_step_late(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x):
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)
        self.step += 1
        return x + wave[:, None]


class Steady__step_in_double(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.step += 1
        return x + torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)[:, None]


class Steady__kept_from_the_compiler(nb05.Noisy):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


class Steady__a_helper_kept_from_the_compiler(nb05.Noisy):
    @torch.compiler.disable
    def wave(self, x):
        self.step += 1
        return torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)

    def forward(self, x):
        return x + self.wave(x)[:, None]


class Steady__one_version_per_length(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x):
        self.step += 1
        wave = torch.stack([torch.sin(k + 0.1 * self.step) for k in range(x.shape[0])]).to(x.device)
        return x + wave[:, None]


class Steady__prints_its_step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x):
        self.step += 1
        print(self.step)
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)
        return x + wave[:, None]


class Steady__step_made_at_the_first_call(torch.nn.Module):
    step = None

    def forward(self, x):
        self.step = torch.ones((), device=x.device) if self.step is None else self.step + 1
        return x + torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)[:, None]


class Steady__step_not_registered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.step = torch.zeros((), device=machine.device())

    def forward(self, x):
        self.step += 1
        wave = torch.sin(torch.arange(x.shape[0], device=x.device) + 0.1 * self.step)
        return x + wave[:, None]


class Steady__another_tensor_registered(Steady__step_not_registered):
    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.full((), 0.1))


class Steady__step_not_saved(Steady__step_not_registered):
    def __init__(self):
        super().__init__()
        del self.step
        self.register_buffer("step", torch.zeros(()), persistent=False)


Steady__a_module_and_no_class = nb05.Noisy()


def clip_in_one_graph__a_small_number_beside_the_norm(x, limit):
    return x * torch.clamp(limit / (x.norm().detach() + 1e-6), max=1.0)
