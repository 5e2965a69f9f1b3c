// The few loops of a decode step that no library has: attention over a paged cache, and what lies between products.
//
// Every function computes each row by itself, in an order that depends on the row alone: how rows are tiled, threaded
// or batched never changes a bit. vectors.h has the vectors; tiles are as large as the machine has registers for.
//
// Partial softmax: Milakov and Gimelshein, arXiv:1805.02867.

#include "vectors.h"
#include <cmath>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else  // a compiler without it, such as Apple's: one thread
inline int omp_get_num_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
#endif
#ifdef __linux__
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int CHUNK = 128;  // positions whose softmax is taken at once; aligned to multiples of it
constexpr bool ONE_REGISTER = PARTS == 1;  // AVX-512: 32 of them, each a vector. Elsewhere some 16 vectors' halves

// A layer's cache. Keys lie as [block][kv_head][16 positions][dim word][position][element]: a vector holds 16
// positions. Values lie as [block][kv_head][position word][value_dim][element]: a vector holds 16 dimensions.
template <class T> struct Cache {
    T *keys, *values;
    int kv_heads, block_size, key_dim, value_dim, padded;  // padded: value_dim filled up to vectors

    T* key_block(int block, int head) const { return keys + (int64_t(block) * kv_heads + head) * block_size * key_dim; }
    T* value_block(int block, int head) const {
        return values + (int64_t(block) * kv_heads + head) * block_size * padded;
    }
    void write(int slot, int head, const T* key, const T* value) const {
        constexpr int W = PER_WORD<T>;
        int at = slot % block_size;
        T* k = key_block(slot / block_size, head) + (at / LANES) * LANES * key_dim + (at % LANES) * W;
        for (int d = 0; d < key_dim; d += W) std::memcpy(k + d * LANES, key + d, sizeof(float));
        T* v = value_block(slot / block_size, head) + int64_t(at / W) * W * padded + at % W;
        for (int d = 0; d < value_dim; d++) v[d * W] = value[d];
    }
};

struct Row {  // one token: it sees the first `seen` positions (the last `window` of them) of the blocks in `table`
    int token, seen;
    const int32_t* table;
};

