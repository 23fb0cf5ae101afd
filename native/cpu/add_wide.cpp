// Add a bf16 tensor to an fp32 tensor: both are read once, without an fp32 copy of the bf16 tensor.
#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_add_wide)

namespace {

constexpr int64_t PIECE = 1 << 15;

struct AddWide {
    NATIVE_INLINE void run(float* total, const uint16_t* x, int64_t count) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) total[i] += to_float(x[i]);
    }
};

}  // namespace

NATIVE_EXPORT void native_add_wide(float* total, const uint16_t* x, int64_t count, int threads, int level) {
    const auto add = for_level<AddWide, float*, const uint16_t*, int64_t>(level);
    const int64_t pieces = (count + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) num_threads(threads) if (pieces > 1)
    for (int64_t p = 0; p < pieces; ++p) {
        const int64_t start = p * PIECE;
        add(total + start, x + start, count - start < PIECE ? count - start : PIECE);
    }
}

NATIVE_EXPORT const char* native_source_add_wide() { return native_text_of_add_wide; }
