// A whole step of a model in one call: a list of instructions that all threads work through together.
//
// Threads take the pieces of an instruction as they become free (see team.h). Each result is computed in the same order by
// any thread and in any batch.
#include "packed.h"
#include "paged.h"
#include "team.h"

NATIVE_TEXT(native_text_of_program)

enum Op { EMBED, NORM, PRODUCT, PLACE, ATTEND, GATE, ADD, QUANTIZE };

// The layout of `_Instruction` in program.py. Rows of `x`, `out`, `rounded` and `sum` are the step's tokens; strides
// count numbers.
struct Instruction {
    int64_t op;
    int64_t of_wanted;  // whether the rows are only those whose logits are wanted
    void* x;            // fp32, or what a product reads instead
    float* out;         // or null
    uint16_t* rounded;  // the results in bf16, or null; QUANTIZE: in 8 bits, with strides in bytes
    float* sum;         // PRODUCT: rows to which the results are added, or null
    int64_t x_stride, out_stride, rounded_stride, sum_stride;
    const Product* product;  // PRODUCT; EMBED: the token table
    const float *weight, *bias;  // NORM; EMBED: the tables of positions; ADD: bias. Null: none
    float *keys, *values;        // PLACE, ATTEND: pages
    int64_t width;               // NORM: numbers of a norm; GATE, ADD, QUANTIZE: of a row; PLACE, ATTEND: of a head
    int64_t heads, groups;       // NORM: norms of a row
    int64_t rotated;             // PLACE: numbers of a head that are rotated
    int64_t interleaved, activation;
    float eps, scale;
};

// The layout of `_Step` in program.py.
struct Step {
    int64_t tokens, wanted, sequences, table_stride, room;
    const int64_t *ids, *positions, *inner_positions, *wanted_rows, *slots;
    const float *cosines, *sines;  // (tokens, rotated / 2)
    const int32_t *tables, *begins, *first, *last;
    float* scratch;  // (threads, TILE, room)
    int64_t threads, level;
};

namespace {

NATIVE_INLINE float weight_at(const Product& of, int64_t row, int64_t k) {
    const int64_t panel = row / WIDTH, j = row % WIDTH;
    if (of.kind == FP32) return static_cast<const float*>(of.weight)[(panel * of.k + k) * WIDTH + j];
    if (of.kind == BF16)
        return to_float(
            static_cast<const uint16_t*>(of.weight)[((panel * ((of.k + 1) / 2) + k / 2) * WIDTH + j) * 2 + k % 2]);
    const int64_t quarter = panel * (padded_inputs(INT8, of.k) / 4) + k / 4;
    const int8_t number = static_cast<const int8_t*>(of.weight)[(quarter * WIDTH + j) * 4 + k % 4];
    return static_cast<float>(number) * of.scales[row];
}

NATIVE_INLINE void embed(const Instruction& in, const Step& step, int64_t row) {
    const Product& table = *in.product;
    float* out = in.out + row * in.out_stride;
    const int64_t k = table.k;
    for (int64_t i = 0; i < k; ++i) out[i] = weight_at(table, step.ids[row], i);
    const float* first = in.weight ? in.weight + step.positions[row] * k : nullptr;
    const float* second = in.bias ? in.bias + step.inner_positions[row] * k : nullptr;
    if (first)
        for (int64_t i = 0; i < k; ++i) out[i] += first[i];
    if (second)
        for (int64_t i = 0; i < k; ++i) out[i] += second[i];
}

// Block size of sums over 16 lanes: a lane adds few enough fp32 numbers to keep its last bits.
constexpr int64_t BLOCK = 512;

NATIVE_INLINE void norm(const Instruction& in, const Step& step, int64_t row) {
    const int64_t n = in.width, from = in.of_wanted ? step.wanted_rows[row] : row;
    const bool centered = in.activation != 0;
    for (int64_t h = 0; h < in.heads; ++h) {
        const float* x = static_cast<const float*>(in.x) + from * in.x_stride + h * n;
        double sum = 0.0, squares = 0.0;
        if (centered)
            for (int64_t i = 0; i < n; i += BLOCK) sum += sum_of(x + i, n - i < BLOCK ? n - i : BLOCK);
        const float mean = static_cast<float>(sum / static_cast<double>(n));
        float part[BLOCK];
        for (int64_t i = 0; i < n; i += BLOCK) {
            const int64_t size = n - i < BLOCK ? n - i : BLOCK;
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) part[j] = (x[i + j] - mean) * (x[i + j] - mean);
            squares += sum_of(part, size);
        }
        const float inverse = 1.0f / std::sqrt(static_cast<float>(squares / static_cast<double>(n)) + in.eps);
        for (int64_t i = 0; i < n; i += BLOCK) {
            const int64_t size = n - i < BLOCK ? n - i : BLOCK;
#pragma omp simd
            for (int64_t j = 0; j < size; ++j) part[j] = (x[i + j] - mean) * inverse * in.weight[i + j];
            if (in.bias) {
#pragma omp simd
                for (int64_t j = 0; j < size; ++j) part[j] += in.bias[i + j];
            }
            if (in.out) std::memcpy(in.out + row * in.out_stride + h * n + i, part, sizeof(float) * size);
            uint16_t* rounded = in.rounded + row * in.rounded_stride + h * n + i;
            if (in.rounded) {
#pragma omp simd
                for (int64_t j = 0; j < size; ++j) store(&rounded[j], part[j]);
            }
        }
    }
}

