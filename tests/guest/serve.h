// The connections of vsock.c: many non-blocking connections in one process. serve() is the event loop; add() adds a connection.
// (Sends on SOCK_SEQPACKET block: Linux may have sent half a message when it returns EAGAIN.)
#pragma once
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "sha256.h"
#include "stream.h"

enum { CHUNK = 65536, WINDOW = 65536 };
enum role { ECHO, SINK, SOURCE, PACKETS, ECHO_CLIENT, SINK_CLIENT, SOURCE_CLIENT };

static int socket_type = SOCK_STREAM;
static bool half_close = true;

static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  printf("FAILED ");
  vprintf(format, list);
  va_end(list);
  putchar('\n');
  exit(1);
}

static const char *reason(void) { return errno ? strerrorname_np(errno) : "end of file"; }

struct conn {
  int fd, number; // index among the connections of a client, from 1
  enum role role;
  bool eof, shut, done;
  char *fault;
  uint64_t total, sent, received; // in bytes; in messages for packets
  struct stream out, in;
  struct sha256 sha;
  uint8_t *pending; // data to be sent, from `at` to `end`
  size_t at, end;
  char answer[160];
};

static uint8_t buffer[2 * LONGEST];

__attribute__((format(printf, 2, 3))) static void fail(struct conn *c, const char *format, ...) {
  va_list list;
  if (c->fault) return;
  va_start(list, format);
  if (vasprintf(&c->fault, format, list) < 0) die("out of memory");
  va_end(list);
  c->done = true;
}

static void put(struct conn *c, const void *data, size_t n) { // makes data pending (nothing else is); NULL: n bytes of the stream
  if (!(c->pending = malloc(n))) die("out of memory");
  if (data) memcpy(c->pending, data, n);
  else give(&c->out, c->pending, n);
  c->at = 0, c->end = n;
}

static bool sender(const struct conn *c) { return c->role == SOURCE || c->role == SOURCE_CLIENT || c->role == ECHO_CLIENT; }

static void check_packet(struct conn *c) {
  struct iovec to = {buffer, sizeof buffer};
  struct msghdr header = {.msg_iov = &to, .msg_iovlen = 1};
  struct stream content;
  size_t want = message(c->received, &content);
  bool cut = c->received % 32 == 5 && want >= 32, eor = c->received % 16 == 15;
  if (cut) to.iov_len = --want;
  ssize_t n = recvmsg(c->fd, &header, MSG_DONTWAIT), at;
  if (n < 0 && errno != EAGAIN) return fail(c, "recvmsg: %s", reason());
  if (n < 0) return;
  if (n == 0) {
    c->eof = true;
    return;
  }
  bool truncated = header.msg_flags & MSG_TRUNC, got_eor = header.msg_flags & MSG_EOR;
  if (n > 4 && n < 31 && !memcmp(buffer, "end ", 4)) {
    uint64_t count;
    buffer[n] = 0;
    count = strtoull((char *)buffer + 4, NULL, 10);
    if (!c->answer[0] && count != c->received) sprintf(c->answer, "of %" PRIu64 " messages %" PRIu64 " came", count, c->received);
    if (!c->answer[0]) sprintf(c->answer, "%" PRIu64 " ok", count);
    return put(c, c->answer, strlen(c->answer));
  }
  uint64_t i = c->received++;
  if (c->answer[0]) return; // keep the first error
  if ((size_t)n != want) sprintf(c->answer, "message %" PRIu64 ": expected %zu bytes, got %zd", i, want, n);
  else if ((at = wrong(&content, buffer, n)) >= 0) sprintf(c->answer, "message %" PRIu64 ": byte %zd of %zd is wrong", i, at, n);
  else if (truncated != cut) sprintf(c->answer, "message %" PRIu64 ": expected MSG_TRUNC %d, got %d", i, cut, truncated);
  else if (got_eor != eor) sprintf(c->answer, "message %" PRIu64 ": expected MSG_EOR %d, got %d", i, eor, got_eor);
}

static void receive(struct conn *c) {
  if (c->role == PACKETS) return check_packet(c);
  ssize_t n = recv(c->fd, buffer, CHUNK, MSG_DONTWAIT), at;
  if (n < 0) {
    if (errno != EAGAIN) fail(c, "recv after %" PRIu64 " bytes: %s", c->received, reason());
    return;
  }
  if (n == 0) {
    c->eof = true;
    return;
  }
  if (c->role == SOURCE || c->role == SOURCE_CLIENT) {
    size_t have = strlen(c->answer);
    if (have + n >= sizeof c->answer) return fail(c, "the answer is longer than %zu bytes", sizeof c->answer);
    memcpy(c->answer + have, buffer, n);
    return;
  }
  if (c->role == ECHO) put(c, buffer, n);
  if (c->role == SINK || c->role == SINK_CLIENT) digest(&c->sha, buffer, n);
  if (c->role == ECHO_CLIENT || c->role == SINK_CLIENT) {
    if (c->received + n > c->total) return fail(c, "expected %" PRIu64 " bytes, got %" PRIu64 " and more", c->total, c->received + n);
    if ((at = wrong(&c->in, buffer, n)) >= 0) return fail(c, "byte %" PRIu64 " of %" PRIu64 " is wrong", c->received + at, c->total);
  }
  c->received += n;
}

