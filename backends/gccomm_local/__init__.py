"""Back end of one process: a world of one, a group of threads, or virtual ranks driven in step."""

from gccomm_local.lockstep import LockstepGroup
from gccomm_local.reduction import combine, combine_each
from gccomm_local.threads import LocalBackend, connect, group

__all__ = ["LocalBackend", "LockstepGroup", "combine", "combine_each", "connect", "group"]
