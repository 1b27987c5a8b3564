"""A server that is not installed is a skip on a laptop and a failure in CI."""

import os
import shutil
from typing import NoReturn

import pytest


def missing(what: str, how: str) -> NoReturn:
    """Skip the test, saying how to get `what`; fail instead when CI=true, where everything is installed."""
    message = f"{what} is missing; to run this test: {how}"
    if os.environ.get("CI", "").lower() in {"1", "true", "yes"}:
        pytest.fail(f"{message} (CI=true: .ci/run has to install it)", pytrace=False)
    pytest.skip(message)


def need_binary(*names: str, how: str, also_in: tuple[str, ...] = ()) -> str:
    """Path of the first of `names` found on PATH or in the directories `also_in`; else `missing`."""
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), *also_in])
    for name in names:
        if path := shutil.which(name, path=search):
            return path
    missing(" / ".join(names), how)
