"""The saved profile by Nsight Compute: of the kernel in notebook 22, with every number that its table shows."""

from lib.recorded import nsight, results

import pytest

PROFILE = nsight.PROFILE.read_text()


def test_the_profile_is_of_the_kernel_in_the_notebook():
    header = PROFILE.splitlines()[0]
    assert header.startswith("# NVIDIA ") and header.endswith(
        f"code {results.code_hash([nsight.kernel()])}"
    )


def test_the_table_has_every_metric_of_every_launch():
    table = nsight.read(PROFILE)
    assert list(table.columns) == ["counter", *nsight.LAUNCHES]
    assert list(table["counter"]) == list(nsight.METRICS.values())
    assert table.notna().all(axis=None)


def test_a_section_ends_with_its_table():
    lines = nsight.section(PROFILE, "GPU Speed Of Light Throughput", "bfloat16, 2**26").splitlines()
    assert "Throughput" in lines[0] and "Metric Name" in lines[2] and set(lines[-1]) == set("- ")


def test_a_metric_that_was_not_measured_is_named():
    with pytest.raises(KeyError, match="dram__throughput.avg"):
        nsight.read(PROFILE.replace("dram__throughput.avg", "dram__other.avg"))
