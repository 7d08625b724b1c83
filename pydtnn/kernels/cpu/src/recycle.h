/* Reused memory: an allocator of large blocks for the arrays of one backend. A child of `fork` may
 * use it, independently of other threads of its parent. */
#ifndef PYDTNN_RECYCLE_H
#define PYDTNN_RECYCLE_H

#include <stddef.h>

struct recycler;

struct recycler_counts {
    size_t in_use, peak;    /* bytes allocated and not freed, large requests only */
    size_t held, peak_held; /* bytes of address space that have been used: what is resident */
};

/* Requests of fewer bytes than `threshold` go to malloc. */
struct recycler *recycler_new(size_t threshold, int huge_pages);
void recycler_delete(struct recycler *r); /* only when every block has been given back */

/* As malloc, calloc, realloc and free; any number of threads may call them. Large blocks are
   aligned to 64 bytes. */
void *recycler_take(struct recycler *r, size_t size);
void *recycler_take_zeroed(struct recycler *r, size_t count, size_t size);
void *recycler_resize(struct recycler *r, void *memory, size_t size);
void recycler_give_back(struct recycler *r, void *memory);

struct recycler_counts recycler_count(struct recycler *r);
void recycler_reset_peak(struct recycler *r); /* peaks start again from what is in use now */
void recycler_trim(struct recycler *r);       /* return the memory behind the last block in use */
/* The blocks in order of addresses, without headers: starts, ends, and the serial numbers of their
   allocations, 0 for free blocks; up to `most`. Returns their number. */
size_t recycler_blocks(struct recycler *r, char **starts, char **ends, size_t *serials,
                       size_t most);
/* The number of the allocation of a large block that is in use. */
size_t recycler_serial(struct recycler *r, void *memory);
/* Take [start, end) out of the free block in which it lies; `start` is aligned to 64 bytes.
   Returns 0, or -1 if a part of it is in use. `recycler_give_back(r, start)` returns it. */
int recycler_claim(struct recycler *r, char *start, char *end);
void recycler_clear(char *start, size_t size); /* set to 0; whole pages are not resident any more */

/* Scratch memory of the kernels, from a recycler of its own in each extension; see scratch.h. */
void *scratch_take(size_t size); /* aligned to 64 bytes, or NULL */
void scratch_give_back(void *memory);

#endif
