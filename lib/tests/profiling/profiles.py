"""Profiles for tests, written by hand: events and traces as a profiler writes them on a GPU."""

PAGEABLE = "Memcpy DtoH (Device -> Pageable)"
TO_DEVICE = "Memcpy HtoD (Pageable -> Device)"


def event(kind, start, end, name="", **more):
    """An event of `kind` with every key that it needs."""
    keys = {
        "op": {"thread": 0, "self_us": 1.0, "outer": "", "where": ""},
        "runtime": {"thread": 0, "op": "", "outer": "", "where": ""},
        "region": {"thread": 0, "depth": 0},
        "engine": {"thread": 0},
        "kernel": {"stream": 7, "op": ""},
        "copy": {"stream": 7, "op": "", "bytes": 4},
        "set": {"stream": 7, "op": ""},
        "memory": {"device": "cuda"},
    }
    times = {"start_us": start, "end_us": end}
    return {"kind": kind, "name": name or kind, **times, **keys.get(kind, {}), **more}


def step(end=100.0):
    """The event of a step of 100 µs."""
    return event("step", 0.0, end, "one call")


def item(start, end, where="", thread=0):
    """The events of .item() in a profile on a GPU: two ops, a copy to pageable memory, the wait for it."""
    ops = {"op": "aten::_local_scalar_dense", "outer": "aten::item", "where": where}
    copied = {"copies": PAGEABLE, "bytes": 4}
    return [
        event("op", start, end, "aten::item", thread=thread),
        event("op", start, end, "aten::_local_scalar_dense", thread=thread, outer="aten::item"),
        event("runtime", start, start + 2, "cudaMemcpyAsync", thread=thread, **ops, **copied),
        event("runtime", start + 2, end, "cudaStreamSynchronize", thread=thread, **ops),
        event("copy", start + 1, start + 2, PAGEABLE, op="aten::item"),
    ]


def gpu_step():
    """100 µs: forward with two kernels and an .item(), backward in a thread of its own with one kernel."""
    return [
        step(),
        event("region", 0, 50, "forward"),
        event("region", 50, 95, "backward"),
        event("op", 2, 10, "aten::linear", self_us=3.0),
        event("op", 4, 9, "aten::addmm", outer="aten::linear"),
        event("runtime", 6, 8, "cudaLaunchKernel", op="aten::addmm", outer="aten::linear"),
        event("kernel", 8, 18, "gemm", op="aten::linear"),
        *item(20, 30, where="cell:3 step: loss.item()"),
        event("engine", 50, 90, "MmBackward0", thread=1),
        event("op", 52, 60, "aten::mm", thread=1),
        event("runtime", 55, 57, "cudaLaunchKernel", thread=1, op="aten::mm", outer="aten::mm"),
        event("kernel", 60, 110, "gemm", op="aten::mm"),
        event("runtime", 101, 111, "cudaDeviceSynchronize"),
    ]


def record(cat, name, ts, dur, tid=1, **args):
    """One line of a trace in Chrome's format; the clock of a trace starts anywhere."""
    times = {"ts": 1000.0 + ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, **times, "args": args}


def memory(ts, n_bytes, total, device_type):
    """A [memory] line; device_type 0 is a CPU, 1 a GPU."""
    args = {"Total Allocated": total, "Bytes": n_bytes, "Device Type": device_type, "Device Id": 0}
    return {"ph": "i", "name": "[memory]", "ts": 1000.0 + ts, "tid": 1, "args": args}


def gpu_trace():
    """A step with a launch, an .item() and a backward pass, as kineto writes it, noise around it included."""
    return {
        "baseTimeNanoseconds": 0,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            record("Trace", "PyTorch Profiler (0)", -50, 300),
            record("user_annotation", "ProfilerStep#1", -40, 200),
            record("cpu_op", "aten::empty", -20, 5, **{"External id": 1}),
            record("user_annotation", "one call", 0, 100),
            record("user_annotation", "forward", 1, 48),
            record("python_function", "model.py(7): forward", 1.5, 47),
            record("cpu_op", "aten::linear", 2, 8, **{"External id": 2}),
            record("cpu_op", "aten::addmm", 4, 5, **{"External id": 3}),
            record("cuda_runtime", "cudaLaunchKernel", 6, 2, **{"External id": 3, "correlation": 11}),
            record("kernel", "void cutlass::Kernel2<float>(int)", 8, 10, 7, correlation=11, stream=7),
            record("gpu_user_annotation", "forward", 8, 15, 7),
            record("user_annotation", "line of Python model.py:9 forward", 19.5, 11),
            record("cpu_op", "aten::item", 20, 10, **{"External id": 4}),
            record("cpu_op", "aten::_local_scalar_dense", 20.5, 9.4, **{"External id": 5}),
            record("cuda_runtime", "cudaMemcpyAsync", 21, 2, **{"External id": 5, "correlation": 12}),
            record("gpu_memcpy", PAGEABLE, 22, 1, 7, correlation=12, stream=7, bytes=4),
            record("cuda_runtime", "cudaStreamSynchronize", 23, 6, **{"External id": 5}),
            record("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 50, 40, 2),
            record("cpu_op", "MmBackward0", 51, 38, 2, **{"External id": 6}),
            record("cpu_op", "aten::mm", 52, 8, 2, **{"External id": 7}),
            # The runtime numbers threads differently; the id of the op counts.
            record("cuda_driver", "cuLaunchKernelEx", 55, 2, 99, **{"External id": 7, "correlation": 13}),
            record("kernel", "triton_poi_fused_add_0", 60, 50, 7, correlation=13, stream=7),
            record("cuda_runtime", "cudaDeviceSynchronize", 101, 10, **{"correlation": 14}),
            memory(3, 512, 2048, device_type=1),
            memory(4, 64, 64, device_type=0),
        ],
    }  # fmt: skip
