"""Samples are counted for the part that computed; waiting threads and the start of the process are left out."""

import pytest

from bench.sections import profile


def test_samples_count_for_the_innermost_part_and_waiting_does_not_count(tmp_path):
    source = tmp_path / "json" / "encoder.py"
    source.parent.mkdir()
    source.write_text("item = queue.get(block=True)\nreturn encode(item)\n")
    frame = "run (/x/studyhall/patterns/pipeline.py:{line})"
    stacks = [
        f"main (/x/peer.py:1);{frame.format(line=3)} 30",
        f"{frame.format(line=3)};encode ({source}:2) 60",
        f"worker (/x/thread.py:1);take ({source}:1) 500",  # waits
        f"_find (<frozen importlib._bootstrap>:1);{frame.format(line=4)} 500",  # the start
        "call (/x/studyhall/patterns/bullmq_worker/autopipeline.py:9) 10",
        "no frame at all 500",
    ]
    shares = profile.shares("\n".join(stacks))
    assert shares["JSON"] == pytest.approx(0.6)
    assert shares["pipeline"] == pytest.approx(0.3)
    assert shares["Redis client and its sockets"] == pytest.approx(0.1), "autopipeline is not the pipeline"
    assert sum(shares.values()) == pytest.approx(1)
