/* The recycler of one extension; see scratch.h. */
#include <pthread.h>
#include <stdlib.h>

#include "recycle.h"

void *scratch_take(size_t size);
void scratch_give_back(void *memory);

#ifdef PLAIN_MEMORY

void *scratch_take(size_t size) {
    void *memory;
    return posix_memalign(&memory, 64, size ? size : 1) ? NULL : memory;
}

void scratch_give_back(void *memory) { free(memory); }

#else

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct recycler *recycler;

static void start(void) { recycler = recycler_new(1, 1); }

void *scratch_take(size_t size) {
    pthread_once(&once, start);
    return recycler ? recycler_take(recycler, size ? size : 1) : NULL;
}

void scratch_give_back(void *memory) {
    pthread_once(&once, start);
    if (recycler) {
        recycler_give_back(recycler, memory);
    } else {
        free(memory);
    }
}

#endif
