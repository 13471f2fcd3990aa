"""The newest megatron-core and its optimizers beside the installed one, without gigabytes.

    PYTHONPATH=$PWD:$(python -m tests.newest_core.prepare) python -m pytest tests/unit

A release behind the command is unpacked in place of the newest, without the optimizers.

The wheels need Python 3.12. They are pure Python but for one module, which the installed release
has as well. They are unpacked as they are, but that imports of Triton without a guard get a
stand-in. This is for tests: an installation comes from `scripts/setup_env.sh` under Python 3.12.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.19.2"
EMERGING_OPTIMIZERS = "0.3.0"
SITE = Path(__file__).parent / "site"
GUEST = "guest"
_DONE = "done with its program"


def prepare(target: Path, version: str) -> None:
    """Unpacks the wheels.

    Args:
        target: folder that is made.
        version: of megatron-core.

    Raises:
        subprocess.CalledProcessError: pip cannot get a wheel.
        FileNotFoundError: the wheel has no `megatron.training`, as those up to 0.16.
    """
    _unpack(f"megatron-core=={version}", target)
    if version == VERSION:
        _unpack(f"emerging-optimizers=={EMERGING_OPTIMIZERS}", target)
    # Megatron-LM's own program, for tests that run it; elsewhere its name would be in the way.
    (target / GUEST / "megatron").mkdir(parents=True)
    shutil.move(target / "megatron" / "training", target / GUEST / "megatron")
    (target / "megatron" / "core" / "datasets" / "Makefile").write_text("default:\n\t@true\n")
    for record in target.glob("*.dist-info"):  # else pip would take this for an installation
        shutil.rmtree(record)
    installed = importlib.util.find_spec("megatron.core.datasets")
    assert installed is not None and installed.submodule_search_locations is not None
    for module in Path(installed.submodule_search_locations[0]).glob("helpers_cpp*.so"):
        shutil.copy(module, target / "megatron" / "core" / "datasets")
    for path in target.rglob("*.py"):
        before = path.read_text()
        after = re.sub(r"(?m)^import triton$", "import triton_stand_in as triton", before)
        after = re.sub(r"(?m)^import triton\.", "import triton_stand_in.", after)
        if after != before:
            path.write_text(after)
    (target / _DONE).touch()


def _unpack(requirement: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = f"""download -q --disable-pip-version-check --no-deps --only-binary=:all:
            --python-version 3.12 --implementation cp {requirement}
            --platform manylinux_2_28_{platform.machine()} --platform any -d {folder}"""
        subprocess.run([sys.executable, "-m", "pip", *words.split()], check=True, timeout=300)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def python_path(version: str) -> str:
    """What PYTHONPATH needs for a release of megatron-core and Megatron-LM's program of it."""
    with_optimizers = f"-{EMERGING_OPTIMIZERS}" if version == VERSION else ""
    target = Path(sys.prefix) / f"megatron-core-{version}{with_optimizers}"
    if not (target / _DONE).exists():
        shutil.rmtree(target, ignore_errors=True)
        prepare(target, version)
    return f"{SITE}:{target}:{target / GUEST}"


if __name__ == "__main__":
    print(python_path(*sys.argv[1:] or [VERSION]))
