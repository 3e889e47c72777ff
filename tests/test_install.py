"""The set-up passes pip's settings to uv."""

import re

import pytest
from packaging.version import Version

from bootfile import __version__
from tests.conftest import ROOT
from tests.install import UV, read_settings


def test_settings_of_pip_reach_uv():
    listed = """:env:.timeout='60'
:env:.cert='/etc/one.pem'
global.index-url='https://mirror.example/simple'
global.extra-index-url='https://one.example/simple https://two.example/simple'
install.find-links='\\n/wheels\\n/more'
"""
    assert read_settings(listed) == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/one.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert read_settings("") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_floors_without_known_holes():
    """CVE-2023-4863 (libwebp in OpenCV's wheels), CVE-2024-34062 (tqdm), CVE-2025-27516 (jinja2)."""
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    for name, floor in (("opencv-python-headless", "4.8.1.78"), ("tqdm", "4.66.3"), ("jinja2", "3.1.6")):
        assert Version(floors[name]) >= Version(floor)
    assert re.fullmatch(r"uv==[\d.]+", UV)


def test_pyproject_has_the_packages_of_the_lists():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 has it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    jobs, tests = (project["dependency-groups"][name] for name in ("jobs", "dev"))
    assert tests[0] == {"include-group": "jobs"}
    for file, packages in (("requirements.txt", jobs), ("tests/requirements.txt", tests[1:])):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        lines = [line.partition("  # for: ")[0] for line in lines]
        assert packages == [line for line in lines if line and not line.startswith(("#", "-r"))]
    assert set(project["project"]["dependencies"]) == {"torch>=2.1", "numpy>=1.26", "pydantic>=2.7"}
    for packages in (project["project"]["dependencies"], project["project"]["optional-dependencies"]["page"]):
        assert set(packages) <= set(jobs), "the jobs have all packages of the package bootfile"
    assert project["project"]["version"] == __version__
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