static void flush(struct conn *c) { // sends pending data until the socket is full
  int flags = MSG_NOSIGNAL | (socket_type == SOCK_STREAM ? MSG_DONTWAIT : 0);
  ssize_t n = send(c->fd, c->pending + c->at, c->end - c->at, flags);
  if (n < 0) {
    if (errno != EAGAIN) fail(c, "send after %" PRIu64 " bytes: %s", c->sent, reason());
    return;
  }
  c->at += n;
  c->sent += n;
  if (c->at == c->end) {
    free(c->pending);
    c->pending = NULL;
  }
}

static void judge_source(struct conn *c) { // checks the reply of a sink, if there is one or must be one
  char want[160], ok[32];
  sprintf(want, "%" PRIu64 " %s\n", c->total, hex(c->sha));
  sprintf(ok, "%" PRIu64 " ok\n", c->total); // a sink that knows the stream may have compared it all
  if (c->answer[0] || c->role == SOURCE_CLIENT)
    if (strcmp(c->answer, want) && strcmp(c->answer, ok)) fail(c, "expected the answer '%s', got '%s'", want, c->answer);
  c->done = true;
}

static void finish_sink(struct conn *c) {
  if (c->role == SINK_CLIENT && c->received != c->total) return fail(c, "expected %" PRIu64 " bytes, the end came after %" PRIu64, c->total, c->received);
  sprintf(c->answer, "%" PRIu64 " %s\n", c->received, hex(c->sha));
  put(c, c->answer, strlen(c->answer));
}

static void advance(struct conn *c) { // next steps after data was sent or received
  if (c->done || c->pending) return;
  if (sender(c) && c->sent < c->total) {
    uint64_t n = c->total - c->sent, window = socket_type == SOCK_STREAM ? CHUNK : CHUNK / 4;
    if (c->eof) return fail(c, "the end came after %" PRIu64 " of %" PRIu64 " bytes were sent", c->sent, c->total);
    if (c->role == ECHO_CLIENT && socket_type != SOCK_STREAM && c->sent - c->received >= WINDOW) return;
    put(c, NULL, n < window ? n : window);
    if (!c->done && c->role != ECHO_CLIENT) digest(&c->sha, c->pending, c->end);
    return;
  }
  if (sender(c) && !c->shut && half_close) {
    if (shutdown(c->fd, SHUT_WR)) return fail(c, "shutdown: %s", reason());
    c->shut = true;
  }
  bool enough = c->eof || !half_close;
  switch (c->role) {
    case ECHO: c->done = c->eof; break;
    case PACKETS: c->done = c->eof; break;
    case ECHO_CLIENT:
      if (c->received == c->total) c->done = enough;
      else if (c->eof) fail(c, "the end came after %" PRIu64 " of %" PRIu64 " bytes", c->received, c->total);
      break;
    case SINK:
    case SINK_CLIENT:
      if (c->answer[0]) c->done = true;
      else if (c->eof || (!half_close && c->total && c->received == c->total)) finish_sink(c);
      break;
    case SOURCE:
    case SOURCE_CLIENT:
      if (c->eof || (!half_close && strchr(c->answer, '\n'))) judge_source(c);
      break;
  }
}

static short wanted(const struct conn *c) { // an echo reads more only when everything read has been sent
  bool full = c->pending && (c->role == ECHO || c->role == PACKETS);
  return (c->pending ? POLLOUT : 0) | (full || c->eof ? 0 : POLLIN);
}

static struct conn **conns;
static int count, failed;
static char last_digest[65];

static void add(int fd, enum role role, uint64_t total) {
  if (!(conns = realloc(conns, (count + 1) * sizeof *conns))) die("out of memory");
  struct conn *c = calloc(1, sizeof *c);
  if (!c) die("out of memory");
  c->fd = fd, c->role = role, c->total = total;
  c->number = role >= ECHO_CLIENT ? count + 1 : 1;
  c->out = c->in = stream(c->number);
  c->sha = sha256();
  conns[count++] = c;
}

static void drop_done(void) {
  for (int i = 0; i < count; i++) {
    struct conn *c = conns[i];
    if (!c->done) continue;
    if (c->fault) printf("FAILED connection %d: %s\n", c->number, c->fault), failed++;
    strcpy(last_digest, hex(c->sha));
    close(c->fd);
    free(c->pending);
    free(c->fault);
    free(c);
    conns[i--] = conns[--count];
  }
}

static void serve(int listener, enum role role, uint64_t total) { // runs forever; without a listener (-1) until all connections are closed
  struct pollfd *polls = NULL;
  for (;;) {
    for (int i = 0; i < count; i++) advance(conns[i]);
    drop_done();
    if (!count && listener < 0) break;
    int polled = count, fd;
    if (!(polls = realloc(polls, (polled + 1) * sizeof *polls))) die("out of memory");
    for (int i = 0; i < polled; i++) polls[i] = (struct pollfd){conns[i]->fd, wanted(conns[i]), 0};
    polls[polled] = (struct pollfd){listener, POLLIN, 0};
    if (poll(polls, polled + 1, -1) < 0) die("poll: %s", reason());
    for (int i = 0; i < polled; i++) { // errors and hang-ups show when the wanted operation is tried
      short events = polls[i].revents & (POLLERR | POLLHUP) ? wanted(conns[i]) : polls[i].revents;
      if (events & POLLOUT) flush(conns[i]);
      if (events & POLLIN && !conns[i]->done) receive(conns[i]);
    }
    if (polls[polled].revents && (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) add(fd, role, total);
  }
  free(polls);
}
