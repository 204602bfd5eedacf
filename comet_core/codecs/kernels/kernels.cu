// Twins of the error-bounded codec's stages for CUDA: the definition is reference.py, the launches are in cuda.py.
//
// A value of a tensor is one thread's (quantize, dequantize), a band of codes is one lane's (encode, decode): a warp is
// a group of 32 bands with its stream of 16-bit words. What a lane does is a plain function, so that a compiler for the
// host can build the same source, where a loop over 32 lanes stands for the warp; a test holds that against the CPU.
// Built without fused multiply-add. Nothing is included: NVRTC has no headers of its own.

#ifdef __CUDACC__
#define ON_LANE __device__ __forceinline__
#else
#define ON_LANE inline
#define rintf __builtin_rintf
#define rint __builtin_rint
#define ceilf __builtin_ceilf
#define ceil __builtin_ceil
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// What lies where: see `Layout`, `Tables` and `Grid` in contexts.py and reference.py.
struct Layout {
    i64 left, up, restart, band;
};
struct Model {
    i64 predicts, shift, num_symbols;
    u8 num_first, first[7], num_second, second[7];
};

static const int LANES = 32, MIDDLE = 128, NO_LEFT = 13, NO_UP = 14, ALONE = 15;
static const u32 START = 1u << 16;

// ---- 16-bit floats, by whole numbers: the same on both sides

union Bits {
    float value;
    u32 word;
};

static ON_LANE float from_bfloat16(u16 bits) {
    Bits wide;
    wide.word = (u32)bits << 16;
    return wide.value;
}

static ON_LANE u16 to_bfloat16(float value) {  // not for NaN
    Bits wide;
    wide.value = value;
    return (u16)((wide.word + ((wide.word >> 16) & 1) + 0x7FFF) >> 16);
}

static ON_LANE float from_float16(u16 bits) {
    u32 sign = (u32)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FF;
    Bits wide;
    if (exponent == 31) {
        wide.word = sign | 0x7F800000 | fraction << 13;
    } else if (exponent) {
        wide.word = sign | (exponent + 112) << 23 | fraction << 13;
    } else {  // subnormal: a whole number of 2**-24, which float32 holds exactly
        wide.value = (float)fraction * 5.9604644775390625e-8f;
        wide.word |= sign;
    }
    return wide.value;
}

static ON_LANE u16 to_float16(float value) {  // nearest, ties to even; not for NaN
    Bits wide;
    wide.value = value;
    u32 sign = wide.word >> 16 & 0x8000, size = wide.word & 0x7FFFFFFF;
    if (size >= 0x477FF000) return (u16)(sign | 0x7C00);  // from half a step beyond 65504 on
    u32 shift = 13, fraction = size;
    if (size < 0x38800000) {  // below 2**-14: the step stays 2**-24
        u32 exponent = size >> 23;
        if (exponent < 102) return (u16)sign;  // below half of the smallest
        fraction = (size & 0x7FFFFF) | 0x800000;
        shift = 126 - exponent;
    } else {
        fraction = size - (112u << 23);
    }
    u32 kept = fraction >> shift, rest = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return (u16)(sign | kept);
}

// How the four dtypes are read, rounded and written; `Work` is what is calculated in.

struct Float32 {
    typedef float Item;
    typedef float Work;
    static ON_LANE float load(float x) { return x; }
    static ON_LANE float store(float y) { return y; }
    static ON_LANE bool flushes() { return false; }
};
struct Float64 {
    typedef double Item;
    typedef double Work;
    static ON_LANE double load(double x) { return x; }
    static ON_LANE double store(double y) { return y; }
    static ON_LANE bool flushes() { return false; }
};
struct Float16 {
    typedef u16 Item;
    typedef float Work;
    static ON_LANE float load(u16 x) { return from_float16(x); }
    static ON_LANE u16 store(float y) { return to_float16(y); }
    static ON_LANE bool flushes() { return true; }
};
struct BFloat16 {
    typedef u16 Item;
    typedef float Work;
    static ON_LANE float load(u16 x) { return from_bfloat16(x); }
    static ON_LANE u16 store(float y) { return to_bfloat16(y); }
    static ON_LANE bool flushes() { return true; }
};

