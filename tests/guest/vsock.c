// One end of a vsock connection, to verify and time the other end: in a guest over AF_VSOCK, on the host over the Unix sockets of
// a vsock device (see tests/guest/README.md; run by tests/vsock-guests.sh).
//
//   vsock listen PORT echo|sink|source BYTES|packets         serves any number of connections, until killed
//   vsock connect CID PORT echo BYTES                        sends BYTES, expects the same back
//   vsock connect CID PORT source BYTES                      sends BYTES, expects their number and SHA-256 back
//   vsock connect CID PORT sink BYTES                        expects BYTES of the stream, replies with number and SHA-256
//   vsock connect CID PORT packets COUNT                     sends COUNT messages (SOCK_SEQPACKET), expects "COUNT ok" back
//   vsock connect CID PORT hold N                            opens N connections, echoes 8 bytes on each, now and at end of stdin
//   vsock ping CID PORT BYTES SECONDS                        measures round trips to an echo, one at a time
//   vsock pour CID PORT SECONDS                              sends zeros for SECONDS, 64 KiB at a time
//   vsock drain PORT                                         serves one connection: reads it to its end, prints the rate
//   vsock wait-reset CID PORT                                prints "connected", blocks in a read, prints its result
//   vsock cid | digest BYTES | layout COUNT                  prints the local CID; digests of the stream and of the messages
//
// Options, at the end: --connections N (echo, source, sink: N concurrent connections, BYTES each); --no-half-close (never shut
// down one direction: for devices that then close both); --background (listen: return once it listens); --seqpacket.
// A CID that contains a slash is the path of a Unix socket, to which "CONNECT PORT" is sent for the guest's port (not for PORT
// "-"); likewise a PORT to listen on. A client prints one line, "ok …" or "FAILED …".
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <time.h>
#include <linux/vm_sockets.h>
#include "serve.h"

static bool background;
static int connections = 1;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static uint64_t number(const char *text, uint64_t least) {
  char *end;
  uint64_t n = strtoull(text ? text : "", &end, 10);
  if (!text || *end || end == text || *text == '-' || n < least) die("expected a number of at least %" PRIu64 ", got '%s'", least, text ? text : "");
  return n;
}

// --- sockets -------------------------------------------------------------------------------------------------------------

union address {
  struct sockaddr any;
  struct sockaddr_vm vm;
  struct sockaddr_un un;
};

static int new_socket(const char *cid, const char *port, union address *to, socklen_t *length) {
  memset(to, 0, sizeof *to);
  if (strchr(cid, '/')) {
    to->un.sun_family = AF_UNIX;
    *length = sizeof to->un;
    if (strlen(cid) >= sizeof to->un.sun_path) die("the path %s is too long for a socket", cid);
    strcpy(to->un.sun_path, cid);
  } else {
    to->vm.svm_family = AF_VSOCK;
    to->vm.svm_cid = number(cid, 0);
    to->vm.svm_port = number(port, 0);
    *length = sizeof to->vm;
  }
  int fd = socket(to->any.sa_family, socket_type | SOCK_CLOEXEC, 0);
  if (fd < 0) die("socket: %s", strerror(errno));
  return fd;
}

static int dial(const char *cid, const char *port) {
  union address to;
  socklen_t length;
  int fd = new_socket(cid, port, &to, &length), n = 0;
  if (connect(fd, &to.any, length)) die("connect to %s port %s: %s", cid, port, strerror(errno));
  if (to.any.sa_family == AF_UNIX && strcmp(port, "-")) {
    char answer[32];
    dprintf(fd, "CONNECT %s\n", port);
    do // byte by byte, as what follows belongs to the connection
      if (read(fd, answer + n, 1) != 1) die("CONNECT %s: expected 'OK <n>', got the end", port);
    while (answer[n++] != '\n' && n < 31);
    answer[n] = 0;
    if (strncmp(answer, "OK ", 3)) die("CONNECT %s: expected 'OK <n>', got '%s'", port, answer);
  }
  return fd;
}

static bool whole(int fd, uint8_t *buffer, size_t n, bool out) { // sends or receives exactly n bytes; errno 0: end of file
  for (size_t at = 0; at < n;) {
    ssize_t done = out ? send(fd, buffer + at, n - at, MSG_NOSIGNAL) : recv(fd, buffer + at, n - at, 0);
    if (done <= 0) {
      if (!done) errno = 0;
      return false;
    }
    at += done;
  }
  return true;
}


// --- commands ------------------------------------------------------------------------------------------------------------

static int listener(const char *port) { // says so, and goes to the background if it should
  union address at;
  socklen_t length;
  int fd = new_socket(strchr(port, '/') ? port : "4294967295", port, &at, &length); // VMADDR_CID_ANY
  if (at.any.sa_family == AF_UNIX) unlink(port);
  if (bind(fd, &at.any, length) || listen(fd, 1024)) die("listen on %s: %s", port, reason());
  printf("listening %s\n", port);
  if (background) {
    pid_t pid = fork();
    if (pid) exit(pid < 0);
    setsid();
  }
  return fd;
}