// A tile of rows with all query heads of one kv head, through their chunks.
template <class T> class Tile {
  public:
    Tile(const Cache<T>& cache, int heads, float scaling, int window, float softcap)
        : cache(cache), groups(heads / cache.kv_heads), scaling(scaling), window(window), softcap(softcap) {}

    void run(int kv_head, const Row* rows, int count, const T* query, int64_t head_stride, int64_t token_stride,
             const float* sinks, T* output, float* lse, int tokens) {
        int vectors = count * groups, dim = cache.key_dim, last = 0, heads = groups * cache.kv_heads;
        queries.resize(size_t(vectors) * dim);
        outputs.assign(size_t(vectors) * cache.padded, 0.0f);
        tops.assign(vectors, -INFINITY);
        totals.assign(vectors, 0.0f);
        for (int r = 0; r < count; r++) {
            last = std::max(last, rows[r].seen);
            for (int g = 0; g < groups; g++)
                to_operand(query + (kv_head * groups + g) * head_stride + rows[r].token * token_stride,
                           &queries[size_t(r * groups + g) * dim], dim);
        }
        plan(kv_head, rows, count, last);
        for (const Run& run : runs) attend(kv_head, rows, run);
        for (int v = 0; v < vectors; v++) {
            int head = kv_head * groups + v % groups, token = rows[v / groups].token;
            if (sinks) fold(v, sinks[head], 1.0f, nullptr);
            const float* from = &outputs[size_t(v) * cache.padded];
            T* to = output + (int64_t(token) * heads + head) * cache.value_dim;
            int d = 0;
            for (; d + LANES <= cache.value_dim; d += LANES) store_narrow(to + d, load(from + d) / totals[v]);
            for (; d < cache.value_dim; d++) narrow(from[d] / totals[v], to[d]);
            if (lse) lse[int64_t(head) * tokens + token] = tops[v] + std::log(totals[v]);
        }
    }

  private:
    const Cache<T> cache;
    int groups;
    float scaling;
    int window;
    float softcap;
    std::vector<Operand<T>> queries;
    std::vector<float> outputs, tops, totals, scores, peaks, sums, partials;
    std::vector<Operand<T>> weights;

    int blocks_of(const Row& row, int start) const {
        return (std::min(std::max(row.seen - start, 0), CHUNK) + cache.block_size - 1) / cache.block_size;
    }
    bool same_blocks(const Row& a, const Row& b, int start) const {
        if (a.table == b.table) return true;
        int n = blocks_of(a, start), first = start / cache.block_size;
        return n == blocks_of(b, start) && std::equal(a.table + first, a.table + first + n, b.table + first);
    }

    struct Run {  // rows [first, end) read the same blocks in the chunk at `start`
        int first, end, start;
    };
    std::vector<Run> runs;

    // What the runs will read, in order: fetched at an even pace, so that memory works while there is much to compute.
    std::vector<const T*> blocks;
    size_t fetched;
    int64_t line, lines_per_block;
    int pace;  // lines a tick

    void plan(int kv_head, const Row* rows, int count, int last) {
        runs.clear();
        blocks.clear();
        int64_t ticks = 1;
        for (int start = 0; start < last; start += CHUNK)
            for (int r = 0, end; r < count; r = end) {
                for (end = r + 1; end < count && same_blocks(rows[r], rows[end], start); end++) {}
                runs.push_back({r, end, start});
                int n = 0;
                for (int i = r; i < end; i++) n = std::max(n, blocks_of(rows[i], start));
                for (int i = 0; i < n; i++) {
                    int block = rows[r].table[std::min(start / cache.block_size + i, (rows[r].seen - 1) / cache.block_size)];
                    blocks.push_back(cache.key_block(block, kv_head));
                    blocks.push_back(cache.value_block(block, kv_head));
                }
                ticks += int64_t(n) * ((end - r) * groups + 3) / 4 * cache.block_size / 2;
            }
        fetched = 0, line = 0;
        lines_per_block = int64_t(cache.block_size) * std::min(cache.key_dim, cache.padded) * sizeof(T) / 64;
        pace = int(blocks.size() * lines_per_block / ticks + 1);
    }
    inline void fetch() {
        for (int i = 0; i < pace && fetched < blocks.size(); i++) {
            __builtin_prefetch(reinterpret_cast<const char*>(blocks[fetched]) + line * 64, 0, 2);
            if (++line == lines_per_block) line = 0, fetched++;
        }
    }

    void attend(int kv_head, const Row* rows, const Run& run) {
        int first = run.first, end = run.end, start = run.start;
        int seen = 0, least = INT32_MAX;
        const int32_t* table = rows[first].table;
        for (int r = first; r < end; r++) {
            if (rows[r].seen > seen) { seen = rows[r].seen; table = rows[r].table; }
            least = std::min(least, rows[r].seen);
        }
        if (seen <= start || (window && start + CHUNK <= least - window)) return;
        int length = std::min(seen - start, CHUNK), vectors = (end - first) * groups;
        table += start / cache.block_size;
        scores.resize(size_t(vectors) * CHUNK);
        weights.resize(size_t(vectors) * CHUNK);
        score(kv_head, table, length, first * groups, vectors);
        peaks.resize(vectors);
        sums.resize(vectors);
        for (int v = 0; v < vectors; v++) {
            const Row& row = rows[first + v / groups];
            soften(v, std::min(row.seen - start, CHUNK), window ? std::max(row.seen - window - start, 0) : 0, length);
        }
        weigh(kv_head, table, length, first * groups, vectors);
    }

    // scores[v][position] = query · key
    void score(int kv_head, const int32_t* table, int length, int base, int vectors) {
        for (int p = 0; p < length; p += LANES) {
            const T* keys = cache.key_block(table[p / cache.block_size], kv_head) + lanes_at(p) * cache.key_dim;
            int v = 0;
            if (ONE_REGISTER)
                for (; v + 8 <= vectors; v += 8) score_some<8>(keys, base + v, v, p);
            for (; v + 3 <= vectors; v += 3) score_some<3>(keys, base + v, v, p);
            for (; v < vectors; v++) score_some<1>(keys, base + v, v, p);
        }
    }
    int lanes_at(int p) const { return p % cache.block_size / LANES * LANES; }
    template <int N> inline void score_some(const T* keys, int from, int to, int p) {
        constexpr int W = PER_WORD<T>;
        Sums<N, 1> even, odd;  // two sums: one's latency hides behind the other's
        const Operand<T>* q = &queries[size_t(from) * cache.key_dim];
        int d = 0;
        for (; d + 2 * W <= cache.key_dim; d += 2 * W) {
            fetch();
            multiply_add(even, keys + d * LANES, 0, q + d, cache.key_dim);
            multiply_add(odd, keys + (d + W) * LANES, 0, q + d + W, cache.key_dim);
        }
        if (d < cache.key_dim) multiply_add(even, keys + d * LANES, 0, q + d, cache.key_dim);
        UNROLLED for (int i = 0; i < N; i++) store(&scores[size_t(to + i) * CHUNK + p], even.vector(i, 0) + odd.vector(i, 0));
    }

    // From scores to exponentials; positions outside [hidden, seen) get weight 0.
    void soften(int v, int seen, int hidden, int length) {
        float* s = &scores[size_t(v) * CHUNK];
        Floats top = all(-INFINITY), total{};
        const Ints lanes = lane_numbers();
        const int plain = hidden ? 0 : seen;  // positions before it are all seen
        for (int p = 0; p < length; p += LANES) {
            Floats x = load(s + p) * scaling;
            if (softcap != 0) {
                store(s + p, x);
                for (int i = p; i < p + LANES; i++) s[i] = softcap * std::tanh(s[i] / softcap);
                x = load(s + p);
            }
            if (p + LANES > plain) {
                Ints at = lanes + p;
                x = where((at < all_of<Ints>(seen)) & (at >= all_of<Ints>(hidden)), x, all(-INFINITY));
            }
            top = most(x, top);
            store(s + p, x);
        }
        peaks[v] = largest(top);
        float subtract = std::max(peaks[v], -3.4e38f);
        Operand<T>* w = &weights[size_t(v) * CHUNK];
        for (int p = 0; p < length; p += LANES) {
            Floats e = exponential(load(s + p) - subtract);
            total += e;
            store_operand<T>(w + p, e);
        }
        sums[v] = sum(total);
    }

    // Add each vector's weighted values to what it has.
    void weigh(int kv_head, const int32_t* table, int length, int base, int vectors) {
        partials.resize(size_t(vectors) * cache.padded);
        int v = 0;
        if (ONE_REGISTER)
            for (; v + 4 <= vectors; v += 4) weigh_some<4>(kv_head, table, length, v);
        for (; v + 3 <= vectors; v += 3) weigh_some<3>(kv_head, table, length, v);
        for (; v < vectors; v++) weigh_some<1>(kv_head, table, length, v);
        for (v = 0; v < vectors; v++) fold(base + v, peaks[v], sums[v], &partials[size_t(v) * cache.padded]);
    }
    template <int N> inline void weigh_some(int kv_head, const int32_t* table, int length, int v) {
        constexpr int WIDE = ONE_REGISTER ? 4 : 2;
        int d = 0;
        for (; d + WIDE * LANES <= cache.padded; d += WIDE * LANES) add_up<N, WIDE>(kv_head, table, length, v, d);
        for (; d < cache.padded; d += LANES) add_up<N, 1>(kv_head, table, length, v, d);
    }
    template <int N, int WIDE>
    inline void add_up(int kv_head, const int32_t* table, int length, int v, int d) {
        constexpr int W = PER_WORD<T>;
        Sums<N, WIDE> sums;
        for (int p = 0; p < length; p += cache.block_size) {
            const T* values = cache.value_block(table[p / cache.block_size], kv_head) + d * W;
            const Operand<T>* w = &weights[size_t(v) * CHUNK + p];
            for (int i = 0, n = std::min(cache.block_size, length - p); i < n; i += W) {
                fetch();
                multiply_add(sums, values + int64_t(i) * cache.padded, LANES * W, w + i, CHUNK);
            }
        }
        UNROLLED for (int k = 0; k < N; k++)
            UNROLLED for (int j = 0; j < WIDE; j++)
                store(&partials[size_t(v + k) * cache.padded + d + j * LANES], sums.vector(k, j));
    }

    void fold(int v, float peak, float total, const float* partial) {
        float top = std::max(std::max(tops[v], peak), -3.4e38f);
        float keep = tops[v] == top ? 1.0f : std::exp(tops[v] - top), add = peak == top ? 1.0f : std::exp(peak - top);
        tops[v] = top;
        totals[v] = totals[v] * keep + total * add;
        float* to = &outputs[size_t(v) * cache.padded];
        for (int d = 0; d < cache.padded; d += LANES)
            store(to + d, load(to + d) * keep + (partial ? load(partial + d) * add : Floats{}));
    }
};

