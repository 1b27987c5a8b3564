"""A sample service with a chosen defect, and the card that `prove` writes for it."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from queuesmith.prove.run import Options, prove
from queuesmith.prove.spec import load

SERVICES = Path(__file__).parent / "services"


@pytest.fixture(autouse=True)
def _short_faults(monkeypatch):
    monkeypatch.setenv("QUEUESMITH_PROVE_SCALE", "0.15")
    # what `python` is in the commands of the samples
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def parcels():
    """The sample service; `defect`: what it does wrong; the rest: promises."""

    def make(defect="", env=None, **promises):
        spec = load(SERVICES / "parcels.toml")
        service = dataclasses.replace(spec.service, env={**spec.service.env, "DEFECT": defect, **(env or {})})
        return dataclasses.replace(spec, service=service, promises=dataclasses.replace(spec.promises, **promises))

    return make


@pytest.fixture
def card_of(request):
    """`card_of(spec, "kill-random", …)`: run it under these faults; a broken one keeps no evidence here."""
    import shutil

    cards = []

    def run(spec, *only, seed=3, **options):
        cards.append(prove(spec, Options(seed=seed, only=only, **options)))
        return cards[-1]

    yield run
    for card in cards:
        if card.evidence:
            shutil.rmtree(card.evidence, ignore_errors=True)
