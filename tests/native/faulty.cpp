// Two faults that sanitizers must find: `.ci/sanitize` calls them before it trusts a run without a report.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) void write_after_the_end(float* x, int64_t n) { x[n] = 1.0f; }

extern "C" __attribute__((visibility("default"))) void add_without_order(float* x, int64_t n) {
#pragma omp parallel for num_threads(4)
    for (int64_t i = 0; i < n; ++i) x[0] += 1.0f;
}
