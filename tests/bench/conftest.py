import pytest

from bench.lab import OURS, Lab, Peer


@pytest.fixture
def lab(redis_server, tmp_path):
    return Lab([Peer.load(name) for name in OURS], quick=True, server=redis_server, folder=tmp_path)
