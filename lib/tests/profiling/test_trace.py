"""Converting profiles to events: a trace as written on a GPU, and real profiles."""

import json

from lib import machine, profiling
from lib.profiling import cost as bill
from lib.profiling import events as ev
from lib.profiling import trace as kineto
from lib.recorded import notebooks
from lib.recorded.results import ROOT
from lib.tests.profiling.profiles import PAGEABLE, gpu_trace, record

import nbformat
import pytest
import torch


@pytest.fixture
def events():
    """Of the trace by hand."""
    return kineto.from_trace(gpu_trace())


def of(kind, events):
    return [e for e in events if e["kind"] == kind]


def test_events_are_well_formed_and_survive_json(events):
    assert json.loads(json.dumps(ev.checked(events))) == events
    assert [e["start_us"] for e in events] == sorted(e["start_us"] for e in events)


def test_time_starts_with_the_step_and_what_was_before_is_left_out(events):
    assert (ev.step_of(events)["start_us"], ev.step_of(events)["end_us"]) == (0, 100)
    assert "aten::empty" not in {e["name"] for e in events}
    assert [e["name"] for e in of("region", events)] == ["forward"]


def test_ops_know_the_op_around_them_and_their_own_time(events):
    ops = {e["name"]: e for e in of("op", events)}
    names = "linear addmm item _local_scalar_dense mm".split()
    assert list(ops) == [f"aten::{name}" for name in names]
    assert ops["aten::addmm"]["outer"] == "aten::linear"
    assert (ops["aten::linear"]["self_us"], ops["aten::addmm"]["self_us"]) == (3, 3)
    assert (ops["aten::linear"]["thread"], ops["aten::mm"]["thread"]) == (0, 1)


def test_work_of_the_device_knows_the_op_that_queued_it(events):
    work = [(e["kind"], e["name"], e["op"], e["stream"]) for e in ev.on_device(events)]
    assert work == [
        ("kernel", "Kernel2", "aten::linear", 7),
        ("copy", PAGEABLE, "aten::item", 7),
        ("kernel", "triton_poi_fused_add_0", "aten::mm", 7),
    ]
    assert of("copy", events)[0]["bytes"] == 4


def test_calls_of_the_runtime_know_op_thread_and_copy(events):
    calls = {e["name"]: e for e in of("runtime", events)}
    copy, launch = calls["cudaMemcpyAsync"], calls["cuLaunchKernelEx"]
    assert (copy["op"], copy["outer"]) == ("aten::_local_scalar_dense", "aten::item")
    assert (copy["copies"], copy["bytes"]) == (PAGEABLE, 4)
    assert (launch["op"], launch["thread"]) == ("aten::mm", 1)
    assert (calls["cudaDeviceSynchronize"]["op"], calls["cudaDeviceSynchronize"]["thread"]) == (
        "",
        0,
    )


def test_the_innermost_record_of_python_gives_the_line(events):
    calls = {e["name"]: e for e in of("runtime", events)}
    assert calls["cudaStreamSynchronize"]["where"] == "model.py:9 forward"
    assert calls["cudaLaunchKernel"]["where"] == ""  # it does not wait


def test_memory_and_nodes_of_the_backward_pass(events):
    assert [(e["device"], e["bytes"], e["total_bytes"]) for e in of("memory", events)] == [
        ("cuda", 512, 2048),
        ("cpu", 64, 64),
    ]
    assert [(e["name"], e["thread"]) for e in of("engine", events)] == [("MmBackward0", 1)]


def test_a_wait_in_the_backward_pass_names_the_node():
    trace = gpu_trace()
    args = {"External id": 7}
    trace["traceEvents"].append(record("cuda_runtime", "cudaStreamSynchronize", 57, 2, 2, **args))
    last = [e for e in kineto.from_trace(trace) if e["name"] == "cudaStreamSynchronize"][-1]
    assert (last["op"], last["where"]) == ("aten::mm", "backward, MmBackward0")