static ON_LANE float size_of(float x) { return x < 0 ? -x : x; }
static ON_LANE double size_of(double x) { return x < 0 ? -x : x; }
static ON_LANE float nearest(float x) { return rintf(x); }
static ON_LANE double nearest(double x) { return rint(x); }
static ON_LANE float above(float x) { return ceilf(x); }
static ON_LANE double above(double x) { return ceil(x); }

// ---- quantiser

// The dither of a flat index.
template <typename Work>
static ON_LANE Work noise_of(i64 key, i64 index) {
    u32 h = (u32)index ^ (u32)key;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    h ^= h >> 16;
    return (Work)(int)(h >> 8) * (Work)5.9604644775390625e-8 - (Work)0.5;
}

// The value that q stands for; without dither the key is negative.
template <typename Work>
static ON_LANE Work level(Work q, Work step, Work offset, bool sign_exact, i64 key, i64 index) {
    if (key >= 0) {
        if (q == 0) return 0;
        Work noise = noise_of<Work>(key, index);
        if (!sign_exact) return (q - (q > 0 ? 1 : 0) + offset - noise) * step;
        Work place = size_of((size_of(q) - 1 - noise) * step);
        return q < 0 ? -place : place;
    }
    if (!sign_exact) return (q + offset) * step;
    if (q == 0) return 0;
    Work place = (2 * size_of(q) - 1) * (step * (Work)0.5);
    return q < 0 ? -place : place;
}

// q + 128 where q keeps the bound, else 0.
template <typename Type>
static ON_LANE u8 wide_code(
    typename Type::Item item, typename Type::Work step, typename Type::Work inverse, typename Type::Work offset,
    typename Type::Work limit, bool sign_exact, i64 key, i64 index
) {
    typedef typename Type::Work Work;
    Work x = Type::load(item), q;
    if (key >= 0) {
        if (x == 0) return 128;
        Work place = sign_exact ? size_of(x) * inverse : x * inverse - offset;
        Work k = nearest(place + noise_of<Work>(key, index));
        if (sign_exact) q = x < 0 ? -(k + 1) : k + 1;
        else q = k + (k >= 0 ? 1 : 0);
    } else if (sign_exact) {
        q = above(size_of(x) * inverse);
        if (q < 1 && x != 0) q = 1;  // a product may underflow, but a non-zero must not become zero
        if (x < 0) q = -q;
    } else {
        q = nearest(x * inverse - offset);
    }
    if (!(size_of(q) <= 127)) return 0;  // also for NaN
    Work y = Type::load(Type::store(level(q, step, offset, sign_exact, key, index)));
    if (!(size_of(x - y) <= limit) || (x == 0 && y != 0)) return 0;
    if (sign_exact && (Type::flushes() || key >= 0) && q != 0 && y == 0) return 0;
    return (u8)((int)q + 128);
}

// ---- coder: range ANS, see context_coder.py

static ON_LANE bool gives_word(u32 x, u32 entry) { return x >= (entry >> 16) << 22; }

static ON_LANE u32 encoded(u32 x, u32 entry) {
    u32 frequency = entry >> 16;
    return (x / frequency << 10) + x % frequency + (entry & 0xFFFF);
}

static ON_LANE u32 decoded(u32 x, u32 entry) { return (entry >> 22) * (x >> 10) + (entry >> 12 & 1023); }

static ON_LANE int level_among(int value, const u8 *thresholds, int count) {
    int level = 0;
    for (int i = 0; i < count; i++) level += value >= thresholds[i];
    return level;
}