// Turn a head by the angles of its token's position.
NATIVE_INLINE void rotate(float* head, const float* cosines, const float* sines, int64_t half, bool interleaved) {
    for (int64_t i = 0; i < half; ++i) {
        float* a = head + (interleaved ? 2 * i : i);
        float* b = head + (interleaved ? 2 * i + 1 : i + half);
        const float first = *a, second = *b;
        *a = first * cosines[i] - second * sines[i];
        *b = second * cosines[i] + first * sines[i];
    }
}

// Rotate a token's queries and keys, and put its keys and values into the cache.
NATIVE_INLINE void place(const Instruction& in, const Step& step, int64_t row) {
    float* queries = static_cast<float*>(in.x) + row * in.x_stride;
    float* keys = queries + in.heads * in.width;
    const int64_t half = in.rotated / 2;
    for (int64_t h = 0; half && h < in.heads + in.groups; ++h)
        rotate(queries + h * in.width, step.cosines + row * half, step.sines + row * half, half, in.interleaved != 0);
    store_token(keys, keys + in.groups * in.width, in.keys, in.values, step.slots[row], in.groups, in.width);
}

// silu(gate) x up, of a row that has gate and up side by side.
NATIVE_INLINE void gate(const Instruction& in, int64_t row) {
    const float* x = static_cast<const float*>(in.x) + row * in.x_stride;
    const float* up = x + in.width;
    if (in.rounded) {
        uint16_t* rounded = in.rounded + row * in.rounded_stride;
#pragma omp simd
        for (int64_t i = 0; i < in.width; ++i) store(&rounded[i], x[i] * logistic(x[i]) * up[i]);
    } else {
        float* out = in.out + row * in.out_stride;
#pragma omp simd
        for (int64_t i = 0; i < in.width; ++i) out[i] = x[i] * logistic(x[i]) * up[i];
    }
}

NATIVE_INLINE void add(const Instruction& in, int64_t row) {
    const float* x = static_cast<const float*>(in.x) + row * in.x_stride;
    float* out = in.out + row * in.out_stride;
    for (int64_t i = 0; i < in.width; ++i) out[i] += in.bias ? x[i] + in.bias[i] : x[i];
}

NATIVE_INLINE void compute_row(const Instruction& in, const Step& step, int64_t row) {
    switch (in.op) {
        case EMBED: return embed(in, step, row);
        case NORM: return norm(in, step, row);
        case PLACE: return place(in, step, row);
        case GATE: return gate(in, row);
        case ADD: return add(in, row);
        case QUANTIZE:
            return quantize_row(static_cast<const float*>(in.x) + row * in.x_stride, in.width,
                                reinterpret_cast<int8_t*>(in.rounded) + row * in.rounded_stride);
    }
}

using Row = void (*)(const Instruction&, const Step&, int64_t);

void row_plain(const Instruction& in, const Step& step, int64_t row) { compute_row(in, step, row); }
#ifdef NATIVE_X86
NATIVE_AVX2 void row_avx2(const Instruction& in, const Step& step, int64_t row) { compute_row(in, step, row); }
#endif

struct Code {
    const Instruction* code;
    const Step& step;
    Row row_of;
};

int64_t rows_of(const Instruction& in, const Step& step) { return in.of_wanted ? step.wanted : step.tokens; }

