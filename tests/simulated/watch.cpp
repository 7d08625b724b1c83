/* A detector of races in kernels that are emulated, and of what else compute-sanitizer looks for.
 *
 * The kernels are compiled with -fsanitize=thread, whose hooks, called at each access of memory,
 * are here instead of in a library. Since one thread runs at a time, nothing is judged by what
 * happened, but by what would have to happen in every order (Lamport 1978; Flanagan and Freund,
 * FastTrack, PLDI 2009): two accesses of an element by different threads, of which one writes, are
 * a race unless one comes before the other
 *
 *   - in a block: by a barrier of the block in between. Shuffles order no memory.
 *   - in two blocks: only so: the first access; a fence, by its thread or after a barrier; an atomic
 *     access; an atomic access of the same word by the other block; a fence; the second access.
 *     What threads of the block that fenced and went through a barrier know, all of them know.
 *
 * So the order of blocks and threads that the emulator took does not matter, but for this: of an
 * element's readers since the last write the first and the last block are kept, and in a block
 * those since the last barrier.
 *
 * Addresses decide what an access is: those on the stack of a fiber are the thread's own, the others
 * lie in ranges that the tests name (arrays of the launch, shared memory), or are nobody's.
 */
#include "watch.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

/* -- what the tests see (watched.py) ----------------------------------------------------------- */

/* Memory that a kernel may use; other memory is nobody's. */
struct Range {
    const char *begin;
    long long size;
    int grain;            /* bytes of an element; 0: what is done there is of no interest */
    int shared;           /* between the threads of one block at a time */
    unsigned char *fresh; /* a byte for each: not 0 if it was never written; or null */
};

enum Kind { RACE, OUTSIDE, UNWRITTEN, MISALIGNED, OVERFLOW, DIVERGED, STUCK };

/* One of the two that have to do with each other: a thread, what it did, and where. */
struct Party {
    unsigned block, thread;
    int write, line;
    const char *file; /* null: see `code` */
    const void *code; /* the instruction after it */
};
struct Finding {
    int kind, parties;
    const char *address;
    Party party[2]; /* the later one first */
};

/* ----------------------------------------------------------------------------------------------- */

