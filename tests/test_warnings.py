"""Warnings are errors in the process of the tests, but not in a job (pyproject.toml)."""

import warnings

import pytest

from tests.conftest import run


def test_a_warning_of_ours_is_an_error():
    with pytest.raises(UserWarning, match="of ours"):
        warnings.warn("of ours", stacklevel=1)


def test_a_warning_of_another_package_is_not_an_error():
    with warnings.catch_warnings(record=True) as caught:  # it keeps the filters
        warnings.warn_explicit("of another", FutureWarning, "module.py", 1, module="another.module")
    assert [str(warning.message) for warning in caught] == ["of another"]


@pytest.mark.parametrize("fresh", [True, False])
def test_a_job_prints_its_warnings(fresh, tmp_path):
    (tmp_path / "job.py").write_text("import warnings\nwarnings.warn('of a job')\nprint('continues')\n")
    result = run(tmp_path / "job.py", fresh=fresh)
    assert result.stdout == "continues\n"
    assert "UserWarning: of a job" in result.stderr