template <class T>
void attend(const T* query, const T* key, const T* value, const int64_t* strides, const Cache<T>& cache, int heads,
            const int32_t* slots, int tokens, const int32_t* fresh, int num_fresh, const int32_t* row_token,
            const int32_t* row_seen, const int64_t* row_table, const int32_t* tables, const int32_t* tiles,
            int num_tiles, float scaling, int window, float softcap, const float* sinks, T* output, float* lse,
            int padded_tokens) {
    const int heads_kv = cache.kv_heads;
#pragma omp parallel
    {
#pragma omp for
        for (int i = 0; i < num_fresh; i++)
            std::memset(cache.value_block(fresh[i], 0), 0, sizeof(T) * heads_kv * cache.block_size * cache.padded);
#pragma omp for
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < heads_kv; h++)
                cache.write(slots[t], h, key + h * strides[2] + t * strides[3], value + h * strides[4] + t * strides[5]);
        Tile<T> tile(cache, heads, scaling, window, softcap);
        std::vector<Row> rows;
#pragma omp for schedule(dynamic)
        for (int i = 0; i < num_tiles * heads_kv; i++) {
            int number = i / heads_kv;
            rows.clear();
            for (int r = tiles[number]; r < tiles[number + 1]; r++)
                rows.push_back({row_token[r], row_seen[r], tables + row_table[r]});
            tile.run(i % heads_kv, rows.data(), int(rows.size()), query, strides[0], strides[1], sinks, output, lse,
                     padded_tokens);
        }
    }
}

// x * cosine + turned(x) * sine, each operation rounded as one of torch's would be.
template <class T>
void rotate(const T* from, int64_t head_stride, int64_t token_stride, const T* cosine, const T* sine, T* to, int heads,
            int tokens, int dim) {
    int half = dim / 2;
#pragma omp parallel for if (int64_t(tokens) * heads * dim > 8192)
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < heads; h++) {
            const T *x = from + h * head_stride + t * token_stride, *c = cosine + int64_t(t) * dim, *s = sine + int64_t(t) * dim;
            T* y = to + (int64_t(t) * heads + h) * dim;
            in_vectors(half, [&](int d, int n) {
                Floats low = load_some(x + d, n), high = load_some(x + half + d, n);
                store_some(y + d, rounded<T>(low * load_some(c + d, n)) + rounded<T>(-high * load_some(s + d, n)), n);
                store_some(y + half + d, rounded<T>(high * load_some(c + half + d, n)) + rounded<T>(low * load_some(s + half + d, n)), n);
            });
        }
}

// y = silu(gate) * up, each operation rounded as one of torch's would be. Rows of n, `stride` elements apart in gate and up.
template <class T>
void gate(const T* gates, const T* ups, int64_t stride, T* y, int64_t rows, int n) {
#pragma omp parallel for if (rows * n > 8192)
    for (int64_t r = 0; r < rows; r++)
        in_vectors(n, [&](int d, int count) {
            Floats x = load_some(gates + r * stride + d, count);
            store_some(y + r * n + d, rounded<T>(silu(x)) * load_some(ups + r * stride + d, count), count);
        });
}

