"""The battery on every op of the registry: each configuration, plan and version, forward and backward."""

from lib import machine
from lib.measure import registry
from lib.nogpu import cuda
from lib.recorded.results import ROOT
from lib.tests.ops import battery
from lib.tests.ops.property import any_call

import pytest
import torch

CUDA_MISSING = cuda.why_no_cuda()


def _items(configured, checks, versions=lambda op: op.all_versions()):
    """pytest's parameters: check × op × version."""
    return [
        pytest.param(
            check,
            op,
            version,
            id="-".join(filter(None, (check.__name__, op.name, label, name))),
            marks=pytest.mark.skipif(
                name == "cuda" and bool(CUDA_MISSING), reason=str(CUDA_MISSING)
            ),
        )
        for label, op in configured
        for check in checks
        for name, version in versions(op).items()
    ]


OPS = [("", op.configured()) for op in registry.OPS.values()]
OTHERS = [
    (label, configured)
    for op in registry.OPS.values()
    for label, configured in list(op.all_configured().items())[1:]
]
PLANNED = [(label, op.configured().planned(label)) for _, op in OPS for label in op.plans]


def _triton(op):
    return {name: v for name, v in op.all_versions().items() if name.startswith("triton")}


def _first(op):
    return {"triton": op.versions["triton"]}


of_each_version = pytest.mark.parametrize(
    ("check", "op", "version"),
    _items(
        OPS,
        [*battery.VALUES, *battery.AUTOGRAD, battery.exact, battery.far_apart, battery.bad_input],
    )
    + _items(
        OTHERS,
        [
            battery.values,
            battery.specials,
            battery.far_out,
            battery.gradients_one_by_one,
            battery.exact,
        ],
    )
    + _items(PLANNED, [battery.values, battery.layouts, battery.gradient_layouts]),
)


@of_each_version
def test_check(check, op, version):
    check(op, version)


@pytest.mark.parametrize(
    ("check", "op", "version"),
    _items(OPS + OTHERS, [battery.compiled], _triton)
    + _items(OPS + OTHERS, [battery.registered], _first),
)
def test_library(check, op, version):
    check(op, version)


MOVING = [(label, op) for label, op in OPS + OTHERS if op.traffic_shape]


@pytest.mark.parametrize(("check", "op", "version"), _items(MOVING, [battery.traffic], _first))
def test_traffic(check, op, version):
    check(op, version)


@pytest.mark.parametrize(("label", "op"), OPS, ids=lambda p: getattr(p, "name", ""))
def test_compiled_by_inductor(label, op):
    battery.compiled(op, op.versions["triton"], backend="inductor")


@pytest.mark.gpu
@pytest.mark.parametrize(("check", "op", "version"), _items(OPS, battery.ON_A_GPU))
def test_on_a_gpu(check, op, version):
    check(op, version)


@pytest.mark.parametrize(("check", "op", "version"), _items(OPS, [any_call]))
def test_any_call(check, op, version):
    check(op, version)


def test_an_unknown_configuration_is_refused():
    with pytest.raises(ValueError, match="there are: 'tanh', 'erf'"):
        registry.find("gelu").configured("sigmoid")


def test_the_registry_names_every_file():
    """An op file without an entry in the registry would escape every test above."""
    files = {p.stem for p in (ROOT / "lib" / "ops").glob("[a-z]*.py")}
    assert files == set(registry.OPS)
    for op in registry.OPS.values():
        assert all((ROOT / source).exists() for source in op.sources), op.name


def test_inputs_follow_the_specs():
    op = registry.find("linear_glu")
    x, weight, bias = op.inputs((5, 7, 3), torch.float32, machine.device())
    assert [tuple(t.shape) for t in (x, weight, bias)] == [(5, 7), (6, 7), (6,)]
    frozen = [
        t.requires_grad
        for t in registry.find("lora_linear").inputs((2, 3, 4, 1), x.dtype, x.device)
    ]
    assert frozen == [True, False, True, True, True]
