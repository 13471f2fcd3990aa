"""Refuses an environment in which the run would break later, or would run other code than this."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron.trainer.common import optional
from megatron.trainer.common.child_processes import never_collect_inherited
from megatron.trainer.common.errors import UsageError

logger = logging.getLogger(__name__)

_KNOWN_NOTES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param",
}
"""Loggers of newer releases, and what they say at every start of what we do on purpose."""
SUPPORTED_CORE = ">=0.16.1,<0.20"
_COMPUTES = "torch", "megatron-core", "transformer-engine", "triton"
_MAX_PORT = 65535
_TORCH_RESTART = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Settings of torch's allocator on GPUs: the name, and what it was up to 2.8."""
_ALLOCATOR_OF_AMD = "PYTORCH_HIP_ALLOC_CONF"


def check_environment() -> None:
    """Checks versions, name-space and the variables of a launcher before anything is built.

    Raises:
        UsageError: one sentence with the command that mends it.
    """
    problem = (
        core_version_problem(_core_version())
        or namespace_problem([Path(p) for p in importlib.import_module("megatron").__path__])
        or _package_problem()
        or rank_problem(os.environ)
    )
    if problem:
        raise UsageError(problem)
    engine = optional.version_of("transformer-engine")
    note = engine and engine_note(str(_core_version()), engine)
    if note:
        logger.warning("%s", note)
    torch: Any = importlib.import_module("torch")
    lacking = torch.cuda.is_available() and lacking_for_triton(os.environ)
    if lacking:
        logger.warning("torch does not fuse kernels of megatron-core on GPUs, as %s", lacking)


def main() -> int:
    """Prints the versions of what a rank on GPUs computes with, and imports none of it. Returns 2
    where they are not made for each other, else 0."""
    found = {name: optional.version_of(name) for name in _COMPUTES}
    for name, version in found.items():
        print(f"{name} {version or '(none)'}")
    core, engine = found["megatron-core"], found["transformer-engine"]
    problem = core_version_problem(core) or (engine and engine_note(str(core), engine))
    if problem:
        print(f"copus: {problem}", file=sys.stderr)
    return 2 if problem else 0


def rank_problem(env: Mapping[str, str]) -> str | None:
    """Says that the variables of a launcher cannot describe a rank, or None.

    Args:
        env: the environment, in which each of them may be missing.
    """
    start = "start the ranks with torchrun or srun, which set it"
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        value = env.get(name)
        if value is not None and not (value.isascii() and value.isdecimal()):
            return f"{name} is {value!r} in the environment but must be a whole number; {start}"
    size, rank = int(env.get("WORLD_SIZE", "1")), int(env.get("RANK", "0"))
    if rank >= size:
        return f"RANK is {rank} but must be less than WORLD_SIZE, which is {size}; {start}"
    if (port := int(env.get("MASTER_PORT", "0"))) > _MAX_PORT:
        return f"MASTER_PORT is {port} but must be at most {_MAX_PORT}; give another"
    return None


def engine_note(core: str, engine: str) -> str | None:
    """Says that two versions are not made for each other, or None."""
    wanted = optional.engine_range(core)
    if SpecifierSet(wanted).contains(engine, prereleases=True):
        return None
    return (
        f"megatron-core {core} is made for Transformer Engine {wanted}, and {engine} is installed; "
        f"run: {optional.engine_fix(wanted)}"
    )


def _core_version() -> str | None:
    try:
        return import_core().__version__
    except ImportError:
        return None


def import_core() -> Any:
    """Imports torch and megatron-core, the seconds that every start takes, and returns the latter.

    megatron-core has torch compile its fused kernels. Where there is no GPU none of them is used,
    so the compiler, which takes longer to load than torch itself, is left out. It is left out as
    well where Triton finds no C compiler or no header of Python, without which the first step would
    fail. Does nothing where megatron-core is imported already.

    Raises:
        ImportError: it is not installed.
        UsageError: Transformer Engine, which it imports, finds fault with its own installation.
    """
    if "megatron.core" in sys.modules:
        return sys.modules["megatron.core"]
    # What Python 3.12 and later say of sources that are compiled, and torch for CUDA on a CPU.
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    _hide("torch.utils.cpp_extension", "No CUDA runtime is found")
    with no_collection():
        torch: Any = importlib.import_module("torch")
        optional.have_transformer_engine()
        if torch.cuda.is_available() and not lacking_for_triton(os.environ):
            return importlib.import_module("megatron.core")
        compiler, torch.compile = torch.compile, _as_it_is
        try:
            # Keeps the name, for parts that are imported later.
            importlib.import_module("megatron.core.jit")
        finally:
            torch.compile = compiler
        return importlib.import_module("megatron.core")