// y (rows, n) = x (rows, k) · weight (n, k) + bias. The weight is packed in panels of 64 outputs, each in strips of as many
// vectors as a tile is wide: [n / 64][strip][k / word][vector of the strip][16][word].
constexpr int WIDE = 4, PANEL = WIDE * LANES;
constexpr int STRIP = ONE_REGISTER ? WIDE : 1, STRIPS = WIDE / STRIP;
constexpr int ROWS = 6;  // 6 x 4 registers of outputs are summed together, or 6 x 2 where there are but 16
constexpr int CACHED_BYTES = 512 << 10;

template <class T> inline int64_t packed_at(int k, int d, int vector) {  // of word d and a vector of outputs, in a panel
    return (int64_t(vector / STRIP) * k + d) * STRIP * LANES + vector % STRIP * LANES * PER_WORD<T>;
}

template <class T> void pack(const T* weight, int64_t n, int k, T* packed) {
    constexpr int W = PER_WORD<T>;
#pragma omp parallel for
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++)
        for (int j = 0; j < PANEL; j++) {
            int64_t row = panel * PANEL + j;
            T* to = packed + panel * k * PANEL + j % LANES * W;
            for (int d = 0; d < k; d += W)
                for (int i = 0; i < W; i++) to[packed_at<T>(k, d, j / LANES) + i] = row < n ? weight[row * k + d + i] : T();
        }
}

// What will be read next, fetched while there is something to compute.
struct Ahead {
    const char* from;
    int64_t bytes;
};

// N rows times some neighbouring strips of a panel.
template <int N, int TOGETHER, class X, class T, class Y>
inline void multiply_tile(const X* x, const T* panel, const float* bias, int k, Y* y, int64_t n, int width,
                          int strip, Ahead& ahead) {
    constexpr int W = PER_WORD<T>, V = STRIP * TOGETHER;
    Sums<N, V> sums;
    const T* words = panel + packed_at<T>(k, 0, strip * STRIP);
    const int64_t apart = STRIP > 1 ? LANES * W : packed_at<T>(k, 0, STRIP);
    constexpr int STEP = (ONE_REGISTER ? 1 : 16) * W;  // between two looks at what is to be fetched
    int64_t fetched = 0, share = ahead.bytes / (STRIPS - strip) * TOGETHER, step = (share / (k / W) + 64) * (STEP / W);
    for (int from = 0; from < k; from += STEP) {
        for (int64_t to = std::min(fetched + step, share); fetched < to; fetched += 64)
            __builtin_prefetch(ahead.from + fetched, 0, 2);
        const int end = STEP == W ? from + W : std::min(from + STEP, k);
        for (int d = from; d < end; d += W)
            multiply_add(sums, words + int64_t(d) * STRIP * LANES, apart, x + d, int64_t(k));
    }
    ahead.from += share, ahead.bytes -= share;
    float results[N][V * LANES];  // out of the registers in one place: else some would be kept in memory in the loop
    UNROLLED for (int i = 0; i < N; i++)
        UNROLLED for (int j = 0; j < V; j++) store(results[i] + j * LANES, sums.vector(i, j));
    const int first = strip * STRIP * LANES;
    for (int i = 0; i < N; i++)
        for (int j = 0; j < V * LANES && first + j < width; j += LANES) {
            Floats v = load(results[i] + j) + (bias ? load(bias + first + j) : Floats{});
            store_some(y + i * n + first + j, v, std::min(width - first - j, LANES));
        }
}
template <int N, class X, class T, class Y>
void multiply_rows(const X* x, const T* panel, const float* bias, int k, Y* y, int64_t n, int width, Ahead ahead) {
    constexpr int TOGETHER = N == 1 ? STRIPS : N <= (PER_WORD<T> == 1 ? 3 : 2) ? std::min(STRIPS, 2) : 1;
    for (int strip = 0; strip < STRIPS; strip += TOGETHER)
        multiply_tile<N, TOGETHER>(x, panel, bias, k, y, n, width, strip, ahead);
}

// Products of bfloat16 by AMX, where the processor has it and the system allows it: a packed panel lies as its tiles are
// read. Each row's sum is in steps of 32 elements, in the instruction's own order, however many rows there are.
#if defined(__AMX_BF16__) && defined(__linux__)
constexpr int TILE_ROWS = 16, TILE_DEPTH = 32;

bool has_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}
// GCC's intrinsics don't say that they read memory.
INLINE void memory_is_written() { asm volatile("" ::: "memory"); }

// The tiles of a thread. Up to 16 rows: 0 to 3 sum a vector of outputs each, 4 has the rows, 5 to 7 weights. More: 0 to 3 sum
// the first or last 16 rows times one of two vectors, 4 and 5 have the rows, 6 and 7 weights.
class Tiles {
  public:
    ~Tiles() { if (rows) _tile_release(); }
    void configure(int count) {
        if (count == rows) return;
        rows = count;
        struct alignas(64) { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } of = {1};
        const bool one = count <= TILE_ROWS;
        for (int tile = 0; tile < 8; tile++) {
            const bool second = !one && (tile == 2 || tile == 3 || tile == 5), weights = tile >= (one ? 5 : 6);
            of.bytes[tile] = 64;
            of.rows[tile] = weights ? TILE_ROWS : second ? count - TILE_ROWS : std::min(count, TILE_ROWS);
        }
        memory_is_written();
        _tile_loadconfig(&of);
    }

  private:
    int rows = 0;
};