namespace {

enum { MANY = 0xffff, MOST = 200 };

/* An access: by whom, after how many barriers of the block and fences of the thread. */
struct Stamp {
    const void *code;
    unsigned block; /* from 1 on; 0: there was none */
    uint16_t thread, phase, fences;
    bool write, atomic;
};

/* The last writer of an element and two readers since: one of the first block and of the last. */
struct Cell {
    Stamp write, first, last;
};

struct Memory {
    Range range;
    std::unique_ptr<Cell[], void (*)(void *)> cells;
};

/* What of a block's accesses was made known by an atomic access. */
struct Release {
    std::vector<uint16_t> fences; /* of each thread */
    uint16_t fewest;
    int phase; /* all accesses before this one are known, too */
    unsigned number;
    bool has(const Stamp &access) const {
        const uint16_t known = access.thread == MANY ? fewest : fences[access.thread];
        return access.fences < known || access.phase < phase;
    }
};

/* By block. What is known is complete up to a release, so the last one says all. */
typedef std::map<unsigned, std::shared_ptr<const Release>> Known;

void learn(Known &all, const Known &more) {
    for (const auto &[block, release] : more) {
        auto &known = all[block];
        if (!known || known->number < release->number) known = release;
    }
}

struct Thread {
    uint16_t fences = 0, settled = 0; /* settled: before the last barrier */
    int fenced = -1;                  /* the phase of its last fence */
    bool ended = false, waits = false;
    int warp;
    const char *file;
    int line;
    Known read, acquired; /* by atomic accesses; and what a fence since has made sure */
};

std::vector<Memory> memories;
std::vector<Thread> threads;
std::map<const void *, Known> released; /* by the address of the word */
Known block_read, block_acquired;       /* what all threads of the block have by a barrier */
std::vector<Finding> findings;
std::set<std::tuple<int, const void *, const void *, int, int>> reported;
const char *ignored;
int ignored_line, settled_fence;
const char *stack;
unsigned stack_size, block, current, releases;
uint16_t phase;
bool inside;
void (*abandon)();

bool is_ignored(const char *file, int line) {
    if (!ignored || line != ignored_line) return false;
    const size_t length = std::strlen(file), wanted = std::strlen(ignored);
    return length >= wanted && !std::strcmp(file + length - wanted, ignored);
}

void report(int kind, const char *address, std::vector<Party> parties) {
    Finding finding = {kind, (int)parties.size(), address, {}};
    std::copy(parties.begin(), parties.end(), finding.party);
    const auto &[a, b] = finding.party;
    if (findings.size() < MOST && reported.insert({kind, a.code, b.code, a.line, b.line}).second) {
        findings.push_back(finding);
    }
    if (kind == OUTSIDE || kind == MISALIGNED) { /* it might be the end of the process */
        inside = false;
        abandon();
    }
}

Party party(const Stamp &by) {
    return {by.block - 1, by.thread, by.write, 0, nullptr, by.code};
}
Party here(const char *file, int line) { return {block - 1, current, 0, line, file, nullptr}; }

/* -- who comes before whom -------------------------------------------------------------------- */

bool comes_before(const Stamp &earlier, const Stamp &now) {
    if (earlier.block == now.block) {
        return earlier.thread == now.thread || earlier.phase != now.phase;
    }
    for (const Known *known : {&threads[now.thread].acquired, &block_acquired}) {
        const auto found = known->find(earlier.block);
        if (found != known->end() && found->second->has(earlier)) return true;
    }
    return false;
}

void hold_against(const Stamp &earlier, const Stamp &now, const char *address) {
    if (!earlier.block || !(earlier.write || now.write) || (earlier.atomic && now.atomic)) return;
    if (!comes_before(earlier, now)) report(RACE, address, {party(now), party(earlier)});
}

/* Readers of one block are one, if need be of many threads. */
void add_reader(Stamp &known, const Stamp &now) {
    const bool others = known.phase == now.phase && known.thread != now.thread;
    known = {now.code, now.block, others ? (uint16_t)MANY : now.thread, now.phase,
             std::max(known.fences, now.fences), false, now.atomic && known.atomic};
}

void touch(Cell &cell, const Stamp &now, const char *address, bool shared) {
    if (shared) { /* of another block: another memory */
        if (cell.write.block != block && cell.first.block != block) cell = {};
        if (!now.write && !cell.write.block) report(UNWRITTEN, address, {party(now)});
    }
    hold_against(cell.write, now, address);
    if (now.write) {
        hold_against(cell.first, now, address);
        hold_against(cell.last, now, address);
        cell = {now, {}, {}};
    } else if (!cell.first.block) {
        cell.first = now;
    } else if (cell.first.block == now.block) {
        add_reader(cell.first, now);
    } else if (cell.last.block == now.block) {
        add_reader(cell.last, now);
    } else {
        cell.last = now;
    }
}

Memory *memory_of(const char *at) {
    static size_t last;
    const auto holds = [at](const Memory &m) {
        return at >= m.range.begin && at < m.range.begin + m.range.size;
    };
    if (last < memories.size() && holds(memories[last])) return &memories[last];
    auto next = std::upper_bound(memories.begin(), memories.end(), at, [](auto a, const auto &m) {
        return a < m.range.begin;
    });
    if (next == memories.begin() || !holds(*--next)) return nullptr;
    last = next - memories.begin();
    return &*next;
}

void access(const void *address, long size, bool write, const void *code, bool atomic = false) {
    const char *at = (const char *)address;
    if (!inside || (at >= stack && at < stack + stack_size)) return;
    const Stamp now = {code, block, (uint16_t)current, phase, threads[current].fences, write, atomic};
    Memory *memory = memory_of(at);
    if (!memory || at + size > memory->range.begin + memory->range.size) {
        return report(OUTSIDE, at, {party(now)});
    }
    const Range &range = memory->range;
    if (!range.grain) return;
    const long begin = at - range.begin, last = (begin + size - 1) / range.grain;
    for (long i = begin / range.grain; i <= last; i++) {
        touch(memory->cells[i], now, range.begin + i * range.grain, range.shared);
    }
    if (!range.fresh) return;
    if (!write && std::count(range.fresh + begin, range.fresh + begin + size, 0) != size) {
        report(UNWRITTEN, at, {party(now)});
    }
    std::memset(range.fresh + begin, 0, size);
}

}  // namespace

/* -- what the emulator tells -------------------------------------------------------------------- */