static int listen_on(const char *port, const char *what, const char *bytes) {
  enum role role = !strcmp(what, "echo") ? ECHO : !strcmp(what, "sink") ? SINK : !strcmp(what, "source") ? SOURCE : PACKETS;
  if (role == PACKETS && strcmp(what, "packets")) die("listen: expected echo, sink, source or packets, got '%s'", what);
  uint64_t total = role == SOURCE || bytes ? number(bytes, 1) : 0;
  if (role == PACKETS) socket_type = SOCK_SEQPACKET;
  int fd = listener(port);
  fcntl(fd, F_SETFL, O_NONBLOCK); // who asked may be gone before accept()
  serve(fd, role, total);
  return 0;
}

static int transfer(const char *cid, const char *port, const char *what, uint64_t total) {
  enum role role = !strcmp(what, "echo") ? ECHO_CLIENT : !strcmp(what, "sink") ? SINK_CLIENT : SOURCE_CLIENT;
  double begun = now();
  for (int i = 0; i < connections; i++) add(dial(cid, port), role, total);
  serve(-1, role, total);
  if (failed) die("%s: %d of %d connections", what, failed, connections);
  double seconds = now() - begun, all = (double)total * connections;
  printf("ok %s %d connections %.0f bytes %.3f seconds %.1f Mb/s", what, connections, all, seconds, all * 8e-6 / seconds);
  if (connections == 1 && role != ECHO_CLIENT) printf(" sha256 %s", last_digest);
  putchar('\n');
  return 0;
}

static int packets(const char *cid, const char *port, uint64_t wanted_count) {
  struct stream content;
  uint64_t bytes = 0;
  char text[200];
  ssize_t n;
  socket_type = SOCK_SEQPACKET;
  int fd = dial(cid, port);
  double begun = now();
  for (uint64_t i = 0; i < wanted_count; i++) {
    size_t length = message(i, &content);
    give(&content, buffer, length);
    if (send(fd, buffer, length, MSG_NOSIGNAL | (i % 16 == 15 ? MSG_EOR : 0)) != (ssize_t)length) die("send of message %" PRIu64 ": %s", i, reason());
    bytes += length;
  }
  n = sprintf(text, "end %" PRIu64, wanted_count);
  if (send(fd, text, n, MSG_NOSIGNAL) != n) die("send of the end: %s", reason());
  errno = 0;
  if ((n = recv(fd, text, sizeof text - 1, 0)) <= 0) die("expected an answer, got %s", reason());
  text[n] = 0;
  double seconds = now() - begun;
  if (strtoull(text, NULL, 10) != wanted_count || !strstr(text, " ok")) die("packets: %s", text);
  printf("ok packets %" PRIu64 " messages %" PRIu64 " bytes %.3f seconds %.0f messages/s\n", wanted_count, bytes, seconds, wanted_count / seconds);
  return 0;
}

static void echo_once(int fd, uint64_t seed, uint8_t *sent, uint8_t *got, size_t n) {
  struct stream s = stream(seed);
  give(&s, sent, n);
  errno = 0;
  if (!whole(fd, sent, n, true) || !whole(fd, got, n, false)) die("echo of %zu bytes on connection %" PRIu64 ": %s", n, seed, reason());
  if (memcmp(sent, got, n)) die("echo of %zu bytes on connection %" PRIu64 ": it is not what was sent", n, seed);
}

static int hold(const char *cid, const char *port, int n) {
  int *fds = calloc(n, sizeof *fds);
  uint8_t sent[8], got[8], byte;
  double begun = now();
  for (int i = 0; i < n; i++) echo_once(fds[i] = dial(cid, port), i + 1, sent, got, 8);
  printf("holding %d connections, opened in %.3f seconds\n", n, now() - begun);
  while (read(0, &byte, 1) > 0) {}
  for (int i = 0; i < n; i++) echo_once(fds[i], n + i + 1, sent, got, 8);
  printf("ok hold %d connections %.3f seconds\n", n, now() - begun);
  return 0;
}

static int ascending(const void *a, const void *b) { return (*(float *)a > *(float *)b) - (*(float *)a < *(float *)b); }

static int ping(const char *cid, const char *port, size_t n, double seconds) {
  int fd = dial(cid, port);
  uint8_t *sent = malloc(n), *got = malloc(n);
  float *us = NULL;
  double begun = now(), before = begun, after, sum = 0;
  size_t done = 0;
  if (!sent || !got) die("out of memory");
  for (; before - begun < seconds; before = after) {
    if (!(done & (done - 1)) && !(us = realloc(us, (done ? 2 * done : 1) * sizeof *us))) die("out of memory");
    echo_once(fd, done + 1, sent, got, n);
    after = now();
    sum += us[done++] = (after - before) * 1e6;
  }
  qsort(us, done, sizeof *us, ascending);
  printf("ok ping %zu round trips of %zu bytes, mean %.1f p1 %.1f p50 %.1f p99 %.1f us\n", done, n, sum / done, us[done / 100],
         us[done / 2], us[done * 99 / 100]);
  return 0;
}

