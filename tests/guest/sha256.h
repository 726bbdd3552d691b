// SHA-256 for vsock.c: sha256(), then any number of digest(&s, bytes, n), then hex(s). Uses the CPU's SHA instructions if
// available.
#pragma once
#include <endian.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

struct sha256 {
  uint32_t state[8];
  uint64_t bytes;
  uint8_t block[64];
};

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static inline uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress(uint32_t *state, const uint8_t *p, size_t blocks) {
  for (; blocks--; p += 64) {
    uint32_t w[64], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 16; i++) memcpy(&w[i], p + 4 * i, 4), w[i] = be32toh(w[i]);
    for (int i = 16; i < 64; i++)
      w[i] = w[i - 16] + w[i - 7] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
             (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    for (int i = 0; i < 64; i++) {
      uint32_t t = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i];
      uint32_t u = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t, d = c, c = b, b = a, a = t + u;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

static void (*compress_with)(uint32_t *, const uint8_t *, size_t) = compress;

#ifdef __x86_64__
__attribute__((target("sha,sse4.1"))) static void compress_sha_ni(uint32_t *state, const uint8_t *p, size_t blocks) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i *words = (__m128i *)state, m[4];
  __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1), high = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
  for (; blocks--; p += 64) {
    __m128i abef_before = abef, cdgh_before = cdgh;
    for (int i = 0; i < 4; i++) m[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)p + i), swap);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) { // four rounds, and the four words needed sixteen rounds later
      __m128i w = _mm_add_epi32(m[i & 3], _mm_loadu_si128((const __m128i *)K + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, w);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(w, 0x0e));
      __m128i last = m[(i + 3) & 3], middle = _mm_alignr_epi8(last, m[(i + 2) & 3], 4);
      m[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(m[i & 3], m[(i + 1) & 3]), middle), last);
    }
    abef = _mm_add_epi32(abef, abef_before), cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1b), high = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(words, _mm_blend_epi16(low, high, 0xf0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(high, low, 8));
}

__attribute__((constructor)) static void choose(void) {
  unsigned a, b = 0, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1) compress_with = compress_sha_ni;
}
#endif

static struct sha256 sha256(void) {
  return (struct sha256){{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}, 0, {0}};
}

static void digest(struct sha256 *s, const uint8_t *p, size_t n) {
  size_t used = s->bytes % 64;
  s->bytes += n;
  if (used) {
    size_t take = n < 64 - used ? n : 64 - used;
    memcpy(s->block + used, p, take);
    p += take, n -= take;
    if (used + take < 64) return;
    compress_with(s->state, s->block, 1);
  }
  compress_with(s->state, p, n / 64);
  memcpy(s->block, p + n / 64 * 64, n % 64);
}

static const char *hex(struct sha256 s) {
  static char text[65];
  uint8_t end[128] = {0x80};
  uint64_t bits = htobe64(s.bytes * 8);
  size_t pad = (119 - s.bytes % 64) % 64 + 1;
  memcpy(end + pad, &bits, 8);
  digest(&s, end, pad + 8);
  for (int i = 0; i < 8; i++) sprintf(text + 8 * i, "%08x", s.state[i]);
  return text;
}
