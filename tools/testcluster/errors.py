"""What can go wrong with a test cluster, split by what the reader does next. Raised everywhere in this package.

ClusterError               the message says what, got, wanted, next
├─ MissingRequirement      this machine cannot run a cluster: tests are skipped with the sentence
├─ NotBuilt                the programs are not in the cache: build them
├─ BuildFailed             a program or image could not be built
├─ StartFailed             a process ended or was not ready in time; carries the end of its log
├─ NoSuchCluster           no cluster of that name runs
├─ CommandFailed           a command that had to succeed did not
└─ Overdue                 a wait passed its deadline
"""

from __future__ import annotations


class ClusterError(Exception):
    pass


class MissingRequirement(ClusterError):
    pass


class NotBuilt(ClusterError):
    pass


class BuildFailed(ClusterError):
    pass


class StartFailed(ClusterError):
    pass


class NoSuchCluster(ClusterError):
    pass


class CommandFailed(ClusterError):
    pass


class Overdue(ClusterError):
    pass
