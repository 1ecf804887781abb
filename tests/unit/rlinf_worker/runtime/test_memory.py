"""What a worker says of its memory: the word of its role, and the pages of its process, once in a while."""

from rlinf_worker.runtime.memory import LOOK_S, STATUS, OwnMemory
from rlinf_worker.sums import MemoryUse

LINES = "Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t   {peak} kB\nVmRSS:\t   {now} kB\nThreads:\t3\n"


def test_there_is_a_look_each_second_and_none_in_between(tmp_path):
    status, now, slots = tmp_path / "status", [50.0], [MemoryUse(resident=7)]
    status.write_text(LINES.format(now=20, peak=30))
    memory = OwnMemory(lambda: slots[0], clock=lambda: now[0], status=status)
    assert memory() == MemoryUse(resident=7, process=20 << 10, process_peak=30 << 10)
    status.write_text(LINES.format(now=40, peak=50))
    slots[0] = MemoryUse(resident=8, peak=9)
    now[0] += LOOK_S - 0.01
    assert memory() is None
    now[0] += 0.01
    assert memory() == MemoryUse(resident=8, peak=9, process=40 << 10, process_peak=50 << 10)


def test_this_very_process_has_memory():
    assert STATUS.is_file()
    found = OwnMemory(MemoryUse)()
    assert found is not None
    assert 1 << 20 < found.process <= found.process_peak < 1 << 40
