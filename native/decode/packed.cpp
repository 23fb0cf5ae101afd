// x W^T + bias, with W packed in panels of 16 outputs: panel p holds W[16 p + j][k] at [k][j] (bf16: in another order
// within the 16, see `load`).
//
// Each result is one chain of multiply-adds over k, from 0 upwards, whatever the number of rows of x, the number of
// threads or the size of a block. So a row's result does not depend on the other rows, bit by bit.
#include "../compiled/native.h"

#include <algorithm>

NATIVE_TEXT(native_text_of_packed)

namespace {

constexpr int64_t WIDTH = 16;    // outputs of a panel
constexpr int64_t DEPTH = 256;   // k of a block: 16 KB of a panel in fp32, half of a small first-level cache
constexpr int64_t HEIGHT = 240;  // rows of a block: with DEPTH, 240 KB of x in the second-level cache
constexpr int64_t EXPAND = 12;   // rows from which a panel is converted to fp32 once, before use

typedef float V __attribute__((vector_size(32)));
typedef uint32_t U __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef int64_t L __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(32)));

// Load the 16 weights of one k. GCC 12 needs 4 to 9 instructions more for its own conversions from 8 and 16 bits.
NATIVE_INLINE void load(const float* at, V* low, V* high) {
    std::memcpy(low, at, sizeof *low);
    std::memcpy(high, at + 8, sizeof *high);
}

// bf16 lies as outputs 0, 8, 1, 9, ..., 7, 15: a shift and a mask make both halves.
NATIVE_INLINE void load(const uint16_t* at, V* low, V* high) {
    U pairs;
    std::memcpy(&pairs, at, sizeof pairs);
    *low = reinterpret_cast<V>(pairs << 16);
    *high = reinterpret_cast<V>(pairs & 0xffff0000u);
}

NATIVE_INLINE V widened(const int8_t* at) {
    int64_t bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    const L copies = {bytes, bytes, bytes, bytes};
    const B order = {0,  0,  0,  0,  1,  1,  1,  1,  2,  2,  2,  2,  3,  3,  3,  3,
                     20, 20, 20, 20, 21, 21, 21, 21, 22, 22, 22, 22, 23, 23, 23, 23};
    return __builtin_convertvector(reinterpret_cast<I>(__builtin_shuffle(reinterpret_cast<B>(copies), order)) >> 24, V);
}

NATIVE_INLINE void load(const int8_t* at, V* low, V* high) {
    *low = widened(at);
    *high = widened(at + 8);
}

struct Rows {
    const float* x;
    int64_t stride;
    float* out;
    int64_t out_stride;
};

