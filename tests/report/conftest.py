"""A disk of 64 KiB, where this machine lets us mount one."""

from __future__ import annotations

import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """``remount(options)`` of an own file system of 64 KiB, and its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    try:
        mount("size=64k")
    except FileNotFoundError:
        pytest.skip("no file system can be mounted here: there is no mount command")
    yield folder, mount
    subprocess.run(["umount", str(folder)], check=True)