def test_a_wait_outside_of_any_op_has_a_function_too():
    trace = gpu_trace()
    trace["traceEvents"].append(record("cuda_runtime", "cudaDeviceSynchronize", 32, 2))
    events = kineto.from_trace(trace)
    first = next(e for e in events if e["name"] == "cudaDeviceSynchronize")
    assert (first["op"], first["outer"]) == ("", "")
    assert first["where"] == "model.py:7 forward, somewhere below"


def test_a_wait_from_a_thread_nobody_knows_is_of_the_step():
    trace = gpu_trace()
    trace["traceEvents"].append(record("cuda_runtime", "cudaDeviceSynchronize", 32, 2, tid=-7))
    events = kineto.from_trace(trace)
    first = next(e for e in events if e["name"] == "cudaDeviceSynchronize")
    assert (first["thread"], first["where"]) == (0, "model.py:7 forward, somewhere below")


def test_a_trace_of_someone_else_is_a_step_from_first_to_last():
    trace = gpu_trace()
    names = ("aten::linear", "aten::addmm", "triton_poi_fused_add_0")
    trace["traceEvents"] = [r for r in trace["traceEvents"] if r["name"] in names]
    events = kineto.from_trace(trace)
    assert ev.step_of(events)["end_us"] == 108
    assert len(events) == 4


def test_an_empty_trace_is_refused():
    with pytest.raises(ValueError, match="holds no events"):
        kineto.from_trace({"traceEvents": []})


def test_only_a_profile_is_taken():
    with pytest.raises(TypeError, match="the profile that profiled.fn. returns, got list"):
        kineto.events_of([])


# --- real profiles ------------------------------------------------------------------------------------------


@pytest.fixture
def training():
    """A step of training, as a function without arguments."""
    model = torch.nn.Linear(8, 1, device=machine.device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 8, device=machine.device())

    def step():
        with profiling.region("forward"):
            loss = model(x).square().mean()
        with profiling.region("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def test_a_real_step(training):
    events = ev.checked(kineto.events_of(profiling.profiled(training, stack=True, memory=True)))
    assert json.loads(json.dumps(events)) == events
    regions = [e["name"] for e in of("region", events) if e["depth"] == 0]
    assert regions[:2] == ["forward", "backward"]
    assert {"aten::linear", "aten::item"} <= {e["name"] for e in of("op", events) if not e["outer"]}
    assert any(
        "MmBackward" in e["name"] or "AddmmBackward" in e["name"] for e in of("engine", events)
    )
    assert of("memory", events)
    assert min(e["end_us"] for e in events) >= 0
    for e in of("op", events):
        assert -0.01 <= e["self_us"] <= e["end_us"] - e["start_us"] + 0.01


def test_without_options_there_are_no_lines_and_no_memory(training):
    events = kineto.events_of(profiling.profiled(training))
    assert not of("memory", events)
    assert not any(".py" in e.get("where", "") for e in events)


def test_self_times_are_those_of_the_profiler(training):
    profile = profiling.profiled(training)
    ours = sum(
        e["self_us"] for e in of("op", kineto.events_of(profile)) if e["name"] == "aten::addmm"
    )
    theirs = sum(e.self_cpu_time_total for e in profile.events() if e.name == "aten::addmm")
    assert ours == pytest.approx(theirs, abs=0.5)


@pytest.mark.gpu
def test_a_real_step_on_a_gpu(training):
    events = kineto.events_of(profiling.profiled(training, stack=True, memory=True))
    kernels = of("kernel", events)
    assert kernels
    assert {"aten::linear"} <= {e["op"] for e in kernels}
    waits = ev.waits(events)
    assert [e["op"] for e in waits] == ["aten::_local_scalar_dense"]
    assert "loss.item()" in waits[0]["where"]
    assert {e["device"] for e in of("memory", events)} >= {"cuda"}
    assert all(e["start_us"] >= 0 for e in kernels)


@pytest.mark.gpu
def test_every_kernel_on_a_gpu_is_found(training):
    profile = profiling.profiled(training)
    theirs = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    theirs = [e for e in theirs if not getattr(e, "is_user_annotation", False)]
    assert len(ev.on_device(kineto.events_of(profile))) == len(theirs)


@pytest.mark.gpu
def test_bytes_of_copies_on_a_gpu():
    host = torch.randn(1000)
    events = kineto.events_of(profiling.profiled(lambda: host.cuda()))
    assert [(e["name"], e["bytes"]) for e in of("copy", events)] == [
        ("Memcpy HtoD (Pageable -> Device)", 4000)
    ]


# --- the line of Python --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "readers"),
    [
        ("/tmp/ipykernel_12/345.py", True),
        ("train.py", True),
        (f"{ROOT}/lib/dlrm/model.py", True),
        ("lib/dlrm/model.py", True),
        (f"{ROOT}/lib/profiling/capture.py", False),
        ("lib/profiling/capture.py", False),
        ("torch/optim/adam.py", False),
        (torch.__file__, False),
        ("threading.py", False),
        ("<frozen importlib>", False),
        ("/tmp/torchinductor_me/ab/cab.py", False),
    ],
)
def test_whose_code_a_file_is(file, readers):
    assert kineto.is_readers(file) == readers


