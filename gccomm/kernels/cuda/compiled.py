"""The kernels compiled for a device by NVRTC, and where they are kept.

Not by ``cupy.RawModule(code=...)``: CuPy adds ``-ftz=true`` behind all other options, by which subnormal
numbers become zeros and words differ from the CPU's.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from gccomm.errors import BackendError
from gccomm.kernels import cuda

__all__ = ["cache_folder", "compiled"]


def cache_folder() -> Path:
    """Return where compiled kernels are kept: ``GCCOMM_CACHE_DIR``, or gccomm's part of the user's cache."""
    chosen = os.environ.get("GCCOMM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gccomm"


def compiled(nvrtc: Any, capability: str, folder: Path | None = None) -> Path:
    """Return the file of the kernels for a device; compile them unless there is one (some ten seconds).

    Parameters
    ----------
    nvrtc : module
        ``cupy.cuda.nvrtc``.
    capability : str
        Compute capability of the device, as "90" for 9.0.
    folder : Path, optional
        Where they are kept; by default :func:`cache_folder`.  Where nothing can be written, a temporary one.

    Returns
    -------
    Path
        Machine code, or PTX where this NVRTC is older than the device.

    Raises
    ------
    BackendError
        They do not compile, or NVRTC knows no architecture that the device runs.
    """
    known = [int(found) for found in nvrtc.getSupportedArchs()]
    target, suffix = f"sm_{capability}", "cubin"
    if int(capability) not in known:
        older = max((found for found in known if found < int(capability)), default=0)
        if older == 0:
            msg = f"NVRTC {_version(nvrtc)} compiles for no device as old as compute capability {capability}"
            raise BackendError(msg)
        target, suffix = f"compute_{older}", "ptx"
    options = (*cuda.OPTIONS, f"--gpu-architecture={target}")
    text = "\n".join((cuda.source(), *options, _version(nvrtc)))
    name = f"kernels-{target}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.{suffix}"
    path = (folder or cache_folder()) / name
    if path.exists():
        return path
    return _keep(path, _compile(nvrtc, options, suffix))


def _version(nvrtc: Any) -> str:
    return ".".join(map(str, nvrtc.getVersion()))


def _compile(nvrtc: Any, options: tuple[str, ...], suffix: str) -> bytes:
    program = nvrtc.createProgram(cuda.source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        made = nvrtc.getCUBIN(program) if suffix == "cubin" else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        msg = f"NVRTC {_version(nvrtc)} cannot compile the kernels ({error}): {nvrtc.getProgramLog(program)}"
        raise BackendError(msg) from error
    finally:
        nvrtc.destroyProgram(program)
    return made if isinstance(made, bytes) else str(made).encode()


def _keep(path: Path, code: bytes) -> Path:
    """Write a file at once, so that processes that start together find all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="gccomm-")) / path.name
        handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(code)
    Path(name).replace(path)
    return path
