// The data sent: defined by formulas, so that a peer in any language can reproduce it.
//
// The stream of a seed: xorshift64*, s = seed * 0x9e3779b97f4a7c15; each step s ^= s >> 12, s ^= s << 25, s ^= s >> 27 gives
// the 8 bytes, little endian, of s * 0x2545f4914f6cdd1d. Listeners use seed 1; the i-th of N connections (from 1) uses seed i.
//
// Message n (from 0): w = first word of the stream of seed n + 1; the content is what follows w. Its length is 131072 if
// n % 128 = 127, else 65536 if n % 64 = 63, else 1 + w % 16 if n % 8 = 0, else 1 + w % 4096. MSG_EOR if n % 16 = 15.
// If n % 32 = 5 and it has 32 bytes or more, it is read into a buffer one byte too small. The last message is "end COUNT".
#pragma once
#include <endian.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

enum { LONGEST = 131072 }; // maximum length of a message, in bytes

struct stream {
  uint64_t state, word;
  unsigned left; // bytes of `word` not used yet
};

static uint64_t step(struct stream *s) {
  uint64_t x = s->state;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  s->state = x;
  return x * 0x2545f4914f6cdd1d;
}

static struct stream stream(uint64_t seed) { return (struct stream){.state = seed * 0x9e3779b97f4a7c15}; }

static void give(struct stream *s, uint8_t *to, size_t n) {
  for (; n && s->left; n--, s->left--, s->word >>= 8) *to++ = s->word;
  for (; n >= 8; n -= 8, to += 8) {
    uint64_t word = htole64(step(s));
    memcpy(to, &word, 8);
  }
  if (n) {
    s->word = step(s);
    s->left = 8;
    give(s, to, n);
  }
}

static ssize_t wrong(struct stream *s, const uint8_t *got, size_t n) { // the first offset that differs from the stream's next n bytes, or -1
  static uint8_t want[LONGEST];
  give(s, want, n);
  if (!memcmp(want, got, n)) return -1;
  for (size_t i = 0;; i++)
    if (want[i] != got[i]) return i;
}

static size_t message(uint64_t n, struct stream *content) { // returns the length of message n; its content is what follows in the stream
  *content = stream(n + 1);
  uint64_t w = step(content);
  return n % 128 == 127 ? LONGEST : n % 64 == 63 ? 65536 : 1 + w % (n % 8 ? 4096 : 16);
}
