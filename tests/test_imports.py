"""What importing brings along: no transport, no array library but NumPy and what the caller has loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FOREIGN = {"mpi4py", "jax", "jaxlib", "torch", "cupy", "nccl", "ml_dtypes", "tensorflow", "scipy", "pandas"}
# Parts of the standard library that take long to load and have no business in an import.
SLOW = {
    "asyncio",
    "multiprocessing",
    "unittest",
    "ssl",
    "xml",
    "sqlite3",
    "tkinter",
    "concurrent.futures.process",
}
OWN = {"gccomm", "gccomm_mpi", "gccomm_local", "gccomm_nccl", "gccomm_launch", "array_api_compat"}


def modules_after(code: str) -> set[str]:
    """Return the names of the modules that a new interpreter has loaded after running `code`."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def with_numpy() -> set[str]:
    return modules_after("import numpy, numpy.typing")


@pytest.mark.parametrize(
    "module",
    ["gccomm", "gccomm.arrays", "gccomm.trees", "gccomm.interop", "gccomm.testing", "gccomm_nccl"],
)
def test_import_brings_no_other_library(module, with_numpy):
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert not {name.partition(".")[0] for name in loaded} & FOREIGN
    assert not (loaded - with_numpy) & SLOW
    added = {name.partition(".")[0] for name in loaded - with_numpy}
    # Underscored names are helpers of the interpreter and of installers (import hooks of editable installs).
    unknown = {name for name in added - OWN - sys.stdlib_module_names if not name.startswith("_")}
    assert not unknown


USE = """
import numpy as np
from gccomm.arrays import out_view, view
from gccomm.trees import flatten
for x in (np.ones(3), np.float32(1), 1, 2.5, memoryview(b"ab"), np.ones(2).view(np.matrix)):
    v = view(x)
    v.wrap(v.data.copy())
out_view(np.ones(3), view(np.ones(3)))
for x in (object(), "text", np.ones(2, object)):
    try:
        view(x)
    except TypeError:
        pass
    else:
        raise SystemExit(f"{x!r} was accepted")
try:
    out_view(object(), view(np.ones(3)))
except TypeError:
    pass
flatten({"a": [np.ones(2), None, object()]})
"""


def test_use_brings_no_other_library():
    loaded = modules_after(USE)
    assert not {name.partition(".")[0] for name in loaded} & FOREIGN
    assert not loaded & {"gccomm.interop.jax", "gccomm.interop.torch"}


@pytest.mark.parametrize(("library", "other"), [("jax", "torch"), ("torch", "jax")])
def test_only_the_bridge_of_a_loaded_library_is_imported(library, other):
    pytest.importorskip(library)
    make = {"jax": "import jax.numpy as xp", "torch": "import torch as xp"}[library]
    loaded = modules_after(f"{make}\nfrom gccomm.arrays import view\nview(xp.ones(3))")
    assert f"gccomm.interop.{library}" in loaded
    assert other not in loaded
    assert f"gccomm.interop.{other}" not in loaded


NO_GPU = """
import sys
for name in ("cupy", "nccl", "cuda"):
    sys.modules[name] = None  # importing it fails
import numpy as np
import gccomm
from gccomm import kernels
x = np.ones(5000, np.float32)
assert gccomm.compressed_allreduce(x, codec="raw").tobytes() == x.tobytes()
try:
    kernels.of_device("cuda:0")
except ImportError as error:
    assert "CuPy, which cannot be imported" in str(error) and "pip install" in str(error), error
else:
    raise SystemExit("there are kernels of a device without CuPy")
"""


def test_everything_but_gpus_works_without_their_libraries():
    loaded = modules_after(NO_GPU)
    assert "gccomm.kernels.cuda.on_cupy" in loaded
