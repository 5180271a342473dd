"""Fixtures, skips and tiers that all tests share.

`make test` leaves out what is marked `nightly`, `make test-all` runs everything. No test carries that mark
in its file: the rules below set it.
"""

import contextlib
import fcntl
import functools
import os
import subprocess
import sys
import zlib
from pathlib import PurePath

from lib import machine
from lib.course import progress
from lib.measure import registry
from lib.nogpu import cuda_build
from lib.tests.ops import watched

import pytest
import torch

HERE = PurePath(__file__).parent


# ---- Tiers -----------------------------------------------------------------------------------


def one_in(n):
    """A rule that leaves one item in n in the quick tier, always the same ones."""
    return lambda item: zlib.crc32(item.nodeid.encode()) % n != 0


def named(*names):
    """A rule for the tests of these names, whatever their parameters."""
    return lambda item: item.originalname in names


def but_one_in(n, name):
    """A rule for the test of this name: nightly except for one item in n."""
    return lambda item: item.originalname == name and one_in(n)(item)


def with_values(**values):
    """A rule for items of these parameters."""
    return lambda item: values.items() <= _parameters(item).items()


def with_plain_builds(item):
    """Whether the test builds a .cu without the checker. The quick tier builds each once, with the checker."""
    return "plain" in item.fixturenames or "plain" in _parameters(item).values()


# The exercises whose answers g++ builds, 10 s each.
BUILT = {*"22.4 23.3 04.1 04.2 04.3 04.4 24.1 24.2 24.3 24.4 31.5 33.3".split()}


def needless_answers(item):
    """All wrong answers except the first of every fourth exercise, half the solutions, builds except one."""
    values = _parameters(item)
    if item.originalname == "test_the_solution_is_right":
        return values["id"] != "04.2" and (values["id"] in BUILT or one_in(2)(item))
    if item.originalname == "test_a_wrong_answer_is_rejected":
        return values["id"] in BUILT or values["number"] > 0 or one_in(4)(item)
    return False


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def most_of_the_battery(item):
    """Five in six checks of an op's first version, except values, and nine in ten of its other versions."""
    values = _parameters(item)
    if item.originalname == "test_compiled_by_inductor":
        return values["op"].name != "add_relu"
    if not {"check", "op", "version"} <= set(values):
        return False
    if (values["check"].__name__, values["op"].name) == ("any_call", "attention"):
        return True  # a tenth of the whole battery's time
    op, version = values["op"], values["version"]
    if version is not registry.find(op.name).configured().versions["triton"]:
        return one_in(10)(item)
    return values["check"].__name__ != "values" and one_in(6)(item)


def but_one_of_each_op(item):
    """All mutants of an op except one, always the same; the battery itself shows that the op passes."""
    values = _parameters(item)
    if item.originalname in ("test_the_op_itself_passes", "test_a_harmless_change_is_alive"):
        return True
    if item.originalname == "test_at_least_eight_that_differ":
        return values["name"] != "gelu"
    if item.originalname != "test_killed":
        return False
    return values["mutant"].why != _one_of(values["name"])


def but_two_ways(item):
    """The ways to take an op along that consist of what the other two do."""
    return _parameters(item).get("way") not in (None, "several, lean", "in a package")


@functools.cache
def _one_of(name):
    from lib.tests.ops.mutants import mutants_of

    return min((m.why for m in mutants_of(name)), key=lambda why: zlib.crc32(why.encode()))


