"""Records of activities, written by compiled code.

A notification reads the clock and writes a frame or a record of 64 bytes: about 0.1 us, most of it
the call from Python. Records are in chunks of `CHUNK` from malloc, not in arrays of NumPy, whose
memory may be the backend's pool in this thread; or in a ring in memory that another process reads
(`Shared`). There, a record is written when its activity begins, and completed when it ends, so that
those in progress are among them; the newest replaces the oldest.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

import numpy as np

from pydtnn.utils cimport ndarray as cnp

cnp.import_array()

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>
    /* The clock of time.perf_counter_ns, in ns. */
    static int64_t now(void) {
    #ifdef __APPLE__
        return (int64_t)clock_gettime_nsec_np(CLOCK_UPTIME_RAW);
    #else
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    #endif
    }
    /* Store a number after all that was written before it. */
    static void publish(int64_t *to, int64_t value) {
        __atomic_store_n(to, value, __ATOMIC_RELEASE);
    }
    /* Fetch memory that is written soon: each record of a ring is in a cache line of its own. */
    static void prefetch(void *line) { __builtin_prefetch(line, 1); }
    """
    int64_t now() nogil
    void publish(int64_t *to, int64_t value) nogil
    void prefetch(void *line) nogil

cdef packed struct Record:  # `pydtnn.training.tracing.records.RECORD`
    uint8_t kind
    uint8_t lane
    uint16_t depth
    uint32_t name
    int32_t epoch
    int32_t step
    int64_t start
    int64_t duration
    int64_t nbytes
    int32_t peer
    int32_t tag
    int32_t bucket
    int32_t group
    int64_t memory

cdef struct Frame:
    int64_t start
    int64_t nbytes
    uint32_t name
    int32_t bucket
    int32_t group
    int32_t number  # of a collective call in its group; -1 for none
    Py_ssize_t before  # records of the lane, or of the ring, when it began
    uint8_t kind
    bint recorded

cdef enum:
    CHUNK = 1 << 14
    DEEPEST = 64  # activities that are nested deeper are not recorded
    PHASE = 0  # kinds, see `pydtnn.utils.observer.Kind`
    BACKWARD = 2
    CALL = 4
    WAIT = 5

NOT_COLLECTIVE = frozenset(("isend", "irecv", "exchange", "test", "replay"))
"""Calls that not all ranks of a group make."""

RECORD_BYTES = sizeof(Record)

IN_PROGRESS = -1
"""Duration of a record in a ring whose activity has not ended."""


cdef class Shared:
    """Memory in which another process reads what this rank does.

    Parameters
    ----------
    ring : ndarray of uint8
        The number of records so far, as int64; records follow from byte 64 on.
    words : ndarray of int64
        The words in which lanes store the activities in progress.
    table : object
        Its method `number` returns the position of a name.

    Attributes
    ----------
    capacity : int
        Records in the ring.
    """

    cdef object arrays, table
    cdef int64_t *written
    cdef int64_t *words
    cdef Record *ring
    cdef readonly Py_ssize_t capacity

    def __init__(self, cnp.ndarray ring, cnp.ndarray words, table):
        cdef char *begin = <char *>cnp.PyArray_DATA(ring)
        self.arrays = ring, words  # kept alive
        self.table = table
        self.written = <int64_t *>begin
        self.ring = <Record *>(begin + sizeof(Record))
        self.words = <int64_t *>cnp.PyArray_DATA(words)
        self.capacity = ring.size // <Py_ssize_t>sizeof(Record) - 1
        self.written[0] = 0

    cdef Record *next(self) noexcept:
        cdef int64_t written = self.written[0]
        prefetch(&self.ring[(written + 1) % self.capacity])
        return &self.ring[written % self.capacity]