// The context of a band's code t, and its prediction: see `Tables`.
static ON_LANE int modelled(const u8 *codes, i64 t, const Layout &layout, const Model &model, int &prediction) {
    bool has_left = t % layout.up >= layout.left, has_up = t % layout.restart >= layout.up;
    int left = has_left ? codes[t - layout.left] : MIDDLE, up = has_up ? codes[t - layout.up] : MIDDLE;
    int first = ALONE, second = ALONE;
    prediction = MIDDLE;
    if (!model.predicts) {
        if (has_left) first = level_among(left, model.first, model.num_first);
        if (has_up) second = level_among(up, model.second, model.num_second);
        return first << 4 | second;
    }
    if (has_left && has_up) {
        int corner = codes[t - layout.left - layout.up], least = left < up ? left : up, most = left < up ? up : left;
        int activity = (left < corner ? corner - left : left - corner) + (up < corner ? corner - up : up - corner);
        prediction = corner >= most ? least : corner <= least ? most : left + up - corner;
        first = level_among(activity, model.first, model.num_first);
    } else if (has_left) {
        prediction = left;
        first = NO_UP;
    } else if (has_up) {
        prediction = up;
        first = NO_LEFT;
    }
    return first << 4 | level_among(prediction, model.second, model.num_second);
}

static ON_LANE u32 symbol_of(u8 code, int prediction, const Model &model) {
    u32 symbol = (code - prediction - (int)model.shift) & 255;
    return code != 0 && symbol < model.num_symbols ? symbol : 0;
}

static ON_LANE i64 length_of(i64 band, i64 num_values, const Layout &layout) {
    i64 rest = num_values - band * layout.band;
    return rest < 0 ? 0 : rest < layout.band ? rest : layout.band;
}

#ifdef __CUDACC__