// Add to the sums of ROWS x PANELS tiles; `begins`: the sums start at 0.
template <typename T, int ROWS, int PANELS>
NATIVE_INLINE void tile(const T* panel, int64_t panel_size, const Rows& rows, int64_t row, int64_t column,
                        int64_t begin, int64_t end, bool begins) {
    V sums[ROWS][PANELS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p)
            for (int h = 0; h < 2; ++h) {
                if (begins) sums[r][p][h] = V{};
                else
                    std::memcpy(&sums[r][p][h], rows.out + (row + r) * rows.out_stride + column + p * WIDTH + h * 8,
                                sizeof(V));
            }
    const float* x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = rows.x + (row + r) * rows.stride;
    for (int64_t k = begin; k < end; ++k) {
        for (int p = 0; p < PANELS; ++p) {
            V low, high;
            load(panel + p * panel_size + (k - begin) * WIDTH, &low, &high);
            for (int r = 0; r < ROWS; ++r) {
                sums[r][p][0] += low * x[r][k];
                sums[r][p][1] += high * x[r][k];
            }
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p)
            for (int h = 0; h < 2; ++h)
                std::memcpy(rows.out + (row + r) * rows.out_stride + column + p * WIDTH + h * 8, &sums[r][p][h],
                            sizeof(V));
}

// All rows [first, last) against one panel, or against `panels` of them for the few rows that are left over.
template <typename T>
NATIVE_INLINE void rows_of(const T* panel, const Rows& rows, int64_t first, int64_t last, int64_t column,
                           int64_t begin, int64_t end, bool begins) {
    int64_t row = first;
    for (; row + 6 <= last; row += 6) tile<T, 6, 1>(panel, 0, rows, row, column, begin, end, begins);
    for (; row + 4 <= last; row += 4) tile<T, 4, 1>(panel, 0, rows, row, column, begin, end, begins);
    for (; row + 2 <= last; row += 2) tile<T, 2, 1>(panel, 0, rows, row, column, begin, end, begins);
    for (; row < last; ++row) tile<T, 1, 1>(panel, 0, rows, row, column, begin, end, begins);
}

template <typename T>
NATIVE_INLINE void few(const T* weight, int64_t k, const Rows& rows, int64_t count, int64_t from, int64_t to) {
    const int64_t size = k * WIDTH;
    int64_t p = from;
    if (count == 1) {
        for (; p + 4 <= to; p += 4) tile<T, 1, 4>(weight + p * size, size, rows, 0, p * WIDTH, 0, k, true);
    } else if (count == 2) {
        for (; p + 2 <= to; p += 2) tile<T, 2, 2>(weight + p * size, size, rows, 0, p * WIDTH, 0, k, true);
    }
    for (; p < to; ++p) rows_of<T>(weight + p * size, rows, 0, count, p * WIDTH, 0, k, true);
}

NATIVE_INLINE const float* expanded(const float* panel, float*, int64_t) { return panel; }

template <typename T>
NATIVE_INLINE const float* expanded(const T* panel, float* scratch, int64_t depth) {
    for (int64_t i = 0; i < depth * WIDTH; i += WIDTH) {
        V low, high;
        load(panel + i, &low, &high);
        std::memcpy(scratch + i, &low, sizeof low);
        std::memcpy(scratch + i + 8, &high, sizeof high);
    }
    return scratch;
}

template <typename T>
NATIVE_INLINE void many(const T* weight, int64_t k, const Rows& rows, int64_t count, int64_t from, int64_t to) {
    float scratch[DEPTH * WIDTH] __attribute__((aligned(64)));
    for (int64_t row = 0; row < count; row += HEIGHT)
        for (int64_t begin = 0; begin < k; begin += DEPTH) {
            const int64_t end = std::min(k, begin + DEPTH), last = std::min(count, row + HEIGHT);
            for (int64_t p = from; p < to; ++p) {
                const float* panel = expanded(weight + p * k * WIDTH + begin * WIDTH, scratch, end - begin);
                rows_of<float>(panel, rows, row, last, p * WIDTH, begin, end, begin == 0);
            }
        }
}

// Panels [from, to) for all rows.
template <typename T>
NATIVE_INLINE void work(const T* weight, int64_t k, const Rows& rows, int64_t count, int64_t from, int64_t to) {
    if (count < EXPAND) few<T>(weight, k, rows, count, from, to);
    else many<T>(weight, k, rows, count, from, to);
}

template <typename T>
using Work = void (*)(const T*, int64_t, const Rows&, int64_t, int64_t, int64_t);

template <typename T>
void work_plain(const T* weight, int64_t k, const Rows& rows, int64_t count, int64_t from, int64_t to) {
    work<T>(weight, k, rows, count, from, to);
}
#ifdef NATIVE_X86
template <typename T>
NATIVE_AVX2 void work_avx2(const T* weight, int64_t k, const Rows& rows, int64_t count, int64_t from, int64_t to) {
    work<T>(weight, k, rows, count, from, to);
}
#endif

// `scales` multiplies each output (null: 1), then `bias` is added (null: 0).
void finish(const float* scales, const float* bias, const Rows& rows, int64_t count, int64_t from, int64_t to) {
    if (!scales && !bias) return;
    for (int64_t row = 0; row < count; ++row) {
        float* out = rows.out + row * rows.out_stride;
        for (int64_t i = from * WIDTH; i < to * WIDTH; ++i) {
            float value = out[i];
            if (scales) value *= scales[i];
            if (bias) value += bias[i];
            out[i] = value;
        }
    }
}

template <typename T>
void product(const T* weight, const float* scales, const float* bias, const Rows& rows, int64_t count, int64_t n,
             int64_t k, int threads, int level) {
    Work<T> run = work_plain<T>;
#ifdef NATIVE_X86
    if (level >= 1) run = work_avx2<T>;
#endif
    (void)level;
    const int64_t panels = n / WIDTH;
    // Small pieces let a thread that is disturbed do less; many rows need pieces that reuse a block of x.
    const int64_t piece = std::max<int64_t>(4, std::min<int64_t>(count < EXPAND ? 8 : 16, panels / threads / 4 * 4));
    const int64_t pieces = (panels + piece - 1) / piece;
    const bool alone = threads == 1 || n * k < 32768;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (!alone)
    for (int64_t i = 0; i < pieces; ++i) {
        const int64_t from = i * piece, to = std::min(panels, from + piece);
        run(weight, k, rows, count, from, to);
        finish(scales, bias, rows, count, from, to);
    }
}

}  // namespace

// The layout of `_Product` in packed.py. kind: 0 fp32, 1 bf16, 2 int8. n is a multiple of 16, and rows of `out` have
// room for n numbers.
struct Product {
    const void* weight;
    const float* scales;
    const float* bias;
    int64_t n, k;
    int kind, threads, level;
};

NATIVE_EXPORT void native_packed_product(const Product* of, const float* x, int64_t count, int64_t stride, float* out,
                                         int64_t out_stride) {
    const Rows rows{x, stride, out, out_stride};
    if (of->kind == 0)
        product(static_cast<const float*>(of->weight), of->scales, of->bias, rows, count, of->n, of->k, of->threads,
                of->level);
    else if (of->kind == 1)
        product(static_cast<const uint16_t*>(of->weight), of->scales, of->bias, rows, count, of->n, of->k,
                of->threads, of->level);
    else
        product(static_cast<const int8_t*>(of->weight), of->scales, of->bias, rows, count, of->n, of->k, of->threads,
                of->level);
}

NATIVE_EXPORT const char* native_source_packed() { return native_text_of_packed; }