cdef class Course:
    """What the lanes of a rank have in common: names, the present step, and whether to record.

    Parameters
    ----------
    first, stop : int
        The steps to record, counted from 0; all that happens if `stop` is negative.
    shared : Shared, optional
        Where records are stored, with names; by default in memory of each lane.

    Attributes
    ----------
    names : list of str
        Without `shared`.
    memory : object or None
        Its attribute `in_use` is stored with phases and layers, in B.
    switched : callable or None
        Called with whether recording goes on or stops, when that changes.
    clock : Clock or None
        The clock of a virtual rank; None: that of this machine.
    """

    cdef readonly list names
    cdef public object memory, switched, clock
    cdef readonly bint active
    cdef readonly int epoch, step
    cdef dict positions, calls
    cdef uint32_t step_name, epoch_name, test_name
    cdef Py_ssize_t first, stop, count
    cdef Shared shared

    def __init__(self, Py_ssize_t first, Py_ssize_t stop, Shared shared=None):
        self.shared = shared
        self.names, self.positions, self.calls = [], {}, {}
        self.step_name = self.position("step")
        self.epoch_name = self.position("epoch")
        self.test_name = self.position("test")
        self.first, self.stop, self.count = first, stop, 0
        self.active = stop < 0
        self.epoch = self.step = -1

    cdef int64_t now(self) except? -1:
        return now() if self.clock is None else self.clock.now_ns()

    cdef uint32_t position(self, str name):
        found = self.positions.get(name)
        if found is None:
            if self.shared is None:
                found = len(self.names)
                self.names.append(name)
            else:
                found = self.shared.table.number(name)
            self.positions[name] = found
        return found

    cdef int32_t number(self, int kind, str name, int32_t group) except? -1:
        """Return the number of a collective call in its group, from 1; -1 for other activities."""
        if kind != CALL or group < 0 or name in NOT_COLLECTIVE:
            return -1
        found = self.calls[group] = self.calls.get(group, 0) + 1
        return found

    cdef int advance(self, int epoch, int step) except -1:
        self.epoch, self.step = epoch, step
        self.count += 1
        if self.stop >= 0:
            self.switch(self.first < self.count <= self.stop)
        return 0

    cdef int leave(self, uint32_t name) except -1:
        """Note the end of a step or an epoch."""
        if name == self.step_name:
            self.step = -1
            if 0 <= self.stop <= self.count:
                self.switch(False)
        elif name == self.epoch_name:
            self.epoch = -1
        return 0

    cdef int switch(self, bint active) except -1:
        if active != self.active:
            self.active = active
            if self.switched is not None:
                self.switched(active)
        return 0