INLINE void add_step(const bf16* x, int64_t pitch, const bf16* words, bool one) {  // 32 elements of all rows; half a panel if not `one`
    constexpr int64_t STRIDE = PANEL * 2 * sizeof(bf16);
    pitch *= sizeof(bf16);
    _tile_loadd(4, x, pitch);
    if (one) {
        _tile_loadd(6, words, STRIDE); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, words + 2 * LANES, STRIDE); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, words + 4 * LANES, STRIDE); _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, words + 6 * LANES, STRIDE); _tile_dpbf16ps(3, 4, 6);
    } else {
        _tile_loadd(6, words, STRIDE); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, words + 2 * LANES, STRIDE); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, reinterpret_cast<const char*>(x) + TILE_ROWS * pitch, pitch);
        _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
}

template <class Y>
void multiply_in_tiles(Tiles& tiles, const bf16* x, int rows, const bf16* panel, const float* bias, int k, Y* y, int64_t n,
                       int width, Ahead ahead) {
    const bool one = rows <= TILE_ROWS;
    const int whole = k / TILE_DEPTH * TILE_DEPTH;
    const int64_t step = ahead.bytes / (one ? 1 : 2) / (whole / TILE_DEPTH + 1) + 64;
    alignas(64) float sums[2 * TILE_ROWS][PANEL];
    alignas(64) bf16 last_x[2 * TILE_ROWS][TILE_DEPTH], last_words[TILE_ROWS][2 * PANEL];
    if (whole < k) {
        std::memset(last_words, 0, sizeof last_words);
        std::memcpy(last_words, panel + int64_t(whole) * PANEL, (k - whole) * PANEL * sizeof(bf16));
        for (int r = 0; r < rows; r++) {
            std::memset(last_x[r], 0, sizeof last_x[r]);
            std::memcpy(last_x[r], x + int64_t(r) * k + whole, (k - whole) * sizeof(bf16));
        }
    }
    tiles.configure(rows);
    memory_is_written();
    int64_t fetched = 0;
    for (int half = 0; half < (one ? 1 : 2); half++) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        const bf16* words = panel + half * 4 * LANES;
        for (int d = 0; d < whole; d += TILE_DEPTH) {
            for (int64_t to = std::min(fetched + step, ahead.bytes); fetched < to; fetched += 64)
                __builtin_prefetch(ahead.from + fetched, 0, 2);
            add_step(x + d, k, words + int64_t(d) * PANEL, one);
        }
        if (whole < k) add_step(last_x[0], TILE_DEPTH, last_words[0] + half * 4 * LANES, one);
        constexpr int64_t STRIDE = PANEL * sizeof(float);
        float* to = sums[0] + half * 2 * LANES;
        _tile_stored(0, to, STRIDE);
        _tile_stored(1, to + LANES, STRIDE);
        if (one) to += 2 * LANES; else to += TILE_ROWS * PANEL;
        _tile_stored(2, to, STRIDE);
        _tile_stored(3, to + LANES, STRIDE);
    }
    for (int r = 0; r < rows; r++)
        in_vectors(width, [&](int j, int count) {
            store_some(y + r * n + j, load(sums[r] + j) + (bias ? load(bias + j) : Floats{}), count);
        });
}
#else
constexpr int TILE_ROWS = 0;
bool has_tiles() { return false; }
struct Tiles {};
template <class... Arguments> void multiply_in_tiles(Arguments&&...) {}
#endif

// A packed panel of bfloat16 as one of float32: many rows would widen each word many times.
void widen_panel(const bf16* panel, int k, float* to) {
    for (int vector = 0; vector < WIDE; vector++)
        for (int d = 0; d < k; d += 2) {
            Ints pairs = load_ints(panel + packed_at<bf16>(k, d, vector));
            store(to + packed_at<float>(k, d, vector), floats(pairs << 16));
            store(to + packed_at<float>(k, d + 1, vector), floats(pairs & int32_t(0xffff0000)));
        }
}

template <class T, class Y>
void multiply_operands(const Operand<T>* x, const T* packed, const float* bias, int64_t rows, int64_t n, int k, Y* y) {
    int64_t panels = (n + PANEL - 1) / PANEL, bytes = int64_t(k) * PANEL * sizeof(T);
    int64_t blocks = (rows * k * int64_t(sizeof(*x)) + CACHED_BYTES - 1) / CACHED_BYTES;  // of rows that stay in the cache
    const bool tiled = std::is_same_v<Operand<T>, bf16> && has_tiles();
    const int together = tiled ? 2 * TILE_ROWS : ROWS;
    int64_t height = ((rows + blocks - 1) / blocks + together - 1) / together * together;
    blocks = (rows + height - 1) / height;
    int64_t steps = height / together, units = blocks * panels * steps;  // of work: so many rows with one panel
    const bool widened = !std::is_same_v<Operand<T>, T> && rows > 3;
#pragma omp parallel
    {
        int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t begin = units * thread / threads, end = units * (thread + 1) / threads;
        std::vector<float> wide(widened ? k * PANEL : 0);
        Tiles tiles;
        for (int64_t from = begin, to; from < end; from = to) {
            int64_t i = from / steps, p = i % panels, first = i / panels * height, last = std::min(first + height, rows);
            to = std::min((i + 1) * steps, end);
            const T* panel = packed + p * k * PANEL;
            const char* next = reinterpret_cast<const char*>(panel) + bytes;
            int64_t share = p + 1 < panels && to < end ? (bytes / (to - from) + 63) / 64 * 64 : 0, done = 0;
            int width = int(std::min<int64_t>(PANEL, n - p * PANEL));
            auto rows_of = [&](auto count, int64_t r, Ahead ahead) {
                auto multiply = [&](auto* weights) {
                    multiply_rows<decltype(count)::value>(x + r * k, weights, bias ? bias + p * PANEL : nullptr, k,
                                                          y + r * n + p * PANEL, n, width, ahead);
                };
                if constexpr (std::is_same_v<Operand<T>, T>) multiply(panel);
                else if (widened) multiply(wide.data());
                else if constexpr (decltype(count)::value <= 3) multiply(panel);
            };
            if constexpr (!std::is_same_v<Operand<T>, T>)
                if (widened) widen_panel(panel, k, wide.data());
            for (int64_t unit = from; unit < to; unit++, done = std::min(done + share, bytes)) {
                int64_t r = first + (unit - i * steps) * together, left = std::min<int64_t>(together, last - r);
                Ahead ahead{next + done, std::min(share, bytes - done)};
                if constexpr (std::is_same_v<Operand<T>, bf16>)
                    if (tiled) {
                        if (left > 0)  // the last block of rows may be lower than the others
                            multiply_in_tiles(tiles, x + r * k, int(left), panel, bias ? bias + p * PANEL : nullptr, k,
                                              y + r * n + p * PANEL, n, width, ahead);
                        continue;
                    }
                if (left == ROWS) { rows_of(std::integral_constant<int, ROWS>(), r, ahead); continue; }
                if (!ONE_REGISTER)
                    for (; left >= 3; left -= 3, r += 3, ahead.bytes = 0) rows_of(std::integral_constant<int, 3>(), r, ahead);
                for (; left >= 2; left -= 2, r += 2, ahead.bytes = 0) rows_of(std::integral_constant<int, 2>(), r, ahead);
                if (left > 0) rows_of(std::integral_constant<int, 1>(), r, ahead);
            }
        }
    }
}

