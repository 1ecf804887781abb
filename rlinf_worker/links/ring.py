"""One direction of a shared-memory link: a ring of frames with one writer and one reader, in two processes.

For: `shm`. Pure memory: no descriptors, no waiting, no event loop, so that a test can interleave both sides at will.
Not for: growing, doorbells, messages larger than half a ring (`shm` does these with what is here).

Memory, offsets in bytes; all words are 64-bit and written by one side only:

    0     HEAD           writer   bytes ever written, pads included
    64    TAIL           reader   bytes ever given back
    128   READER_SLEEP   reader   odd: asleep; each sleep has its own number
    192   WRITER_SLEEP   writer   odd: waits for room; each wait has its own number
    200   WRITER_WANTS   writer   the TAIL at which it is worth waking
    256   MAGIC, SIZE    writer   once, before the reader maps it
    4096  frames, each at a multiple of 64; a frame never wraps: a PAD frame fills the rest where it would

Memory order. What each side needs, and what gives it:

* frame bytes before HEAD (writer), HEAD before frame bytes (reader), last read before TAIL (reader): x86 keeps stores
  in order and loads in order (TSO; the C library ends its non-temporal copies with a store fence), and CPython's
  compiler cannot move memory accesses across the calls between them. A word is one aligned 8-byte move: memoryview's
  "Q" format copies a constant 8 bytes.
* "I set my sleep flag, then look at the other's position" against "I set my position, then look at the other's sleep
  flag" needs a full fence on both sides: x86 lets a load overtake an earlier store. `_fence` takes and gives back an
  uncontended lock, which is a LOCK-prefixed instruction in every C library.

On a machine with a weaker order (aarch64) neither holds and CPython offers no fence, so `shm` refuses there with a
sentence and `listener` uses TCP. The frames' sequence numbers are checked on every machine.

Who may touch what: one thread of the writing process calls `RingWriter`, one thread of the reading process calls
`RingReader`; only the callback of a collected view (`_Lease.on_free`) may come from another thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable

from rlinf_worker.links import frame

HEADER_BYTES = 4096
MIN_RING_BYTES = 4096
MAGIC = 0x31474E49524C52  # "RLRING1"
_HEAD, _TAIL, _READER_SLEEP, _WRITER_SLEEP, _WRITER_WANTS, _MAGIC, _SIZE = 0, 8, 16, 24, 25, 32, 33
_FIXED = frame.FIXED
_ALIGN = frame.ALIGN

_lock = threading.Lock()


def _fence(acquire: Callable[[], bool] = _lock.acquire, release: Callable[[], None] = _lock.release) -> None:
    acquire()
    release()


class RingCorrupt(Exception):
    """What is in the ring cannot have been written by a RingWriter. The link breaks."""


def mapping_bytes(ring_bytes: int) -> int:
    """How large a segment must be for a ring of `ring_bytes`."""
    return HEADER_BYTES + ring_bytes


class _Sleep:
    """One side's word by which it asks to be woken: odd while it sleeps, another number each time."""

    __slots__ = ("_at", "_number", "_words")

    def __init__(self, words: memoryview[int], at: int) -> None:
        self._words, self._at, self._number = words, at, 0

    def begin(self) -> None:
        self._number += 1 if self._number % 2 == 0 else 2
        self._words[self._at] = self._number

    def end(self) -> None:
        if self._number & 1:
            self._number += 1
            self._words[self._at] = self._number