Batch batch_of(const Instruction& in, const Step& step) {
    return {static_cast<const float*>(in.x), in.out, in.keys, in.values, step.tables, step.begins, step.first,
            step.last, nullptr, in.x_stride, step.table_stride, step.room, step.sequences, in.heads, in.groups,
            in.width, in.scale, 1, static_cast<int>(step.level), in.rounded};
}

int64_t pieces_of(const Instruction& in, const Step& step) {
    const int64_t rows = rows_of(in, step);
    if (in.op == PRODUCT) return Pieces(rows, in.product->n / WIDTH, step.threads).count;
    if (in.op != ATTEND) return rows;
    const Batch batch = batch_of(in, step);
    return Tasks(batch).count;
}

void multiply(const Instruction& in, const Step& step, int64_t piece) {
    const Product& of = *in.product;
    const Rows own{in.x, in.x_stride, in.out, in.out_stride};
    const After after{static_cast<int>(in.activation), in.sum, in.sum_stride, in.rounded, in.rounded_stride};
    const int64_t rows = rows_of(in, step);
    const Pieces pieces(rows, of.n / WIDTH, step.threads);
    run_piece(panels_of(of), of, own, after, rows, pieces, piece);
}

void compute(const void* context, int64_t task, int64_t piece, int thread) {
    const Code& all = *static_cast<const Code*>(context);
    const Instruction& in = all.code[task];
    const Step& step = all.step;
    if (in.op == PRODUCT) return multiply(in, step, piece);
    if (in.op != ATTEND) return all.row_of(in, step, piece);
    const Batch batch = batch_of(in, step);
    Tasks(batch).compute(piece, step.scratch + thread * TILE * step.room);
}

// The log probability of a row's target, and whether it is the first of the largest logits.
NATIVE_INLINE void likelihood_of(const float* x, int64_t n, int64_t target, float* likelihood, uint8_t* best) {
    const float most = max_of(x, n);
    double total = 0.0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t size = n - i < BLOCK ? n - i : BLOCK;
        float part[BLOCK];
#pragma omp simd
        for (int64_t j = 0; j < size; ++j) part[j] = exp_nonpositive(x[i + j] - most);
        total += sum_of(part, size);
    }
    *likelihood = static_cast<float>(x[target] - most - std::log(total));
    *best = x[target] == most;
    for (int64_t i = 0; *best && i < target; ++i) *best = x[i] != most;
}

using Likelihood = void (*)(const float*, int64_t, int64_t, float*, uint8_t*);

void likelihood_plain(const float* x, int64_t n, int64_t target, float* likelihood, uint8_t* best) {
    likelihood_of(x, n, target, likelihood, best);
}
#ifdef NATIVE_X86
NATIVE_AVX2 void likelihood_avx2(const float* x, int64_t n, int64_t target, float* likelihood, uint8_t* best) {
    likelihood_of(x, n, target, likelihood, best);
}
#endif

// Never destroyed: its threads run until the process ends.
Team& team() {
    static Team* own = new Team;
    return *own;
}

}  // namespace

// Work through `count` instructions; `pieces` has room for a number for each.
NATIVE_EXPORT void native_program_run(const Instruction* code, int64_t count, const Step* step, uint32_t* pieces) {
    Code all{code, *step, row_plain};
#ifdef NATIVE_X86
    if (step->level >= 1) all.row_of = row_avx2;
#endif
    for (int64_t i = 0; i < count; ++i) pieces[i] = static_cast<uint32_t>(pieces_of(code[i], *step));
    team().run(&all, compute, pieces, count, static_cast<int>(step->threads));
}

// Return the index of the largest number, the first of several.
NATIVE_EXPORT int64_t native_program_largest(const float* x, int64_t n) {
    const float most = max_of(x, n);
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == most) return i;
    return 0;
}

// Of rows of n logits, `stride` apart: the log probability of each row's target, and whether no other is more likely.
NATIVE_EXPORT void native_program_likelihoods(const float* logits, int64_t stride, int64_t rows, int64_t n,
                                              const int64_t* targets, float* likelihoods, uint8_t* best,
                                              int64_t threads, int64_t level) {
    Likelihood run = likelihood_plain;
#ifdef NATIVE_X86
    if (level >= 1) run = likelihood_avx2;
#endif
    (void)level;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (rows > 8)
    for (int64_t r = 0; r < rows; ++r) run(logits + r * stride, n, targets[r], likelihoods + r, best + r);
}

NATIVE_EXPORT const char* native_source_program() { return native_text_of_program; }