template <class T, class Y>
void multiply(const T* x, const T* packed, const float* bias, int64_t rows, int64_t n, int k, Y* y) {
    if (rows == 0) return;
    if constexpr (std::is_same_v<Operand<T>, T>) multiply_operands(x, packed, bias, rows, n, k, y);
    else {
        std::vector<Operand<T>> operands(rows * k);
#pragma omp parallel for if (rows * k > 65536)
        for (int64_t r = 0; r < rows; r++) to_operand(x + r * k, &operands[r * k], k);
        multiply_operands(operands.data(), packed, bias, rows, n, k, y);
    }
}

// The sum of squares in the order of ATen's sum over a contiguous row: four interleaved sums of vectors of `width`
// floats, each folded away every 16 (then 256, ...) steps, and at the end the tail and the lanes one by one.
template <int width, class T> float sum_of_squares(const T* x, int n) {
    constexpr int LEVELS = 3, WAYS = 4;
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Sixteen __attribute__((vector_size(64)));
    typedef std::conditional_t<width == 16, Sixteen, Eight> Some;
    Some sums[WAYS] = {}, folded[LEVELS][WAYS] = {};
    auto add = [&](int way, int vector) {
        float some[width];
        for (int l = 0; l < width; l++) some[l] = widen(x[vector * width + l]);
        Some v; std::memcpy(&v, some, sizeof v);
        sums[way] += v * v;
    };
    auto fold = [&](int steps) {
        for (int w = 0; w < WAYS; w++) folded[0][w] += sums[w], sums[w] = Some{};
        for (int j = 1, done = steps / 16; j < LEVELS && done % 16 == 0; j++, done /= 16)
            for (int w = 0; w < WAYS; w++) folded[j][w] += folded[j - 1][w], folded[j - 1][w] = Some{};
    };
    int vectors = n / width, steps = vectors / WAYS;
    for (int i = 0; i < steps;) {
        for (int end = std::min(i + 16, steps); i < end; i++)
            for (int w = 0; w < WAYS; w++) add(w, i * WAYS + w);
        if (i % 16 == 0) fold(i);
    }
    for (int j = 0; j < LEVELS; j++)
        for (int w = 0; w < WAYS; w++) sums[w] += folded[j][w];
    for (int i = steps * WAYS; i < vectors; i++) add(0, i);
    for (int w = 1; w < WAYS; w++) sums[0] += sums[w];
    float total = 0;
    for (int i = vectors * width; i < n; i++) total += widen(x[i]) * widen(x[i]);
    for (int l = 0; l < width; l++) total += sums[0][l];
    return total;
}

template <int width, class T>
void normalize(const T* x, const T* weight, float epsilon, T* y, int64_t rows, int n) {
#pragma omp parallel for if (rows * n > 16384)
    for (int64_t r = 0; r < rows; r++) {
        float scale = 1.0f / std::sqrt(sum_of_squares<width>(x + r * n, n) / n + epsilon);
        in_vectors(n, [&](int d, int count) {
            Floats normal = rounded<T>(load_some(x + r * n + d, count) * scale);
            store_some(y + r * n + d, load_some(weight + d, count) * normal, count);
        });
    }
}

// One token a row by inverse CDF over softmax(logits / temperature), as rollout/engine/sampler.py defines it: first a
// block of tokens by the blocks' sums, then a token of it. NaN counts as -inf, +inf as a large number.
constexpr int BLOCK = 256;

// An index by inverse CDF over n weights, rounded to integers; `uniform` becomes where it fell inside the pick.
int pick(const float* weights, int n, double& uniform, double* shares) {
    float top = *std::max_element(weights, weights + n);
    double total = 0, end = 0;
    int last = 0;
    for (int i = 0; i < n; i++) total += shares[i] = std::nearbyint(double(weights[i]) / double(top) * 4398046511104.0);
    double target = std::floor(uniform * total);
    for (int i = 0; i < n && end <= target; i++)
        if (shares[i] > 0) last = i, end += shares[i];
    uniform = (target - (end - shares[last])) / shares[last];
    return last;
}