extern "C" {

void watch_block(unsigned number, unsigned count, void (*to_abandon)()) {
    abandon = to_abandon;
    block = number + 1;
    phase = 0;
    settled_fence = -1;
    threads.assign(count, {});
    block_read.clear();
    block_acquired.clear();
}

void watch_enter(unsigned thread, const char *of_stack, unsigned size) {
    current = thread;
    stack = of_stack;
    stack_size = size;
    inside = true;
}

void watch_end() {
    inside = false;
    threads[current].ended = true;
}

void watch_arrive(int warp, unsigned mask, const char *file, int line) {
    inside = false;
    Thread &own = threads[current];
    own.waits = true;
    own.warp = warp;
    own.file = file;
    own.line = line;
    const unsigned first = warp * 32, lanes = std::min<unsigned>(threads.size() - first, 32);
    if (warp >= 0 && mask != ~0u >> (32 - lanes)) report(DIVERGED, nullptr, {here(file, line)});
}

void watch_met(int warp) {
    const unsigned first = warp < 0 ? 0 : warp * 32;
    const unsigned end = std::min<size_t>(warp < 0 ? ~0u : first + 32, threads.size());
    for (unsigned t = first; t < end; t++) {
        const Thread &own = threads[current];
        Thread &other = threads[t];
        other.waits = false;
        if (own.line == other.line && own.file == other.file) continue;
        report(DIVERGED, nullptr,
               {here(own.file, own.line), {block - 1, t, 0, other.line, other.file, nullptr}});
    }
    if (warp >= 0 || is_ignored(threads[current].file, threads[current].line)) return;
    for (Thread &thread : threads) {
        thread.settled = thread.fences;
        if (thread.fenced == phase) settled_fence = phase;
        learn(block_read, thread.read);
        learn(block_acquired, thread.acquired);
    }
    phase++;
}

void watch_stuck() {
    std::vector<Party> parties;
    for (const bool waits : {true, false}) {
        for (unsigned t = 0; t < threads.size(); t++) {
            const Thread &thread = threads[t];
            const bool same = parties.size() && waits && parties[0].line == thread.line;
            if (thread.waits != waits || same || parties.size() == 2) continue;
            parties.push_back({block - 1, t, 0, waits ? thread.line : 0,
                               waits ? thread.file : "the end", nullptr});
        }
    }
    report(STUCK, nullptr, parties);
}

void watch_fence(const char *file, int line) {
    if (is_ignored(file, line)) return;
    Thread &own = threads[current];
    own.fences++;
    own.fenced = phase;
    learn(own.acquired, own.read);
    learn(own.acquired, block_read);
}

void watch_atomic(const void *at, unsigned size) {
    access(at, size, true, __builtin_return_address(0), true);
    Thread &own = threads[current];
    auto release = std::make_shared<Release>();
    for (const Thread &thread : threads) {
        release->fences.push_back(&thread == &own ? thread.fences : thread.settled);
    }
    release->fewest = *std::min_element(release->fences.begin(), release->fences.end());
    release->phase = std::max(settled_fence, own.fenced);
    release->number = ++releases;
    Known &word = released[at];
    learn(own.read, word);
    learn(word, own.acquired);
    learn(word, block_acquired);
    word[block] = release;
}

/* -- what the tests ask ------------------------------------------------------------------------- */

/* Begin a launch. The barrier or fence of this line, if any, is carried out but orders nothing. */
void watch_launch(const Range *ranges, int count, const char *ignored_file, int line) {
    memories.clear();
    for (int i = 0; i < count; i++) {
        const size_t cells = ranges[i].grain ? ranges[i].size / ranges[i].grain + 1 : 0;
        memories.push_back({ranges[i], {(Cell *)std::calloc(cells, sizeof(Cell)), std::free}});
    }
    std::sort(memories.begin(), memories.end(), [](const Memory &a, const Memory &b) {
        return a.range.begin < b.range.begin;
    });
    released.clear();
    findings.clear();
    reported.clear();
    ignored = ignored_file;
    ignored_line = line;
}

/* What was found since then: of each pair of instructions the first. */
int watch_findings(const Finding **found) {
    *found = findings.data();
    return (int)findings.size();
}

/* -- what the compiler's instrumentation calls --------------------------------------------------- */

#define CODE __builtin_return_address(0)
#define HOOKS(SIZE)                                                                                \
    void __tsan_read##SIZE(void *at) { access(at, SIZE, false, CODE); }                            \
    void __tsan_write##SIZE(void *at) { access(at, SIZE, true, CODE); }                            \
    void __tsan_unaligned_read##SIZE(void *at) { access(at, SIZE, false, CODE); }                  \
    void __tsan_unaligned_write##SIZE(void *at) { access(at, SIZE, true, CODE); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void *at, unsigned long size) { access(at, size, false, CODE); }
void __tsan_write_range(void *at, unsigned long size) { access(at, size, true, CODE); }
void __tsan_init() {}

/* -fsanitize=alignment,bounds,shift,signed-integer-overflow */
static void mistake(int kind, const void *address, const void *code) {
    if (inside) report(kind, (const char *)address, {{block - 1, current, 0, 0, nullptr, code}});
}
void __ubsan_handle_type_mismatch_v1(void *, void *at) { mistake(MISALIGNED, at, CODE); }
void __ubsan_handle_out_of_bounds(void *, void *) { mistake(OUTSIDE, nullptr, CODE); }
#define OVERFLOWS(WHAT)                                                                            \
    void __ubsan_handle_##WHAT(void *, void *, void *) { mistake(OVERFLOW, nullptr, CODE); }
OVERFLOWS(add_overflow)
OVERFLOWS(sub_overflow)
OVERFLOWS(mul_overflow)
OVERFLOWS(divrem_overflow)
OVERFLOWS(shift_out_of_bounds)
OVERFLOWS(negate_overflow)

}