@pytest.mark.parametrize(
    ("cat", "name", "line"),
    [
        ("user_annotation", "line of Python /tmp/ipykernel_12/345.py:3 step", "cell:3 step"),
        ("user_annotation", "line of Python /code/of/a/reader/mine.py:3 <lambda>", "mine.py:3 <lambda>"),
        ("user_annotation", f"line of Python {ROOT}/lib/profiling/cost.py:1 f", "lib/profiling/cost.py:1 f: "),
        ("user_annotation", "forward", ""),
        ("python_function", "/tmp/ipykernel_12/345.py(3): step", "cell:3 step, somewhere below"),
        ("python_function", "torch/optim/adam.py(3): step", ""),
        ("python_function", "<built-in method item of Tensor object at 0x7f>", ""),
        ("cpu_op", "aten::item", ""),
    ],
)  # fmt: skip
def test_lines_are_shown_without_folders(cat, name, line):
    shown = kineto.line_of({"cat": cat, "name": name})
    assert shown.startswith(line) and bool(shown) == bool(line)
    assert len(shown) <= len("lib/profiling/cost.py:1 f: ") + 60


def places_of(fn):
    return [
        row["where"] for row in bill.syncs(kineto.events_of(profiling.profiled(fn, stack=True)))
    ]


def test_the_line_of_each_wait():
    x = torch.ones(3, device=machine.device())

    def step():
        total = (x + 1).sum().item()  # line 1
        if x[0] > 0:  # line 2
            torch.unique(x)  # deep in torch
        return total

    places = places_of(step)
    assert all(where.startswith("lib/tests/profiling/test_trace.py:") for where in places)
    lines = {where.partition(" step: ")[2] for where in places}
    code = ["total = (x + 1).sum().item()  # line 1", "if x[0] > 0:  # line 2"]
    assert lines == {*code, "torch.unique(x)  # deep in torch"}


def test_a_wait_in_a_function_of_the_backward_pass_names_its_node():
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * dy.sum().item()

    x = torch.ones(3, device=machine.device(), requires_grad=True)
    (where,) = places_of(lambda: Waits.apply(x).sum().backward())
    assert where.endswith(" · backward, WaitsBackward")


def test_lines_leave_compiled_code_in_one_piece():
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(lambda x: (x.sin() + 1).relu(), backend=backend)
    x = torch.ones(3, device=machine.device())
    profiling.profiled(lambda: compiled(x), stack=True)
    assert all(graph == graphs[0] for graph in graphs)


CODE = """from lib import machine, profiling
from lib.profiling import cost as bill
import torch
def step():
    return torch.ones(3, device=machine.device()).sum().item()
[row["where"] for row in bill.syncs(profiling.events_of(profiling.profiled(step, stack=True)))]
"""


def test_in_a_notebook_the_cell_is_named():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)])
    notebooks.execute(notebook, ROOT)
    (output,) = [o for o in notebook.cells[0].outputs if o.output_type == "execute_result"]
    line = "['cell:5 step: return torch.ones(3, device=machine.device()).sum().item()']"
    assert output.data["text/plain"] == line
