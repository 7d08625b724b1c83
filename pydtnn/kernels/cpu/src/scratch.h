/* Reused scratch memory of the kernels.
 *
 * setup.py includes this file before every template: their aligned_alloc uses a recycler, one for
 * each extension, and `free` determines by the address which memory belongs to it. The C library's
 * own aligned_alloc leaves gaps that the next request of equal size does not fit into (glibc before
 * 2.38): with scratch memory of at most 20 MB at a time, the heap of a VGG-16 grew by 60 to 220 MB.
 * Memory that is kept also causes no page faults.
 *
 * With PLAIN_MEMORY, which setup.py defines for sanitizers, all memory is the C library's: they know
 * where it ends.
 */
#ifndef PYDTNN_SCRATCH_H
#define PYDTNN_SCRATCH_H

#include <stdlib.h>

#include "recycle.h"

#define aligned_alloc(alignment, size) scratch_take(size)
#define free(memory) scratch_give_back(memory)

#endif