class RingWriter:
    """The producing side. `peer_asleep` and `blocked` tell `shm` when a doorbell is due."""

    def __init__(self, memory: mmap.mmap) -> None:
        size = len(memory) - HEADER_BYTES
        if size < MIN_RING_BYTES or size % _ALIGN:
            raise ValueError(f"ring of {size} bytes, wanted a multiple of {_ALIGN} from {MIN_RING_BYTES}")
        self.size = size
        self.max_frame = size // 2
        """A frame up to half the ring fits in an empty ring wherever the head stands."""
        self._words = memoryview(memory).cast("Q")
        self._data = memoryview(memory)[HEADER_BYTES:]
        self._memory = memory
        self._head = self._tail = 0
        self._sleep = _Sleep(self._words, _WRITER_SLEEP)
        self._rung = 0
        self._words[_SIZE] = size
        self._words[_MAGIC] = MAGIC

    def _room_for(self, total: int) -> tuple[int, int, bool]:
        need = (total + _ALIGN - 1) & -_ALIGN
        to_end = self.size - self._head % self.size
        skip = 0 if need <= to_end else to_end
        if self._head + skip + need - self._tail > self.size:
            self._tail = self._words[_TAIL]
            if self._head + skip + need - self._tail > self.size:
                return need, skip, False
        return need, skip, True

    def try_write(self, out: frame.FrameOut) -> bool:
        """Copies a whole frame in and publishes it. False: no room now."""
        total = out.total
        need, skip, fits = self._room_for(total)
        if not fits:
            return False
        data, at = self._data, self._head % self.size
        if skip:
            _FIXED.pack_into(data, at, skip, 0, 0, 0, frame.PAD, 0)
            at = 0
        end = at + len(out.prefix)
        data[at:end] = out.prefix
        for buffer in out.buffers:
            end += -(end - at) % out.align
            data[end : end + buffer.nbytes] = buffer
            end += buffer.nbytes
        self._head += skip + need
        self._words[_HEAD] = self._head
        return True

    def peer_asleep(self) -> bool:
        """After a write: does the reader need a doorbell? At most once for each of its sleeps."""
        _fence()
        sleep = self._words[_READER_SLEEP]
        if sleep & 1 and sleep != self._rung:
            self._rung = sleep
            return True
        return False

    def blocked(self, total: int) -> bool:
        """Declare that a frame of `total` bytes waits for room. False: there is room now, try again.

        The reader rings when the frame fits and a quarter of the ring has been freed (a wake-up for each message would
        be two context switches each), or whenever it is itself about to sleep.
        """
        need, skip, fits = self._room_for(total)
        if fits:
            return False
        wants = self._head + skip + need - self.size
        self._words[_WRITER_WANTS] = min(self._head, max(wants, self._tail + self.size // 4))
        self._sleep.begin()
        _fence()
        if self._room_for(total)[2]:
            self.unblocked()
            return False
        return True

    def unblocked(self) -> None:
        """The writer is awake again."""
        self._sleep.end()

    def close(self) -> None:
        """Give the memory back; nothing else may be called afterwards."""
        self._words.release()
        self._data.release()
        self._memory.close()


class _Lease:
    """A part of the ring that ends at `end`; given back when `free`, after everything before it."""

    __slots__ = ("end", "free", "watch")

    def __init__(self, end: int) -> None:
        self.end, self.free = end, False
        self.watch: weakref.ref[object] | None = None


class RingReader:
    """The consuming side.

    Invariant: TAIL never passes a byte that a living view can see. Charged by `take` of a frame above
    `copy_out_bytes`; freed when the last view of that frame is collected, whoever holds it.
    """

    def __init__(self, memory: mmap.mmap, *, copy_out_bytes: int, on_free: Callable[[], None]) -> None:
        self._words = memoryview(memory).cast("Q")
        if len(memory) < HEADER_BYTES + MIN_RING_BYTES or self._words[_MAGIC] != MAGIC:
            raise RingCorrupt("a segment without a ring in it")
        self.size = self._words[_SIZE]
        if self.size != len(memory) - HEADER_BYTES:
            raise RingCorrupt(f"a ring of {self.size} bytes in a segment of {len(memory)}")
        self._data = memoryview(memory)[HEADER_BYTES:]
        self._memory = memory
        self._exporter = ctypes.c_ubyte * len(memory)
        self._copy_out_bytes = copy_out_bytes
        self._on_free = on_free
        self._next = self._head = 0
        self._leases: deque[_Lease] = deque()
        self._sleep = _Sleep(self._words, _READER_SLEEP)
        self._rung = 0

    def empty(self) -> bool:
        """Nothing to take."""
        if self._next == self._head:
            self._head = self._words[_HEAD]
        return self._next == self._head

    def take(self) -> tuple[int, int, memoryview] | None:
        """The next frame: its kind, its sequence number and its bytes. None: nothing there.

        Up to `copy_out_bytes` the bytes are a copy. Above, they view the ring, and so does every slice of them.
        """
        while True:
            if self._next == self._head:
                self._head = self._words[_HEAD]
                if self._next == self._head:
                    return None
            at = self._next % self.size
            total, _, _, _, kind, sequence = _FIXED.unpack_from(self._data, at)
            end = self._next + ((total + _ALIGN - 1) & -_ALIGN)
            if total < frame.FIXED_BYTES or end > self._head or at + total > self.size:
                raise RingCorrupt(f"a frame of {total} bytes at {self._next}, where the ring ends at {self._head}")
            self._next = end
            if kind == frame.PAD:
                self._give_back(end)
                continue
            if total <= self._copy_out_bytes:
                view = memoryview(bytearray(self._data[at : at + total]))
                self._give_back(end)
            else:
                view = self._lend(at + HEADER_BYTES, total, end=end)
            return kind, sequence, view

    def _lend(self, at: int, total: int, *, end: int) -> memoryview:
        # One ctypes object per frame, as wide as the mapping so that its type is made once: every memoryview slice,
        # numpy array and tensor over it keeps it alive, and its death is the only sure sign that none is left.
        exporter = self._exporter.from_buffer(self._memory)
        lease = _Lease(end)
        on_free = self._on_free

        def collected(_: object) -> None:
            lease.free = True
            on_free()

        lease.watch = weakref.ref(exporter, collected)
        self._leases.append(lease)
        return memoryview(exporter).cast("B")[at : at + total]

    def _give_back(self, end: int) -> None:
        leases = self._leases
        if not leases:
            self._words[_TAIL] = end
        elif leases[-1].free:
            leases[-1].end = end
        else:
            lease = _Lease(end)
            lease.free = True
            leases.append(lease)

    def reclaim(self) -> bool:
        """Publish what collected views have freed. True: the tail has moved."""
        leases, end = self._leases, -1
        while leases and leases[0].free:
            end = leases.popleft().end
        if end < 0:
            return False
        self._words[_TAIL] = end
        return True

    def peer_blocked(self, *, even_if_little: bool = False) -> bool:
        """After giving back: does the writer need a doorbell? At most once for each of its waits."""
        _fence()
        words = self._words
        sleep = words[_WRITER_SLEEP]
        if sleep & 1 and sleep != self._rung and (even_if_little or words[_TAIL] >= words[_WRITER_WANTS]):
            self._rung = sleep
            return True
        return False

    def sleep(self) -> bool:
        """Declare that the reader will sleep. False: there is something to take, stay awake."""
        if not self.empty():
            return False
        self._sleep.begin()
        _fence()
        if not self.empty():
            self.awake()
            return False
        return True

    def awake(self) -> None:
        """The reader is awake again."""
        self._sleep.end()

    def close(self) -> None:
        """Give the memory back, with the last view if some live; only `lent` may be called afterwards."""
        self._words.release()
        self._data.release()
        with contextlib.suppress(BufferError):
            self._memory.close()
        del self._memory  # the last view ends it now, not whoever keeps the link

    @property
    def lent(self) -> int:
        """How many frames are still viewed."""
        return sum(not lease.free for lease in self._leases)
