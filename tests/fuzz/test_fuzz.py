"""Twenty seconds of every attack at once; `make fuzz MINUTES=60` goes on for longer, with another seed each time."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.campaign import campaign


def test_a_run_that_is_attacked_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    findings = campaign(tmp_path / "run", 1 / 3, 1)
    print(findings)
    assert not findings.faults
    assert all(counts["frames"] for counts in findings.sent.values()), findings
    assert findings.refused and findings.malformed and findings.num_replayed
    assert findings.sent["bad_worker"]["refused"] and findings.sent["http_client"]["HTTP 400"] and findings.sent["http_client"]["HTTP 401"]
