"""The sweep over all families as a module: its builders and checks serve several tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

_NAME = "target_sweep"


def load_sweep() -> ModuleType:
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parent / "sweep.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module  # dataclasses look their module up by name
        spec.loader.exec_module(module)
    return sys.modules[_NAME]


@pytest.fixture(scope="session")
def sweep() -> ModuleType:
    return load_sweep()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``any_family``: each family of transformers."""
    if "any_family" in metafunc.fixturenames:
        metafunc.parametrize("any_family", load_sweep().FAMILIES)
