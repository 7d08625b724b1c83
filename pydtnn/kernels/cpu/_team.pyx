"""Number of threads that a kernel may use in this process.

A child of `fork` has one thread, but GCC's OpenMP still expects the threads of the parent and would
wait for them forever. If kernels of the parent have used several threads, those of the child
therefore use one.
"""

cdef extern from *:
    """
    #include <pthread.h>

    static volatile int several_used, left_by_fork;

    static void in_child(void) { left_by_fork |= several_used; }
    static int watch_forks(void) { return pthread_atfork(NULL, NULL, in_child); }
    """
    int several_used, left_by_fork
    int watch_forks()

if watch_forks() != 0:
    raise MemoryError("pydtnn: no memory to be told of forks.")


def usable(int threads) -> int:
    """Return `threads`, or 1 in a child whose parent's kernels had used several."""
    global several_used
    if threads > 1:
        if left_by_fork:
            return 1
        several_used = 1
    return threads