#define QUANTIZER(NAME, TYPE)                                                                                          \
    extern "C" __global__ void quantize_##NAME(                                                                        \
        const TYPE::Item *x, i64 count, i64 start, const TYPE::Work *step, const TYPE::Work *inverse,                  \
        const TYPE::Work *offset, const TYPE::Work *limit, i64 num_channels, i64 inner, i64 sign_exact, i64 key,       \
        u8 *wide                                                                                                       \
    ) {                                                                                                                \
        for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {        \
            i64 c = num_channels == 1 ? 0 : (start + i) / inner % num_channels;                                        \
            wide[i] = wide_code<TYPE>(x[i], step[c], inverse[c], offset[c], limit[c], sign_exact, key, start + i);     \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void dequantize_##NAME(                                                                      \
        const u8 *wide, i64 count, i64 start, const TYPE::Work *step, const TYPE::Work *offset, i64 num_channels,      \
        i64 inner, i64 sign_exact, i64 key, TYPE::Item *out                                                            \
    ) {                                                                                                                \
        for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {        \
            i64 c = num_channels == 1 ? 0 : (start + i) / inner % num_channels;                                        \
            TYPE::Work q = (int)wide[i] - 128;                                                                         \
            out[i] = TYPE::store(level<TYPE::Work>(q, step[c], offset[c], sign_exact, key, start + i));                \
        }                                                                                                              \
    }

QUANTIZER(float32, Float32)
QUANTIZER(float64, Float64)
QUANTIZER(float16, Float16)
QUANTIZER(bfloat16, BFloat16)

// A warp a group: `states` (bands,), `words` and `escapes` with room for a group's values each, `used` (groups, 2): the
// numbers of both. Escapes fill their room from its end.
extern "C" __global__ void encode_bands(
    const u8 *codes, i64 num_values, i64 left, i64 up, i64 restart, i64 band_length, const Model *model,
    const u32 *context_of, const u32 *slots, u32 *states, u16 *words, u8 *escapes, i64 *used
) {
    const Layout layout = {left, up, restart, band_length};
    i64 group = blockIdx.x * (i64)(blockDim.x / LANES) + threadIdx.x / LANES;
    i64 num_bands = (num_values + layout.band - 1) / layout.band;
    if (group * LANES >= num_bands) return;
    u32 lane = threadIdx.x % LANES;
    i64 band = group * LANES + lane, length = length_of(band, num_values, layout);
    const u8 *own = codes + band * layout.band;
    i64 room = LANES * layout.band;
    u16 *stream = words + group * room;
    u8 *escaped = escapes + group * room;
    u32 x = START;
    i64 place = 0, escape = room;
    for (i64 t = layout.band - 1; t >= 0; t--) {
        bool active = t < length;
        int prediction;
        u32 context = active ? modelled(own, t, layout, *model, prediction) : 0;
        u32 symbol = active ? symbol_of(own[t], prediction, *model) : 1;
        u32 entry = active ? slots[context_of[context] + symbol] : 0;
        u32 escaping = __ballot_sync(0xFFFFFFFFu, symbol == 0);
        escape -= __popc(escaping);
        if (symbol == 0) escaped[escape + __popc(escaping & ((1u << lane) - 1))] = own[t];
        bool gives = active && gives_word(x, entry);
        u32 giving = __ballot_sync(0xFFFFFFFFu, gives);
        if (gives) {
            stream[place + __popc(giving & ((1u << lane) - 1))] = (u16)x;
            x >>= 16;
        }
        place += __popc(giving);
        if (active) x = encoded(x, entry);
    }
    if (length) states[band] = x;
    if (lane == 0) {
        used[2 * group] = place;
        used[2 * group + 1] = room - escape;
    }
}

// A warp a group, whose words are words[first[group] : first[group + 1]] and whose escapes are so with first_escape;
// `damaged` becomes 1 where they do not fit.
extern "C" __global__ void decode_bands(
    const u32 *states, const u16 *words, const i64 *first, const u8 *escapes, const i64 *first_escape, i64 num_values,
    i64 left, i64 up, i64 restart, i64 band_length, const Model *model, const u32 *context_of, const u32 *slots,
    u8 *codes, int *damaged
) {
    const Layout layout = {left, up, restart, band_length};
    i64 group = blockIdx.x * (i64)(blockDim.x / LANES) + threadIdx.x / LANES;
    i64 num_bands = (num_values + layout.band - 1) / layout.band;
    if (group * LANES >= num_bands) return;
    u32 lane = threadIdx.x % LANES;
    i64 band = group * LANES + lane, length = length_of(band, num_values, layout);
    u8 *own = codes + band * layout.band;
    i64 place = first[group + 1], begin = first[group], escape = first_escape[group];
    u32 x = length ? states[band] : START;
    for (i64 t = 0; t < layout.band; t++) {
        bool active = t < length, escaped = false;
        if (active) {
            int prediction;
            u32 entry = slots[context_of[modelled(own, t, layout, *model, prediction)] + (x & 1023)];
            own[t] = (u8)(entry + prediction + model->shift);
            escaped = (entry & 255) == 0;
            x = decoded(x, entry);
        }
        u32 escaping = __ballot_sync(0xFFFFFFFFu, escaped);
        i64 after = escape + __popc(escaping);
        if (after > first_escape[group + 1]) {  // the same for all lanes
            *damaged = 1;
            return;
        }
        if (escaped) own[t] = escapes[escape + __popc(escaping & ((1u << lane) - 1))];
        escape = after;
        bool takes = active && x < START;
        u32 taking = __ballot_sync(0xFFFFFFFFu, takes);
        place -= __popc(taking);
        if (place < begin) {  // the same for all lanes
            *damaged = 1;
            return;
        }
        if (takes) x = x << 16 | words[place + __popc(taking & ((1u << lane) - 1))];
    }
    if (place != begin || x != START || escape != first_escape[group + 1]) *damaged = 1;
}

#else

#define HOST(NAME, TYPE)                                                                                               \
    extern "C" void quantize_##NAME(                                                                                   \
        const TYPE::Item *x, i64 count, i64 start, const TYPE::Work *grid, int sign_exact, i64 key, u8 *wide           \
    ) {                                                                                                                \
        for (i64 i = 0; i < count; i++)                                                                                \
            wide[i] = wide_code<TYPE>(x[i], grid[0], grid[1], grid[2], grid[3], sign_exact, key, start + i);           \
    }                                                                                                                  \
    extern "C" void dequantize_##NAME(                                                                                 \
        const u8 *wide, i64 count, i64 start, const TYPE::Work *grid, int sign_exact, i64 key, TYPE::Item *out         \
    ) {                                                                                                                \
        for (i64 i = 0; i < count; i++) {                                                                              \
            TYPE::Work q = (int)wide[i] - 128;                                                                         \
            out[i] = TYPE::store(level<TYPE::Work>(q, grid[0], grid[2], sign_exact, key, start + i));                  \
        }                                                                                                              \
    }

