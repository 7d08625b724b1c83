"""Records of activities, written by compiled code.

A notification reads the clock and writes a frame or a record of 64 bytes: about 0.1 us, most of it
the call from Python. Records are in chunks of `CHUNK` from malloc, not in arrays of NumPy, whose
memory may be the backend's pool in this thread.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

import numpy as np

cimport numpy as cnp

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
    """
    int64_t now() nogil

cdef packed struct Record:  # `pydtnn.tracing.records.RECORD`
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
    Py_ssize_t before  # records of the lane when it began
    uint8_t kind
    bint recorded

cdef enum:
    CHUNK = 1 << 14
    DEEPEST = 64  # activities that are nested deeper are not recorded
    PHASE = 0  # kinds, see `pydtnn.utils.observer.Kind`
    BACKWARD = 2
    CALL = 4
    WAIT = 5

cdef enum:
    STEP = 0  # positions of names
    EPOCH = 1
    TEST = 2

RECORD_BYTES = sizeof(Record)


cdef class Course:
    """What the lanes of a rank have in common: names, the present step, and whether to record.

    Parameters
    ----------
    first, stop : int
        The steps to record, counted from 0; all that happens if `stop` is negative.

    Attributes
    ----------
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
    cdef dict positions
    cdef Py_ssize_t first, stop, count

    def __init__(self, Py_ssize_t first, Py_ssize_t stop):
        self.names = ["step", "epoch", "test"]
        self.positions = {name: position for position, name in enumerate(self.names)}
        self.first, self.stop, self.count = first, stop, 0
        self.active = stop < 0
        self.epoch = self.step = -1

    cdef int64_t now(self) except? -1:
        return now() if self.clock is None else self.clock.now_ns()

    cdef uint32_t position(self, str name):
        found = self.positions.get(name)
        if found is None:
            found = self.positions[name] = len(self.names)
            self.names.append(name)
        return found

    cdef int advance(self, int epoch, int step) except -1:
        self.epoch, self.step = epoch, step
        self.count += 1
        if self.stop >= 0:
            self.switch(self.first < self.count <= self.stop)
        return 0

    cdef int leave(self, uint32_t name) except -1:
        """Note the end of a step or an epoch."""
        if name == STEP:
            self.step = -1
            if 0 <= self.stop <= self.count:
                self.switch(False)
        elif name == EPOCH:
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
    """

    cdef Course course
    cdef readonly int number
    cdef int depth, recorded
    cdef int32_t called  # the group of the next call or wait
    cdef Frame stack[DEEPEST]
    cdef Record **chunks
    cdef Py_ssize_t full, used  # chunks, and records of the last one

    def __cinit__(self, *args, **options):
        self.chunks = NULL
        self.full, self.used = -1, CHUNK
        self.depth = self.recorded = 0
        self.called = -1

    def __init__(self, Course course, int number):
        self.course, self.number = course, number

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

    def begin(self, int kind, str name, *, int64_t nbytes=0, int bucket=-1):
        cdef Frame *frame
        if self.depth < DEEPEST:
            frame = &self.stack[self.depth]
            frame.recorded = self.course.active
            frame.kind = kind
            frame.name = self.course.position(name)
            if frame.recorded:
                self.recorded += 1
                frame.nbytes, frame.bucket = nbytes, bucket
                frame.group = self.called if CALL <= kind <= WAIT else -1
                frame.before = self.full * CHUNK + self.used
                frame.start = self.course.now()
        self.depth += 1

    def end(self):
        cdef Frame *frame
        cdef Record *record
        cdef int64_t stop
        if self.depth == 0:
            return
        self.depth -= 1
        if self.depth >= DEEPEST:
            return
        frame = &self.stack[self.depth]
        if frame.recorded:
            stop = self.course.now()
            self.recorded -= 1
            if frame.name == TEST and frame.before == self.full * CHUNK + self.used:
                return  # most tests find nothing; those in which a message has completed count
            record = self.add(frame.kind, frame.name, frame.start, stop, frame.nbytes)
            record.peer = record.tag = -1
            record.bucket, record.group = frame.bucket, frame.group
            if frame.kind <= BACKWARD and self.course.memory is not None:
                record.memory = self.course.memory.in_use
        if frame.kind == PHASE and frame.name <= EPOCH and self.number == 0:
            self.course.leave(frame.name)

    def message(
        self, int kind, str name, int64_t start, int64_t stop, *, int peer, int tag, int64_t nbytes
    ):
        cdef Record *record
        if self.course.active:
            record = self.add(kind, self.course.position(name), start, stop, nbytes)
            record.peer, record.tag = peer, tag
            record.bucket = record.group = -1

    cdef Record *add(
        self, uint8_t kind, uint32_t name, int64_t start, int64_t stop, int64_t nbytes
    ) except NULL:
        cdef Record *record
        if self.used == CHUNK:
            self.grow()
        record = &self.chunks[self.full][self.used]
        self.used += 1
        record.kind, record.lane = kind, self.number
        record.depth, record.name = self.recorded, name
        record.epoch, record.step = self.course.epoch, self.course.step
        record.start, record.duration, record.nbytes = start, stop - start, nbytes
        record.memory = -1
        return record

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
