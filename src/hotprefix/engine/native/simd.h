/* Vectors. Owns: one portable vector type `vf` and the few operations the kernels need.
 *
 * Rules: the width follows the instruction set the compiler was told to use: 16 floats (AVX-512),
 * 8 (AVX2 with FMA) or 4 (anything else, such as NEON or SSE). Only this file names intrinsics.
 * `vexp(0)` is exactly 1. Conversion to bfloat16 rounds to nearest even and keeps NaN.
 */
#ifndef HP_SIMD_H
#define HP_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define VL 16
#elif defined(__AVX2__) && defined(__FMA__)
#define VL 8
#else
#define VL 4
#endif

#if VL == 16 && defined(__AVX512BF16__)
#define HAVE_BF16_DOT 1
#else
#define HAVE_BF16_DOT 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint8_t vb __attribute__((vector_size(VL)));
typedef uint16_t bf16;

INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf vset(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (vf)(bits + (vu){0}); /* a copy of the bits: x may be a pair of bfloat16 */
}
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vmax(vf a, vf b) {
#if VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect(a > b, a, b);
#endif
}

INLINE vf vmin(vf a, vf b) {
#if VL == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif VL == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vselect(a < b, a, b);
#endif
}

INLINE vi vlanes(void) {
    vi v;
    UNROLL for (int i = 0; i < VL; i++) v[i] = i;
    return v;
}

INLINE vf vfma(vf a, vf b, vf c) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* acc + a[2i] * b[2i] + a[2i+1] * b[2i+1] over bfloat16 pairs held in the 32-bit lanes of a and b. */
INLINE vf vdot_bf16(vf acc, vf a, vf b) {
#if HAVE_BF16_DOT
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    vf low = vfma((vf)((vu)a << 16), (vf)((vu)b << 16), acc);
    return vfma((vf)((vu)a & 0xffff0000u), (vf)((vu)b & 0xffff0000u), low);
#endif
}

INLINE float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE bf16 bf16_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* VL values of 16 bits, each in the low half of a lane. */
INLINE vu vload_u16(const bf16 *p) {
#if VL == 16
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#elif VL == 8
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
#else
    vh h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vu);
#endif
}

INLINE vf vload_bf16(const bf16 *p) { return (vf)(vload_u16(p) << 16); }

INLINE void vstore_bf16(bf16 *p, vf v) {
#if HAVE_BF16_DOT
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu nan = (bits >> 16) | 0x40u;
    vu is_nan = (vu)(v != v);
    vh h = __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), vh);
#endif
    memcpy(p, &h, sizeof h);
}

/* VL bytes: unsigned as they are; signed as floats; the number in a lane's low 4 bits as a float. */
INLINE vu vload_u8(const uint8_t *p) {
#if VL == 16
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
#elif VL == 8
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
#else
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vu);
#endif
}

INLINE vf vload_i8(const uint8_t *p) {
#if VL == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#elif VL == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
#else
    return __builtin_convertvector((vi)(vload_u8(p) << 24) >> 24, vf);
#endif
}

INLINE vf vnibble(vu v) {
#if VL == 16
    const vf numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)v, (__m512)numbers); /* reads the low 4 bits only */
#else
    return __builtin_convertvector((vi)(v & 15), vf);
#endif
}

/* Half precision (IEEE binary16): an exponent moved by a product, which is exact for subnormals too. */
INLINE vf vload_half(const uint16_t *p) {
    vu bits = vload_u16(p);
    vf magnitude = (vf)((bits & 0x7fffu) << 13) * vset(0x1p112f);
    return (vf)((vu)magnitude | (bits & 0x8000u) << 16);
}

INLINE float half_to_float(uint16_t h) {
    uint16_t all[VL] = {h};
    return vload_half(all)[0];
}

/* The half-precision number that equals x; if none does, some other number. */
INLINE uint16_t half_from_float(float x) {
    uint32_t bits;
    float small = x * 0x1p-112f;
    memcpy(&bits, &small, sizeof bits);
    return (uint16_t)((bits >> 13 & 0x7fff) | (bits >> 16 & 0x8000));
}