HOST(float32, Float32)
HOST(float64, Float64)
HOST(float16, Float16)
HOST(bfloat16, BFloat16)

// One group, lane by lane at each step; gives the number of words. Escapes fill their room, num_values, from its end.
extern "C" i64 encode_group(
    const u8 *codes, i64 num_values, const Layout *layout, const Model *model, const u32 *context_of, const u32 *slots,
    u32 *states, u16 *words, u8 *escapes, i64 *num_escapes
) {
    i64 place = 0, escape = num_values;
    for (int lane = 0; lane < LANES; lane++) states[lane] = START;
    for (i64 t = layout->band - 1; t >= 0; t--) {
        u8 of_step[LANES];
        int escaped = 0;
        for (int lane = 0; lane < LANES; lane++) {
            if (t >= length_of(lane, num_values, *layout)) continue;
            const u8 *own = codes + lane * layout->band;
            int prediction, context = modelled(own, t, *layout, *model, prediction);
            u32 symbol = symbol_of(own[t], prediction, *model);
            u32 entry = slots[context_of[context] + symbol];
            if (symbol == 0) of_step[escaped++] = own[t];
            if (gives_word(states[lane], entry)) {
                words[place++] = (u16)states[lane];
                states[lane] >>= 16;
            }
            states[lane] = encoded(states[lane], entry);
        }
        escape -= escaped;
        for (int i = 0; i < escaped; i++) escapes[escape + i] = of_step[i];
    }
    *num_escapes = num_values - escape;
    return place;
}

// The same the other way round; gives how many words and escapes are left, or -1 where there were not enough.
extern "C" i64 decode_group(
    u32 *states, const u16 *words, i64 place, const u8 *escapes, i64 num_escapes, i64 num_values, const Layout *layout,
    const Model *model, const u32 *context_of, const u32 *slots, u8 *codes
) {
    i64 escape = 0;
    for (i64 t = 0; t < layout->band; t++) {
        int taking = 0;
        for (int lane = 0; lane < LANES; lane++) {
            if (t >= length_of(lane, num_values, *layout)) continue;
            u8 *own = codes + lane * layout->band;
            int prediction, context = modelled(own, t, *layout, *model, prediction);
            u32 entry = slots[context_of[context] + (states[lane] & 1023)];
            own[t] = (u8)(entry + prediction + model->shift);
            if ((entry & 255) == 0) {
                if (escape == num_escapes) return -1;
                own[t] = escapes[escape++];
            }
            states[lane] = decoded(states[lane], entry);
            taking += states[lane] < START;
        }
        place -= taking;
        if (place < 0) return -1;
        i64 next = place;
        for (int lane = 0; lane < LANES; lane++)
            if (t < length_of(lane, num_values, *layout) && states[lane] < START)
                states[lane] = states[lane] << 16 | words[next++];
    }
    return place + num_escapes - escape;
}

#endif
