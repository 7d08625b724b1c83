/* Best fit with splitting and merging, in a few large regions of address space.
 *
 * A training step allocates and frees the same few hundred arrays in the same order, most of them
 * like a stack: backward frees the arrays of forward in reverse order. Free lists by exact size
 * would keep the sum over all sizes of the maximum of each, 6 % (ResNet-44) to 28 % (ResNet-18 at
 * 224) more than is in use at any one time. Blocks that are split and merged with their neighbours
 * have no gaps: the memory is that in use at the peak.
 *
 * A region is mapped once and generously, since untouched pages cost nothing, and its
 * blocks lie side by side from its start; beyond `top` it is untouched. Growing moves `top`, so no
 * page is given back and faulted in again within a step, and memory beyond `top` is known to be
 * zero without being cleared. Huge pages, if available, avoid most TLB misses.
 *
 * A block's header is the cache line before its data. So arrays whose sizes are powers of two do
 * not all start at the same offset within a page, where they would fall into the same sets of the
 * cache and their loads would seem to depend on stores to another array (4 KiB aliasing). The list
 * of free blocks is short, a handful, because neighbours merge; it is searched from end to end. A
 * mutex guards everything: it is contended only when several threads share a backend. `fork` waits
 * until no thread holds one, so that a child finds every recycler consistent and unlocked.
 *
 * Best fit and boundary tags: Knuth, The Art of Computer Programming, volume 1, section 2.5.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MADV_HUGEPAGE */
#include "recycle.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HEADER ((size_t)64)
#define SPLIT ((size_t)4096)            /* a smaller rest is not split off */
#define REGION ((size_t)1 << 30)        /* address space of the first region at least */
#define HUGE_PAGE ((size_t)2 << 20)
#define LARGEST (SIZE_MAX / 4)          /* so that sums of sizes cannot overflow */

struct block {
    size_t size;                 /* with the header */
    size_t asked;                /* 0 if free */
    struct region *region;
    struct block *before;        /* neighbour at the lower address */
    struct block *previous, *next; /* free blocks, in no order */
    size_t serial;               /* of the allocation */
};

_Static_assert(sizeof(struct block) <= HEADER, "a header must fit into a cache line");

struct region {
    struct region *next;
    char *start, *top, *end;
    struct block *last;
    void *mapped;
    size_t mapped_size;
};

struct recycler {
    pthread_mutex_t lock;
    struct recycler *previous, *next; /* all recyclers, in no order */
    struct region *regions; /* the oldest first */
    struct block *free;
    struct recycler_counts counts;
    size_t threshold, allocations;
    int huge_pages;
};

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

static size_t most(size_t a, size_t b) { return a > b ? a : b; }

static char *aligned(void *address, size_t unit) {
    return (char *)round_up((uintptr_t)address, unit);
}

static char *data_of(struct block *b) { return (char *)b + HEADER; }

static struct block *block_of(void *memory) { return (struct block *)((char *)memory - HEADER); }

static struct block *after(const struct block *b) {
    char *end = (char *)b + b->size;
    return end < b->region->top ? (struct block *)end : NULL;
}

/* ---- the list of free blocks */

static void list(struct recycler *r, struct block *b) {
    b->asked = 0;
    b->previous = NULL;
    b->next = r->free;
    if (r->free) r->free->previous = b;
    r->free = b;
}

static void unlist(struct recycler *r, struct block *b) {
    if (b->next) b->next->previous = b->previous;
    *(b->previous ? &b->previous->next : &r->free) = b->next;
}

/* The smallest sufficient block. One that is two fifths of all memory, with little behind it, is not
   cut for less than a fifth of it: it was a large array of forward, whose gradient will need it. */
static struct block *best_fit(const struct recycler *r, size_t size) {
    struct block *best = NULL;
    for (struct block *b = r->free; b; b = b->next) {
        if (b->size < size) continue;
        if (!best || b->size < best->size || (b->size == best->size && b < best)) best = b;
    }
    if (!best || !after(best) || size > best->size / 5) return best;
    size_t behind = (size_t)(best->region->top - (char *)after(best));
    int kept = best->size / 2 >= r->counts.held / 5 && behind + size <= best->size / 3;
    return kept ? NULL : best;
}

