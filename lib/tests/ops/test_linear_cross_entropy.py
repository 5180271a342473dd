"""What is particular to linear_cross_entropy: labels, chunks, how often is multiplied, float16, its loads."""

from unittest import mock

from lib import machine
from lib.measure import registry
from lib.nogpu.compile_only import compile_for, instruction_mix, signature_of
from lib.nogpu.memory import count_traffic
from lib.ops.linear_cross_entropy import linear_cross_entropy_eager, linear_cross_entropy_triton
from lib.tests.ops import battery, cases

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

OP = registry.find("linear_cross_entropy")
WEIGHTED = OP.all_configured()["bias, weights of classes, none"]
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def inputs(shape, dtype=torch.float32):
    return OP.inputs(shape, dtype, machine.device())


class Watch(TorchDispatchMode):
    """The products of cuBLAS inside, and the elements of the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        result = function(*args, **(kwargs or {}))
        if function._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self.largest = max(self.largest, result.numel())
        return result


# --- what it means -------------------------------------------------------------------------------------------


def test_it_is_pytorchs_cross_entropy(module):
    """PyTorch's own samples, class indices of rows: logits as x, and the identity as weight."""
    (info,) = [op for op in op_db if op.name == "nn.functional.cross_entropy"]
    n_samples, n_weighted = 0, 0
    for sample in info.sample_inputs("cpu", torch.float32):
        logits, labels, how = sample.input, sample.args[0], {**sample.kwargs}
        if labels.is_floating_point() or logits.dim() > 2:
            continue
        x = logits.detach().to(machine.device()).requires_grad_()
        again = x.detach().requires_grad_()
        labels, class_weight = labels.to(x.device), how.pop("weight", None)
        if class_weight is not None:
            # positive, or a mean may be a difference divided by another
            class_weight = class_weight.detach().to(x.device).abs() + 0.1
            how["label_smoothing"], n_weighted = 0.0, n_weighted + 1
        eye = torch.eye(x.shape[-1]).to(x)
        got = module.linear_cross_entropy_triton(x, eye, labels, None, class_weight, **how)
        want = F.cross_entropy(again, labels, class_weight, **how)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            *(
                torch.autograd.grad(y, leaf, torch.ones_like(y))
                for y, leaf in ((got, x), (want, again))
            )
        )
        n_samples += 1
    assert n_samples >= 8 and n_weighted >= 3


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="from torch 2.13 on")
@REDUCTIONS
def test_its_arguments_mean_what_pytorchs_linear_cross_entropy_means(reduction):
    x, weight, labels = inputs((17, 33, 21))
    how = {"reduction": reduction, "ignore_index": 3, "label_smoothing": 0.2}
    labels, bias = labels.clamp(min=0), weight.detach()[:, 0]
    want = F.linear_cross_entropy(x, weight, labels, linear_bias=bias, **how)
    torch.testing.assert_close(linear_cross_entropy_triton(x, weight, labels, bias, **how), want)


def weighted(shape, dtype=torch.float32, factor=1.0):
    """x, weight, labels, a bias, and weights of classes in float32."""
    *tensors, bias, class_weight = WEIGHTED.inputs(shape, dtype, machine.device())
    return *tensors, bias, factor * class_weight.float()


def test_minus_the_losses_of_rows_are_log_probabilities(module):
    x, weight, labels, bias, _ = weighted((17, 33, 21))
    labels, upstream = labels.clamp(min=0), torch.randn(17, device=x.device)
    got = -module.linear_cross_entropy_triton(x, weight, labels, bias, reduction="none")
    want = F.linear(x, weight, bias).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(y, [x, weight, bias], upstream) for y in (got, want))
    torch.testing.assert_close(*grads)


@REDUCTIONS
def test_bias_and_weights_of_classes_in_several_chunks(module, reduction):
    """The weights in float32 beside 16 bits."""
    x, weight, labels, *columns = weighted((17, 33, 21), torch.bfloat16)
    grads = []
    for function, how in (
        (module.linear_cross_entropy_triton, {"plan": module.Plan(7, True, 16, 4)}),
        (linear_cross_entropy_eager, {}),
    ):
        loss = function(x, weight, labels, *columns, reduction=reduction, **how)
        grads.append([loss, *torch.autograd.grad(loss.sum(), [x, weight, columns[0]])])
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)


def test_where_all_weights_are_0_gradients_are_0(module):
    x, weight, labels, bias, class_weight = weighted((9, 5, 7), factor=0.0)
    loss = module.linear_cross_entropy_triton(x, weight, labels, bias, class_weight)
    assert loss.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(loss, [x, weight, bias]))