void draw(const float* logits, int64_t stride, int vocab, const float* temperatures, const double* uniforms,
          int64_t* tokens, int rows) {
    const int blocks = (vocab + BLOCK - 1) / BLOCK, size = std::max(blocks, BLOCK);
#pragma omp parallel
    {
        std::vector<float> scaled(int64_t(blocks) * BLOCK, -INFINITY), weights(size);
        std::vector<double> shares(size);
#pragma omp for schedule(dynamic)
        for (int r = 0; r < rows; r++) {
            Floats tops = all(-INFINITY);
            in_vectors(vocab, [&](int d, int n) {
                Floats x = load_some(logits + r * stride + d, n);
                x = where(x == x, x, all(-INFINITY));
                x = where(x == all(INFINITY), all(1e30f), x);
                if (temperatures[r] != 1) x = x / temperatures[r];
                if (n < LANES) x = where(lane_numbers() < all_of<Ints>(n), x, all(-INFINITY));
                tops = most(x, tops);
                store(&scaled[d], x);
            });
            float top = largest(tops);
            if (top == -INFINITY) { tokens[r] = 0; continue; }
            for (int b = 0; b < blocks; b++) {
                Floats parts[BLOCK / LANES];
                for (int i = 0; i < BLOCK / LANES; i++) parts[i] = exponential(load(&scaled[b * BLOCK + i * LANES]) - top);
                for (int half = BLOCK / LANES / 2; half; half /= 2)
                    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
                weights[b] = sum(parts[0]);
            }
            double uniform = uniforms[r];
            int block = pick(weights.data(), blocks, uniform, shares.data());
            for (int i = 0; i < BLOCK; i += LANES) store(&weights[i], exponential(load(&scaled[block * BLOCK + i]) - top));
            tokens[r] = block * BLOCK + pick(weights.data(), BLOCK, uniform, shares.data());
        }
    }
}

// y += scale * B (A x) for rows that lie side by side by adapter, in float32 and rounded once. A is (rank, inputs), with
// rows filled up to vectors; B lies as [16 outputs][rank][output].
constexpr int ADAPTED_ROWS = ONE_REGISTER ? 4 : 2;  // that share a read of A and B

template <int N, class X, class Y> struct Adapted {  // N rows of one adapter
    const X* x;
    Y* y;
    int64_t x_pitch, y_pitch;
    int inputs, outputs, rank;
    const float *a, *b;
    float scale;

    void run(std::vector<float>& wide, std::vector<float>& hidden) const {
        const int padded = (inputs + LANES - 1) / LANES * LANES;
        wide.resize(N * padded), hidden.resize(N * rank);
        for (int i = 0; i < N; i++)
            in_vectors(inputs, [&](int d, int count) { store(&wide[i * padded + d], load_some(x + i * x_pitch + d, count)); });
        int r = 0;
        for (; r + 4 <= rank; r += 4) inner<4>(r, padded, wide, hidden);
        for (; r < rank; r++) inner<1>(r, padded, wide, hidden);
        int j = 0;
        for (; j + 2 * LANES <= outputs; j += 2 * LANES) outer<2>(j, hidden);
        for (; j < outputs; j += LANES) outer<1>(j, hidden);
    }
    template <int R> INLINE void inner(int r, int padded, const std::vector<float>& wide, std::vector<float>& hidden) const {
        Floats sums[N][R] = {};
        for (int d = 0; d < padded; d += LANES) {
            Floats given[N];
            UNROLLED for (int i = 0; i < N; i++) given[i] = load(&wide[i * padded + d]);
            UNROLLED for (int k = 0; k < R; k++) {
                Floats weight = load(a + int64_t(r + k) * padded + d);
                UNROLLED for (int i = 0; i < N; i++) sums[i][k] = fused(weight, given[i], sums[i][k]);
            }
        }
        UNROLLED for (int i = 0; i < N; i++)
            UNROLLED for (int k = 0; k < R; k++) hidden[i * rank + r + k] = sum(sums[i][k]);
    }
    template <int V> INLINE void outer(int j, const std::vector<float>& hidden) const {
        Floats sums[N][V] = {};
        const float* from = b + int64_t(j) * rank;
        for (int k = 0; k < rank; k++)
            UNROLLED for (int v = 0; v < V; v++) {
                Floats weight = load(from + (int64_t(v) * rank + k) * LANES);
                UNROLLED for (int i = 0; i < N; i++) sums[i][v] = fused(weight, all(hidden[i * rank + k]), sums[i][v]);
            }
        for (int i = 0; i < N; i++)
            for (int v = 0; v < V; v++) {
                int count = std::min(LANES, outputs - j - v * LANES);
                Y* at = y + i * y_pitch + j + v * LANES;
                store_some(at, load_some(at, count) + sums[i][v] * all(scale), count);
            }
    }
};