/* ---- neighbours */

/* Make [start, start + size) a block that follows `before`; update the block that follows it. */
static struct block *place(struct region *region, struct block *before, char *start, size_t size) {
    struct block *b = (struct block *)start, *next;
    b->size = size;
    b->region = region;
    b->before = before;
    next = after(b);
    *(next ? &next->before : &region->last) = b;
    return b;
}

static void cut(struct recycler *r, struct block *b, size_t size) {
    size_t rest = b->size - size;
    if (rest < SPLIT) return;
    b->size = size;
    list(r, place(b->region, b, (char *)b + size, rest));
}

/* ---- regions */

static struct region *region_new(struct recycler *r, size_t size) {
    /* Every region is as large as all before it, so that there are few of them; if the address
     * space is limited, a region has the requested size. */
    size_t wanted = round_up(most(size, most(REGION, r->counts.held)), HUGE_PAGE) + HUGE_PAGE;
    size_t least = round_up(size, HUGE_PAGE) + HUGE_PAGE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
    flags |= MAP_NORESERVE;
#endif
    struct region *region = malloc(sizeof *region), **end = &r->regions;
    if (!region) return NULL;
    void *mapped = mmap(NULL, wanted, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapped == MAP_FAILED) {
        wanted = least;
        mapped = mmap(NULL, wanted, PROT_READ | PROT_WRITE, flags, -1, 0);
    }
    if (mapped == MAP_FAILED) {
        free(region);
        return NULL;
    }
    char *start = aligned(mapped, HUGE_PAGE);
    *region = (struct region){.start = start, .top = start, .end = (char *)mapped + wanted,
                              .mapped = mapped, .mapped_size = wanted};
#ifdef MADV_HUGEPAGE
    if (r->huge_pages) madvise(start, (size_t)(region->end - start), MADV_HUGEPAGE);
#endif
    while (*end) end = &(*end)->next;
    return *end = region;
}

static void region_delete(struct region *region) {
    munmap(region->mapped, region->mapped_size);
    free(region);
}

/* A block of `size` at the end of a region, its last block included if that is free. `*touched` is
 * the start of the unused memory. */
static struct block *grow(struct recycler *r, struct region *region, size_t size, char **touched) {
    struct block *last = region->last, *before = last;
    char *start = region->top;
    if (last && !last->asked) {
        start = (char *)last;
        before = last->before;
    }
    if ((size_t)(region->end - start) < size) return NULL;
    if (start != region->top) unlist(r, last);
    *touched = region->top;
    r->counts.held += (size_t)(start + size - region->top);
    region->top = start + size;
    return place(region, before, start, size);
}

static struct block *find(struct recycler *r, size_t size, char **touched) {
    struct block *b = best_fit(r, size);
    if (b) {
        unlist(r, b);
        cut(r, b, size);
        *touched = (char *)b + b->size;
        return b;
    }
    for (struct region *region = r->regions; region; region = region->next) {
        if ((b = grow(r, region, size, touched))) return b;
    }
    struct region *region = region_new(r, size);
    return region ? grow(r, region, size, touched) : NULL;
}

/* Replace whole pages by ones that read as zeros and are not resident. Returns 0, or -1 if the
 * system call fails: locked pages (mlockall) keep their contents. */