#if HAVE_BF16_DOT
/* Pairs of bfloat16, the even one in the low half of its lane. */
INLINE vf vpair_bf16(vf even, vf odd) {
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vf)_mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}
#endif

#if VL == 8
/* Transposes a square of 8 x 8 lanes by 24 moves of fixed shape: pairs of lanes, pairs of pairs, halves.
 * Picks by index cost three operations each here, for no instruction takes lanes from two vectors by index. */
INLINE void vtranspose(vf square[VL]) {
    __m256d pairs[VL], fours[VL];
    UNROLL for (int i = 0; i < VL; i += 2) {
        pairs[i] = (__m256d)_mm256_unpacklo_ps((__m256)square[i], (__m256)square[i + 1]);
        pairs[i + 1] = (__m256d)_mm256_unpackhi_ps((__m256)square[i], (__m256)square[i + 1]);
    }
    UNROLL for (int i = 0; i < VL; i += 4)
        UNROLL for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm256_unpacklo_pd(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm256_unpackhi_pd(pairs[i + j], pairs[i + j + 2]);
        }
    UNROLL for (int i = 0; i < VL / 2; i++) {
        square[i] = (vf)_mm256_permute2f128_pd(fours[i], fours[i + 4], 0x20);
        square[i + 4] = (vf)_mm256_permute2f128_pd(fours[i], fours[i + 4], 0x31);
    }
}
#else
/* Lane i of the result is lane index[i] of a, or lane index[i] - VL of b. */
INLINE vf vpick(vf a, vf b, vi index) {
#if VL == 16
    return (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)index, (__m512)b);
#else
    vf out;
    UNROLL for (int i = 0; i < VL; i++) out[i] = index[i] < VL ? a[index[i]] : b[index[i] - VL];
    return out;
#endif
}

/* Transposes a square of VL x VL lanes: in each step blocks of `step` lanes change places (Eklundh). */
INLINE void vtranspose(vf square[VL]) {
    vi lane = vlanes();
    UNROLL for (int step = 1; step < VL; step *= 2) {
        vi high = (lane & step) != 0;
        vi upper = (high & (lane - step + VL)) | (~high & lane);
        vi lower = (high & (lane + VL)) | (~high & (lane + step));
        UNROLL for (int i = 0; i < VL; i++) {
            if (i & step) continue;
            vf a = square[i], b = square[i + step];
            square[i] = vpick(a, b, upper);
            square[i + step] = vpick(a, b, lower);
        }
    }
}
#endif

/* Sum and maximum of the lanes, always in the same order. */
INLINE float vsum(vf v) {
#if VL == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[VL];
    vstore(lane, v);
    UNROLL for (int half = VL / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
#endif
}

INLINE float vhighest(vf v) {
#if VL == 16
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[VL];
    vstore(lane, v);
    UNROLL for (int half = VL / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
#endif
}

/* e^x within 2 units in the last place for x in [-87, 88]; 0 below, and the value at 88 above.
 * x = n ln2 + r with |r| <= ln2/2, and e^r by its Taylor polynomial of degree 7. */
INLINE vf vexp(vf x) {
    vi tiny = x < vset(-87.0f);
    x = vmin(vset(88.0f), vmax(vset(-87.0f), x)); /* in this order NaN stays NaN */
    const vf round = vset(12582912.0f); /* 1.5 * 2^23: adding it leaves the nearest whole number */
    vf shifted = vfma(x, vset(1.44269504f), round);
    vf n = shifted - round;
    vf r = vfma(n, vset(-0.693145752f), x);
    r = vfma(n, vset(-1.42860677e-6f), r);
    vf p = vset(1.0f / 5040);
    p = vfma(p, r, vset(1.0f / 720));
    p = vfma(p, r, vset(1.0f / 120));
    p = vfma(p, r, vset(1.0f / 24));
    p = vfma(p, r, vset(1.0f / 6));
    p = vfma(p, r, vset(0.5f));
    p = vfma(p, r, vset(1.0f));
    p = vfma(p, r, vset(1.0f));
    vi bits = (vi)p + ((vi)shifted << 23); /* the low bits of `shifted` hold n */
    return (vf)(bits & ~tiny);
}

INLINE float exp1(float x) { return vexp(vset(x))[0]; }

#endif
