#include "pool.h"

#include <cstdlib>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

NATIVE_TEXT(native_text_of_pool)

namespace {

// USED: a buffer. KEPT: free, with pages. EMPTY: free, without pages.
enum State : uint8_t { USED, KEPT, EMPTY };

struct Span {
    uintptr_t start;
    size_t size;
    State state;
};

constexpr size_t MOST_SPANS = 1 << 20, NONE = SIZE_MAX;
constexpr size_t LINE = 64, LINES = 64;

// All spans in the order of their addresses, without a hole. Two free neighbours differ in their state.
Span* spans;
size_t count;
uintptr_t low, high;
size_t page;
// The bytes of buffers, of kept spans, and the most that buffers took together.
size_t used, kept, most;
// The line of its first page at which the next buffer begins. If all buffers began at the same one, the rows of several
// tensors would compete for the same lines of a core's first cache: a training step in bf16 took 4 to 7 % longer.
size_t next_line;
// For the tests: the bytes that were returned to the kernel.
size_t returned;
pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void lock() { pthread_mutex_lock(&mutex); }
void unlock() { pthread_mutex_unlock(&mutex); }

struct Locked {
    Locked() { lock(); }
    ~Locked() { unlock(); }
};

void* reserve(size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

void insert(size_t at, const Span& span) {
    std::memmove(spans + at + 1, spans + at, (count++ - at) * sizeof(Span));
    spans[at] = span;
}

// Remove the spans from `at` to before `end`.
void remove(size_t at, size_t end) {
    std::memmove(spans + at, spans + end, (count - end) * sizeof(Span));
    count -= end - at;
}

// Divide a span after its first `size` bytes.
void divide(size_t at, size_t size) {
    Span& span = spans[at];
    if (span.size == size) return;
    const Span rest{span.start + size, span.size - size, span.state};
    span.size = size;
    insert(at + 1, rest);
}

// Join a free span with its neighbours of the same state.
void join(size_t at) {
    size_t first = at, end = at + 1;
    if (first > 0 && spans[first - 1].state == spans[at].state) --first;
    if (end < count && spans[end].state == spans[at].state) ++end;
    for (size_t i = first + 1; i < end; ++i) spans[first].size += spans[i].size;
    remove(first + 1, end);
}

// Return the index of the smallest kept span with at least `size` bytes, or NONE.
size_t fitting(size_t size) {
    size_t best = NONE;
    for (size_t i = 0; i < count; ++i)
        if (spans[i].state == KEPT && spans[i].size >= size && (best == NONE || spans[i].size < spans[best].size))
            best = i;
    return best;
}

// Return the first span of neighbouring free ones that together have `size` bytes and of these the most with pages, or
// NONE.
size_t best_row(size_t size) {
    size_t best = NONE, best_pages = 0;
    for (size_t i = 0; i < count; ++i) {
        size_t total = 0, pages = 0;
        for (size_t j = i; j < count && spans[j].state != USED && total < size; ++j) {
            const size_t part = spans[j].size < size - total ? spans[j].size : size - total;
            total += part;
            if (spans[j].state == KEPT) pages += part;
        }
        if (total == size && (best == NONE || pages > best_pages)) {
            best = i;
            best_pages = pages;
        }
    }
    return best;
}

// Make one used span of `size` bytes from the free spans that begin with `first`.
void occupy(size_t first, size_t size) {
    size_t total = 0, end = first;
    for (; total < size; ++end) {
        if (spans[end].size > size - total) divide(end, size - total);
        total += spans[end].size;
        if (spans[end].state == KEPT) kept -= spans[end].size;
    }
    spans[first].size = size;
    spans[first].state = USED;
    remove(first + 1, end);
    used += size;
}

// Return pages of the largest gaps to the kernel, until all pages together are no more than `most`.
void shrink() {
    while (used + kept > most) {
        size_t largest = NONE;
        for (size_t i = 0; i < count; ++i)
            if (spans[i].state == KEPT && (largest == NONE || spans[i].size > spans[largest].size)) largest = i;
        if (largest == NONE) return;
        const size_t surplus = used + kept - most;
        if (spans[largest].size > surplus) divide(largest, surplus);
        Span& span = spans[largest];
        // This fails for locked memory, which then keeps its pages.
        if (madvise(reinterpret_cast<void*>(span.start), span.size, MADV_DONTNEED) != 0) return join(largest);
        kept -= span.size;
        returned += span.size;
        span.state = EMPTY;
        join(largest);
    }
}

}  // namespace

bool pool_open(size_t capacity) {
    const Locked locked;
    if (spans) return true;
    page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* list = reserve(MOST_SPANS * sizeof(Span));
    void* range = list ? reserve(capacity) : nullptr;
    // A child process may be started while another thread holds the mutex.
    if (!range || pthread_atfork(lock, unlock, unlock) != 0) {
        if (range) munmap(range, capacity);
        if (list) munmap(list, MOST_SPANS * sizeof(Span));
        return false;
    }
    spans = static_cast<Span*>(list);
    low = reinterpret_cast<uintptr_t>(range);
    high = low + capacity;
    spans[0] = {low, capacity, EMPTY};
    count = 1;
    return true;
}

void* pool_take(size_t size) {
    const Locked locked;
    // Taking a buffer divides at most two spans.
    if (!spans || size == 0 || size > high - low || count + 2 > MOST_SPANS) return nullptr;
    const size_t line = next_line;
    next_line = (line + 27) % LINES;
    size = (size + line * LINE + page - 1) / page * page;
    size_t first = fitting(size);
    if (first == NONE) first = best_row(size);
    if (first == NONE) return nullptr;
    occupy(first, size);
    const uintptr_t start = spans[first].start;
    if (used > most) most = used;
    shrink();
    return reinterpret_cast<void*>(start + line * LINE);
}

bool pool_give(void* at) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(at);
    // Both are written once, before the pool has a buffer.
    if (start < low || start >= high) return false;
    const Locked locked;
    size_t first = 0, end = count;
    while (end - first > 1) {
        const size_t middle = (first + end) / 2;
        (spans[middle].start <= start ? first : end) = middle;
    }
    // Freed twice, or not an address that pool_take returned: glibc ends the process in this case too.
    if (start - spans[first].start >= LINE * LINES || spans[first].state != USED) std::abort();
    used -= spans[first].size;
    kept += spans[first].size;
    spans[first].state = KEPT;
    join(first);
    return true;
}

NATIVE_EXPORT int64_t native_pool_open(int64_t capacity) { return pool_open(static_cast<size_t>(capacity)); }
NATIVE_EXPORT void* native_pool_take(int64_t size) { return pool_take(static_cast<size_t>(size)); }
NATIVE_EXPORT int64_t native_pool_give(void* at) { return pool_give(at); }

// Write the bytes of buffers, of kept gaps, the most bytes of buffers, those returned to the kernel, and the number of
// spans.
NATIVE_EXPORT void native_pool_figures(int64_t* out) {
    const Locked locked;
    const size_t figures[] = {used, kept, most, returned, count};
    for (size_t figure : figures) *out++ = static_cast<int64_t>(figure);
}

// Never called: the reference keeps the linker from dropping the embedded source texts.
NATIVE_EXPORT const char* native_source_pool(int part) {
    return part == 0 ? native_text_of_pool : native_text_of_pool_header;
}