def lacking_for_triton(env: Mapping[str, str]) -> str | None:
    """What Triton would need to build the launchers of kernels for a GPU and does not find, with
    what to install; None if it finds all, or torch is told to compile nothing."""
    if env.get("TORCHDYNAMO_DISABLE") == "1":
        return None
    compilers = ("gcc", "clang")
    path = env.get("PATH", "")
    if not env.get("CC") and not any(shutil.which(name, path=path) for name in compilers):
        return "no C compiler is found; install one (the package gcc) or name it in CC"
    scheme = sysconfig.get_default_scheme()
    # As Triton does: Debian's own scheme leads to /usr/local, where no headers are.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if not header.exists():
        return f"{header} is missing; install the package python3-dev (or python3-devel)"
    return None


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """For imports: a search for garbage among modules, now or later, finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def core_version_problem(version: str | None) -> str | None:
    """Says what is wrong with an installed megatron-core version, or None."""
    fix = f'pip install "megatron-core{SUPPORTED_CORE}"'
    if version is None:
        return f"megatron-core is not installed; run: {fix}"
    if Version(version) not in SpecifierSet(SUPPORTED_CORE):
        return (
            f"megatron-core {version} is outside the supported range {SUPPORTED_CORE}; run: {fix}"
        )
    return None


def namespace_problem(megatron_folders: list[Path]) -> str | None:
    """Says which other tree provides `megatron.trainer`, or None.

    Args:
        megatron_folders: entries of `megatron.__path__`.
    """
    ours = Path(__file__).resolve().parents[1]
    fix = f"run with PYTHONPATH={ours.parent.parent} in front"
    package = importlib.import_module("megatron.trainer")
    found = [Path(p).resolve() for p in package.__path__]
    if found[0] != ours:
        return f"megatron.trainer resolves to {found[0]} and not to {ours}; {fix}"
    for folder in megatron_folders:
        other = (folder / "trainer").resolve()
        if other != ours and other.is_dir():
            root = other.parent.parent
            if _copus_is_of(root):
                return (
                    f"the command `copus` of this environment belongs to {root}; run "
                    f"bash {ours.parent.parent}/scripts/setup_env.sh, or use python -m"
                )
            return (
                f"a second megatron.trainer lies in {other}, whose files would mix with ours; "
                "remove that package"
            )
    return None


def _copus_is_of(checkout: Path) -> bool:
    """Whether `copus` beside this Python is what scripts/setup_env.sh of a checkout has written."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return f"PYTHONPATH={checkout}${{" in Path(sys.executable).with_name("copus").read_text()
    return False


def _package_problem() -> str | None:
    if importlib.util.find_spec("psutil") is None:
        return "psutil is missing and checkpoints would hang without it; run: pip install psutil"
    if importlib.util.find_spec("apex") is not None and not _has_optimizers("apex"):
        return (
            "the installed apex is not NVIDIA's and breaks megatron-core; run: pip uninstall apex"
        )
    return None


def _has_optimizers(package: str) -> bool:
    try:
        return importlib.util.find_spec(f"{package}.optimizers") is not None
    except Exception:  # the search imports the package itself, whatever that does
        return False


def _hide(name: str, start: str) -> None:
    logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(start))


def set_process_defaults() -> None:
    """Sets environment variables that torch reads at start, unless the user set them.

    A restarted gloo job reads keys of the dead attempt from a shared rendezvous store (pytorch
    issue 135712). Warnings about known fallbacks and old names in megatron-core are hidden.
    Processes that are forked later leave the garbage of this one alone.
    """
    for known in (
        ".*Apex.*",
        ".*full scope is deprecated.*",
        ".*torch.distributed.* is deprecated.*",
        "The .grad attribute of a Tensor that is not a leaf",
        ".*`load_state_dict` is deprecated.*",
        ".*deprecating ShardedTensor.*",
        ".*is experimental and still under active development.*",
        # How megatron-core 0.19 calls the load of torch.
        "The argument order of load has been changed",
        ".*assuming the intent is to load in a single process.*",
    ):
        warnings.filterwarnings("ignore", message=known)
    for name, start in _KNOWN_NOTES.items():
        _hide(name, start)
    never_collect_inherited()
    os.environ.setdefault(_TORCH_RESTART, "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not any(name in os.environ for name in (*_ALLOCATOR, _ALLOCATOR_OF_AMD)):
        # Else small tensors settle where a large one was, which then needs a segment of its own.
        os.environ.update(dict.fromkeys(_ALLOCATOR, "expandable_segments:True"))


if __name__ == "__main__":
    sys.exit(main())