def test_the_label_of_an_ignored_row_has_no_weight(module):
    """Also where it is a class, whose weight may be anything."""
    x, weight, labels, bias, class_weight = weighted((17, 33, 21))
    labels, class_weight[1] = labels.clamp(min=0), float("inf")
    labels[:3] = 1
    how = {"ignore_index": 1}
    got = module.linear_cross_entropy_triton(x, weight, labels, bias, class_weight, **how)
    want = linear_cross_entropy_eager(x, weight, labels, bias, class_weight.nan_to_num(), **how)
    torch.testing.assert_close(got, want)
    grads = (torch.autograd.grad(y, [x, weight, bias]) for y in (got, want))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("wrong", [21, 2**40, -1, -(2**40)])
def test_a_label_out_of_range_makes_its_row_nan_and_reads_nothing(module, wrong):
    x, weight, labels = inputs((17, 33, 21))
    labels[4] = wrong
    others = torch.arange(17) != 4
    losses = module.linear_cross_entropy_triton(x, weight, labels, reduction="none")
    assert losses[4].isnan() and losses[others].isfinite().all()
    (dx,) = torch.autograd.grad(losses.sum(), x)
    assert dx[4].isnan().all() and dx[others].isfinite().all()
    # ignored, it is none
    y = module.linear_cross_entropy_triton(x, weight, labels, reduction="none", ignore_index=wrong)
    assert y[4] == 0


def test_an_ignored_row_is_0_whatever_its_logits_are(module):
    x, weight, labels = inputs((9, 5, 7))
    x, labels = x.detach(), labels.clone()
    labels[2], x[2] = -100, float("nan")
    losses = module.linear_cross_entropy_triton(
        x.requires_grad_(), weight, labels, reduction="none"
    )
    (dx,) = torch.autograd.grad(losses.sum(), x)
    assert losses[2] == 0 and (dx[2] == 0).all() and dx.isfinite().all()


def test_with_all_labels_ignored_the_mean_is_nan_and_gradients_are_0(module):
    x, weight, labels = inputs((9, 5, 7))
    loss = module.linear_cross_entropy_triton(x, weight, torch.full_like(labels, -100))
    assert loss.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(loss, [x, weight]))


def test_a_loss_near_0_has_its_digits(module):
    """It is the difference of 50 and a little more; of log(1 + 1e-6) float32 has one digit."""
    x = torch.tensor([[50.0, 35.0, 36.0]], device=machine.device())
    weight, label = torch.eye(3, device=x.device), torch.zeros(1, dtype=torch.int64).to(x.device)
    got = module.linear_cross_entropy_triton(x, weight, label)
    want = linear_cross_entropy_eager(x.double(), weight.double(), label)
    assert abs(got.item() - want.item()) < 0.1 * want.item()


def test_a_high_soft_cap_changes_nothing(module):
    """tanh has its digits near 0: an error of 6e-8, times the cap, would be one of 6e-5 in a logit."""
    x, weight, labels = inputs((17, 33, 21))
    capped = module.linear_cross_entropy_triton(x, weight, labels, softcap=1e3, reduction="none")
    losses = linear_cross_entropy_eager(
        x.double(), weight.double(), labels, softcap=1e3, reduction="none"
    )
    assert (capped - losses).abs().max() < 2e-6