template <class X, class Y>
void adapt(const X* x, int64_t x_pitch, Y* y, int64_t y_pitch, int inputs, int outputs, const int64_t* bounds,
           const int64_t* a, const int64_t* b, const int32_t* ranks, const float* scales, int adapters) {
    struct Part { int64_t row; int count, adapter; };
    std::vector<Part> parts;
    int64_t products = 0;
    for (int i = 0; i < adapters; i++)
        for (int64_t row = bounds[i]; ranks[i] && row < bounds[i + 1]; row += parts.back().count) {
            int count = bounds[i + 1] - row >= ADAPTED_ROWS ? ADAPTED_ROWS : 1;
            parts.push_back({row, count, i});
            products += int64_t(count) * ranks[i] * (inputs + outputs);
        }
#pragma omp parallel if (products > 65536)
    {
        std::vector<float> wide, hidden;
#pragma omp for
        for (int64_t p = 0; p < int64_t(parts.size()); p++) {
            auto [row, count, i] = parts[p];
            auto run = [&](auto n) {
                Adapted<decltype(n)::value, X, Y>{x + row * x_pitch, y + row * y_pitch, x_pitch, y_pitch, inputs, outputs,
                                                  ranks[i], reinterpret_cast<const float*>(a[i]),
                                                  reinterpret_cast<const float*>(b[i]), scales[i]}.run(wide, hidden);
            };
            if (count == 1) run(std::integral_constant<int, 1>());
            else run(std::integral_constant<int, ADAPTED_ROWS>());
        }
    }
}

}  // namespace

#define BOTH(MAKE) MAKE(bf16, bf16) MAKE(f32, float)
#define EXPORT(NAME, T)                                                                                                \
    extern "C" void attend_##NAME(                                                                                     \
        const T* query, const T* key, const T* value, const int64_t* strides, T* keys, T* values, int kv_heads,        \
        int block_size, int key_dim, int value_dim, int heads, const int32_t* slots, int tokens, const int32_t* fresh, \
        int num_fresh, const int32_t* row_token, const int32_t* row_seen, const int64_t* row_table,                    \
        const int32_t* tables, const int32_t* tiles, int num_tiles, float scaling, int window, float softcap,          \
        const float* sinks, T* output, float* lse, int padded_tokens) {                                                \
        Cache<T> cache{keys, values, kv_heads, block_size, key_dim, value_dim, (value_dim + LANES - 1) / LANES * LANES}; \
        attend<T>(query, key, value, strides, cache, heads, slots, tokens, fresh, num_fresh, row_token, row_seen,      \
                  row_table, tables, tiles, num_tiles, scaling, window, softcap, sinks, output, lse, padded_tokens);   \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(const T* x, int64_t hs, int64_t ts, const T* c, const T* s, T* y, int heads,         \
                                  int tokens, int dim) {                                                               \
        rotate<T>(x, hs, ts, c, s, y, heads, tokens, dim);                                                             \
    }                                                                                                                  \
    extern "C" void normalize_##NAME(const T* x, const T* w, float e, T* y, int64_t rows, int n, int width) {          \
        if (width == 16) normalize<16>(x, w, e, y, rows, n);                                                           \
        else normalize<8>(x, w, e, y, rows, n);                                                                      \
    }
BOTH(EXPORT)

#define ADAPT(NAME, X, Y)                                                                                              \
    extern "C" void adapt_##NAME(const X* x, int64_t x_pitch, Y* y, int64_t y_pitch, int inputs, int outputs,          \
                                 const int64_t* bounds, const int64_t* a, const int64_t* b, const int32_t* ranks,      \
                                 const float* scales, int adapters) {                                                  \
        adapt(x, x_pitch, y, y_pitch, inputs, outputs, bounds, a, b, ranks, scales, adapters);                         \
    }
ADAPT(f32_f32, float, float) ADAPT(bf16_bf16, bf16, bf16) ADAPT(bf16_f32, bf16, float) ADAPT(f32_bf16, float, bf16)

extern "C" void pack_bf16(const bf16* w, int64_t n, int k, bf16* packed) { pack(w, n, k, packed); }
extern "C" void pack_f32(const float* w, int64_t n, int k, float* packed) { pack(w, n, k, packed); }
extern "C" void multiply_bf16(const bf16* x, const bf16* packed, const float* bias, int64_t rows, int64_t n, int k,
                              void* y, int rounded) {
    if (rounded) multiply(x, packed, bias, rows, n, k, static_cast<bf16*>(y));
    else multiply(x, packed, bias, rows, n, k, static_cast<float*>(y));
}
extern "C" void multiply_f32(const float* x, const float* packed, const float* bias, int64_t rows, int64_t n, int k,
                             void* y, int) {
    multiply(x, packed, bias, rows, n, k, static_cast<float*>(y));
}
extern "C" void draw_f32(const float* logits, int64_t stride, int vocab, const float* temperatures,
                         const double* uniforms, int64_t* tokens, int rows) {
    draw(logits, stride, vocab, temperatures, uniforms, tokens, rows);
}
extern "C" void gate_bf16(const bf16* gates, const bf16* ups, int64_t stride, bf16* y, int64_t rows, int n) {
    gate(gates, ups, stride, y, rows, n);
}
// Whether the products here are faster than a library's: with AVX-512 those in float32, and in bfloat16 those of
// processors that don't multiply it, are left to the library.
extern "C" int multiplies_bf16() { return MULTIPLIES_BF16 || !ONE_REGISTER; }
extern "C" int multiplies_f32() { return !ONE_REGISTER; }

// Huge pages for what is read from end to end every step: with small ones, half of the time goes to finding them.
extern "C" void use_huge_pages(void* at, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    constexpr uintptr_t PAGE = 2 << 20;
    uintptr_t from = (uintptr_t(at) + PAGE - 1) / PAGE * PAGE, to = (uintptr_t(at) + bytes) / PAGE * PAGE;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#endif
}
// Memory that a step frees is kept for the next one: the kernel would clear it anew each time.
extern "C" void keep_freed_memory() {
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 32 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}
