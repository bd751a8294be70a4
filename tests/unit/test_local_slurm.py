"""slurm/local/*.sh, as far as nothing is started: whose folder they take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm/local"
NOBODY = 65534


def refused(script: str, folder: Path) -> str:
    """What a script says of `folder`, where it refuses it."""
    ended = subprocess.run([SCRIPTS / script], env=os.environ | {"HEADWAY_SLURM_DIR": str(folder)}, capture_output=True, text=True, timeout=60,
                           check=False)
    assert ended.returncode == 1, ended
    return ended.stderr


@pytest.mark.parametrize("script", ["up.sh", "down.sh"])
def test_what_another_user_may_have_put_there_is_not_run(script: str, tmp_path: Path) -> None:
    """The settings in it are sourced."""
    trap = tmp_path / "folder"
    trap.mkdir()
    (trap / "settings").write_text(f"touch {tmp_path}/caught\n")
    (tmp_path / "link").symlink_to(trap)
    assert "is a link" in refused(script, tmp_path / "link")
    trap.chmod(0o777)
    assert "alone may write to" in refused(script, trap)
    if os.geteuid() == 0:
        trap.chmod(0o755)
        os.chown(trap, NOBODY, NOBODY)
        assert "alone may write to" in refused(script, trap)
    assert not (tmp_path / "caught").exists()