def test_losses_of_rows_have_the_shape_of_the_labels(module):
    x, weight, labels = inputs((12, 5, 7))
    losses = module.linear_cross_entropy_triton(x, weight, labels, reduction="none")
    apart = module.linear_cross_entropy_triton(
        x.view(2, 3, 2, 5), weight, labels.view(2, 3, 2), reduction="none"
    )
    assert torch.equal(apart, losses.view(2, 3, 2))
    one = module.linear_cross_entropy_triton(x[3], weight, labels[3], reduction="none")
    assert one.shape == () and torch.isclose(one, losses[3])


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_special_upstream_stays_in_its_row_and_0_is_0(module, special):
    x, weight, labels = inputs((9, 5, 7))
    losses = module.linear_cross_entropy_triton(x, weight, labels, reduction="none")
    dlosses = torch.ones_like(losses)
    dlosses[3] = special
    (dx,) = torch.autograd.grad(losses, x, dlosses, retain_graph=True)
    others = torch.arange(9) != 3
    assert not dx[3].isfinite().any()
    (want,) = torch.autograd.grad(losses.sum(), x, retain_graph=True)
    torch.testing.assert_close(dx[others], want[others])
    (dx,) = torch.autograd.grad(losses, x, torch.zeros_like(losses))
    assert (dx == 0).all()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_tile_of_infinities_is_no_row_of_them(module, position):
    """Logits of -inf in one whole tile of three: they have no weight, and no gradient."""
    logits = torch.randn(1, 48, device=machine.device())
    logits[:, 16 * position : 16 * position + 16] = -float("inf")
    z, label = logits.clone(), torch.full((1,), 16 * ((position + 1) % 3)).to(logits.device)
    losses, plan = torch.empty(1, device=z.device), module.Plan(1, False, 16, 4)
    module._cross_entropy_kernel[(1,)](
        z, label, losses, None, 48, 48, -100, GRADS=True, SMOOTHING=0.0, Z_LOSS=0.0, SOFTCAP=None,
        COMPUTE=tl.float32, BLOCK_N=plan.block_n, NUM_STAGES=1,
    )  # fmt: skip
    again = logits.clone().requires_grad_()
    want = F.cross_entropy(again, label, reduction="none")
    torch.testing.assert_close(losses, want)
    torch.testing.assert_close(z, torch.autograd.grad(want, again)[0])


# --- chunks and products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_columns", [False, True])
def test_a_chunks_logits_are_all_there_is_of_them(module, has_columns):
    tensors, columns = inputs((64, 8, 1000)), weighted((64, 8, 1000))[3:] if has_columns else ()
    watch, plan = Watch(), module.Plan(16, False, 1024, 4)
    with battery.looking_inside(module), watch:
        loss = module.linear_cross_entropy_triton(*tensors, *columns, plan=plan)
    with Watch() as backward:
        loss.backward()
    assert watch.largest == 16 * 1008  # rows on 16-byte boundaries
    assert watch.products == 3 * 4
    assert backward.products == 0, "the gradients are there already"


@REDUCTIONS
@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_costs_no_product(module, frozen, reduction):
    tensors = inputs((16, 9, 40))
    tensors[frozen].requires_grad_(False)
    plan = module.Plan(8, False, 64, 4)
    with battery.looking_inside(module), Watch() as watch:
        y = module.linear_cross_entropy_triton(*tensors, reduction=reduction, plan=plan)
    forward = 2 * (1 if reduction == "none" else 2)
    assert watch.products == forward
    with watch:
        y.sum().backward()
    assert watch.products == forward + (2 * 2 if reduction == "none" else 0)


def test_without_gradients_there_is_one_product_a_chunk(module):
    tensors = inputs((16, 9, 40))
    with torch.no_grad(), battery.looking_inside(module), Watch() as watch:
        module.linear_cross_entropy_triton(*tensors, plan=module.Plan(8, False, 64, 4))
    assert watch.products == 2


def test_a_gradient_that_was_given_away_is_computed_again(module):
    """The first backward's memory is somebody's: what they do to it is not seen by the second."""
    x, weight, labels = inputs((17, 33, 21))
    loss = module.linear_cross_entropy_triton(x, weight, labels)
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    want = [g.clone() for g in first]
    for g in first:
        g.zero_()
    second = torch.autograd.grad(2 * loss, [x, weight])
    torch.testing.assert_close(list(second), [2 * g for g in want])


def test_logits_are_read_twice_and_overwritten_once(module):
    x, weight, labels = inputs((8, 5, 100), torch.bfloat16)
    plan = module.Plan(8, False, 64, 4)
    traffic = count_traffic(
        lambda: module.linear_cross_entropy_triton(x, weight, labels, plan=plan)
    )
    assert traffic.launches == 1
    logits = traffic.by_argument["_cross_entropy_kernel.logits_ptr"]
    row = 112 * 2
    in_range = int((labels >= 0).sum())
    assert logits.loaded == 8 * 2 * row + 2 * in_range  # and the label's own
    assert logits.stored == 8 * row


