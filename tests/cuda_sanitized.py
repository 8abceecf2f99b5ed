"""The cases of the CUDA kernels under the address and undefined-behaviour sanitizers: a program of its own,
since they must be there before Python allocates anything. With --overrun it reads past an array, to prove it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from gccomm import kernels
from gccomm.kernels.cuda.device import DeviceKernels
from tests import test_chunks as chunks
from tests import test_word_equality as words
from tests import test_word_equality_rotations as rotations
from tests.cuda_on_cpu import InPlace, OnCpu, build
from tests.word_batches import FLOATS, make

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def environment() -> dict[str, str] | None:
    """Return the environment that such a program needs, or None where there are no sanitizers."""
    compiler = os.environ.get("CXX") or "g++"
    try:
        done = subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    library = Path(done.stdout.strip())
    if not library.is_absolute():
        return None
    options = "detect_leaks=0:detect_stack_use_after_return=0"
    return {**os.environ, "LD_PRELOAD": str(library), "ASAN_OPTIONS": options, "OPENBLAS_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    """Return how to run this program, whichever gccomm is installed: its folder comes last."""
    root = str(Path(__file__).resolve().parents[1])
    text = f"import sys; sys.path.append({root!r}); from tests.cuda_sanitized import main; main()"
    return [sys.executable, "-P", "-c", text, *arguments]


def overrun(device: DeviceKernels) -> None:
    """Let a kernel read an array that is one number short."""
    table = np.zeros(1, kernels.SEGMENT)
    x, out = np.zeros(1 << 16, np.float32), np.zeros(65, np.uint32)
    table["src"], table["size"], table["row"], table["nblocks"] = x.ctypes.data, x.size + 1, x.size + 1, 65
    device.maxima(table.ctypes.data, 1, 64, 65, out.ctypes.data)


def main() -> None:
    """Run them; the sanitizers end the process where something is wrong."""
    library = Path(sys.argv[1]) / "kernels.so"
    if "--overrun" in sys.argv:
        overrun(DeviceKernels(OnCpu(library)))
        return
    build(library.parent, *FLAGS)
    again = command(sys.argv[1], "--overrun")
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    print("overrun", "found" if "heap-buffer-overflow" in done.stderr else f"not found: {done.stderr}")
    device = DeviceKernels(OnCpu(library, "random"))
    for module in (words, rotations):
        module.kernels = InPlace(device)
        module.every_level = lambda: iter(["device"])
    words.test_integers("int64")
    words.test_integers("uint16")
    for dtype in FLOATS:
        words.test_exact_words(dtype)
        words.test_float_wires(dtype, "float16")
        words.test_float_wires(dtype, "float64")
        tensor = chunks.finite(dtype, 2600, np.random.default_rng(FLOATS.index(dtype)))
        chunks.energies(device, tensor, 100, 0)
        chunks.one_case(device, tensor, 100, np.array([0, 7, 25]), 5, n=2)
        for turns in (0, 1, 2):
            rng = np.random.default_rng([turns, FLOATS.index(dtype)])
            for size in (1, 65, 1000, 1024, 2600):
                tensors = [make(dtype, size, rng)]
                rotations.Case(tensors, rotations.Options.draw(turns, rng), rng).run()
    print("cases passed")
