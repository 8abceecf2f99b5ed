"""Write the golden digests of all codecs anew: ``python -m tests.golden``, from the top of the repository."""

from __future__ import annotations

from tests.conformance_golden import write

if __name__ == "__main__":
    changed = write()
    print(f"changed: {', '.join(changed)}" if changed else "nothing changed")
