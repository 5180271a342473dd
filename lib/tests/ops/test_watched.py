"""The checks of watched.py on every op of the registry, and tensors of distributed training."""

from lib import machine
from lib.measure import registry
from lib.ops.attention import attention_triton
from lib.ops.linear_glu import FusedGLU
from lib.tests.ops import watched

import pytest
import torch
import torch.distributed as dist

OPS = [op.configured() for op in registry.OPS.values()]
PRODUCTS = [op for op in OPS if op.has_products or op.name in ("attention", "interaction")]
IN_PLACE = [(op, version) for op in OPS for version in op.in_place.values()]


def of_each(checks, ops=OPS):
    items = [
        pytest.param(check, op, id=f"{check.__name__}-{op.name}") for check in checks for op in ops
    ]
    return pytest.mark.parametrize(("check", "op"), items)


@of_each([watched.bits, watched.policy, watched.traced, watched.subclasses, watched.refused])
def test_seen(check, op):
    check(op, op.versions["triton"])


@of_each([watched.exported, watched.marked_dynamic, watched.numbers])
def test_symbols(check, op):
    check(op, op.versions["triton"])


@pytest.mark.parametrize("op", PRODUCTS, ids=lambda op: op.name)
def test_flops(op):
    watched.flops(op, op.versions["triton"])


@pytest.mark.parametrize(("op", "version"), IN_PLACE, ids=lambda p: getattr(p, "name", ""))
def test_written_bits(op, version):
    watched.written_bits(op, version)


class Attended(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gated = FusedGLU(8, 6)

    def forward(self, q):
        return self.gated(attention_triton(q, q, q, is_causal=True))


@pytest.mark.skipif(machine.HAS_GPU, reason="torch 2.11's loader ended the process on an H200")
@torch.no_grad()
def test_compiled_ahead_of_time(tmp_path):
    """By AOTInductor, for sequences of any length."""
    module, q = (
        Attended().eval().to(machine.device()),
        torch.randn(2, 2, 5, 8, device=machine.device()),
    )
    shapes = ({2: torch.export.Dim("S", min=2, max=4096)},)
    program = torch.export.export(module, (q,), dynamic_shapes=shapes)
    where = str(tmp_path / "attended.pt2")
    loaded = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=where)
    )
    other = torch.randn(2, 2, 40, 8, device=q.device)
    torch.testing.assert_close(loaded(other), module(other))


@pytest.mark.parametrize(
    ("check", "op"),
    [
        pytest.param(check, op, id=f"{check.__name__}-{op.title}")
        for base in registry.OPS.values()
        for label, op in base.all_configured().items()
        if label in base.variants and op.tensors.keys() != base.tensors.keys()
        for check in [watched.bits, *watched.MODES, watched.exported, watched.marked_dynamic]
        if check is not watched.flops or op.has_products
    ],
)
def test_with_other_tensors(check, op):
    """The same of a call with more tensors, or fewer."""
    check(op, op.versions["triton"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.skipif(machine.HAS_GPU, reason="its process group is for CPUs")
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_tensors_of_distributed_training(alone, op):
    """What a collective returns is waited for; a DTensor is refused, with what to pass."""
    watched.distributed(op, op.versions["triton"], alone)