# {a path, or the beginning of one, below lib/tests: rules}. An item is nightly if a rule of its path says so.
NIGHTLY = {
    "dlrm/test_sharded.py": [
        named(
            # so do they in notebook 53
            "test_ranks_together_learn_as_one_process_does",
            "test_fused_ranks_learn_as_one_process_does",
            "test_rows_that_cannot_be_divided_are_refused",
            "test_a_job_that_takes_too_long_is_ended",
            "test_a_rank_that_dies_ends_all_with_a_sentence",  # notebook 53 does the same
        ),
    ],
    "exercises/": [needless_answers],
    "exercises/test_limits.py": [
        but_one_in(5, "test_a_result_of_another_kind_is_named"),
        but_one_in(5, "test_numbers_may_be_numpys_or_torchs"),
    ],
    "course/test_show.py": [  # each starts a kernel, and one shows that the message reaches the page
        named("test_it_fails_all_the_same", "test_other_errors_look_as_ever"),
    ],
    "exercises/test_grade.py": [  # the twelve loop, fork and fill the memory; smaller ones are left
        named(
            "test_a_submission_has_the_verdicts_it_should",
            "test_the_sentence_says_why",
            "test_points_are_the_dots_of_the_exercise",
            "test_each_student_has_a_page",
            "test_the_graders_own_files_are_hidden",
            "test_what_can_be_forged_is_pointed_out_and_a_value_cannot",
        )
    ],
    "exercises/test_museum.py": [
        but_one_in(4, "test_a_mistake_that_only_the_strict_tests_find_may_be_planted"),
    ],
    "exercises/test_capstone.py": [
        named("test_a_rung_without_a_right_version_has_no_time_and_says_why")  # 90 runs its stubs
    ],
    "nogpu/test_cuda_on_cpu.py": [
        with_plain_builds,
        named(
            "test_speed_of_a_cold_build",
            "test_nvcc_compiles_the_same_sources",
            "test_files_are_built_also_where_load_was_imported_before_lib",
        ),
    ],
    "nogpu/test_cuda_programs.py": [
        with_plain_builds,
        named(
            # two large builds; those of test_cuda_on_cpu.py hold the same kinds of programs and mistakes
            "test_a_planted_mistake_is_found_in_its_line",
            "test_a_correct_program_is_right_and_let_alone",
            "test_nvcc_compiles_them_too",
            "test_a_name_that_only_a_gpu_has_gets_a_hint",
        ),
    ],
    "nogpu/test_gluon.py": [
        with_values(status="right"),
        named("test_the_compiler_puts_in_the_fence_within_a_role_alone"),
    ],
    "nogpu/test_gluon_programs.py": [named("test_a_program_compiles_for_hopper")],
    # Large builds; of each kind test_cuda_on_cpu.py has a program and a mistake.
    "nogpu/test_cuda_books.py": [lambda item: True],
    "nogpu/test_memory.py": [
        with_values(how="lanes"),
        with_values(how="pointers to pointers"),
        named("test_pointers_that_were_chosen_or_cast"),
    ],
    "nogpu/test_turns.py": [
        named(
            "test_a_program_may_wait_for_a_later_one",  # test_triton_programs.py has one that does
            "test_a_loop_that_counts_its_tries_has_a_time_limit",
            "test_barriers_of_all_programs",
            "test_races_of_descriptors_and_of_a_table_of_pointers",
            "test_races_where_programs_wait",
            "test_several_flags_at_once",
        )
    ],
    "nogpu/test_launches.py": [named("test_quoted_annotations_compile_too")],
    "nogpu/test_driver.py": [named("test_torch_logs_of_a_plain_compile")],
    "nogpu/test_inductor.py": [
        named(
            "test_layer_norm_of_many_rows_sums_in_a_workspace",
            "test_speed_of_the_first_call",
            "test_torch_logs_shows_the_same_text_once",  # notebooks 03 and 06 do the same
        )
    ],
    "nogpu/test_output_code.py": [one_in(4)],
    "nogpu/test_output_code_more.py": [one_in(8)],
    "nogpu/test_triton_programs.py": [one_in(4)],
    "test_hosted.py": [named("test_an_empty_python_runs_the_evening")],
    "test_repository.py": [
        named("test_the_workflow_to_copy_runs_a_notebook", "test_an_update_keeps_the_answers")
    ],
    "profiling/test_trace.py": [named("test_in_a_notebook_the_cell_is_named")],
    "ops/test_host.py": [with_values(n_cols=37), with_values(name="bias_gelu_dropout_add")],
    "ops/test_battery.py": [most_of_the_battery],
    "ops/test_watched.py": [
        but_one_in(6, "test_symbols"),
        named(
            "test_tensors_of_distributed_training",
            "test_compiled_ahead_of_time",
            "test_with_other_tensors",
        ),
        lambda item: (
            _parameters(item).get("check") in (watched.traced, watched.subclasses)
            and one_in(3)(item)
        ),
    ],
    "ops/test_mutants.py": [but_one_of_each_op],
    "ops/test_page.py": [but_one_in(6, "test_the_comparison_finds")],
    **{f"ops/test_{name}.py": [one_in(8)] for name in registry.OPS},
    "ops/test_small_models.py": [
        with_values(n_steps=50),
        with_values(autocast=True),
        *(with_values(how=how) for how in ("compiled", "dynamic", "selective")),
        but_one_in(3, "test_exported_it_gives_the_same_loss"),
        named(
            "test_the_same_losses_in_two_processes",
            "test_copied_into_an_empty_folder_they_do_it_too",
        ),
    ],
    "ops/test_cuda.py": [named("test_nvcc_compiles_it_without_spills")],
    "ops/test_copyable.py": [
        but_two_ways,
        with_values(lean=True),
        named(
            "test_copies_of_all_ops_run",
            "test_copied_alone_with_no_gpu_it_says_what_to_do",
            "test_cuda_copied_alone_with_no_gpu_says_what_to_do",
        ),
    ],
}