static int drop_pages(char *start, size_t size) {
#ifdef __linux__
    return madvise(start, size, MADV_DONTNEED);
#else
    void *fresh = mmap(start, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return fresh == MAP_FAILED ? -1 : 0;
#endif
}

/* The region's memory from `top` on reads as zeros again, and its pages are not resident where the
   system allows it. */
static void forget(const struct region *region, char *old_top) {
    char *page = aligned(region->top, (size_t)sysconf(_SC_PAGESIZE));
    if (old_top > page && drop_pages(page, (size_t)(old_top - page)) == 0) old_top = page;
    memset(region->top, 0, (size_t)(old_top - region->top));
}

static int owns(const struct recycler *r, const void *memory) {
    const char *address = memory;
    for (const struct region *region = r->regions; region; region = region->next) {
        if (address >= region->start && address < region->top) return 1;
    }
    return 0;
}

/* ---- fork */

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER; /* taken before that of a recycler */
static struct recycler *all;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;

static void before_fork(void) {
    pthread_mutex_lock(&all_lock);
    for (struct recycler *r = all; r; r = r->next) pthread_mutex_lock(&r->lock);
}

/* In the parent and in the child, whose only thread is the one that took the locks. */
static void after_fork(void) {
    for (struct recycler *r = all; r; r = r->next) pthread_mutex_unlock(&r->lock);
    pthread_mutex_unlock(&all_lock);
}

static void register_fork(void) {
    fork_error = pthread_atfork(before_fork, after_fork, after_fork);
}

static void link_recycler(struct recycler *r) {
    pthread_mutex_lock(&all_lock);
    r->next = all;
    if (all) all->previous = r;
    all = r;
    pthread_mutex_unlock(&all_lock);
}

static void unlink_recycler(struct recycler *r) {
    pthread_mutex_lock(&all_lock);
    if (r->next) r->next->previous = r->previous;
    *(r->previous ? &r->previous->next : &all) = r->next;
    pthread_mutex_unlock(&all_lock);
}

/* ---- what others call */

struct recycler *recycler_new(size_t threshold, int huge_pages) {
    pthread_once(&fork_once, register_fork);
    struct recycler *r = fork_error ? NULL : calloc(1, sizeof *r);
    if (!r) return NULL;
#ifdef PLAIN_MEMORY
    threshold = SIZE_MAX;
#endif
    r->threshold = threshold;
    r->huge_pages = huge_pages;
    if (pthread_mutex_init(&r->lock, NULL) != 0) {
        free(r);
        return NULL;
    }
    link_recycler(r);
    return r;
}

void recycler_delete(struct recycler *r) {
    unlink_recycler(r);
    for (struct region *region = r->regions, *next; region; region = next) {
        next = region->next;
        region_delete(region);
    }
    pthread_mutex_destroy(&r->lock);
    free(r);
}

static void *take(struct recycler *r, size_t n, int zero) {
    char *touched = NULL;
    if (n > LARGEST) return NULL;
    pthread_mutex_lock(&r->lock);
    struct block *b = find(r, round_up(n, HEADER) + HEADER, &touched);
    if (b) {
        struct recycler_counts *c = &r->counts;
        b->asked = n;
        b->serial = ++r->allocations;
        c->in_use += n;
        c->peak = most(c->peak, c->in_use);
        c->peak_held = most(c->peak_held, c->held);
    }
    pthread_mutex_unlock(&r->lock);
    if (!b) return NULL;
    if (zero && touched > data_of(b)) {
        size_t used = (size_t)(touched - data_of(b));
        memset(data_of(b), 0, used < n ? used : n);
    }
    return data_of(b);
}

void *recycler_take(struct recycler *r, size_t size) {
    return size < r->threshold ? malloc(size ? size : 1) : take(r, size, 0);
}

void *recycler_take_zeroed(struct recycler *r, size_t count, size_t size) {
    if (size && count > LARGEST / size) return NULL;
    size *= count;
    return size < r->threshold ? calloc(size ? size : 1, 1) : take(r, size, 1);
}

void recycler_give_back(struct recycler *r, void *memory) {
    if (!memory) return;
    pthread_mutex_lock(&r->lock);
    int large = owns(r, memory);
    if (large) {
        struct block *b = block_of(memory), *next = after(b), *before = b->before;
        r->counts.in_use -= b->asked;
        if (next && !next->asked) {
            unlist(r, next);
            place(b->region, before, (char *)b, b->size + next->size);
        }
        if (before && !before->asked) {
            unlist(r, before);
            b = place(b->region, before->before, (char *)before, before->size + b->size);
        }
        list(r, b);
    }
    pthread_mutex_unlock(&r->lock);
    if (!large) free(memory);
}

void *recycler_resize(struct recycler *r, void *memory, size_t size) {
    if (!memory) return recycler_take(r, size);
    pthread_mutex_lock(&r->lock);
    int large = owns(r, memory);
    size_t old = large ? block_of(memory)->asked : 0;
    pthread_mutex_unlock(&r->lock);
    if (!large) return realloc(memory, size ? size : 1); /* only malloc has the size to copy */
    void *moved = recycler_take(r, size);
    if (!moved) return NULL; /* `memory` remains valid, as with realloc */
    memcpy(moved, memory, old < size ? old : size);
    recycler_give_back(r, memory);
    return moved;
}

struct recycler_counts recycler_count(struct recycler *r) {
    pthread_mutex_lock(&r->lock);
    struct recycler_counts counts = r->counts;
    pthread_mutex_unlock(&r->lock);
    return counts;
}

void recycler_reset_peak(struct recycler *r) {
    pthread_mutex_lock(&r->lock);
    r->counts.peak = r->counts.in_use;
    r->counts.peak_held = r->counts.held;
    pthread_mutex_unlock(&r->lock);
}

void recycler_trim(struct recycler *r) {
    pthread_mutex_lock(&r->lock);
    for (struct region **link = &r->regions, *region; (region = *link);) {
        struct block *last = region->last;
        if (last && !last->asked) {
            char *old_top = region->top;
            unlist(r, last);
            region->last = last->before;
            region->top = (char *)last;
            r->counts.held -= (size_t)(old_top - region->top);
            forget(region, old_top);
        }
        if (region->last) {
            link = &region->next;
        } else {
            *link = region->next;
            region_delete(region);
        }
    }
    pthread_mutex_unlock(&r->lock);
}

size_t recycler_blocks(struct recycler *r, char **starts, char **ends, size_t *serials,
                       size_t most) {
    size_t n = 0;
    pthread_mutex_lock(&r->lock);
    for (struct region *region = r->regions; region; region = region->next) {
        if (region->top == region->start) continue;
        for (struct block *b = (struct block *)region->start; b; b = after(b), n++) {
            if (n >= most) continue;
            starts[n] = data_of(b);
            ends[n] = (char *)b + b->size;
            serials[n] = b->asked ? b->serial : 0;
        }
    }
    pthread_mutex_unlock(&r->lock);
    return n;
}

size_t recycler_serial(struct recycler *r, void *memory) {
    pthread_mutex_lock(&r->lock);
    size_t serial = block_of(memory)->serial;
    pthread_mutex_unlock(&r->lock);
    return serial;
}

int recycler_claim(struct recycler *r, char *start, char *end) {
    char *header = start - HEADER;
    pthread_mutex_lock(&r->lock);
    struct block *b = r->free;
    while (b && ((char *)b > header || (char *)b + b->size < end)) b = b->next;
    if (b) {
        size_t before = (size_t)(header - (char *)b);
        unlist(r, b);
        if (before) {
            struct block *rest = b;
            b = place(b->region, rest, header, rest->size - before);
            rest->size = before;
            list(r, rest);
        }
        cut(r, b, round_up((size_t)(end - header), HEADER));
        b->asked = (size_t)(end - start);
        b->serial = ++r->allocations;
        r->counts.in_use += b->asked;
        r->counts.peak = most(r->counts.peak, r->counts.in_use);
    }
    pthread_mutex_unlock(&r->lock);
    return b ? 0 : -1;
}

void recycler_clear(char *start, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *end = start + size, *first = aligned(start, page), *last = end - (uintptr_t)end % page;
    if (first < last && drop_pages(first, (size_t)(last - first)) == 0) {
        memset(start, 0, (size_t)(first - start));
        memset(last, 0, (size_t)(end - last));
    } else {
        memset(start, 0, size);
    }
}

/* Scratch memory of the kernels of this extension; see scratch.h. */

#ifdef PLAIN_MEMORY

void *scratch_take(size_t size) {
    void *memory;
    return posix_memalign(&memory, 64, size ? size : 1) ? NULL : memory;
}

void scratch_give_back(void *memory) { free(memory); }

#else

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct recycler *scratch;

static void create_scratch(void) { scratch = recycler_new(1, 1); }

void *scratch_take(size_t size) {
    pthread_once(&once, create_scratch);
    return scratch ? recycler_take(scratch, size ? size : 1) : NULL;
}

void scratch_give_back(void *memory) {
    pthread_once(&once, create_scratch);
    if (scratch) {
        recycler_give_back(scratch, memory);
    } else {
        free(memory);
    }
}

#endif
