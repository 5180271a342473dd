"""What is particular to softmax: traffic, rows of every length and kind, machine code, its CUDA code."""

import functools
import re
import sys

from lib import machine
from lib.measure import registry
from lib.measure.check import check_against_float64
from lib.nogpu import cuda
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops import _host as host
from lib.ops import softmax
from lib.tests.ops import battery

import pytest
import torch
import triton.language as tl

OP = registry.find("softmax")
versions = pytest.mark.parametrize("version", ["triton", "cuda"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
INF, NAN = float("inf"), float("nan")

# Short rows, several to a program; whole tiles; widths that put rows off 16-byte boundaries; one row a program.
IN_ONE_TILE = [(1000, 3), (33, 16), (96, 640), (99, 781), (17, 2049), (4, 8192), (3, 16001)]
IN_PARTS = [(2, 40000), (3, 70001)]
SHORT = (1, 2, 15, 16, 17, 31, 32, 33, 1023, 1024, 1025)
LONG = (8191, 16385, 32767, 32768, 32769, 65537)
# Rows that small plans launch as long ones are launched; and those of the plan that is chosen for them.
CHOSEN, *FORCED = None, *(plan for plan, _ in OP.plans.values())
any_plan = pytest.mark.parametrize("plan", [CHOSEN, *FORCED], ids=lambda p: p.way if p else "")


def of(module, version, plan=None):
    """softmax_triton or softmax_cuda of a module; a mutant has no CUDA code beside it."""
    if version == "cuda" and (module is not softmax or cuda.why_no_cuda()):
        pytest.skip("there is no CUDA code, or nothing that builds it")
    if version == "cuda" and plan:
        pytest.skip("a plan is for Triton")
    run = getattr(module, f"softmax_{version}")
    return functools.partial(run, plan=plan) if plan else run


def check(run, x, name=None, eager=softmax.softmax_eager, **options):
    check_against_float64(run, eager, x, name=name, **options)


def rows(shape, dtype=torch.float32, scale=3):
    generator = torch.Generator(machine.device()).manual_seed(0)
    x = scale * torch.randn(shape, device=machine.device(), generator=generator)
    return x.to(dtype).requires_grad_()


# --- traffic and launches ----------------------------------------------------------------------------------


def test_short_rows_share_a_program():
    x = rows((1024, 16)).detach()
    assert count_traffic(lambda: softmax.softmax_triton(x)).programs <= 1024 / 16


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*IN_ONE_TILE, *IN_PARTS], ids=str)
def test_one_kernel_on_a_gpu(shape):
    from lib.measure import bench

    x = rows(shape).detach()
    for version in (softmax.softmax_triton, softmax.softmax_cuda)[: 1 if cuda.why_no_cuda() else 2]:
        names = bench.kernels_launched(lambda version=version: version(x))
        ours = [n for n in names if "softmax" in n or "per_row" in n]
        assert len(ours) == 1, names
        # parts of a row need a counter, which something has to set to zero
        assert len(names) <= 2, names


# --- rows of every length and kind -------------------------------------------------------------------------


@versions
@both_dtypes
@pytest.mark.parametrize("n_cols", SHORT + LONG)
def test_every_length(module, version, dtype, n_cols):
    check(of(module, version), rows((2, n_cols), dtype))


@versions
@any_plan
@pytest.mark.parametrize("n_cols", [1, 3, 40, 97])
def test_kinds_of_rows(module, version, plan, n_cols):
    _kinds_of_rows(of(module, version, plan), n_cols)


@versions
@pytest.mark.parametrize("n_cols", [781, 1300, 40000])
def test_kinds_of_wide_rows(module, version, n_cols):
    _kinds_of_rows(of(module, version), n_cols)