def is_nightly(item):
    path = PurePath(item.path)
    if not path.is_relative_to(HERE):
        return False  # a notebook
    path = path.relative_to(HERE).as_posix()
    return any(
        rule(item) for prefix, rules in NIGHTLY.items() if path.startswith(prefix) for rule in rules
    )


# ---- Skips and fixtures ----------------------------------------------------------------------


def pytest_configure(config):
    # Tests must not write the reader's predictions and progress.
    os.environ["FUSED_KERNELS_READER"] = "/dev/null/reader"
    # With no GPU, CUDA kernels run under the checker: a wrong one is an error, not a crash of pytest.
    os.environ["CUDA_ON_CPU_CHECKED"] = "1"
    if not hasattr(config, "workerinput") and not machine.HAS_GPU:
        # Once; half a minute later a build takes half its time.
        cuda_build.precompile_headers(checked=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # marks before -m reads them, order of what it leaves
def pytest_collection_modifyitems(config, items):
    no_gpu = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if "gpu" in item.keywords and not machine.HAS_GPU:
            item.add_marker(no_gpu)
        if is_nightly(item):
            item.add_marker("nightly")
    result = yield
    items[:] = dealt(items, getattr(config, "workerinput", {}).get("workercount", 1))
    return result


def dealt(items, n_workers):
    """The items in an order in which each of n workers gets an n-th part that begins with notebooks.

    Notebooks take longest, so one worker with all of them would end long after the others. The last notebooks
    come first: by the time one of them builds a kernel the headers are precompiled.
    """
    notebooks = [item for item in reversed(items) if item.path.suffix == ".ipynb"]
    others = [item for item in items if item.path.suffix != ".ipynb"]
    per_worker = -(-len(items) // n_workers)
    order = []
    for worker in range(n_workers):
        hand = notebooks[worker::n_workers]
        order += hand + [others.pop(0) for _ in range(min(per_worker - len(hand), len(others)))]
    return order


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _share_the_gpu(request, tmp_path_factory):
    """Workers share one GPU: as many checks of 20 GB run at once as fit, and each test releases its memory."""
    if not machine.HAS_GPU:
        yield
        return
    check = getattr(_parameters(request.node).get("check"), "__name__", None)
    with contextlib.ExitStack() as stack:
        if check in ("real_sizes", "far_apart"):
            n_slots = max(1, int(torch.cuda.get_device_properties(0).total_memory // 32e9))
            slot = zlib.crc32(request.node.nodeid.encode()) % n_slots
            path = tmp_path_factory.getbasetemp().parent / f"gpu{slot}.lock"
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def reader_folder(tmp_path, monkeypatch):
    """An empty folder for the reader's files."""
    monkeypatch.setattr(progress, "_in_memory", {})
    monkeypatch.setenv("FUSED_KERNELS_READER", str(tmp_path / "reader"))
    return tmp_path / "reader"


@pytest.fixture
def device():
    return machine.device()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test marked `fresh_process` runs in a pytest of its own: it forks, and other tests leave threads."""
    if (
        pyfuncitem.get_closest_marker("fresh_process") is None
        or "FUSED_KERNELS_FRESH" in os.environ
    ):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, pyfuncitem.nodeid], cwd=pyfuncitem.config.rootpath,
        env=environment | {"FUSED_KERNELS_FRESH": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return True
