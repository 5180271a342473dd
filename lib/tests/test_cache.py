"""Where builds are cached: a folder named by the environment, in the home, or a private temporary one."""

import os

from lib.cache import cache_dir

import pytest


@pytest.fixture
def own(monkeypatch, tmp_path):
    """The folder among the temporary files, where the preferred one cannot be made."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSED_KERNELS_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"fused-kernels-{os.getuid()}"


def test_it_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSED_KERNELS_CACHE", str(tmp_path / "here"))
    assert cache_dir("a", "b") == tmp_path / "here/a/b"
    assert (tmp_path / "here/a/b").is_dir()


def test_it_falls_back_to_a_temporary_folder_of_the_user_alone(own):
    assert cache_dir("a") == cache_dir("a") == own / "a"
    assert own.stat().st_mode & 0o777 == 0o700


def test_no_library_is_loaded_from_a_folder_that_others_can_write(own):
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(
        PermissionError, match="does not belong to you alone; set FUSED_KERNELS_CACHE"
    ):
        cache_dir("a")


def test_no_library_is_loaded_through_a_link(own, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="does not belong to you alone"):
        cache_dir("a")