def test_the_plan_keeps_to_a_tenth_of_eagers_memory(module):
    """Eager has three (N, V) in float32 at its peak. In 16 bits dweight is rounded four times at most."""
    for dtype in (torch.bfloat16, torch.float32):
        for n_rows in (8192, 16384, 131072):
            for n_cols, n_inner in ((128256, 4096), (50257, 4096), (32000, 2048)):
                plan = module._plan(n_rows, n_cols, n_inner, dtype)
                peak = plan.rows * n_cols * dtype.itemsize
                peak += 4 * n_cols * n_inner * (plan.wide and dtype.itemsize == 2)
                assert peak <= 12 * n_rows * n_cols / 10
                assert plan.wide or dtype.itemsize == 4 or -(-n_rows // plan.rows) <= 4
    for n_rows in (1, 100, 1024, 2047, 2049, 5000):
        rows = module._plan(n_rows, 1000, 64, torch.bfloat16).rows
        assert rows % 128 == 0 and rows >= min(n_rows, 1024)


def test_how_dweight_is_rounded(module):
    """In float32 as of one chunk; in bfloat16 four chunks stay within what the float64 check allows."""
    x, weight, labels = inputs((512, 16, 40), torch.bfloat16)

    def error(n_chunks, wide):
        plan = module.Plan(512 // n_chunks, wide, 64, 4)
        loss = module.linear_cross_entropy_triton(x, weight, labels, reduction="sum", plan=plan)
        (dweight,) = torch.autograd.grad(loss, [weight])
        return ((dweight - exact).norm() / exact.norm()).item()

    double = x.detach().double(), weight.detach().double().requires_grad_()
    loss = linear_cross_entropy_eager(*double, labels, reduction="sum")
    (exact,) = torch.autograd.grad(loss, [double[1]])
    once = error(1, False)
    assert error(16, True) < 1.05 * once
    assert error(4, False) < 2 * once
    assert error(16, False) > 1.5 * once, "what float32 is for"


# --- float16 -------------------------------------------------------------------------------------------------


@REDUCTIONS
def test_small_gradients_of_float16_do_not_underflow_on_the_way(module, reduction):
    """A probability of 1/3000 times 1/4096 is no float16: what is upstream comes after the products."""
    x, weight, labels = inputs((60, 8, 3000), torch.float16)
    x, weight = x.detach().requires_grad_(), (weight.detach() + 1).requires_grad_()

    def grads(function, *tensors):
        loss = function(*tensors, labels, reduction=reduction)
        if reduction == "mean":
            loss = loss * (labels >= 0).sum()
        return torch.autograd.grad(loss, tensors, torch.full_like(loss, 2.0**-12))

    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    for got, want in zip(
        grads(module.linear_cross_entropy_triton, x, weight),
        grads(linear_cross_entropy_eager, *exact),
    ):
        assert (got - want).norm() < 5e-3 * want.norm()


@REDUCTIONS
def test_small_weights_of_classes_do_not_underflow_in_float16(module, reduction):
    """As those that are one over how often a class is there; and dbias is summed in float32."""
    x, weight, labels, bias, class_weight = weighted((60, 8, 300), torch.float16, 1e-6)
    losses = []
    for function, tensors in (
        (module.linear_cross_entropy_triton, [x, weight, bias]),
        (
            linear_cross_entropy_eager,
            [t.detach().double().requires_grad_() for t in (x, weight, bias)],
        ),
    ):
        how = {"bias": tensors[2], "class_weight": class_weight, "reduction": reduction}
        loss = function(*tensors[:2], labels, **how)
        scale = 1.0 if reduction == "mean" else 1e6
        losses.append(torch.autograd.grad(loss, tensors, torch.full_like(loss, scale)))
    for got, want in zip(*losses):
        assert (got - want).norm() < 5e-3 * want.norm()


def test_float16_sums_of_many_rows_do_not_overflow(module):
    """200 rows of one label and of 500: 1e5 before, and 500 after 1/N."""
    x = torch.full((200, 3), 500.0, dtype=torch.float16, device=machine.device())
    weight = torch.zeros(4, 3, dtype=torch.float16, device=x.device, requires_grad=True)
    labels = torch.zeros(200, dtype=torch.int64, device=x.device)
    (dweight,) = torch.autograd.grad(
        module.linear_cross_entropy_triton(x, weight, labels), [weight]
    )
    assert dweight[0].tolist() == [-375.0] * 3 and dweight[1].tolist() == [125.0] * 3


# --- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"reduction": "max"}, "reduction must be one of mean, sum, none; got 'max'"),
        ({"label_smoothing": 1.5}, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0; None is no cap"),
    ],
)
def test_wrong_arguments_are_refused(module, how, sentence):
    with pytest.raises(ValueError, match=sentence):
        module.linear_cross_entropy_triton(*inputs((5, 7, 3)), **how)


def test_wrong_tensors_are_refused(module):
    x, weight, labels = inputs((5, 7, 3))
    with pytest.raises(ValueError, match=r"weight must be \(V, K\) with V > 0, got \(0, 7\)"):
        module.linear_cross_entropy_triton(x, weight[:0], labels)
    with pytest.raises(
        TypeError, match="int64 tensor of class indices, got torch.int32; use .long"
    ):
        module.linear_cross_entropy_triton(x, weight, labels.int())


def test_wrong_columns_are_refused(module):
    x, weight, labels, bias, class_weight = weighted((5, 7, 3))
    call = module.linear_cross_entropy_triton
    for columns, error, sentence in (
        ((bias[:2], None), ValueError, r"bias must be \(V\) with V = 3, got shape \(2,\)"),
        ((bias.double(), None), TypeError, "bias torch.float64; cast one of them"),
        (([0.0] * 3, None), TypeError, "bias must be a torch.Tensor, got list"),
        ((None, class_weight[:2]), ValueError, r"class_weight must be \(V\) with V = 3"),
        ((None, class_weight.double()), TypeError, "class_weight torch.float64; cast one of"),
        ((None, class_weight.clone().requires_grad_()), ValueError, "no gradient; pass class_w.*detach"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"linear_cross_entropy_triton: .*{sentence}"):
            call(x, weight, labels, *columns)
    call(x, weight, labels, bias, class_weight)
    with pytest.raises(ValueError, match="use one of them, or linear_cross_entropy_eager"):
        call(x, weight, labels, bias, class_weight, label_smoothing=0.1)
    with torch.no_grad():
        call(x, weight, labels, None, class_weight.clone().requires_grad_())


# --- what is compiled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_cols", [50257, 128256])
@pytest.mark.parametrize("grads", [False, True])
def test_logits_move_in_pieces_of_16_bytes(module, n_cols, grads):
    """Also where a row's length is odd; nothing in local memory, with everything that may be asked for."""
    plan, pitch = module._plan(8192, n_cols, 4096, torch.bfloat16), -(-n_cols // 16) * 16
    logits = torch.empty(16, pitch, dtype=torch.bfloat16)
    labels, losses = torch.zeros(16, dtype=torch.int64), torch.empty(16)
    signature = signature_of(
        module._cross_entropy_kernel, logits, labels, losses, None, n_cols, pitch, -100, GRADS=grads,
        SMOOTHING=0.1, Z_LOSS=1e-4, SOFTCAP=30.0, COMPUTE=tl.float32, BLOCK_N=plan.block_n,
        NUM_STAGES=plan.num_stages,
    )  # fmt: skip
    compiled = compile_for(
        module._cross_entropy_kernel, signature, arch=90, num_warps=plan.num_warps
    )
    mix = instruction_mix(compiled)
    assert compiled.spills <= (2 if cases.release(triton) >= (3, 9) else 0)
    assert mix.get("LDG.E.128", 0) + mix.get("LDGSTS.E.BYPASS.128", 0) >= (4 if grads else 2), mix
    assert mix.get("LDG.E.U16", 0) <= 1, mix  # the label's
    assert mix.get("STG.E.128", 0) == (2 if grads else 0), mix


# --- numbers that are none -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "value"),
    [
        *(("ignore_index", v) for v in (None, 2.0, torch.tensor(2))),
        *(("z_loss", v) for v in (None, torch.tensor(0.1), "0.1")),
        *(("label_smoothing", v) for v in (None, torch.tensor(0.1))),
        *(("softcap", v) for v in (torch.tensor(30.0), [30.0])),
    ],
)
def test_a_number_of_another_kind_is_refused_also_after_its_equal(module, label, value):
    tensors = inputs((4, 8, 9))
    for equal in (2, 0.1, 30.0):
        if value == equal:
            module.linear_cross_entropy_triton(*tensors, **{label: equal})
    with pytest.raises(TypeError, match=f"linear_cross_entropy_triton: {label} must be a"):
        module.linear_cross_entropy_triton(*tensors, **{label: value})


def test_columns_behind_the_last_are_zeros(module):
    """Some CPUs' products read rows up to their pitch: what stands there must be numbers, also before them."""
    tensors, seen, host = inputs((3, 8, 5)), [], battery.host_of(module)
    run = host.run

    def run_and_look(kernel, grid, tensors, *sizes, **options):
        logits = tensors[0]
        rows = logits.as_strided((len(logits), logits.stride(0)), logits.stride())
        rows[:, logits.shape[1] :] = float("nan")
        run(kernel, grid, tensors, *sizes, **options)
        seen.append(rows[:, logits.shape[1] :].clone())

    with mock.patch.object(host, "run", run_and_look):
        module.linear_cross_entropy_triton(*tensors)
    assert [(part.shape, part.any().item()) for part in seen] == [((3, 11), False)]