def _kinds_of_rows(run, n_cols):
    """NaN, +inf and rows of -inf are NaN all over; -inf beside numbers is 0; equal numbers share."""
    x = rows((11, n_cols)).detach()
    x[0] = -INF
    x[1, n_cols // 2] = NAN
    x[2, -1] = INF
    x[3, : n_cols - 1] = -INF
    x[4] = torch.finfo(torch.float32).max
    x[5] = torch.finfo(torch.float32).min
    x[6, : n_cols // 2] = -INF
    x[7] = -INF
    x[7, 0] = NAN
    x[8, n_cols // 2 + 1 :] = -INF
    x[9], x[9, 0] = -INF, INF
    y = run(x)
    assert y[[0, 1, 2, 7, 9]].isnan().all()
    assert torch.equal(y[3], torch.arange(1 - n_cols, 1, device=x.device).eq(0).to(y.dtype))
    torch.testing.assert_close(y[[4, 5]], torch.full_like(y[[4, 5]], 1 / n_cols))
    assert not y[6, : n_cols // 2].any()
    check(run, x)


@versions
@any_plan
@pytest.mark.parametrize("offset", [-1e4, 90.0, 1e4])
def test_large_numbers_do_not_overflow(module, version, plan, offset):
    """exp(90) is more than float32 has; only differences to the maximum may reach exp."""
    run = of(module, version, plan)
    for n_cols in (40, 100, 113):
        x = (
            rows((5, n_cols)).detach().round()
        )  # so that nothing is rounded when the offset is added
        torch.testing.assert_close(run(x + offset), run(x))
        x[0, -1], x[1, 0], x[2, n_cols // 2] = 200.0, 200.0, 200.0
        check(run, x, f"{n_cols} columns, one large number")


@versions
@any_plan
@pytest.mark.parametrize("n_cols", [40, 113])
def test_rounded_once(module, version, plan, n_cols):
    """From bfloat16 to bfloat16 by way of float32 all along."""
    x = rows((3, n_cols), torch.bfloat16).detach()
    want = softmax.softmax_eager(x.double())
    error = (of(module, version, plan)(x).double() - want).abs() - 0.51 * 2**-7 * want
    assert error.max() < 1e-6 * want.max()


@versions
@any_plan
def test_float64_is_exact(module, version, plan):
    check(of(module, version, plan), rows((3, 50), torch.float64), slack=1e-13)


def test_long_rows_of_float64_are_exact(module):
    check(module.softmax_triton, rows((3, 33000), torch.float64), slack=1e-13)


@versions
def test_gradients_sum_to_zero(module, version):
    """A constant added to a row changes nothing: the gradients of a row cancel, and a constant dy has none."""
    run = of(module, version)
    for shape, dy, least in [((33, 781), torch.randn, 1e-5), ((5, 100), torch.ones, 1e-6)]:
        x = rows(shape)
        y = run(x)
        torch.testing.assert_close(y.sum(-1), torch.ones_like(y[:, 0]))
        y.backward(dy(shape, device=x.device))
        assert x.grad.sum(-1).abs().max() < least
    assert x.grad.abs().max() < 1e-6


@versions
@any_plan
@pytest.mark.parametrize("n_cols", [40, 41])
def test_rows_that_begin_anywhere(module, version, plan, n_cols):
    """Sliced out of a wider tensor: x, y and dy stand differently on 16-byte boundaries, row by row."""
    _rows_that_begin_anywhere(of(module, version, plan), n_cols, (1, 4) if plan else range(9))


@versions
@pytest.mark.parametrize("n_cols", [1300, 1301, 16500, 40000])
def test_wide_rows_that_begin_anywhere(module, version, n_cols):
    _rows_that_begin_anywhere(of(module, version), n_cols, (1, 4) if n_cols > 2000 else range(9))


def _rows_that_begin_anywhere(run, n_cols, starts):
    wide = rows((5, n_cols + 9), torch.bfloat16).detach()
    for start in starts:
        x = wide[:, start : start + n_cols]
        check(run, x, f"from column {start}")
        check(run, x[:1].expand(3, n_cols), f"from column {start}, expanded")
    dy, grads = torch.randn(5, n_cols + 9, device=wide.device)[:, 3 : n_cols + 3], []
    for version in (run, softmax.softmax_eager):
        x = rows((5, n_cols))
        grads += torch.autograd.grad(version(x), x, dy)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


@any_plan
def test_rows_far_apart(module, plan):
    """Offsets past 2**31, of x and of dy, whatever the way to launch; at a width that no way copies."""
    run = of(module, "triton", plan)
    storage = torch.empty(2**31 + 100, dtype=torch.float16, device=machine.device())
    far = storage.as_strided((3, 96), (2**30, 1)).copy_(rows((3, 96)).detach())
    check(run, far.detach())
    grads = []
    for version in (run, softmax.softmax_eager):
        x = rows((3, 96), torch.float16)
        dy = far if version is run else far.contiguous()
        grads += torch.autograd.grad(version(x), x, dy)
    torch.testing.assert_close(*grads, rtol=0.03, atol=1e-5)


@versions
@both_dtypes
def test_any_dimension(module, version, dtype):
    """As torch.softmax takes it: from either end, sizes of 1 and 0 included."""
    x = rows((3, 17, 1, 5), dtype)
    for dim in range(-4, 4):
        chosen = functools.partial(of(module, version), dim=dim)
        check(chosen, x, str(dim), eager=functools.partial(softmax.softmax_eager, dim=dim))
    y = of(module, version)(rows((3, 0, 5), dtype), 0)
    assert y.shape == (3, 0, 5)


OPTIONS = [{"scale": 1 / 3}, {"causal": True}, {"scale": -0.7, "causal": True}, {"scale": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@any_plan
@pytest.mark.parametrize("n_cols", [16, 75, 100])
def test_scale_and_causal(module, plan, options, n_cols):
    """In matrices higher and lower than they are wide, several of them, rows off 16-byte boundaries too."""
    eager = functools.partial(softmax.softmax_eager, **options)
    call = functools.partial(module.softmax_triton, plan=plan, **options)
    shapes = ((2, 9, n_cols), (n_cols,)) if n_cols > 16 else ((3, n_cols + 9, n_cols),)
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            check(call, rows(shape, dtype), f"{options}, {shape}", eager=eager)


@pytest.mark.parametrize("n_cols", IN_PARTS, ids=str)
def test_scale_and_causal_of_wide_rows(module, n_cols):
    options = {"scale": -0.7, "causal": True}
    call, eager = (
        functools.partial(f, **options) for f in (module.softmax_triton, softmax.softmax_eager)
    )
    check(call, rows(n_cols), eager=eager)
    y = call(rows((1, 3, 40000)).detach())
    for row in range(3):
        assert y[0, row, : row + 1].sum().sub(1).abs() < 1e-5 and not y[0, row, row + 1 :].any()


@any_plan
def test_what_is_left_out_is_not_seen(module, plan):
    """NaN and infinities in later columns: as torch.masked_fill before softmax leaves nothing of them."""
    run = of(module, "triton", plan)
    x = rows((2, 8, 8)).detach()
    later = torch.ones(8, 8, dtype=torch.bool, device=x.device).triu(1)
    want = run(x, causal=True)
    for number in (NAN, INF, -INF):
        assert torch.equal(run(x.masked_fill(later, number), causal=True), want)
    x[1, 4, 2] = NAN  # seen: its row is NaN, and no gradient comes from what the row does not see
    for version in (run, softmax.softmax_eager):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(version(leaf, causal=True).sum(), leaf)
        assert dx[1, 4, :5].isnan().all() and not dx.masked_select(later).any()
    scores = torch.nn.functional.scaled_dot_product_attention
    q, k, v = torch.randn(3, 2, 8, 4, device=x.device)
    y = run(q @ k.transpose(1, 2), scale=0.5, causal=True) @ v
    torch.testing.assert_close(y, scores(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5)


def test_options_are_refused_in_a_sentence(module):
    x = rows((3, 4)).detach()
    for scale in (None, NAN, INF, "1", torch.tensor(1.0)):
        with pytest.raises(ValueError, match="scale must be a finite Python number, got"):
            module.softmax_triton(x, scale=scale)
    for causal in (None, 1, x):
        with pytest.raises(TypeError, match="causal must be True or False, got"):
            module.softmax_triton(x, causal=causal)
    with pytest.raises(ValueError, match="causal is for the last dimension, got dim 0"):
        module.softmax_triton(x, 0, causal=True)


def test_the_registered_op_with_options(module):
    x, options = rows((2, 9, 7)), {"scale": -0.7, "causal": True}
    torch.library.opcheck(module.softmax_op, (x, -0.7, True))
    eager = functools.partial(softmax.softmax_eager, **options)
    check(functools.partial(module.softmax_op, **options), x, eager=eager)


def test_a_dimension_that_is_not_there(module):
    x = rows((3, 4)).detach()
    for dim in (2, -3):
        with pytest.raises(ValueError, match="dim must be from -2 to 1 for x .3, 4., got"):
            module.softmax_triton(x, dim)
    for dim in (1.0, None, True, "0"):
        with pytest.raises(TypeError, match="dim must be an int, got"):
            module.softmax_triton(x, dim)


def test_compiled_along_another_dimension(module):
    torch.compiler.reset()
    sys.modules.setdefault(module.__name__, module)  # where the compiler looks for it
    x, call = rows((3, 17, 5)), functools.partial(module.softmax_triton, dim=1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    check(compiled, x, eager=functools.partial(softmax.softmax_eager, dim=1))


# --- ways to launch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_cols", "itemsize", "ways"),
    [
        (16384, 2, ("rows", "rows")),
        (16385, 2, ("parts", "parts")),
        (16383, 2, ("rows", "rows")),  # what does not fit of its pieces is an end
        (16384, 4, ("rows", "rows")),
        (16385, 4, ("rows", "parts")),
        (32768, 4, ("rows", "parts")),
        (32769, 4, ("parts", "parts")),
        (2**24, 2, ("eager", "eager")),
    ],
)
def test_long_rows_are_launched_in_other_ways(n_cols, itemsize, ways):
    device = machine.device()
    forward = softmax._plan(n_cols, itemsize, device)
    backward = softmax._plan_backward(n_cols, itemsize, device)
    assert (forward.way, backward.way) == ways


def test_no_more_parts_than_run_at_once(module):
    """Programs that wait for some which cannot start lose their time."""
    most = max(64, 3 * battery.host_of(module).n_multiprocessors(machine.device()))
    for n_cols, itemsize in ((40000, 4), (2**20, 2), (2**22, 2), (2**22 + 1, 4), (2**24, 8)):
        for chosen in (module._plan, module._plan_backward):
            plan = chosen(n_cols, itemsize, machine.device())
            n_parts = n_cols / (plan.tiles * plan.block_n)
            assert plan.way == "eager" or n_parts <= most


def test_parts_move_in_sixteen_bytes(module):
    """From wherever rows begin: of other than a contiguous tensor on a boundary there is a copy, if need be."""
    storage = torch.arange(300.0, device=machine.device()).bfloat16()
    for start, stride in [(0, 75), (1, 75), (8, 75), (8, 80), (3, 72), (8, 90)]:
        x = storage.as_strided((2, 72 if stride == 80 else 75), (stride, 1), start)
        held = module._in_pieces(x)
        assert torch.equal(held, x)
        assert held.data_ptr() % 16 == 0
        assert (held is x) == ((start, stride) in [(0, 75), (8, 75), (8, 80)])


@pytest.mark.parametrize("n_cols", [40, 75, 112, 113])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parts_tell_each_other(module, n_cols, backward, dtype):
    """The interpreter's programs run in turn: all but a row's last read it alone, and leave what they told.
    With that in memory from the beginning, as waiting leaves it, each reads its part only, and once."""
    if machine.HAS_GPU:
        pytest.skip("programs of a GPU wait")
    x, y, out = torch.randn(3, 4, n_cols).to(dtype).unbind()
    plan = module.Plan("parts", 1, 16, 2, 4)
    grid, words, sizes, constants = module._parts(plan, x, 1 if backward else 2)
    inputs, kernel = (x, y), module._softmax_parts_bwd_kernel
    if not backward:
        inputs, kernel = (x,), module._softmax_parts_fwd_kernel
        constants |= {"EMPTY": module._MINUS_INF.get(dtype, -INF), "MAX_OF_PAIRS": None}
    launch = functools.partial(
        kernel[grid], *inputs, out, words, n_cols, x.stride(0), *sizes, **constants
    )
    launch()
    messages = words.clone()
    assert messages.all()
    out.fill_(NAN)
    traffic = count_traffic(launch)
    assert torch.equal(words, messages)
    x, y = x.double(), y.double()
    want = y * (x - (x * y).sum(-1, keepdim=True)) if backward else torch.softmax(x, -1)
    near = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(out.double(), want, **near)
    ends = n_cols % 16 and 14 * grid[0] * dtype.itemsize  # these are read by all
    for name, seen in traffic.by_argument.items():
        if "words" not in name:
            assert seen.loaded <= out.nbytes + ends, name
            assert seen.stored in (0, out.nbytes), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_programs_that_wait_for_each_other_end(dtype):
    """Many launches at once, on many streams, of more programs than a GPU runs together: none hangs."""
    x = rows((512, 50257), dtype).detach()
    dy = torch.randn_like(x)
    y = softmax.softmax_triton(x)
    want = y, softmax._backward(dy, y, 1.0, False)
    for n_streams, n_launches in ((2, 2), (8, 8), (32, 32), (8, 400)):
        streams = [torch.cuda.Stream() for _ in range(n_streams)]
        torch.cuda.synchronize()
        results = []
        for i in range(n_launches):
            with torch.cuda.stream(streams[i % n_streams]):
                n = len(x) if n_launches <= 32 else 1 + i % 13
                results.append((n, softmax.softmax_triton(x[:n])))
                results.append((n, softmax._backward(dy[:n], y[:n], 1.0, False)))
        torch.cuda.synchronize()
        for i, (n, result) in enumerate(results):
            assert torch.equal(result, want[i % 2][:n])


@pytest.mark.gpu
def test_programs_without_patience_read_the_row_alone():
    device = machine.device()
    for patience in (0, 1, 100):
        back = softmax._plan_backward(50257, 2, device)._replace(patience=patience)
        plan = softmax._plan(50257, 2, device)._replace(patience=patience, backward=back)
        call = functools.partial(softmax.softmax_triton, plan=plan)
        check(call, rows((64, 50257), torch.bfloat16))


# --- machine code ------------------------------------------------------------------------------------------


def _compiled(n_cols, dtype, gradient):
    """The kernel compiled as the op launches it for contiguous rows of n_cols."""
    x = torch.empty(64, n_cols, dtype=dtype)
    choose, kernel, n_tensors = softmax._plan, softmax._softmax_fwd_kernel, 2
    if gradient:
        choose, kernel, n_tensors = softmax._plan_backward, softmax._softmax_bwd_kernel, 3
    plan = choose(n_cols, x.itemsize, x.device)
    _, constants = host.grid_of_rows(plan, x)
    arguments = *[x] * n_tensors, *x.shape, n_cols
    signature = signature_of(kernel, *arguments, COMPUTE=tl.float32, **constants)
    return compile_for(kernel, signature, arch=90, num_warps=plan.num_warps)


@both_dtypes
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("n_cols", [1024, 781, 8192, 4099])
def test_loads_and_stores_are_wide(n_cols, gradient, dtype):
    """4 elements a thread, or 8, at an odd width too: there pieces at the ends are written one by one."""
    compiled = _compiled(n_cols, dtype, gradient)
    mix = instruction_mix(compiled)
    moves = {op: n for op, n in mix.items() if op.startswith(("LDG", "STG"))}
    width = 64 if n_cols <= 8192 and dtype.itemsize == 2 else 128
    wide_bytes = sum(n * width / 8 for op, n in moves.items() if op.endswith(f"{width}"))
    narrow = sum(n for op, n in moves.items() if not op.endswith(f"{width}"))
    assert {f"LDG.E.{width}", f"STG.E.{width}"} <= set(moves)
    # 6 % of a row of 781 bfloat16; whoever has none of its elements skips them
    assert narrow * dtype.itemsize <= (0 if n_cols % 16 == 0 else wide_bytes / 2), moves
    assert compiled.spills == 0


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n_cols", [131072, 50257])
def test_parts_are_held_in_registers(n_cols, dtype, gradient):
    """As they come from memory, two numbers of 16 bits in one; and all threads wait together, or none."""
    x = torch.empty(2, n_cols, dtype=dtype, device=machine.device())
    if gradient:
        plan = softmax._plan_backward(n_cols, x.itemsize, x.device)
        kernel, inputs, extra = softmax._softmax_parts_bwd_kernel, (x, x, x), {}
    else:
        plan = softmax._plan(n_cols, x.itemsize, x.device)
        kernel, inputs = softmax._softmax_parts_fwd_kernel, (x, x)
        extra = {
            "EMPTY": softmax._MINUS_INF.get(dtype, -INF),
            "MAX_OF_PAIRS": softmax._MAX.get(dtype),
        }
    _, words, sizes, constants = softmax._parts(plan, x, 2)
    num_warps = constants.pop("num_warps")
    arguments = *inputs, words, n_cols, n_cols, sizes[0], 4096, 0
    signature = signature_of(kernel, *arguments, **constants, **extra)
    compiled = compile_for(kernel, signature, arch=90, num_warps=num_warps)
    held = plan.tiles * (2 if gradient else 1) * 4
    assert compiled.spills == 0
    assert held < compiled.registers <= 128
    mix = instruction_mix(compiled)
    assert mix["LDG.E.128"] >= constants["TILES"]
    assert mix["STG.E.128"] == constants["TILES"]
    # the loop that looks at the words again: a barrier in it, so that no thread leaves alone
    ptx = compiled.ptx
    look = ptx.rindex("ld.volatile.global")
    start_of_loop = re.search(r"bra(?:\.uni)?\s+(\$\w+)", ptx[look:])[1]
    assert "bar.sync" in ptx[ptx.index(start_of_loop + ":") : look]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "backward"])
def test_the_kernels_compute_in_float32(gradient):
    mix = instruction_mix(_compiled(1024, torch.bfloat16, gradient))
    assert not [op for op in mix if re.match(r"D(ADD|MUL|FMA|SETP)|F2F.*F64", op)]


# --- CUDA --------------------------------------------------------------------------------------------------
