# %% [markdown]
# # Solutions · 02 Measure time
#
# One answer to each exercise; others are as right. The verdicts are the notebook's own.

# %%
import statistics

from lib.exercises import check

import torch

# %% [markdown]
# ## 02.1 Is B really faster than A?
#
# The middle of B has to lie below the middle of A, the edges of each left out. `quantiles(n=5)` cuts at 20, 40,
# 60 and 80 %.


# %%
def really_faster(a_us, b_us):
    if min(len(a_us), len(b_us)) < 10:
        return False
    p20_of_a = statistics.quantiles(a_us, n=5)[0]
    p80_of_b = statistics.quantiles(b_us, n=5)[3]
    return p80_of_b < p20_of_a


check("02.1", really_faster)

# %% [markdown]
# ## 02.2 Effective bandwidth, counted honestly
#
# Each input once, each output once, whatever a version does in between. The bias has N elements and is counted
# once: that every row reads it again from a cache is the version's business.


# %%
def bandwidth_gbps(op, m, n, itemsize, time_us):
    elements = {
        "gelu": 2 * m * n,
        "add": 3 * m * n,
        "bias_relu": 2 * m * n + n,
        "row_sum": m * n + m,
        "softmax": 2 * m * n,
    }
    return elements[op] * itemsize / time_us / 1e3


check("02.2", bandwidth_gbps)

# %% [markdown]
# ## 02.3 Write a stopwatch
#
# A warm-up run, waited for. Then each run has its own events, recorded behind the flush of L2. The flush also
# keeps the device busy, so that the gap in which the host launches is not counted. The median ignores the slow
# runs.


# %%
def time_us(run, gpu):
    run()
    gpu.synchronize()
    times = []
    for _ in range(100):
        gpu.flush_l2()
        start, end = gpu.event(), gpu.event()
        start.record()
        run()
        end.record()
        gpu.synchronize()
        times.append(start.elapsed_us(end))
    return statistics.median(times)


check("02.3", time_us)

# %% [markdown]
# ## 02.4 Is this version honest?
#
# The reference runs on a copy, before the candidate. The second round puts new numbers into the same memory,
# which neither kind of cached result survives.


# %%
def is_honest(candidate, reference, make_inputs):
    def same(a, b):
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)

    for shape in [(1, 1), (2, 3), (7, 13), (64, 64), (129, 781), (5, 2000)]:
        x = make_inputs(shape)
        for _ in range(2):
            before, want = x.clone(), reference(x.clone())
            if not same(candidate(x), want) or not same(x, before):
                return False
            x.copy_(make_inputs(shape))
    return True


check("02.4", is_honest)
