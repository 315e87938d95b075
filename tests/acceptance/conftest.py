"""The enumeration of decoding's chances, from the tests of decoding."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def enumeration() -> ModuleType:
    """``tests/decoding/enumeration.py``: exact laws of what builders and verifiers give."""
    file = Path(__file__).parent.parent / "decoding" / "enumeration.py"
    spec = spec_from_file_location("enumeration", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