cdef class Lane:
    """The records of one thread: the methods of an `Observer`.

    Parameters
    ----------
    course : Course
    number : int
        Of the lane; 0 is the main thread, whose steps and epochs are those of the rank.
    moves, depth, top : int
        With `Shared`, the words of the number of changes, of the number of activities in progress,
        and of the first of them.
    most : int
        Number of activities in progress that are stored.
    """

    cdef Course course
    cdef readonly int number
    cdef int depth, recorded
    cdef int32_t called  # the group of the next call or wait
    cdef Frame stack[DEEPEST]
    cdef Record **chunks
    cdef Py_ssize_t full, used  # chunks, and records of the last one
    cdef int moves_word, depth_word, top_word, most
    cdef bint extended  # whether a subclass has methods `begin` or `end` of its own

    def __cinit__(self, *args, **options):
        self.chunks = NULL
        self.full, self.used = -1, CHUNK
        self.depth = self.recorded = 0
        self.called = -1

    def __init__(
        self, Course course, int number, int moves=0, int depth=0, int top=0, int most=0
    ):
        self.course, self.number = course, number
        self.moves_word, self.depth_word, self.top_word, self.most = moves, depth, top, most
        own = type(self)
        self.extended = own.begin is not Lane.begin or own.end is not Lane.end

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self.full + 1):
            free(self.chunks[i])
        free(self.chunks)

    def step(self, int epoch, int step):
        if self.number == 0:
            self.course.advance(epoch, step)

    def group(self, str name):
        self.called = self.course.position(name)

    def activity(self, int kind, str name, int bucket=-1):
        """Begin an activity; return its context, which ends it: this object itself."""
        if self.extended:
            self.begin(kind, name, bucket=bucket)
        else:
            self.open(kind, name, 0, bucket)
        return self

    def __enter__(self):
        pass

    def __exit__(self, *error):
        if self.extended:
            self.end()
        else:
            self.close()

    def begin(self, int kind, str name, *, int64_t nbytes=0, int bucket=-1):
        self.open(kind, name, nbytes, bucket)

    def end(self):
        self.close()

    cdef int open(self, int kind, str name, int64_t nbytes, int bucket) except -1:
        cdef Frame *frame
        cdef Shared shared = self.course.shared
        cdef uint32_t position = self.course.position(name)
        if self.depth < DEEPEST:
            frame = &self.stack[self.depth]
            frame.recorded = self.course.active
            frame.kind, frame.name = kind, position
            frame.group = self.called if CALL <= kind <= WAIT else -1
            frame.number = self.course.number(kind, name, frame.group)
            if frame.recorded:
                frame.nbytes, frame.bucket = nbytes, bucket
                frame.before = self.full * CHUNK + self.used
                frame.start = self.course.now()
                if shared is not None:
                    frame.before = shared.written[0]
                    self.write(shared.next(), frame, frame.start + IN_PROGRESS)
                    publish(shared.written, frame.before + 1)
                self.recorded += 1
        if shared is not None:
            if self.depth < self.most:
                shared.words[self.top_word + self.depth] = (
                    kind | <int64_t>position << 8 | <int64_t>(bucket + 1) << 32
                )
            shared.words[self.depth_word] = self.depth + 1
            shared.words[self.moves_word] += 1
        self.depth += 1
        return 0

    cdef int close(self) except -1:
        cdef Frame *frame
        cdef Shared shared = self.course.shared
        if self.depth == 0:
            return 0
        self.depth -= 1
        if shared is not None:
            shared.words[self.depth_word] = self.depth
            shared.words[self.moves_word] += 1
        if self.depth >= DEEPEST:
            return 0
        frame = &self.stack[self.depth]
        if frame.recorded:
            self.recorded -= 1
            if shared is not None:
                self.complete(shared, frame)
            elif frame.name != self.course.test_name or (
                frame.before != self.full * CHUNK + self.used
            ):  # most tests find nothing; those in which a message has completed count
                self.write(self.add(), frame, self.course.now())
        if frame.kind == PHASE and self.number == 0:
            self.course.leave(frame.name)
        return 0

    cdef int complete(self, Shared shared, Frame *frame) except -1:
        """Complete the record of an activity in the ring, or add it if it has been replaced."""
        cdef int64_t written = shared.written[0]
        cdef Record *record
        if frame.name == self.course.test_name and frame.before == written - 1:
            publish(shared.written, frame.before)
        elif frame.before > written - shared.capacity:
            record = &shared.ring[frame.before % shared.capacity]
            record.duration = self.course.now() - frame.start
        else:
            self.write(shared.next(), frame, self.course.now())
            publish(shared.written, written + 1)
        return 0

    def message(
        self, int kind, str name, int64_t start, int64_t stop, *, int peer, int tag, int64_t nbytes
    ):
        cdef Frame frame
        cdef Record *record
        cdef Shared shared = self.course.shared
        if self.course.active:
            frame.kind, frame.name = kind, self.course.position(name)
            frame.start, frame.nbytes = start, nbytes
            frame.bucket = frame.group = -1
            record = self.add() if shared is None else shared.next()
            self.write(record, &frame, stop)
            record.peer, record.tag = peer, tag
            if shared is not None:
                publish(shared.written, shared.written[0] + 1)

    cdef int write(self, Record *record, Frame *frame, int64_t stop) except -1:
        """Write the record of an activity."""
        record.kind, record.lane = frame.kind, self.number
        record.depth, record.name = self.recorded, frame.name
        record.epoch, record.step = self.course.epoch, self.course.step
        record.start, record.duration = frame.start, stop - frame.start
        record.nbytes, record.bucket, record.group = frame.nbytes, frame.bucket, frame.group
        record.peer, record.tag = -1, frame.number
        record.memory = -1
        if frame.kind <= BACKWARD and self.course.memory is not None:
            record.memory = self.course.memory.in_use
        return 0

    cdef Record *add(self) except NULL:
        """Return the next record in the chunks."""
        if self.used == CHUNK:
            self.grow()
        self.used += 1
        return &self.chunks[self.full][self.used - 1]

    cdef int grow(self) except -1:
        cdef Record **chunks = <Record **>realloc(
            self.chunks, (self.full + 2) * sizeof(Record *)
        )
        cdef Record *chunk
        if chunks == NULL:
            raise MemoryError("trace: no memory for further records; record fewer steps")
        self.chunks = chunks
        chunk = <Record *>malloc(CHUNK * sizeof(Record))
        if chunk == NULL:
            raise MemoryError("trace: no memory for further records; record fewer steps")
        self.full += 1
        self.chunks[self.full] = chunk
        self.used = 0
        return 0

    def copy(self, dtype):
        """Return the records so far as an array of a type of `RECORD_BYTES` bytes."""
        cdef Py_ssize_t i, n
        cdef cnp.ndarray array = np.empty(self.full * CHUNK + self.used, dtype)
        cdef char *to = <char *>cnp.PyArray_DATA(array)
        for i in range(self.full + 1):
            n = self.used if i == self.full else CHUNK
            memcpy(to + i * CHUNK * sizeof(Record), self.chunks[i], n * sizeof(Record))
        return array
