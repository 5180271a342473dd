"""Plausible wrong answers to the exercises of notebook 02: <answer>__<what is wrong>."""

import statistics

import torch

# --- 02.1 really_faster


def really_faster__compares_means(a_us, b_us):
    return statistics.mean(b_us) < statistics.mean(a_us)


def really_faster__compares_minima(a_us, b_us):
    return len(a_us) >= 10 and len(b_us) >= 10 and min(b_us) < min(a_us)


def really_faster__compares_medians_only(a_us, b_us):
    enough = len(a_us) >= 10 and len(b_us) >= 10
    return enough and statistics.median(b_us) < statistics.median(a_us)


def really_faster__three_runs_are_enough(a_us, b_us):
    return statistics.quantiles(b_us, n=5)[3] < statistics.quantiles(a_us, n=5)[0]


def really_faster__does_not_sort(a_us, b_us):
    enough = len(a_us) >= 10 and len(b_us) >= 10
    return enough and b_us[len(b_us) * 8 // 10] < a_us[len(a_us) * 2 // 10]


def _b_is_below_a(a_us, b_us):
    return statistics.quantiles(b_us, n=5)[3] < statistics.quantiles(a_us, n=5)[0]


def really_faster__counts_the_runs_of_a_alone(a_us, b_us):
    return len(a_us) >= 10 and _b_is_below_a(a_us, b_us)


def really_faster__counts_the_runs_of_b_alone(a_us, b_us):
    return len(b_us) >= 10 and _b_is_below_a(a_us, b_us)


def really_faster__counts_the_runs_of_both_together(a_us, b_us):
    return len(a_us) + len(b_us) >= 20 and _b_is_below_a(a_us, b_us)


def really_faster__nine_runs_are_enough(a_us, b_us):
    return min(len(a_us), len(b_us)) >= 9 and _b_is_below_a(a_us, b_us)


def _compares(b_fifths, a_fifths):
    """Whether so many fifths of the runs of B are below so many fifths of those of A, for ten runs or more."""

    def is_faster(a_us, b_us):
        b, a = statistics.quantiles(b_us, n=5), statistics.quantiles(a_us, n=5)
        return min(len(a_us), len(b_us)) >= 10 and b[b_fifths - 1] < a[a_fifths - 1]

    return is_faster


really_faster__p80_of_b_below_p40_of_a = _compares(4, 2)
really_faster__p80_of_b_below_p60_of_a = _compares(4, 3)
really_faster__p60_of_b_below_p20_of_a = _compares(3, 1)
really_faster__p60_of_b_below_p40_of_a = _compares(3, 2)


def _compares_quantiles(n):
    """Whether the last of the n-quantiles of B is below the first of A, for ten runs or more."""

    def is_faster(a_us, b_us):
        b, a = statistics.quantiles(b_us, n=n), statistics.quantiles(a_us, n=n)
        return min(len(a_us), len(b_us)) >= 10 and b[-1] < a[0]

    return is_faster


really_faster__quartiles = _compares_quantiles(4)
really_faster__thirds = _compares_quantiles(3)
really_faster__tenths = _compares_quantiles(10)


def really_faster__p80_of_b_below_the_median_of_a(a_us, b_us):
    enough = min(len(a_us), len(b_us)) >= 10
    return enough and statistics.quantiles(b_us, n=5)[3] < statistics.median(a_us)


def really_faster__equal_is_enough(a_us, b_us):
    enough = min(len(a_us), len(b_us)) >= 10
    return enough and statistics.quantiles(b_us, n=5)[3] <= statistics.quantiles(a_us, n=5)[0]


# --- 02.2 bandwidth_gbps

_FEWEST = {
    "gelu": lambda m, n: 2 * m * n,
    "add": lambda m, n: 3 * m * n,
    "bias_relu": lambda m, n: 2 * m * n + n,
    "row_sum": lambda m, n: m * n + m,
    "softmax": lambda m, n: 2 * m * n,
}


def bandwidth_gbps__reads_only(op, m, n, itemsize, time_us):
    reads = {"gelu": m * n, "add": 2 * m * n, "bias_relu": m * n + n, "row_sum": m * n}
    return reads.get(op, m * n) * itemsize / time_us / 1e3


def bandwidth_gbps__binary_gigabytes(op, m, n, itemsize, time_us):
    return _FEWEST[op](m, n) * itemsize / (time_us / 1e6) / 2**30


def bandwidth_gbps__bias_read_for_every_row(op, m, n, itemsize, time_us):
    elements = 3 * m * n if op == "bias_relu" else _FEWEST[op](m, n)
    return elements * itemsize / time_us / 1e3


def bandwidth_gbps__traffic_of_eager(op, m, n, itemsize, time_us):
    elements = 8 * m * n if op == "softmax" else _FEWEST[op](m, n)
    return elements * itemsize / time_us / 1e3


def bandwidth_gbps__elements_for_bytes(op, m, n, itemsize, time_us):
    return _FEWEST[op](m, n) / time_us / 1e3


# --- 02.3 time_us


def _events(run, gpu, n):
    run()
    times = []
    for _ in range(n):
        start, end = gpu.event(), gpu.event()
        start.record()
        run()
        end.record()
        gpu.synchronize()
        times.append(start.elapsed_us(end) - 5)  # the launch, known
    return times


def time_us__no_sync(run, gpu):
    run()
    gpu.synchronize()
    times = []
    for _ in range(100):
        begin = gpu.clock_us()
        run()
        times.append(gpu.clock_us() - begin)
    return statistics.median(times)


def time_us__no_warm_up(run, gpu):
    begin = gpu.clock_us()
    for _ in range(20):
        run()
    gpu.synchronize()
    return (gpu.clock_us() - begin) / 20


def time_us__host_clock(run, gpu):
    """No events, no flush: the launch counts, and what is in L2 stays there."""
    run()
    gpu.synchronize()
    times = []
    for _ in range(100):
        begin = gpu.clock_us()
        run()
        gpu.synchronize()
        times.append(gpu.clock_us() - begin)
    return statistics.median(times)


def time_us__no_flush(run, gpu):
    run()
    times = []
    for _ in range(100):
        gpu.busy(50)
        start, end = gpu.event(), gpu.event()
        start.record()
        run()
        end.record()
        gpu.synchronize()
        times.append(start.elapsed_us(end))
    return statistics.median(times)


def time_us__mean(run, gpu):
    return statistics.mean(_events(run, gpu, 100))


def time_us__three_trials(run, gpu):
    return statistics.median(_events(run, gpu, 3))


def time_us__minimum(run, gpu):
    return min(_events(run, gpu, 100))


def time_us__synchronize_before_only(run, gpu):
    run()
    times = []
    for _ in range(100):
        gpu.synchronize()
        begin = gpu.clock_us()
        run()
        times.append(gpu.clock_us() - begin)
    return statistics.median(times)


def time_us__events_not_waited_for(run, gpu):
    run()
    start, end = gpu.event(), gpu.event()
    start.record()
    run()
    end.record()
    return start.elapsed_us(end)


def _idle_before_each_run(us_of):
    def time_us(run, gpu):
        run()
        times = []
        for _ in range(100):
            gpu.flush_l2()
            gpu.synchronize()
            times.append(us_of(run, gpu))
        return statistics.median(times)

    return time_us


def _without_a_launch(run, gpu):
    begin = gpu.clock_us()
    run()
    gpu.synchronize()
    return gpu.clock_us() - begin - 5


def _from_the_return(run, gpu):
    run()
    returned = gpu.clock_us()
    gpu.synchronize()
    return gpu.clock_us() - returned


time_us__host_clock_less_the_launch = _idle_before_each_run(_without_a_launch)
time_us__from_the_return_to_the_end = _idle_before_each_run(_from_the_return)


def time_us__p20(run, gpu):
    run()
    times = []
    for _ in range(100):
        gpu.flush_l2()
        start, end = gpu.event(), gpu.event()
        start.record()
        run()
        end.record()
        gpu.synchronize()
        times.append(start.elapsed_us(end))
    return statistics.quantiles(times, n=5)[0]


# --- 02.4 is_honest

_SHAPES = [(1, 1), (7, 13), (64, 64), (129, 781)]


def _close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def is_honest__rejects_nan_of_the_reference(candidate, reference, make_inputs):
    for shape in _SHAPES:
        x = make_inputs(shape)
        if not torch.allclose(candidate(x), reference(x), rtol=1e-4, atol=1e-5):
            return False
    return True


def is_honest__error_greater_than_tolerance(candidate, reference, make_inputs):
    for shape in _SHAPES:
        x = make_inputs(shape)
        before = x.clone()
        want = reference(x.clone())
        if (candidate(x) - want).abs().max() > 1e-4 or not _close(x, before):
            return False
        x.copy_(make_inputs(shape))
        want = reference(x.clone())
        if (candidate(x) - want).abs().max() > 1e-4:  # NaN > 1e-4 is False
            return False
    return True


def is_honest__one_call(candidate, reference, make_inputs):
    for shape in _SHAPES:
        x = make_inputs(shape)
        before, want = x.clone(), reference(x)
        if not _close(candidate(x), want) or not _close(x, before):
            return False
    return True


def _on_shapes(shapes, **tolerance):
    def is_honest(candidate, reference, make_inputs):
        for shape in shapes:
            x = make_inputs(shape)
            for _ in range(2):
                before, want = x.clone(), reference(x.clone())
                if not torch.allclose(candidate(x), want, equal_nan=True, **tolerance):
                    return False
                if not _close(x, before):
                    return False
                x.copy_(make_inputs(shape))
        return True

    return is_honest


is_honest__one_shape = _on_shapes([(7, 13)], rtol=1e-4, atol=1e-5)
is_honest__narrow = _on_shapes(_SHAPES, rtol=1e-4, atol=1e-5)
is_honest__a_tenth_is_near = _on_shapes([*_SHAPES, (5, 2000)], rtol=0, atol=0.1)
is_honest__tolerance_of_bfloat16 = _on_shapes([*_SHAPES, (5, 2000)], rtol=8e-3, atol=1e-5)


def is_honest__powers_of_two(candidate, reference, make_inputs):
    for shape in [(8, 8), (64, 64)]:
        x = make_inputs(shape)
        for _ in range(2):
            before, want = x.clone(), reference(x)
            if not _close(candidate(x), want) or not _close(x, before):
                return False
            x.copy_(make_inputs(shape))
    return True


def is_honest__input_not_compared(candidate, reference, make_inputs):
    for shape in _SHAPES:
        x = make_inputs(shape)
        for _ in range(2):
            want = reference(x)
            if not _close(candidate(x), want):
                return False
            x.copy_(make_inputs(shape))
    return True


def is_honest__new_tensors_only(candidate, reference, make_inputs):
    for shape in _SHAPES:
        tensors = []
        for _ in range(2):
            tensors.append(make_inputs(shape))
            x = tensors[-1]
            before, want = x.clone(), reference(x)
            if not _close(candidate(x), want) or not _close(x, before):
                return False
    return True


def is_honest__trusts(candidate, reference, make_inputs):
    return True