static int pour(const char *cid, const char *port, double seconds) {
  int fd = dial(cid, port);
  double begun = now();
  memset(buffer, 0, CHUNK);
  while (now() - begun < seconds)
    if (!whole(fd, buffer, CHUNK, true)) die("send: %s", reason());
  return 0;
}

static int drain(const char *port) {
  int fd = accept(listener(port), NULL, NULL);
  double begun = now(), bytes = 0;
  ssize_t n;
  if (fd < 0) die("accept: %s", reason());
  while ((n = recv(fd, buffer, CHUNK, 0)) > 0) bytes += n;
  double seconds = now() - begun;
  if (n < 0 || bytes < CHUNK) die("recv after %.0f bytes: %s", bytes, reason());
  printf("ok drain %.0f bytes %.3f seconds %.2f Gb/s\n", bytes, seconds, bytes * 8e-9 / seconds);
  return 0;
}

static int wait_reset(const char *cid, const char *port) {
  uint8_t byte;
  int fd = dial(cid, port);
  printf("connected\n");
  errno = 0;
  if (read(fd, &byte, 1) > 0) die("expected a reset or the end, got a byte");
  printf("reset %s\n", reason());
  return 0;
}

static int local_cid(void) {
  unsigned cid;
  int fd = open("/dev/vsock", O_RDONLY);
  if (fd < 0 || ioctl(fd, IOCTL_VM_SOCKETS_GET_LOCAL_CID, &cid)) die("/dev/vsock: %s", reason());
  printf("%u\n", cid);
  return 0;
}

static int stream_digest(uint64_t bytes) {
  struct stream s = stream(1);
  struct sha256 sha = sha256();
  for (uint64_t n; bytes; bytes -= n) {
    n = bytes < CHUNK ? bytes : CHUNK;
    give(&s, buffer, n);
    digest(&sha, buffer, n);
  }
  printf("%" PRIu64 " %s\n", sha.bytes, hex(sha));
  return 0;
}

static int layout(uint64_t n) { // "LENGTH SHA-256" of the first n messages, one per line
  struct stream content;
  for (uint64_t i = 0; i < n; i++) {
    struct sha256 sha = sha256();
    size_t length = message(i, &content);
    give(&content, buffer, length);
    digest(&sha, buffer, length);
    printf("%zu %s\n", length, hex(sha));
  }
  return 0;
}

static void options(char **argv) { // takes them off the end
  for (char **word = argv; *word; word++) {
    if (strncmp(*word, "--", 2)) continue;
    if (!strcmp(*word, "--connections")) connections = number(word[1], 1), *word++ = NULL;
    else if (!strcmp(*word, "--no-half-close")) half_close = false;
    else if (!strcmp(*word, "--background")) background = true;
    else if (!strcmp(*word, "--seqpacket")) socket_type = SOCK_SEQPACKET;
    else die("no option %s", *word);
    *word = NULL;
  }
}

int main(int argc, char **argv) {
  struct rlimit files;
  char *a[8] = {0};
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (!getrlimit(RLIMIT_NOFILE, &files)) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
  options(argv + 1);
  for (int i = 1; i < argc && i < 7 && argv[i]; i++) a[i - 1] = argv[i];
  const char *command = a[0] ? a[0] : "", *what = a[3] ? a[3] : "";
  if (!strcmp(command, "cid")) return local_cid();
  if (!strcmp(command, "digest")) return stream_digest(number(a[1], 0));
  if (!strcmp(command, "layout")) return layout(number(a[1], 1));
  if (!strcmp(command, "listen") && a[2]) return listen_on(a[1], a[2], a[3]);
  if (!strcmp(command, "connect")) {
    if (!strcmp(what, "echo") || !strcmp(what, "sink") || !strcmp(what, "source")) return transfer(a[1], a[2], what, number(a[4], 1));
    if (!strcmp(what, "packets")) return packets(a[1], a[2], number(a[4], 1));
    if (!strcmp(what, "hold")) return hold(a[1], a[2], number(a[4], 1));
  }
  if (!strcmp(command, "ping") && a[2]) return ping(a[1], a[2], number(a[3], 1), number(a[4], 1));
  if (!strcmp(command, "pour") && a[2]) return pour(a[1], a[2], number(a[3], 1));
  if (!strcmp(command, "drain") && a[1]) return drain(a[1]);
  if (!strcmp(command, "wait-reset") && a[2]) return wait_reset(a[1], a[2]);
  die("unknown command: the comment in tests/guest/vsock.c tells them");
}
