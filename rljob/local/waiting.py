"""Why a container cannot start yet, as a kubelet says it: tried again until it can, never fatal, never a traceback."""

from __future__ import annotations

from rlinf_api.errors import RetryableError

CONTAINER_CREATING = "ContainerCreating"
CREATE_CONTAINER_CONFIG_ERROR = "CreateContainerConfigError"
CRASH_LOOP_BACK_OFF = "CrashLoopBackOff"
POD_INITIALIZING = "PodInitializing"


class NotYet(RetryableError):
    """`waiting_reason` goes to containerStatuses[].state.waiting.reason, `event_reason` to an Event of the pod.

    `is_of_machine`: no object is missing that somebody may still make; this machine refuses something.
    """

    def __init__(
        self, what: str, *, waiting_reason: str, event_reason: str, next: str = "", is_of_machine: bool = False
    ) -> None:
        super().__init__(what, next=next)
        self.waiting_reason, self.event_reason = waiting_reason, event_reason
        self.is_of_machine = is_of_machine
