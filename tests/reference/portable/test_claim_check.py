"""Jobs carry references; what they refer to comes back whole or not at all."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from studyhall.patterns.claim_check import BlobDamaged, BlobMissing, Blobs, PayloadTooLarge, check_size


async def test_what_was_put_is_read_and_what_was_changed_is_refused(tmp_path: Path):
    blobs = Blobs(tmp_path)
    claim = await blobs.put(b"a long text", ("documents", "7"))
    assert await blobs.read(claim) == b"a long text"
    (await blobs.fetch(claim)).write_bytes(b"a long lie.")
    with pytest.raises(BlobDamaged):
        await blobs.read(claim)


def test_a_load_in_a_job_is_refused():
    check_size({"text": "short"})
    with pytest.raises(PayloadTooLarge):
        check_size({"text": "x" * 100}, limit=50)


async def test_blobs_of_the_living_are_kept(tmp_path: Path):
    blobs = Blobs(tmp_path)
    kept, lost = [await blobs.put(b"x", ("documents", owner)) for owner in ("a", "b")]

    async def in_use(refs: Sequence[str]) -> set[str]:
        return {ref for ref in refs if ref == kept.ref}

    assert (await blobs.sweep("documents", in_use, grace=0)).deleted == 1
    assert await blobs.read(kept) == b"x"
    with pytest.raises(BlobMissing):
        await blobs.read(lost)
