/* A stand-in for NCCL's library: workers are processes that meet in a file which they all map; GPUs are libcuda.c's.
 *
 * It answers what nccl4py asks of it for links of the nonblocking kind, and is strict where NCCL is: a communicator
 * must not be used before it is ready, configurations begin with their magic number, a device must be current. What
 * is reduced is ready when all workers have brought the same, and stays in the air until then. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, UNHANDLED = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6, IN_PROGRESS = 7 };
enum { MOST = 16, PARTS = 64, SLOT = 1 << 22, ROOT = 16 /* and more: a broadcast from there */ };

typedef struct { char internal[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;
typedef struct {
    atomic_int linked, left, broken, brought[MOST], taken[MOST];
    char slots[MOST][SLOT];
} hall; /* where the workers of one communicator meet */
typedef struct { const char *send; char *receive; size_t count; int type, op; } part;
typedef struct { hall *at; char path[64]; int size, rank, step, error; part parts[PARTS]; int pending, stage; } comm;

static __thread int depth;
static __thread comm *grouped;
static int live, fail_link = -1, fail_step = -1;
static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

int stub_nccl_live(void) { return live; }
void stub_nccl_fail(int link, int step) { fail_link = link; fail_step = step; }

static int no_device(void) {
    void *current = NULL;
    int (*get)(void **) = (int (*)(void **))dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuCtxGetCurrent");
    return !get || get(&current) || !current;
}

int ncclGetVersion(int *v) { *v = 23203; return OK; }
const char *ncclGetErrorString(int e) {
    return e == OK ? "no error" : e == REMOTE ? "remote process exited or there was a network error" : "stand-in error";
}
const char *ncclGetLastError(comm *c) { return c && c->error ? "planted" : ""; }
int ncclGetUniqueId(unique_id *id) {
    struct timespec t; clock_gettime(CLOCK_REALTIME, &t); memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/dev/shm/nccl-stand-in-%d-%ld", getpid(), t.tv_nsec);
    return OK;
}
int ncclCommInitRankScalable(comm **c, int size, int rank, int ids, unique_id *id, config *how) {
    if (ids != 1 || rank < 0 || rank >= size || size > MOST || !how || how->magic != 0xcafebeef || how->blocking != 0)
        return INVALID_ARGUMENT;
    if (no_device()) return UNHANDLED;
    if (rank == fail_link) { fail_link = -1; return SYSTEM; }
    int file = open(id->internal, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(hall))) return SYSTEM;
    comm *made = calloc(1, sizeof *made);
    made->at = mmap(NULL, sizeof(hall), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    snprintf(made->path, sizeof made->path, "%s", id->internal);
    made->size = size; made->rank = rank; made->stage = 0; live++;
    if (atomic_fetch_add(&made->at->linked, 1) + 1 == size) unlink(made->path);
    *c = made;
    return size == 1 ? OK : IN_PROGRESS;
}

#define FOLD(T) { T *a = to; const T *b = by; for (size_t i = 0; i < n; i++) \
    a[i] = op == 0 ? a[i] + b[i] : op == 1 ? a[i] * b[i] : op == 2 ? (b[i] > a[i] ? b[i] : a[i]) : (b[i] < a[i] ? b[i] : a[i]); }
static void fold(void *to, const void *by, size_t n, int type, int op) {
    switch (type) {
        case 0: FOLD(int8_t) break; case 1: FOLD(uint8_t) break; case 2: FOLD(int32_t) break; case 3: FOLD(uint32_t) break;
        case 4: FOLD(int64_t) break; case 5: FOLD(uint64_t) break; case 7: FOLD(float) break; case 8: FOLD(double) break;
    }
}

static int all(comm *c, atomic_int *counts, int step) {
    for (int r = 0; r < c->size; r++) if (atomic_load(&counts[r]) < step) return 0;
    return 1;
}
static int go_on(comm *c) { /* the state: in progress, ready, or an error */
    if (c->error) return c->error;
    if (atomic_load(&c->at->broken)) return c->error = REMOTE;
    if (atomic_load(&c->at->linked) < c->size) return IN_PROGRESS;
    if (!c->pending) return OK;
    if (c->stage == 0) { /* everybody has taken the last step's result */
        if (!all(c, c->at->taken, c->step - 1)) return IN_PROGRESS;
        char *slot = c->at->slots[c->rank];
        for (int k = 0; k < c->pending; k++) {
            memcpy(slot, c->parts[k].send, c->parts[k].count * sizes[c->parts[k].type]);
            slot += c->parts[k].count * sizes[c->parts[k].type];
        }
        atomic_store(&c->at->brought[c->rank], c->step);
        c->stage = 1;
    }
    if (!all(c, c->at->brought, c->step)) return IN_PROGRESS;
    size_t at = 0;
    for (int k = 0; k < c->pending; k++) {
        part *p = &c->parts[k];
        size_t bytes = p->count * sizes[p->type];
        memcpy(p->receive, c->at->slots[p->op < ROOT ? 0 : p->op - ROOT] + at, bytes);
        for (int r = 1; p->op < ROOT && r < c->size; r++) fold(p->receive, c->at->slots[r] + at, p->count, p->type, p->op);
        at += bytes;
    }
    atomic_store(&c->at->taken[c->rank], c->step);
    c->pending = c->stage = 0;
    return OK;
}
int ncclCommGetAsyncError(comm *c, int *state) { *state = go_on(c); return OK; }

int ncclGroupStart(void) { depth++; return OK; }
int ncclGroupEnd(void) {
    if (!depth) return INVALID_USAGE;
    if (--depth || !grouped) return OK;
    comm *c = grouped; grouped = NULL; c->step++;
    if (c->step == fail_step) { fail_step = -1; atomic_store(&c->at->broken, 1); c->error = SYSTEM; }
    return IN_PROGRESS;
}
static int take(const void *send, void *receive, size_t count, int type, int op, comm *c, void *stream) {
    if (no_device()) return UNHANDLED;
    if (!depth || (grouped && grouped != c)) return INVALID_USAGE;
    if (!stream || type < 0 || type > 8 || type == 6) return INVALID_ARGUMENT;
    if (c->pending == PARTS || (!grouped && go_on(c) != OK)) return INVALID_ARGUMENT; /* not ready */
    part made = {send, receive, count, type, op};
    c->parts[c->pending++] = made; grouped = c;
    return OK;
}
int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, comm *c, void *stream) {
    if (op < 0 || op > 3 || (op > 1 && type > 6)) return INVALID_ARGUMENT;
    return take(send, receive, count, type, op, c, stream);
}
int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, comm *c, void *stream) {
    if (root < 0 || root >= c->size) return INVALID_ARGUMENT;
    return take(send, receive, count, type, ROOT + root, c, stream);
}
int ncclCommAbort(comm *c) {
    atomic_store(&c->at->broken, 1);
    unlink(c->path);
    munmap(c->at, sizeof(hall));
    free(c); live--;
    return OK;
}
